// From a backward configuration of the sm80 class to the shared object's description and launch
// function, which enqueues the kernels one after the other.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "flash.h"
#include "flash_bwd_enqueue.h"
#include "flash_bwd_kernel_sm80.h"
#include "flash_bwd_sum_parts.h"
#include "head_parts.h"
#include "kernel_description.h"
#include "persistent_launch.h"

namespace flash {

// Enqueues the kernel of one pass and, in a ragged batch, its plan. kOrdered: tiles of keys add to
// dQ in their order.
template <BwdConfig C, BwdPass kPass, bool kOrdered = false>
cudaError_t enqueue_pass(Flash_bwd_params params, void *stream) {
    using Traits = KernelTraitsBwdSm80<C, kPass>;
    using Scheduler = TileSchedulerBwd<Traits>;
    int sms = 0;
    if (cudaError_t const error = sm_count(sms); error != cudaSuccess) {
        return error;
    }
    params.heads_in_group = Scheduler::heads_in_group(params, sms * Traits::kMinCtas, kOrdered);
    if constexpr (C.varlen) {
        constexpr bool kValid = kPass == BwdPass::dv;  // dK's plan, just before, is the same
        int const workers = sms * Traits::kMinCtas;
        params.plan_in_order = kOrdered ? Scheduler::sequences_in_turns(params, workers) : 0;
        cudaError_t const error = enqueue_bwd_plan<Scheduler>(params, kValid, stream);
        if (error != cudaSuccess) {
            return error;
        }
    }
    return enqueue_bwd<&flash_bwd_kernel_sm80<Traits, kOrdered>>(
        Scheduler::num_tiles(params), Traits::kThreads, Traits::kSmemBytes, stream, params);
}

// Enqueues a kernel for dQ, and one or two for dK and dV. params: as the caller gave them, heads
// not yet divided.
template <BwdConfig C>
cudaError_t enqueue_passes(Flash_bwd_params const &params, void *stream) {
    Flash_bwd_params const divided = divide_heads(params);
    cudaError_t error = cudaSuccess;
    if (params.dq_ptr != nullptr) {
        error = enqueue_pass<C, BwdPass::dq>(params, stream);
    }
    bool const wants_dkv = params.dk_ptr != nullptr;
    if constexpr (C.split_dkv) {
        if (error == cudaSuccess && wants_dkv) {
            error = enqueue_pass<C, BwdPass::dk>(divided, stream);
        }
        if (error == cudaSuccess && wants_dkv) {
            error = enqueue_pass<C, BwdPass::dv>(divided, stream);
        }
    } else if (error == cudaSuccess && wants_dkv) {
        error = enqueue_pass<C, BwdPass::dkv>(divided, stream);
    }
    return error == cudaSuccess ? enqueue_sum_parts<C>(divided, stream) : error;
}

// Enqueues the kernel that computes all gradients, and the one that rounds dQ.
template <BwdConfig C>
cudaError_t enqueue_fused(Flash_bwd_params const &params, void *stream) {
    using Traits = KernelTraitsBwdSm80<C, BwdPass::all>;
    cudaError_t error = cudaSuccess;
    if (params.dq_ptr != nullptr || params.dk_ptr != nullptr) {
        Flash_bwd_params const divided = divide_heads(params);
        error = params.deterministic != 0 ? enqueue_pass<C, BwdPass::all, true>(divided, stream)
                                          : enqueue_pass<C, BwdPass::all>(divided, stream);
        if (error == cudaSuccess) error = enqueue_sum_parts<C>(divided, stream);
    }
    if (error == cudaSuccess && params.dq_ptr != nullptr) {
        error = enqueue_bwd<&flash_bwd_postprocess_kernel_sm80<Traits>>(
            BlockOfDq<C, Traits::kDqRows>::num_ctas(params), Traits::kThreads, Traits::kDqSmemBytes,
            stream, params);
    }
    return error;
}

template <BwdConfig C>
int32_t launch_bwd(Flash_bwd_params const *params, void *stream) {
    bool const repeats = !C.fused || params->dq_semaphore_ptr != nullptr;
    if (!may_divide_heads(*params) || (params->deterministic != 0 && !repeats)) {
        return cudaErrorInvalidValue;
    }
    cudaError_t error = enqueue_preprocess<C>(*params, stream);
    if constexpr (C.fused) {
        return error == cudaSuccess ? enqueue_fused<C>(*params, stream) : error;
    } else {
        return error == cudaSuccess ? enqueue_passes<C>(*params, stream) : error;
    }
}

// The largest demands of the kernels, for describe(). The dV pass asks for less than the dK pass.
template <BwdConfig C>
struct BwdDemands {
    static constexpr BwdPass kFirst = C.fused ? BwdPass::all : BwdPass::dq;
    static constexpr BwdPass kSecond = C.fused       ? BwdPass::all
                                       : C.split_dkv ? BwdPass::dk
                                                     : BwdPass::dkv;
    using First = KernelTraitsBwdSm80<C, kFirst>;
    using Second = KernelTraitsBwdSm80<C, kSecond>;
    static constexpr int kThreads =
        std::max({First::kThreads, Second::kThreads, RowStats<C>::kThreads});
    static constexpr int kSmemBytes = std::max(First::kSmemBytes, Second::kSmemBytes);
    static constexpr int kTileM = C.fused ? First::kQueries : First::kTileM;
    static constexpr int kDqAccumColumns = C.fused ? C.head_dim : 0;
};

// Kernel_description::head_parts.
template <BwdConfig C>
int32_t head_parts(Flash_bwd_params const *params) {
    using Traits = typename BwdDemands<C>::Second;
    int sms = 0;
    if (sm_count(sms) != cudaSuccess) {
        return 1;
    }
    HeadPartsModel const model{.tile_keys = Traits::kKeys,
                               .step_queries = Traits::kQueries,
                               .workers = sms * Traits::kMinCtas,
                               .mask = Traits::kMask,
                               .varlen = C.varlen,
                               .shared = 0,
                               .longest_first = false};
    return model.parts(*params);
}

// Kernel_description::dkv_partial.
template <BwdConfig C>
int64_t dkv_partial(Flash_bwd_params const *params) {
    Flash_bwd_params const divided = divide_heads(*params);
    return divided.head_parts > 1 ? HeadPartSums<C.varlen>::workspace(divided) : 0;
}

template <BwdConfig C>
Flash_bwd_kernel const *describe_bwd(char const *name) {
    return describe<BwdDemands<C>>(name, &launch_bwd<C>, nullptr, &head_parts<C>, &dkv_partial<C>);
}

}  // namespace flash
