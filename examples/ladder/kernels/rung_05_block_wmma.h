// Rung 5: four warps share the tiles.
//
// A CTA computes 64 rows with 64 keys at a time, so each K and V that it loads is used for four
// times as many rows. The warps divide a product by columns: each computes 16 keys of S and d / 4
// columns of O, and loads a B fragment once for all four 16-row fragments of A. For the softmax
// they divide the tile by rows, so a barrier is needed between the phases.
#pragma once

#include "wmma_rows.h"

namespace ladder {

template <class Element, int kHeadDim, bool kCausal>
struct Rung05 {
    static constexpr int kKeys = 64;
    static constexpr int kWarps = 4;
    static constexpr int kThreads = kWarps * kWarp;
    static constexpr int kMinCtas = 2;
    static constexpr int kTileM = kWarps * kFrag;

    struct SharedStorage {
        Element q[kTileM][kHeadDim];
        Element k[kKeys][kHeadDim];
        Element v[kKeys][kHeadDim];
        Element p[kTileM][kKeys];
        float s[kTileM][kKeys];
        float o[kTileM][kHeadDim];
    };

    static int64_t ctas(Flash_fwd_params const &params) { return count_tiles(params, kTileM); }

    __device__ static void run(Flash_fwd_params const &params, SharedStorage &storage) {
        TileIndex const tile = this_tile(params, kTileM);
        Head<Element, kCausal> const head(params, tile.batch_head);
        int const lane = threadIdx.x % kWarp;
        int const warp = threadIdx.x / kWarp;
        int const warp_row = warp * kFrag;  // of the softmax
        StripSoftmax<kKeys> softmax;

        load_tile<kTileM, kHeadDim, kThreads>(storage.q[0], head.q + tile.first_row * head.q_stride,
                                              head.q_stride, head.seqlen_q - tile.first_row);
        for (int i = warp_row; i < warp_row + kFrag; ++i) {
            for (int x = lane; x < kHeadDim; x += kWarp) {
                storage.o[i][x] = 0.f;
            }
        }
        int const key_end = head.tile_key_end(tile.first_row, kTileM);
        for (int first_key = 0; first_key < key_end; first_key += kKeys) {
            int const rest = head.seqlen_k - first_key;
            load_tile<kKeys, kHeadDim, kThreads>(storage.k[0], head.k + first_key * head.k_stride,
                                                 head.k_stride, rest);
            load_tile<kKeys, kHeadDim, kThreads>(storage.v[0], head.v + first_key * head.v_stride,
                                                 head.v_stride, rest);
            __syncthreads();
            multiply_qk(storage, warp);
            __syncthreads();
#pragma unroll 4
            for (int i = 0; i < kFrag; ++i) {
                int const row = warp_row + i;
                int const visible = head.key_end(tile.first_row + row) - first_key;
                float s[kKeys / kWarp];
                for (int c = 0; c < kKeys / kWarp; ++c) {
                    int const key = lane + c * kWarp;
                    s[c] = key < visible ? storage.s[row][key] : -INFINITY;
                }
                float const factor = softmax.step(i, s, params.scale_softmax_log2);
                for (int c = 0; c < kKeys / kWarp; ++c) {
                    storage.p[row][lane + c * kWarp] = from_float<Element>(s[c]);
                }
                for (int x = lane; x < kHeadDim; x += kWarp) {
                    storage.o[row][x] *= factor;
                }
            }
            __syncthreads();
            multiply_pv(storage, warp);
            __syncthreads();
        }
        for (int i = 0; i < kFrag; ++i) {
            softmax.template store_row<kHeadDim>(i, head, tile.first_row + warp_row + i,
                                                 storage.o[warp_row + i], params.scale_softmax);
        }
    }

    // S = Q K^T, this warp's 16 keys: (kTileM, 16)
    __device__ static void multiply_qk(SharedStorage &storage, int warp) {
        int const first_key = warp * kFrag;
        Accumulator s[kWarps];
        for (Accumulator &fragment : s) {
            wmma::fill_fragment(fragment, 0.f);
        }
#pragma unroll
        for (int x = 0; x < kHeadDim; x += kFrag) {
            FragmentK<Element> k;
            wmma::load_matrix_sync(k, &storage.k[first_key][x], kHeadDim);
#pragma unroll
            for (int m = 0; m < kWarps; ++m) {
                FragmentA<Element> q;
                wmma::load_matrix_sync(q, &storage.q[m * kFrag][x], kHeadDim);
                wmma::mma_sync(s[m], q, k, s[m]);
            }
        }
#pragma unroll
        for (int m = 0; m < kWarps; ++m) {
            wmma::store_matrix_sync(&storage.s[m * kFrag][first_key], s[m], kKeys,
                                    wmma::mem_row_major);
        }
    }

    // O += P V, this warp's columns: (kTileM, d / 4)
    __device__ static void multiply_pv(SharedStorage &storage, int warp) {
        int const first_col = warp * (kHeadDim / kWarps);
#pragma unroll
        for (int x = first_col; x < first_col + kHeadDim / kWarps; x += kFrag) {
            Accumulator o[kWarps];
#pragma unroll
            for (int m = 0; m < kWarps; ++m) {
                wmma::load_matrix_sync(o[m], &storage.o[m * kFrag][x], kHeadDim,
                                       wmma::mem_row_major);
            }
#pragma unroll
            for (int j = 0; j < kKeys; j += kFrag) {
                FragmentV<Element> v;
                wmma::load_matrix_sync(v, &storage.v[j][x], kHeadDim);
#pragma unroll
                for (int m = 0; m < kWarps; ++m) {
                    FragmentA<Element> p;
                    wmma::load_matrix_sync(p, &storage.p[m * kFrag][j], kKeys);
                    wmma::mma_sync(o[m], p, v, o[m]);
                }
            }
#pragma unroll
            for (int m = 0; m < kWarps; ++m) {
                wmma::store_matrix_sync(&storage.o[m * kFrag][x], o[m], kHeadDim,
                                        wmma::mem_row_major);
            }
        }
    }
};

}  // namespace ladder
