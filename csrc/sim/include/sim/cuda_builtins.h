// The CUDA C++ built-ins of device code, for g++: index variables, barriers, shuffles, votes,
// intrinsics.
#pragma once

#include <cuda_fp16.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "runtime_sm90.h"

#undef __launch_bounds__
#define __launch_bounds__(...)

#pragma GCC visibility push(default)
// Written by the scheduler whenever it resumes a CUDA thread. constinit spares each access the
// check for a dynamic initialiser.
extern constinit sim::Dim3 threadIdx;
extern constinit sim::Dim3 blockIdx;
extern constinit sim::Dim3 blockDim;
extern constinit sim::Dim3 gridDim;
#pragma GCC visibility pop

inline constexpr int warpSize = 32;

// A block's only shared memory is what <dynamic_smem.h> returns; __shared__ does not compile.
#undef __shared__
#define __shared__ has_to_be_dynamic_smem

inline void __syncthreads() { sim::barrier_sync(0, 0); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { sim::warp_sync(mask); }

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return sim::ballot(mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
    return __ballot_sync(mask, predicate) == mask;
}

namespace sim::detail {

template <class T>
T shuffle_words(Shuffle kind, unsigned mask, T value, unsigned argument, int width) {
    static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
    uint32_t words[sizeof(T) / 4];
    std::memcpy(words, &value, sizeof(T));
    for (uint32_t &word : words) {
        word = shuffle(kind, mask, word, argument, width);
    }
    std::memcpy(&value, words, sizeof(T));
    return value;
}

}  // namespace sim::detail

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize) {
    return sim::detail::shuffle_words(sim::Shuffle::index, mask, value, source, width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
    return sim::detail::shuffle_words(sim::Shuffle::up, mask, value, delta, width);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
    return sim::detail::shuffle_words(sim::Shuffle::down, mask, value, delta, width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize) {
    return sim::detail::shuffle_words(sim::Shuffle::exclusive_or, mask, value, lane_mask, width);
}

inline int __reduce_max_sync(unsigned mask, int value) {
    for (int lane_mask = 16; lane_mask > 0; lane_mask /= 2) {
        value = std::max(value, __shfl_xor_sync(mask, value, lane_mask));
    }
    return value;
}

[[noreturn]] inline void __trap() { sim::trap("__trap()"); }

template <class T>
T __ldg(T const *pointer) {
    sim::note_access(pointer, sizeof(T), false);
    return *pointer;
}

inline unsigned atomicAdd(unsigned *address, unsigned value) {
    return sim::atomic_add(address, value);
}
inline void atomicAdd(float *address, float value) { sim::reduce_add(address, &value, 1); }
inline unsigned atomicExch(unsigned *address, unsigned value) {
    return sim::atomic_exchange(address, value);
}

inline void cudaGridDependencySynchronize() { sim::grid_dependency_wait(); }
inline void cudaTriggerProgrammaticLaunchCompletion() { sim::grid_dependency_launch(); }

inline void *__cluster_map_shared_rank(void const *address, unsigned rank) {
    return sim::map_shared_rank(address, rank);
}

inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.f / x; }
// The value goes through memory, so that the compiler cannot fuse it with a later addition.
inline float __fmul_rn(float x, float y) {
    float product = x * y;
    asm("" : "+m"(product));
    return product;
}
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
// CUTLASS's numeric conversions name these in code that no kernel here instantiates.
inline int __dp4a(int, int, int) { sim::not_covered("__dp4a"); }
inline unsigned __byte_perm(unsigned, unsigned, unsigned) { sim::not_covered("__byte_perm"); }
inline __half2 __hfma2(__half2, __half2, __half2) { sim::not_covered("__hfma2"); }
using std::max;
using std::min;
