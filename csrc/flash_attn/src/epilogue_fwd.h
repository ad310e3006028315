// Writes a finished tile: O in pieces of 16 bytes, through shared memory in the sm80 class and from
// registers in the sm90 class, LSE from the lanes that own column 0.
#pragma once

#include <cute/tensor.hpp>

#include "flash.h"
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

    // From position 0 of the tile's sequence on.
    CUTE_HOST_DEVICE static OutputOffset output_offset(Flash_fwd_params const &params,
                                                       WorkTile const &tile) {
        return {
            tile.batch * params.o_batch_stride + tile.row_q * params.o_row_stride +
                tile.head_q * params.o_head_stride,
            tile.batch * params.softmax_lse_batch_stride +
                tile.head_q * params.softmax_lse_head_stride + tile.row_q,
        };
    }

    // The rows that this thread holds.
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

    // head_q: the tile's first. in_sequence: else there are no sinks either.
    template <size_t kRows>
    CUTE_DEVICE static auto load_sinks(Flash_fwd_params const &params, int head_q,
                                       cute::array<TileRow, kRows> const &rows,
                                       bool in_sequence = true) {
        Tensor sinks = make_tensor<float>(Shape<Int<kRows>>{});  // (rows)
        fill(sinks, -INFINITY);
        if (params.sinks_ptr != nullptr && in_sequence) {
            CUTE_UNROLL
            for (int i = 0; i < int(kRows); ++i) {
                if (rows[i].exists) {
                    sinks(i) = params.sinks_ptr[head_q + rows[i].head];
                }
            }
        }
        return sinks;
    }

    // lse: of the thread's rows.
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

    // From registers: the four lanes of a row exchange what they hold of 32 columns, two at a time,
    // so that each has 8 neighbouring ones to store. tOrO: (4, 1, d/8).
    template <class AccO>
    CUTE_DEVICE static void store_from_registers(Flash_fwd_params const &params, int64_t offset,
                                                 cute::array<TileRow, 2> const &rows, int thread,
                                                 AccO const &tOrO) {
        int const lane = thread % 4;
        Element *const begin = static_cast<Element *>(params.o_ptr) + offset + lane * 8;
        Element *const out[2] = {
            begin + rows[0].offset(params.o_row_stride, params.o_head_stride),
            begin + rows[1].offset(params.o_row_stride, params.o_head_stride),
        };
        CUTE_UNROLL
        for (int col = 0; col < kHeadDim; col += 32) {
            uint32_t w[2][4];  // two columns of two rows, four times
            CUTE_UNROLL
            for (int j = 0; j < 4; ++j) {
                Tensor four = tOrO(_, 0, col / 8 + j);    // (4)
                Tensor rO = convert_type<Element>(four);  // (4)
                Tensor words = recast<uint32_t>(rO);      // (2)
                w[0][j] = words(0);
                w[1][j] = words(1);
            }
            CUTE_UNROLL
            for (int i = 0; i < 2; ++i) {
                transpose_quad(w[i], lane);
                if (rows[i].exists && col + lane * 8 < params.d) {
                    *reinterpret_cast<uint4 *>(out[i] + col) =
                        make_uint4(w[i][0], w[i][1], w[i][2], w[i][3]);
                }
            }
        }
    }

    template <class RowTensor, class AccO>
    CUTE_DEVICE static void store(Flash_fwd_params const &params, OutputOffset const &offset,
                                  cute::array<TileRow, 2> const &rows, int thread,
                                  RowTensor const &lse, AccO const &tOrO) {
        store_lse(params, offset.lse, rows, thread, lse);
        store_from_registers(params, offset.o, rows, thread, tOrO);
    }

    // What O is multiplied by beside the reciprocal row sums.
    CUTE_DEVICE static float output_scale(Flash_fwd_params const &params) {
        return Traits::kConfig.dropout ? params.dropout_scale : 1.f;
    }

    // A tile with its unnormalised O and its row statistics.
    template <class SoftmaxT, class AccO>
    CUTE_DEVICE static void finish(Flash_fwd_params const &params, WorkTile const &tile,
                                   OutputOffset const &offset, int thread, SoftmaxT &softmax,
                                   AccO &tOrO) {
        auto const rows = thread_rows<2>(params, tile, thread);
        auto const sinks = load_sinks(params, tile.head_q, rows);
        auto const lse = softmax.finalize(tOrO, sinks, output_scale(params));
        store(params, offset, rows, thread, lse, tOrO);
    }

    // A tile whose rows see no key: zeros, and the rows' sinks.
    CUTE_DEVICE static void store_empty(Flash_fwd_params const &params, WorkTile const &tile,
                                        OutputOffset const &offset, int thread) {
        auto const rows = thread_rows<2>(params, tile, thread);
        Tensor out = make_tensor<float>(Shape<_4, _1, Int<kHeadDim / 8>>{});  // (4, 1, d/8)
        clear(out);
        auto const sinks = load_sinks(params, tile.head_q, rows, tile.in_sequence());
        store(params, offset, rows, thread, sinks, out);
    }

    // Lane i of a quad holds column i of a 4 x 4 matrix, and afterwards row i.
    CUTE_DEVICE static void transpose_quad(uint32_t (&w)[4], int lane) {
        CUTE_UNROLL
        for (int bit = 1; bit <= 2; bit *= 2) {
            bool const upper = lane & bit;
            CUTE_UNROLL
            for (int j = 0; j < 4; ++j) {
                if (!(j & bit)) {
                    uint32_t &low = w[j];
                    uint32_t &high = w[j | bit];
                    uint32_t const got = __shfl_xor_sync(0xffffffffu, upper ? low : high, bit);
                    (upper ? low : high) = got;
                }
            }
        }
    }
};

}  // namespace flash
