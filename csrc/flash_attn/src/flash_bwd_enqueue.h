// How a kernel of a backward is launched, and the launches of the plan and the preprocess kernels,
// which both kernel classes have.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "dependent_launch.h"
#include "flash.h"
#include "flash_bwd_preprocess_kernel.h"
#include "flash_plan_kernel.h"
#include "kernel_description.h"

namespace flash {

// Launches kKernel with `ctas` CTAs; does nothing if there are none. kDependent: by programmatic
// dependent launch, so the kernel may start while the one before it still runs, up to its
// cudaGridDependencySynchronize(). kCluster: CTAs of a cluster, a divisor of `ctas`.
template <auto *kKernel, bool kDependent = false, int kCluster = 1, class... Arguments>
cudaError_t enqueue_bwd(int64_t ctas, int threads, int smem_bytes, void *stream,
                        Arguments const &...arguments) {
    if (ctas == 0) {
        return cudaSuccess;
    }
    if (ctas < 0 || ctas > INT32_MAX) {
        return cudaErrorInvalidConfiguration;
    }
    if (cudaError_t const error = allow_smem<kKernel>(smem_bytes); error != cudaSuccess) {
        return error;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(ctas));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = smem_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute attributes[2]{};
    config.attrs = attributes;
    if (kDependent) {
        attributes[config.numAttrs++] = dependent_launch();
    }
    if (kCluster > 1) {
        cudaLaunchAttribute &cluster = attributes[config.numAttrs++];
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {kCluster, 1, 1};
    }
    return cudaLaunchKernelEx(&config, kKernel, arguments...);
}

template <class Tiles>
void set_plan_capacity(Flash_bwd_params &params) {
    static_assert(Tiles::kRows >= kMinBwdRows);
    int const rows = Tiles::kOfKeys ? params.total_k : params.total_q;
    params.plan_capacity = static_cast<int32_t>(plan_capacity(rows, params.b, Tiles::kRows));
}

// Enqueues the plan of a ragged batch's tiles. valid: plan_ptr holds it already, and only its
// capacity is set.
template <class Tiles>
cudaError_t enqueue_bwd_plan(Flash_bwd_params &params, bool valid, void *stream) {
    set_plan_capacity<Tiles>(params);
    return valid ? cudaSuccess : enqueue_plan<Tiles, false>(params, stream);
}

template <BwdConfig C>
cudaError_t enqueue_preprocess(Flash_bwd_params const &params, void *stream) {
    using Stats = RowStats<C>;
    cudaError_t error = enqueue_bwd<&flash_bwd_row_stats_kernel<Stats>>(
        Stats::num_ctas(params), Stats::kThreads, 0, stream, params);
    if (error == cudaSuccess && params.dsinks_ptr != nullptr) {
        error = enqueue_bwd<&flash_bwd_sinks_kernel<Stats>>(
            params.h, Stats::kThreads, Stats::kThreads / 32 * sizeof(float), stream, params);
    }
    return error;
}

}  // namespace flash
