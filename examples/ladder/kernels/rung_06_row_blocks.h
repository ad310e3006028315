// Rung 6: each warp keeps 16 whole rows.
//
// The work is divided by rows throughout: a warp computes S, softmax and O of its own 16 rows
// against all 64 keys. Warps synchronise only where K and V are overwritten. O stays in accumulator
// fragments for the whole loop. To rescale a fragment whose layout is unknown, the factors are
// loaded as a fragment, too: from a 16 x 16 matrix whose row i holds factor[i] in all columns, so
// that it has factor[i] wherever O's fragment has row i.
#pragma once

#include "wmma_rows.h"

namespace ladder {

template <class Element, int kHeadDim, bool kCausal>
struct Rung06 {
    static constexpr int kKeys = 64;
    static constexpr int kWarps = 4;
    static constexpr int kThreads = kWarps * kWarp;
    static constexpr int kMinCtas = 2;
    static constexpr int kTileM = kWarps * kFrag;
    static constexpr int kFragments = kHeadDim / kFrag;  // of O, side by side

    struct Strip {  // a warp's rows
        float s[kFrag][kKeys];
        Element p[kFrag][kKeys];
        float factor[kFrag][kFrag];
    };
    union SharedStorage {
        struct {
            Element q[kTileM][kHeadDim];
            Element k[kKeys][kHeadDim];
            Element v[kKeys][kHeadDim];
            Strip strip[kWarps];
        };
        float o[kTileM][kHeadDim];  // at the end
    };

    static int64_t ctas(Flash_fwd_params const &params) { return count_tiles(params, kTileM); }

    __device__ static void run(Flash_fwd_params const &params, SharedStorage &storage) {
        TileIndex const tile = this_tile(params, kTileM);
        Head<Element, kCausal> const head(params, tile.batch_head);
        int const warp_row = threadIdx.x / kWarp * kFrag;  // within the tile
        Strip &strip = storage.strip[threadIdx.x / kWarp];
        StripSoftmax<kKeys> softmax;
        Accumulator o[kFragments];
        for (Accumulator &fragment : o) {
            wmma::fill_fragment(fragment, 0.f);
        }

        load_tile<kTileM, kHeadDim, kThreads>(storage.q[0], head.q + tile.first_row * head.q_stride,
                                              head.q_stride, head.seqlen_q - tile.first_row);
        int const key_end = head.tile_key_end(tile.first_row, kTileM);
        for (int first_key = 0; first_key < key_end; first_key += kKeys) {
            int const rest = head.seqlen_k - first_key;
            load_tile<kKeys, kHeadDim, kThreads>(storage.k[0], head.k + first_key * head.k_stride,
                                                 head.k_stride, rest);
            load_tile<kKeys, kHeadDim, kThreads>(storage.v[0], head.v + first_key * head.v_stride,
                                                 head.v_stride, rest);
            __syncthreads();
            multiply_qk(storage.q[warp_row], storage.k[0], strip);
            __syncwarp();
            turn_into_probabilities(head, tile.first_row + warp_row, first_key, strip, softmax,
                                    params.scale_softmax_log2);
            __syncwarp();
            multiply_pv(strip, storage.v[0], o);
            __syncthreads();
        }

        __syncthreads();  // every warp has read the bytes that O overwrites
        for (int x = 0; x < kFragments; ++x) {
            wmma::store_matrix_sync(&storage.o[warp_row][x * kFrag], o[x], kHeadDim,
                                    wmma::mem_row_major);
        }
        __syncwarp();
        for (int i = 0; i < kFrag; ++i) {
            softmax.template store_row<kHeadDim>(i, head, tile.first_row + warp_row + i,
                                                 storage.o[warp_row + i], params.scale_softmax);
        }
    }

    // S = Q K^T of the warp's rows: (16, kKeys)
    __device__ static void multiply_qk(Element const *q, Element const *k, Strip &strip) {
        Accumulator s[kKeys / kFrag];
        for (Accumulator &fragment : s) {
            wmma::fill_fragment(fragment, 0.f);
        }
#pragma unroll
        for (int x = 0; x < kHeadDim; x += kFrag) {
            FragmentA<Element> fragment_q;
            wmma::load_matrix_sync(fragment_q, q + x, kHeadDim);
#pragma unroll
            for (int j = 0; j < kKeys / kFrag; ++j) {
                FragmentK<Element> fragment_k;
                wmma::load_matrix_sync(fragment_k, k + j * kFrag * kHeadDim + x, kHeadDim);
                wmma::mma_sync(s[j], fragment_q, fragment_k, s[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < kKeys / kFrag; ++j) {
            wmma::store_matrix_sync(&strip.s[0][j * kFrag], s[j], kKeys, wmma::mem_row_major);
        }
    }

    // The strip's scores become probabilities and the factors of the rows.
    __device__ static void turn_into_probabilities(Head<Element, kCausal> const &head,
                                                   int first_row, int first_key, Strip &strip,
                                                   StripSoftmax<kKeys> &softmax, float scale_log2) {
        constexpr int kPerLane = kKeys / kWarp;
        int const lane = threadIdx.x % kWarp;
#pragma unroll 4
        for (int i = 0; i < kFrag; ++i) {
            int const visible = head.key_end(first_row + i) - first_key;
            float s[kPerLane];
            for (int c = 0; c < kPerLane; ++c) {
                int const key = lane + c * kWarp;
                s[c] = key < visible ? strip.s[i][key] : -INFINITY;
            }
            float const factor = softmax.step(i, s, scale_log2);
            for (int c = 0; c < kPerLane; ++c) {
                strip.p[i][lane + c * kWarp] = from_float<Element>(s[c]);
            }
            if (lane < kFrag) {
                strip.factor[i][lane] = factor;
            }
        }
    }

    // O = factor O + P V of the warp's rows: (16, d)
    __device__ static void multiply_pv(Strip const &strip, Element const *v,
                                       Accumulator (&o)[kFragments]) {
        Accumulator factor;
        wmma::load_matrix_sync(factor, &strip.factor[0][0], kFrag, wmma::mem_row_major);
        for (Accumulator &fragment : o) {
            for (int i = 0; i < fragment.num_elements; ++i) {
                fragment.x[i] *= factor.x[i];
            }
        }
#pragma unroll
        for (int j = 0; j < kKeys; j += kFrag) {
            FragmentA<Element> p;
            wmma::load_matrix_sync(p, &strip.p[0][j], kKeys);
#pragma unroll
            for (int x = 0; x < kFragments; ++x) {
                FragmentV<Element> fragment_v;
                wmma::load_matrix_sync(fragment_v, v + j * kHeadDim + x * kFrag, kHeadDim);
                wmma::mma_sync(o[x], p, fragment_v, o[x]);
            }
        }
    }
};

}  // namespace ladder
