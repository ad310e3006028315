// Rung 2: a grid over (row tile, head), and coalesced loads.
//
// A CTA computes 32 query rows and loops over the keys. Row tiles are independent, so the GPU gets
// seqlen_q / 32 times as many CTAs. O and the statistics never leave the SM, and the division by
// the row sum happens once. The 256 threads form an 8 x 32 grid: 32 consecutive lanes along the
// keys, or along the columns in copies, so that a warp's global loads fall into one line. From here
// on inputs and output have 16 bits; this rung computes in fp32.
#pragma once

#include "ladder.h"

namespace ladder {

template <class Element, int kHeadDim, bool kCausal>
struct Rung02 {
    static constexpr int kRows = 32;
    static constexpr int kKeys = 32;
    static constexpr int kThreads = 256;
    static constexpr int kMinCtas = 1;
    static constexpr int kTileM = kRows;
    static constexpr int kWarps = kThreads / kWarp;
    // Padded by one column: otherwise the 32 lanes that read one column of K, each in another row,
    // would access the same bank.
    static constexpr int kPitch = kHeadDim + 1;

    struct SharedStorage {
        float q[kRows][kPitch];
        float k[kKeys][kPitch];
        float v[kKeys][kPitch];
        float o[kRows][kPitch];
        float s[kRows][kKeys + 1];
        float row_max[kRows], row_sum[kRows], factor[kRows];
    };

    static int64_t ctas(Flash_fwd_params const &params) { return count_tiles(params, kTileM); }

    // Copies (rows, d) from global to shared memory; zeros beyond the last row.
    __device__ static void load(float (*tile)[kPitch], Element const *gmem, int64_t stride,
                                int rows) {
        for (int i = threadIdx.x; i < kRows * kHeadDim; i += kThreads) {
            int const row = i / kHeadDim;
            int const col = i % kHeadDim;
            tile[row][col] = row < rows ? to_float(gmem[row * stride + col]) : 0.f;
        }
    }

    __device__ static void run(Flash_fwd_params const &params, SharedStorage &storage) {
        TileIndex const tile = this_tile(params, kTileM);
        Head<Element, kCausal> const head(params, tile.batch_head);
        int const lane = threadIdx.x % kWarp;
        int const warp = threadIdx.x / kWarp;

        load(storage.q, head.q + tile.first_row * head.q_stride, head.q_stride,
             head.seqlen_q - tile.first_row);
        for (int row = warp; row < kRows; row += kWarps) {
            for (int x = lane; x < kHeadDim; x += kWarp) {
                storage.o[row][x] = 0.f;
            }
        }
        if (threadIdx.x < kRows) {
            storage.row_max[threadIdx.x] = -INFINITY;
            storage.row_sum[threadIdx.x] = 0.f;
        }
        __syncthreads();
        int const key_end = head.tile_key_end(tile.first_row, kRows);
        for (int first_key = 0; first_key < key_end; first_key += kKeys) {
            load(storage.k, head.k + first_key * head.k_stride, head.k_stride,
                 head.seqlen_k - first_key);
            load(storage.v, head.v + first_key * head.v_stride, head.v_stride,
                 head.seqlen_k - first_key);
            __syncthreads();
            for (int row = warp; row < kRows; row += kWarps) {  // S = Q K^T, a lane per key
                float score = 0.f;
                for (int x = 0; x < kHeadDim; ++x) {
                    score += storage.q[row][x] * storage.k[lane][x];
                }
                bool const visible = first_key + lane < head.key_end(tile.first_row + row);
                storage.s[row][lane] = visible ? score * params.scale_softmax : -INFINITY;
            }
            __syncthreads();
            if (threadIdx.x < kRows) {  // the softmax, a thread per row
                softmax(storage, threadIdx.x);
            }
            __syncthreads();
            for (int row = warp; row < kRows; row += kWarps) {  // O += P V, a lane per column
                for (int x = lane; x < kHeadDim; x += kWarp) {
                    float out = storage.o[row][x] * storage.factor[row];
                    for (int j = 0; j < kKeys; ++j) {
                        out += storage.s[row][j] * storage.v[j][x];
                    }
                    storage.o[row][x] = out;
                }
            }
            __syncthreads();
        }

        for (int row = warp; row < kRows && tile.first_row + row < head.seqlen_q; row += kWarps) {
            float const sum = storage.row_sum[row];
            float const inverse = sum > 0.f ? 1.f / sum : 0.f;  // a row without keys: 0 and -inf
            Element *const out = head.o + (tile.first_row + row) * head.o_stride;
            for (int x = lane; x < kHeadDim; x += kWarp) {
                out[x] = from_float<Element>(storage.o[row][x] * inverse);
            }
            if (lane == 0) {
                head.lse[tile.first_row + row] = storage.row_max[row] + logf(sum);
            }
        }
    }

    // Turns row `row` of the scores into probabilities relative to the running maximum, and writes
    // the factor that rescales O and the sum to it to `factor`.
    __device__ static void softmax(SharedStorage &storage, int row) {
        float *const s = storage.s[row];  // (kKeys)
        float const old_max = storage.row_max[row];
        float new_max = old_max;
        for (int j = 0; j < kKeys; ++j) {
            new_max = fmaxf(new_max, s[j]);
        }
        // A row without keys so far has maximum -inf; 0 instead avoids (-inf) - (-inf).
        float const base = new_max == -INFINITY ? 0.f : new_max;
        float sum = storage.row_sum[row] * expf(old_max - base);
        for (int j = 0; j < kKeys; ++j) {
            s[j] = expf(s[j] - base);
            sum += s[j];
        }
        storage.factor[row] = expf(old_max - base);
        storage.row_max[row] = new_max;
        storage.row_sum[row] = sum;
    }
};

}  // namespace ladder
