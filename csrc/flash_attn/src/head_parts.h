// Into how many parts the query heads of a key head are divided in a backward, and where the tiles
// of a part leave their sums of dK and dV.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cute/tensor.hpp>

#include "flash.h"
#include "work_tile.h"

namespace flash {

// A tile of keys visits the queries of all query heads of its key head. Where there are too few
// such tiles to keep the SMs busy, the query heads of each key head are divided into
// Flash_bwd_params::head_parts parts of equally many. To the kernels with tiles of keys each part
// is a key head of its own: divide_heads() makes h_k count the parts, and h_h_k_ratio the query
// heads of one. flash_bwd_sum_parts_kernel adds up their dK and dV, in float32.
inline Flash_bwd_params divide_heads(Flash_bwd_params params) {
    params.head_parts = std::max(params.head_parts, 1);
    params.h_k *= params.head_parts;
    params.h_h_k_ratio /= params.head_parts;
    return params;
}

// Whether a launch can divide heads so: head_parts divides h_h_k_ratio, and there is room for dK
// and dV of the parts.
inline bool may_divide_heads(Flash_bwd_params const &params) {
    int const parts = std::max(params.head_parts, 1);
    bool const has_room = params.dk_ptr == nullptr || params.dkv_partial_ptr != nullptr;
    return params.h_h_k_ratio % parts == 0 && (parts == 1 || has_room);
}

// The workspace at dkv_partial_ptr, for params as divide_heads() returns them: sums of dK and
// behind them those of dV, each (b, seqlen_k, h_k, d), in a ragged batch (total_k, h_k, d).
template <bool kVarlen>
struct HeadPartSums {
    CUTE_HOST_DEVICE static int64_t num_rows(Flash_bwd_params const &params) {
        return kVarlen ? params.total_k : int64_t(params.b) * params.seqlen_k;
    }
    CUTE_HOST_DEVICE static int64_t row_stride(Flash_bwd_params const &params) {
        return int64_t(params.h_k) * params.d;
    }
    // Floats of the workspace.
    CUTE_HOST_DEVICE static int64_t workspace(Flash_bwd_params const &params) {
        return params.dk_ptr != nullptr ? 2 * num_rows(params) * row_stride(params) : 0;
    }
    // Row `row` of the sums of dK or dV, among the rows of all batch entries.
    CUTE_HOST_DEVICE static float *row(Flash_bwd_params const &params, bool is_dk, int64_t row) {
        return params.dkv_partial_ptr + ((is_dk ? 0 : num_rows(params)) + row) * row_stride(params);
    }

    // Stores the sums of dK or dV of a tile of keys, whose first key is first_key of its sequence.
    // acc: (4, ., .), the accumulators that `thread` of TiledMma has of Tile, (keys, d).
    template <class TiledMma, class Tile, class Acc>
    CUTE_DEVICE static void store(Flash_bwd_params const &params, WorkTile const &tile, bool is_dk,
                                  int first_key, int thread, Acc const &acc) {
        cute::Tensor tCc =
            TiledMma{}.get_slice(thread).partition_C(cute::make_identity_tensor(Tile{}));  // as acc
        int64_t const begin = kVarlen ? tile.row_k : int64_t(tile.batch) * params.seqlen_k;
        float *const gmem = row(params, is_dk, begin) + int64_t(tile.head) * params.d;
        CUTE_UNROLL
        for (int i = 0; i < cute::size(acc); i += 2) {  // neighbouring columns
            int const key = first_key + cute::get<0>(tCc(i)), col = cute::get<1>(tCc(i));
            if (key < tile.seqlen_k && col < params.d) {
                *reinterpret_cast<float2 *>(gmem + key * row_stride(params) + col) =
                    make_float2(acc(i), acc(i + 1));
            }
        }
    }
};

// A model of how long the tiles of a backward take, to choose head_parts. The unit of time is a
// step: a visit of a block of queries of a query head.
struct HeadPartsModel {
    int tile_keys, step_queries;
    int workers;  // tiles that are computed at a time
    MaskKind mask;
    bool varlen;
    int64_t shared;      // most steps of a worker if workers share tiles of undivided heads; else 0
    bool longest_first;  // the longest tiles of several heads come first, under a causal mask

    // Of a ragged batch only the mean lengths are known, and the most queries of a sequence. The
    // latter count in a dense batch, too, so that under a mask a ragged batch of equal lengths is
    // divided as the dense one is.
    struct Lengths {
        double queries, keys;
        double longest;  // queries of a head that a tile visits, at most
        double pairs;    // of queries and keys, of a head of all sequences, that the mask leaves
    };
    Lengths lengths(Flash_bwd_params const &params) const {
        double const b = std::max(params.b, 1);
        double const queries = varlen ? params.total_q / b : params.seqlen_q;
        double const keys = varlen ? params.total_k / b : params.seqlen_k;
        double longest = params.seqlen_q, pairs = queries * keys;
        if (mask == MaskKind::causal) {
            pairs = queries <= keys ? queries * (keys - queries / 2) : keys * keys / 2;
        } else if (mask == MaskKind::local) {
            double const window = double(params.window_left) + params.window_right + 1;
            longest = std::min(longest, window + tile_keys);
            pairs = std::min(pairs, queries * window);
        }
        return {queries, keys, longest, b * pairs};
    }

    // The time that all tiles take, and the sums over parts, with so many parts.
    double steps(Flash_bwd_params const &params, Lengths const &of, int parts) const {
        constexpr double kOfTile = 3;     // of a tile: to load its keys and store their gradients
        constexpr double kOfSums = 0.02;  // of a tile: for all workers together to add up its sums
        double const heads = double(params.h_k) * parts;
        double const ratio = double(params.h_h_k_ratio) / parts;
        double const tiles = std::max(params.b, 1) * heads * std::ceil(of.keys / tile_keys);
        double const all = params.h_k * params.h_h_k_ratio *
                               (of.pairs / tile_keys + tiles / heads * step_queries / 2) /
                               step_queries +
                           tiles * kOfTile;
        double const longest = std::ceil(of.longest / step_queries) * ratio + kOfTile;
        double const sums = parts > 1 ? 2 + tiles * kOfSums : 0;
        if (mask == MaskKind::none) {
            double const waves = std::ceil(tiles / workers);
            return parts == 1 && shared > 0 ? shared + waves * kOfTile : waves * longest + sums;
        }
        // Where the longest tiles do not come first, and where tiles keep their order, some workers
        // end half a tile before others.
        bool const at_once = longest_first && params.deterministic == 0;
        return std::max(longest, all / workers + (at_once ? 0 : longest / 2)) + sums;
    }

    // The fewest parts that come near the best.
    int parts(Flash_bwd_params const &params) const {
        constexpr double kNear = 1.03;
        constexpr int64_t kMostTiles = 8;  // per worker; bounds the workspace
        int const ratio = params.h_h_k_ratio;
        Lengths const of = lengths(params);
        double const tiles =
            std::max(params.b, 1) * double(params.h_k) * std::ceil(of.keys / tile_keys);
        if (tiles == 0) return 1;
        int found = 1;
        double best = steps(params, of, 1);
        for (int parts = 2; parts <= ratio && tiles * parts <= kMostTiles * workers; ++parts) {
            if (ratio % parts != 0) continue;
            double const steps = this->steps(params, of, parts);
            if (steps * kNear < best) {
                found = parts;
                best = steps;
            }
        }
        return found;
    }
};

}  // namespace flash
