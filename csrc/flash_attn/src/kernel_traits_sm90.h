// Turns a configuration into the types of an sm90-class kernel: MMA, layouts, mbarriers.
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
    static constexpr int kThreads = 128 + kMmaThreads;  // warpgroup 0 is the producer
    static constexpr int kMinCtas = C.min_ctas;
    // Registers of a thread at launch: ptxas gives it what the launch bounds allow, in steps of 8,
    // but no more than the kernel's largest setmaxnreg. setmaxnreg redistributes them: the sum over
    // a CTA's warpgroups must not exceed that at launch, or registers_raise() never returns.
    static constexpr int kMaxRegisters = 240;
    static constexpr int kLaunchRegisters =
        cute::min(65536 / (kThreads * kMinCtas) / 8 * 8, kMaxRegisters);
    // One consumer in at most two CTAs an SM cannot use all registers that it could get.
    static constexpr bool kFewMma = kMmaWarpgroups == 1 && kMinCtas <= 2;
    static constexpr bool kPlans =  // CtaPlan::kOfCaches
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

    // Whether CTAs steal work in a dense batch: under a mask, where tiles differ in length.
    // Otherwise CTA i takes every gridDim.x-th tile. With a plan CTAs steal work, too.
    static constexpr bool kWorkStealing = C.mask != MaskKind::none;

    // Each warpgroup owns 64 query rows, and a row's scores stay within four lanes. Q K^T takes Q's
    // first kQRegSteps k16 steps from registers and the others from shared memory. From there wgmma
    // reads Q again for every key block, as many bytes as 64 keys of K.
    using WarpgroupLayout = Layout<Shape<Int<kMmaWarpgroups>, _1, _1>>;
    static constexpr int kQSteps = kHeadDim / 16;
    static constexpr int kQRegSteps = C.q_in_regs;
    using TiledMmaQK =
        TiledMMA<MMA_Atom<sm90::MmaSS<Element, kTileN, sm90::GMMA::Major::K>>, WarpgroupLayout>;
    using TiledMmaQregK =
        TiledMMA<MMA_Atom<sm90::MmaRS<Element, kTileN, sm90::GMMA::Major::K>>, WarpgroupLayout>;
    using TiledMmaPV =
        TiledMMA<MMA_Atom<sm90::MmaRS<Element, kHeadDim, sm90::GMMA::Major::MN>>, WarpgroupLayout>;

    // A tile lies in pages of 64 columns (128 bytes, all banks) where the head dimension allows,
    // else of 32. A page has all rows of the tile: one TMA box, swizzled as wgmma reads it.
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

    // Slots of published tiles. Consumers hold one to the end of the tile's epilogue, warps that
    // load pages until they have loaded all of the tile. With tiles of one block the producer is
    // kStages tiles ahead of the consumers; with one more slot, and the one in use, it never waits.
    static constexpr int kTileSlots = 2 * kStages;

    // A phase of a *_full barrier completes when the buffer's bytes have landed, one of *_empty
    // when all its readers have arrived.
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
    // An SM has 228 KB of shared memory and reserves 1 KB of it for each CTA.
    static_assert(kMinCtas * (kSmemBytes + 1024) <= 228 * 1024);
};

}  // namespace flash
