// Keeps the order in which CTAs add their parts of dQ of a block of queries, where gradients are to
// be repeatable: that of their tiles of keys.
#pragma once

#include <arch_sm90.h>

#include <cute/config.hpp>

#include "block_info.h"
#include "flash.h"
#include "kernel_traits_bwd_sm80.h"
#include "work_tile.h"

namespace flash {

// A tile visits blocks from the last one down, and kBlocks of them share a semaphore: tiles count
// there that they have added their parts of these blocks, and a tile adds its own once all tiles
// before it have counted. When a CTA comes to the first of these blocks, its first thread waits for
// the tile's turn, ahead of a barrier that each step has anyway, and a thread of its last warp
// counts the parts at the semaphore before, behind a barrier that all warps have come to since they
// added them. Both take a round trip to L2, during which the other warps go on. A tile only waits
// for tiles that CTAs drew before it, so for none that has not begun.
template <class Traits>
struct OrderDqSm80 {
    static_assert(Traits::kSumsDq);
    static_assert(kRowStatsMultiple % Traits::kQueries == 0);
    static_assert(kRowStatsMultiple % kSemaphoreRows == 0);
    static constexpr int kBlocks = kRowStatsMultiple / Traits::kQueries;  // that share a semaphore

    using Info = BlockInfo<Traits::kMask, Traits::kQueries, Traits::kKeys>;

    // Whether a visit to this block is the tile's first one at a semaphore. n: visits of the head
    // behind this one.
    CUTE_DEVICE static bool is_first(WorkTile const &tile, int block, int n) {
        return n == tile.blocks.count - 1 || block % kBlocks == kBlocks - 1;
    }

    // One thread waits for the tile's turn at such a visit. row: the head's first workspace row.
    CUTE_DEVICE static void await(Flash_bwd_params const &params, WorkTile const &tile, int block,
                                  int64_t row) {
        int const before =
            tile.m_block - Info::first_visitor(params, tile, block / kBlocks * kBlocks);
        uint32_t const *const semaphore = semaphore_of(params, block, row);
        CUTE_NO_UNROLL
        while (before > 0 && sm90::load_acquire(semaphore) < static_cast<uint32_t>(before)) {
        }
    }
    // One thread counts the tile's parts of all blocks that share this block's semaphore.
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
