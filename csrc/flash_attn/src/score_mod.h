// Softcap and ALiBi, which modify scores between Q K^T and the mask.
#pragma once

#include <cute/tensor.hpp>

#include "flash.h"
#include "utils.h"
#include "work_tile.h"

namespace flash {

using namespace cute;

// tanh(y / 2). tanh.approx.f32 has a relative error of 2^-11: with a softcap of 50 the LSE would be
// off by 100 times what the tests allow. Below |y| = 2 it is an odd polynomial with a relative
// error of 7e-7, as the form in exp2 cancels the bits of a small result, and under a large softcap
// all results are small.
CUTE_DEVICE float tanh_of_half_small(float y) {
    float const square = y * y;
    float sum = fmaf(square, -1.4975881e-6f, 3.2701396e-5f);
    sum = fmaf(square, sum, -4.0316934e-4f);
    sum = fmaf(square, sum, 4.1504479e-3f);
    sum = fmaf(square, sum, -4.1661303e-2f);
    sum = fmaf(square, sum, 0.4999997f);
    return y * sum;
}
CUTE_DEVICE float tanh_of_half(float y) {
    constexpr float kLog2e = 1.44269504088896341f;
    float const large = fmaf(-2.f, __fdividef(1.f, 1.f + exp2f(y * kLog2e)), 1.f);
    float const small = tanh_of_half_small(y);
    return fabsf(y) < 2.f ? small : large;
}

// Turns products Q K^T into capped scores in units of the softcap. Scores below the softcap need
// only the polynomial, which takes no MUFU. If a warp has a larger one among kPart scores of its
// threads, it computes both forms for these; each score takes the form for its own size, so no
// result depends on scores that the mask removes, which may be of another sequence. Without parts
// ptxas would have the squares of all scores in registers.
template <class Engine, class Layout>
CUTE_DEVICE void cap_scores(Flash_fwd_params const &params, Tensor<Engine, Layout> &tSrS) {
    constexpr uint32_t kFromTwo = 0x40000000;  // in the exponent of 2 and more, infinities and NaN
    constexpr int kPart = 16;
    float const scale = 2.f * params.scale_softcap;
    CUTE_UNROLL
    for (int first = 0; first < size(tSrS); first += kPart) {
        int const end = cute::min(first + kPart, int(size(tSrS)));
        uint32_t bits = 0;
        CUTE_UNROLL
        for (int i = first; i < end; ++i) {
            tSrS(i) *= scale;
            bits |= __float_as_uint(tSrS(i));
        }
        if (__any_sync(0xffffffffu, (bits & kFromTwo) != 0)) {
            CUTE_UNROLL
            for (int i = first; i < end; ++i) {
                tSrS(i) = tanh_of_half(tSrS(i));
            }
        } else {
            CUTE_UNROLL
            for (int i = first; i < end; ++i) {
                tSrS(i) = tanh_of_half_small(tSrS(i));
            }
        }
    }
}

// The softcap of scores below 0.28 softcaps: three terms of tanh, with a relative error below 1e-6.
// The polynomial is in the unscaled product x = q k; its coefficients include the scale. As kernel
// parameters they take no registers.
struct SmallCap {
    float c1 = 0.f, c3 = 0.f, c5 = 0.f;
    float limit = 0.f;  // magnitudes of products are less

    explicit SmallCap(float scale) {
        // Outside this range coefficients may not be normal numbers; limit 0 then excludes all.
        if (scale > 0x1p-20f && scale < 0x1p20f) {
            float const square = scale * scale;
            c1 = 0.99999923f * scale;
            c3 = -0.33315523f * scale * square;
            c5 = 0.12720915f * scale * square * square;
            limit = 0.28f / scale;
        }
    }

    // Caps the products of the warp's threads and returns true, or returns false if not all are
    // small. NaN counts as small and stays NaN.
    template <class Engine, class Layout>
    CUTE_DEVICE bool apply(Tensor<Engine, Layout> &tSrS) const {
        float most = 0.f;
        CUTE_UNROLL
        for (int i = 0; i < size(tSrS); ++i) {
            most = fmaxf(most, fabsf(tSrS(i)));
        }
        if (__any_sync(0xffffffffu, !(most < limit))) {
            return false;
        }
        CUTE_UNROLL
        for (int i = 0; i < size(tSrS); ++i) {
            float const square = tSrS(i) * tSrS(i);
            tSrS(i) *= fmaf(square, fmaf(square, c5, c3), c1);
        }
        return true;
    }
};

// The derivative of a capped score with respect to the uncapped one, both in units of the softcap.
// Gradients of Q and K take a further factor, scale_softmax.
CUTE_DEVICE float derivative_of_capped(float capped) { return fmaf(-capped, capped, 1.f); }

// Applies ALiBi: adds slope_of(i), the negated slope of query i, times the distance of query and
// key. diagonal_of(i): the key on query i's diagonal; key_at(j): key j relative to first_key. The
// backward needs nothing for it, as distances do not depend on Q and K.
template <class Scores, class SlopeOf, class DiagonalOf, class KeyAt>
CUTE_DEVICE void lower_scores(Scores &&scores, SlopeOf const &slope_of,
                              DiagonalOf const &diagonal_of, int first_key, KeyAt const &key_at) {
    CUTE_UNROLL
    for (int i = 0; i < size<0>(scores); ++i) {
        float const first = static_cast<float>(diagonal_of(i) - first_key);
        CUTE_UNROLL
        for (int j = 0; j < size<1>(scores); ++j) {
            float const distance = fabsf(first - static_cast<float>(key_at(j)));
            scores(i, j) = fmaf(slope_of(i), distance, scores(i, j));
        }
    }
}

// Modifies the scores of a forward kernel. They are then in units of Q K^T or, with a softcap, in
// units of the softcap; times scale_softmax_log2 either gives base-2 exponents.
template <class Traits, int kRows>
struct ScoreMod {
    static constexpr FwdConfig C = Traits::kConfig;

    Flash_fwd_params const &params;
    WorkTile const &tile;
    float slope[kRows];  // of each row of this thread, negated, in units of the scores

    CUTE_DEVICE ScoreMod(Flash_fwd_params const &params, WorkTile const &tile, int thread)
        : params(params), tile(tile) {
        if constexpr (C.alibi) {
            // A tile without keys may be of no sequence, which has no slopes.
            bool const any = tile.blocks.count > 0;
            float const *slopes = params.alibi_slopes_ptr + tile.head_q;
            if (any && params.alibi_slopes_batch_stride != 0) {
                int const entry =
                    params.plan_ptr != nullptr ? sequence_of(params, tile) : tile.batch;
                slopes += entry * params.alibi_slopes_batch_stride;
            }
            CUTE_UNROLL
            for (int i = 0; i < kRows; ++i) {
                TileRow const row = tile_row(params, tile, C.tile_m, Traits::acc_row(thread, i));
                slope[i] = any && row.exists ? -slopes[row.head] * params.alibi_scale : 0.f;
            }
        }
    }

    // tSrS: products (4, MMA_M, N/8) of key block n_block. capped: the softcap is applied already.
    template <class Engine, class Layout>
    CUTE_DEVICE void apply(Tensor<Engine, Layout> &tSrS, int thread, int n_block,
                           bool capped = false) const {
        if constexpr (C.softcap) {
            if (!capped) cap_scores(params, tSrS);
        }
        if constexpr (C.alibi) {
            // Recomputed in each block: kept, it would take a register for each row.
            auto const diagonal_of = [&](int i) {
                int const row = tile.m_block * C.tile_m + Traits::acc_row(thread, i);
                return row_position(params, row) + tile.seqlen_k - tile.seqlen_q;
            };
            // Relative to the thread's first column every column is a compile-time constant.
            lower_scores(
                make_tensor(tSrS.data(), layout_acc_rowcol(tSrS.layout())),  // (rows, cols)
                [&](int i) { return slope[i]; }, diagonal_of,
                n_block * C.tile_n + Traits::acc_col(thread, 0),
                [](int j) { return Traits::acc_col(0, j); });
        }
    }
};

// Modifies the scores of a backward kernel of the sm80 class.
template <class Traits>
struct ScoreModBwd {
    static constexpr BwdConfig C = Traits::kConfig;

    // tSrS: products (4, MMA_M, N/8) of one head; scores: the same seen as (queries, keys). The
    // tile must be of a sequence. tSrG gets the softcap's derivatives. The rest: mask_scores().
    template <class Acc, class Scores, class PositionAt, class KeyAt>
    CUTE_DEVICE static void apply(Flash_bwd_params const &params, WorkTile const &tile, Acc &tSrS,
                                  Acc &tSrG, Scores &&scores, int head_q,
                                  PositionAt const &position_at, int first_key,
                                  KeyAt const &key_at) {
        if constexpr (C.softcap) {
            cap_scores(params, tSrS);
            CUTE_UNROLL
            for (int i = 0; i < size(tSrS); ++i) {
                tSrG(i) = derivative_of_capped(tSrS(i));
            }
        }
        if constexpr (C.alibi) {
            int64_t const entry = tile.batch * params.alibi_slopes_batch_stride;
            float const slope = -params.alibi_slopes_ptr[entry + head_q] * params.alibi_scale;
            auto const diagonal_of = [&](int i) {
                return position_at(i) + tile.seqlen_k - tile.seqlen_q;
            };
            lower_scores(scores, [&](int) { return slope; }, diagonal_of, first_key, key_at);
        }
    }
};

}  // namespace flash
