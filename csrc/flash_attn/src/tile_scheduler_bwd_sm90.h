// From a flat index to a tile of keys, for the persistent CTAs or, above d = 128, clusters of the
// sm90 class's backward.
#pragma once

#include <cute/config.hpp>
#include <cute/numeric/math.hpp>
#include <type_traits>

#include "block_info.h"
#include "first_sums_sm90.h"
#include "flash.h"
#include "step_bwd_sm90.h"
#include "tile_scheduler.h"
#include "work_plan.h"
#include "work_tile.h"

namespace flash {

// In a ragged batch a plan lists the tiles.
template <class Traits>
struct TileSchedulerBwdSm90 {
    static constexpr int kTileKeys = Traits::kTileKeys;  // of a CTA or cluster
    using Info = BlockInfo<Traits::kMask, Traits::kTileM, kTileKeys>;
    using FirstSums = FirstSumsSm90<Traits::kConfig>;
    static constexpr bool kVarlen = Traits::kVarlen;
    // For Planner: what the plan's tiles are.
    static constexpr int kArch = Traits::kConfig.arch;
    static constexpr int kRows = kTileKeys;
    static constexpr bool kOfKeys = true;
    // Whether the tiles of a head come one after the other, with one head in a group.
    static constexpr bool kOneHead = Traits::kMask == MaskKind::none && !Traits::kStoresFirst;

    CUTE_HOST_DEVICE static BlockRange blocks(Flash_fwd_params const &params,
                                              WorkTile const &tile) {
        return Info::query_block_range(params, tile, tile.m_block);
    }

    CUTE_HOST_DEVICE static int num_n_blocks(Flash_bwd_params const &params) {
        return (params.seqlen_k + kTileKeys - 1) / kTileKeys;
    }
    // In a ragged batch an upper bound.
    CUTE_HOST_DEVICE static int64_t num_tiles(Flash_bwd_params const &params) {
        int64_t const of_a_head =
            kVarlen ? params.plan_capacity : int64_t(params.b) * num_n_blocks(params);
        return of_a_head * params.h_k;
    }
    CUTE_HOST_DEVICE static WorkPlan const &plan(Flash_bwd_params const &params) {
        return *static_cast<WorkPlan const *>(params.plan_ptr);
    }

    using Step = StepBwd<Traits::kMask>;
    // The first step of a tile. The bits of dK and dV follow from the order of a tile's steps, from
    // where a shared tile is cut (shared_tiles_sm90.h), and from how many parts heads are divided
    // into (head_parts.h). The order of the steps follows from the tile's place in its sequence
    // alone, and is the same in all kernels of this class, except where sums of dQ keep their
    // order, and with several options above d = 128 (kMayAscend).
    CUTE_DEVICE static Step first_step(Flash_bwd_params const &params, WorkTile const &tile) {
        int const rows = cute::min(tile.seqlen_q, tile.seqlen_k);
        bool const is_short = 2 * tile.blocks.count * Traits::kTileM <= rows;
        bool const ascends = is_short && may_ascend(rows) && !keeps_order(params);
        return Step::first_of(tile, params.h_h_k_ratio, ascends);
    }
    // Whether short tiles may ascend; rows: the fewer of the queries and the keys. With few, which
    // L2 holds, they need not.
    CUTE_HOST_DEVICE static bool may_ascend(int rows) {
        return Traits::kMayAscend && rows > 8 * kTileKeys;
    }

    // Whether tiles add to the sums of dQ of a block in the order of their keys, so that dQ has the
    // same bits each time.
    CUTE_HOST_DEVICE static bool keeps_order(Flash_bwd_params const &params) {
        return Traits::kSteals && params.deterministic != 0;
    }
    // Whether tiles may wait for another one's part; then workers draw their first tile, too. A
    // tile only waits for tiles of its head that are drawn before it: get_tile() ensures that in a
    // dense batch, the plan's order in a ragged one.
    CUTE_HOST_DEVICE static bool waits_turn(Flash_bwd_params const &params) {
        return may_store(params) || keeps_order(params);
    }
    // Whether any tile stores its part of dQ instead of adding it.
    CUTE_HOST_DEVICE static bool may_store(Flash_bwd_params const &params) {
        return Traits::kStoresFirst && (kStoresAll || params.stores_first != 0);
    }
    // Whether a tile stores its part of a block's dQ, as the first one that visits it.
    CUTE_HOST_DEVICE static bool stores(Flash_bwd_params const &params, WorkTile const &tile,
                                        int block) {
        return Traits::kStoresFirst && are_stored(params, tile) &&
               tile.m_block == Info::first_visitor(params, tile, block);
    }
    // The number of tiles of the head that a tile waits for before it adds to a block's sums.
    CUTE_HOST_DEVICE static int tiles_before(Flash_bwd_params const &params, WorkTile const &tile,
                                             int block) {
        int const before = tile.m_block - Info::first_visitor(params, tile, block);
        if (keeps_order(params)) return before;
        return Traits::kStoresFirst && are_stored(params, tile) ? cute::min(before, 1) : 0;
    }
    // Whether a tile counts at the block's semaphore that it has stored or added its part.
    CUTE_HOST_DEVICE static bool counts(Flash_bwd_params const &params, WorkTile const &tile,
                                        int block) {
        return keeps_order(params) || stores(params, tile, block);
    }

    // Whether first tiles of keys store dQ (FirstSumsSm90): where it pays, in launches of several
    // waves or, under a window, of any size; in a ragged batch only those of the sequences where it
    // pays. Also where tiles keep their order, as they wait anyway.
    CUTE_HOST_DEVICE static bool may_store_first(Flash_bwd_params const &params, int sms) {
        if (params.dq_semaphore_ptr == nullptr) return false;
        constexpr int64_t kWaves = Traits::kMask == MaskKind::local ? 0 : Traits::kWide ? 8 : 4;
        int64_t const tiles =
            kVarlen ? params.total_k / kTileKeys * int64_t(params.h_k) : num_tiles(params);
        bool const pays = !kVarlen ? FirstSums::pays(params, params.seqlen_q, params.seqlen_k)
                                   : !FirstSums::kNarrow || are_short(params);
        return (pays && tiles * Traits::kCluster >= kWaves * sms) || keeps_order(params);
    }

    // Whether a plan lists the sequences of a ragged batch one after the other: where all tiles of
    // a sequence wait for each other, and where sequences are so short, on average, that L2 holds
    // the heads of those in work.
    CUTE_HOST_DEVICE static bool has_sequences_in_order(Flash_bwd_params const &params) {
        bool const of_window = Traits::kMask == MaskKind::local && params.stores_first != 0;
        return kVarlen && (keeps_order(params) || are_short(params) || of_window);
    }

    // The number of key heads whose tiles are scheduled together.
    CUTE_HOST_DEVICE static int heads_in_group(Flash_bwd_params const &params, int workers) {
        if (kVarlen) return heads_in_ragged_group(params, workers);
        bool const ordered = keeps_order(params);
        if (kOneHead && !ordered) return 1;
        int const all = cute::max(params.b * params.h_k, 1);
        int const tiles = cute::max(num_n_blocks(params), 1);  // of a head
        if (Traits::kMask == MaskKind::none && ordered) {
            // A tile is some two steps behind the one before it: the more tiles of a head are in
            // work, the later the last of them starts; the fewer, the more often a block that is
            // read has left L2.
            int const in_work = cute::min(tiles <= 32 ? 8 : 16, cute::max(tiles / 2, 1));
            return ceil_div(all, ceil_div(all, cute::max(workers / in_work, 1)));
        }
        if (Traits::kMask == MaskKind::none) {  // first tiles ahead of others, in one wave
            return cute::min(ceil_div(3 * workers, 4 * tiles), all);
        }
        if (Traits::kMask == MaskKind::local) {
            int64_t const few = ordered ? 8 : heads_of_window(params, workers);
            return static_cast<int>(cute::min(cute::max(heads_in_l2(params), few), int64_t(all)));
        }
        bool const is_long = may_ascend(cute::min(params.seqlen_q, params.seqlen_k));
        int64_t const taken = int64_t(waves_of_group(params, is_long)) * workers;
        if (!is_long) {
            int64_t const wanted =
                cute::min(cute::min(taken / tiles, heads_in_l2(params)), int64_t(all));
            return static_cast<int>(cute::max(wanted, int64_t(1)));
        }
        // Groups as equal as can be, so that the next one begins when all tiles of this one end.
        int64_t const groups = (2 * int64_t(all) * tiles + taken) / (2 * taken);
        return ceil_div(all, static_cast<int>(cute::max(groups, int64_t(1))));
    }
    // Under a window few heads, so that the tiles in work read the same blocks. More with grouped
    // heads and a wide window, so that the tiles in work of a head own the keys of half a window.
    CUTE_HOST_DEVICE static int64_t heads_of_window(Flash_bwd_params const &params, int workers) {
        int64_t const keys = int64_t(params.window_left) + params.window_right;
        bool const is_wide = params.h_h_k_ratio > 1 && keys >= 12 * kTileKeys;
        int64_t const in_work = int64_t(workers) * kTileKeys;
        int64_t const few = cute::max(4 / params.h_h_k_ratio, 1);
        return is_wide ? cute::max(2 * in_work / keys, few) : few;
    }
    // heads_in_group() of a ragged batch. Under a causal mask, queue() computes the number instead
    // if the sequences have no order.
    CUTE_HOST_DEVICE static int heads_in_ragged_group(Flash_bwd_params const &params, int workers) {
        if (!has_sequences_in_order(params)) return 1;
        int64_t heads = params.h_k;
        if (Traits::kMask == MaskKind::none) {
            // All tiles of a head are at one block at a time: with fewer heads more tiles read a
            // block together, but they wait longer for each other.
            heads = cute::max(heads_in_l2(params) / 2, int64_t(workers / 16));
        } else if (Traits::kMask == MaskKind::local && keeps_order(params)) {
            heads = cute::max(heads_in_l2(params), int64_t(1024 / Traits::kHeadDim));
        } else if (Traits::kMask == MaskKind::local && !are_short(params)) {
            heads = 1;
        }
        return static_cast<int>(cute::min(cute::max(heads, int64_t(1)), int64_t(params.h_k)));
    }
    // The waves of tiles in a group under a causal mask. For long heads two: a long tile and a
    // short one for each worker (StepBwd). Twice as many where tiles keep their order and so wait
    // for each other, except for long grouped heads, whose tiles take long.
    CUTE_HOST_DEVICE static int waves_of_group(Flash_bwd_params const &params, bool is_long) {
        bool const twice = keeps_order(params) && !(is_long && params.h_h_k_ratio > 1);
        return (is_long ? 2 : 1) * (twice ? 2 : 1);
    }

    // The first key, in the sequence, of CTA `rank` of the cluster.
    CUTE_HOST_DEVICE static int key_begin(WorkTile const &tile, int rank) {
        return tile.m_block * kTileKeys + rank * Traits::kTileN;
    }
    // Where the statistics of the tile's sequence begin among those of a head.
    CUTE_HOST_DEVICE static int stats_begin(WorkTile const &tile) {
        return kVarlen ? row_stats_begin(tile.row_q, tile.batch) : 0;
    }

    // The row, among the sums of dQ, where those of a block of queries of a query head begin. Sums
    // of owned heads are elsewhere (MainloopBwdSm90::Consumer::sums_row()).
    CUTE_HOST_DEVICE static int64_t sums_row(Flash_bwd_params const &params, WorkTile const &tile,
                                             int head, int block) {
        int const entry = kVarlen ? 0 : tile.batch;
        // Both are below 2^31, as the grid of row statistics is. Unsigned, as ptxas would keep, and
        // spill, the sign extension.
        auto const heads_before = static_cast<uint32_t>(entry * params.h + head);
        auto const rows = static_cast<uint32_t>(params.seqlen_q_rounded);
        return int64_t(uint64_t(heads_before) * rows) + stats_begin(tile) + block * Traits::kTileM;
    }

    // Whether each CTA owns key heads: computes all tiles of a head, one head after the other. Then
    // it alone adds to a head's sums of dQ, in a place of its own, and writes the zeros and rounds
    // the sums itself, while they are in L2. So heads must be short, and so many that whole ones
    // leave few SMs idle; heads of one tile always are. or_stores: first tiles store dQ if CTAs do
    // not own heads.
    CUTE_HOST_DEVICE static bool owns_heads(Flash_bwd_params const &params, int sms,
                                            bool or_stores) {
        // The most bytes of a CTA's sums, times the tiles that add to each: for 132 CTAs 45 MB of
        // the 50 MB of L2. With more than 17 MB, at d = 32 8 MB, first tiles that store dQ are
        // faster (docs/tried_sm90.md).
        int64_t const kBytes = (!or_stores ? 349 : Traits::kHeadDim > 32 ? 128 : 63) << 10;
        if (!Traits::kMayOwnHeads) {
            return false;
        }
        int64_t const blocks = num_n_blocks(params);
        int64_t const all = int64_t(params.b) * params.h_k;
        int64_t const bytes =
            int64_t(params.h_h_k_ratio) * params.seqlen_q_rounded * (4 * Traits::kHeadDim);
        bool const half = Traits::kMask == MaskKind::causal && params.seqlen_q >= params.seqlen_k;
        int64_t const twice = half ? blocks + 1 : 2 * blocks;
        // The most tiles of an SM where CTAs own heads, in percent of those that it has otherwise.
        // With 100, owning is 1.12 to 1.45 times as fast as adding to zeros (docs/facts.md).
        // Storing is faster than owning with 1.2 times the tiles, by 1.17 at d = 64.
        int64_t const percent = or_stores ? 105 : 120;
        bool const fills =
            100 * ceil_div(all, sms) * blocks <= percent * ceil_div(all * blocks, sms) &&
            blocks > 0;
        return fills && bytes <= kBytes && bytes * twice <= 2 * kBytes &&
               (all + sms) * blocks <= INT32_MAX;
    }
    // The first tile of a worker, and the one after tile `index`, where CTAs own heads.
    CUTE_HOST_DEVICE static int first_owned(Flash_bwd_params const &params, int worker) {
        return worker * num_n_blocks(params);
    }
    CUTE_HOST_DEVICE static int next_owned(Flash_bwd_params const &params, int index, int workers) {
        int const n_blocks = num_n_blocks(params);
        ++index;
        return index % n_blocks != 0 ? index : index + (workers - 1) * n_blocks;
    }

    // The launch's queue or, in a ragged batch, one with the number of tiles that the plan has.
    // Under a causal mask, if sequences have no order, the heads in a group follow from that
    // number.
    CUTE_DEVICE static auto queue(Flash_bwd_params const &params, TileQueue const &launched)
        -> std::conditional_t<kVarlen, TileQueue, TileQueue const &> {
        if constexpr (kVarlen) {
            int const of_a_head = plan(params).count;
            int group = launched.group;
            if (Traits::kMask == MaskKind::causal && params.plan_in_order == 0) {
                bool const is_long = may_ascend(of_a_head / cute::max(params.b, 1) * kTileKeys);
                int const workers = static_cast<int>(gridDim.x) / Traits::kCluster;
                int const taken = waves_of_group(params, is_long) * workers;
                group = cute::min(cute::max(taken / cute::max(of_a_head, 1), 1), params.h_k);
            }
            return {of_a_head * params.h_k, group, launched.counter};
        } else {
            return launched;
        }
    }

    // Returns tile `index`. m_block < 0: no tile is left.
    CUTE_HOST_DEVICE static WorkTile get_tile(Flash_bwd_params const &params,
                                              TileQueue const &queue, int index) {
        if (index >= queue.tiles) {
            return {.m_block = -1};
        }
        if constexpr (kVarlen) {
            WorkPlan const &of_head = plan(params);
            PlanIndex const at = groups_last(of_head.count, params.h_k, queue.group, index);
            WorkTile tile = planned_tile(of_head.tiles[at.tile], params.head_parts, at.head).tile;
            tile.head_q = tile.head * params.h_h_k_ratio;
            set_blocks(params, tile);
            return tile;
        }
        // The first keys come first, as under a causal mask most queries see them. The last heads
        // come first, as the kernel before may just have written zeros for them, and the kernel
        // behind rounds the sums of the first heads first. The group that is not full comes first,
        // too.
        int const n_blocks = num_n_blocks(params);
        int const all = params.b * params.h_k;
        if (kOneHead || (Traits::kMayOwnHeads && queue.group == 0)) {
            int const head = index / n_blocks;
            return tile_of(params, index - head * n_blocks, all - 1 - head);
        }
        int const first = (all - 1) % queue.group + 1;  // heads of the first group
        int const behind = index - first * n_blocks;    // tiles behind it
        int const full_groups = behind < 0 ? 0 : behind / (queue.group * n_blocks);
        int const heads = behind < 0 ? first : queue.group;
        int const begin = behind < 0 ? 0 : first + full_groups * queue.group;
        int const within = index - begin * n_blocks;
        int const n = within / heads;
        return tile_of(params, n, all - 1 - (begin + within - n * heads));
    }

  private:
    CUTE_HOST_DEVICE static bool are_short(Flash_bwd_params const &params) {
        return params.total_k <= int64_t(8) * kTileKeys * params.b;
    }
    // The key heads of the longest sequence that 32 of the 50 MB of L2 hold: Q and dO, 16 bits
    // each, and the sums of dQ.
    CUTE_HOST_DEVICE static int64_t heads_in_l2(Flash_bwd_params const &params) {
        int64_t const bytes =
            int64_t(params.h_h_k_ratio) * params.seqlen_q * (4 * params.d + 4 * Traits::kHeadDim);
        return (32 << 20) / cute::max(bytes, int64_t(1));
    }

    // A constant, as a branch at run time cost some 2 % (docs/tried_sm90.md).
    static constexpr bool kStoresAll =
        Traits::kStoresFirst && !kVarlen && Traits::kMask != MaskKind::local;

    CUTE_HOST_DEVICE static bool are_stored(Flash_bwd_params const &params, WorkTile const &tile) {
        return kStoresAll || FirstSums::are_stored(params, tile.seqlen_q, tile.seqlen_k);
    }

    template <class Int>
    CUTE_HOST_DEVICE static Int ceil_div(Int a, std::type_identity_t<Int> b) {
        return (a + b - 1) / b;
    }

    CUTE_HOST_DEVICE static WorkTile tile_of(Flash_bwd_params const &params, int n,
                                             int batch_head) {
        WorkTile tile{.m_block = n, .batch = batch_head / params.h_k};
        tile.head = batch_head - tile.batch * params.h_k;
        tile.head_q = tile.head * params.h_h_k_ratio;
        tile.head_k = tile.head / params.head_parts;
        tile.seqlen_q = params.seqlen_q;
        tile.seqlen_k = params.seqlen_k;
        set_blocks(params, tile);
        return tile;
    }

    CUTE_HOST_DEVICE static void set_blocks(Flash_bwd_params const &params, WorkTile &tile) {
        tile.blocks = blocks(params, tile);
        Info::mask_behind_keys(tile, kVarlen ? tile.seqlen_k : params.seqlen_k);
    }
};

}  // namespace flash
