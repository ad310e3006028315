// The sm90 class's backward kernels: the persistent, warp-specialised main kernel, and the one that
// rounds the sums of dQ. Warpgroup 0 of the main kernel has a producer thread and up to two threads
// that write dQ or, above d = 128, keep the order in which the consumers add it.
#pragma once

#include <arch_sm90.h>
#include <dynamic_smem.h>

#include "dq_sums_sm90.h"
#include "flash.h"
#include "flash_bwd_postprocess.h"
#include "mainloop_bwd_64_sm90.h"
#include "mainloop_bwd_wide_sm90.h"
#include "shared_tiles_sm90.h"

namespace flash {

// Parametrised by the traits type, as the forward kernel.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    flash_bwd_kernel_sm90(__grid_constant__ Flash_bwd_params const params,
                          __grid_constant__ TensorMapsBwdSm90 const maps,
                          __grid_constant__ TileQueue const queue) {
    using Mainloop =
        std::conditional_t<Traits::kWide, MainloopBwdWideSm90<Traits>,
                           std::conditional_t<(Traits::kHeadDim <= 64), MainloopBwd64Sm90<Traits>,
                                              MainloopBwdSm90<Traits>>>;
    auto &storage = dynamic_smem<typename Traits::SharedStorage>();

    bool const owns = Traits::kMayOwnHeads && queue.group == 0;
    int const writers = Mainloop::Writer::count(params, owns);
    int const warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x / 128), 0);
    if (threadIdx.x == 0) {
        Mainloop::init_barriers(storage, writers);
    }
    if constexpr (Traits::kMayShare) {
        if (threadIdx.x == 32) SharedTilesSm90<Traits>::plan(params, queue, storage);
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
        int const warp = __shfl_sync(0xffffffffu, int(threadIdx.x / 32), 0);
        if (warp <= writers && sm90::elect_one()) {
            if (warp == 0) {
                typename Mainloop::Producer producer{maps, storage, rank};
                producer.run(params, queue);
            } else {
                typename Mainloop::Writer writer{storage, warp - 1, writers};
                writer.run(params);
            }
        }
    } else {
        sm90::registers_raise<Traits::kMmaRegisters>();
        typename Mainloop::Consumer consumer{storage, warpgroup - 1,
                                             static_cast<int>(threadIdx.x) - 128, rank, owns};
        consumer.run(params);
    }
    if constexpr (Traits::kCluster > 1) {  // a CTA may reach the other's memory until its end
        __syncwarp();
        sm90::cluster_arrive();
        sm90::cluster_wait();
    }
}

// Scales and rounds the sums of dQ of a block of queries.
template <class Traits>
__global__ void __launch_bounds__(Traits::kMmaThreads)
    flash_bwd_postprocess_kernel_sm90(__grid_constant__ Flash_bwd_params const params) {
    cudaGridDependencySynchronize();
    using Block = BlockOfDq<Traits::kConfig, Traits::kTileM>;
    Block const block(params, blockIdx.x);
    DqSumsSm90<Traits> const sums(params.dq_accum_ptr, block.workspace_row, threadIdx.x);
    uint32_t const *const semaphore =
        params.dq_semaphore_ptr + block.workspace_row / kSemaphoreRows;
    bool const exist =
        !Block::Stats::are_stored(params, block.segment) || sm90::load_acquire(semaphore) != 0;
    sums.round(params, block, exist);
}

}  // namespace flash
