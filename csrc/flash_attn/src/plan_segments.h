// What a plan is made of: the sequences of a ragged batch, whose lengths are known on the device
// only, and into how many parts their tiles are split. Shared by the plan kernel
// (flash_plan_kernel.h) and by CTAs that plan for themselves (cta_plan.h).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "block_info.h"
#include "flash.h"
#include "work_plan.h"
#include "work_tile.h"

namespace flash {

// Divides the rows of q, or of k and v, into 2 b + 1 segments: segment 2 i + 1 is sequence i,
// segment 2 i the rows of no sequence before it, and segment 2 b those behind the last one.
// Whatever cu_seqlens and seqused hold, no segment leaves the tensors.
template <bool kOfKeys>
struct Segments {
    Flash_fwd_params const &params;

    // What describes the rows of q, or those of k and v.
    struct Rows {
        int const *cu_seqlens, *seqused;
        int seqlen;  // most rows of a sequence that count
        int total;
    };
    CUTE_DEVICE Rows queries() const {
        return {params.cu_seqlens_q_ptr, params.seqused_q_ptr, params.seqlen_q, params.total_q};
    }
    CUTE_DEVICE Rows keys() const {
        return {params.cu_seqlens_k_ptr, params.seqused_k_ptr, INT32_MAX, params.total_k};
    }

    CUTE_DEVICE int count() const { return 2 * params.b + 1; }

    template <class Int>
    CUTE_DEVICE static int clamp(Int x, int low, int high) {
        return static_cast<int>(cute::min(cute::max(x, Int(low)), Int(high)));
    }

    // Returns the row where sequence i begins.
    CUTE_DEVICE static int first_row(Rows const &rows, int i) {
        int const *const starts = rows.cu_seqlens;
        return starts != nullptr ? clamp(starts[i], 0, rows.total)
                                 : clamp(int64_t(i) * rows.seqlen, 0, rows.total);
    }
    // Reads where sequence i begins and how many of its rows count. Returns where the next one
    // begins.
    CUTE_DEVICE static int read(Rows const &rows, int i, int &begin, int &length) {
        begin = first_row(rows, i);
        int const end = first_row(rows, i + 1);
        length = clamp(end - begin, 0, rows.seqlen);
        if (rows.seqused != nullptr) {
            length = clamp(rows.seqused[i], 0, length);
        }
        return end;
    }

    // Reads the keys of sequence i in a cache into row_k and seqlen_k, and their entry into batch.
    CUTE_DEVICE void read_cache(int i, PlanTile &tile) const {
        int const *const entries = params.cache_batch_idx_ptr;
        int const entry = entries != nullptr ? entries[i] : i;
        int const keys = keys_in_cache(i);  // loaded at the same time as the entry
        if (entry < 0 || entry >= params.b_k) {
            return;  // no keys
        }
        int const *const leftpad = params.leftpad_k_ptr;
        tile.batch = entry;
        tile.row_k = leftpad != nullptr ? clamp(leftpad[i], 0, params.seqlen_k) : 0;
        tile.seqlen_k = clamp(keys, tile.row_k, params.seqlen_k) - tile.row_k;
    }

    CUTE_DEVICE int keys_in_cache(int i) const {
        if (params.seqused_k_ptr != nullptr) {
            int64_t const keys = int64_t(params.seqused_k_ptr[i]) + params.seqlen_new;
            return static_cast<int>(cute::min(keys, int64_t(params.seqlen_k)));
        }
        int const *const starts = params.cu_seqlens_k_ptr;
        if (starts == nullptr) {
            return params.seqlen_k;
        }
        return clamp(int64_t(starts[i + 1]) - starts[i], 0, params.seqlen_k);
    }

    // Returns sequence i over a cache, in a batch without cu_seqlens_q and seqused_q.
    CUTE_DEVICE PlanTile of_dense_queries(int i) const {
        PlanTile tile{.row_q = i * params.seqlen_q, .seqlen_q = params.seqlen_q, .partial_row = -1};
        read_cache(i, tile);
        return tile;
    }

    CUTE_DEVICE PlanTile operator[](int segment) const {
        bool const of_sequence = segment % 2 == 1;
        int const i = (segment + 1) / 2 - 1;  // its sequence, or the one before its rows
        PlanTile tile{.batch = params.is_cache != 0 ? 0 : segment / 2, .partial_row = -1};
        // Read for sequences and gaps alike, so that both kinds in a warp wait for memory together.
        int end_q = 0, end_k = 0;
        if (i >= 0) end_q = read(queries(), i, tile.row_q, tile.seqlen_q);
        if (params.is_cache == 0) {
            if (i >= 0) end_k = read(keys(), i, tile.row_k, tile.seqlen_k);
        } else if (of_sequence) {
            read_cache(i, tile);
        }
        if (of_sequence) {
            return tile;
        }
        Rows const rows = kOfKeys ? keys() : queries();
        int const row = kOfKeys ? tile.row_k + tile.seqlen_k : tile.row_q + tile.seqlen_q;
        int const next = i < 0 ? first_row(rows, 0) : kOfKeys ? end_k : end_q;
        int const end = segment / 2 < params.b ? next : rows.total;
        tile.row_q = tile.row_k = tile.seqlen_q = 0;
        tile.seqlen_k = -1;
        (kOfKeys ? tile.row_k : tile.row_q) = row;
        (kOfKeys ? tile.seqlen_k : tile.seqlen_q) = cute::max(end - row, 0);
        return tile;
    }
};

// The tiles that a plan lists, a parameter of Planner: here those of a forward kernel's queries.
template <FwdConfig C>
struct PlanFwd {
    static constexpr int kArch = C.arch;
    static constexpr DType kDtype = C.dtype;
    static constexpr int kRows = C.tile_m;
    static constexpr bool kOfKeys = false;
    // Whether merging many parts may take longer than reading their keys: with 128 rows, for which
    // it was timed (docs/tried_sm90.md).
    static constexpr bool kMergesSlowly = C.arch == 90 && C.tile_m == 128 && C.tile_n == 64;
    // Rows that a CTA merges at a time (MergeParts::kGroups). 0 where the combine kernel merges,
    // and over pages, whose first keys come later: there longer parts were slower.
    static constexpr int kRowsMergedAtOnce =
        C.arch == 90 && C.warps == 4 && C.mask != MaskKind::local && !C.paged
            ? 128 / static_cast<int>(std::bit_ceil(C.head_dim / 4u))
            : 0;

    CUTE_HOST_DEVICE static BlockRange blocks(Flash_fwd_params const &params,
                                              WorkTile const &tile) {
        return BlockInfo<C.mask, C.tile_m, C.tile_n>::block_range(params, tile);
    }
};

// Decides into how many parts the tiles of segments are split along the keys (split-KV). Tiles: a
// type like PlanFwd.
template <class Tiles>
struct TileSplits {
    CUTE_HOST_DEVICE static int num_m_blocks(Flash_fwd_params const &params,
                                             PlanTile const &segment) {
        int const rows = Tiles::kOfKeys ? segment.seqlen_k : num_rows(params, segment.seqlen_q);
        return (rows + Tiles::kRows - 1) / Tiles::kRows;
    }

    // Returns the key blocks of the segment's last tile, which sees most keys, or about as many as
    // the others.
    CUTE_DEVICE static int key_blocks(Flash_fwd_params const &params, PlanTile const &segment) {
        WorkTile const work{.m_block = num_m_blocks(params, segment) - 1,
                            .seqlen_q = segment.seqlen_q,
                            .seqlen_k = segment.seqlen_k};
        return work.m_block < 0 || !work.in_sequence() ? 0 : Tiles::blocks(params, work).count;
    }

    // Returns the key blocks of a part with which as few parts as possible keep all CTAs busy for
    // most of the time. The tiles of all sequences and heads have `all` key blocks together, the
    // longest `longest`; they count as all / longest tiles of that length.
    CUTE_HOST_DEVICE static int balanced_part_blocks(int ctas, int64_t all, int longest) {
        float const tiles = static_cast<float>(all) / static_cast<float>(cute::max(longest, 1));
        float best = 0.f;
        int parts = 1;
        for (int waves = 1; waves <= kSplitWaves && best < 0.9f; ++waves) {
            float const slots = static_cast<float>(ctas * waves);
            int const of_tile = static_cast<int>(slots / cute::max(tiles, 1.f));
            float const busy = static_cast<float>(of_tile) * tiles / slots;
            if (busy > best) {
                best = busy;
                parts = of_tile;
            }
        }
        return (longest + parts - 1) / parts;
    }

    // Returns the key blocks n of a part that take the least time: where merging a part takes
    // `each` of the time of a block, `blocks` of them take n + each * blocks / n, least where both
    // terms are equal.
    CUTE_HOST_DEVICE static int cheapest_part_blocks(float each, int64_t blocks) {
        return static_cast<int>(sqrtf(each * static_cast<float>(blocks)) + 0.5f);
    }

    // Returns the least key blocks of a part. blocks: of all tiles of a grid head; longest: of the
    // longest tile.
    CUTE_HOST_DEVICE static int part_blocks(Flash_fwd_params const &params, int64_t blocks,
                                            int longest) {
        int const least = cute::max(params.split_blocks, 1);
        if (params.num_splits <= 1 || params.split_ctas <= 0) {
            return least;
        }
        int64_t const all = blocks * num_grid_heads(params);
        // Tiles that the combine kernel would merge stay whole where they keep 0.45 to 1 of the
        // CTAs busy: half of the SMs read keys at 0.8 of the speed of all, and that kernel takes
        // some 10 us.
        int const rows = num_rows(params, params.seqlen_q);
        bool const reads_once = rows > kMostRowsMerged && rows <= Tiles::kRows;
        int64_t const slots = int64_t(params.split_ctas) * longest;
        if (reads_once && 20 * all >= 9 * slots && all <= slots) {
            return cute::max(least, longest);
        }
        int const balanced =
            cute::max(least, balanced_part_blocks(params.split_ctas, all, longest));
        if constexpr (requires { Tiles::kMergesSlowly; }) {
            // Whether all sequences have as many queries as the longest one.
            bool const alike = int64_t(params.b) * params.seqlen_q == params.total_q;
            if (Tiles::kMergesSlowly && reads_once && alike) {
                float const each = static_cast<float>(rows) / 1024.f;  // the kernel merges all
                return cute::max(balanced, cheapest_part_blocks(each, all));
            }
            // One CTA merges all parts of a tile. Parts that are hardly longer than balanced ones
            // gain nothing, as some CTAs are then left without a part.
            bool const by_ctas =
                rows <= kMostRowsMerged && int64_t(params.b) * num_grid_heads(params) <= kArrivals;
            if (Tiles::kRowsMergedAtOnce > 0 && by_ctas) {
                float const each = rows > Tiles::kRowsMergedAtOnce ? 0.5f : 0.25f;
                int const cheapest = cheapest_part_blocks(each, longest);
                return 2 * cheapest >= 3 * balanced ? cheapest : balanced;
            }
        }
        return balanced;
    }

    // Returns the parts of each tile of a segment whose last tile has `blocks` key blocks. All its
    // tiles have the same number, so that a part may be empty.
    CUTE_HOST_DEVICE static int num_parts(Flash_fwd_params const &params, int part_blocks,
                                          int blocks) {
        int const parts = (blocks + part_blocks - 1) / part_blocks;
        return cute::min(cute::max(parts, 1), params.num_splits);
    }
};

}  // namespace flash
