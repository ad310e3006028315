// Above d = 128 the order of the parts of dQ of a block of queries, in launches where the first
// tile of keys that visits it stores its part and the others add theirs (FirstSumsSm90), or all add
// theirs one after the other (TileSchedulerBwdSm90::keeps_order()).
// Up to 128 the writer of dQ keeps it (writer_dq_sm90.h).
#pragma once

#include <arch_sm90.h>

#include <cute/config.hpp>

#include "flash.h"
#include "kernel_traits_bwd_sm90.h"
#include "pipeline_sm90.h"
#include "tile_scheduler_bwd_sm90.h"
#include "work_tile.h"

namespace flash {

// A thread beside the producer and the consumers, or two. For each step it waits until all CTAs of
// the tiles before have counted their parts, and says by dq_turn that its consumers may store or
// add theirs; so none of them waits for global memory. By dq_stored it knows that they have, and
// counts that at the block's semaphore: where the first tile stores, a step later, which is soon
// enough for most; where all keep their order, the second thread does it at once, and arrives at
// dq_turn, too.
template <class Traits>
struct OrderDqSm90 {
    using Scheduler = TileSchedulerBwdSm90<Traits>;

    typename Traits::SharedStorage &storage;
    int const which, writers;  // 0 of 1, or 0 or 1 of 2
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
        uint32_t *last = nullptr;  // where the step before is still to be counted
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

    // Before a phase of dq_turn ends all warps have waited for the one of the same slot before, two
    // steps ago: a step's dS is complete, and a warp hands over its P of a step behind its dQ of
    // the second one before. Of two threads this one polls ahead of that, as most steps then find
    // their turn come.
    CUTE_DEVICE void await(uint32_t const *semaphore, int ctas) {
        if (writers == 1) sm90::barrier_wait(&storage.ds_full[ds.stage()], ds.parity());
        CUTE_NO_UNROLL
        while (ctas > 0 && sm90::load_acquire(semaphore) < static_cast<uint32_t>(ctas)) {
        }
        if (writers == 2) sm90::barrier_wait(&storage.ds_full[ds.stage()], ds.parity());
        ds.advance();
        sm90::barrier_arrive(&storage.dq_turn[turn.stage()]);
    }

    // dq_stored of a step is waited for ahead of dq_turn of the second one behind it, without which
    // no warp arrives at that slot again: by one thread before it says so, by the second of two
    // before it arrives for that step.
    CUTE_DEVICE void count(uint32_t *semaphore) {
        sm90::barrier_wait(&storage.dq_stored[stored.stage()], stored.parity());
        stored.advance();
        if (which == 1) sm90::barrier_arrive(&storage.dq_turn[turn.stage()]);
        sm90::add_release(semaphore, 1u);
    }
};

}  // namespace flash
