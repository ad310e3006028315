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

// A tile of keys visits the queries of all query heads of its key head. Where such tiles are fewer
// than keep the SMs busy, the query heads of each key head are divided into
// Flash_bwd_params::head_parts parts of equally many. To the kernels with tiles of keys each part
// is a key head of its own: divide_heads() makes h_k count the parts, and h_h_k_ratio the query
// heads of one. Their dK and dV, in float32, are added up by flash_bwd_sum_parts_kernel.
inline Flash_bwd_params divide_heads(Flash_bwd_params params) {
    params.head_parts = std::max(params.head_parts, 1);
    params.h_k *= params.head_parts;
    params.h_h_k_ratio /= params.head_parts;
    return params;
}

// Whether a launch can divide them so.
inline bool may_divide_heads(Flash_bwd_params const &params) {
    int const parts = std::max(params.head_parts, 1);
    bool const has_room = params.dk_ptr == nullptr || params.dkv_partial_ptr != nullptr;
    return params.h_h_k_ratio % parts == 0 && (parts == 1 || has_room);
}

// Of params as divide_heads() returns them: sums of dK and behind them those of dV, each with the
// rows of k, (b, seqlen_k, h_k, d), of a ragged batch (total_k, h_k, d).
template <bool kVarlen>
struct HeadPartSums {
    CUTE_HOST_DEVICE static int64_t num_rows(Flash_bwd_params const &params) {
        return kVarlen ? params.total_k : int64_t(params.b) * params.seqlen_k;
    }
    CUTE_HOST_DEVICE static int64_t row_stride(Flash_bwd_params const &params) {
        return int64_t(params.h_k) * params.d;
    }
    // Floats of all.
    CUTE_HOST_DEVICE static int64_t workspace(Flash_bwd_params const &params) {
        return params.dk_ptr != nullptr ? 2 * num_rows(params) * row_stride(params) : 0;
    }
    // Row `row` of all.
    CUTE_HOST_DEVICE static float *row(Flash_bwd_params const &params, bool is_dk, int64_t row) {
        return params.dkv_partial_ptr + ((is_dk ? 0 : num_rows(params)) + row) * row_stride(params);
    }

    // Stores those of a tile of keys, whose first key is first_key of its sequence. acc: (4, ., .),
    // the accumulators that `thread` of TiledMma has of Tile, (keys, d).
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

// How long the tiles of a backward take, to choose head_parts. The unit is a step: a visit of a
// block of queries of a query head.
struct HeadPartsModel {
    int tile_keys, step_queries;
    int workers;  // tiles that are computed at a time
    MaskKind mask;
    bool varlen;
    int64_t shared;      // steps of undivided heads, where workers share tiles, else 0
    bool longest_first;  // under a causal mask, of several heads

    // Of a ragged batch lengths are known as the mean, and the longest of the queries, which counts
    // in a dense one, too, so that under a mask equal lengths are divided as that.
    struct Lengths {
        double queries, keys;
        double longest;  // queries that a tile visits at most, of a head
        double pairs;    // of a head of all sequences, that the mask leaves
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

    // Of all tiles, with so many parts.
    double steps(Flash_bwd_params const &params, Lengths const &of, int parts) const {
        constexpr double kOfTile = 3;     // to load its keys, and store their gradients
        constexpr double kOfSums = 0.02;  // to add a tile's, of all workers
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
        // Unless the longest tiles come first, and where tiles keep an order, some workers end by
        // half a tile before others.
        bool const at_once = longest_first && params.deterministic == 0;
        return std::max(longest, all / workers + (at_once ? 0 : longest / 2)) + sums;
    }

    // The fewest parts that come near the best.
    int parts(Flash_bwd_params const &params) const {
        constexpr double kNear = 1.03;
        constexpr int64_t kMostTiles = 8;  // for a worker: they bound the workspace
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
