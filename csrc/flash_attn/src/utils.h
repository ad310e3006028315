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

// acc += A B with both operands in shared memory; each k step's fragments are fetched one step ahead.
template <class TiledMma, class CopyA, class CopyB, class Acc, class FragA, class FragB,
          class SmemA, class SmemB>
CUTE_DEVICE void gemm_ss(TiledMma const &mma, CopyA const &copy_a, CopyB const &copy_b, Acc &acc,
                         FragA &tCrA, FragB &tCrB, SmemA const &tCsA, SmemB const &tCsB) {
    auto tCrA_view = copy_a.get_slice(_0{}).retile_D(tCrA);
    auto tCrB_view = copy_b.get_slice(_0{}).retile_D(tCrB);
    copy(copy_a, tCsA(_, _, _0{}), tCrA_view(_, _, _0{}));
    copy(copy_b, tCsB(_, _, _0{}), tCrB_view(_, _, _0{}));
    constexpr int kSteps = decltype(size<2>(tCrA))::value;
    CUTE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
        if (k + 1 < kSteps) {
            copy(copy_a, tCsA(_, _, k + 1), tCrA_view(_, _, k + 1));
            copy(copy_b, tCsB(_, _, k + 1), tCrB_view(_, _, k + 1));
        }
        gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
    }
}

// acc += A B with A in registers and B in shared memory.
template <class TiledMma, class CopyB, class Acc, class FragA, class FragB, class SmemB>
CUTE_DEVICE void gemm_rs(TiledMma const &mma, CopyB const &copy_b, Acc &acc, FragA const &tCrA,
                         FragB &tCrB, SmemB const &tCsB) {
    auto tCrB_view = copy_b.get_slice(_0{}).retile_D(tCrB);
    copy(copy_b, tCsB(_, _, _0{}), tCrB_view(_, _, _0{}));
    constexpr int kSteps = decltype(size<2>(tCrA))::value;
    CUTE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
        if (k + 1 < kSteps) { copy(copy_b, tCsB(_, _, k + 1), tCrB_view(_, _, k + 1)); }
        gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
    }
}

}  // namespace flash
