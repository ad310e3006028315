// From the flat CTA index to the tile it computes. Batch and heads never sit on grid.y or grid.z,
// whose limit is 65,535: the grid is one-dimensional, and grid.x reaches 2^31 - 1.
#pragma once

#include <cute/config.hpp>

#include "flash.h"

namespace flash {

struct TileCoord {
    int m_block;
    int head;
    int batch;
};

template <FwdConfig C>
struct TileScheduler {
    static constexpr int kTileM = C.tile_m;

    CUTE_HOST_DEVICE static int num_m_blocks(Flash_fwd_params const &params) {
        return (params.seqlen_q + kTileM - 1) / kTileM;
    }

    // May exceed what a grid holds; the host checks before it launches.
    CUTE_HOST_DEVICE static int64_t num_tiles(Flash_fwd_params const &params) {
        return int64_t(params.b) * params.h * num_m_blocks(params);
    }

    // Tiles of one head are neighbours, so the CTAs in flight share its keys and values in L2.
    // Under a causal mask the tiles with most keys come first: what runs last, while SMs fall idle,
    // is short.
    CUTE_HOST_DEVICE static TileCoord coord(Flash_fwd_params const &params, int tile) {
        int const m_blocks = num_m_blocks(params);
        int const batch_head = tile / m_blocks;
        int const m = tile - batch_head * m_blocks;
        int const batch = batch_head / params.h;
        return {C.mask == MaskKind::causal ? m_blocks - 1 - m : m, batch_head - batch * params.h,
                batch};
    }
};

}  // namespace flash
