// Views and small operations on CuTe tensors that both kernel classes use.
#pragma once

#include <cute/tensor.hpp>

#include <cutlass/numeric_conversion.h>

namespace flash {

using namespace cute;

// The accumulator of an m16n8 MMA, ((2, 2), MMA_M, MMA_N), seen as (rows, columns) of the score tile:
// each thread holds two rows and, per n8 step, two neighbouring columns of each.
template <class Layout>
CUTE_HOST_DEVICE constexpr auto layout_acc_rowcol(Layout const &acc) {
    static_assert(decltype(size<0>(acc))::value == 4 && decltype(rank(acc))::value == 3);
    auto const l = logical_divide(acc, Shape<_2>{});  // ((2, 2), MMA_M, MMA_N)
    return make_layout(make_layout(get<0, 1>(l), get<1>(l)), make_layout(get<0, 0>(l), get<2>(l)));
}

// The same accumulator seen as A operand of the next m16n8k16 MMA: two n8 steps make one k16 step.
template <class Layout>
CUTE_HOST_DEVICE constexpr auto layout_acc_as_operand_a(Layout const &acc) {
    static_assert(decltype(size<0>(acc))::value == 4 && decltype(rank(acc))::value == 3);
    auto const l = logical_divide(acc, Shape<Underscore, Underscore, _2>{});  // (4, MMA_M, (2, N/2))
    return make_layout(make_layout(get<0>(l), get<2, 0>(l)), get<1>(l), get<2, 1>(l));
}

// Rounds an fp32 tensor to To, in fragments that the conversion instructions take two at a time.
template <class To, class Engine, class Layout>
CUTE_DEVICE auto convert_type(Tensor<Engine, Layout> const &src) {
    using From = typename Engine::value_type;
    constexpr int kSize = decltype(size(src))::value;
    Tensor dst = make_tensor<To>(src.layout());
    cutlass::NumericArrayConverter<To, From, kSize> convert;
    *reinterpret_cast<cutlass::Array<To, kSize> *>(dst.data()) =
        convert(*reinterpret_cast<cutlass::Array<From, kSize> const *>(src.data()));
    return dst;
}

// Reduces over the four neighbouring lanes that share a row of an m16n8 accumulator.
template <class Op>
CUTE_DEVICE float quad_allreduce(float x, Op op) {
    x = op(x, __shfl_xor_sync(0xffffffffu, x, 2));
    return op(x, __shfl_xor_sync(0xffffffffu, x, 1));
}

// Stands for the copy of an A operand that is in registers already.
struct NoCopy {};

// acc += A B with B, and A unless its copy is NoCopy, read from shared memory. One ldmatrix.x4 brings the
// B fragments of a k16 x n16 block. ptxas moves the loads ahead of their MMAs as far as registers allow.
template <class TiledMma, class CopyA, class CopyB, class Acc, class FragA, class FragB,
          class SmemA, class SmemB>
CUTE_DEVICE void gemm_smem(TiledMma const &mma, CopyA const &copy_a, CopyB const &copy_b, Acc &acc,
                           FragA &tCrA, FragB &tCrB, SmemA const &tCsA, SmemB const &tCsB) {
    constexpr int kM = decltype(size<1>(tCrA))::value;
    constexpr int kBlocks = decltype(size<1>(tCsB))::value;  // n16 blocks
    constexpr int kPerBlock = decltype(size<1>(tCrB))::value / kBlocks;
    auto tCrB_view = copy_b.get_slice(_0{}).retile_D(tCrB);
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tCrA); ++k) {
        if constexpr (!is_same<CopyA, NoCopy>::value) {
            auto tCrA_view = copy_a.get_slice(_0{}).retile_D(tCrA);
            CUTE_UNROLL
            for (int m = 0; m < kM; ++m) { copy_a.call(tCsA(_, m, k), tCrA_view(_, m, k)); }
        }
        CUTE_UNROLL
        for (int block = 0; block < kBlocks; ++block) {
            copy_b.call(tCsB(_, block, k), tCrB_view(_, block, k));
            CUTE_UNROLL
            for (int n = block * kPerBlock; n < (block + 1) * kPerBlock; ++n) {
                CUTE_UNROLL
                for (int m = 0; m < kM; ++m) {
                    Tensor tCrC = acc(_, m, n);
                    mma.call(tCrC, tCrA(_, m, k), tCrB(_, n, k), tCrC);
                }
            }
        }
    }
}

}  // namespace flash
