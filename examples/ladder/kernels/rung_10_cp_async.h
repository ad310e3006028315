// Rung 10: cp.async and two buffers.
//
// Up to rung 9 the whole CTA waits for memory at every block of keys. cp.async writes to shared
// memory without registers and without blocking the thread: the next block's K and V are copied to
// a second pair of buffers while this block is computed.
#pragma once

#include "mma_rows.h"
#include "rung_08_swizzle.h"

namespace ladder {

template <class Element, int kHeadDim, bool kCausal>
struct Rung10 {
    static constexpr int kKeys = 64;
    static constexpr int kWarps = 4;
    static constexpr int kThreads = kWarps * kWarp;
    static constexpr int kMinCtas = 2;
    static constexpr int kTileM = kWarps * 16;
    static constexpr int kStages = 2;
    using Rows = MmaRows<Element, kHeadDim, kKeys, Swizzled>;

    struct SharedStorage {
        Element k[kStages][kKeys * kHeadDim];
        Element v[kStages][kKeys * kHeadDim];
    };
    static_assert(kTileM == kKeys, "Q passes through K's second buffer");

    static int64_t ctas(Flash_fwd_params const &params) { return count_tiles(params, kTileM); }

    // Copies (kKeys, d) from global to shared memory; complete when cp_async_wait_all() returns.
    // Zeros from row `rows` on.
    __device__ static void load_async(Element *smem, Element const *gmem, int64_t stride,
                                      int rows) {
        constexpr int kPieces = kHeadDim / kVec;  // per row
#pragma unroll
        for (int i = 0; i < kKeys * kPieces / kThreads; ++i) {
            int const piece = i * kThreads + threadIdx.x;
            int const row = piece / kPieces;
            int const col = piece % kPieces * kVec;
            cp_async(smem + Swizzled::offset<kHeadDim>(row, col), gmem + row * stride + col,
                     row < rows);
        }
    }

    __device__ static void run(Flash_fwd_params const &params, SharedStorage &storage) {
        TileIndex const tile = this_tile(params, kTileM);
        Head<Element, kCausal> const head(params, tile.batch_head);
        int const warp_row = threadIdx.x / kWarp * 16;  // within the tile
        int const first_row = tile.first_row + warp_row;
        Rows rows;

        auto const load_block = [&](int first_key, int stage) {
            int const rest = head.seqlen_k - first_key;
            load_async(storage.k[stage], head.k + first_key * head.k_stride, head.k_stride, rest);
            load_async(storage.v[stage], head.v + first_key * head.v_stride, head.v_stride, rest);
        };
        load_async(storage.k[1], head.q + tile.first_row * head.q_stride, head.q_stride,
                   head.seqlen_q - tile.first_row);
        load_block(0, 0);
        cp_async_wait_all();
        __syncthreads();
        uint32_t q[kHeadDim / 16][4];
#pragma unroll
        for (int x = 0; x < kHeadDim / 16; ++x) {
            Rows::load_q(q[x], storage.k[1], warp_row, x);
        }

        int const key_end = head.tile_key_end(tile.first_row, kTileM);
        int stage = 0;
        for (int first_key = 0; first_key < key_end; first_key += kKeys, stage ^= 1) {
            // This block's copies are complete, and every warp has read the buffers that the next
            // copies overwrite.
            cp_async_wait_all();
            __syncthreads();
            if (first_key + kKeys < key_end) {
                load_block(first_key + kKeys, stage ^ 1);
            }
            rows.clear_scores();
#pragma unroll
            for (int x = 0; x < kHeadDim / 16; ++x) {
                rows.add_scores(q[x], storage.k[stage], x);
            }
            rows.mask_block(head, first_row, first_key);
            rows.softmax(params.scale_softmax_log2);
            rows.accumulate(storage.v[stage]);
        }
        rows.store(head, first_row, params.scale_softmax);
    }
};

}  // namespace ladder
