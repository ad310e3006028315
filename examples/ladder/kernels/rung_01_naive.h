// Rung 1: FlashAttention-1's loop order (arXiv 2205.14135, algorithm 1), as first written down.
//
// One warp per (batch, head). The outer loop loads a block of keys and values to shared memory. The
// inner loop is over all blocks of queries; thread t computes query row t of the block. The running
// results of a row are in global memory, read and written once for every block of keys: O,
// normalised, and the log-sum-exp L of the scores so far, from which both of algorithm 1's
// statistics follow (diag(l) e^m = e^L). Inputs and output are fp32: O in 16 bits would be rounded
// in each of these steps.
#pragma once

#include "ladder.h"

namespace ladder {

template <class Element, int kHeadDim, bool kCausal>
struct Rung01 {
    static constexpr int kRows = 32;  // B_r
    static constexpr int kKeys = 32;  // B_c
    static constexpr int kThreads = kRows;
    static constexpr int kMinCtas = 1;
    static constexpr int kTileM = kRows;

    struct SharedStorage {
        float q[kRows][kHeadDim];
        float k[kKeys][kHeadDim];
        float v[kKeys][kHeadDim];
        float s[kRows][kKeys];
    };

    static int64_t ctas(Flash_fwd_params const &params) { return int64_t(params.b) * params.h; }

    __device__ static void run(Flash_fwd_params const &params, SharedStorage &storage) {
        Head<Element, kCausal> const head(params, blockIdx.x);
        int const thread = threadIdx.x;

        for (int row = thread; row < head.seqlen_q; row += kRows) {
            for (int x = 0; x < kHeadDim; ++x) {
                head.o[row * head.o_stride + x] = 0.f;
            }
            head.lse[row] = -INFINITY;
        }
        for (int first_key = 0; first_key < head.seqlen_k; first_key += kKeys) {
            // Each thread loads a whole row by itself: the loads of a warp are not coalesced, with
            // the stride of a row.
            int const key = first_key + thread;
            for (int x = 0; x < kHeadDim && key < head.seqlen_k; ++x) {
                storage.k[thread][x] = head.k[key * head.k_stride + x];
                storage.v[thread][x] = head.v[key * head.v_stride + x];
            }
            __syncthreads();
            for (int row = thread; row < head.seqlen_q; row += kRows) {
                int const keys = min(head.key_end(row) - first_key, kKeys);  // visible to the row
                if (keys > 0) {
                    visit(head, storage, row, keys, params.scale_softmax);
                }
            }
            __syncthreads();
        }
    }

    // Updates row `row` with the first `keys` keys of the block in shared memory.
    __device__ static void visit(Head<Element, kCausal> const &head, SharedStorage &storage,
                                 int row, int keys, float scale) {
        float *const q = storage.q[threadIdx.x];  // (d)
        float *const s = storage.s[threadIdx.x];  // (kKeys)
        for (int x = 0; x < kHeadDim; ++x) {
            q[x] = head.q[row * head.q_stride + x];
        }
        float block_max = -INFINITY;
        for (int j = 0; j < keys; ++j) {
            float score = 0.f;
            for (int x = 0; x < kHeadDim; ++x) {
                score += q[x] * storage.k[j][x];
            }
            s[j] = score * scale;
            block_max = fmaxf(block_max, s[j]);
        }
        float block_sum = 0.f;
        for (int j = 0; j < keys; ++j) {
            s[j] = expf(s[j] - block_max);
            block_sum += s[j];
        }
        // log(e^old + e^block), with the larger exponent factored out.
        float const lse_old = head.lse[row];
        float const lse_block = block_max + logf(block_sum);
        float const lse_max = fmaxf(lse_old, lse_block);
        float const lse_new = lse_max + logf(expf(lse_old - lse_max) + expf(lse_block - lse_max));
        float const keep = expf(lse_old - lse_new);
        float const add = expf(block_max - lse_new);
        for (int x = 0; x < kHeadDim; ++x) {
            float sum = 0.f;
            for (int j = 0; j < keys; ++j) {
                sum += s[j] * storage.v[j][x];
            }
            float &out = head.o[row * head.o_stride + x];
            out = keep * out + add * sum;
        }
        head.lse[row] = lse_new;
    }
};

}  // namespace ladder
