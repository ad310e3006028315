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
    // Of probabilities relative to an older maximum; fp16 holds up to 65504.
    static constexpr float kMaxSum = 32768.f;
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

    // Begins with a tile's first block: nothing is there yet to be rescaled.
    template <class TensorS, class TensorP>
    CUTE_DEVICE void start(TensorS const &tSrS, TensorP &tOrP) {
        row_max = block_max(tSrS);
        row_sum = exponentiate<true>(tSrS, tOrP);
    }

    // Takes one more block in: scores become probabilities, rounded to P, and O and row_sum are
    // rescaled where the maximum grew.
    //
    // With kLazy probabilities are relative to the maximum as it was, and no maximum is sought,
    // until a thread's share of some row's sum exceeds kMaxSum. Then the block is done again with
    // its maximum; after the first blocks that is rare. Where it is likely, max_first spares the
    // attempt. A row without a key so far has maximum -inf: its first score makes the sum
    // infinite, a masked one NaN, and both count as exceeding.
    template <class TensorS, class TensorP, class TensorO>
    CUTE_DEVICE void take_block(TensorS const &tSrS, TensorP &tOrP, TensorO &tOrO, bool max_first) {
        RowTensor sum;
        bool exceeds = !kLazy || max_first;
        if (!exceeds) {
            sum = exponentiate<false>(tSrS, tOrP);
            CUTE_UNROLL
            for (int i = 0; i < kRows; ++i) {
                exceeds |= !(sum(i) <= kMaxSum);
            }
            exceeds = __any_sync(0xffffffffu, exceeds);
        }
        if (exceeds) {
            raise_max(tSrS, tOrO);
            sum = exponentiate<true>(tSrS, tOrP);
        }
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            row_sum(i) += sum(i);
        }
    }

    // The largest score of each row in a block.
    template <class TensorS>
    CUTE_DEVICE static RowTensor block_max(TensorS const &tSrS) {
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

    // The running maximum takes in a block's; O and row_sum become relative to it.
    template <class TensorS, class TensorO>
    CUTE_DEVICE void raise_max(TensorS const &tSrS, TensorO &tOrO) {
        RowTensor const max = block_max(tSrS);
        RowTensor factor;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            float const new_max = fmaxf(row_max(i), max(i));
            factor(i) = exp2f((row_max(i) - finite_max(new_max)) * scale_log2);
            row_sum(i) *= factor(i);
            row_max(i) = new_max;
        }
        rescale(tOrO, factor);
    }

    // Probabilities relative to the running maximum, rounded to P; this thread's share of each
    // row's sum. Without kAnyMax each row's maximum has to be that of a score, else the sum is
    // infinite or NaN.
    template <bool kAnyMax, class TensorS, class TensorP>
    CUTE_DEVICE RowTensor exponentiate(TensorS const &tSrS, TensorP &tOrP) const {
        Tensor tSrE = make_fragment_like(tSrS);
        Tensor scores = make_tensor(tSrS.data(), layout_acc_rowcol(tSrS.layout()));  // (rows, cols)
        Tensor exps = make_tensor(tSrE.data(), scores.layout());                     // (rows, cols)
        RowTensor sum;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            float const max_scaled = (kAnyMax ? finite_max(row_max(i)) : row_max(i)) * scale_log2;
            sum(i) = 0.f;
            CUTE_UNROLL
            for (int j = 0; j < size<1>(scores); ++j) {
                exps(i, j) = exp2f(scores(i, j) * scale_log2 - max_scaled);
                sum(i) += exps(i, j);
            }
        }
        convert(tSrE, tOrP);
        return sum;
    }

    template <class TensorO>
    CUTE_DEVICE static void rescale(TensorO &tOrO, RowTensor const &factor) {
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
