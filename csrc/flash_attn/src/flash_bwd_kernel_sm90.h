// The sm90 class's backward kernels: the persistent main kernel, whose warpgroup 0 is the producer,
// and the one that rounds the sums of dQ.
#pragma once

#include <arch_sm90.h>

#include "flash.h"
#include "flash_bwd_postprocess.h"
#include "mainloop_bwd_wide_sm90.h"

namespace flash {

// Parametrised by the traits type, as the forward kernel.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    flash_bwd_kernel_sm90(__grid_constant__ Flash_bwd_params const params,
                          __grid_constant__ TensorMapsBwdSm90 const maps,
                          __grid_constant__ TileQueue const queue) {
    using Mainloop =
        std::conditional_t<Traits::kWide, MainloopBwdWideSm90<Traits>, MainloopBwdSm90<Traits>>;
    extern __shared__ __align__(1024) char smem[];
    auto &storage = *reinterpret_cast<typename Traits::SharedStorage *>(smem);

    int const warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x / 128), 0);
    if (threadIdx.x == 0) {
        Mainloop::init_barriers(storage);
    }
    if constexpr (Traits::kCluster > 1) {
        __syncwarp();
        sm90::cluster_arrive();
        sm90::cluster_wait();
    } else {
        __syncthreads();
    }

    int const rank = Traits::kCluster > 1 ? static_cast<int>(sm90::cluster_rank()) : 0;
    if (warpgroup == 0) {
        sm90::registers_lower<Traits::kLoadRegisters>();
        if (threadIdx.x < 32 && sm90::elect_one()) {
            typename Mainloop::Producer producer{maps, storage, rank};
            producer.run(params, queue);
        }
    } else {
        sm90::registers_raise<Traits::kMmaRegisters>();
        typename Mainloop::Consumer consumer{storage, warpgroup - 1,
                                             static_cast<int>(threadIdx.x) - 128, rank};
        consumer.run(params);
    }
    if constexpr (Traits::kCluster > 1) {  // a CTA may reach the other's memory until its end
        __syncwarp();
        sm90::cluster_arrive();
        sm90::cluster_wait();
    }
}

// Rounds the sums of dQ, times the softmax scale, in the order in which the main kernel's threads
// hold its accumulators.
template <class Traits>
__global__ void __launch_bounds__(Traits::kMmaThreads)
    flash_bwd_postprocess_kernel_sm90(__grid_constant__ Flash_bwd_params const params) {
    using Element = typename Traits::Element;
    constexpr int kColumns = Traits::kDqColumns;
    int const thread = threadIdx.x;
    int const warpgroup = thread / 128;
    int const columns = Traits::dq_columns(warpgroup);
    cudaGridDependencySynchronize();
    BlockOfDq<Traits::kConfig, Traits::kTileM> const block(params, blockIdx.x);
    float const *const sums = params.dq_accum_ptr + block.workspace_row * Traits::kHeadDim +
                              Traits::dq_begin(thread / 32) + thread % 32 * 4;

    Tensor tQrDq = make_tensor<float>(Shape<_4, _1, Int<kColumns / 8>>{});  // (4, 1, N/8)
    CUTE_UNROLL
    for (int i = 0; i < kColumns / 8; ++i) {
        float4 const four = 8 * i < columns ? *reinterpret_cast<float4 const *>(sums + i * 128)
                                            : make_float4(0.f, 0.f, 0.f, 0.f);
        tQrDq(0, 0, i) = four.x * params.scale_softmax;
        tQrDq(1, 0, i) = four.y * params.scale_softmax;
        tQrDq(2, 0, i) = four.z * params.scale_softmax;
        tQrDq(3, 0, i) = four.w * params.scale_softmax;
    }
    // The second warpgroup has the second half of the rows or of the columns.
    int const first_row = Traits::kDqByRows ? warpgroup * 64 : 0;
    int const first_col = Traits::kDqByRows ? 0 : warpgroup * kColumns;
    auto const row_of = [&](int i) { return first_row + Traits::acc_row(thread % 128, i); };
    CUTE_UNROLL
    for (int i = 0; i < size(tQrDq); ++i) {
        if (!block.in_sequence(row_of(i % 4 / 2))) tQrDq(i) = 0.f;
    }
    store_accumulator<kColumns>(tQrDq, thread, params.d - first_col,
                                [&](int i) -> GmemRow<Element> {
                                    auto const row = block.template row<Element>(params, row_of(i));
                                    return {row.gmem + first_col, row.exists};
                                });
}

}  // namespace flash
