// Copies tiles of the sm80 class between global and shared memory, 16 bytes a thread.
#pragma once

#include <cute/tensor.hpp>

#include "utils.h"

namespace flash {

using namespace cute;

// Loads a (rows, head_dim) tile from global to shared memory by cp.async. Rows that do not exist
// and columns at or past d are written as zeros and never read: whatever lies there cannot reach a
// result. row_at(r): the GmemRow that this thread copies in pass r.
template <class Traits, class SmemTensor, class RowAt>
CUTE_DEVICE void load_rows(SmemTensor &&sX, int d, RowAt const &row_at) {
    int const thread = threadIdx.x;
    typename Traits::GmemCopyLoad gmem_copy;
    Tensor tXsX = gmem_copy.get_slice(thread).partition_D(sX);  // (8, rows, cols)
    int const cols = d - Traits::gmem_col(thread, 0);
    CUTE_UNROLL
    for (int r = 0; r < size<1>(tXsX); ++r) {
        auto const [gmem, exists] = row_at(r);
        CUTE_UNROLL
        for (int c = 0; c < size<2>(tXsX); ++c) {
            int const col = Traits::gmem_col(0, c);
            Tensor tXgX = make_tensor(make_gmem_ptr(gmem + Traits::gmem_col(thread, 0) + col),
                                      Layout<Int<Traits::kGmemVec>>{});  // (8)
            gmem_copy.with(exists && col < cols).call(tXgX, tXsX(_, r, c));
        }
    }
}

// Loads block n, of kRows rows, of one head, whose row 0 is at gmem.
template <class Traits, int kRows, class SmemTensor>
CUTE_DEVICE void load_block(typename Traits::Element const *gmem, int64_t row_stride,
                            SmemTensor &&sX, int n, int seqlen, int d) {
    int const first = Traits::gmem_row(threadIdx.x, 0);
    gmem += (n * kRows + first) * row_stride;
    int const rows = seqlen - n * kRows - first;
    load_rows<Traits>(sX, d, [&](int r) -> GmemRow<typename Traits::Element const> {
        int const row = Traits::gmem_row(0, r);
        return {gmem + row * row_stride, row < rows};
    });
}

// Rounds an accumulator of (rows, head_dim) and stores it to global memory, through shared memory,
// so that a warp stores whole rows in pieces of 16 bytes. Collective over the CTA; every warp must
// be done with the bytes of sO.
template <class Traits, class TiledMma = typename Traits::TiledMma, class SmemTensor, class Acc,
          class RowAt>
CUTE_DEVICE void store_rows(SmemTensor &&sO, Acc const &tOrO, int d, RowAt const &row_at) {
    int const thread = threadIdx.x;
    Tensor rO = convert_type<typename Traits::Element>(tOrO);  // (4, MMA_M, d/8)
    auto const copy_o = make_tiled_copy_C(typename Traits::SmemCopyAtomO{}, TiledMma{});
    auto const copy_o_thr = copy_o.get_slice(thread);
    Tensor tOsO = copy_o_thr.partition_D(sO);  // (8, MMA_M, d/16)
    copy(copy_o, copy_o_thr.retile_S(rO), tOsO);
    __syncthreads();

    typename Traits::GmemCopyStore gmem_copy;
    Tensor tGsO = gmem_copy.get_slice(thread).partition_S(sO);  // (8, rows, cols)
    CUTE_UNROLL
    for (int r = 0; r < size<1>(tGsO); ++r) {
        auto const [gmem, exists] = row_at(r);
        CUTE_UNROLL
        for (int c = 0; c < size<2>(tGsO); ++c) {
            int const col = Traits::gmem_col(thread, c);
            Tensor tGgO =
                make_tensor(make_gmem_ptr(gmem + col), Layout<Int<Traits::kGmemVec>>{});  // (8)
            if (exists && col < d) {
                gmem_copy.call(tGsO(_, r, c), tGgO);
            }
        }
    }
}

}  // namespace flash
