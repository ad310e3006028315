// From a configuration to the types of the sm80 class's backward kernels.
#pragma once

#include <cute/tensor.hpp>

#include "flash.h"
#include "kernel_traits.h"

namespace flash {

using namespace cute;

// What one kernel of a backward computes.
enum class BwdPass : int32_t { dq, dkv, dk, dv };

template <BwdConfig C, BwdPass kPass>
constexpr BwdTile bwd_tile() {
    return kPass == BwdPass::dq ? C.dq : C.dkv;
}

template <BwdConfig C, BwdPass kPass_>
struct KernelTraitsBwdSm80
    : TileTraitsSm80<C.dtype, C.head_dim, bwd_tile<C, kPass_>().rows, bwd_tile<C, kPass_>().step,
                     bwd_tile<C, kPass_>().warps> {
    static constexpr BwdTile kTile = bwd_tile<C, kPass_>();
    static_assert(C.arch == 80);
    static_assert(kTile.stages == 1 || kTile.stages == 2);

    using Base = TileTraitsSm80<C.dtype, C.head_dim, kTile.rows, kTile.step, kTile.warps>;
    using typename Base::Element;

    static constexpr BwdConfig kConfig = C;
    static constexpr BwdPass kPass = kPass_;
    static constexpr MaskKind kMask = C.mask;
    static constexpr int kStages = kTile.stages;
    static constexpr int kMinCtas = kTile.min_ctas;
    static constexpr bool kOwnsQueries = kPass == BwdPass::dq;
    static constexpr bool kNeedsDs = kPass != BwdPass::dv;
    static constexpr bool kNeedsDv = kPass == BwdPass::dkv || kPass == BwdPass::dv;
    static constexpr int kQueries = kOwnsQueries ? kTile.rows : kTile.step;  // of a score tile
    static constexpr int kKeys = kOwnsQueries ? kTile.step : kTile.rows;
    static_assert(kRowStatsMultiple % kQueries == 0);
    static constexpr int kOwned = kNeedsDs ? 2 : 1;  // tiles, the second for dP alone

    struct Tiles {
        // Q and dO, or K and V. The gradients reuse the first one's bytes.
        alignas(128) cute::array<Element, cosize_v<typename Base::SmemLayoutM>> own[kOwned];
        // K, or Q; V, or dO.
        alignas(128) cute::array<Element, cosize_v<typename Base::SmemLayoutN>> step_x[kStages];
        alignas(128) cute::array<Element, cosize_v<typename Base::SmemLayoutN>> step_y[kStages];
    };
    struct TilesAndStats : Tiles {
        alignas(128) float2 stats[kStages][kTile.step];
    };
    using SharedStorage = std::conditional_t<kOwnsQueries, Tiles, TilesAndStats>;
    static constexpr int kSmemBytes = sizeof(SharedStorage);
};

}  // namespace flash
