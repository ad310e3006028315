// From a backward configuration of the sm90 class to the shared object's description and launch
// function: row statistics and zeros, the main kernel, the rounding of dQ; where CTAs own heads,
// the main kernel writes the zeros and rounds.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "flash.h"
#include "flash_bwd_enqueue.h"
#include "flash_bwd_kernel_sm90.h"
#include "kernel_description.h"
#include "persistent_launch.h"

namespace flash {

// owned: heads, by CTAs (TileSchedulerBwdSm90::owns_heads()).
template <class Traits>
cudaError_t enqueue_main_sm90(Flash_bwd_params params, int sms, bool owned, void *stream) {
    using Scheduler = TileSchedulerBwdSm90<Traits>;
    if constexpr (Traits::kVarlen) {
        // The main kernel waits for this one alone, which waits for those before.
        cudaError_t const error = enqueue_plan<Scheduler>(params, false, stream);
        if (error != cudaSuccess) {
            return error;
        }
    }
    int64_t const tiles = Scheduler::num_tiles(params);
    if (tiles > INT32_MAX - sms) {  // CTAs count on beyond the last tile
        return cudaErrorInvalidConfiguration;
    }
    TensorMapsBwdSm90 maps;
    if (cudaError_t const error = make_tensor_maps<Traits>(maps, params); error != cudaSuccess) {
        return error;
    }
    constexpr int kCluster = Traits::kCluster;
    int const most = std::max(sms / kCluster, 1);
    int64_t const units = owned ? int64_t(params.b) * params.h_k : tiles;
    int64_t const clusters = std::min<int64_t>(units, most);
    TileQueue queue{static_cast<int>(tiles), owned ? 0 : 1, nullptr, nullptr};
    if (Traits::kWorkStealing && !Traits::kVarlen && !owned) {
        queue.group = Scheduler::heads_in_group(params, most);
    }
    if (Traits::kWorkStealing && !owned && tiles > clusters) {
        LaunchCounters<false> *counters = nullptr;
        cudaError_t const error = launch_counters(counters, static_cast<cudaStream_t>(stream));
        if (error != cudaSuccess) {
            return error;
        }
        if (counters != nullptr) queue.counter = &counters->tiles;
    }
    return enqueue_bwd<&flash_bwd_kernel_sm90<Traits>, true, kCluster>(
        kCluster * clusters, Traits::kThreads, Traits::kSmemBytes, stream, params, maps, queue);
}

template <BwdConfig C>
int32_t launch_bwd(Flash_bwd_params const *params, void *stream) {
    using Traits = KernelTraitsBwdSm90<C>;
    using Blocks = BlockOfDq<C, Traits::kTileM>;
    int sms = 0;
    if (cudaError_t const error = sm_count(sms); error != cudaSuccess) {
        return error;
    }
    bool const owned = TileSchedulerBwdSm90<Traits>::owns_heads(*params, sms);
    Flash_bwd_params before = *params;
    if (owned) before.dq_accum_ptr = nullptr;
    cudaError_t error = enqueue_preprocess<C>(before, stream);
    if (error == cudaSuccess && (params->dq_ptr != nullptr || params->dk_ptr != nullptr)) {
        error = enqueue_main_sm90<Traits>(*params, sms, owned, stream);
    }
    if (error == cudaSuccess && params->dq_ptr != nullptr && !owned) {
        error = enqueue_bwd<&flash_bwd_postprocess_kernel_sm90<Traits>, true>(
            Blocks::num_ctas(*params), Traits::kMmaThreads, 0, stream, *params);
    }
    return error;
}

template <BwdConfig C>
Flash_bwd_kernel const *describe_bwd(char const *name) {
    return describe<KernelTraitsBwdSm90<C>>(name, &launch_bwd<C>, nullptr);
}

}  // namespace flash
