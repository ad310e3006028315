// Wraps CUTLASS's <cute/arch/mma_sm80.hpp>: the MMAs with fp32 accumulators get host bodies. The
// others keep CUTLASS's, which end in "not covered".
#pragma once

#define SM80_16x8x8_F32F16F16F32_TN Cutlass_16x8x8_F32F16F16F32_TN
#define SM80_16x8x16_F32F16F16F32_TN Cutlass_16x8x16_F32F16F16F32_TN
#define SM80_16x8x8_F32BF16BF16F32_TN Cutlass_16x8x8_F32BF16BF16F32_TN
#define SM80_16x8x16_F32BF16BF16F32_TN Cutlass_16x8x16_F32BF16BF16F32_TN
#include_next <cute/arch/mma_sm80.hpp>
#undef SM80_16x8x8_F32F16F16F32_TN
#undef SM80_16x8x16_F32F16F16F32_TN
#undef SM80_16x8x8_F32BF16BF16F32_TN
#undef SM80_16x8x16_F32BF16BF16F32_TN

namespace cute {

template <sim::MmaInput kInput>
struct SimMma16x8x8 {
    using DRegisters = float[4];
    using ARegisters = uint32_t[2];
    using BRegisters = uint32_t[1];
    using CRegisters = float[4];

    static void fma(float &d0, float &d1, float &d2, float &d3, uint32_t const &a0,
                    uint32_t const &a1, uint32_t const &b0, float const &c0, float const &c1,
                    float const &c2, float const &c3) {
        uint32_t const a[2] = {a0, a1};
        float acc[4] = {c0, c1, c2, c3};
        sim::mma_m16n8(kInput, 1, acc, a, &b0);
        d0 = acc[0], d1 = acc[1], d2 = acc[2], d3 = acc[3];
    }
};

template <sim::MmaInput kInput>
struct SimMma16x8x16 {
    using DRegisters = float[4];
    using ARegisters = uint32_t[4];
    using BRegisters = uint32_t[2];
    using CRegisters = float[4];

    static void fma(float &d0, float &d1, float &d2, float &d3, uint32_t const &a0,
                    uint32_t const &a1, uint32_t const &a2, uint32_t const &a3, uint32_t const &b0,
                    uint32_t const &b1, float const &c0, float const &c1, float const &c2,
                    float const &c3) {
        uint32_t const a[4] = {a0, a1, a2, a3};
        uint32_t const b[2] = {b0, b1};
        float acc[4] = {c0, c1, c2, c3};
        sim::mma_m16n8(kInput, 2, acc, a, b);
        d0 = acc[0], d1 = acc[1], d2 = acc[2], d3 = acc[3];
    }
};

struct SM80_16x8x8_F32F16F16F32_TN : SimMma16x8x8<sim::MmaInput::fp16> {};
struct SM80_16x8x16_F32F16F16F32_TN : SimMma16x8x16<sim::MmaInput::fp16> {};
struct SM80_16x8x8_F32BF16BF16F32_TN : SimMma16x8x8<sim::MmaInput::bf16> {};
struct SM80_16x8x16_F32BF16BF16F32_TN : SimMma16x8x16<sim::MmaInput::bf16> {};

}  // namespace cute
