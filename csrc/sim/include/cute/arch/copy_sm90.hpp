// Wraps CUTLASS's <cute/arch/copy_sm90.hpp>: stmatrix, with and without transposition.
#pragma once

#define SM90_U32x1_STSM_N Cutlass_SM90_U32x1_STSM_N
#define SM90_U32x2_STSM_N Cutlass_SM90_U32x2_STSM_N
#define SM90_U32x4_STSM_N Cutlass_SM90_U32x4_STSM_N
#define SM90_U16x2_STSM_T Cutlass_SM90_U16x2_STSM_T
#define SM90_U16x4_STSM_T Cutlass_SM90_U16x4_STSM_T
#define SM90_U16x8_STSM_T Cutlass_SM90_U16x8_STSM_T
#include_next <cute/arch/copy_sm90.hpp>
#undef SM90_U32x1_STSM_N
#undef SM90_U32x2_STSM_N
#undef SM90_U32x4_STSM_N
#undef SM90_U16x2_STSM_T
#undef SM90_U16x4_STSM_T
#undef SM90_U16x8_STSM_T

#include <sim/runtime.h>

namespace cute {

template <int kMatrices, bool kTransposed>
struct SimStmatrix {
    using SRegisters = uint32_t[kMatrices];
    using DRegisters = uint128_t[1];

    static void copy(uint32_t const &a, uint128_t &row) { store(row, a); }
    static void copy(uint32_t const &a, uint32_t const &b, uint128_t &row) { store(row, a, b); }
    static void copy(uint32_t const &a, uint32_t const &b, uint32_t const &c, uint32_t const &d,
                     uint128_t &row) {
        store(row, a, b, c, d);
    }

  private:
    template <class... Registers>
    static void store(uint128_t &row, Registers... registers) {
        uint32_t const all[] = {registers...};
        sim::stmatrix(&row, all, sizeof...(Registers), kTransposed);
    }
};

struct SM90_U32x1_STSM_N : SimStmatrix<1, false> {};
struct SM90_U32x2_STSM_N : SimStmatrix<2, false> {};
struct SM90_U32x4_STSM_N : SimStmatrix<4, false> {};
struct SM90_U16x2_STSM_T : SimStmatrix<1, true> {};
struct SM90_U16x4_STSM_T : SimStmatrix<2, true> {};
struct SM90_U16x8_STSM_T : SimStmatrix<4, true> {};

}  // namespace cute
