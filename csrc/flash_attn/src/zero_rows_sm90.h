// Zeros in rows of a buffer behind the end of a sequence, where loads bring other rows.
#pragma once

#include <arch_sm90.h>

#include <cute/tensor.hpp>

namespace flash {

using namespace cute;

// Zeros in rows [begin, end) of a buffer, for wgmma to read after a barrier of `threads` threads,
// of which this one is `index`.
template <int kHeadDim, class Element, class SmemLayout>
CUTE_DEVICE void zero_rows(Element *smem, SmemLayout const &layout, int begin, int end, int index,
                           int threads) {
    static_assert(kHeadDim % 8 == 0 && sizeof(Element) == 2);
    Tensor sX =
        as_position_independent_swizzle_tensor(make_tensor(make_smem_ptr(smem), layout));  // (N, d)
    constexpr int kPieces = kHeadDim / 8;  // of 16 bytes
    CUTE_NO_UNROLL
    for (int i = begin * kPieces + index; i < end * kPieces; i += threads) {
        *reinterpret_cast<uint4 *>(&sX(i / kPieces, i % kPieces * 8)) = uint4{};
    }
    sm90::fence_async_proxy();
}

}  // namespace flash
