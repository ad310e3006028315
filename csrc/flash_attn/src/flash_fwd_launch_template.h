// Turns an sm80-class configuration into the launch function and the description that its shared
// object exports.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "dependent_launch.h"
#include "flash.h"
#include "flash_fwd_combine_kernel.h"
#include "flash_fwd_kernel_sm80.h"
#include "flash_plan_kernel.h"
#include "kernel_description.h"
#include "tile_scheduler.h"

namespace flash {

template <FwdConfig C>
int32_t launch_fwd(Flash_fwd_params const *params, void *stream) {
    using Traits = KernelTraitsSm80<C>;
    constexpr auto *kernel = &flash_fwd_kernel_sm80<Traits>;
    int64_t const tiles = TileScheduler<C>::num_tiles(*params);
    if (tiles <= 0 || tiles > INT32_MAX) {
        return cudaErrorInvalidConfiguration;
    }
    if (cudaError_t const error = allow_smem<kernel>(Traits::kSmemBytes); error != cudaSuccess) {
        return error;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(tiles));
    config.blockDim = dim3(Traits::kThreads);
    config.dynamicSmemBytes = Traits::kSmemBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute dependent = dependent_launch();
    config.attrs = &dependent;
    config.numAttrs = 1;
    cudaError_t const error = cudaLaunchKernelEx(&config, kernel, *params);
    return error == cudaSuccess ? enqueue_combine<Traits>(*params, stream) : error;
}

template <FwdConfig C>
Flash_kernel const *describe_fwd(char const *name) {
    using Traits = KernelTraitsSm80<C>;
    return describe<Traits>(name, &launch_fwd<C>, &launch_fwd_plan<C>);
}

}  // namespace flash
