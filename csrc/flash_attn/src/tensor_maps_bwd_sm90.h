// The TMA descriptors of one backward launch, built on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "flash.h"
#include "kernel_traits_bwd_sm90.h"
#include "tensor_maps_sm90.h"

namespace flash {

struct TensorMapsBwdSm90 {
    CUtensorMap q, dout, k, v, stats;
};

// The statistics as (rows of 512 bytes, row, h, b): of 64 queries each.
inline constexpr int kStatsRow = 64;

template <class Traits>
cudaError_t make_tensor_maps(TensorMapsBwdSm90 &maps, Flash_bwd_params const &params) {
    cudaError_t error = cudaSuccess;
    // (d, rows, heads, b), in boxes of box_rows rows.
    auto const make = [&](CUtensorMap &map, void const *ptr, int rows, int heads,
                          int64_t row_stride, int64_t head_stride, int64_t batch_stride,
                          cuuint32_t box_rows) {
        if (error == cudaSuccess) {
            error = make_tensor_map<4>(
                map, box_format<Traits>(), ptr, {params.d, rows, heads, params.b},
                {row_stride, head_stride, batch_stride}, {Traits::kSmemRow, box_rows, 1, 1});
        }
    };
    make(maps.q, params.q_ptr, params.seqlen_q, params.h, params.q_row_stride, params.q_head_stride,
         params.q_batch_stride, Traits::kTileM);
    make(maps.dout, params.do_ptr, params.seqlen_q, params.h, params.do_row_stride,
         params.do_head_stride, params.do_batch_stride, Traits::kTileM);
    make(maps.k, params.k_ptr, params.seqlen_k, params.h_k, params.k_row_stride,
         params.k_head_stride, params.k_batch_stride, Traits::kTileN);
    make(maps.v, params.v_ptr, params.seqlen_k, params.h_k, params.v_row_stride,
         params.v_head_stride, params.v_batch_stride, Traits::kTileN);
    if (error == cudaSuccess) {
        int64_t const of_a_head = int64_t(2) * params.seqlen_q_rounded;
        error = make_tensor_map<4>(
            maps.stats, {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, CU_TENSOR_MAP_SWIZZLE_NONE},
            params.row_stats_ptr,
            {2 * kStatsRow, params.seqlen_q_rounded / kStatsRow, params.h, params.b},
            {2 * kStatsRow, of_a_head, params.h * of_a_head},
            {2 * kStatsRow, Traits::kTileM / kStatsRow, 1, 1});
    }
    return error;
}

}  // namespace flash
