// Zeroes rows of a shared memory buffer past a sequence's end, where loads bring other rows.
#pragma once

#include <arch_sm90.h>

#include <cute/tensor.hpp>

namespace flash {

using namespace cute;

// Writes zeros to rows [begin, end) of a buffer. Called by `threads` threads, of which this one is
// number `index`; wgmma may read the rows after a barrier of these threads.
template <int kHeadDim, class Element, class SmemLayout>
CUTE_DEVICE void zero_rows(Element *smem, SmemLayout const &layout, int begin, int end, int index,
                           int threads) {
    static_assert(kHeadDim % 8 == 0 && sizeof(Element) == 2);
    Tensor sX =
        as_position_independent_swizzle_tensor(make_tensor(make_smem_ptr(smem), layout));  // (N, d)
    constexpr int kPieces = kHeadDim / 8;  // of a row, each 16 bytes
    CUTE_NO_UNROLL
    for (int i = begin * kPieces + index; i < end * kPieces; i += threads) {
        *reinterpret_cast<uint4 *>(&sX(i / kPieces, i % kPieces * 8)) = uint4{};
    }
    sm90::fence_async_proxy();
}

}  // namespace flash
