// Replaces CUTLASS's <cute/arch/copy.hpp> and defines the same names. UniversalCopy, which CuTe's
// vectorised copies use, reports its accesses to the checks and counters.
#pragma once

#include <cute/arch/util.hpp>
#include <cute/config.hpp>
#include <cute/numeric/numeric_types.hpp>
#include <type_traits>

namespace cute {

template <class S, class D = S>
struct UniversalCopy {
    using SRegisters = S[1];
    using DRegisters = D[1];
    static_assert(sizeof_bits_v<S> >= 8 && sizeof_bits_v<D> >= 8);

    static constexpr void copy(S const &src, D &dst) {
        if (!std::is_constant_evaluated()) {
            sim::note_access(&src, sizeof(S), false);
            sim::note_access(&dst, sizeof(D), true);
        }
        dst = src;
    }
};

template <int MaxVecBits = 128>
struct AutoVectorizingCopyWithAssumedAlignment : UniversalCopy<uint_bit_t<MaxVecBits>> {
    static_assert(MaxVecBits >= 8 && MaxVecBits <= 128 && (MaxVecBits & (MaxVecBits - 1)) == 0);
};
using AutoVectorizingCopy = AutoVectorizingCopyWithAssumedAlignment<128>;
using DefaultCopy = AutoVectorizingCopyWithAssumedAlignment<8>;

struct AutoCopyAsync {};

// A cache hint: no effect on results.
inline void prefetch(void const *) {}

}  // namespace cute
