// The loop over key blocks on mma.sync, cp.async and ldmatrix: load, S = Q K^T, mask, softmax, O += P V.
#pragma once

#include <cute/tensor.hpp>

#include "block_info.h"
#include "kernel_traits.h"
#include "mask.h"
#include "seqlen_info.h"
#include "softmax.h"
#include "tile_scheduler.h"
#include "utils.h"

namespace flash {

using namespace cute;

// One (rows, head_dim) tile from global to shared memory. Rows at or past row_end and columns at or past
// d are written as zeros and never read: whatever lies there cannot reach a result.
template <class TiledCopy, class TG, class TS, class TC>
CUTE_DEVICE void load_tile(TiledCopy const &tiled_copy, TG const &tXgX, TS &&tXsX, TC const &tXcX,
                           int row_end, int d) {
    CUTE_UNROLL
    for (int r = 0; r < size<1>(tXsX); ++r) {
        bool const row_valid = get<0>(tXcX(_0{}, r, _0{})) < row_end;
        CUTE_UNROLL
        for (int c = 0; c < size<2>(tXsX); ++c) {
            bool const valid = row_valid && get<1>(tXcX(_0{}, _0{}, c)) < d;
            copy(tiled_copy.with(valid), tXgX(_, r, c), tXsX(_, r, c));
        }
    }
}

template <FwdConfig C>
struct MainloopFwdSm80 {
    using Traits = KernelTraitsSm80<C>;
    using Element = typename Traits::Element;
    using TiledMma = typename Traits::TiledMma;
    using SharedStorage = typename Traits::SharedStorage;
    static constexpr int kTileM = Traits::kTileM;
    static constexpr int kTileN = Traits::kTileN;
    static constexpr int kHeadDim = Traits::kHeadDim;
    static constexpr int kStages = Traits::kStages;
    static constexpr int kRowsPerThread = 2 * kTileM / (16 * C.warps);

    using SoftmaxT = Softmax<kRowsPerThread>;

    // Leaves the tile's unnormalised O in tOrO and its row statistics in softmax.
    template <class AccO>
    CUTE_DEVICE static void run(Flash_fwd_params const &params, SharedStorage &storage,
                                TileCoord const &tile, SeqlenInfo const &seqlen, AccO &tOrO,
                                SoftmaxT &softmax) {
        int const thread = threadIdx.x;
        int const n_end = BlockInfo<C>::n_block_end(seqlen, tile.m_block);
        int const n_unmasked_end = BlockInfo<C>::n_block_unmasked_end(seqlen, tile.m_block);
        int const head_k = tile.head / params.h_h_k_ratio;

        auto const head_tile = [&](void const *ptr, int64_t batch_stride, int64_t row_stride,
                                   int64_t head_stride, int head, int rows) {
            auto const *base = static_cast<Element const *>(ptr) + tile.batch * batch_stride +
                               head * head_stride;
            return make_tensor(make_gmem_ptr(base), make_shape(rows, Int<kHeadDim>{}),
                               make_stride(row_stride, _1{}));
        };
        Tensor mQ = head_tile(params.q_ptr, params.q_batch_stride, params.q_row_stride,
                              params.q_head_stride, tile.head, seqlen.seqlen_q);  // (seqlen_q, d)
        Tensor mK = head_tile(params.k_ptr, params.k_batch_stride, params.k_row_stride,
                              params.k_head_stride, head_k, seqlen.seqlen_k);     // (seqlen_k, d)
        Tensor mV = head_tile(params.v_ptr, params.v_batch_stride, params.v_row_stride,
                              params.v_head_stride, head_k, seqlen.seqlen_k);     // (seqlen_k, d)
        auto const shape_q = Shape<Int<kTileM>, Int<kHeadDim>>{};
        auto const shape_kv = Shape<Int<kTileN>, Int<kHeadDim>>{};
        Tensor gQ = local_tile(mQ, shape_q, make_coord(tile.m_block, 0));           // (M, d)
        Tensor gK = local_tile(mK, shape_kv, make_coord(_, 0));                     // (N, d, n)
        Tensor gV = local_tile(mV, shape_kv, make_coord(_, 0));                     // (N, d, n)

        using LayoutQ = typename Traits::SmemLayoutQ;
        using LayoutKV = typename Traits::SmemLayoutKV;
        using LayoutVt = typename Traits::SmemLayoutVt;
        Tensor sQ = make_tensor(make_smem_ptr(storage.q_or_o.data()), LayoutQ{});   // (M, d)
        Tensor sK = make_tensor(make_smem_ptr(storage.k.data()), LayoutKV{});       // (N, d, stage)
        Tensor sV = make_tensor(make_smem_ptr(storage.v.data()), LayoutKV{});       // (N, d, stage)
        Tensor sVt = make_tensor(make_smem_ptr(storage.v.data()), LayoutVt{});      // (d, N, stage)

        typename Traits::GmemCopyLoad gmem_copy;
        auto const gmem_thr = gmem_copy.get_thread_slice(thread);
        Tensor tQgQ = gmem_thr.partition_S(gQ);                                     // (8, rows, cols)
        Tensor tQsQ = gmem_thr.partition_D(sQ);                                     // (8, rows, cols)
        Tensor tKgK = gmem_thr.partition_S(gK);                                     // (8, rows, cols, n)
        Tensor tKsK = gmem_thr.partition_D(sK);                                     // (8, rows, cols, stage)
        Tensor tVgV = gmem_thr.partition_S(gV);                                     // (8, rows, cols, n)
        Tensor tVsV = gmem_thr.partition_D(sV);                                     // (8, rows, cols, stage)
        Tensor tQcQ = gmem_thr.partition_S(make_identity_tensor(shape_q));          // (8, rows, cols)
        Tensor tKcK = gmem_thr.partition_S(make_identity_tensor(shape_kv));         // (8, rows, cols)

        TiledMma mma;
        auto const mma_thr = mma.get_thread_slice(thread);
        using CopyAtom = typename Traits::SmemCopyAtom;
        using CopyAtomV = typename Traits::SmemCopyAtomTransposed;
        auto const copy_q = make_tiled_copy_A(CopyAtom{}, mma);
        auto const copy_k = make_tiled_copy_B(CopyAtom{}, mma);
        auto const copy_v = make_tiled_copy_B(CopyAtomV{}, mma);
        Tensor tSsQ = copy_q.get_slice(thread).partition_S(sQ);                     // (8, MMA_M, d/16)
        Tensor tSsK = copy_k.get_slice(thread).partition_S(sK);                     // (8, N/16, d/16, stage)
        Tensor tOsVt = copy_v.get_slice(thread).partition_S(sVt);                                     // (8, d/16, N/16, stage)
        Tensor tSrQ = mma_thr.partition_fragment_A(sQ);                             // (8, MMA_M, d/16)
        Tensor tSrK = make_tensor<Element>(
            partition_shape_B(mma, Shape<Int<kTileN>, Int<kHeadDim>>{}));           // (4, N/8, d/16)
        Tensor tOrVt = make_tensor<Element>(
            partition_shape_B(mma, Shape<Int<kHeadDim>, Int<kTileN>>{}));           // (4, d/8, N/16)
        Tensor tScS = mma_thr.partition_C(
            make_identity_tensor(Shape<Int<kTileM>, Int<kTileN>>{}));               // (4, MMA_M, N/8)

        Mask<C> const mask{seqlen, tile.m_block};
        auto const load_k = [&](int n, int stage) {
            load_tile(gmem_copy, tKgK(_, _, _, n), tKsK(_, _, _, stage), tKcK,
                      seqlen.seqlen_k - n * kTileN, params.d);
        };
        auto const load_v = [&](int n, int stage) {
            load_tile(gmem_copy, tVgV(_, _, _, n), tVsV(_, _, _, stage), tKcK,
                      seqlen.seqlen_k - n * kTileN, params.d);
        };

        // Key blocks run right to left, so that the few that need the mask come first.
        int n = n_end - 1;
        int stage = 0;
        load_tile(gmem_copy, tQgQ, tQsQ, tQcQ, seqlen.seqlen_q - tile.m_block * kTileM, params.d);
        if (n >= 0) {
            load_k(n, stage);
            if constexpr (kStages == 2) { load_v(n, stage); }
        }
        cp_async_fence();
        if constexpr (C.q_in_regs) {
            cp_async_wait<0>();
            __syncthreads();
            copy(copy_q, tSsQ, copy_q.get_slice(thread).retile_D(tSrQ));
        }

        auto const step = [&](auto masked) {
            // This block's K (with two stages its V too) has landed; all warps are done with the
            // buffers that the next loads overwrite.
            cp_async_wait<0>();
            __syncthreads();
            if constexpr (kStages == 2) {
                if (n > 0) {
                    load_k(n - 1, stage ^ 1);
                    load_v(n - 1, stage ^ 1);
                }
            } else {
                load_v(n, stage);
            }
            cp_async_fence();

            Tensor tSrS = partition_fragment_C(mma, Shape<Int<kTileM>, Int<kTileN>>{});  // (4, MMA_M, N/8)
            clear(tSrS);
            if constexpr (C.q_in_regs) {
                gemm_rs(mma, copy_k, tSrS, tSrQ, tSrK, tSsK(_, _, _, stage));
            } else {
                gemm_ss(mma, copy_q, copy_k, tSrS, tSrQ, tSrK, tSsQ, tSsK(_, _, _, stage));
            }
            if constexpr (kStages == 1) {
                cp_async_wait<0>();
                __syncthreads();
                if (n > 0) { load_k(n - 1, stage); }
                cp_async_fence();
            }
            if constexpr (decltype(masked)::value) { mask.apply(tSrS, tScS, n); }
            softmax.rescale(tOrO, softmax.update_max(tSrS));
            softmax.exponentiate(tSrS);
            Tensor rP = convert_type<Element>(tSrS);                                // (4, MMA_M, N/8)
            Tensor tOrP = make_tensor(rP.data(), layout_acc_as_operand_a(rP.layout()));
            gemm_rs(mma, copy_v, tOrO, tOrP, tOrVt, tOsVt(_, _, _, stage));
            if constexpr (kStages == 2) { stage ^= 1; }
        };
        CUTE_NO_UNROLL
        for (; n >= n_unmasked_end; --n) { step(true_type{}); }
        CUTE_NO_UNROLL
        for (; n >= 0; --n) { step(false_type{}); }
        cp_async_wait<0>();
    }
};

}  // namespace flash
