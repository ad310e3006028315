// Replaces CUTLASS's <cute/arch/copy_sm75.hpp>: ldmatrix, with and without transposition.
#pragma once

#include <cute/arch/copy.hpp>

namespace cute {

template <int kMatrices, bool kTransposed>
struct SimLdmatrix {
    using SRegisters = uint128_t[1];
    using DRegisters = uint32_t[kMatrices];

    template <class... Registers>
    static void copy(uint128_t const &smem_src, Registers &...dst) {
        static_assert(sizeof...(Registers) == kMatrices);
        uint32_t registers[kMatrices];
        sim::ldmatrix(&smem_src, registers, kMatrices, kTransposed);
        int i = 0;
        ((dst = registers[i++]), ...);
    }
};

struct SM75_U32x1_LDSM_N : SimLdmatrix<1, false> {};
struct SM75_U32x2_LDSM_N : SimLdmatrix<2, false> {};
struct SM75_U32x4_LDSM_N : SimLdmatrix<4, false> {};
struct SM75_U16x2_LDSM_T : SimLdmatrix<1, true> {};
struct SM75_U16x4_LDSM_T : SimLdmatrix<2, true> {};
struct SM75_U16x8_LDSM_T : SimLdmatrix<4, true> {};

struct SM75_U32x1_MOVM_T {
    using SRegisters = uint32_t[1];
    using DRegisters = uint32_t[1];
    static void copy(uint32_t const &, uint32_t &) { sim::not_covered("movmatrix"); }
};

}  // namespace cute
