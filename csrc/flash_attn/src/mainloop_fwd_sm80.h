// The loop over key blocks on mma.sync, cp.async and ldmatrix: load, S = Q K^T, mask, softmax, O +=
// P V.
#pragma once

#include <cute/tensor.hpp>

#include "block_info.h"
#include "cta_plan.h"
#include "dropout.h"
#include "kernel_traits.h"
#include "mask.h"
#include "score_mod.h"
#include "softmax.h"
#include "tile_copy_sm80.h"
#include "utils.h"
#include "work_tile.h"

namespace flash {

using namespace cute;

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
    // In kernels of caches, whose tiles may have few rows, warps without rows compute nothing.
    static constexpr bool kWarpsMayRest = CtaPlan<C>::kOfCaches;

    using SoftmaxT = Softmax<kRowsPerThread, C.dtype>;

    template <class SmemTensor>
    CUTE_DEVICE static void load_q(Flash_fwd_params const &params, WorkTile const &tile,
                                   SmemTensor &&sQ) {
        Element const *const gmem =
            head_begin<Element const>(params.q_ptr, tile.batch, params.q_batch_stride, tile.head_q,
                                      params.q_head_stride) +
            tile.row_q * params.q_row_stride;
        load_rows<Traits>(sQ, params.d, [&](int r) -> GmemRow<Element const> {
            TileRow const row = tile_row(params, tile, kTileM, Traits::gmem_row(threadIdx.x, r));
            return {gmem + row.offset(params.q_row_stride, params.q_head_stride), row.exists};
        });
    }

    // Loads block n of a sequence's keys or values, looking up each row in the block table; rows of
    // a page that does not exist become zeros. gmem: row 0 of page 0.
    template <class SmemTensor>
    CUTE_DEVICE static void load_pages(Flash_fwd_params const &params, WorkTile const &tile,
                                       Element const *gmem, int64_t row_stride, int64_t page_stride,
                                       SmemTensor &&sX, int n) {
        int const *const table =
            params.block_table_ptr + tile.batch_k * params.block_table_batch_stride;
        load_rows<Traits>(sX, params.d, [&](int r) -> GmemRow<Element const> {
            int const key = n * kTileN + Traits::gmem_row(threadIdx.x, r);
            if (key >= tile.seqlen_k) {
                return {gmem, false};
            }
            int const row = tile.row_k + key;
            int const column = row / params.page_size;
            int const page = table[column];
            bool const exists =
                static_cast<unsigned>(page) < static_cast<unsigned>(params.num_pages);
            int64_t const offset = exists ? page * page_stride : 0;
            return {gmem + offset + (row - column * params.page_size) * row_stride, exists};
        });
    }

    // The first row of a tile's keys or values; with pages, row 0 of page 0.
    CUTE_DEVICE static Element const *keys_begin(void const *ptr, int64_t batch_stride,
                                                 int64_t head_stride, int64_t row_stride,
                                                 WorkTile const &tile) {
        int const entry = C.paged ? 0 : tile.batch_k;
        int const row = C.paged ? 0 : tile.row_k;
        return head_begin<Element const>(ptr, entry, batch_stride, tile.head_k, head_stride) +
               row * row_stride;
    }

    // Whether the thread's warp has rows. A warp without rows loads but computes nothing, as it
    // would read all keys and values from shared memory like the others.
    CUTE_DEVICE static bool has_rows(Flash_fwd_params const &params, WorkTile const &tile) {
        int const first_row = tile.m_block * kTileM + Traits::acc_row(threadIdx.x / 32 * 32, 0);
        return !kWarpsMayRest || first_row < num_rows(params, tile.seqlen_q);
    }

    // Runs the main loop; collective over the CTA. Leaves the tile's unnormalised O in tOrO and its
    // row statistics in softmax.
    template <class AccO>
    CUTE_DEVICE static void run(Flash_fwd_params const &params, SharedStorage &storage,
                                WorkTile const &tile, AccO &tOrO, SoftmaxT &softmax) {
        int const thread = threadIdx.x;
        bool const computes = has_rows(params, tile);
        auto const *const gK = keys_begin(params.k_ptr, params.k_batch_stride, params.k_head_stride,
                                          params.k_row_stride, tile);
        auto const *const gV = keys_begin(params.v_ptr, params.v_batch_stride, params.v_head_stride,
                                          params.v_row_stride, tile);

        Tensor sQ = make_tensor(make_smem_ptr(storage.q_or_o.data()),
                                typename Traits::SmemLayoutQ{});  // (M, d)
        using LayoutKV = typename Traits::SmemLayoutKV;
        using LayoutVt = typename Traits::SmemLayoutVt;
        auto const sK = [&](int stage) {
            return make_tensor(make_smem_ptr(storage.k[stage].data()), LayoutKV{});  // (N, d)
        };
        auto const sV = [&](int stage) {
            return make_tensor(make_smem_ptr(storage.v[stage].data()), LayoutKV{});  // (N, d)
        };
        auto const sVt = [&](int stage) {
            return make_tensor(make_smem_ptr(storage.v[stage].data()), LayoutVt{});  // (d, N)
        };

        TiledMma mma;
        auto const copy_q = make_tiled_copy_A(typename Traits::SmemCopyAtom{}, mma);
        auto const copy_k = make_tiled_copy_B(typename Traits::SmemCopyAtom{}, mma);
        auto const copy_v = make_tiled_copy_B(typename Traits::SmemCopyAtomTransposed{}, mma);
        Tensor tSsQ = copy_q.get_slice(thread).partition_S(sQ);  // (8, MMA_M, d/16)
        Tensor tSrQ = make_tensor<Element>(
            partition_shape_A(mma, Shape<Int<kTileM>, Int<kHeadDim>>{}));  // (8, MMA_M, d/16)
        Tensor tSrK = make_tensor<Element>(
            partition_shape_B(mma, Shape<Int<kTileN>, Int<kHeadDim>>{}));  // (4, N/8, d/16)
        Tensor tOrVt = make_tensor<Element>(
            partition_shape_B(mma, Shape<Int<kHeadDim>, Int<kTileN>>{}));  // (4, d/8, N/16)

        Mask<C> const mask{params, tile};
        ScoreMod<Traits, kRowsPerThread> const score_mod(params, tile, thread);
        Dropout<Traits> const dropout(params, tile, thread);
        auto const block = [&](int n) { return tile.blocks.template block<C.mask>(n); };
        auto const load = [&](Element const *gmem, int64_t row_stride, int64_t batch_stride,
                              auto &&smem, int n) {
            if constexpr (C.paged) {
                load_pages(params, tile, gmem, row_stride, batch_stride, smem, block(n));
            } else {
                load_block<Traits, kTileN>(gmem, row_stride, smem, block(n), tile.seqlen_k,
                                           params.d);
            }
        };
        auto const load_k = [&](int n, int stage) {
            load(gK, params.k_row_stride, params.k_batch_stride, sK(stage), n);
        };
        auto const load_v = [&](int n, int stage) {
            load(gV, params.v_row_stride, params.v_batch_stride, sV(stage), n);
        };

        int n = tile.blocks.count - 1;  // visits left after this one
        int stage = 0;
        load_q(params, tile, sQ);
        if (n >= 0) load_k(n, stage);
        if (kStages == 2 && n >= 0) load_v(n, stage);
        cp_async_fence();
        if constexpr (Traits::kQInRegs) {
            cp_async_wait<0>();
            __syncthreads();
            copy(copy_q, tSsQ, copy_q.get_slice(thread).retile_D(tSrQ));
        }

        // Blocks that are masked or likely to need their row maximum compute it first (bounded).
        CUTE_NO_UNROLL
        for (; n >= 0; --n) {
            bool const masked = n >= tile.blocks.unmasked;
            bool const bounded = masked || softmax.seeks_max();
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

            Tensor tSrS =
                partition_fragment_C(mma, Shape<Int<kTileM>, Int<kTileN>>{});  // (4, MMA_M, N/8)
            Tensor tSsK = copy_k.get_slice(thread).partition_S(sK(stage));     // (8, N/16, d/16)
            clear(tSrS);
            if (computes) {
                if constexpr (Traits::kQInRegs) {
                    gemm_smem(mma, NoCopy{}, copy_k, tSrS, tSrQ, tSrK, tSsQ, tSsK);
                } else {
                    gemm_smem(mma, copy_q, copy_k, tSrS, tSrQ, tSrK, tSsQ, tSsK);
                }
            }
            if constexpr (kStages == 1) {
                cp_async_wait<0>();
                __syncthreads();
                if (n > 0) load_k(n - 1, stage);
                cp_async_fence();
            }
            if (computes) {
                Tensor rP = make_tensor<Element>(tSrS.layout());  // (4, MMA_M, N/8)
                score_mod.apply(tSrS, thread, block(n));
                if (masked) mask.template apply<Traits>(tSrS, thread, block(n));
                softmax.update(tSrS, rP, tOrO, bounded, masked);
                Tensor tOrP = make_tensor(
                    rP.data(), layout_acc_as_operand_a(rP.layout()));  // (8, MMA_M, N/16)
                dropout.apply(tOrP, block(n));
                Tensor tOsVt = copy_v.get_slice(thread).partition_S(sVt(stage));  // (8, d/16, N/16)
                gemm_smem(mma, NoCopy{}, copy_v, tOrO, tOrP, tOrVt, tOsVt, tOsVt);
            }
            if constexpr (kStages == 2) stage ^= 1;
        }
        cp_async_wait<0>();
    }
};

}  // namespace flash
