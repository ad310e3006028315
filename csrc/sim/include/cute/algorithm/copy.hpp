// Wraps CUTLASS's <cute/algorithm/copy.hpp>: vectorised copies that CuTe writes as plain
// assignments, without UniversalCopy, report their accesses too.
#pragma once

#include_next <cute/algorithm/copy.hpp>

namespace cute {

// More specialised than CUTLASS's copy_if, so overload resolution chooses it wherever the predicate
// is constantly true.
template <class SrcEngine, class SrcLayout, class DstEngine, class DstLayout>
void copy_if(constant_fn<true_type> const &, Tensor<SrcEngine, SrcLayout> const &src,
             Tensor<DstEngine, DstLayout> &dst) {
    using SrcType = typename SrcEngine::value_type;
    using DstType = typename DstEngine::value_type;
    for (int i = 0; i < size(dst); ++i) {
        if constexpr (is_smem<SrcEngine>::value || is_gmem<SrcEngine>::value) {
            sim::note_access(&src(i), sizeof(SrcType), false);
        }
        if constexpr (is_smem<DstEngine>::value || is_gmem<DstEngine>::value) {
            sim::note_access(&dst(i), sizeof(DstType), true);
        }
        dst(i) = static_cast<DstType>(static_cast<SrcType>(src(i)));
    }
}

}  // namespace cute
