// Sums of dQ in global memory, in the order of the accumulators that are added to them.
#pragma once

#include <arch_sm90.h>

#include <cute/config.hpp>

#include "flash.h"

namespace flash {

// What one thread has of the sums of kDqRows rows, in the sm80 class's backward. add() and read()
// take an element i of its accumulators, a multiple of 4, and the three behind it.
template <class Traits>
struct DqSums {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    static constexpr bool kVectors = false;  // before 9.0 red has no vectors
#else
    static constexpr bool kVectors = true;
#endif
    static constexpr int kStride = 32;  // without vectors, floats between a warp's requests

    float *const begin;

    // row: the first one in the workspace.
    CUTE_DEVICE DqSums(Flash_bwd_params const &params, int64_t row, int thread)
        : begin(params.dq_accum_ptr + row * Traits::kHeadDim +
                thread / 32 * 32 * Traits::kDqPerThread + thread % 32 * (kVectors ? 4 : 1)) {}

    CUTE_DEVICE void add(int i, float a, float b, float c, float d) const {
        float *const sums = begin + i * 32;
        if constexpr (kVectors) {
            sm90::reduce_add(sums, a, b, c, d);
        } else {
            atomicAdd(sums, a);
            atomicAdd(sums + kStride, b);
            atomicAdd(sums + 2 * kStride, c);
            atomicAdd(sums + 3 * kStride, d);
        }
    }

    CUTE_DEVICE float4 read(int i) const {
        float const *const sums = begin + i * 32;
        if constexpr (kVectors) {
            return *reinterpret_cast<float4 const *>(sums);
        } else {
            return make_float4(sums[0], sums[kStride], sums[2 * kStride], sums[3 * kStride]);
        }
    }
};

}  // namespace flash
