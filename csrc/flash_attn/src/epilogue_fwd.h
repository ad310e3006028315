// Stores a finished tile: O in pieces of 16 bytes, through shared memory in the sm80 class and from
// registers in the sm90 class; the LSE from the lanes that own column 0. Parts of a split tile go
// to the workspace as partial results in float32.
#pragma once

#include <cute/tensor.hpp>

#include "flash.h"
#include "store_accumulator.h"
#include "tile_copy_sm80.h"
#include "utils.h"
#include "work_tile.h"

namespace flash {

using namespace cute;

template <class Traits>
struct EpilogueFwd {
    using Element = typename Traits::Element;
    static constexpr int kTileM = Traits::kTileM;
    static constexpr int kHeadDim = Traits::kHeadDim;

    // Where position 0 of the tile's sequence begins in O and LSE; for a part, in the workspace.
    CUTE_HOST_DEVICE static OutputOffset output_offset(Flash_fwd_params const &params,
                                                       WorkTile const &tile) {
        if (tile.is_part()) {
            int64_t const row = int64_t(tile.head) * params.partial_rows + tile.partial_row;
            return {row * params.d, row};
        }
        return {
            tile.batch * params.o_batch_stride + tile.row_q * params.o_row_stride +
                tile.head_q * params.o_head_stride,
            tile.batch * params.softmax_lse_batch_stride +
                tile.head_q * params.softmax_lse_head_stride + tile.row_q,
        };
    }

    // Returns the rows that this thread holds of an accumulator.
    template <int kRows>
    CUTE_DEVICE static auto thread_rows(Flash_fwd_params const &params, WorkTile const &tile,
                                        int thread) {
        cute::array<TileRow, kRows> rows;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
            rows[i] = tile_row(params, tile, kTileM, Traits::acc_row(thread, i));
        }
        return rows;
    }

    // Returns the sinks of the thread's rows, -inf without one. head_q: the tile's first query
    // head. wanted: false for rows of no sequence, which have no sinks, and for the parts of a
    // split tile, whose merge adds a row's sink once.
    template <size_t kRows>
    CUTE_DEVICE static auto load_sinks(Flash_fwd_params const &params, int head_q,
                                       cute::array<TileRow, kRows> const &rows, bool wanted) {
        Tensor sinks = make_tensor<float>(Shape<Int<kRows>>{});  // (rows)
        fill(sinks, -INFINITY);
        if (params.sinks_ptr != nullptr && wanted) {
            CUTE_UNROLL
            for (int i = 0; i < int(kRows); ++i) {
                if (rows[i].exists) {
                    sinks(i) = params.sinks_ptr[head_q + rows[i].head];
                }
            }
        }
        return sinks;
    }

    // Stores the LSE of the thread's rows. offset: OutputOffset::lse of the tile.
    template <size_t kRows, class RowTensor>
    CUTE_DEVICE static void store_lse(Flash_fwd_params const &params, int64_t offset,
                                      cute::array<TileRow, kRows> const &rows, int thread,
                                      RowTensor const &lse) {
        float *const begin = params.softmax_lse_ptr + offset;
        if (Traits::acc_col(thread, 0) == 0) {
            CUTE_UNROLL
            for (int i = 0; i < int(kRows); ++i) {
                if (rows[i].exists) {
                    begin[rows[i].offset(1, params.softmax_lse_head_stride)] = lse(i);
                }
            }
        }
    }

    // Stores the partial results of a part of a split tile. tOrO: (4, MMA_M, d/8).
    template <size_t kRows, class RowTensor, class AccO>
    CUTE_DEVICE static void store_part(Flash_fwd_params const &params, OutputOffset const &offset,
                                       cute::array<TileRow, kRows> const &rows, int thread,
                                       RowTensor const &lse, AccO const &tOrO) {
        Tensor out = make_tensor(tOrO.data(), layout_acc_rowcol(tOrO.layout()));  // (rows, cols)
        int const first = Traits::acc_col(thread, 0);
        int64_t const shift = params.pack_shift;
        float *const o = params.o_partial_ptr + offset.o + first;
        float *const stats = params.lse_partial_ptr + offset.lse;
        CUTE_UNROLL
        for (int i = 0; i < int(kRows); ++i) {
            if (rows[i].exists) {
                float *const row = o + rows[i].offset(int64_t(params.d) << shift, params.d);
                CUTE_UNROLL
                for (int j = 0; j < size<1>(out); j += 2) {
                    int const col = Traits::acc_col(0, j);
                    if (first + col < params.d) {
                        *reinterpret_cast<float2 *>(row + col) =
                            make_float2(out(i, j), out(i, j + 1));
                    }
                }
                if (first == 0) {
                    stats[rows[i].offset(int64_t(1) << shift, 1)] = lse(i);
                }
            }
        }
    }

    template <class AccO>
    CUTE_DEVICE static void store_through_smem(Flash_fwd_params const &params,
                                               typename Traits::SharedStorage &storage,
                                               WorkTile const &tile, int64_t offset,
                                               AccO const &tOrO) {
        Tensor sO = make_tensor(make_smem_ptr(storage.q_or_o.data()),
                                typename Traits::SmemLayoutQ{});  // (M, d)
        Element *const begin = static_cast<Element *>(params.o_ptr) + offset;
        __syncthreads();  // every warp has read Q, whose bytes O takes
        store_rows<Traits>(sO, tOrO, params.d, [&](int r) -> GmemRow<Element> {
            TileRow const row = tile_row(params, tile, kTileM, Traits::gmem_row(threadIdx.x, r));
            return {begin + row.offset(params.o_row_stride, params.o_head_stride), row.exists};
        });
    }

    // tOrO: (4, 1, d/8).
    template <class AccO>
    CUTE_DEVICE static void store_from_registers(Flash_fwd_params const &params, int64_t offset,
                                                 cute::array<TileRow, 2> const &rows, int thread,
                                                 AccO const &tOrO) {
        Element *const begin = static_cast<Element *>(params.o_ptr) + offset;
        store_accumulator<kHeadDim>(tOrO, thread, params.d, [&](int i) -> GmemRow<Element> {
            return {begin + rows[i].offset(params.o_row_stride, params.o_head_stride),
                    rows[i].exists};
        });
    }

    template <class RowTensor, class AccO>
    CUTE_DEVICE static void store(Flash_fwd_params const &params, bool part,
                                  OutputOffset const &offset, cute::array<TileRow, 2> const &rows,
                                  int thread, RowTensor const &lse, AccO const &tOrO) {
        if (part) {
            store_part(params, offset, rows, thread, lse, tOrO);
            return;
        }
        store_lse(params, offset.lse, rows, thread, lse);
        store_from_registers(params, offset.o, rows, thread, tOrO);
    }

    // The factor on O beside the reciprocal row sums.
    CUTE_DEVICE static float output_scale(Flash_fwd_params const &params) {
        return Traits::kConfig.dropout ? params.dropout_scale : 1.f;
    }

    // Normalises and stores a tile. tOrO: its unnormalised O; softmax: its row statistics.
    template <class SoftmaxT, class AccO>
    CUTE_DEVICE static void finish(Flash_fwd_params const &params, WorkTile const &tile,
                                   OutputOffset const &offset, int thread, SoftmaxT &softmax,
                                   AccO &tOrO) {
        auto const rows = thread_rows<2>(params, tile, thread);
        auto const sinks = load_sinks(params, tile.head_q, rows, !tile.is_part());
        auto const lse = softmax.finalize(tOrO, sinks, output_scale(params));
        store(params, tile.is_part(), offset, rows, thread, lse, tOrO);
    }

    // Stores a tile whose rows see no key: O = 0, and the rows' sinks as LSE.
    CUTE_DEVICE static void store_empty(Flash_fwd_params const &params, WorkTile const &tile,
                                        OutputOffset const &offset, int thread) {
        auto const rows = thread_rows<2>(params, tile, thread);
        Tensor out = make_tensor<float>(Shape<_4, _1, Int<kHeadDim / 8>>{});  // (4, 1, d/8)
        clear(out);
        auto const sinks =
            load_sinks(params, tile.head_q, rows, tile.in_sequence() && !tile.is_part());
        store(params, tile.is_part(), offset, rows, thread, sinks, out);
    }
};

}  // namespace flash
