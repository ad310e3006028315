// Mask policies: which scores of a tile are set to -inf before the softmax.
#pragma once

#include <cute/tensor.hpp>

#include "block_info.h"
#include "flash.h"
#include "utils.h"
#include "work_tile.h"

namespace flash {

template <FwdConfig C>
struct Mask {
    Flash_fwd_params const &params;
    WorkTile const &tile;

    // tSrS: scores (4, MMA_M, N/8) of key block n_block.
    template <class Traits, class Engine, class Layout>
    CUTE_DEVICE void apply(cute::Tensor<Engine, Layout> &tSrS, int thread, int n_block) const {
        using namespace cute;
        Tensor scores = make_tensor(tSrS.data(), layout_acc_rowcol(tSrS.layout()));  // (rows, cols)
        // Relative to the thread's first column every column is a compile-time constant.
        int const first_key = n_block * C.tile_n + Traits::acc_col(thread, 0);
        CUTE_UNROLL
        for (int i = 0; i < size<0>(scores); ++i) {
            int const row = tile.m_block * C.tile_m + Traits::acc_row(thread, i);
            auto const visible =
                BlockInfo<C>::visible_keys(params, tile, row_position(params, row));
            CUTE_UNROLL
            for (int j = 0; j < size<1>(scores); ++j) {
                int const key = Traits::acc_col(0, j);
                bool const before = C.mask == MaskKind::local && key < visible.begin - first_key;
                if (before || key >= visible.end - first_key) {
                    scores(i, j) = -INFINITY;
                }
            }
        }
    }
};

}  // namespace flash
