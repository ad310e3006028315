// Makes the Kernel_description of a shared object, and raises the limit of dynamic shared memory,
// as every launch does first.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "flash.h"

namespace flash {

// Raises the kernel's dynamic shared memory limit once per device.
template <auto *kKernel>
cudaError_t allow_smem(int smem_bytes) {
    static std::atomic<uint64_t> done{0};
    int device = 0;
    if (cudaError_t const error = cudaGetDevice(&device); error != cudaSuccess) {
        return error;
    }
    uint64_t const bit = device < 64 ? uint64_t(1) << device : 0;
    if (done.load(std::memory_order_acquire) & bit) {
        return cudaSuccess;
    }
    cudaError_t const error =
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
    if (error == cudaSuccess) {
        done.fetch_or(bit, std::memory_order_release);
    }
    return error;
}

// Returns the columns of dQ's workspace, which Traits knows; 0 if there is none.
template <class Traits>
constexpr int32_t dq_accum_columns() {
    if constexpr (requires { Traits::kDqAccumColumns; }) {
        return Traits::kDqAccumColumns;
    }
    return 0;
}

// Returns a kernel's description, which is made once. plan: null in a backward.
template <class Traits, class Params>
Kernel_description<Params> const *describe(
    char const *name, int32_t (*launch)(Params const *, void *),
    int32_t (*plan)(std::type_identity_t<Params> const *, void *),
    int32_t (*head_parts)(std::type_identity_t<Params> const *) = nullptr,
    int64_t (*dkv_partial)(std::type_identity_t<Params> const *) = nullptr) {
    static Kernel_description<Params> const kernel{
        .abi_version = kAbiVersion,
        .params_size = sizeof(Params),
        .name = name,
        .threads = Traits::kThreads,
        .smem_bytes = Traits::kSmemBytes,
        .tile_m = Traits::kTileM,
        .dq_accum = dq_accum_columns<Traits>(),
        .launch = launch,
        .plan = plan,
        .error_string =
            [](int32_t error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); },
        .head_parts = head_parts,
        .dkv_partial = dkv_partial,
    };
    return &kernel;
}

}  // namespace flash
