// Mask policies: which scores of a tile are set to -inf before the softmax.
#pragma once

#include <cute/tensor.hpp>

#include "block_info.h"
#include "flash.h"
#include "utils.h"
#include "work_tile.h"

namespace flash {

// scores: a thread's, (queries, keys). position_at(i): of query i; key_at(j): of key j, relative to
// first_key.
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
