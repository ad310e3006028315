// Which key blocks a query tile visits: the only place with block range arithmetic.
#pragma once

#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "flash.h"
#include "work_tile.h"

namespace flash {

template <FwdConfig C>
struct BlockInfo {
    static constexpr int kTileM = C.tile_m;
    static constexpr int kTileN = C.tile_n;

    // Keys [0, n) that the query at a position sees, before they are limited to the sequence's.
    // The causal mask is aligned to the bottom-right corner.
    CUTE_HOST_DEVICE static int visible_keys(WorkTile const &tile, int position) {
        return C.mask == MaskKind::causal ? position + 1 + tile.seqlen_k - tile.seqlen_q
                                          : tile.seqlen_k;
    }

    // Visit n is to key block n. The blocks that hold every key that some row sees, and among them
    // those that every row sees whole.
    CUTE_HOST_DEVICE static BlockRange block_range(Flash_fwd_params const &params,
                                                   WorkTile const &tile) {
        int const first_row = tile.m_block * kTileM;
        int const last_row = cute::min(first_row + kTileM, num_rows(params, tile.seqlen_q)) - 1;
        int const most = visible_keys(tile, row_position(params, last_row));
        int const least = visible_keys(tile, row_position(params, first_row));
        return {(cute::max(most, 0) + kTileN - 1) / kTileN,
                cute::max(cute::min(least, tile.seqlen_k), 0) / kTileN};
    }
};

}  // namespace flash
