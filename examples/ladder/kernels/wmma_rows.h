// Shared by rungs 4 to 6: the softmax of 16 rows of scores in shared memory.
//
// WMMA does not define which elements a thread's fragment holds. So scores go through shared memory
// to be reduced row by row, and probabilities are written back there to be loaded as an operand.
#pragma once

#include <mma.h>

#include "tile.h"

namespace ladder {

namespace wmma = nvcuda::wmma;

inline constexpr int kFrag = 16;  // fragments are 16 x 16, 16 deep

template <class Element>
using FragmentA = wmma::fragment<wmma::matrix_a, kFrag, kFrag, kFrag, Element, wmma::row_major>;
// K and V are row-major: as B operand V is used as stored, K transposed.
template <class Element>
using FragmentK = wmma::fragment<wmma::matrix_b, kFrag, kFrag, kFrag, Element, wmma::col_major>;
template <class Element>
using FragmentV = wmma::fragment<wmma::matrix_b, kFrag, kFrag, kFrag, Element, wmma::row_major>;
using Accumulator = wmma::fragment<wmma::accumulator, kFrag, kFrag, kFrag, float>;

template <class Op>
__device__ inline float warp_reduce(float x, Op op) {
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        x = op(x, __shfl_xor_sync(kAllLanes, x, distance));
    }
    return x;
}

// Online softmax of a warp's 16 rows; the lanes divide the kKeys keys of a row.
template <int kKeys>
struct StripSoftmax {
    static constexpr int kPerLane = kKeys / kWarp;
    // Lane i keeps the statistics of row i.
    float row_max = -INFINITY;  // of the raw scores
    float row_sum = 0.f;

    // One row: its scores s (kPerLane), of keys lane + 32 c, become probabilities relative to the
    // running maximum. Returns the factor that rescales O and the sum.
    __device__ float step(int i, float (&s)[kPerLane], float scale_log2) {
        float block_max = s[0];
        for (int c = 1; c < kPerLane; ++c) {
            block_max = fmaxf(block_max, s[c]);
        }
        block_max = warp_reduce(block_max, [](float a, float b) { return fmaxf(a, b); });
        float const old_max = __shfl_sync(kAllLanes, row_max, i);
        float const new_max = fmaxf(old_max, block_max);
        // A row without keys so far has maximum -inf; 0 instead avoids (-inf) - (-inf).
        float const base = new_max == -INFINITY ? 0.f : new_max * scale_log2;
        float const factor = exp2f(old_max * scale_log2 - base);
        float block_sum = 0.f;
        for (int c = 0; c < kPerLane; ++c) {
            s[c] = exp2f(s[c] * scale_log2 - base);
            block_sum += s[c];
        }
        block_sum = warp_reduce(block_sum, [](float a, float b) { return a + b; });
        if (threadIdx.x % kWarp == i) {
            row_max = new_max;
            row_sum = row_sum * factor + block_sum;
        }
        return factor;
    }

    // Writes row i of O, unnormalised in o (kHeadDim), and its log-sum-exp.
    template <int kHeadDim, class Element, bool kCausal>
    __device__ void store_row(int i, Head<Element, kCausal> const &head, int row, float const *o,
                              float scale) const {
        int const lane = threadIdx.x % kWarp;
        float const sum = __shfl_sync(kAllLanes, row_sum, i);
        float const inverse = sum > 0.f ? 1.f / sum : 0.f;  // a row without keys: 0 and -inf
        if (row < head.seqlen_q) {
            for (int x = lane; x < kHeadDim; x += kWarp) {
                head.o[row * head.o_stride + x] = from_float<Element>(o[x] * inverse);
            }
            if (lane == i) {
                head.lse[row] = row_max * scale + logf(sum);
            }
        }
    }
};

}  // namespace ladder
