// Writes a finished tile: O through shared memory in 16-byte rows, LSE from the lanes that own
// column 0.
#pragma once

#include <cute/tensor.hpp>

#include "flash.h"
#include "kernel_traits.h"
#include "seqlen_info.h"
#include "tile_scheduler.h"
#include "utils.h"

namespace flash {

using namespace cute;

template <FwdConfig C>
struct EpilogueFwd {
    using Traits = KernelTraitsSm80<C>;
    using Element = typename Traits::Element;
    static constexpr int kTileM = Traits::kTileM;
    static constexpr int kHeadDim = Traits::kHeadDim;

    // Element offset of the first row of a (batch, head) in the LSE, shape (b, h, seqlen_q).
    CUTE_HOST_DEVICE static int64_t lse_offset(Flash_fwd_params const &params,
                                               TileCoord const &tile) {
        return (int64_t(tile.batch) * params.h + tile.head) * params.seqlen_q;
    }

    template <class AccO, class RowTensor>
    CUTE_DEVICE static void store(Flash_fwd_params const &params,
                                  typename Traits::SharedStorage &storage, TileCoord const &tile,
                                  SeqlenInfo const &seqlen, AccO const &tOrO,
                                  RowTensor const &lse) {
        int const thread = threadIdx.x;
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

        auto *const gmem = static_cast<Element *>(params.o_ptr) +
                           tile.batch * params.o_batch_stride + tile.head * params.o_head_stride +
                           tile.m_block * kTileM * params.o_row_stride;
        Tensor gO = make_tensor(make_gmem_ptr(gmem), product_each(shape(sO)),
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
};

}  // namespace flash
