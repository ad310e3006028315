// The plan of a ragged batch (varlen), whose sequences' lengths are known on the device only: what
// flash_plan_kernel.h writes, and how tiles are read from it and from that of cta_plan.h.
#pragma once

#include <cstddef>
#include <cute/config.hpp>

#include "flash.h"
#include "work_tile.h"

namespace flash {

// A tile of all grid heads, written and read as two vectors. Rows of no sequence are tiles, too:
// their output is written.
struct alignas(16) PlanTile {
    int m_block;
    int row_q, row_k;        // where the sequence begins
    int seqlen_q, seqlen_k;  // seqlen_k: -1 for rows of q of no sequence
    int batch;               // the sequence; of a cache its entry
    int part;                // of its key blocks: kParts * part + parts
    int partial_row;         // as in WorkTile

    static constexpr int kParts = 1 << 16;
};

// Where a query position's partial results are, for the kernel that merges them.
struct alignas(16) SplitPosition {
    int row_q;        // of q and o
    int partial_row;  // of the first part, and of the first of the packed heads
    int stride;       // from part to part
    int parts;
};

// What plan_ptr points to; behind `capacity` tiles is work space for 2 b + 1 of them, then, where
// tiles may be split, the positions of those that are.
struct WorkPlan {
    int count;            // of tiles
    int split_positions;  // in any order
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

// Where tile `index` of all grid heads is, of which each has `count` tiles.
struct PlanIndex {
    int tile;  // of its grid head
    int head;  // grid head
};
// The grid heads of one key head are neighbours, `ratio` of them, then come its tiles, longest
// first, then the next key head: the keys and values of few heads are in use at a time and stay in
// L2.
CUTE_HOST_DEVICE PlanIndex key_heads_last(int count, int ratio, int index) {
    int const head_k = index / (count * ratio);
    int const within = index - head_k * count * ratio;
    return {within / ratio, head_k * ratio + within % ratio};
}
// `group` of all `heads` grid heads are neighbours, or in the last group the rest, then come their
// tiles, then the next group.
CUTE_HOST_DEVICE PlanIndex groups_last(int count, int heads, int group, int index) {
    int const before = index / (count * group) * group;
    int const within = index - before * count;
    int const width = cute::min(group, heads - before);
    return {within / width, before + within % width};
}
// Where keys and values are read once, all grid heads of a tile are neighbours: so are their rows
// in memory, which reads pieces of 256 bytes far apart more slowly (docs/facts.md).
CUTE_HOST_DEVICE PlanIndex key_heads_first(int heads, int index) {
    return {index / heads, index % heads};
}

// A tile of a grid with `ratio` heads for each key head, but for its query head and its blocks, and
// which part of them it has. `batch` is that of the plan.
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
