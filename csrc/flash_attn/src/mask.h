// Mask policies: which scores of a tile are set to -inf before the softmax.
#pragma once

#include <cute/tensor.hpp>

#include "flash.h"
#include "seqlen_info.h"
#include "utils.h"

namespace flash {

template <FwdConfig C>
struct Mask {
    SeqlenInfo seqlen;
    int m_block;

    // The first key that query row `row` of this tile does not see.
    CUTE_HOST_DEVICE int key_end(int row) const {
        int end = seqlen.seqlen_k;
        if constexpr (C.mask == MaskKind::causal) {
            end = cute::min(end, m_block * C.tile_m + row + 1 + seqlen.causal_shift());
        }
        return end;
    }

    // tSrS: scores ((2, 2), MMA_M, MMA_N); tScS: their (row, key) within the tile, same shape.
    template <class EngineS, class LayoutS, class EngineC, class LayoutC>
    CUTE_DEVICE void apply(cute::Tensor<EngineS, LayoutS> &tSrS,
                           cute::Tensor<EngineC, LayoutC> const &tScS, int n_block) const {
        using namespace cute;
        Tensor scores = make_tensor(tSrS.data(), layout_acc_rowcol(tSrS.layout()));  // (rows, cols)
        Tensor coords = make_tensor(tScS.data(), layout_acc_rowcol(tScS.layout()));  // (rows, cols)
        int const first_key = n_block * C.tile_n + get<1>(coords(_0{}, _0{}));
        CUTE_UNROLL
        for (int i = 0; i < size<0>(scores); ++i) {
            int const visible = key_end(get<0>(coords(i, _0{}))) - first_key;
            CUTE_UNROLL
            for (int j = 0; j < size<1>(scores); ++j) {
                // Relative to the thread's first column, the column is a compile-time constant.
                int const col = get<1>(coords(_0{}, j)) - get<1>(coords(_0{}, _0{}));
                if (col >= visible) { scores(i, j) = -INFINITY; }
            }
        }
    }
};

}  // namespace flash
