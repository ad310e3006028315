// Rung 12: the library's sm80 kernel, reduced to its main loop (mainloop_fwd_sm80.h).
//
// The changes made by tuning, and why each is faster:
// - 32 rows a warp: a B fragment read from shared memory is used for two MMAs. With 16 rows the
//   shared memory port is busier than the tensor cores.
// - One buffer each for K and V, 48 keys: K is copied during softmax and P V, V during Q K^T. Two
//   CTAs of 128 rows fit an SM, so the softmax of one overlaps with the MMAs of the other.
// - Key blocks from right to left: the one or two blocks that need the mask come first, in a
//   separate loop. The main loop has no mask code.
// - Lazy rescaling: O is rescaled only when a maximum has grown by more than 2^8.
// - Longest tiles first under a causal mask.
//   The last tiles to run are then short.
#pragma once

#include "cute_types.h"

namespace ladder {

template <class CudaElement, int kHeadDim, bool kCausal>
struct Rung12 {
    static constexpr int kTileM = 128;
    static constexpr int kTileN = 48;
    static constexpr int kWarps = 4;
    static constexpr int kThreads = kWarps * kWarp;
    static constexpr int kMinCtas = 2;
    using Types = CuteTypes<CudaElement, kHeadDim, kTileM, kTileN, kWarps>;
    using Element = typename Types::Element;

    struct SharedStorage {
        alignas(128) cute::array<Element, cosize_v<typename Types::SmemQ>> q;
        alignas(128) cute::array<Element, cosize_v<typename Types::SmemKV>> k;
        alignas(128) cute::array<Element, cosize_v<typename Types::SmemKV>> v;
    };

    static int64_t ctas(Flash_fwd_params const &params) { return count_tiles(params, kTileM); }

    __device__ static void run(Flash_fwd_params const &params, SharedStorage &storage) {
        TileIndex tile = this_tile(params, kTileM);
        if (kCausal) {
            int const tiles = (params.seqlen_q + kTileM - 1) / kTileM;
            tile.first_row = (tiles - 1) * kTileM - tile.first_row;
        }
        Head<Element, kCausal> const head(params, tile.batch_head);
        int const thread = threadIdx.x;

        Tensor sQ =
            make_tensor(make_smem_ptr(storage.q.data()), typename Types::SmemQ{});  // (M, d)
        Tensor sK =
            make_tensor(make_smem_ptr(storage.k.data()), typename Types::SmemKV{});  // (N, d)
        Tensor sV =
            make_tensor(make_smem_ptr(storage.v.data()), typename Types::SmemKV{});  // (N, d)
        Tensor sVt =
            make_tensor(make_smem_ptr(storage.v.data()), typename Types::SmemVt{});  // (d, N)

        typename Types::TiledMma mma;
        auto const thr_mma = mma.get_slice(thread);
        auto const copy_q = make_tiled_copy_A(typename Types::SmemCopy{}, mma);
        auto const copy_k = make_tiled_copy_B(typename Types::SmemCopy{}, mma);
        auto const copy_v = make_tiled_copy_B(typename Types::SmemCopyTransposed{}, mma);
        Tensor tSrQ = thr_mma.partition_fragment_A(sQ);    // (8, 2, d/16)
        Tensor tSrK = thr_mma.partition_fragment_B(sK);    // (4, N/8, d/16)
        Tensor tOrVt = thr_mma.partition_fragment_B(sVt);  // (4, d/8, N/16)
        Tensor tOrO =
            partition_fragment_C(mma, Shape<Int<kTileM>, Int<kHeadDim>>{});  // (4, 2, d/8)
        Tensor tScS = thr_mma.partition_C(
            make_identity_tensor(Shape<Int<kTileM>, Int<kTileN>>{}));  // (4, 2, N/8)
        Tensor tOcO = thr_mma.partition_C(
            make_identity_tensor(Shape<Int<kTileM>, Int<kHeadDim>>{}));  // (4, 2, d/8)
        CuteSoftmax<4, true> softmax;
        clear(tOrO);

        auto const load_k = [&](int n) {
            Types::load(head.k + n * kTileN * head.k_stride, head.k_stride, sK,
                        head.seqlen_k - n * kTileN);
            cp_async_fence();
        };
        auto const load_v = [&](int n) {
            Types::load(head.v + n * kTileN * head.v_stride, head.v_stride, sV,
                        head.seqlen_k - n * kTileN);
            cp_async_fence();
        };

        // Blocks [0, n_unmasked) are wholly visible to every row of the tile.
        int const n_unmasked = head.key_end(tile.first_row) / kTileN;
        int n = (head.tile_key_end(tile.first_row, kTileM) + kTileN - 1) / kTileN - 1;
        Types::load(head.q + tile.first_row * head.q_stride, head.q_stride, sQ,
                    head.seqlen_q - tile.first_row);
        if (n >= 0) load_k(n);

        auto const step = [&](auto masked) {
            cp_async_wait<0>();  // K, and at first Q, are complete; all warps have read V
            __syncthreads();
            load_v(n);
            Tensor tSrS =
                partition_fragment_C(mma, Shape<Int<kTileM>, Int<kTileN>>{});  // (4, 2, N/8)
            clear(tSrS);
            Tensor tSsQ = copy_q.get_slice(thread).partition_S(sQ);  // (8, 2, d/16)
            Tensor tSsK = copy_k.get_slice(thread).partition_S(sK);  // (8, N/16, d/16)
            flash::gemm_smem(mma, copy_q, copy_k, tSrS, tSrQ, tSrK, tSsQ, tSsK);
            cp_async_wait<0>();  // V is complete; all warps have read K
            __syncthreads();
            if (n > 0) load_k(n - 1);
            if constexpr (masked) {
                mask_scores(tSrS, tScS, head, tile.first_row, n * kTileN);
            }
            softmax.step(tSrS, tOrO, params.scale_softmax_log2);
            Tensor rP = flash::convert_type<Element>(tSrS);  // (4, 2, N/8)
            Tensor tOrP = make_tensor(rP.data(),
                                      flash::layout_acc_as_operand_a(rP.layout()));  // (8, 2, N/16)
            Tensor tOsVt = copy_v.get_slice(thread).partition_S(sVt);  // (8, d/16, N/16)
            flash::gemm_smem(mma, flash::NoCopy{}, copy_v, tOrO, tOrP, tOrVt, tOsVt, tOsVt);
        };
        CUTE_NO_UNROLL
        for (; n >= n_unmasked; --n) step(true_type{});
        CUTE_NO_UNROLL
        for (; n >= 0; --n) step(false_type{});
        cp_async_wait<0>();

        auto const lse = softmax.finish(tOrO, params.scale_softmax);
        store_tile<Element>(tOrO, tOcO, lse, head, tile.first_row);
    }
};

}  // namespace ladder
