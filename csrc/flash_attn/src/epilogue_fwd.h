// Writes a finished tile: O in pieces of 16 bytes, through shared memory in the sm80 class and from
// registers in the sm90 class, LSE from the lanes that own column 0.
#pragma once

#include <cute/tensor.hpp>

#include "flash.h"
#include "seqlen_info.h"
#include "tile_scheduler.h"
#include "utils.h"

namespace flash {

using namespace cute;

template <class Traits>
struct EpilogueFwd {
    using Element = typename Traits::Element;
    static constexpr int kTileM = Traits::kTileM;
    static constexpr int kHeadDim = Traits::kHeadDim;

    // Element offset of the first row of a (batch, head) in the LSE, shape (b, h, seqlen_q).
    CUTE_HOST_DEVICE static int64_t lse_offset(Flash_fwd_params const &params,
                                               TileCoord const &tile) {
        return (int64_t(tile.batch) * params.h + tile.head) * params.seqlen_q;
    }

    // lse: of the rows that this thread holds.
    template <class RowTensor>
    CUTE_DEVICE static void store_lse(Flash_fwd_params const &params, TileCoord const &tile,
                                      SeqlenInfo const &seqlen, int thread, RowTensor const &lse) {
        int const rows = seqlen.seqlen_q - tile.m_block * kTileM;
        float *const lse_ptr =
            params.softmax_lse_ptr + lse_offset(params, tile) + tile.m_block * kTileM;
        if (Traits::acc_col(thread, 0) == 0) {
            CUTE_UNROLL
            for (int i = 0; i < size(lse); ++i) {
                int const row = Traits::acc_row(thread, i);
                if (row < rows) {
                    lse_ptr[row] = lse(i);
                }
            }
        }
    }

    CUTE_DEVICE static Element *tile_begin(Flash_fwd_params const &params, TileCoord const &tile) {
        return static_cast<Element *>(params.o_ptr) + tile.batch * params.o_batch_stride +
               tile.head * params.o_head_stride + tile.m_block * kTileM * params.o_row_stride;
    }

    // Through shared memory, so that a warp stores whole rows of 16-byte pieces.
    template <class AccO>
    CUTE_DEVICE static void store_through_smem(Flash_fwd_params const &params,
                                               typename Traits::SharedStorage &storage,
                                               TileCoord const &tile, SeqlenInfo const &seqlen,
                                               AccO const &tOrO) {
        int const thread = threadIdx.x;
        int const rows = seqlen.seqlen_q - tile.m_block * kTileM;
        Tensor sO = make_tensor(make_smem_ptr(storage.q_or_o.data()),
                                typename Traits::SmemLayoutO{});  // (M, d)
        Tensor rO = convert_type<Element>(tOrO);                  // (4, MMA_M, d/8)
        auto const copy_o =
            make_tiled_copy_C(typename Traits::SmemCopyAtomO{}, typename Traits::TiledMma{});
        auto const copy_o_thr = copy_o.get_slice(thread);
        Tensor tOsO = copy_o_thr.partition_D(sO);  // (8, MMA_M, d/16)
        __syncthreads();                           // every warp has read Q, whose bytes O takes
        copy(copy_o, copy_o_thr.retile_S(rO), tOsO);
        __syncthreads();

        Tensor gO = make_tensor(make_gmem_ptr(tile_begin(params, tile)), product_each(shape(sO)),
                                make_stride(params.o_row_stride, _1{}));  // (M, d)
        typename Traits::GmemCopyStore gmem_copy;
        auto const gmem_thr = gmem_copy.get_slice(thread);
        Tensor tGsO = gmem_thr.partition_S(sO);  // (8, rows, cols)
        Tensor tGgO = gmem_thr.partition_D(gO);  // (8, rows, cols)
        CUTE_UNROLL
        for (int r = 0; r < size<1>(tGgO); ++r) {
            CUTE_UNROLL
            for (int c = 0; c < size<2>(tGgO); ++c) {
                if (Traits::gmem_row(thread, r) < rows && Traits::gmem_col(thread, c) < params.d) {
                    gmem_copy.call(tGsO(_, r, c), tGgO(_, r, c));
                }
            }
        }
    }

    // From registers: the four lanes of a row exchange what they hold of 32 columns, two at a time,
    // so that each has 8 neighbouring ones to store. tOrO: (4, 1, d/8).
    template <class AccO>
    CUTE_DEVICE static void store_from_registers(Flash_fwd_params const &params,
                                                 TileCoord const &tile, SeqlenInfo const &seqlen,
                                                 int thread, AccO const &tOrO) {
        int const lane = thread % 4;
        int const rows = seqlen.seqlen_q - tile.m_block * kTileM;
        Element *const gmem = tile_begin(params, tile) + lane * 8;
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
                int const row = Traits::acc_row(thread, i);
                transpose_quad(w[i], lane);
                if (row < rows && col + lane * 8 < params.d) {
                    *reinterpret_cast<uint4 *>(gmem + row * params.o_row_stride + col) =
                        make_uint4(w[i][0], w[i][1], w[i][2], w[i][3]);
                }
            }
        }
    }

    template <class RowTensor, class AccO>
    CUTE_DEVICE static void store(Flash_fwd_params const &params, TileCoord const &tile,
                                  SeqlenInfo const &seqlen, int thread, RowTensor const &lse,
                                  AccO const &tOrO) {
        store_lse(params, tile, seqlen, thread, lse);
        store_from_registers(params, tile, seqlen, thread, tOrO);
    }

    // A tile whose rows see no key.
    CUTE_DEVICE static void store_empty(Flash_fwd_params const &params, TileCoord const &tile,
                                        SeqlenInfo const &seqlen, int thread) {
        Tensor lse = make_tensor<float>(Shape<_2>{});                         // (rows)
        Tensor out = make_tensor<float>(Shape<_4, _1, Int<kHeadDim / 8>>{});  // (4, 1, d/8)
        fill(lse, -INFINITY);
        clear(out);
        store(params, tile, seqlen, thread, lse, out);
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
