// Replaces csrc/flash_attn/src/wgmma_sm90.h: the same functions, implemented by the simulator.
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

// Needed for nvcc only. Here the runtime holds the addresses of the registers in flight, so the
// host compiler cannot cache their values.
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
    // The simulator writes NaN into A's registers until the wgmma is complete, hence the
    // const_cast.
    static void rs(float (&d)[N / 2], uint32_t const (&a)[4], uint64_t b, bool accumulate) {
        sim::wgmma({kInput, N, kTransposeB, accumulate, 0, b}, d, const_cast<uint32_t *>(a));
    }
};

}  // namespace flash::sm90
