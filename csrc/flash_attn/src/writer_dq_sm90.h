// The writers of dQ up to d = 128: threads beside the producer and the consumers.
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
// one bulk reduction. The first tile of keys that visits a block may store it instead, and counts
// that at the block's semaphore; the others wait for the count (FirstSumsSm90), or each waits for
// all before it (TileSchedulerBwdSm90::keeps_order()). Before a step is counted its sums must have
// arrived, which takes longer than some steps; so there may be two writers then, which take turns
// with the steps and poll for a step's turn before its dQ is there. In CTAs that own heads the
// consumers add dQ themselves.
template <class Traits>
struct WriterDqSm90 {
    using Scheduler = TileSchedulerBwdSm90<Traits>;
    static constexpr uint32_t kBytes = Traits::kTileM * Traits::kHeadDim * sizeof(float);

    typename Traits::SharedStorage &storage;
    int const which, writers;  // of this thread, and how many there are: 1 or 2
    Ring<Traits::kTileSlots> tiles;
    Ring<1> dq;

    // The number of writers. Up to d = 64, where steps are longer, a second one pays only where
    // tiles keep their order.
    CUTE_DEVICE static int count(Flash_bwd_params const &params, bool owns) {
        bool const pays = Traits::kHeadDim > 64 || Scheduler::keeps_order(params);
        return Scheduler::waits_turn(params) && pays ? 2 : owns ? 0 : 1;
    }

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
        int const ratio = params.h_h_k_ratio, steps = tile.blocks.count * ratio;
        auto step = Scheduler::first_step(params, tile);
        CUTE_NO_UNROLL
        for (int i = 0; i < steps; ++i) {
            if (static_cast<int>(dq.uses & (writers - 1)) == which) {
                write(params, tile, step.head, tile.blocks.begin + step.visit);
            } else {  // no later phase may complete before this thread has seen this one
                sm90::barrier_wait(&storage.dq_full, dq.parity());
                sm90::barrier_arrive(&storage.dq_empty);
            }
            dq.advance();
            step.advance(ratio);
        }
    }

    CUTE_DEVICE void write(Flash_bwd_params const &params, WorkTile const &tile, int head,
                           int block) {
        bool const stores = Scheduler::stores(params, tile, block);
        int64_t const row = Scheduler::sums_row(params, tile, head, block);
        float *const sums = params.dq_accum_ptr + row * Traits::kHeadDim;
        uint32_t *const semaphore = params.dq_semaphore_ptr + row / kSemaphoreRows;
        int const before = Scheduler::tiles_before(params, tile, block);
        if (before > 0 && writers == 2) await(semaphore, before);
        sm90::barrier_wait(&storage.dq_full, dq.parity());
        // Between the consumers' stores and this thread's accesses through the asynchronous proxy.
        // It may follow the barrier, as it is on the path between the two, in their CTA [by the
        // rules of Lustig et al., Mixed-proxy extensions for the NVIDIA PTX memory consistency
        // model, ISCA 2022, which is older than this proxy].
        sm90::fence_async_proxy();
        if (stores) {
            sm90::bulk_store(sums, storage.dq.data(), kBytes);
        } else {
            if (before > 0 && writers == 1) await(semaphore, before);
            sm90::bulk_reduce_add(sums, storage.dq.data(), kBytes);
        }
        sm90::bulk_commit();
        sm90::bulk_wait_read();
        sm90::barrier_arrive(&storage.dq_empty);
        if (Scheduler::counts(params, tile, block)) {
            sm90::bulk_wait();
            sm90::fence_async_proxy_global();
            sm90::add_release(semaphore, 1u);
        }
    }

    CUTE_DEVICE static void await(uint32_t const *semaphore, int tiles) {
        CUTE_NO_UNROLL
        while (sm90::load_acquire(semaphore) < static_cast<uint32_t>(tiles)) {
        }
        sm90::fence_async_proxy_global();
    }
};

}  // namespace flash
