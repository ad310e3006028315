// The writer of dQ up to d = 128: one thread beside the producer and the consumers.
#pragma once

#include <arch_sm90.h>

#include <cute/config.hpp>

#include "flash.h"
#include "kernel_traits_bwd_sm90.h"
#include "pipeline_sm90.h"
#include "tile_scheduler_bwd_sm90.h"
#include "work_tile.h"

namespace flash {

// Adds dQ of each step, which the consumers leave in shared memory, to the sums in global memory by
// one bulk reduction. Where kStoresFirst, a head's first tile of keys stores it instead, and counts
// that at the block's semaphore; the others wait for the count (may_store_first() of the
// scheduler). So a consumer waits for global memory only where this thread is a step behind. In
// CTAs that own heads the consumers add dQ themselves.
template <class Traits>
struct WriterDqSm90 {
    using Scheduler = TileSchedulerBwdSm90<Traits>;
    static constexpr uint32_t kBytes = Traits::kTileM * Traits::kHeadDim * sizeof(float);

    typename Traits::SharedStorage &storage;
    Ring<Traits::kTileSlots> tiles;
    Ring<1> dq;

    CUTE_DEVICE void run(Flash_bwd_params const &params) {
        CUTE_NO_UNROLL
        while (true) {
            sm90::barrier_wait(&storage.tile_full[tiles.stage()], tiles.parity());
            WorkTile const &tile = storage.tile[tiles.stage()];
            if (tile.m_block < 0) break;
            run_tile(params, tile);
            sm90::barrier_arrive(&storage.tile_empty[tiles.stage()]);
            tiles.advance();
        }
        sm90::bulk_wait();
    }

  private:
    CUTE_DEVICE void run_tile(Flash_bwd_params const &params, WorkTile const &tile) {
        bool const stores = Traits::kStoresFirst && tile.m_block == 0;
        int const ratio = params.h_h_k_ratio, steps = tile.blocks.count * ratio;
        StepBwd step = StepBwd::first_of(tile, ratio);
        CUTE_NO_UNROLL
        for (int i = 0; i < steps; ++i) {
            int64_t const row =
                Scheduler::sums_row(params, tile, step.head, tile.blocks.begin + step.visit);
            float *const sums = params.dq_accum_ptr + row * Traits::kHeadDim;
            uint32_t *const semaphore =
                Traits::kStoresFirst ? params.dq_semaphore_ptr + row / kSemaphoreRows : nullptr;
            sm90::barrier_wait(&storage.dq_full, dq.parity());
            // Between the consumers' stores and this thread's accesses through the asynchronous
            // proxy. It may follow the barrier, as it is on the path between the two, in their CTA
            // [by the rules of Lustig et al., Mixed-proxy extensions for the NVIDIA PTX memory
            // consistency model, ISCA 2022, which is older than this proxy].
            sm90::fence_async_proxy();
            if (stores) {
                sm90::bulk_store(sums, storage.dq.data(), kBytes);
            } else {
                if constexpr (Traits::kStoresFirst) await(semaphore);
                sm90::bulk_reduce_add(sums, storage.dq.data(), kBytes);
            }
            sm90::bulk_commit();
            sm90::bulk_wait_read();
            sm90::barrier_arrive(&storage.dq_empty);
            dq.advance();
            if (stores) {
                sm90::bulk_wait();
                sm90::fence_async_proxy_global();
                sm90::add_acq_rel(semaphore, 1u);
            }
            step.advance(ratio);
        }
    }

    CUTE_DEVICE static void await(uint32_t const *semaphore) {
        CUTE_NO_UNROLL
        while (sm90::load_acquire(semaphore) == 0) {
        }
        sm90::fence_async_proxy_global();
    }
};

}  // namespace flash
