// A warpgroup's 64 rows of K or of V as A operand of S^T = K Q^T or dP^T = V dO^T, in the backward.
// The first k16 steps stay in its registers over a tile, where there is room; wgmma reads the
// others from shared memory again for every block of queries.
#pragma once

#include <arch_sm90.h>

#include <cute/tensor.hpp>

#include "mma_traits_sm90.h"

namespace flash {

using namespace cute;

template <class Traits, int kRegSteps>
struct OwnKeysSm90 {
    using Element = typename Traits::Element;
    static constexpr int kSteps = Traits::kHeadDim / 16;
    static_assert(0 <= kRegSteps && kRegSteps <= kSteps);
    using Fragment = decltype(make_tensor<Element>(
        Layout<Shape<Shape<_2, _2, _2>, _1, Int<kRegSteps>>>{}));  // (8, 1, steps)
    Fragment tSrOwn;

    // Loads the k16 steps that stay in registers, of a tile whose buffer is full. thread: among
    // those of TiledMmaS. The proxy fence in load_steps() is needed for V above d = 128, which is
    // released ahead of all other buffers where a tile has one step.
    template <class Own>
    CUTE_DEVICE void load(Own &own, int thread) {
        Tensor sOwn =
            make_tensor(make_smem_ptr(own.data()), typename Traits::SmemLayoutK{});  // (N, d)
        sm90::load_steps<typename Traits::TiledMmaSreg>(sOwn, thread, tSrOwn);
    }

    // Issues acc = own visited^T. first_thread: of the warpgroup in TiledMmaS. zero: a 0 that ptxas
    // does not know to be 0, so that it does not keep the descriptors in vector registers over the
    // loop.
    template <class Own, class Visited, class Acc>
    CUTE_DEVICE void issue(Own &own, int zero, Visited &visited, int first_thread, Acc &acc) const {
        typename Traits::TiledMmaS mma;
        typename Traits::TiledMmaSreg mma_reg;
        auto const thr_mma = mma.get_slice(first_thread);
        Tensor sA = make_tensor(make_smem_ptr(own.data() + zero),
                                typename Traits::SmemLayoutK{});  // (N, d)
        Tensor sB =
            make_tensor(make_smem_ptr(visited.data()), typename Traits::SmemLayoutQ{});  // (M, d)
        Tensor tSrA = thr_mma.make_fragment_A(thr_mma.partition_A(sA));  // (1, 1, d/16)
        Tensor tSrB = thr_mma.make_fragment_B(thr_mma.partition_B(sB));  // (1, 1, d/16)
        sm90::wgmma_group(acc, [&] {
            sm90::wgmma_steps<0, kRegSteps, false>(mma_reg, tSrOwn, tSrB, acc);
            sm90::wgmma_steps<kRegSteps, kSteps, (kRegSteps > 0)>(mma, tSrA, tSrB, acc);
        });
    }
};

}  // namespace flash
