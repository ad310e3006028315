// Rung 4: the two products on tensor cores, one warp at a time (CUDA C++ Programming Guide, "Warp
// Matrix Functions").
//
// A CTA is one warp with a tile of 16 rows. S = Q K^T and O += P V are 16 x 16 x 16 WMMAs, each 128
// FMAs per lane in place of 128 instructions. S, P and O pass through shared memory between them:
// WMMA does not define which elements a fragment holds.
#pragma once

#include "wmma_rows.h"

namespace ladder {

template <class Element, int kHeadDim, bool kCausal>
struct Rung04 {
    static constexpr int kKeys = 32;
    static constexpr int kThreads = kWarp;
    static constexpr int kMinCtas = 1;
    static constexpr int kTileM = kFrag;

    struct SharedStorage {
        Element q[kFrag][kHeadDim];
        Element k[kKeys][kHeadDim];
        Element v[kKeys][kHeadDim];
        Element p[kFrag][kKeys];
        float s[kFrag][kKeys];
        float o[kFrag][kHeadDim];
    };

    static int64_t ctas(Flash_fwd_params const &params) { return count_tiles(params, kTileM); }

    __device__ static void run(Flash_fwd_params const &params, SharedStorage &storage) {
        TileIndex const tile = this_tile(params, kTileM);
        Head<Element, kCausal> const head(params, tile.batch_head);
        int const lane = threadIdx.x;
        StripSoftmax<kKeys> softmax;

        load_tile<kFrag, kHeadDim, kThreads>(storage.q[0], head.q + tile.first_row * head.q_stride,
                                             head.q_stride, head.seqlen_q - tile.first_row);
        for (int i = 0; i < kFrag; ++i) {
            for (int x = lane; x < kHeadDim; x += kWarp) {
                storage.o[i][x] = 0.f;
            }
        }
        int const key_end = head.tile_key_end(tile.first_row, kFrag);
        for (int first_key = 0; first_key < key_end; first_key += kKeys) {
            int const rest = head.seqlen_k - first_key;
            load_tile<kKeys, kHeadDim, kThreads>(storage.k[0], head.k + first_key * head.k_stride,
                                                 head.k_stride, rest);
            load_tile<kKeys, kHeadDim, kThreads>(storage.v[0], head.v + first_key * head.v_stride,
                                                 head.v_stride, rest);
            __syncwarp();
            multiply_qk(storage);
            __syncwarp();
#pragma unroll 4
            for (int i = 0; i < kFrag; ++i) {
                int const visible = head.key_end(tile.first_row + i) - first_key;
                float s[1] = {lane < visible ? storage.s[i][lane] : -INFINITY};
                float const factor = softmax.step(i, s, params.scale_softmax_log2);
                storage.p[i][lane] = from_float<Element>(s[0]);
                for (int x = lane; x < kHeadDim; x += kWarp) {
                    storage.o[i][x] *= factor;
                }
            }
            __syncwarp();
            multiply_pv(storage);
            __syncwarp();
        }
        for (int i = 0; i < kFrag; ++i) {
            softmax.template store_row<kHeadDim>(i, head, tile.first_row + i, storage.o[i],
                                                 params.scale_softmax);
        }
    }

    // S = Q K^T: (16, kKeys)
    __device__ static void multiply_qk(SharedStorage &storage) {
        FragmentA<Element> q;
        FragmentK<Element> k;
#pragma unroll
        for (int j = 0; j < kKeys; j += kFrag) {
            Accumulator s;
            wmma::fill_fragment(s, 0.f);
#pragma unroll
            for (int x = 0; x < kHeadDim; x += kFrag) {
                wmma::load_matrix_sync(q, &storage.q[0][x], kHeadDim);
                wmma::load_matrix_sync(k, &storage.k[j][x], kHeadDim);
                wmma::mma_sync(s, q, k, s);
            }
            wmma::store_matrix_sync(&storage.s[0][j], s, kKeys, wmma::mem_row_major);
        }
    }

    // O += P V: (16, d)
    __device__ static void multiply_pv(SharedStorage &storage) {
        FragmentA<Element> p;
        FragmentV<Element> v;
#pragma unroll
        for (int x = 0; x < kHeadDim; x += kFrag) {
            Accumulator o;
            wmma::load_matrix_sync(o, &storage.o[0][x], kHeadDim, wmma::mem_row_major);
#pragma unroll
            for (int j = 0; j < kKeys; j += kFrag) {
                wmma::load_matrix_sync(p, &storage.p[0][j], kKeys);
                wmma::load_matrix_sync(v, &storage.v[j][x], kHeadDim);
                wmma::mma_sync(o, p, v, o);
            }
            wmma::store_matrix_sync(&storage.o[0][x], o, kHeadDim, wmma::mem_row_major);
        }
    }
};

}  // namespace ladder
