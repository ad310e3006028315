// From a configuration to the types of the sm80 class's backward kernels.
#pragma once

#include <cute/tensor.hpp>

#include "flash.h"
#include "kernel_traits.h"

namespace flash {

using namespace cute;

// What one kernel of a backward computes. all: dK and dV, and each tile of keys adds its part of dQ
// to sums in global memory.
enum class BwdPass : int32_t { dq, dkv, dk, dv, all };

template <BwdConfig C, BwdPass kPass>
constexpr BwdTile bwd_tile() {
    return kPass == BwdPass::dq ? C.dq : C.dkv;
}

template <BwdConfig C, BwdPass kPass_>
struct KernelTraitsBwdSm80
    : TileTraitsSm80<C.dtype, C.head_dim, bwd_tile<C, kPass_>().rows, bwd_tile<C, kPass_>().step,
                     bwd_tile<C, kPass_>().warps, bwd_tile<C, kPass_>().warps_step> {
    static constexpr BwdTile kTile = bwd_tile<C, kPass_>();
    static_assert(C.arch == 80);
    static_assert(kTile.stages == 1 || kTile.stages == 2);

    using Base =
        TileTraitsSm80<C.dtype, C.head_dim, kTile.rows, kTile.step, kTile.warps, kTile.warps_step>;
    using typename Base::Element;

    static constexpr BwdConfig kConfig = C;
    static constexpr BwdPass kPass = kPass_;
    static constexpr MaskKind kMask = C.mask;
    static constexpr int kStages = kTile.stages;
    static constexpr int kMinCtas = kTile.min_ctas;
    static constexpr bool kOwnsQueries = kPass == BwdPass::dq;
    static constexpr bool kNeedsDs = kPass != BwdPass::dv;
    static constexpr bool kSumsDq = kPass == BwdPass::all;
    static constexpr bool kNeedsDv = kPass == BwdPass::dkv || kPass == BwdPass::dv || kSumsDq;
    static constexpr int kQueries = kOwnsQueries ? kTile.rows : kTile.step;  // of a score tile
    static constexpr int kKeys = kOwnsQueries ? kTile.step : kTile.rows;
    static_assert(kRowStatsMultiple % kQueries == 0);
    static constexpr int kOwned = kNeedsDs ? 2 : 1;  // tiles; the second is for dP alone

    // Whether P^T and dS^T go through shared memory: with warps_step > 1 those of a warp are of
    // other rows or columns than its dK and dV.
    static constexpr bool kSharesP = kTile.warps_step > 1;
    static_assert(!kSharesP || (kSumsDq && C.head_dim % (16 * kTile.warps_step) == 0));

    // dQ = dS K, (M, d), is a sum over all owned keys. It is computed for at most kDqRows queries
    // at a time, for whose accumulators there are registers beside those of dK and dV. The warps
    // divide its rows and its columns.
    static constexpr int kDqRows = kQueries < 64 ? kQueries : 64;
    static constexpr int kDqWarpsM = C.head_dim % (16 * kTile.warps / 2) == 0 ? 2 : 4;
    static constexpr int kDqWarpsD = kTile.warps / kDqWarpsM;
    static_assert(!kSumsDq || (kQueries % kDqRows == 0 && kDqRows % (16 * kDqWarpsM) == 0));
    using TiledMmaDq =
        TiledMMA<typename Base::MmaAtom, Layout<Shape<Int<kDqWarpsM>, Int<kDqWarpsD>, _1>>,
                 Tile<Int<16 * kDqWarpsM>, Int<16 * kDqWarpsD>, _16>>;
    static_assert(!kSumsDq || C.head_dim % (16 * kDqWarpsD) == 0);
    // Accumulators of dQ that a thread has.
    static constexpr int kDqPerThread = kDqRows * C.head_dim / Base::kThreads;
    // dS^T as stored, (N, M); the same bytes as A operand dS, (M, N). K as B operand, (d, N).
    using SmemAtomDs = typename Base::template SmemAtomOf<(kQueries < 64 ? kQueries : 64)>;
    using SmemLayoutDst = decltype(tile_to_shape(SmemAtomDs{}, Shape<Int<kKeys>, Int<kQueries>>{}));
    using SmemLayoutDs = decltype(composition(
        SmemLayoutDst{}, Layout<Shape<Int<kQueries>, Int<kKeys>>, Stride<Int<kKeys>, _1>>{}));
    using SmemLayoutMt = decltype(composition(
        typename Base::SmemLayoutM{},
        Layout<Shape<Int<C.head_dim>, Int<kTile.rows>>, Stride<Int<kTile.rows>, _1>>{}));

    struct Tiles {
        // Q and dO, or K and V. The gradients reuse the first one's bytes.
        alignas(128) cute::array<Element, cosize_v<typename Base::SmemLayoutM>> own[kOwned];
        // step_x: K or Q. step_y: V or dO.
        alignas(128) cute::array<Element, cosize_v<typename Base::SmemLayoutN>> step_x[kStages];
        alignas(128) cute::array<Element, cosize_v<typename Base::SmemLayoutN>> step_y[kStages];
    };
    struct TilesAndStats : Tiles {
        alignas(128) float2 stats[kStages][kTile.step];
    };
    struct TilesStatsAndDs : TilesAndStats {
        alignas(128) cute::array<Element, kKeys * kQueries> ds;  // transposed
    };
    struct TilesStatsDsAndP : TilesStatsAndDs {
        alignas(128) cute::array<Element, kKeys * kQueries> p;  // transposed
    };
    using SharedStorage = std::conditional_t<
        kOwnsQueries, Tiles,
        std::conditional_t<!kSumsDq, TilesAndStats,
                           std::conditional_t<kSharesP, TilesStatsDsAndP, TilesStatsAndDs>>>;
    static constexpr int kSmemBytes = sizeof(SharedStorage);
    // For the kernel that rounds dQ, which stores rows through shared memory.
    using SmemLayoutDq =
        decltype(tile_to_shape(typename Base::SmemAtom{}, Shape<Int<kDqRows>, Int<C.head_dim>>{}));
    static constexpr int kDqSmemBytes = cosize_v<SmemLayoutDq> * static_cast<int>(sizeof(Element));
};

}  // namespace flash
