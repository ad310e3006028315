// Shared by rungs 7 to 10: a warp's 16 query rows with mma.sync, m16n8k16.
//
// Unlike for WMMA, PTX defines which lane holds which element. Lane l holds, of each 16 x 8
// accumulator, elements (l / 4, 2 (l % 4)), the next in that row, and the two 8 rows below. So a
// row is in four consecutive lanes. Two adjacent accumulators, rounded, are an A operand of the
// next product: S, P and O never leave registers.
#pragma once

#include <ladder_ptx.h>

#include "tile.h"

namespace ladder {

__device__ inline uint32_t round_to_pair(float low, float high, __half) {
    __half2 const pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t const *>(&pair);
}
__device__ inline uint32_t round_to_pair(float low, float high, __nv_bfloat16) {
    __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t const *>(&pair);
}

template <class Op>
__device__ inline float quad_reduce(float x, Op op) {
    x = op(x, __shfl_xor_sync(kAllLanes, x, 1));
    return op(x, __shfl_xor_sync(kAllLanes, x, 2));
}

// Layout maps an element of a shared memory tile to its offset (tile.h).
template <class Element, int kHeadDim, int kKeys, class Layout>
struct MmaRows {
    static constexpr int kRows = 16;
    static constexpr int kDepth = 16;  // of one MMA

    float s[kKeys / 8][4];     // scores, then probabilities: (16, kKeys)
    float o[kHeadDim / 8][4];  // unnormalised: (16, d)
    float row_max[2];          // of the raw scores; of rows l / 4 and l / 4 + 8
    float row_sum[2];          // of this lane's columns

    __device__ MmaRows() {
        for (auto &fragment : o) {
            fragment[0] = fragment[1] = fragment[2] = fragment[3] = 0.f;
        }
        row_max[0] = row_max[1] = -INFINITY;
        row_sum[0] = row_sum[1] = 0.f;
    }

    __device__ static int lane() { return threadIdx.x % kWarp; }

    // A operand: rows first_row to + 15 of Q, columns 16 x to + 15.
    __device__ static void load_q(uint32_t (&a)[4], Element const *q, int first_row, int x) {
        int const row = first_row + lane() % 16;
        int const col = x * kDepth + lane() / 16 * 8;
        ldmatrix(q + Layout::template offset<kHeadDim>(row, col), a);
    }

    __device__ void clear_scores() {
        for (auto &fragment : s) {
            fragment[0] = fragment[1] = fragment[2] = fragment[3] = 0.f;
        }
    }

    // S += Q K^T over columns 16 x to + 15. A row of K is a column of the B operand.
    __device__ void add_scores(uint32_t const (&a)[4], Element const *k, int x) {
#pragma unroll
        for (int j = 0; j < kKeys / 16; ++j) {
            uint32_t b[4];
            int const key = 16 * j + lane() % 8 + lane() / 16 * 8;
            int const col = x * kDepth + lane() / 8 % 2 * 8;
            ldmatrix(k + Layout::template offset<kHeadDim>(key, col), b);
            mma_m16n8k16<Element>(s[2 * j], a, b[0], b[1]);
            mma_m16n8k16<Element>(s[2 * j + 1], a, b[2], b[3]);
        }
    }

    // visible[i]: the number of the block's keys visible to row l / 4 + 8 i.
    __device__ void mask(int const (&visible)[2]) {
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (8 * j + lane() % 4 * 2 + e % 2 >= visible[e / 2]) {
                    s[j][e] = -INFINITY;
                }
            }
        }
    }

    // Online softmax: scores become probabilities relative to the running maximum; O and the row
    // sums are rescaled to it.
    __device__ void softmax(float scale_log2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float new_max = row_max[i];
#pragma unroll
            for (int j = 0; j < kKeys / 8; ++j) {
                new_max = fmaxf(new_max, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
            }
            new_max = quad_reduce(new_max, [](float a, float b) { return fmaxf(a, b); });
            // A row without keys so far has maximum -inf; 0 instead avoids (-inf) - (-inf).
            float const base = new_max == -INFINITY ? 0.f : new_max * scale_log2;
            float const factor = exp2f(row_max[i] * scale_log2 - base);
            row_max[i] = new_max;
            row_sum[i] *= factor;
#pragma unroll
            for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
                for (int e = 2 * i; e < 2 * i + 2; ++e) {
                    s[j][e] = exp2f(s[j][e] * scale_log2 - base);
                    row_sum[i] += s[j][e];
                }
            }
#pragma unroll
            for (int x = 0; x < kHeadDim / 8; ++x) {
                o[x][2 * i] *= factor;
                o[x][2 * i + 1] *= factor;
            }
        }
    }

    // O += P V. V is stored row by row; ldmatrix transposes it for the B operand.
    __device__ void accumulate(Element const *v) {
#pragma unroll
        for (int j = 0; j < kKeys / 16; ++j) {
            float const(&left)[4] = s[2 * j];
            float const(&right)[4] = s[2 * j + 1];
            uint32_t const p[4] = {round_to_pair(left[0], left[1], Element()),
                                   round_to_pair(left[2], left[3], Element()),
                                   round_to_pair(right[0], right[1], Element()),
                                   round_to_pair(right[2], right[3], Element())};
#pragma unroll
            for (int x = 0; x < kHeadDim / 16; ++x) {
                uint32_t b[4];
                int const key = 16 * j + lane() % 16;
                int const col = 16 * x + lane() / 16 * 8;
                ldmatrix_transposed(v + Layout::template offset<kHeadDim>(key, col), b);
                mma_m16n8k16<Element>(o[2 * x], p, b[0], b[1]);
                mma_m16n8k16<Element>(o[2 * x + 1], p, b[2], b[3]);
            }
        }
    }

    // Writes the warp's rows, first_row to + 15 of the head.
    template <bool kCausal>
    __device__ void store(Head<Element, kCausal> const &head, int first_row, float scale) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float const sum = quad_reduce(row_sum[i], [](float a, float b) { return a + b; });
            float const inverse = sum > 0.f ? 1.f / sum : 0.f;  // a row without keys: 0 and -inf
            int const row = first_row + lane() / 4 + 8 * i;
            if (row >= head.seqlen_q) {
                continue;
            }
            Element *const out = head.o + row * head.o_stride + lane() % 4 * 2;
#pragma unroll
            for (int x = 0; x < kHeadDim / 8; ++x) {
                *reinterpret_cast<uint32_t *>(out + 8 * x) =
                    round_to_pair(o[x][2 * i] * inverse, o[x][2 * i + 1] * inverse, Element());
            }
            if (lane() % 4 == 0) {
                head.lse[row] = row_max[i] * scale + logf(sum);
            }
        }
    }

    // Masks the block unless it is wholly visible to all of the warp's rows.
    template <bool kCausal>
    __device__ void mask_block(Head<Element, kCausal> const &head, int first_row, int first_key) {
        if (head.key_end(first_row) < first_key + kKeys) {
            int const row = first_row + lane() / 4;
            int const visible[2] = {head.key_end(row) - first_key,
                                    head.key_end(row + 8) - first_key};
            mask(visible);
        }
    }
};

}  // namespace ladder
