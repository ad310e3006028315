// Rung 11: the same kernel in CuTe.
//
// Rung 10's tiles, buffers and instructions, but no index is computed by hand. Layouts map elements
// of a tile to offsets. Tiled copies and the tiled MMA map them to threads. Partitioning the first
// by the second gives every address. The machine code should be as good as rung 10's. The gain is
// that a tile, a data type or an instruction is now a C++ type, which can be exchanged in one
// place.
#pragma once

#include "cute_types.h"

namespace ladder {

template <class CudaElement, int kHeadDim, bool kCausal>
struct Rung11 {
    static constexpr int kTileM = 64;
    static constexpr int kTileN = 64;
    static constexpr int kWarps = 4;
    static constexpr int kThreads = kWarps * kWarp;
    static constexpr int kMinCtas = 2;
    static constexpr int kStages = 2;
    using Types = CuteTypes<CudaElement, kHeadDim, kTileM, kTileN, kWarps>;
    using Element = typename Types::Element;

    struct SharedStorage {
        alignas(128) cute::array<Element, cosize_v<typename Types::SmemKV>> k[kStages];
        alignas(128) cute::array<Element, cosize_v<typename Types::SmemKV>> v[kStages];
    };
    static_assert(kTileM == kTileN, "Q passes through K's second buffer");

    static int64_t ctas(Flash_fwd_params const &params) { return count_tiles(params, kTileM); }

    __device__ static void run(Flash_fwd_params const &params, SharedStorage &storage) {
        TileIndex const tile = this_tile(params, kTileM);
        Head<Element, kCausal> const head(params, tile.batch_head);
        int const thread = threadIdx.x;

        auto const sK = [&](int stage) {
            return make_tensor(make_smem_ptr(storage.k[stage].data()),
                               typename Types::SmemKV{});  // (N, d)
        };
        auto const sV = [&](int stage) {
            return make_tensor(make_smem_ptr(storage.v[stage].data()),
                               typename Types::SmemKV{});  // (N, d)
        };
        auto const sVt = [&](int stage) {
            return make_tensor(make_smem_ptr(storage.v[stage].data()),
                               typename Types::SmemVt{});  // (d, N)
        };
        Tensor sQ =
            make_tensor(make_smem_ptr(storage.k[1].data()), typename Types::SmemQ{});  // (M, d)

        typename Types::TiledMma mma;
        auto const thr_mma = mma.get_slice(thread);
        auto const copy_q = make_tiled_copy_A(typename Types::SmemCopy{}, mma);
        auto const copy_k = make_tiled_copy_B(typename Types::SmemCopy{}, mma);
        auto const copy_v = make_tiled_copy_B(typename Types::SmemCopyTransposed{}, mma);
        Tensor tSrQ = thr_mma.partition_fragment_A(sQ);       // (8, 1, d/16)
        Tensor tSrK = thr_mma.partition_fragment_B(sK(0));    // (4, N/8, d/16)
        Tensor tOrVt = thr_mma.partition_fragment_B(sVt(0));  // (4, d/8, N/16)
        Tensor tOrO =
            partition_fragment_C(mma, Shape<Int<kTileM>, Int<kHeadDim>>{});  // (4, 1, d/8)
        Tensor tScS = thr_mma.partition_C(
            make_identity_tensor(Shape<Int<kTileM>, Int<kTileN>>{}));  // (4, 1, N/8)
        Tensor tOcO = thr_mma.partition_C(
            make_identity_tensor(Shape<Int<kTileM>, Int<kHeadDim>>{}));  // (4, 1, d/8)
        CuteSoftmax<2, false> softmax;
        clear(tOrO);

        auto const load_block = [&](int first_key, int stage) {
            int const rest = head.seqlen_k - first_key;
            Types::load(head.k + first_key * head.k_stride, head.k_stride, sK(stage), rest);
            Types::load(head.v + first_key * head.v_stride, head.v_stride, sV(stage), rest);
            cp_async_fence();
        };
        Types::load(head.q + tile.first_row * head.q_stride, head.q_stride, sQ,
                    head.seqlen_q - tile.first_row);
        load_block(0, 0);
        cp_async_wait<0>();
        __syncthreads();
        auto const thr_copy_q = copy_q.get_slice(thread);
        copy(copy_q, thr_copy_q.partition_S(sQ), thr_copy_q.retile_D(tSrQ));

        int const key_end = head.tile_key_end(tile.first_row, kTileM);
        int stage = 0;
        for (int first_key = 0; first_key < key_end; first_key += kTileN, stage ^= 1) {
            // This block's copies are complete, and every warp has read the buffers that the next
            // copies overwrite.
            cp_async_wait<0>();
            __syncthreads();
            if (first_key + kTileN < key_end) {
                load_block(first_key + kTileN, stage ^ 1);
            }

            Tensor tSrS =
                partition_fragment_C(mma, Shape<Int<kTileM>, Int<kTileN>>{});  // (4, 1, N/8)
            clear(tSrS);
            multiply(mma, copy_k, tSrS, tSrQ, tSrK, sK(stage));
            if (head.key_end(tile.first_row) < first_key + kTileN) {
                mask_scores(tSrS, tScS, head, tile.first_row, first_key);
            }
            softmax.step(tSrS, tOrO, params.scale_softmax_log2);
            Tensor rP = flash::convert_type<Element>(tSrS);  // (4, 1, N/8)
            Tensor tOrP = make_tensor(rP.data(),
                                      flash::layout_acc_as_operand_a(rP.layout()));  // (8, 1, N/16)
            multiply(mma, copy_v, tOrO, tOrP, tOrVt, sVt(stage));
        }
        auto const lse = softmax.finish(tOrO, params.scale_softmax);
        store_tile<Element>(tOrO, tOcO, lse, head, tile.first_row);
    }

    // acc += A B^T; A is in registers, sB (n, k) is loaded to tCrB, one slice along k at a time.
    template <class Mma, class CopyB, class Acc, class FragA, class FragB, class SmemB>
    __device__ static void multiply(Mma const &mma, CopyB const &copy_b, Acc &acc,
                                    FragA const &tCrA, FragB &tCrB, SmemB const &sB) {
        auto const thr_copy = copy_b.get_slice(threadIdx.x);
        Tensor tCsB = thr_copy.partition_S(sB);      // (8, n/16, k/16)
        Tensor tCrB_copy = thr_copy.retile_D(tCrB);  // (8, n/16, k/16)
        CUTE_UNROLL
        for (int k = 0; k < size<2>(tCrA); ++k) {
            copy(copy_b, tCsB(_, _, k), tCrB_copy(_, _, k));
            gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
        }
    }
};

}  // namespace ladder
