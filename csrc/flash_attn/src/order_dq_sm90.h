// Keeps the order of the parts of dQ of a block of queries above d = 128, in launches where the
// first tile of keys that visits the block stores its part and the others add theirs
// (FirstSumsSm90), or where all add theirs one after the other
// (TileSchedulerBwdSm90::keeps_order()). Up to d = 128 the writer of dQ keeps it
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

// One or two threads beside the producer and the consumers. For each step the first one waits until
// all CTAs of the tiles before have counted their parts at the block's semaphore, and then arrives
// at dq_turn, so that its consumers may store or add theirs; so no consumer waits for global
// memory. The consumers arrive at dq_stored when they have, and this is counted at the semaphore:
// where only the first tile stores, by the same thread a step later, which is soon enough for most,
// or where all tiles keep their order by the second thread at once, which arrives at dq_turn, too.
template <class Traits>
struct OrderDqSm90 {
    using Scheduler = TileSchedulerBwdSm90<Traits>;

    typename Traits::SharedStorage &storage;
    int const which, writers;  // of this thread, and how many there are: 1 or 2
    Ring<Traits::kTileSlots> tiles;
    Ring<Traits::kDsStages> ds;
    Ring<Traits::kDqSlots> turn, stored;

    CUTE_DEVICE static int count(Flash_bwd_params const &params, bool) {
        return Scheduler::keeps_order(params) ? 2 : Scheduler::may_store(params) ? 1 : 0;
    }

    CUTE_DEVICE void run(Flash_bwd_params const &params) {
        if (which == 1) {
            for (int i = 0; i < Traits::kDqSlots; ++i) {
                sm90::barrier_arrive(&storage.dq_turn[i]);
            }
        }
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
    CUTE_DEVICE void run_tile(Flash_bwd_params const &params, WorkTile const &tile) {
        uint32_t *last = nullptr;  // the semaphore where the step before is still to be counted
        int const ratio = params.h_h_k_ratio, steps = tile.blocks.count * ratio;
        auto step = Scheduler::first_step(params, tile);
        CUTE_NO_UNROLL
        for (int i = 0; i < steps; ++i) {
            int const block = tile.blocks.begin + step.visit;
            int64_t const row = Scheduler::sums_row(params, tile, step.head, block);
            uint32_t *const semaphore = params.dq_semaphore_ptr + row / kSemaphoreRows;
            if (which == 0) {
                await(semaphore, Scheduler::tiles_before(params, tile, block) * Traits::kCluster);
            } else {
                count(semaphore);
            }
            turn.advance();
            if (last != nullptr) count(last);
            bool const counts_later = writers == 1 && Scheduler::counts(params, tile, block);
            last = counts_later ? semaphore : nullptr;
            step.advance(ratio);
        }
        if (last != nullptr) count(last);
    }

    // Waits for the step's turn, and arrives at dq_turn. Before a phase of dq_turn ends, all warps
    // must have waited for the phase before of the same slot, which is of two steps ago. They have
    // once the step's dS is complete, as a warp hands over its P of a step behind its dQ of the
    // second step before. With two threads this one polls the semaphore before it waits for dS, as
    // most steps then find that their turn has come.
    CUTE_DEVICE void await(uint32_t const *semaphore, int ctas) {
        if (writers == 1) sm90::barrier_wait(&storage.ds_full[ds.stage()], ds.parity());
        CUTE_NO_UNROLL
        while (ctas > 0 && sm90::load_acquire(semaphore) < static_cast<uint32_t>(ctas)) {
        }
        if (writers == 2) sm90::barrier_wait(&storage.ds_full[ds.stage()], ds.parity());
        ds.advance();
        sm90::barrier_arrive(&storage.dq_turn[turn.stage()]);
    }

    // Waits until the consumers have stored or added their parts of a step, and counts that. This
    // comes ahead of the end of dq_turn of the second step behind, without which no warp arrives at
    // the same slot of dq_stored again: a single thread waits before it arrives at dq_turn for that
    // step, and of two threads the second one does.
    CUTE_DEVICE void count(uint32_t *semaphore) {
        sm90::barrier_wait(&storage.dq_stored[stored.stage()], stored.parity());
        stored.advance();
        if (which == 1) sm90::barrier_arrive(&storage.dq_turn[turn.stage()]);
        sm90::add_release(semaphore, 1u);
    }
};

}  // namespace flash
