// The plan of a ragged batch (varlen), whose sequences' lengths are known on the device only: the
// layout that flash_plan_kernel.h writes, and how its entries and those of cta_plan.h become tiles.
#pragma once

#include <cstddef>
#include <cute/config.hpp>

#include "flash.h"
#include "work_tile.h"

namespace flash {

// A planned tile, the same of all grid heads, written and read as two 16-byte vectors. Rows of no
// sequence have tiles, too, so that their output is written.
struct alignas(16) PlanTile {
    int m_block;
    int row_q, row_k;        // rows where the sequence begins
    int seqlen_q, seqlen_k;  // seqlen_k: -1 for rows of q of no sequence
    int batch;               // the sequence; of a cache its entry
    int part;                // kParts * (number of this part of its key blocks) + parts
    int partial_row;         // as in WorkTile

    static constexpr int kParts = 1 << 16;
};

// Where the combine kernel finds the partial results of a query position.
struct alignas(16) SplitPosition {
    int row_q;        // in q and o
    int partial_row;  // workspace row of the first part and first packed head
    int stride;       // workspace rows from part to part
    int parts;
};

// What plan_ptr points to. Behind plan_capacity tiles come 2 b + 1 more as workspace of Planner,
// then, where tiles may be split, the positions of those that are.
struct WorkPlan {
    int count;            // tiles of a grid head
    int split_positions;  // how many; they are in any order
    int unused[2];
    PlanTile tiles[1];

    CUTE_HOST_DEVICE static int64_t position_offset(Flash_fwd_params const &params) {
        return plan_words(params.plan_capacity, params.b) * int64_t(sizeof(int));
    }
    CUTE_HOST_DEVICE SplitPosition const *positions(Flash_fwd_params const &params) const {
        return reinterpret_cast<SplitPosition const *>(reinterpret_cast<char const *>(this) +
                                                       position_offset(params));
    }
};
static_assert(sizeof(PlanTile) == 8 * sizeof(int) && offsetof(WorkPlan, tiles) == 4 * sizeof(int),
              "plan_words()");

// Which tile of which grid head is tile `index` of all grid heads, each of which has `count` tiles.
struct PlanIndex {
    int tile;  // of its grid head
    int head;  // grid head
};
// Grid heads of a key head, `ratio` of them, vary fastest, then its tiles, longest first, then key
// heads: the keys and values of few heads are in use at a time and stay in L2.
CUTE_HOST_DEVICE PlanIndex key_heads_last(int count, int ratio, int index) {
    int const head_k = index / (count * ratio);
    int const within = index - head_k * count * ratio;
    return {within / ratio, head_k * ratio + within % ratio};
}
// Grid heads of a group of `group` vary fastest, then its tiles, then groups. The last group has
// the rest of all `heads` grid heads.
CUTE_HOST_DEVICE PlanIndex groups_last(int count, int heads, int group, int index) {
    int const before = index / (count * group) * group;
    int const within = index - before * count;
    int const width = cute::min(group, heads - before);
    return {within / width, before + within % width};
}
// Grid heads vary fastest, where keys and values are read only once: the rows of a tile's heads are
// neighbours in memory, which reads pieces of 256 bytes far apart more slowly (docs/facts.md).
CUTE_HOST_DEVICE PlanIndex key_heads_first(int heads, int index) {
    return {index / heads, index % heads};
}

// A planned tile for a grid head, `ratio` of which share a key head, and which part of its key
// blocks it has. The caller fills in head_q and blocks; `batch` is that of the plan.
struct PlannedTile {
    WorkTile tile;
    int part;  // as in PlanTile
};
CUTE_HOST_DEVICE PlannedTile planned_tile(PlanTile const &planned, int ratio, int head) {
    WorkTile const tile{.m_block = planned.m_block,
                        .head = head,
                        .batch = planned.batch,
                        .head_q = 0,
                        .head_k = head / ratio,
                        .row_q = planned.row_q,
                        .row_k = planned.row_k,
                        .seqlen_q = planned.seqlen_q,
                        .seqlen_k = planned.seqlen_k,
                        .batch_k = 0,
                        .blocks = {},
                        .partial_row = planned.partial_row};
    return {tile, planned.part};
}

}  // namespace flash
