// Shared by all rungs: the C entry of a rung's shared object, and the tensors of one head.
//
// Rung NN is `template <class Element, int kHeadDim, bool kCausal> struct RungNN` with
//     kThreads, kMinCtas     launch bounds
//     kTileM                 query rows of a CTA
//     SharedStorage          the CTA's dynamic shared memory
//     ctas(params)           size of the grid
//     run(params, storage)   the code of one thread
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dynamic_smem.h>

#include <cstdint>
#include <type_traits>

#include "flash.h"

namespace ladder {

using flash::Flash_fwd_params;

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class Element>
__device__ inline Element from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
    return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
    return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

// The tensors of one query head. Rows are `*_stride` elements apart, columns are contiguous.
template <class Element, bool kCausal>
struct Head {
    Element const *q;  // (seqlen_q, d)
    Element const *k;  // (seqlen_k, d)
    Element const *v;  // (seqlen_k, d)
    Element *o;        // (seqlen_q, d)
    float *lse;        // (seqlen_q)
    int64_t q_stride, k_stride, v_stride, o_stride;
    int seqlen_q, seqlen_k;

    __device__ Head(Flash_fwd_params const &params, int batch_head)
        : q_stride(params.q_row_stride),
          k_stride(params.k_row_stride),
          v_stride(params.v_row_stride),
          o_stride(params.o_row_stride),
          seqlen_q(params.seqlen_q),
          seqlen_k(params.seqlen_k) {
        int const batch = batch_head / params.h;
        int const head = batch_head % params.h;
        int const head_k = head / params.h_h_k_ratio;
        q = static_cast<Element const *>(params.q_ptr) + batch * params.q_batch_stride +
            head * params.q_head_stride;
        k = static_cast<Element const *>(params.k_ptr) + batch * params.k_batch_stride +
            head_k * params.k_head_stride;
        v = static_cast<Element const *>(params.v_ptr) + batch * params.v_batch_stride +
            head_k * params.v_head_stride;
        o = static_cast<Element *>(params.o_ptr) + batch * params.o_batch_stride +
            head * params.o_head_stride;
        lse = params.softmax_lse_ptr + int64_t(batch_head) * seqlen_q;
    }

    // Query row `row` sees keys [0, key_end(row)): all, or under a causal mask, whose diagonal ends
    // in the bottom-right corner, those up to its own.
    __device__ int key_end(int row) const {
        int const end = kCausal ? row + 1 + seqlen_k - seqlen_q : seqlen_k;
        return max(0, min(end, seqlen_k));
    }

    // The end of the keys visible to some row of the tile of `rows` rows from `first_row` on.
    __device__ int tile_key_end(int first_row, int rows) const {
        return key_end(min(first_row + rows, seqlen_q) - 1);
    }
};

// From rung 2 on a CTA computes a tile of query rows. Consecutive CTAs compute tiles of one head,
// so that concurrent CTAs share its keys and values in the L2 cache. The grid is one-dimensional,
// because only grid.x reaches 2^31 - 1.
struct TileIndex {
    int batch_head;
    int first_row;
};

inline int64_t count_tiles(Flash_fwd_params const &params, int tile_m) {
    return int64_t(params.b) * params.h * ((params.seqlen_q + tile_m - 1) / tile_m);
}

__device__ inline TileIndex this_tile(Flash_fwd_params const &params, int tile_m) {
    int const tiles = (params.seqlen_q + tile_m - 1) / tile_m;
    return {int(blockIdx.x) / tiles, int(blockIdx.x) % tiles * tile_m};
}

// TMA descriptors that the host makes for a rung's kernel: its type Maps, if it has one.
struct NoMaps {};
template <class Rung>
struct MapsOf {
    using type = NoMaps;
};
template <class Rung>
    requires requires { typename Rung::Maps; }
struct MapsOf<Rung> {
    using type = typename Rung::Maps;
};

template <class Rung, class Maps>
__global__ void __launch_bounds__(Rung::kThreads, Rung::kMinCtas)
    ladder_kernel(__grid_constant__ Flash_fwd_params const params,
                  __grid_constant__ Maps const maps) {
    auto &storage = flash::dynamic_smem<typename Rung::SharedStorage>();
    if constexpr (std::is_same_v<Maps, NoMaps>) {
        Rung::run(params, storage);
    } else {
        Rung::run(params, maps, storage);
    }
}

template <class Rung>
int32_t launch(Flash_fwd_params const *params, void *stream) {
    int64_t const ctas = Rung::ctas(*params);
    if (ctas <= 0 || ctas > INT32_MAX) {
        return cudaErrorInvalidConfiguration;
    }
    using Maps = typename MapsOf<Rung>::type;
    auto *const kernel = &ladder_kernel<Rung, Maps>;
    int const smem_bytes = sizeof(typename Rung::SharedStorage);
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
    Maps maps;
    if constexpr (!std::is_same_v<Maps, NoMaps>) {
        error = error == cudaSuccess ? Rung::make_maps(maps, *params) : error;
    }
    if (error != cudaSuccess) {
        return error;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(ctas));
    config.blockDim = dim3(Rung::kThreads);
    config.dynamicSmemBytes = smem_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    return cudaLaunchKernelEx(&config, kernel, *params, maps);
}

template <class Rung>
flash::Flash_kernel const *describe(char const *name) {
    static flash::Flash_kernel const kernel{
        .abi_version = flash::kAbiVersion,
        .params_size = sizeof(Flash_fwd_params),
        .name = name,
        .threads = Rung::kThreads,
        .smem_bytes = sizeof(typename Rung::SharedStorage),
        .tile_m = Rung::kTileM,
        .dq_accum = 0,
        .launch = &launch<Rung>,
        .plan = nullptr,
        .error_string =
            [](int32_t error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); },
        .head_parts = nullptr,
        .dkv_partial = nullptr,
    };
    return &kernel;
}

}  // namespace ladder
