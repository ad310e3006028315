// Which key blocks a query tile visits: the only place with block range arithmetic.
#pragma once

#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "flash.h"
#include "seqlen_info.h"

namespace flash {

template <FwdConfig C>
struct BlockInfo {
    static constexpr int kTileM = C.tile_m;
    static constexpr int kTileN = C.tile_n;

    // Key blocks [0, n_block_end) hold every key that some row of the tile sees.
    CUTE_HOST_DEVICE static int n_block_end(SeqlenInfo const &seqlen, int m_block) {
        int keys = seqlen.seqlen_k;
        if constexpr (C.mask == MaskKind::causal) {
            int const last_row = cute::min((m_block + 1) * kTileM, seqlen.seqlen_q) - 1;
            keys = last_row + 1 + seqlen.causal_shift();
        }
        return (cute::max(keys, 0) + kTileN - 1) / kTileN;
    }

    // Key blocks [0, n_block_unmasked_end) are seen whole by every row of the tile.
    CUTE_HOST_DEVICE static int n_block_unmasked_end(SeqlenInfo const &seqlen, int m_block) {
        int keys = seqlen.seqlen_k;
        if constexpr (C.mask == MaskKind::causal) {
            int const first_row = m_block * kTileM;
            keys = cute::min(keys, first_row + 1 + seqlen.causal_shift());
        }
        return cute::max(keys, 0) / kTileN;
    }
};

}  // namespace flash
