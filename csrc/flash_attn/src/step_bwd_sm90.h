// In which order a tile of keys visits the blocks of queries of its query heads, in the sm90
// class's backward.
#pragma once

#include <cute/config.hpp>

#include "flash.h"
#include "work_tile.h"

namespace flash {

// A step of a tile: a visit of a block of queries of a query head. Each block is visited for all
// query heads of the key head before the next block is. The last block comes first, so that tiles
// that begin together read a block, and add to its sums of dQ, at the same time, while it is in L2.
//
// Short tiles of a causal mask begin at the diagonal instead and ascend, where registers suffice
// for that: above d = 128 not with several options (kMayAscend). A worker whose first tile has n of
// a head's N blocks, and is at block N - 1 - t after t of them, has a second tile with N - n
// blocks. The second tile begins at block n after n blocks in all, and so is at block t after t
// blocks in all: all second tiles read the same block at a time, although they begin one after the
// other.
template <MaskKind kMask>
struct StepBwd {
    int visit;   // index among the tile's blocks
    int head;    // query head
    int behind;  // query heads of the key head behind this one
    int way;     // from one block to the next: 1 or -1

    CUTE_DEVICE static StepBwd first_of(WorkTile const &tile, int ratio, bool ascends) {
        bool const up = kMask == MaskKind::causal && ascends;
        return {up ? 0 : tile.blocks.count - 1, tile.head_q, ratio - 1, up ? 1 : -1};
    }
    CUTE_DEVICE void advance(int ratio) {
        bool const last = behind == 0;
        visit += last ? way : 0;
        head += last ? 1 - ratio : 1;
        behind = last ? ratio - 1 : behind - 1;
    }
    CUTE_DEVICE StepBwd before(int ratio) const {
        bool const first = behind == ratio - 1;
        return {first ? visit - way : visit, first ? head + ratio - 1 : head - 1,
                first ? 0 : behind + 1, way};
    }
};

// Under a window neighbouring tiles begin at different blocks, so one tile is at a block some steps
// after the other. There are fewer such steps if all blocks of a query head come before those of
// the next.
template <>
struct StepBwd<MaskKind::local> {
    int visit;
    int head;
    int count;  // of the tile's blocks

    CUTE_DEVICE static StepBwd first_of(WorkTile const &tile, int, bool) {
        return {tile.blocks.count - 1, tile.head_q, tile.blocks.count};
    }
    CUTE_DEVICE void advance(int) {
        bool const last = visit == 0;
        visit = last ? count - 1 : visit - 1;
        head += last;
    }
    CUTE_DEVICE StepBwd before(int) const {
        bool const first = visit == count - 1;
        return {first ? 0 : visit + 1, head - first, count};
    }
};

}  // namespace flash
