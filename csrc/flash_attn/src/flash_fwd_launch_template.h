// From a configuration to the shared object's description and launch function.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "flash.h"
#include "flash_fwd_kernel_sm80.h"
#include "tile_scheduler.h"

namespace flash {

// Raises the kernel's dynamic shared memory limit once per device.
template <class Kernel>
cudaError_t allow_smem(Kernel *kernel, int smem_bytes) {
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
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
    if (error == cudaSuccess) {
        done.fetch_or(bit, std::memory_order_release);
    }
    return error;
}

template <FwdConfig C>
int32_t launch_fwd(Flash_fwd_params const *params, void *stream) {
    using Traits = KernelTraitsSm80<C>;
    auto *const kernel = &flash_fwd_kernel_sm80<Traits>;
    int64_t const tiles = TileScheduler<C>::num_tiles(*params);
    if (tiles <= 0 || tiles > INT32_MAX) {
        return cudaErrorInvalidConfiguration;
    }
    if (cudaError_t const error = allow_smem(kernel, Traits::kSmemBytes); error != cudaSuccess) {
        return error;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(tiles));
    config.blockDim = dim3(Traits::kThreads);
    config.dynamicSmemBytes = Traits::kSmemBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    return cudaLaunchKernelEx(&config, kernel, *params);
}

template <FwdConfig C>
Flash_kernel const *describe_fwd(char const *name) {
    using Traits = KernelTraitsSm80<C>;
    static Flash_kernel const kernel{
        .abi_version = kAbiVersion,
        .params_size = sizeof(Flash_fwd_params),
        .name = name,
        .threads = Traits::kThreads,
        .smem_bytes = Traits::kSmemBytes,
        .tile_m = Traits::kTileM,
        .launch = &launch_fwd<C>,
        .error_string =
            [](int32_t error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); },
    };
    return &kernel;
}

}  // namespace flash
