// Views and small operations on CuTe tensors that both kernel classes use.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>

namespace flash {

using namespace cute;

// A row in global memory: where it begins, and whether it exists, else it is not accessed.
template <class Element>
struct GmemRow {
    Element *gmem;
    bool exists;
};

template <class Element, class Pointer>
CUTE_DEVICE Element *head_begin(Pointer *ptr, int batch, int64_t batch_stride, int head,
                                int64_t head_stride) {
    return static_cast<Element *>(ptr) + batch * batch_stride + head * head_stride;
}

// The accumulator of an m16n8 MMA, ((2, 2), MMA_M, MMA_N), seen as (rows, columns): each thread
// holds two rows and, per n8 step, two neighbouring columns of each.
template <class Layout>
CUTE_HOST_DEVICE constexpr auto layout_acc_rowcol(Layout const &acc) {
    static_assert(decltype(size<0>(acc))::value == 4 && decltype(rank(acc))::value == 3);
    auto const l = logical_divide(acc, Shape<_2>{});  // ((2, 2), MMA_M, MMA_N)
    return make_layout(make_layout(get<0, 1>(l), get<1>(l)), make_layout(get<0, 0>(l), get<2>(l)));
}

// An m16n8 accumulator as A operand of the next m16n8k16 MMA: two n8 steps make one k16 step.
template <class Layout>
CUTE_HOST_DEVICE constexpr auto layout_acc_as_operand_a(Layout const &acc) {
    static_assert(decltype(size<0>(acc))::value == 4 && decltype(rank(acc))::value == 3);
    auto const l = logical_divide(acc, Shape<Underscore, Underscore, _2>{});  // (4, M, (2, N/2))
    return make_layout(make_layout(get<0>(l), get<2, 0>(l)), get<1>(l), get<2, 1>(l));
}

// Rounds fp32 values to dst's 16-bit type, two at a time as the conversion instructions take them:
// neighbours of src become neighbours of dst.
template <class EngineS, class LayoutS, class EngineD, class LayoutD>
CUTE_DEVICE void convert(Tensor<EngineS, LayoutS> const &src, Tensor<EngineD, LayoutD> &dst) {
    using From = typename EngineS::value_type;
    using To = typename EngineD::value_type;
    constexpr int kSize = decltype(size(src))::value;
    static_assert(kSize == decltype(size(dst))::value && kSize % 2 == 0);
    cutlass::NumericArrayConverter<To, From, 2> convert_pair;
    auto const *const pairs = reinterpret_cast<cutlass::Array<From, 2> const *>(src.data());
    auto *const words = reinterpret_cast<uint32_t *>(dst.data());
    CUTE_UNROLL
    for (int i = 0; i < kSize / 2; ++i) {
        cutlass::Array<To, 2> const pair = convert_pair(pairs[i]);
        words[i] = reinterpret_cast<uint32_t const &>(pair);
    }
}

// As convert(), but returns a new tensor, of src's layout.
template <class To, class Engine, class Layout>
CUTE_DEVICE auto convert_type(Tensor<Engine, Layout> const &src) {
    Tensor dst = make_tensor<To>(src.layout());
    convert(src, dst);
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

// acc += A B. B, and A unless its copy is NoCopy, are read from shared memory. One ldmatrix.x4
// brings the B fragments of a k16 x n16 block, kAhead blocks before their MMAs. ptxas makes a
// schedule of its own, but spills less from this order than from one that loads each block just
// before its MMAs.
template <class TiledMma, class CopyA, class CopyB, class Acc, class FragA, class FragB,
          class SmemA, class SmemB>
CUTE_DEVICE void gemm_smem(TiledMma const &mma, CopyA const &copy_a, CopyB const &copy_b, Acc &acc,
                           FragA &tCrA, FragB &tCrB, SmemA const &tCsA, SmemB const &tCsB) {
    constexpr int kM = decltype(size<1>(tCrA))::value;
    constexpr int kK = decltype(size<2>(tCrA))::value;
    constexpr int kN16 = decltype(size<1>(tCsB))::value;
    constexpr int kBlocks = kN16 * kK;
    constexpr int kAhead = kBlocks < 4 ? kBlocks : 4;
    auto tCrB_view = copy_b.get_slice(_0{}).retile_D(tCrB);
    auto const load_a = [&](int k) {
        if constexpr (!is_same<CopyA, NoCopy>::value) {
            auto tCrA_view = copy_a.get_slice(_0{}).retile_D(tCrA);
            CUTE_UNROLL
            for (int m = 0; m < kM; ++m) {
                copy_a.call(tCsA(_, m, k), tCrA_view(_, m, k));
            }
        }
    };
    auto const load_b = [&](int block) {
        int const n = block % kN16;
        int const k = block / kN16;
        copy_b.call(tCsB(_, n, k), tCrB_view(_, n, k));
    };
    load_a(0);
    CUTE_UNROLL
    for (int block = 0; block < kAhead; ++block) {
        load_b(block);
    }
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
        int const k = block / kN16;
        if (block % kN16 == kN16 / 2 && k + 1 < kK) {
            load_a(k + 1);
        }
        if (block + kAhead < kBlocks) {
            load_b(block + kAhead);
        }
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
            int const n = block % kN16 * 2 + half;
            CUTE_UNROLL
            for (int m = 0; m < kM; ++m) {
                int const row = half ? kM - 1 - m : m;  // zigzag: successive MMAs share an operand
                Tensor tCrC = acc(_, row, n);
                mma.call(tCrC, tCrA(_, row, k), tCrB(_, n, k), tCrC);
            }
        }
    }
}

}  // namespace flash
