// Rung 9: Q in registers.
//
// Since rung 2 the loop of a CTA is over the keys, FlashAttention-2's order (arXiv 2307.08691), and
// Q does not change in it. So each warp loads the fragments of its 16 rows once, 32 registers at
// d = 128, instead of once per block of keys. Q's shared memory is then used for K.
#pragma once

#include "mma_rows.h"
#include "rung_08_swizzle.h"

namespace ladder {

template <class Element, int kHeadDim, bool kCausal>
struct Rung09 {
    static constexpr int kKeys = 64;
    static constexpr int kWarps = 4;
    static constexpr int kThreads = kWarps * kWarp;
    static constexpr int kMinCtas = 2;
    static constexpr int kTileM = kWarps * 16;
    using Rows = MmaRows<Element, kHeadDim, kKeys, Swizzled>;

    struct SharedStorage {
        Element q_then_k[kKeys * kHeadDim];
        Element v[kKeys * kHeadDim];
    };
    static_assert(kTileM == kKeys);

    static int64_t ctas(Flash_fwd_params const &params) { return count_tiles(params, kTileM); }

    __device__ static void run(Flash_fwd_params const &params, SharedStorage &storage) {
        TileIndex const tile = this_tile(params, kTileM);
        Head<Element, kCausal> const head(params, tile.batch_head);
        int const warp_row = threadIdx.x / kWarp * 16;  // within the tile
        int const first_row = tile.first_row + warp_row;
        Rows rows;

        load_tile<kTileM, kHeadDim, kThreads, Swizzled>(
            storage.q_then_k, head.q + tile.first_row * head.q_stride, head.q_stride,
            head.seqlen_q - tile.first_row);
        __syncthreads();
        uint32_t q[kHeadDim / 16][4];
#pragma unroll
        for (int x = 0; x < kHeadDim / 16; ++x) {
            Rows::load_q(q[x], storage.q_then_k, warp_row, x);
        }
        __syncthreads();

        int const key_end = head.tile_key_end(tile.first_row, kTileM);
        for (int first_key = 0; first_key < key_end; first_key += kKeys) {
            int const rest = head.seqlen_k - first_key;
            load_tile<kKeys, kHeadDim, kThreads, Swizzled>(
                storage.q_then_k, head.k + first_key * head.k_stride, head.k_stride, rest);
            load_tile<kKeys, kHeadDim, kThreads, Swizzled>(
                storage.v, head.v + first_key * head.v_stride, head.v_stride, rest);
            __syncthreads();

            rows.clear_scores();
#pragma unroll
            for (int x = 0; x < kHeadDim / 16; ++x) {
                rows.add_scores(q[x], storage.q_then_k, x);
            }
            rows.mask_block(head, first_row, first_key);
            rows.softmax(params.scale_softmax_log2);
            rows.accumulate(storage.v);
            __syncthreads();
        }
        rows.store(head, first_row, params.scale_softmax);
    }
};

}  // namespace ladder
