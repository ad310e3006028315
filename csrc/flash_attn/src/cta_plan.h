// The plan that each CTA of an attention kernel makes for itself, so that no plan kernel has to run
// first. For caches of few sequences with equally many queries each and few tiles a head, as in
// decoding.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "block_info.h"
#include "flash.h"
#include "plan_segments.h"
#include "work_plan.h"
#include "work_tile.h"

namespace flash {

// Lies in shared memory. Has the tiles, parts and workspace rows that Planner (flash_plan_kernel.h)
// would write for the same launch. The tiles with most key blocks come first.
template <FwdConfig C>
struct CtaPlan {
    using Splits = TileSplits<PlanFwd<C>>;
    // Threads that hold one sequence each. In the sm90 class the consumers' threads come first and
    // the producer's hold the last sequences.
    static constexpr int kFirstThread = C.arch == 90 ? 128 : 0;
    static constexpr int kThreads = 32 * C.warps + kFirstThread;
    static constexpr int kMost = cute::min(256, kThreads);
    // Compiled into kernels for caches only: in the sm90 class those of one consumer and at most
    // two CTAs an SM, or of two consumers and four stages; in the sm80 class paged ones and, up to
    // head dimension 128, those of 64 rows. In kernels of dense calls the code made 512 causal
    // tokens 3 to 6 % slower.
    static constexpr bool kOfCaches = C.arch == 90
                                          ? (C.stages == 4 && C.warps == 8 && C.min_ctas == 1) ||
                                                (C.warps == 4 && C.min_ctas <= 2)
                                          : C.paged || (C.tile_m == 64 && C.head_dim <= 128);
    // Tiles of more than 128 rows are for more queries. In the sm90 class the plan lies behind all
    // else in shared memory, in at most kPlanBytes; in the sm80 class where Q is loaded later.
    static constexpr int kTileBytes = 2 * C.head_dim * (C.tile_m + 2 * C.stages * C.tile_n);
    static constexpr int kPlanBytes = C.arch == 90 ? 16384 : 0;
    static constexpr bool kFits =
        kOfCaches && C.tile_m <= 128 && C.min_ctas * (kTileBytes + kPlanBytes) <= 228 * 1024;
    // Most tiles of a launch: a CTA of the sm80 class has one tile and plans for it alone.
    static constexpr int kMostTiles = C.arch == 90 ? INT32_MAX : 512;
    static constexpr int kMostOfSequence = C.arch == 90 ? 4 : 1;  // most tiles of queries

    struct Blocks {
        int sum, min, max;
    };
    // A sequence's sort key, and how many parts each of its tiles has.
    struct Rank {
        int key, parts;
    };

    Blocks of_warps[kMost / 32];
    Rank ranks[kMost];
    PlanTile sequences[kMost];  // sorted, as their first tiles; part: number of parts
    int first[kMost + 1];       // tiles of a grid head before sorted sequence i's
    int is_last;                // of MergeParts: 1 where this CTA stored a tile's last part

    // Returns whether CTAs plan for themselves. The host asks, too, and then has no plan written.
    CUTE_HOST_DEVICE static bool suits(Flash_fwd_params const &params) {
        bool const fixed = params.cu_seqlens_q_ptr == nullptr && params.seqused_q_ptr == nullptr &&
                           int64_t(params.b) * params.seqlen_q == params.total_q;
        return kFits && params.plan_ptr != nullptr && params.is_cache != 0 && fixed &&
               params.seqlen_q > 0 && num_m_blocks(params) <= kMostOfSequence &&
               params.b <= kMost && int64_t(params.b) * num_grid_heads(params) <= kMostTiles &&
               params.seqlen_k <= INT32_MAX / kMost;
    }

    // Returns the tiles of queries of each sequence, not counting parts.
    CUTE_HOST_DEVICE static int num_m_blocks(Flash_fwd_params const &params) {
        return (num_rows(params, params.seqlen_q) + C.tile_m - 1) / C.tile_m;
    }

    // Builds the plan. Collective over the CTA; the caller must follow it with __syncthreads().
    // lists: whether to write the positions of split tiles, for the combine kernel.
    CUTE_DEVICE void make(Flash_fwd_params const &params, bool lists) {
        int const i = (static_cast<int>(threadIdx.x) + kThreads - kFirstThread) % kThreads;
        bool const mine = i < params.b;
        PlanTile tile{.partial_row = -1};
        int blocks = 0;
        if (mine) {
            tile = Segments<false>{params}.of_dense_queries(i);
            blocks = Splits::key_blocks(params, tile);
        }
        Blocks const of_all = reduce(params.b, i, {blocks, mine ? blocks : INT32_MAX, blocks});
        int const m_blocks = num_m_blocks(params);
        int const part_blocks =
            Splits::part_blocks(params, int64_t(of_all.sum) * m_blocks, of_all.max);
        int const parts =
            params.num_splits > 1 ? Splits::num_parts(params, part_blocks, blocks) : 1;
        Place const place = of_all.min == of_all.max
                                ? Place{i, i * parts, parts > 1 ? i * parts : 0}
                                : place_among(params.b, i, mine, blocks / parts, parts);
        if (!mine) {
            return;
        }
        if (parts > 1) {
            int const rows = num_rows(params, tile.seqlen_q);
            // As in Planner, parts share rows of the workspace where there is no room.
            int const begin = cute::min(rows * place.partial, params.partial_rows - rows * parts);
            tile.partial_row = cute::max(begin, -1);
        }
        tile.part = parts;
        sequences[place.rank] = tile;
        first[place.rank] = place.tiles * m_blocks;
        if (place.rank == params.b - 1) {
            first[params.b] = (place.tiles + parts) * m_blocks;
        }
        bool const any_split = params.num_splits > 1 && of_all.max > part_blocks;
        if (lists) list_positions(params, i, tile, any_split);
    }

    // Returns the tiles of a grid head; each part counts.
    CUTE_DEVICE int count(Flash_fwd_params const &params) const { return first[params.b]; }

    CUTE_DEVICE PlanTile tile(Flash_fwd_params const &params, int index) const {
        int low = 0, high = params.b;  // first[low] <= index < first[high]
        CUTE_NO_UNROLL
        while (high - low > 1) {
            int const middle = (low + high) / 2;
            (first[middle] <= index ? low : high) = middle;
        }
        PlanTile tile = sequences[low];
        int part = index - first[low];
        if (kMostOfSequence > 1 && num_m_blocks(params) > 1) {
            tile.m_block = part / tile.part;
            part -= tile.m_block * tile.part;
        }
        if (tile.partial_row >= 0) {
            tile.partial_row += part * num_rows(params, tile.seqlen_q);
        }
        tile.part += PlanTile::kParts * part;
        return tile;
    }

  private:
    // A sequence's rank among the sorted ones; the parts of those sorted before it, where a whole
    // one counts 1; and the parts of the split ones before it in the batch.
    struct Place {
        int rank, tiles, partial;
    };

    // Returns the reduction over all b sequences to all threads. Collective over the CTA. i: this
    // thread's sequence.
    CUTE_DEVICE Blocks reduce(int b, int i, Blocks mine) {
        CUTE_UNROLL
        for (int lane = 16; lane > 0; lane /= 2) {
            mine.sum += __shfl_xor_sync(0xffffffffu, mine.sum, lane);
            mine.min = cute::min(mine.min, __shfl_xor_sync(0xffffffffu, mine.min, lane));
            mine.max = cute::max(mine.max, __shfl_xor_sync(0xffffffffu, mine.max, lane));
        }
        if (i % 32 == 0 && i < b) {
            of_warps[i / 32] = mine;
        }
        __syncthreads();
        Blocks all = of_warps[0];
        CUTE_NO_UNROLL
        for (int warp = 1; 32 * warp < b; ++warp) {
            Blocks const other = of_warps[warp];
            all = {all.sum + other.sum, cute::min(all.min, other.min),
                   cute::max(all.max, other.max)};
        }
        return all;
    }

    // Sorts the sequences by `blocks`, the key blocks of a part. Collective over the CTA.
    CUTE_DEVICE Place place_among(int b, int i, bool mine, int blocks, int parts) {
        // Keys are unique: of equally long sequences the first comes first.
        int const key = blocks * kMost + kMost - 1 - i;
        if (mine) {
            ranks[i] = {key, parts};
        }
        __syncthreads();
        Place place{0, 0, 0};
        CUTE_NO_UNROLL
        for (int j = 0; mine && j < b; ++j) {
            Rank const other = ranks[j];
            bool const before = other.key > key;
            place.rank += before;
            place.tiles += before ? other.parts : 0;
            place.partial += j < i && other.parts > 1 ? other.parts : 0;
        }
        return place;
    }

    // Writes what the combine kernel reads: all positions of the batch if any tile is split, else
    // none. One CTA lists those of a sequence.
    CUTE_DEVICE static void list_positions(Flash_fwd_params const &params, int i,
                                           PlanTile const &tile, bool any_split) {
        auto &plan = *static_cast<WorkPlan *>(params.plan_ptr);
        if (i == 0 && blockIdx.x == 0) {
            plan.split_positions = any_split ? params.total_q : 0;
        }
        if (!any_split || i % gridDim.x != blockIdx.x) {
            return;
        }
        auto *const positions = const_cast<SplitPosition *>(plan.positions(params)) + tile.row_q;
        CUTE_NO_UNROLL
        for (int j = 0; j < tile.seqlen_q; ++j) {
            positions[j] = {tile.row_q + j, tile.partial_row + (j << params.pack_shift),
                            num_rows(params, tile.seqlen_q), tile.partial_row >= 0 ? tile.part : 0};
        }
    }
};

// Returns whether each key and value is read by one tile alone, as in decoding with packed heads.
// Always false in kernels that are not for caches.
template <FwdConfig C>
CUTE_HOST_DEVICE bool reads_keys_once(Flash_fwd_params const &params) {
    if constexpr (!CtaPlan<C>::kOfCaches && !C.paged) return false;
    return num_grid_heads(params) == params.h_k && num_rows(params, params.seqlen_q) <= C.tile_m;
}

// Returns the planned tiles of all grid heads. own: the CTA's plan; null: the plan kernel wrote
// one.
template <FwdConfig C>
CUTE_DEVICE int planned_tiles(Flash_fwd_params const &params, CtaPlan<C> const *own) {
    int const of_a_head =
        own != nullptr ? own->count(params) : static_cast<WorkPlan const *>(params.plan_ptr)->count;
    return of_a_head * num_grid_heads(params);
}

template <FwdConfig C>
CUTE_DEVICE WorkTile plan_tile(Flash_fwd_params const &params, CtaPlan<C> const *own, int index) {
    auto const &written = *static_cast<WorkPlan const *>(params.plan_ptr);
    bool const packed = params.pack_shift > 0;
    int const ratio = packed ? 1 : params.h_h_k_ratio;
    int const count = own != nullptr ? own->count(params) : written.count;
    PlanIndex const at = reads_keys_once<C>(params) ? key_heads_first(num_grid_heads(params), index)
                                                    : key_heads_last(count, ratio, index);
    PlanTile const planned = own != nullptr ? own->tile(params, at.tile) : written.tiles[at.tile];
    auto [tile, part] = planned_tile(planned, ratio, at.head);
    tile.batch_k = params.is_cache != 0 ? tile.batch : 0;
    tile.batch = 0;
    tile.head_q = packed ? tile.head * params.h_h_k_ratio : tile.head;
    tile.blocks = BlockInfo<C.mask, C.tile_m, C.tile_n>::block_range(params, tile);
    if (tile.is_part()) {
        int const number = part / PlanTile::kParts, parts = part % PlanTile::kParts;
        take_part(tile, C.tile_n, number, parts);
        if constexpr (CtaPlan<C>::kFits) {  // only CTAs that plan merge
            tile.part = number;
            tile.parts = parts;
        }
    }
    return tile;
}

}  // namespace flash
