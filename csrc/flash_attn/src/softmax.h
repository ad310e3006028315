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
// block's row sum may reach 2^kAbove. The wider the range, the more scores may vary before a
// maximum is needed. But kBelow costs range at the lower end, where weights lose bits and then
// become 0. Many such weights may make up much of O, and row_sum counts them unrounded.
template <DType kType>
struct RangeOfP;
template <>
struct RangeOfP<DType::bf16> {  // normal from 2^-126 to 2^127; P V must stay within that, too
    static constexpr int kBelow = 56;
    static constexpr int kAbove = 28;
};
template <>
struct RangeOfP<DType::fp16> {  // normal from 2^-14, with fewer bits from 2^-24, to 65504
    // With kBelow = 6, 16,384 weights of 2^-19 times the maximum, 3 % of a row's sum, became 0.
    static constexpr int kBelow = 0;
    static constexpr int kAbove = 15;
};

// Online softmax state of the rows that one thread holds. row_sum is this thread's share of a row
// sum until finalize() adds up the four lanes of the row, which is possible as all four rescale it
// by the same factors.
//
// P is relative to a row's reference and not to its running maximum. While sums stay within the
// range of P, no maximum is computed and O is not rescaled (lazy softmax). A block whose sums leave
// it is computed again with its maximum. Data that does so once is likely to do so again: the next
// kSeekBlocks blocks, in this tile and those that follow, compute their maximum first. Results do
// not depend on which blocks do: a reference is raised only where a maximum exceeds it by more than
// kRoom, and sums above 2^kAbove only tell that this is possible.
template <int kRows, DType kType>
struct Softmax {
    static constexpr int kSeekBlocks = 16;
    static constexpr int kAlways = 1 << 30;
    static constexpr float kBelow = RangeOfP<kType>::kBelow;
    // The base-2 exponent by which a score may exceed the reference. With 0.01 more, a maximum
    // beyond it always shows in the sum, although the sum is rounded.
    static constexpr float kRoom = RangeOfP<kType>::kBelow + RangeOfP<kType>::kAbove + 0.01f;
    static constexpr float kMaxSum = 1u << RangeOfP<kType>::kAbove;
    static constexpr float kInverseBelow = uint64_t(1) << RangeOfP<kType>::kBelow;
    // References from this magnitude on are huge: the FFMA s * c - m * c, which rounds m * c but
    // not s * c, would have a larger error than the rounding of P.
    static constexpr float kHuge = 16384.f;
    static constexpr float kLn2 = 0.693147180559945309f;
    static constexpr float kLog2e = 1.44269504088896341f;
    using RowTensor = decltype(make_tensor<float>(Shape<Int<kRows>>{}));

    float const scale_log2;
    RowTensor row_ref;     // reference (base 2): an earlier maximum times c; -inf: no key yet
    RowTensor row_offset;  // offset_of(row_ref), read by update_unbounded() alone
    RowTensor row_sum;
    int seek = 0;  // blocks that still compute their maximum first; warp-uniform

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

    // Processes a tile's first block: there is no O to rescale yet.
    template <class TensorS, class TensorP>
    CUTE_DEVICE void start(TensorS &tSrS, TensorP &tOrP) {
        set_ref(quad_max(thread_max(tSrS)));
        seek_while_huge();
        float c = scale_log2;
        RowTensor const offset = bounded_offset(tSrS, c);
        row_sum = exponentiate(tSrS, tOrP, c, offset);
    }

    // Adds a block. bounded: computes its row maximum first. Otherwise it assumes that scores stay
    // within the range of P and, where they do not, computes the block again with its maximum. A
    // row without a key so far has reference -inf: its first score makes the sum infinite, a masked
    // one NaN, and both count as exceeding. The loop keeps a single copy of the exponentials' code.
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

    // update() as two functions, which ptxas schedules better around wgmma (sm90 class). This one
    // adds a block that is not bounded.
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

    // Adds a block after raise_ref() was called for it; raised and factor are its results.
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

    // Raises the references of the warp's rows to their maxima if a score of this block would leave
    // the range of P. Returns whether it did: then the caller has to multiply O by factor.
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
            // In masked blocks rows see their first keys, which says nothing about later blocks.
            seek = masked ? seek : kSeekBlocks;
            seek_while_huge();
        }
        return exceeds;
    }

    // Divides O by the row sums, multiplies it by scale and returns the LSE of each row. sink: the
    // logit of a further column without a value, which the row sum includes; -inf for none. A row
    // without keys gets O = 0 and its sink as LSE.
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

    // Reduces row maxima over the four lanes of a row and multiplies them by c.
    CUTE_DEVICE RowTensor quad_max(RowTensor max) const {
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            max(i) = quad_allreduce(max(i), [](float a, float b) { return fmaxf(a, b); });
            max(i) *= scale_log2;
        }
        return max;
    }

    // Lets every block go through bounded_offset() while a reference of the warp is huge.
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

    // Returns the offsets for scores that stay within the range of P. Where a reference is huge, it
    // replaces each score by s * c - reference, with s * c rounded as the reference was, and sets c
    // to 1: the largest score's exponent is then 0. In one FFMA it would be the rounding error of
    // the reference, and might overflow.
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

    // Writes exp2(s * c - offset), rounded, to P. Returns this thread's share of each row sum,
    // which it adds up in two chains, half as long as one.
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
