// Turns an sm90-class configuration into the launch function and the description that its shared
// object exports.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "dependent_launch.h"
#include "flash.h"
#include "flash_fwd_combine_kernel.h"
#include "flash_fwd_kernel_sm90.h"
#include "flash_plan_kernel.h"
#include "kernel_description.h"
#include "persistent_launch.h"
#include "tensor_maps_sm90.h"
#include "tile_scheduler.h"

namespace flash {

template <FwdConfig C>
int32_t launch_fwd(Flash_fwd_params const *params, void *stream) {
    using Traits = KernelTraitsSm90<C>;
    constexpr auto *kernel = &flash_fwd_kernel_sm90<Traits>;
    int sms = 0;
    if (cudaError_t const error = sm_count(sms); error != cudaSuccess) {
        return error;
    }
    int64_t const tiles = TileScheduler<C>::num_tiles(*params);
    int64_t const most = int64_t(sms) * Traits::kMinCtas;
    if (tiles <= 0 || tiles > INT32_MAX - most) {  // CTAs count past the last tile
        return cudaErrorInvalidConfiguration;
    }
    constexpr int kSmemBytes = Traits::kSmemBytes + (CtaPlan<C>::kFits ? sizeof(CtaPlan<C>) : 0);
    static_assert(Traits::kMinCtas * (kSmemBytes + 1024) <= 228 * 1024);
    if (cudaError_t const error = allow_smem<kernel>(kSmemBytes); error != cudaSuccess) {
        return error;
    }
    TensorMapsSm90 maps;
    if (cudaError_t const error = make_tensor_maps<Traits>(maps, *params); error != cudaSuccess) {
        return error;
    }
    int64_t const ctas = std::min<int64_t>(tiles, most);
    TileQueue queue{static_cast<int>(tiles), 1, nullptr, nullptr};
    if (Traits::kWorkStealing && params->plan_ptr == nullptr) {
        queue.group = TileScheduler<C>::heads_in_group(*params, sms);
    }
    bool const steals = (Traits::kWorkStealing || params->plan_ptr != nullptr) && tiles > ctas;
    bool const merges = MergeParts<Traits>::suits(*params);
    if (steals || merges) {
        LaunchCounters<MergeParts<Traits>::kCan> *counters = nullptr;
        cudaError_t const error = launch_counters(counters, static_cast<cudaStream_t>(stream));
        if (error != cudaSuccess) {
            return error;
        }
        if (counters != nullptr && steals) queue.counter = &counters->tiles;
        if (counters != nullptr && merges) queue.arrivals = counters->arrivals;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(ctas));
    config.blockDim = dim3(Traits::kThreads);
    config.dynamicSmemBytes = CtaPlan<C>::suits(*params) ? kSmemBytes : Traits::kSmemBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    // Producers wait for the previous kernel to end or, where CTAs plan, all threads do.
    cudaLaunchAttribute dependent = dependent_launch();
    config.attrs = &dependent;
    config.numAttrs = 1;
    SmallCap const small_cap(params->scale_softcap);
    cudaError_t const error = cudaLaunchKernelEx(&config, kernel, *params, maps, queue, small_cap);
    bool const merged = queue.arrivals != nullptr;
    return error == cudaSuccess && !merged ? enqueue_combine<Traits>(*params, stream) : error;
}

template <FwdConfig C>
Flash_kernel const *describe_fwd(char const *name) {
    using Traits = KernelTraitsSm90<C>;
    return describe<Traits>(name, &launch_fwd<C>, &launch_fwd_plan<C>);
}

}  // namespace flash
