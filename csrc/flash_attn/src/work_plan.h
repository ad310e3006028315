// The plan of a ragged batch (varlen), whose sequences' lengths are known on the device only: what
// flash_plan_kernel.h writes and the tile scheduler reads.
#pragma once

#include <cstddef>
#include <cute/config.hpp>

#include "block_info.h"
#include "flash.h"
#include "work_tile.h"

namespace flash {

// A tile of all grid heads, written and read as two vectors. Rows of no sequence are tiles, too:
// their output is written.
struct alignas(16) PlanTile {
    int m_block;
    int row_q, row_k;        // where the sequence begins
    int seqlen_q, seqlen_k;  // seqlen_k: -1 for rows of q of no sequence
    int sequence;
    int unused[2];
};

// What plan_ptr points to; behind `capacity` tiles follow 2 b + 2 ints of work space.
struct WorkPlan {
    int count;  // of tiles, those with most key blocks first
    int unused[3];
    PlanTile tiles[1];
};
static_assert(sizeof(PlanTile) == 8 * sizeof(int) && offsetof(WorkPlan, tiles) == 4 * sizeof(int),
              "plan_words()");

// A tile of a grid with `ratio` heads for each key head, but for its query head and its blocks. The
// grid heads of one key head are neighbours, then come its tiles, longest first, then the next key
// head: the keys and values of few heads are in use at a time and stay in L2. `batch` becomes the
// sequence's number.
CUTE_HOST_DEVICE WorkTile planned_tile(WorkPlan const &plan, int ratio, int index) {
    int const head_k = index / (plan.count * ratio);
    int const within = index - head_k * plan.count * ratio;
    PlanTile const planned = plan.tiles[within / ratio];
    return {.m_block = planned.m_block,
            .head = head_k * ratio + within % ratio,
            .batch = planned.sequence,
            .head_k = head_k,
            .row_q = planned.row_q,
            .row_k = planned.row_k,
            .seqlen_q = planned.seqlen_q,
            .seqlen_k = planned.seqlen_k};
}

template <FwdConfig C>
CUTE_HOST_DEVICE WorkTile plan_tile(Flash_fwd_params const &params, WorkPlan const &plan,
                                    int index) {
    bool const packed = params.pack_shift > 0;
    WorkTile tile = planned_tile(plan, packed ? 1 : params.h_h_k_ratio, index);
    tile.batch = 0;
    tile.head_q = packed ? tile.head * params.h_h_k_ratio : tile.head;
    tile.blocks = BlockInfo<C.mask, C.tile_m, C.tile_n>::block_range(params, tile);
    return tile;
}

}  // namespace flash
