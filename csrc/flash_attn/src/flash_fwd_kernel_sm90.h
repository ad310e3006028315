// The sm90-class forward kernel: as many CTAs as SMs, each walking through its tiles; warpgroup 0
// loads, the others compute.
#pragma once

#include <arch_sm90.h>

#include "epilogue_fwd.h"
#include "flash.h"
#include "mainloop_fwd_sm90.h"
#include "seqlen_info.h"
#include "tensor_maps_sm90.h"
#include "tile_scheduler.h"

namespace flash {

// Parametrised by the traits type: nvcc 13.0 misspells a namespaced value as a kernel's own
// argument.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    flash_fwd_kernel_sm90(__grid_constant__ Flash_fwd_params const params,
                          __grid_constant__ TensorMapsSm90 const maps,
                          __grid_constant__ TileDealer const dealer) {
    constexpr FwdConfig C = Traits::kConfig;
    using Mainloop = MainloopFwdSm90<C>;
    extern __shared__ __align__(1024) char smem[];
    auto &storage = *reinterpret_cast<typename Traits::SharedStorage *>(smem);

    int const warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x / 128), 0);
    if (threadIdx.x == 0) {
        Mainloop::init_barriers(storage);
    }
    __syncthreads();

    SeqlenInfo const seqlen(params);
    if (warpgroup == 0) {
        sm90::registers_lower<Traits::kLoadRegisters>();
        if (threadIdx.x < 32 && sm90::elect_one()) {
            typename Mainloop::Loader loader{maps, storage};
            loader.run(params, seqlen, dealer);
        }
    } else {
        sm90::registers_raise<Traits::kMmaRegisters>();
        int const thread = threadIdx.x - 128;
        typename Mainloop::Consumer consumer{storage, warpgroup - 1, thread};
        consumer.first_turn();
        Tensor tOrO = partition_fragment_C(
            typename Traits::TiledMmaPV{},
            Shape<Int<Traits::kTileM>, Int<Traits::kHeadDim>>{});  // ((2, 2, d/8), 1, 1)
        for (int index = blockIdx.x; index < dealer.tiles; index = consumer.next(dealer, index)) {
            TileCoord const tile = Mainloop::coord(params, dealer, index);
            typename Mainloop::SoftmaxT softmax(params.scale_softmax, params.scale_softmax_log2);
            consumer.run(tile, seqlen, tOrO, softmax);
            Tensor out = make_tensor(
                tOrO.data(),
                Layout<Shape<Shape<_2, _2>, _1, Int<Traits::kHeadDim / 8>>>{});  // (4, 1, d/8)
            auto const lse = softmax.finalize(out);
            EpilogueFwd<Traits>::store_lse(params, tile, seqlen, thread, lse);
            EpilogueFwd<Traits>::store_from_registers(params, tile, seqlen, thread, out);
        }
    }
}

}  // namespace flash
