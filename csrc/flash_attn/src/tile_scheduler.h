// Maps flat indices to tiles, and tiles to CTAs. The grid is one-dimensional, batch and heads
// included: grid.x reaches 2^31 - 1, but grid.y and grid.z only 65,535.
#pragma once

#include <cute/config.hpp>

#include "block_info.h"
#include "flash.h"
#include "work_plan.h"
#include "work_tile.h"

namespace flash {

template <FwdConfig C>
struct TileScheduler {
    static constexpr int kTileM = C.tile_m;

    CUTE_HOST_DEVICE static int num_m_blocks(Flash_fwd_params const &params) {
        return (num_rows(params, params.seqlen_q) + kTileM - 1) / kTileM;
    }

    // Returns the number of tiles, of a ragged batch an upper bound. May exceed what a grid holds,
    // which the host checks before it launches.
    CUTE_HOST_DEVICE static int64_t num_tiles(Flash_fwd_params const &params) {
        int64_t const of_a_head = params.plan_ptr != nullptr
                                      ? int64_t(params.plan_capacity)
                                      : int64_t(params.b) * num_m_blocks(params);
        return of_a_head * num_grid_heads(params);
    }

    // batch_head: batch * grid heads + head.
    CUTE_HOST_DEVICE static WorkTile make_tile(Flash_fwd_params const &params, int m_block,
                                               int batch_head) {
        int const heads = num_grid_heads(params);
        bool const packed = params.pack_shift > 0;
        WorkTile tile{.m_block = m_block, .batch = batch_head / heads};
        tile.head = batch_head - tile.batch * heads;
        tile.head_q = packed ? tile.head * params.h_h_k_ratio : tile.head;
        tile.head_k = packed ? tile.head : tile.head / params.h_h_k_ratio;
        tile.seqlen_q = params.seqlen_q;
        tile.seqlen_k = params.seqlen_k;
        tile.batch_k = tile.batch;
        tile.blocks = BlockInfo<C.mask, C.tile_m, C.tile_n>::block_range(params, tile);
        return tile;
    }

    // Tiles of one head are neighbours, so the CTAs in flight share its keys and values in L2.
    // Under a causal mask the tiles with most keys come first: what runs last, while SMs fall idle,
    // is short.
    CUTE_HOST_DEVICE static WorkTile tile(Flash_fwd_params const &params, int index) {
        int const m_blocks = num_m_blocks(params);
        int const batch_head = index / m_blocks;
        int const m = index - batch_head * m_blocks;
        return make_tile(params, C.mask == MaskKind::causal ? m_blocks - 1 - m : m, batch_head);
    }

    // Returns how many grid heads have their tiles scheduled together. Their keys and values must
    // stay in L2, and there must be enough tiles that the short ones fill up the last wave; beyond
    // that fewer are better, as CTAs with long tiles then compute while others with short ones
    // load.
    CUTE_HOST_DEVICE static int heads_in_group(Flash_fwd_params const &params, int sms) {
        constexpr int64_t kL2Bytes = 32 << 20;  // of the 50 MB an H100 or H200 has
        constexpr int64_t kWaves = 3;
        auto const ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
        int const ratio = num_grid_heads(params) / params.h_k;
        int64_t const bytes = int64_t(4) * params.seqlen_k * params.d;  // K and V, 16 bits each
        int64_t const tiles = int64_t(ratio) * num_m_blocks(params);
        int64_t const in_l2 = kL2Bytes / cute::max(bytes, int64_t(1));
        int64_t const most = cute::max(cute::min(in_l2, ceil_div(kWaves * sms, tiles)), int64_t(1));
        int64_t const all = int64_t(params.b) * params.h_k;
        if (all <= most) {
            return static_cast<int>(all * ratio);
        }
        // Makes the last group, with which the launch ends, as full as can be.
        auto const last = [&](int64_t heads) { return (all - 1) % heads + 1; };
        int64_t best = most;
        for (int64_t heads = most - 1; heads > most / 2; --heads) {
            if (last(heads) * best > last(best) * heads) {
                best = heads;
            }
        }
        return static_cast<int>(best * ratio);
    }

    // Longest tiles first among `group` grid heads, one group after the other: the tiles scheduled
    // last are short, and a head's keys are read from device memory once.
    CUTE_HOST_DEVICE static WorkTile tile_in_group(Flash_fwd_params const &params, int group,
                                                   int index) {
        int const m_blocks = num_m_blocks(params);
        int const first_head = index / (group * m_blocks) * group;
        int const heads = cute::min(group, params.b * num_grid_heads(params) - first_head);
        int const within = index - first_head * m_blocks;
        int const m = within / heads;
        return make_tile(params, m_blocks - 1 - m, first_head + within - m * heads);
    }
};

// Assigns tiles to the workers of a persistent launch. A worker is a CTA or, in a backward above d
// = 128, a cluster. Worker i begins with tile i, unless it draws its first tile, too. With a
// counter workers steal work, each taking the next tile that no other has; without one each takes
// every workers-th.
struct TileQueue {
    int tiles;
    // Heads whose tiles are scheduled together: heads_in_group(). 0 in a backward: each CTA
    // computes whole heads.
    int group;
    unsigned *counter;  // tiles taken beyond the first of each worker; null: no work stealing
    // Counters of the stored parts of each split tile; null: the combine kernel merges them.
    unsigned *arrivals;

    // Returns the worker's tile after tile `index`. The counter resets itself: each worker that had
    // a tile ends by drawing a number that stands for none, so `tiles` numbers are drawn in all,
    // and the draw of the last one sets the counter to 0.
    CUTE_DEVICE int next(int index) const { return next(index, static_cast<int>(gridDim.x)); }
    CUTE_DEVICE int next(int index, int workers) const {
        return counter == nullptr ? index + workers : draw(tiles) + workers;
    }
    // Draws the next of `numbers` numbers; the last draw resets the counter. Where each worker
    // draws its first tile, too, numbers = tiles + workers, and all tiles before a drawn one are in
    // work or done, even if not all workers run yet.
    CUTE_DEVICE int draw(int numbers) const {
        unsigned const number = atomicAdd(counter, 1u);
        if (number == static_cast<unsigned>(numbers) - 1) {
            atomicExch(counter, 0u);
        }
        return static_cast<int>(number);
    }
};

}  // namespace flash
