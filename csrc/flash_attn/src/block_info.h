// Which keys a query sees, and which blocks a tile visits. No other file has this arithmetic.
#pragma once

#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "flash.h"
#include "work_tile.h"

namespace flash {

struct Range {
    int begin, end;  // [begin, end)
};

// Returns the keys that the query at `position` sees; end <= begin: none. Masks are aligned to the
// bottom-right corner.
template <MaskKind kMask>
CUTE_HOST_DEVICE Range visible_keys(Flash_fwd_params const &params, WorkTile const &tile,
                                    int position) {
    int const diagonal = position + tile.seqlen_k - tile.seqlen_q;
    if constexpr (kMask == MaskKind::local) {
        return {cute::max(diagonal - params.window_left, 0),
                cute::min(diagonal + params.window_right + 1, tile.seqlen_k)};
    }
    int const end = kMask == MaskKind::causal ? diagonal + 1 : tile.seqlen_k;
    return {0, cute::min(end, tile.seqlen_k)};
}

// Inverse of visible_keys(): returns the positions of the queries that see a key.
template <MaskKind kMask>
CUTE_HOST_DEVICE Range seeing_queries(Flash_fwd_params const &params, WorkTile const &tile,
                                      int key) {
    int const diagonal = key - (tile.seqlen_k - tile.seqlen_q);
    if constexpr (kMask == MaskKind::local) {
        return {cute::max(diagonal - params.window_right, 0),
                cute::min(diagonal + params.window_left + 1, tile.seqlen_q)};
    }
    return {kMask == MaskKind::causal ? cute::max(diagonal, 0) : 0, tile.seqlen_q};
}

template <MaskKind kMask, int kTileM, int kTileN>
struct BlockInfo {
    // Returns the blocks of keys that a tile of queries visits: those with a key that some row
    // sees, and among them, unmasked, those that every row sees whole. From one row to the next
    // neither end of the visible keys moves to the left, so that the first and last row decide.
    CUTE_HOST_DEVICE static BlockRange block_range(Flash_fwd_params const &params,
                                                   WorkTile const &tile) {
        int const first_row = tile.m_block * kTileM;
        int const last_row = cute::min(first_row + kTileM, num_rows(params, tile.seqlen_q)) - 1;
        Range const first = visible_keys<kMask>(params, tile, row_position(params, first_row));
        Range const last = visible_keys<kMask>(params, tile, row_position(params, last_row));
        int const end = (cute::max(last.end, 0) + kTileN - 1) / kTileN;
        int const unmasked_end = cute::max(first.end, 0) / kTileN;
        if constexpr (kMask != MaskKind::local) {
            return {end, unmasked_end, 0, 0};
        }
        int const begin = first.begin / kTileN;
        int const unmasked_begin = (last.begin + kTileN - 1) / kTileN;
        int const unmasked = cute::max(unmasked_end - unmasked_begin, 0);
        return {cute::max(end - begin, 0), unmasked, begin,
                unmasked > 0 ? unmasked_begin - begin : 0};
    }

    // Returns the blocks of queries that a tile of keys visits: those with a query that sees one of
    // the keys, and among them, unmasked, those whose queries all see every key. Queries past the
    // end count as seeing all: their P is 0. For the order of the visits see mainloop_bwd_sm80.h
    // and step_bwd_sm90.h.
    CUTE_HOST_DEVICE static BlockRange query_block_range(Flash_fwd_params const &params,
                                                         WorkTile const &tile, int n_block) {
        int const first_key = n_block * kTileN;
        int const last_key = cute::min(first_key + kTileN, tile.seqlen_k) - 1;
        Range const first = seeing_queries<kMask>(params, tile, first_key);
        Range const last = seeing_queries<kMask>(params, tile, last_key);
        int const begin = first.begin / kTileM;
        int const end = (cute::max(last.end, 0) + kTileM - 1) / kTileM;
        int const unmasked_begin = (last.begin + kTileM - 1) / kTileM;
        int const unmasked_end =
            first.end == tile.seqlen_q ? end : cute::max(first.end, 0) / kTileM;
        int const unmasked = cute::max(unmasked_end - unmasked_begin, 0);
        return {cute::max(end - begin, 0), unmasked, begin,
                unmasked > 0 ? unmasked_begin - begin : 0};
    }

    // Returns the first block of keys that visits a block of queries, which must have a visitor.
    // The visitors are consecutive.
    CUTE_HOST_DEVICE static int first_visitor(Flash_fwd_params const &params, WorkTile const &tile,
                                              int m_block) {
        return visible_keys<kMask>(params, tile, m_block * kTileM).begin / kTileN;
    }

    // Makes a tile that extends past the last key mask every block, in kernels that accumulate dQ
    // in global memory: P behind the last key may be infinite, and infinity times a K of zeros is
    // NaN.
    CUTE_HOST_DEVICE static void mask_behind_keys(WorkTile &tile, int seqlen_k) {
        if ((tile.m_block + 1) * kTileN > seqlen_k) {
            tile.blocks.unmasked = 0;
        }
    }
};

}  // namespace flash
