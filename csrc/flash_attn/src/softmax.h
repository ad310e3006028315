// Online softmax over key blocks, in base 2: exp(s * scale - m * scale) = exp2(s * c - m * c) with
// c = scale * log2(e), one FFMA and one ex2 a score.
#pragma once

#include <cute/tensor.hpp>

#include "flash.h"
#include "utils.h"

namespace flash {

using namespace cute;

// Where P lies in the exponent range of its type. When a row's reference is set to its largest
// score, that score's P is 2^-kBelow. Later scores may exceed the reference: a thread's share of a
// block's row sum is allowed up to 2^kAbove. The wider the range, the more scores may vary before
// a maximum is needed. But kBelow is taken from the range's other end, where weights lose bits and
// then become 0. Many of them may be much of O, and row_sum counts them as they were.
template <DType kType>
struct RangeOfP;
template <>
struct RangeOfP<DType::bf16> {  // normal from 2^-126 to 2^127; P V must stay within that, too
    static constexpr int kBelow = 56;
    static constexpr int kAbove = 28;
};
template <>
struct RangeOfP<DType::fp16> {  // normal from 2^-14, with fewer bits from 2^-24, to 65504
    // With 6, 16,384 weights of 2^-19 of the maximum, which are 3 % of a row, were 0.
    static constexpr int kBelow = 0;
    static constexpr int kAbove = 15;
};

// State of the rows that one thread holds. row_sum is this thread's share until finalize() adds up
// the four lanes of a row: the running rescale is the same for all of them.
//
// P is relative to a row's reference and not to its running maximum. While sums stay within the
// range of P, no maximum is computed and O is not rescaled (lazy softmax). A block whose sums leave
// it is computed again with its maximum. Data that does so once is likely to do so again: the next
// kSeekBlocks blocks, in this tile and those that follow, compute their maximum first. Results do
// not depend on it: a reference is raised where a maximum exceeds it by more than kRoom, and sums
// above 2^kAbove only tell that this is possible.
template <int kRows, DType kType>
struct Softmax {
    static constexpr int kSeekBlocks = 16;
    static constexpr int kAlways = 1 << 30;
    static constexpr float kBelow = RangeOfP<kType>::kBelow;
    // The last part keeps a maximum that exceeds it from hiding in a sum that, rounded, does not.
    static constexpr float kRoom = RangeOfP<kType>::kBelow + RangeOfP<kType>::kAbove + 0.01f;
    static constexpr float kMaxSum = 1u << RangeOfP<kType>::kAbove;
    static constexpr float kInverseBelow = uint64_t(1) << RangeOfP<kType>::kBelow;
    // From here on the rounding of s * c, fused with the subtraction on one side only, would be
    // larger than that of P.
    static constexpr float kHuge = 16384.f;
    static constexpr float kLn2 = 0.693147180559945309f;
    static constexpr float kLog2e = 1.44269504088896341f;
    using RowTensor = decltype(make_tensor<float>(Shape<Int<kRows>>{}));

    float const scale_log2;
    RowTensor row_ref;     // reference, in powers of two: a largest score times c; -inf: no key yet
    RowTensor row_offset;  // offset_of(row_ref), which update_unbounded() alone reads
    RowTensor row_sum;
    int seek = 0;  // blocks that still compute their maximum first; the same in the whole warp

    CUTE_DEVICE explicit Softmax(float scale_log2) : scale_log2(scale_log2) { reset(); }

    CUTE_DEVICE void reset() {
        fill(row_ref, -INFINITY);
        fill(row_offset, -INFINITY);
        fill(row_sum, 0.f);
    }

    CUTE_DEVICE bool seeks_max() const { return seek > 0; }

    // A row that has seen no key has reference -inf; 0 in its place avoids (-inf) - (-inf).
    CUTE_DEVICE static float finite_ref(float ref) { return ref == -INFINITY ? 0.f : ref; }
    CUTE_DEVICE static bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }

    // A tile's first block: there is no O to be rescaled.
    template <class TensorS, class TensorP>
    CUTE_DEVICE void start(TensorS &tSrS, TensorP &tOrP) {
        set_ref(quad_max(thread_max(tSrS)));
        seek_while_huge();
        float c = scale_log2;
        RowTensor const offset = bounded_offset(tSrS, c);
        row_sum = exponentiate(tSrS, tOrP, c, offset);
    }

    // Adds a block. bounded: with its maximum, else on the assumption that its scores stay within
    // the range of P; where they do not, it is computed again with its maximum. A row without a
    // key so far has reference -inf: its first score makes the sum infinite, a masked one NaN, and
    // both count as exceeding. One copy of the exponentials serves all of it.
    template <class TensorS, class TensorP, class TensorO>
    CUTE_DEVICE void update(TensorS &tSrS, TensorP &tOrP, TensorO &tOrO, bool bounded,
                            bool masked) {
        float c = scale_log2;
        RowTensor offset = offset_of(row_ref);
        RowTensor sum;
        CUTE_NO_UNROLL
        while (true) {
            if (bounded) {
                RowTensor factor;
                if (raise_ref(tSrS, factor, masked)) {
                    rescale(tOrO, factor);
                }
                offset = bounded_offset(tSrS, c);
            }
            sum = exponentiate(tSrS, tOrP, c, offset);
            if (bounded || !exceeds_range(sum)) {
                break;
            }
            bounded = true;
        }
        add(sum);
    }

    // The same in two functions, which ptxas schedules better around wgmma: this one for a block
    // that is not bounded.
    template <class TensorS, class TensorP, class TensorO>
    CUTE_DEVICE void update_unbounded(TensorS &tSrS, TensorP &tOrP, TensorO &tOrO) {
        RowTensor const sum = exponentiate(tSrS, tOrP, scale_log2, row_offset);
        if (exceeds_range(sum)) {
            RowTensor factor;
            bool const raised = raise_ref(tSrS, factor, false);
            update_bounded(tSrS, tOrP, tOrO, raised, factor);
        } else {
            add(sum);
        }
    }

    // And this one for a block for which raise_ref() was called; raised and factor are its results.
    template <class TensorS, class TensorP, class TensorO>
    CUTE_DEVICE void update_bounded(TensorS &tSrS, TensorP &tOrP, TensorO &tOrO, bool raised,
                                    RowTensor const &factor) {
        if (raised) {
            rescale(tOrO, factor);
        }
        float c = scale_log2;
        RowTensor const offset = bounded_offset(tSrS, c);
        add(exponentiate(tSrS, tOrP, c, offset));
    }

    // Raises the references of the warp's rows to their maxima if a score of this block would
    // leave the range of P. True: O is to be multiplied by factor.
    template <class TensorS>
    CUTE_DEVICE bool raise_ref(TensorS const &tSrS, RowTensor &factor, bool masked) {
        RowTensor max = thread_max(tSrS);
        bool exceeds = false;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            exceeds |= !(max(i) * scale_log2 - row_ref(i) <= kRoom);
        }
        seek -= seek > 0;
        exceeds = any_lane(exceeds);
        if (exceeds) {
            max = quad_max(max);
            CUTE_UNROLL
            for (int i = 0; i < kRows; ++i) {
                max(i) = fmaxf(row_ref(i), max(i));
                factor(i) = exp2f(row_ref(i) - finite_ref(max(i)));
                row_sum(i) *= factor(i);
            }
            set_ref(max);
            // Under a mask rows see their first keys: that says nothing about other blocks.
            seek = masked ? seek : kSeekBlocks;
            seek_while_huge();
        }
        return exceeds;
    }

    // Divides O by the row sums; returns the log-sum-exp of each row. sink: the logit of a column
    // without a value that the sums include, -inf for none. A row without keys: 0 and its sink.
    // scale: a factor on O.
    template <class Engine, class Layout>
    CUTE_DEVICE RowTensor finalize(Tensor<Engine, Layout> &tOrO, RowTensor const &sink,
                                   float scale) {
        RowTensor lse, inv_sum;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            float const ref = finite_ref(row_ref(i));
            float sum = quad_allreduce(row_sum(i), [](float a, float b) { return a + b; });
            bool const empty = sum == 0.f;
            sum += exp2f(sink(i) * kLog2e - ref - kBelow);
            inv_sum(i) = empty ? 0.f : __fdividef(scale, sum);
            // Where a sink makes the scaled sum infinite, the keys' part of it rounds to nothing.
            float const scaled = sum * kInverseBelow;
            bool const only_sink = empty || scaled == INFINITY;
            lse(i) = only_sink ? sink(i) : ref * kLn2 + __logf(scaled);
        }
        rescale(tOrO, inv_sum);
        return lse;
    }

  private:
    CUTE_DEVICE void add(RowTensor const &sum) {
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            row_sum(i) += sum(i);
        }
    }

    // The largest score of each row among those that this thread holds.
    template <class TensorS>
    CUTE_DEVICE static RowTensor thread_max(TensorS const &tSrS) {
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
        }
        return max;
    }

    // Over the four lanes of a row, times c.
    CUTE_DEVICE RowTensor quad_max(RowTensor max) const {
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            max(i) = quad_allreduce(max(i), [](float a, float b) { return fmaxf(a, b); });
            max(i) *= scale_log2;
        }
        return max;
    }

    // While a reference of the warp is huge, every block goes through bounded_offset().
    CUTE_DEVICE void seek_while_huge() {
        bool huge = false;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            huge |= fabsf(finite_ref(row_ref(i))) >= kHuge;
        }
        seek = any_lane(huge) ? kAlways : seek > kSeekBlocks ? 0 : seek;
    }

    CUTE_DEVICE void set_ref(RowTensor const &ref) {
        row_ref = ref;
        row_offset = offset_of(ref);
    }

    CUTE_DEVICE static RowTensor offset_of(RowTensor const &ref) {
        RowTensor offset;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            offset(i) = ref(i) + kBelow;
        }
        return offset;
    }

    CUTE_DEVICE static bool exceeds_range(RowTensor const &sum) {
        bool exceeds = false;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            exceeds |= !(sum(i) <= kMaxSum);
        }
        return any_lane(exceeds);
    }

    // The offset of scores that do not leave the range of P. Where a reference is huge, s * c is
    // rounded as the reference was, and the reference subtracted, in place, with c = 1 from then
    // on: the largest score's exponent is then 0. In one FFMA it would be what rounding the
    // reference left over, and may overflow.
    template <class TensorS>
    CUTE_DEVICE RowTensor bounded_offset(TensorS &tSrS, float &c) const {
        RowTensor offset;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            offset(i) = finite_ref(row_ref(i)) + kBelow;
        }
        if (seek > kSeekBlocks) {
            Tensor scores =
                make_tensor(tSrS.data(), layout_acc_rowcol(tSrS.layout()));  // (rows, cols)
            CUTE_UNROLL
            for (int i = 0; i < kRows; ++i) {
                CUTE_UNROLL
                for (int j = 0; j < size<1>(scores); ++j) {
                    scores(i, j) = __fmul_rn(scores(i, j), c) - finite_ref(row_ref(i));
                }
                offset(i) = kBelow;
            }
            c = 1.f;
        }
        return offset;
    }

    // exp2(s * c - offset), rounded to P; this thread's share of each row's sum, as the sum of two,
    // which halves the chain of additions.
    template <class TensorS, class TensorP>
    CUTE_DEVICE static RowTensor exponentiate(TensorS const &tSrS, TensorP &tOrP, float c,
                                              RowTensor const &offset) {
        Tensor tSrE = make_fragment_like(tSrS);
        Tensor scores = make_tensor(tSrS.data(), layout_acc_rowcol(tSrS.layout()));  // (rows, cols)
        Tensor exps = make_tensor(tSrE.data(), scores.layout());                     // (rows, cols)
        RowTensor sum;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            float even = 0.f, odd = 0.f;
            CUTE_UNROLL
            for (int j = 0; j < size<1>(scores); j += 2) {
                exps(i, j) = exp2f(scores(i, j) * c - offset(i));
                exps(i, j + 1) = exp2f(scores(i, j + 1) * c - offset(i));
                even += exps(i, j);
                odd += exps(i, j + 1);
            }
            sum(i) = even + odd;
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
};

}  // namespace flash
