// Which sums of dQ of the sm90 class begin with what a tile of keys stores, instead of zeros that
// all tiles add to.
#pragma once

#include <cstdint>
#include <cute/config.hpp>

#include "flash.h"

namespace flash {

// Where Flash_bwd_params::stores_first is set the first tile that visits a block of queries stores
// its dQ, and counts that at the block's semaphore; the others add theirs once it has. No zeros are
// written before, and none read. Sums of a block that no tile visits stay unwritten.
template <BwdConfig C>
struct FirstSumsSm90 {
    static constexpr int kTileKeys = C.dkv.rows * (C.head_dim > 128 ? 2 : 1);
    // In a ragged batch without a mask, up to d = 64, storing is slower from nine tiles on
    // (docs/tried_sm90.md).
    static constexpr bool kNarrow = C.varlen && C.mask == MaskKind::none && C.head_dim <= 64;
    static constexpr int kMostTiles = kNarrow ? 8 : 16;
    // Up to so many, Planner sorts the first tile of a sequence in front of its others.
    static constexpr int kMostBlocks = 1 << 15;

    // Whether storing is faster for a sequence, or for the heads of a dense batch. Without a window
    // a head should have few tiles, as zeros are one of kMostTiles + 1 accesses to a sum, and tiles
    // should have enough steps, as each is some two steps behind the one before. Under a window a
    // block is among the first steps of its first tile. But with grouped heads the short tiles at
    // the end of the keys come to the next query head early, and wait there for tiles with more
    // steps per head. Above d = 128 zeros cost no more than waiting, except for windows of few
    // steps (docs/tried_sm90.md).
    CUTE_HOST_DEVICE static bool pays(Flash_bwd_params const &params, int seqlen_q, int seqlen_k) {
        if constexpr (C.mask == MaskKind::local) {
            int64_t const window = int64_t(params.window_left) + params.window_right;
            if (C.head_dim > 128 && window >= 2 * kTileKeys) return false;
            return params.h_h_k_ratio == 1 || 3 * window <= seqlen_k;
        }
        int const tiles = static_cast<int>((int64_t(seqlen_k) + kTileKeys - 1) / kTileKeys);
        int64_t const blocks = (int64_t(seqlen_q) + C.dkv.step - 1) / C.dkv.step;
        return tiles <= kMostTiles && tiles <= params.h_h_k_ratio * blocks && blocks <= kMostBlocks;
    }
    // Whether first tiles store the sums of a sequence, or those of a dense batch.
    CUTE_HOST_DEVICE static bool are_stored(Flash_bwd_params const &params, int seqlen_q,
                                            int seqlen_k) {
        return params.stores_first != 0 && (!C.varlen || pays(params, seqlen_q, seqlen_k));
    }
};

}  // namespace flash
