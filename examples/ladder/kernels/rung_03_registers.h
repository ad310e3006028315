// Rung 3: online softmax in registers.
//
// A warp computes 8 query rows, a lane one key of the block: a thread's 8 scores stay in registers,
// the maximum is taken by shuffles, and O, with a lane per column, and the statistics are in
// registers, too. S, P and O no longer pass through shared memory, which saves two of four
// barriers. All threads do the softmax instead of one in eight. Each value of K or V read from
// shared memory is used for 8 rows. Exponentials are in base 2, as in hardware:
// e^(x scale) = 2^(x scale log2 e).
#pragma once

#include "ladder.h"

namespace ladder {

template <class Element, int kHeadDim, bool kCausal>
struct Rung03 {
    static constexpr int kKeys = kWarp;
    static constexpr int kRowsPerWarp = 8;
    static constexpr int kWarps = 8;
    static constexpr int kThreads = kWarps * kWarp;
    static constexpr int kMinCtas = 2;
    static constexpr int kTileM = kWarps * kRowsPerWarp;
    static constexpr int kCols = kHeadDim / kWarp;  // of O, per lane
    static constexpr int kPitch = kHeadDim + 4;     // 4: rows stay aligned for 16-byte reads

    struct SharedStorage {
        float q[kTileM][kHeadDim];
        float k[kKeys][kPitch];
        float v[kKeys][kHeadDim];
    };

    static int64_t ctas(Flash_fwd_params const &params) { return count_tiles(params, kTileM); }

    // Copies (kRows, d) from global to shared memory; zeros beyond the last row.
    template <int kRows, int kTilePitch>
    __device__ static void load(float (&tile)[kRows][kTilePitch], Element const *gmem,
                                int64_t stride, int rows) {
#pragma unroll 4
        for (int i = threadIdx.x; i < kRows * kHeadDim; i += kThreads) {
            int const row = i / kHeadDim;
            int const col = i % kHeadDim;
            tile[row][col] = row < rows ? to_float(gmem[row * stride + col]) : 0.f;
        }
    }

    template <class Op>
    __device__ static float warp_reduce(float x, Op op) {
        for (int distance = kWarp / 2; distance > 0; distance /= 2) {
            x = op(x, __shfl_xor_sync(kAllLanes, x, distance));
        }
        return x;
    }

    __device__ static void run(Flash_fwd_params const &params, SharedStorage &storage) {
        TileIndex const tile = this_tile(params, kTileM);
        Head<Element, kCausal> const head(params, tile.batch_head);
        int const lane = threadIdx.x % kWarp;
        int const warp_row = threadIdx.x / kWarp * kRowsPerWarp;  // within the tile
        int const first_row = tile.first_row + warp_row;

        float o[kRowsPerWarp][kCols] = {};  // rows of the warp, columns lane + 32 c
        float row_max[kRowsPerWarp];        // of the raw scores, the same in all lanes
        float row_sum[kRowsPerWarp] = {};   // of this lane's keys
        for (float &max : row_max) {
            max = -INFINITY;
        }
        load(storage.q, head.q + tile.first_row * head.q_stride, head.q_stride,
             head.seqlen_q - tile.first_row);

        int const key_end = head.tile_key_end(tile.first_row, kTileM);
        for (int first_key = 0; first_key < key_end; first_key += kKeys) {
            load(storage.k, head.k + first_key * head.k_stride, head.k_stride,
                 head.seqlen_k - first_key);
            load(storage.v, head.v + first_key * head.v_stride, head.v_stride,
                 head.seqlen_k - first_key);
            __syncthreads();

            float s[kRowsPerWarp] = {};  // scores, then probabilities, of this lane's key
#pragma unroll 1
            for (int x = 0; x < kHeadDim; x += 4) {
                float4 const k = *reinterpret_cast<float4 const *>(&storage.k[lane][x]);
#pragma unroll
                for (int i = 0; i < kRowsPerWarp; ++i) {
                    float4 const q = *reinterpret_cast<float4 const *>(&storage.q[warp_row + i][x]);
                    s[i] += q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w;
                }
            }
#pragma unroll
            for (int i = 0; i < kRowsPerWarp; ++i) {
                s[i] = first_key + lane < head.key_end(first_row + i) ? s[i] : -INFINITY;
                float const block_max =
                    warp_reduce(s[i], [](float a, float b) { return fmaxf(a, b); });
                float const new_max = fmaxf(row_max[i], block_max);
                float const base = new_max == -INFINITY ? 0.f : new_max * params.scale_softmax_log2;
                float const factor = exp2f(row_max[i] * params.scale_softmax_log2 - base);
                s[i] = exp2f(s[i] * params.scale_softmax_log2 - base);
                row_max[i] = new_max;
                row_sum[i] = row_sum[i] * factor + s[i];
                for (int c = 0; c < kCols; ++c) {
                    o[i][c] *= factor;
                }
            }
#pragma unroll 1
            for (int j = 0; j < kKeys; ++j) {
                float v[kCols];
#pragma unroll
                for (int c = 0; c < kCols; ++c) {
                    v[c] = storage.v[j][lane + c * kWarp];
                }
#pragma unroll
                for (int i = 0; i < kRowsPerWarp; ++i) {
                    float const p = __shfl_sync(kAllLanes, s[i], j);
#pragma unroll
                    for (int c = 0; c < kCols; ++c) {
                        o[i][c] += p * v[c];
                    }
                }
            }
            __syncthreads();
        }

#pragma unroll
        for (int i = 0; i < kRowsPerWarp; ++i) {
            float const sum = warp_reduce(row_sum[i], [](float a, float b) { return a + b; });
            float const inverse = sum > 0.f ? 1.f / sum : 0.f;  // a row without keys: 0 and -inf
            int const row = first_row + i;
            if (row < head.seqlen_q) {
                for (int c = 0; c < kCols; ++c) {
                    head.o[row * head.o_stride + lane + c * kWarp] =
                        from_float<Element>(o[i][c] * inverse);
                }
                if (lane == 0) {
                    head.lse[row] = row_max[i] * params.scale_softmax + logf(sum);
                }
            }
        }
    }
};

}  // namespace ladder
