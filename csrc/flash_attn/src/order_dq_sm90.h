// Above d = 128 the order of the parts of dQ of a block of queries, in launches where a head's
// first tile of keys stores its part and the others add theirs
// (TileSchedulerBwdSm90::may_store_first()). Up to 128 the writer of dQ keeps it
// (writer_dq_sm90.h).
#pragma once

#include <arch_sm90.h>

#include <cute/config.hpp>

#include "flash.h"
#include "kernel_traits_bwd_sm90.h"
#include "pipeline_sm90.h"
#include "tile_scheduler_bwd_sm90.h"
#include "work_tile.h"

namespace flash {

// One thread beside the producer and the consumers. For each step it says by dq_turn that the
// consumers may store or add their parts: in a first tile at once, in others when all CTAs of the
// first tile have stored theirs. In a first tile it counts, at the block's semaphore, that its
// consumers have stored: by dq_stored it knows. So no consumer waits for global memory.
template <class Traits>
struct OrderDqSm90 {
    typename Traits::SharedStorage &storage;
    Ring<Traits::kTileSlots> tiles;
    Ring<Traits::kDsStages> ds;
    Ring<Traits::kDqSlots> turn, stored;

    CUTE_DEVICE void run(Flash_bwd_params const &params) {
        CUTE_NO_UNROLL
        while (true) {
            sm90::barrier_wait(&storage.tile_full[tiles.stage()], tiles.parity());
            WorkTile const &tile = storage.tile[tiles.stage()];
            if (tile.m_block < 0) return;
            run_tile(params, tile);
            sm90::barrier_arrive(&storage.tile_empty[tiles.stage()]);
            tiles.advance();
        }
    }

  private:
    // Before a phase of dq_turn ends all warps have waited for the one of the same slot before, two
    // steps ago: a step's dS is complete, and a warp hands over its P of a step behind its dQ of
    // the second one before. dq_stored of a step is waited for ahead of dq_turn of the second one
    // behind it, without which no warp arrives at that slot again.
    CUTE_DEVICE void run_tile(Flash_bwd_params const &params, WorkTile const &tile) {
        bool const first = tile.m_block == 0;
        int const blocks = params.seqlen_q_rounded / kSemaphoreRows;
        uint32_t before = 0;  // the semaphore of the step before
        int const ratio = params.h_h_k_ratio, steps = tile.blocks.count * ratio;
        StepBwd step = StepBwd::first_of(tile, ratio);
        CUTE_NO_UNROLL
        for (int i = 0; i < steps; ++i) {
            uint32_t const semaphore =
                (tile.batch * params.h + step.head) * blocks +
                (tile.blocks.begin + step.visit) * (Traits::kTileM / kSemaphoreRows);
            sm90::barrier_wait(&storage.ds_full[ds.stage()], ds.parity());
            ds.advance();
            if (!first) await(params.dq_semaphore_ptr + semaphore);
            sm90::barrier_arrive(&storage.dq_turn[turn.stage()]);
            turn.advance();
            if (first && i > 0) count(params.dq_semaphore_ptr + before);
            before = semaphore;
            step.advance(ratio);
        }
        if (first && steps > 0) count(params.dq_semaphore_ptr + before);
    }

    CUTE_DEVICE static void await(uint32_t const *semaphore) {
        CUTE_NO_UNROLL
        while (sm90::load_acquire(semaphore) < Traits::kCluster) {
        }
    }

    CUTE_DEVICE void count(uint32_t *semaphore) {
        sm90::barrier_wait(&storage.dq_stored[stored.stage()], stored.parity());
        stored.advance();
        sm90::add_acq_rel(semaphore, 1u);
    }
};

}  // namespace flash
