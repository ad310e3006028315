// From a backward configuration of the sm90 class to the shared object's description and launch
// function, which enqueues the kernels: row statistics and zeros, the main kernel, the sums over
// parts of key heads, the rounding of dQ. Where CTAs own heads, the main kernel writes the zeros,
// and rounds, itself.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "flash.h"
#include "flash_bwd_enqueue.h"
#include "flash_bwd_kernel_sm90.h"
#include "flash_bwd_sum_parts.h"
#include "head_parts.h"
#include "kernel_description.h"
#include "persistent_launch.h"
#include "shared_sums_sm90.h"
#include "shared_tiles_sm90.h"

namespace flash {

// Sets queue: which tiles the main kernel's workers compute. owned: CTAs own heads
// (TileSchedulerBwdSm90::owns_heads()), and queue.group is 0.
template <class Traits>
cudaError_t make_queue(Flash_bwd_params const &params, int sms, bool owned, TileQueue &queue) {
    using Scheduler = TileSchedulerBwdSm90<Traits>;
    int64_t const tiles = Scheduler::num_tiles(params);
    if (tiles > INT32_MAX - 3 * sms) {  // indices run on beyond the last tile
        return cudaErrorInvalidConfiguration;
    }
    int const workers = std::max(sms / Traits::kCluster, 1);
    int const group = owned ? 0 : Scheduler::heads_in_group(params, workers);
    queue = {static_cast<int>(tiles), group, nullptr, nullptr};
    bool const counts = params.dq_semaphore_ptr != nullptr;
    if (Traits::kSteals && !owned && counts && (tiles > workers || Scheduler::waits_turn(params))) {
        queue.counter = RowStats<Traits::kConfig>::tile_counter(params);
    }
    return cudaSuccess;
}

template <class Traits>
cudaError_t enqueue_main_sm90(Flash_bwd_params params, int sms, TileQueue const &queue,
                              void *stream) {
    if constexpr (Traits::kVarlen) {
        // A tile waits for tiles of its sequence, which the plan must list before it: where tiles
        // keep their order, for all before it; under a window, for any one; else for the first one,
        // which sorted plans list in front, too.
        params.plan_in_order = TileSchedulerBwdSm90<Traits>::has_sequences_in_order(params);
        // The main kernel waits for the plan kernel alone, which waits for the kernels before it.
        cudaError_t const error =
            enqueue_bwd_plan<TileSchedulerBwdSm90<Traits>>(params, false, stream);
        if (error != cudaSuccess) {
            return error;
        }
    }
    TensorMapsBwdSm90 maps;
    if (cudaError_t const error = make_tensor_maps<Traits>(maps, params); error != cudaSuccess) {
        return error;
    }
    constexpr int kCluster = Traits::kCluster;
    int64_t const workers = std::max(sms / kCluster, 1);
    bool const shares = params.head_parts == 1 && params.dkv_partial_ptr != nullptr;
    int64_t const units = shares             ? workers
                          : queue.group == 0 ? int64_t(params.b) * params.h_k
                                             : queue.tiles;
    int64_t const clusters = std::min(units, workers);
    return enqueue_bwd<&flash_bwd_kernel_sm90<Traits>, true, kCluster>(
        kCluster * clusters, Traits::kThreads, Traits::kSmemBytes, stream, params, maps, queue);
}

// Enqueues all kernels of a backward.
template <class Traits>
cudaError_t enqueue_all_sm90(Flash_bwd_params const &params, int sms, bool owned, void *stream) {
    constexpr BwdConfig C = Traits::kConfig;
    TileQueue queue{};
    cudaError_t error = make_queue<Traits>(params, sms, owned, queue);
    Flash_bwd_params before = params;
    if (owned) before.dq_accum_ptr = nullptr;
    if (error == cudaSuccess) error = enqueue_preprocess<C>(before, stream);
    if (error == cudaSuccess && (params.dq_ptr != nullptr || params.dk_ptr != nullptr)) {
        error = enqueue_main_sm90<Traits>(params, sms, queue, stream);
        if (error == cudaSuccess) error = enqueue_sum_parts<C>(params, stream);
    }
    if (error == cudaSuccess && params.dq_ptr != nullptr && !owned) {
        error = enqueue_bwd<&flash_bwd_postprocess_kernel_sm90<KernelTraitsBwdSm90<C>>, true>(
            BlockOfDq<C, Traits::kTileM>::num_ctas(params), Traits::kMmaThreads, 0, stream, params);
    }
    return error;
}

// Whether first tiles of keys store dQ (FirstSumsSm90), if CTAs do not own heads.
template <BwdConfig C>
bool may_store_first(Flash_bwd_params const &params, int sms) {
    using Storing = KernelTraitsBwdSm90<C, KernelTraitsBwdSm90<C>::kMayStoreFirst>;
    return TileSchedulerBwdSm90<Storing>::may_store_first(params, sms);
}

// The most steps of a worker where workers share tiles (SharedTilesSm90); 0: they do not. params:
// as divide_heads() returns them.
template <BwdConfig C>
int64_t shared_steps(Flash_bwd_params const &params, int sms) {
    using Traits = KernelTraitsBwdSm90<C>;
    bool const may_share = params.head_parts == 1 && !may_store_first<C>(params, sms) &&
                           !TileSchedulerBwdSm90<Traits>::owns_heads(params, sms, false);
    int const workers = std::max(sms / Traits::kCluster, 1);
    return may_share ? SharedTilesSm90<Traits>::most_steps(params, workers) : 0;
}

// Kernel_description::head_parts.
template <BwdConfig C>
int32_t head_parts(Flash_bwd_params const *params) {
    using Traits = KernelTraitsBwdSm90<C>;
    int sms = 0;
    if (sm_count(sms) != cudaSuccess) {
        return 1;
    }
    HeadPartsModel const model{.tile_keys = Traits::kTileKeys,
                               .step_queries = Traits::kTileM,
                               .workers = std::max(sms / Traits::kCluster, 1),
                               .mask = Traits::kMask,
                               .varlen = Traits::kVarlen,
                               .shared = shared_steps<C>(divide_heads(*params), sms),
                               .longest_first = Traits::kMask == MaskKind::causal};
    return model.parts(*params);
}

// Kernel_description::dkv_partial.
template <BwdConfig C>
int64_t dkv_partial(Flash_bwd_params const *of_call) {
    using Traits = KernelTraitsBwdSm90<C>;
    Flash_bwd_params const params = divide_heads(*of_call);
    if (params.head_parts > 1) {
        return HeadPartSums<C.varlen>::workspace(params);
    }
    int sms = 0;
    if (sm_count(sms) != cudaSuccess || shared_steps<C>(params, sms) == 0) {
        return 0;
    }
    return SharedSumsSm90<Traits>::workspace(sms);
}

template <BwdConfig C>
int32_t launch_bwd(Flash_bwd_params const *of_call, void *stream) {
    using Traits = KernelTraitsBwdSm90<C>;
    using Scheduler = TileSchedulerBwdSm90<Traits>;
    Flash_bwd_params params = divide_heads(*of_call);
    if (!may_divide_heads(*of_call) ||
        (params.deterministic != 0 && params.dq_semaphore_ptr == nullptr)) {
        return cudaErrorInvalidValue;
    }
    int sms = 0;
    if (cudaError_t const error = sm_count(sms); error != cudaSuccess) {
        return error;
    }
    if constexpr (Traits::kVarlen) set_plan_capacity<Scheduler>(params);
    bool const or_stores = may_store_first<C>(params, sms);
    bool const or_stores_head = or_stores && Traits::kMask != MaskKind::local;
    bool const owned = Scheduler::owns_heads(params, sms, or_stores_head);
    if (owned) params.deterministic = 0;  // one CTA adds to a head's sums of dQ, in one order
    params.stores_first = or_stores && !owned;
    bool const shares = shared_steps<C>(params, sms) > 0;
    if (params.head_parts == 1 && !shares) params.dkv_partial_ptr = nullptr;
    if constexpr (Traits::kMayStoreFirst) {
        if (params.stores_first != 0) {
            return enqueue_all_sm90<KernelTraitsBwdSm90<C, true>>(params, sms, false, stream);
        }
    }
    return enqueue_all_sm90<Traits>(params, sms, owned, stream);
}

template <BwdConfig C>
Flash_bwd_kernel const *describe_bwd(char const *name) {
    return describe<KernelTraitsBwdSm90<C>>(name, &launch_bwd<C>, nullptr, &head_parts<C>,
                                            &dkv_partial<C>);
}

}  // namespace flash
