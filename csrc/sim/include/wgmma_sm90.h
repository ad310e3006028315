// Stands before csrc/flash_attn/src/wgmma_sm90.h: the same functions, handed to the simulator.
#pragma once

#include <cutlass/numeric_types.h>
#include <sim/runtime_sm90.h>

#include <cstdint>
#include <cute/config.hpp>
#include <type_traits>

namespace flash::sm90 {

inline void wgmma_fence() { sim::wgmma_fence(); }
inline void wgmma_commit() { sim::wgmma_commit(); }

template <int kPending>
void wgmma_wait() {
    sim::wgmma_wait(kPending);
}

// Binds nvcc only: here the runtime keeps the addresses of the registers in flight, so that no
// compiler can hold their values elsewhere.
inline void pin_register(float &) {}
inline void pin_register(uint32_t &) {}

template <class Element, int N, bool kTransposeB>
struct Wgmma {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256);
    static_assert(std::is_same_v<Element, cutlass::half_t> ||
                  std::is_same_v<Element, cutlass::bfloat16_t>);
    static constexpr sim::MmaInput kInput =
        std::is_same_v<Element, cutlass::half_t> ? sim::MmaInput::fp16 : sim::MmaInput::bf16;

    static void ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
        sim::wgmma({kInput, N, kTransposeB, accumulate, a, b}, d, nullptr);
    }
    // A's registers hold NaN until the multiplication is over, const or not.
    static void rs(float (&d)[N / 2], uint32_t const (&a)[4], uint64_t b, bool accumulate) {
        sim::wgmma({kInput, N, kTransposeB, accumulate, 0, b}, d, const_cast<uint32_t *>(a));
    }
};

}  // namespace flash::sm90
