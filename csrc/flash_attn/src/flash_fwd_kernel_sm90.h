// The sm90-class forward kernel: persistent, warp-specialised CTAs, each computing several tiles.
// Warpgroup 0 is the producer, the others are consumers.
#pragma once

#include <arch_sm90.h>
#include <dynamic_smem.h>

#include "cta_plan.h"
#include "flash.h"
#include "mainloop_fwd_sm90.h"
#include "tensor_maps_sm90.h"
#include "tile_scheduler.h"

namespace flash {

// The template argument is the traits type and not the FwdConfig: nvcc 13.0 misspells a namespaced
// value that is a kernel's own argument.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinCtas)
    flash_fwd_kernel_sm90(__grid_constant__ Flash_fwd_params const params,
                          __grid_constant__ TensorMapsSm90 const maps,
                          __grid_constant__ TileQueue const queue,
                          __grid_constant__ SmallCap const small_cap) {
    constexpr FwdConfig C = Traits::kConfig;
    using Mainloop = MainloopFwdSm90<C>;
    auto &storage = dynamic_smem<typename Traits::SharedStorage>();

    int const warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x / 128), 0);
    if (threadIdx.x == 0) {
        Mainloop::init_barriers(storage, maps);
        if constexpr (CtaPlan<C>::kOfCaches) Mainloop::prefetch_descriptors(maps);
    }
    bool const plans = CtaPlan<C>::suits(params);
    if (plans) {
        cudaGridDependencySynchronize();
        bool const lists_positions = params.num_splits > 1 && queue.arrivals == nullptr;
        Mainloop::own_plan(storage).make(params, lists_positions);
    }
    __syncthreads();

    if (warpgroup == 0) {
        sm90::registers_lower<Traits::kLoadRegisters>();
        using Producer = typename Mainloop::Producer;
        if (C.paged || (threadIdx.x < 32 && sm90::elect_one())) {
            Producer producer{maps, storage, plans};
            producer.run(params, queue);
        }
    } else {
        sm90::registers_raise<Traits::kMmaRegisters>();
        typename Mainloop::Consumer consumer{
            storage, queue.arrivals, small_cap, warpgroup - 1, static_cast<int>(threadIdx.x) - 128,
            maps};
        consumer.first_turn();
        consumer.run(params);
    }
}

}  // namespace flash
