// Online softmax over key blocks, in base 2: exp(s * scale - m * scale) = exp2(s * c - m * c) with
// c = scale * log2(e), one FFMA and one ex2 a score.
#pragma once

#include <cute/tensor.hpp>

#include "utils.h"

namespace flash {

using namespace cute;

// State of the rows that one thread holds. row_sum is this thread's share until finalize() adds up
// the four lanes of a row: the running rescale is the same for all of them.
template <int kRows, bool kLazy>
struct Softmax {
    static constexpr float kMaxGrowth = 8.f;  // in powers of two
    using RowTensor = decltype(make_tensor<float>(Shape<Int<kRows>>{}));

    float const scale;
    float const scale_log2;
    RowTensor row_max;  // of the raw scores
    RowTensor row_sum;

    CUTE_DEVICE explicit Softmax(float scale, float scale_log2)
        : scale(scale), scale_log2(scale_log2) {
        fill(row_max, -INFINITY);
        fill(row_sum, 0.f);
    }

    // A row that has seen no key yet has maximum -inf; 0 in its place keeps (-inf) - (-inf) away.
    CUTE_DEVICE static float finite_max(float max) { return max == -INFINITY ? 0.f : max; }

    template <class Engine, class Layout>
    CUTE_DEVICE RowTensor block_max(Tensor<Engine, Layout> const &tSrS) const {
        Tensor scores = make_tensor(tSrS.data(), layout_acc_rowcol(tSrS.layout()));  // (rows, cols)
        static_assert(decltype(size<0>(scores))::value == kRows);
        RowTensor max;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            max(i) = scores(i, _0{});
            CUTE_UNROLL
            for (int j = 1; j < size<1>(scores); ++j) {
                max(i) = fmaxf(max(i), scores(i, j));
            }
            max(i) = quad_allreduce(max(i), [](float a, float b) { return fmaxf(a, b); });
        }
        return max;
    }

    // Begins with a tile's first block: nothing is there yet to be rescaled.
    template <class Engine, class Layout>
    CUTE_DEVICE void start(Tensor<Engine, Layout> const &tSrS) {
        row_max = block_max(tSrS);
        fill(row_sum, 0.f);
    }

    // How the maxima grew: whether O has to be rescaled, and each row's factor if so.
    struct Growth {
        bool rescale;
        RowTensor factor;
    };

    // Takes the block's scores into the running maximum. With kLazy, O and row_sum are rescaled
    // only when some row of the warp grew by more than kMaxGrowth: until then probabilities stay
    // relative to the older maximum, at most 2^kMaxGrowth, which fp16 holds as precisely as 1.
    // After the first blocks that is rare.
    template <class Engine, class Layout>
    CUTE_DEVICE Growth update_max(Tensor<Engine, Layout> const &tSrS) {
        RowTensor new_max = block_max(tSrS);
        bool grown = false;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            new_max(i) = fmaxf(row_max(i), new_max(i));
            grown |= (new_max(i) - row_max(i)) * scale_log2 > kMaxGrowth;
        }
        Growth growth;
        growth.rescale = !kLazy || __any_sync(0xffffffffu, grown);
        if (growth.rescale) {
            CUTE_UNROLL
            for (int i = 0; i < kRows; ++i) {
                growth.factor(i) = exp2f((row_max(i) - finite_max(new_max(i))) * scale_log2);
                row_sum(i) *= growth.factor(i);
                row_max(i) = new_max(i);
            }
        }
        return growth;
    }

    // Scores become probabilities relative to the running maximum, which row_sum takes in.
    template <class Engine, class Layout>
    CUTE_DEVICE void exponentiate(Tensor<Engine, Layout> &tSrS) {
        Tensor scores = make_tensor(tSrS.data(), layout_acc_rowcol(tSrS.layout()));  // (rows, cols)
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            float const max_scaled = finite_max(row_max(i)) * scale_log2;
            CUTE_UNROLL
            for (int j = 0; j < size<1>(scores); ++j) {
                scores(i, j) = exp2f(scores(i, j) * scale_log2 - max_scaled);
                row_sum(i) += scores(i, j);
            }
        }
    }

    template <class Engine, class Layout>
    CUTE_DEVICE static void rescale(Tensor<Engine, Layout> &tOrO, RowTensor const &factor) {
        Tensor out = make_tensor(tOrO.data(), layout_acc_rowcol(tOrO.layout()));  // (rows, cols)
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            CUTE_UNROLL
            for (int j = 0; j < size<1>(out); ++j) {
                out(i, j) *= factor(i);
            }
        }
    }

    // Divides O by the row sums; returns the log-sum-exp of each row. A row without keys: 0 and
    // -inf.
    template <class Engine, class Layout>
    CUTE_DEVICE RowTensor finalize(Tensor<Engine, Layout> &tOrO) {
        RowTensor lse, inv_sum;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            float const sum = quad_allreduce(row_sum(i), [](float a, float b) { return a + b; });
            bool const empty = sum == 0.f;
            inv_sum(i) = empty ? 0.f : 1.f / sum;
            lse(i) = empty ? -INFINITY : row_max(i) * scale + logf(sum);
        }
        rescale(tOrO, inv_sum);
        return lse;
    }
};

}  // namespace flash
