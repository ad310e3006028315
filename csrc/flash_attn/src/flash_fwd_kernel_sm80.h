// The sm80-class forward kernel: one CTA, one tile of queries.
#pragma once

#include <dynamic_smem.h>

#include "cta_plan.h"
#include "dependent_launch.h"
#include "epilogue_fwd.h"
#include "flash.h"
#include "mainloop_fwd_sm80.h"
#include "tile_scheduler.h"

namespace flash {

// The template argument is the traits type and not the FwdConfig: nvcc 13.0 misspells a namespaced
// value that is a kernel's own argument.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kConfig.min_ctas)
    flash_fwd_kernel_sm80(__grid_constant__ Flash_fwd_params const params) {
    constexpr FwdConfig C = Traits::kConfig;
    using Mainloop = MainloopFwdSm80<C>;
    auto &storage = dynamic_smem<typename Traits::SharedStorage>();
    await_previous_kernel();

    CtaPlan<C> *own = nullptr;
    if (CtaPlan<C>::suits(params)) {
        static_assert(sizeof(CtaPlan<C>) <= sizeof(storage));
        own = reinterpret_cast<CtaPlan<C> *>(&storage);
        own->make(params, params.num_splits > 1);
        __syncthreads();
    }
    int const index = blockIdx.x;
    bool const planned = params.plan_ptr != nullptr;
    if (planned && index >= planned_tiles(params, own)) {
        return;
    }
    WorkTile const tile =
        planned ? plan_tile(params, own, index) : TileScheduler<C>::tile(params, index);
    if (own != nullptr) {
        __syncthreads();  // Q takes the plan's bytes
    }
    typename Mainloop::SoftmaxT softmax(params.scale_softmax_log2);
    Tensor tOrO = partition_fragment_C(
        typename Traits::TiledMma{},
        Shape<Int<Traits::kTileM>, Int<Traits::kHeadDim>>{});  // (4, MMA_M, d/8)
    clear(tOrO);

    Mainloop::run(params, storage, tile, tOrO, softmax);
    using Epilogue = EpilogueFwd<Traits>;
    auto const rows =
        Epilogue::template thread_rows<Mainloop::kRowsPerThread>(params, tile, threadIdx.x);
    auto const sinks =
        Epilogue::load_sinks(params, tile.head_q, rows, tile.in_sequence() && !tile.is_part());
    auto const lse = softmax.finalize(tOrO, sinks, Epilogue::output_scale(params));
    OutputOffset const offset = Epilogue::output_offset(params, tile);
    if (tile.is_part()) {
        Epilogue::store_part(params, offset, rows, threadIdx.x, lse, tOrO);
        return;
    }
    Epilogue::store_lse(params, offset.lse, rows, threadIdx.x, lse);
    Epilogue::store_through_smem(params, storage, tile, offset.o, tOrO);
}

}  // namespace flash
