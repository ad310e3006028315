// Shared by rungs 11 and 12: tiles, copies and the softmax in CuTe (CUTLASS, "CuTe documentation").
// The library's counterpart is csrc/flash_attn/src/kernel_traits.h.
#pragma once

#include <cutlass/numeric_types.h>

#include <cute/tensor.hpp>
#include <type_traits>

#include "ladder.h"
#include "utils.h"

namespace ladder {

using namespace cute;

template <class CudaElement, int kHeadDim, int kTileM, int kTileN, int kWarps>
struct CuteTypes {
    static constexpr bool kHalf = std::is_same_v<CudaElement, __half>;
    using Element = std::conditional_t<kHalf, cutlass::half_t, cutlass::bfloat16_t>;

    // Warps are stacked along M, so a row's scores stay within one warp.
    using MmaAtom = MMA_Atom<
        std::conditional_t<kHalf, SM80_16x8x16_F32F16F16F32_TN, SM80_16x8x16_F32BF16BF16F32_TN>>;
    using TiledMma =
        TiledMMA<MmaAtom, Layout<Shape<Int<kWarps>, _1, _1>>, Tile<Int<16 * kWarps>, _16, _16>>;

    // Rung 8's swizzle as a layout: in 8 rows of 64 elements, the index of a 16-byte piece is XORed
    // with the row. A tile is made of such atoms.
    using SmemAtom =
        decltype(composition(Swizzle<3, 3, 3>{}, Layout<Shape<_8, _64>, Stride<_64, _1>>{}));
    using SmemQ = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kTileM>, Int<kHeadDim>>{}));
    using SmemKV = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kTileN>, Int<kHeadDim>>{}));
    // V as the B operand of P V: the same bytes, seen as (d, N).
    using SmemVt = decltype(composition(
        SmemKV{}, Layout<Shape<Int<kHeadDim>, Int<kTileN>>, Stride<Int<kTileN>, _1>>{}));

    using SmemCopy = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
    using SmemCopyTransposed = Copy_Atom<SM75_U16x8_LDSM_T, Element>;
    // 8 consecutive threads copy the 128 bytes of a row, 16 bytes each.
    using GmemCopy = decltype(make_tiled_copy(
        Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, Element>{},
        Layout<Shape<Int<4 * kWarps>, _8>, Stride<_8, _1>>{}, Layout<Shape<_1, _8>>{}));

    // Copies a tile from global memory into sX, (rows, d). Rows from `rows` on are not read and
    // become zeros. A thread's pieces are at constant strides from its first.
    template <class SmemTensor>
    CUTE_DEVICE static void load(Element const *gmem, int64_t row_stride, SmemTensor &&sX,
                                 int rows) {
        constexpr int kRowsPerPass = 4 * kWarps;
        int const row = threadIdx.x / 8;
        GmemCopy const gmem_copy;
        Tensor tXsX = gmem_copy.get_slice(threadIdx.x).partition_D(sX);  // (8, r, d/64)
        gmem += row * row_stride + threadIdx.x % 8 * 8;
        CUTE_UNROLL
        for (int r = 0; r < size<1>(tXsX); ++r) {
            bool const inside = r * kRowsPerPass < rows - row;
            CUTE_UNROLL
            for (int c = 0; c < size<2>(tXsX); ++c) {
                Tensor tXgX =
                    make_tensor(make_gmem_ptr(gmem + r * kRowsPerPass * row_stride + c * 64),
                                Layout<_8>{});  // (8)
                gmem_copy.with(inside).call(tXgX, tXsX(_, r, c));
            }
        }
    }
};

// Online softmax of the kRows accumulator rows of a thread, in base 2. kLazy: O and the sums are
// rescaled only when the new maximum exceeds the one in use by a factor of 2^8.
template <int kRows, bool kLazy>
struct CuteSoftmax {
    using Row = decltype(make_tensor<float>(Shape<Int<kRows>>{}));
    Row row_max;  // of the raw scores
    Row row_sum;  // of this thread's columns

    CUTE_DEVICE CuteSoftmax() {
        fill(row_max, -INFINITY);
        fill(row_sum, 0.f);
    }

    // A row without keys so far has maximum -inf; 0 instead avoids (-inf) - (-inf).
    CUTE_DEVICE static float finite(float max) { return max == -INFINITY ? 0.f : max; }

    template <class Engine, class Layout>
    CUTE_DEVICE static void scale_rows(Tensor<Engine, Layout> &acc, Row const &factor) {
        Tensor rows = make_tensor(acc.data(), flash::layout_acc_rowcol(acc.layout()));
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            CUTE_UNROLL
            for (int j = 0; j < size<1>(rows); ++j) {
                rows(i, j) *= factor(i);
            }
        }
    }

    // Turns scores into probabilities, and rescales O and the sums to the same maximum.
    template <class EngineS, class LayoutS, class EngineO, class LayoutO>
    CUTE_DEVICE void step(Tensor<EngineS, LayoutS> &tSrS, Tensor<EngineO, LayoutO> &tOrO,
                          float scale_log2) {
        Tensor scores =
            make_tensor(tSrS.data(), flash::layout_acc_rowcol(tSrS.layout()));  // (rows, cols)
        Row new_max;
        bool grown = !kLazy;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            new_max(i) = row_max(i);
            CUTE_UNROLL
            for (int j = 0; j < size<1>(scores); ++j) {
                new_max(i) = fmaxf(new_max(i), scores(i, j));
            }
            new_max(i) =
                flash::quad_allreduce(new_max(i), [](float a, float b) { return fmaxf(a, b); });
            grown |= (new_max(i) - row_max(i)) * scale_log2 > 8.f;
        }
        if (!kLazy || __any_sync(kAllLanes, grown)) {
            Row factor;
            CUTE_UNROLL
            for (int i = 0; i < kRows; ++i) {
                factor(i) = exp2f((row_max(i) - finite(new_max(i))) * scale_log2);
                row_sum(i) *= factor(i);
                row_max(i) = new_max(i);
            }
            scale_rows(tOrO, factor);
        }
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            float const base = finite(row_max(i)) * scale_log2;
            CUTE_UNROLL
            for (int j = 0; j < size<1>(scores); ++j) {
                scores(i, j) = exp2f(scores(i, j) * scale_log2 - base);
                row_sum(i) += scores(i, j);
            }
        }
    }

    // Divides O by the row sums; returns the log-sum-exps. A row without keys: 0 and -inf.
    template <class Engine, class Layout>
    CUTE_DEVICE Row finish(Tensor<Engine, Layout> &tOrO, float scale) {
        Row lse, inverse;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            float const sum =
                flash::quad_allreduce(row_sum(i), [](float a, float b) { return a + b; });
            inverse(i) = sum > 0.f ? 1.f / sum : 0.f;
            lse(i) = row_max(i) * scale + logf(sum);
        }
        scale_rows(tOrO, inverse);
        return lse;
    }
};

// Sets masked scores to -inf. tScS: the coordinates of each score in the tile.
template <class Head, class EngineS, class LayoutS, class EngineC, class LayoutC>
CUTE_DEVICE void mask_scores(Tensor<EngineS, LayoutS> &tSrS, Tensor<EngineC, LayoutC> const &tScS,
                             Head const &head, int first_row, int first_key) {
    Tensor scores = make_tensor(tSrS.data(), flash::layout_acc_rowcol(tSrS.layout()));
    Tensor places = make_tensor(tScS.data(), flash::layout_acc_rowcol(tScS.layout()));
    CUTE_UNROLL
    for (int i = 0; i < size<0>(scores); ++i) {
        int const visible = head.key_end(first_row + get<0>(places(i, _0{}))) - first_key;
        CUTE_UNROLL
        for (int j = 0; j < size<1>(scores); ++j) {
            if (get<1>(places(i, j)) >= visible) {
                scores(i, j) = -INFINITY;
            }
        }
    }
}

// Writes the tile's O, rounded, and log-sum-exps. tOcO: the coordinates of each element in the
// tile.
template <class Element, class Head, class Row, class EngineO, class LayoutO, class EngineC,
          class LayoutC>
CUTE_DEVICE void store_tile(Tensor<EngineO, LayoutO> const &tOrO,
                            Tensor<EngineC, LayoutC> const &tOcO, Row const &lse, Head const &head,
                            int first_row) {
    Tensor rO = flash::convert_type<Element>(tOrO);
    Tensor out = make_tensor(rO.data(), flash::layout_acc_rowcol(rO.layout()));  // (rows, cols)
    Tensor places = make_tensor(tOcO.data(), flash::layout_acc_rowcol(tOcO.layout()));  // the same
    CUTE_UNROLL
    for (int i = 0; i < size<0>(out); ++i) {
        int const row = first_row + get<0>(places(i, _0{}));
        if (row >= head.seqlen_q) {
            continue;
        }
        CUTE_UNROLL
        for (int j = 0; j < size<1>(out); j += 2) {  // two neighbours in one 32-bit store
            *reinterpret_cast<uint32_t *>(head.o + row * head.o_stride + get<1>(places(i, j))) =
                *reinterpret_cast<uint32_t const *>(&out(i, j));
        }
        if (get<1>(places(i, _0{})) == 0) {
            head.lse[row] = lse(i);
        }
    }
}

}  // namespace ladder
