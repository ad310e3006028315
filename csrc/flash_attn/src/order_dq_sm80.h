// The order of the parts of dQ of a block of queries, where gradients are to be repeatable: that of
// the tiles of keys.
#pragma once

#include <arch_sm90.h>

#include <cute/config.hpp>

#include "block_info.h"
#include "flash.h"
#include "kernel_traits_bwd_sm80.h"
#include "work_tile.h"

namespace flash {

// Blocks are visited from the last one down, and several have a semaphore together: tiles count
// there that they have added their parts, and a tile adds its own when those before it have. As a
// CTA comes to the first of these blocks, its first thread waits for its turn, ahead of a barrier
// that each step has anyway, and one of its last warp counts the blocks before, behind a barrier
// that all warps have come to since they added. Both take a round trip to L2, in which the other
// warps go on. A tile waits for tiles that CTAs drew before it, so for none that has not begun.
template <class Traits>
struct OrderDqSm80 {
    static_assert(Traits::kSumsDq);
    static_assert(kRowStatsMultiple % Traits::kQueries == 0);
    static_assert(kRowStatsMultiple % kSemaphoreRows == 0);
    static constexpr int kBlocks = kRowStatsMultiple / Traits::kQueries;  // of a semaphore

    using Info = BlockInfo<Traits::kMask, Traits::kQueries, Traits::kKeys>;

    // Whether a visit to this block comes to a semaphore. n: visits of the head behind it.
    CUTE_DEVICE static bool is_first(WorkTile const &tile, int block, int n) {
        return n == tile.blocks.count - 1 || block % kBlocks == kBlocks - 1;
    }

    // Before that visit; row: the head's first one in the workspace.
    CUTE_DEVICE static void await(Flash_bwd_params const &params, WorkTile const &tile, int block,
                                  int64_t row) {
        int const before =
            tile.m_block - Info::first_visitor(params, tile, block / kBlocks * kBlocks);
        uint32_t const *const semaphore = semaphore_of(params, block, row);
        CUTE_NO_UNROLL
        while (before > 0 && sm90::load_acquire(semaphore) < static_cast<uint32_t>(before)) {
        }
    }
    // The parts of all visits at the block's semaphore.
    CUTE_DEVICE static void count(Flash_bwd_params const &params, int block, int64_t row) {
        sm90::add_release(semaphore_of(params, block, row), 1u);
    }

  private:
    CUTE_DEVICE static uint32_t *semaphore_of(Flash_bwd_params const &params, int block,
                                              int64_t row) {
        int64_t const first = row + block / kBlocks * kRowStatsMultiple;
        return params.dq_semaphore_ptr + first / kSemaphoreRows;
    }
};

}  // namespace flash
