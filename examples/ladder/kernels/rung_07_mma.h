// Rung 7: mma.sync and ldmatrix in place of WMMA.
//
// The same tiles and the same division by rows as rung 6, but S, P and O stay in registers from the
// first key to the last (the reason is in mma_rows.h). A strip of 16 x 64 scores no longer passes
// through shared memory twice.
#pragma once

#include "mma_rows.h"

namespace ladder {

// Layout: of Q, K and V in shared memory; rung 8 is this rung with another layout.
template <class Element, int kHeadDim, bool kCausal, class Layout = RowMajor>
struct Rung07 {
    static constexpr int kKeys = 64;
    static constexpr int kWarps = 4;
    static constexpr int kThreads = kWarps * kWarp;
    static constexpr int kMinCtas = 2;
    static constexpr int kTileM = kWarps * 16;
    using Rows = MmaRows<Element, kHeadDim, kKeys, Layout>;

    struct SharedStorage {
        Element q[kTileM * kHeadDim];
        Element k[kKeys * kHeadDim];
        Element v[kKeys * kHeadDim];
    };

    static int64_t ctas(Flash_fwd_params const &params) { return count_tiles(params, kTileM); }

    __device__ static void run(Flash_fwd_params const &params, SharedStorage &storage) {
        TileIndex const tile = this_tile(params, kTileM);
        Head<Element, kCausal> const head(params, tile.batch_head);
        int const warp_row = threadIdx.x / kWarp * 16;  // within the tile
        int const first_row = tile.first_row + warp_row;
        Rows rows;

        load_tile<kTileM, kHeadDim, kThreads, Layout>(
            storage.q, head.q + tile.first_row * head.q_stride, head.q_stride,
            head.seqlen_q - tile.first_row);
        int const key_end = head.tile_key_end(tile.first_row, kTileM);
        for (int first_key = 0; first_key < key_end; first_key += kKeys) {
            int const rest = head.seqlen_k - first_key;
            load_tile<kKeys, kHeadDim, kThreads, Layout>(
                storage.k, head.k + first_key * head.k_stride, head.k_stride, rest);
            load_tile<kKeys, kHeadDim, kThreads, Layout>(
                storage.v, head.v + first_key * head.v_stride, head.v_stride, rest);
            __syncthreads();

            rows.clear_scores();
#pragma unroll
            for (int x = 0; x < kHeadDim / 16; ++x) {
                uint32_t q[4];
                Rows::load_q(q, storage.q, warp_row, x);
                rows.add_scores(q, storage.k, x);
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
