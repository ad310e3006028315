// Mask policies: which scores of a tile are set to -inf before the softmax.
#pragma once

#include <cute/tensor.hpp>

#include "block_info.h"
#include "flash.h"
#include "utils.h"
#include "work_tile.h"

namespace flash {

// Masks a thread's scores, (queries, keys). position_at(i): the position of query i; key_at(j): key
// j relative to first_key.
template <MaskKind kMask, class Scores, class PositionAt, class KeyAt>
CUTE_DEVICE void mask_scores(Flash_fwd_params const &params, WorkTile const &tile, Scores &&scores,
                             PositionAt const &position_at, int first_key, KeyAt const &key_at) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size<0>(scores); ++i) {
        Range const visible = visible_keys<kMask>(params, tile, position_at(i));
        CUTE_UNROLL
        for (int j = 0; j < cute::size<1>(scores); ++j) {
            int const key = key_at(j);
            bool const before = kMask == MaskKind::local && key < visible.begin - first_key;
            if (before || key >= visible.end - first_key) {
                scores(i, j) = -INFINITY;
            }
        }
    }
}

// A word whose `count` lowest bits are set, all 32 of them from count = 32 on.
CUTE_DEVICE uint32_t first_bits(int count) { return count < 32 ? (1u << count) - 1 : ~0u; }

// Masks a thread's scores of few keys and many queries, as the sm90 class's backward has them.
// scores: (keys, queries), at most 32 queries. key_at(i): key i of the sequence; queries_before(q):
// how many of the thread's queries come before query q of the sequence. One word of bits for each
// key takes less than half of the instructions that comparing the place of each score takes.
template <MaskKind kMask, class Scores, class KeyAt, class QueriesBefore>
CUTE_DEVICE void mask_scores_of_keys(Flash_fwd_params const &params, WorkTile const &tile,
                                     Scores &&scores, KeyAt const &key_at,
                                     QueriesBefore const &queries_before) {
    static_assert(decltype(cute::size<1>(scores))::value <= 32);
    CUTE_UNROLL
    for (int i = 0; i < cute::size<0>(scores); ++i) {
        int const key = key_at(i);
        bool const exists = key < tile.seqlen_k;
        uint32_t visible = exists ? ~0u : 0u;
        if constexpr (kMask != MaskKind::none) {
            Range const seeing = seeing_queries<kMask>(params, tile, key);
            visible &= ~first_bits(queries_before(seeing.begin));
            // Without a window all later queries see the key; P of those past the end is 0.
            if constexpr (kMask == MaskKind::local) {
                visible &= first_bits(queries_before(seeing.end));
            }
        }
        CUTE_UNROLL
        for (int j = 0; j < cute::size<1>(scores); ++j) {
            if (kMask == MaskKind::none ? !exists : (visible & 1u << j) == 0) {
                scores(i, j) = -INFINITY;
            }
        }
    }
}

template <FwdConfig C>
struct Mask {
    Flash_fwd_params const &params;
    WorkTile const &tile;

    // tSrS: scores (4, MMA_M, N/8) of key block n_block.
    template <class Traits, class Engine, class Layout>
    CUTE_DEVICE void apply(cute::Tensor<Engine, Layout> &tSrS, int thread, int n_block) const {
        auto const position_at = [&](int i) {
            int const row = tile.m_block * C.tile_m + Traits::acc_row(thread, i);
            return row_position(params, row);
        };
        // Relative to the thread's first column every column is a compile-time constant.
        mask_scores<C.mask>(
            params, tile,
            make_tensor(tSrS.data(), layout_acc_rowcol(tSrS.layout())),  // (rows, cols)
            position_at, n_block * C.tile_n + Traits::acc_col(thread, 0),
            [](int j) { return Traits::acc_col(0, j); });
    }
};

}  // namespace flash
