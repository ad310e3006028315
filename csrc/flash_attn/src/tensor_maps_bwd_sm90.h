// The TMA descriptors of one backward launch, built on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "flash.h"
#include "kernel_traits_bwd_sm90.h"
#include "tensor_maps_sm90.h"

namespace flash {

static_assert(kMaxBwdTokens <= kRaggedRows && kMaxBwdTokens < kRaggedSize);

struct TensorMapsBwdSm90 {
    CUtensorMap q, dout, k, v, stats;
};

// The map of the statistics is (floats of a row, rows, h, b). A row has 512 bytes: the statistics
// of kStatsRow queries.
inline constexpr int kStatsRow = 64;

// Describes the rows of a ragged batch as (d, x, heads, y, z), in boxes of box_rows rows.
template <class Traits>
cudaError_t make_ragged_map(CUtensorMap &map, void const *ptr, int d, int rows, int heads,
                            int64_t row_stride, int64_t head_stride, cuuint32_t box_rows) {
    constexpr BoxFormat format = box_format<Traits>();
    RaggedAxes const axes(format.bytes, {rows, row_stride}, {1, 0}, {1, 0});
    return make_tensor_map<5>(map, format, ptr, {d, kRaggedRows, heads, axes.y_size, kRaggedSize},
                              {axes.x_stride, head_stride, axes.y_stride, axes.z_stride},
                              {Traits::kSmemRow, box_rows, 1, 1, 1});
}

template <class Traits>
cudaError_t make_tensor_maps(TensorMapsBwdSm90 &maps, Flash_bwd_params const &params) {
    cudaError_t error = cudaSuccess;
    constexpr bool kVarlen = Traits::kVarlen;
    // Makes the map of a dense batch as (d, rows, heads, b), in boxes of box_rows rows, or that of
    // a ragged batch.
    auto const make = [&](CUtensorMap &map, void const *ptr, int rows, int heads,
                          int64_t row_stride, int64_t head_stride, int64_t batch_stride,
                          cuuint32_t box_rows) {
        if (error == cudaSuccess && kVarlen) {
            error = make_ragged_map<Traits>(map, ptr, params.d, rows, heads, row_stride,
                                            head_stride, box_rows);
        } else if (error == cudaSuccess) {
            error = make_tensor_map<4>(
                map, box_format<Traits>(), ptr, {params.d, rows, heads, params.b},
                {row_stride, head_stride, batch_stride}, {Traits::kSmemRow, box_rows, 1, 1});
        }
    };
    int const rows_q = kVarlen ? params.total_q : params.seqlen_q;
    int const rows_k = kVarlen ? params.total_k : params.seqlen_k;
    make(maps.q, params.q_ptr, rows_q, params.h, params.q_row_stride, params.q_head_stride,
         params.q_batch_stride, Traits::kTileM);
    make(maps.dout, params.do_ptr, rows_q, params.h, params.do_row_stride, params.do_head_stride,
         params.do_batch_stride, Traits::kTileM);
    int const heads_k = params.h_k / params.head_parts;
    make(maps.k, params.k_ptr, rows_k, heads_k, params.k_row_stride, params.k_head_stride,
         params.k_batch_stride, Traits::kTileN);
    make(maps.v, params.v_ptr, rows_k, heads_k, params.v_row_stride, params.v_head_stride,
         params.v_batch_stride, Traits::kTileN);
    if (error == cudaSuccess) {
        int64_t const of_a_head = int64_t(2) * params.seqlen_q_rounded;
        error = make_tensor_map<4>(
            maps.stats, {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, CU_TENSOR_MAP_SWIZZLE_NONE},
            params.row_stats_ptr,
            {2 * kStatsRow, params.seqlen_q_rounded / kStatsRow, params.h, kVarlen ? 1 : params.b},
            {2 * kStatsRow, of_a_head, params.h * of_a_head},
            {2 * kStatsRow, Traits::kTileM / kStatsRow, 1, 1});
    }
    return error;
}

}  // namespace flash
