// Conversions of fp16 and bf16 to fp32.
#pragma once

#include <bit>
#include <cstdint>

namespace sim {

// Branch-free, so that the compiler vectorises the loops that call it. Scaling by 2^112 rebiases
// the exponent and normalises subnormals; infinities and NaNs get their exponent back.
inline float from_fp16(uint16_t h) {
    uint32_t const magnitude = uint32_t(h & 0x7fff) << 13;
    float const scaled = std::bit_cast<float>(magnitude) * std::bit_cast<float>(0x77800000u);
    uint32_t const special = (h & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | special |
                                uint32_t(h & 0x8000) << 16);
}
inline float from_bf16(uint16_t b) { return std::bit_cast<float>(uint32_t(b) << 16); }

}  // namespace sim
