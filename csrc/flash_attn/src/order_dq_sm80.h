// The order of the parts of dQ of a block of queries, where gradients are to be repeatable: that of
// the tiles of keys.
#pragma once

#include <arch_sm90.h>

#include <cute/config.hpp>

#include "block_info.h"
#include "flash.h"
#include "work_tile.h"

namespace flash {

// A CTA's first thread waits, ahead of the barrier behind which its warps add a part, until the
// tiles before have counted theirs at the block's semaphore. It counts the CTA's own part behind
// the next step's first barrier, so that neither takes a barrier of its own, and the additions are
// likely to be done by then. A tile waits for tiles that CTAs drew before it, so for none that has
// not begun.
template <class Traits>
struct OrderDqSm80 {
    static_assert(!Traits::kKeepsOrder || Traits::kQueries % kSemaphoreRows == 0);

    using Info = BlockInfo<Traits::kMask, Traits::kQueries, Traits::kKeys>;

    CUTE_HOST_DEVICE static bool is_kept(Flash_bwd_params const &params) {
        return Traits::kKeepsOrder && params.deterministic != 0 && params.dq_ptr != nullptr;
    }

    // Before a part of a block is added. row: the block's first one in the workspace.
    CUTE_DEVICE static void await(Flash_bwd_params const &params, WorkTile const &tile, int block,
                                  int64_t row) {
        int const before = tile.m_block - Info::first_visitor(params, tile, block);
        uint32_t const *const semaphore = params.dq_semaphore_ptr + row / kSemaphoreRows;
        CUTE_NO_UNROLL
        while (before > 0 && sm90::load_acquire(semaphore) < static_cast<uint32_t>(before)) {
        }
    }

    // Behind a barrier that all warps have come to since they added it.
    CUTE_DEVICE static void count(Flash_bwd_params const &params, int64_t row) {
        sm90::add_release(params.dq_semaphore_ptr + row / kSemaphoreRows, 1u);
    }
};

}  // namespace flash
