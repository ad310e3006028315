// From a flat index to the tile it stands for, and which CTA computes which. Batch and heads never
// sit on grid.y or grid.z, whose limit is 65,535: the grid is one-dimensional, and grid.x reaches
// 2^31 - 1.
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

    // Heads whose tiles are dealt out together. Their keys and values must stay in L2, and there
    // must be enough tiles that the short ones fill up the last wave; beyond that fewer are better,
    // as CTAs with long tiles then compute while others with short ones load.
    CUTE_HOST_DEVICE static int heads_in_group(Flash_fwd_params const &params, int sms) {
        constexpr int64_t kL2Bytes = 32 << 20;  // of the 50 MB an H100 or H200 has
        constexpr int64_t kWaves = 3;
        auto const ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
        int64_t const bytes = int64_t(4) * params.seqlen_k * params.d;  // K and V, 16 bits each
        int64_t const tiles = int64_t(params.h_h_k_ratio) * num_m_blocks(params);
        int64_t const in_l2 = kL2Bytes / cute::max(bytes, int64_t(1));
        int64_t const most = cute::max(cute::min(in_l2, ceil_div(kWaves * sms, tiles)), int64_t(1));
        int64_t const all = int64_t(params.b) * params.h_k;
        if (all <= most) {
            return static_cast<int>(all * params.h_h_k_ratio);
        }
        // The last group, with which the launch ends, as full as can be.
        auto const last = [&](int64_t heads) { return (all - 1) % heads + 1; };
        int64_t best = most;
        for (int64_t heads = most - 1; heads > most / 2; --heads) {
            if (last(heads) * best > last(best) * heads) {
                best = heads;
            }
        }
        return static_cast<int>(best * params.h_h_k_ratio);
    }

    // Longest tiles first among `group` heads, one group after the other: what is dealt out last is
    // short, and a head's keys are read from device memory once.
    CUTE_HOST_DEVICE static TileCoord coord_in_group(Flash_fwd_params const &params, int group,
                                                     int tile) {
        int const m_blocks = num_m_blocks(params);
        int const first_head = tile / (group * m_blocks) * group;
        int const heads = cute::min(group, params.b * params.h - first_head);
        int const within = tile - first_head * m_blocks;
        int const m = within / heads;
        int const batch_head = first_head + within - m * heads;
        int const batch = batch_head / params.h;
        return {m_blocks - 1 - m, batch_head - batch * params.h, batch};
    }
};

// How the tiles of one launch are dealt out to CTAs that stay: CTA i begins with tile i.
struct TileDealer {
    int tiles;
    int group;          // heads, for coord_in_group
    unsigned *counter;  // tiles dealt out beyond the first of each CTA; null: every gridDim.x-th

    // Whoever is told the last number, which no tile has, sets the counter back: after `tiles`
    // numbers nobody asks again.
    CUTE_DEVICE int next(int tile) const {
        if (counter == nullptr) {
            return tile + static_cast<int>(gridDim.x);
        }
        unsigned const number = atomicAdd(counter, 1u);
        if (number == static_cast<unsigned>(tiles) - 1) {
            atomicExch(counter, 0u);
        }
        return static_cast<int>(number + gridDim.x);
    }
};

}  // namespace flash
