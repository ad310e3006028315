// Adds up the dK and dV of a key head's parts (head_parts.h), and rounds them.
#pragma once

#include <arch_sm90.h>
#include <cutlass/numeric_types.h>

#include <cute/config.hpp>

#include "flash.h"
#include "head_parts.h"

namespace flash {

template <BwdConfig C>
struct SumParts {
    using Element =
        std::conditional_t<C.dtype == DType::fp16, cutlass::half_t, cutlass::bfloat16_t>;
    using Sums = HeadPartSums<C.varlen>;
    static constexpr bool kDependent = C.arch == 90;
    static constexpr bool kDrops = C.dropout;
    static constexpr int kThreads = 256;
    static constexpr int kRows = 8;  // of a CTA
    static constexpr int kVec = 16 / sizeof(Element);

    struct alignas(16) Piece {
        Element x[kVec];
    };

    static int64_t num_ctas(Flash_bwd_params const &params) {
        return (Sums::num_rows(params) + kRows - 1) / kRows;
    }

    // Row `row` of dK or dV of a key head, among the rows of all batch entries.
    CUTE_DEVICE static Element *gradient(Flash_bwd_params const &params, bool is_dk, int row,
                                         int head) {
        int64_t const batch = C.varlen ? 0 : row / params.seqlen_k;
        int64_t const within = C.varlen ? row : row % params.seqlen_k;
        return is_dk ? static_cast<Element *>(params.dk_ptr) + batch * params.dk_batch_stride +
                           within * params.dk_row_stride + head * params.dk_head_stride
                     : static_cast<Element *>(params.dv_ptr) + batch * params.dv_batch_stride +
                           within * params.dv_row_stride + head * params.dv_head_stride;
    }
};

// Adds up the parts of each key head, always in the same order. A CTA has kRows rows of all key
// heads, of both dK and dV. params: as divide_heads() returns them.
template <class Sum>
__global__ void __launch_bounds__(Sum::kThreads)
    flash_bwd_sum_parts_kernel(__grid_constant__ Flash_bwd_params const params) {
    if constexpr (Sum::kDependent) cudaGridDependencySynchronize();
    int const parts = params.head_parts, heads = params.h_k / parts;
    int const pieces = params.d / Sum::kVec;  // of a row
    int const first_row = static_cast<int>(blockIdx.x) * Sum::kRows;
    CUTE_NO_UNROLL
    for (int i = threadIdx.x; i < Sum::kRows * 2 * heads * pieces; i += Sum::kThreads) {
        int const col = i % pieces * Sum::kVec;
        int const head = i / pieces % heads;
        bool const is_dk = i / (pieces * heads) % 2 == 0;
        int const row = first_row + i / (pieces * heads * 2);
        if (row >= Sum::Sums::num_rows(params)) return;
        float const *from =
            Sum::Sums::row(params, is_dk, row) + int64_t(head) * parts * params.d + col;
        float sums[Sum::kVec] = {};
        for (int part = 0; part < parts; ++part, from += params.d) {
            CUTE_UNROLL
            for (int j = 0; j < Sum::kVec; j += 4) {
                float4 const four = sm90::load_from_l2(reinterpret_cast<float4 const *>(from + j));
                sums[j] += four.x;
                sums[j + 1] += four.y;
                sums[j + 2] += four.z;
                sums[j + 3] += four.w;
            }
        }
        float const scale = is_dk ? params.scale_softmax : Sum::kDrops ? params.dropout_scale : 1.f;
        typename Sum::Piece rounded;
        CUTE_UNROLL
        for (int j = 0; j < Sum::kVec; ++j) {
            rounded.x[j] = typename Sum::Element(sums[j] * scale);
        }
        *reinterpret_cast<typename Sum::Piece *>(Sum::gradient(params, is_dk, row, head) + col) =
            rounded;
    }
}

// Enqueues the sums over parts, behind the kernels with tiles of keys. params: as divide_heads()
// returns them.
template <BwdConfig C>
cudaError_t enqueue_sum_parts(Flash_bwd_params const &params, void *stream) {
    using Sum = SumParts<C>;
    if (params.head_parts == 1 || params.dk_ptr == nullptr) {
        return cudaSuccess;
    }
    if (Sum::Sums::num_rows(params) > INT32_MAX - Sum::kRows) {
        return cudaErrorInvalidConfiguration;
    }
    return enqueue_bwd<&flash_bwd_sum_parts_kernel<Sum>, Sum::kDependent>(
        Sum::num_ctas(params), Sum::kThreads, 0, stream, params);
}

}  // namespace flash
