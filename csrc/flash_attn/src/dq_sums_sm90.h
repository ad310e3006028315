// Sums of dQ in global memory in the sm90 class, in the order of the accumulators that are added.
#pragma once

#include <arch_sm90.h>

#include <cute/tensor.hpp>

#include "flash.h"
#include "flash_bwd_postprocess.h"
#include "store_accumulator.h"

namespace flash {

using namespace cute;

// What one consumer thread has of the sums of a block of queries: groups of four, between which lie
// those of the other threads of its warp. Above d = 128 `thread` counts as if the two warpgroups
// were the two CTAs of a cluster.
template <class Traits>
struct DqSumsSm90 {
    using Element = typename Traits::Element;
    static constexpr int kColumns = Traits::kDqColumns;

    int const thread;
    float *const begin;

    // accum: the workspace; row: the block's first one there.
    CUTE_DEVICE DqSumsSm90(float *accum, int64_t row, int thread)
        : thread(thread),
          begin(accum + row * Traits::kHeadDim + Traits::dq_begin(thread / 32) + thread % 32 * 4) {}

    // Whether the thread has an i-th group of four, as its warpgroup may have fewer columns, and
    // where that group is.
    CUTE_DEVICE bool exists(int i) const { return 8 * i < Traits::dq_columns(thread / 128); }
    CUTE_DEVICE float4 *group(int i) const { return reinterpret_cast<float4 *>(begin + i * 128); }

    CUTE_DEVICE void zero() const {
        CUTE_UNROLL
        for (int i = 0; i < kColumns / 8; ++i) {
            if (exists(i)) *group(i) = make_float4(0.f, 0.f, 0.f, 0.f);
        }
    }

    // Scales the sums by the softmax scale and rounds them to dQ. exist: false where no tile has
    // written any, so that dQ is 0.
    template <class Block>
    CUTE_DEVICE void round(Flash_bwd_params const &params, Block const &block,
                           bool exist = true) const {
        Tensor tQrDq = make_tensor<float>(Shape<_4, _1, Int<kColumns / 8>>{});  // (4, 1, N/8)
        CUTE_UNROLL
        for (int i = 0; i < kColumns / 8; ++i) {
            float4 const four =
                exist && exists(i) ? sm90::load_from_l2(group(i)) : make_float4(0.f, 0.f, 0.f, 0.f);
            tQrDq(0, 0, i) = four.x * params.scale_softmax;
            tQrDq(1, 0, i) = four.y * params.scale_softmax;
            tQrDq(2, 0, i) = four.z * params.scale_softmax;
            tQrDq(3, 0, i) = four.w * params.scale_softmax;
        }
        // The second warpgroup has the second half of the rows or of the columns.
        int const first_row = Traits::kDqByRows ? thread / 128 * 64 : 0;
        int const first_col = Traits::kDqByRows ? 0 : thread / 128 * kColumns;
        auto const row_of = [&](int i) { return first_row + Traits::acc_row(thread % 128, i); };
        CUTE_UNROLL
        for (int i = 0; i < size(tQrDq); ++i) {
            if (!block.in_sequence(row_of(i % 4 / 2))) tQrDq(i) = 0.f;
        }
        store_accumulator<kColumns>(
            tQrDq, thread, params.d - first_col, [&](int i) -> GmemRow<Element> {
                auto const row = block.template row<Element>(params, row_of(i));
                return {row.gmem + first_col, row.exists};
            });
    }
};

}  // namespace flash
