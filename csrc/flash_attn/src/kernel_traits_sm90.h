// From a configuration to the types of an sm90-class kernel: MMA, shared memory layouts, barriers.
#pragma once

#include <arch_sm90.h>
#include <cutlass/numeric_types.h>

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "flash.h"
#include "mma_traits_sm90.h"
#include "work_tile.h"

namespace flash {

using namespace cute;

template <FwdConfig C>
struct KernelTraitsSm90 {
    static_assert(C.arch == 90);
    static_assert(C.head_dim % 32 == 0 && C.head_dim <= 256);
    static_assert(C.tile_m == 16 * C.warps && C.warps % 4 == 0, "64 rows a warpgroup");
    static_assert(C.warps <= 12, "one to three MMA warpgroups");
    static_assert(C.tile_n % 16 == 0, "P's fragments are k16 steps of the second GEMM");
    static_assert(C.q_in_regs >= 0 && C.q_in_regs <= C.head_dim / 16, "k16 steps of the first");
    static_assert(C.stages >= 2 && C.min_ctas >= 1);

    using Element =
        std::conditional_t<C.dtype == DType::fp16, cutlass::half_t, cutlass::bfloat16_t>;

    static constexpr FwdConfig kConfig = C;
    static constexpr int kTileM = C.tile_m;
    static constexpr int kTileN = C.tile_n;
    static constexpr int kHeadDim = C.head_dim;
    static constexpr int kStages = C.stages;
    static constexpr int kMmaWarpgroups = C.warps / 4;
    static constexpr int kMmaThreads = 32 * C.warps;
    static constexpr int kThreads = 128 + kMmaThreads;  // warpgroup 0 loads
    static constexpr int kMinCtas = C.min_ctas;
    // Registers of a thread at launch: ptxas gives it what the launch bounds allow, in steps of 8,
    // but no more than its largest setmaxnreg. They are dealt anew: the sum over a CTA's warpgroups
    // must not exceed that of the launch, or the raise never returns.
    static constexpr int kMaxRegisters = 240;
    static constexpr int kLaunchRegisters =
        cute::min(65536 / (kThreads * kMinCtas) / 8 * 8, kMaxRegisters);
    // One consumer in at most two CTAs cannot use all registers that it could get.
    static constexpr bool kFewMma = kMmaWarpgroups == 1 && kMinCtas <= 2;
    static constexpr bool kPlans =  // CtaPlan
        kFewMma || (kStages == 4 && kMmaWarpgroups == 2 && kMinCtas == 1);
    static constexpr int kLoadRegisters = kFewMma && kMinCtas == 1 ? 96
                                          : C.paged && kPlans      ? 72
                                          : C.paged                ? 56
                                          : kMmaWarpgroups == 3    ? 32
                                          : kPlans                 ? 40
                                                                   : 24;
    static constexpr int kMmaRegisters = cute::min(
        (kLaunchRegisters * (1 + kMmaWarpgroups) - kLoadRegisters) / kMmaWarpgroups / 8 * 8,
        kMaxRegisters);
    static_assert(kLoadRegisters <= kLaunchRegisters && kLaunchRegisters <= kMmaRegisters);

    // Under a mask the tiles of a dense batch differ in length, and CTAs steal work; otherwise CTA
    // i takes every gridDim.x-th tile. With a plan they steal, too.
    static constexpr bool kWorkStealing = C.mask != MaskKind::none;

    // Each warpgroup owns 64 query rows: a row's scores stay within four lanes. Q K^T takes Q's
    // first kQRegSteps k16 steps from registers and the others from shared memory, of which wgmma
    // otherwise reads Q anew for every key block, as many bytes as 64 keys of K.
    using WarpgroupLayout = Layout<Shape<Int<kMmaWarpgroups>, _1, _1>>;
    static constexpr int kQSteps = kHeadDim / 16;
    static constexpr int kQRegSteps = C.q_in_regs;
    using TiledMmaQK =
        TiledMMA<MMA_Atom<sm90::MmaSS<Element, kTileN, sm90::GMMA::Major::K>>, WarpgroupLayout>;
    using TiledMmaQregK =
        TiledMMA<MMA_Atom<sm90::MmaRS<Element, kTileN, sm90::GMMA::Major::K>>, WarpgroupLayout>;
    using TiledMmaPV =
        TiledMMA<MMA_Atom<sm90::MmaRS<Element, kHeadDim, sm90::GMMA::Major::MN>>, WarpgroupLayout>;

    // Pages of 64 columns (128 bytes, all banks) where the head dimension allows, else of 32, each
    // page all rows of the tile: what one TMA box brings, swizzled as wgmma reads it.
    static constexpr int kSmemRow = kHeadDim % 64 == 0 ? 64 : 32;
    static constexpr int kPages = kHeadDim / kSmemRow;
    using SmemAtom = std::conditional_t<kSmemRow == 64, sm90::GMMA::Layout_K_SW128_Atom<Element>,
                                        sm90::GMMA::Layout_K_SW64_Atom<Element>>;
    using SmemAtomVt = std::conditional_t<kSmemRow == 64, sm90::GMMA::Layout_MN_SW128_Atom<Element>,
                                          sm90::GMMA::Layout_MN_SW64_Atom<Element>>;
    using SmemLayoutQ = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kTileM>, Int<kHeadDim>>{}));
    using SmemLayoutKV = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kTileN>, Int<kHeadDim>>{}));
    // V seen as B operand of P V, (d, N): the same bytes.
    using SmemLayoutVt =
        decltype(tile_to_shape(SmemAtomVt{}, Shape<Int<kHeadDim>, Int<kTileN>>{}, Step<_2, _1>{}));

    // Row and column, within a tile, of element (i, j) of an accumulator's (rows, columns) view.
    CUTE_HOST_DEVICE static constexpr int acc_row(int thread, int i) {
        return thread / 32 * 16 + thread % 32 / 4 + i * 8;
    }
    CUTE_HOST_DEVICE static constexpr int acc_col(int thread, int j) {
        return thread % 4 * 2 + j % 2 + j / 2 * 8;
    }

    // Consumers hold a tile's description to the end of its epilogue, warps that load pages until
    // they have loaded all of the tile. The producer is ahead of consumers by as many tiles as the
    // K/V ring has stages, where tiles have one block; with a slot more than that and the one in
    // use it never waits for one.
    static constexpr int kTileSlots = 2 * kStages;

    // A buffer is full when its bytes have landed, and empty when all its readers have arrived.
    struct SharedStorage {
        alignas(1024) cute::array<Element, cosize_v<SmemLayoutQ>> q;
        alignas(1024) cute::array<Element, cosize_v<SmemLayoutKV>> k[kStages];
        alignas(1024) cute::array<Element, cosize_v<SmemLayoutKV>> v[kStages];
        sm90::Barrier q_full[kMmaWarpgroups], q_empty[kMmaWarpgroups];
        sm90::Barrier k_full[kStages], k_empty[kStages];
        sm90::Barrier v_full[kStages], v_empty[kStages];
        sm90::Barrier tile_full[kTileSlots], tile_empty[kTileSlots];
        WorkTile tile[kTileSlots];
        OutputOffset output[kTileSlots];  // of these tiles
    };
    static constexpr int kSmemBytes = sizeof(SharedStorage);
    // Of which an SM has 228 KB, and keeps 1 KB for each CTA.
    static_assert(kMinCtas * (kSmemBytes + 1024) <= 228 * 1024);
};

}  // namespace flash
