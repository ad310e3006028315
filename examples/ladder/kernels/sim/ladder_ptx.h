// The PTX instructions of gpu/ladder_ptx.h as the simulator executes them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace ladder {

inline void ldmatrix(void const *row, uint32_t (&dst)[4]) { sim::ldmatrix(row, dst, 4, false); }

inline void ldmatrix_transposed(void const *row, uint32_t (&dst)[4]) {
    sim::ldmatrix(row, dst, 4, true);
}

template <class Element>
void mma_m16n8k16(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
    constexpr bool kHalf = std::is_same_v<Element, __half>;
    uint32_t const b[2] = {b0, b1};
    sim::mma_m16n8(kHalf ? sim::MmaInput::fp16 : sim::MmaInput::bf16, 2, c, a, b);
}

inline void cp_async(void *smem, void const *gmem, bool valid) {
    sim::cp_async(smem, gmem, 16, valid);
}
inline void cp_async_wait_all() { sim::cp_async_wait_all(); }

}  // namespace ladder
