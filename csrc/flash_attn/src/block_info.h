// Which keys a query sees, and which key blocks its tile visits: the only place with that
// arithmetic.
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

    struct Keys {
        int begin, end;  // [begin, end)
    };

    // What the query at a position sees; end <= begin: nothing. Masks are aligned to the
    // bottom-right corner.
    CUTE_HOST_DEVICE static Keys visible_keys(Flash_fwd_params const &params, WorkTile const &tile,
                                              int position) {
        int const diagonal = position + tile.seqlen_k - tile.seqlen_q;
        if constexpr (C.mask == MaskKind::local) {
            return {cute::max(diagonal - params.window_left, 0),
                    cute::min(diagonal + params.window_right + 1, tile.seqlen_k)};
        }
        int const end = C.mask == MaskKind::causal ? diagonal + 1 : tile.seqlen_k;
        return {0, cute::min(end, tile.seqlen_k)};
    }

    // The blocks that hold every key that some row sees, and among them those that every row sees
    // whole. From row to row both ends move to the right, or not at all.
    CUTE_HOST_DEVICE static BlockRange block_range(Flash_fwd_params const &params,
                                                   WorkTile const &tile) {
        int const first_row = tile.m_block * kTileM;
        int const last_row = cute::min(first_row + kTileM, num_rows(params, tile.seqlen_q)) - 1;
        Keys const first = visible_keys(params, tile, row_position(params, first_row));
        Keys const last = visible_keys(params, tile, row_position(params, last_row));
        int const end = (cute::max(last.end, 0) + kTileN - 1) / kTileN;
        int const unmasked_end = cute::max(first.end, 0) / kTileN;
        if constexpr (C.mask != MaskKind::local) {
            return {end, unmasked_end, 0, 0};
        }
        int const begin = first.begin / kTileN;
        int const unmasked_begin = (last.begin + kTileN - 1) / kTileN;
        int const unmasked = cute::max(unmasked_end - unmasked_begin, 0);
        return {cute::max(end - begin, 0), unmasked, begin,
                unmasked > 0 ? unmasked_begin - begin : 0};
    }
};

}  // namespace flash
