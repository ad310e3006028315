// From a configuration to the types of the sm90 class's backward kernel.
#pragma once

#include <arch_sm90.h>
#include <cutlass/numeric_types.h>

#include <cstddef>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "flash.h"
#include "mma_traits_sm90.h"
#include "work_tile.h"

namespace flash {

using namespace cute;

// kStores, for a dense batch without a window: the first tile of keys that visits a block stores
// its dQ (FirstSumsSm90), and the others add theirs, in an order that writer_dq_sm90.h or
// order_dq_sm90.h keeps. Without kStores all add theirs to zeros. Kernels of ragged batches and of
// windows do the one or the other at run time.
template <BwdConfig C, bool kStores = false>
struct KernelTraitsBwdSm90 {
    static_assert(C.arch == 90);
    // With kWide a warpgroup's registers hold dK or dV of 64 keys, not both:
    // mainloop_bwd_wide_sm90.h.
    static constexpr bool kWide = C.head_dim > 128;
    static_assert(C.dkv.rows == (kWide ? 64 : 128) && C.dkv.warps == 8);
    static_assert(C.dkv.step == 64 || (C.dkv.step == 128 && !kWide));
    static_assert(C.dkv.stages == 2 && C.dkv.min_ctas == 1);

    using Element =
        std::conditional_t<C.dtype == DType::fp16, cutlass::half_t, cutlass::bfloat16_t>;

    static constexpr BwdConfig kConfig = C;
    static constexpr MaskKind kMask = C.mask;
    static constexpr bool kVarlen = C.varlen;
    // With several of these options registers do not suffice for all that saves time elsewhere:
    // with owned heads, shared tiles, keys in registers and ascending tiles 8 to 516 bytes spill.
    static constexpr bool kSeveralOptions = C.softcap + C.alibi + C.dropout > 1;
    static constexpr bool kFewRegisters = C.dropout || kSeveralOptions;
    static constexpr int kTileN = C.dkv.rows;  // keys of a CTA
    // CTAs of a cluster. Two share a tile of keys and send each other dS: then each adds half of
    // dQ's columns to the sums, over all keys of the tile.
    static constexpr int kCluster = kWide ? 2 : 1;
    static constexpr int kTileKeys = kCluster * kTileN;
    static constexpr int kTileM = C.dkv.step;  // queries of a step
    static constexpr int kHeadDim = C.head_dim;
    static constexpr int kDqAccumColumns = kHeadDim;
    static constexpr int kStages = C.dkv.stages;
    static constexpr int kDoutStages = C.head_dim > 192 ? 1 : kStages;
    static constexpr int kWarpgroups = 2;
    static constexpr int kMmaThreads = 128 * kWarpgroups;
    static constexpr int kThreads = 128 + kMmaThreads;  // warpgroup 0 loads
    // setmaxnreg: the three warpgroups together have the 3 * 168 registers of the launch. With 24
    // registers producers spill at d = 192.
    static constexpr int kLoadRegisters = kWide ? 40 : 24;
    static constexpr int kMmaRegisters = (3 * 168 - kLoadRegisters) / 2;

    // Whether CTAs may own heads: TileSchedulerBwdSm90::owns_heads().
    static constexpr bool kMayOwnHeads = !kWide && !C.varlen && !kStores && !kFewRegisters;

    // Whether short tiles may begin at the diagonal: StepBwd.
    static constexpr bool kMayAscend = C.mask == MaskKind::causal && !(kWide && kSeveralOptions);

    static constexpr bool kMayStoreFirst = C.mask != MaskKind::local && !C.varlen;
    static constexpr bool kStoresFirst = kStores || C.mask == MaskKind::local || C.varlen;
    // Workers steal work under a mask and in a ragged batch, as tiles differ in length, and where
    // tiles wait for others, which then must be drawn before them. Only with work stealing can
    // tiles keep an order (TileSchedulerBwdSm90::keeps_order()).
    static constexpr bool kSteals = C.mask != MaskKind::none || C.varlen || kStores;
    // Whether CTAs may share the tiles of a last wave that is not full (SharedTilesSm90), which
    // takes tiles of one length.
    static constexpr bool kMayShare = !kSteals && !kSeveralOptions;
    static_assert(kMayStoreFirst || !kStores);
    static constexpr int kDqSlots = 2;

    // Columns of a page in shared memory: 64 (128 bytes) where these divide the columns, else 32,
    // as in the forward. Above d = 128 half of the columns are whole pages, too, as a CTA computes
    // half of dQ's columns.
    static constexpr int kSmemRow = (kWide ? kHeadDim / 2 : kHeadDim) % 64 == 0 ? 64 : 32;
    static constexpr int kPages = kHeadDim / kSmemRow;

    // S^T = K Q^T and dP^T = V dO^T, each warpgroup for 64 keys: its accumulators are A operands of
    // its dV += P^T dO and dK += dS^T Q. Above d = 128 both warpgroups have the same keys, and each
    // has one of the two products.
    using WarpgroupLayout =
        std::conditional_t<kWide, Layout<Shape<_1, _1, _1>>, Layout<Shape<_2, _1, _1>>>;
    using TiledMmaS =
        TiledMMA<MMA_Atom<sm90::MmaSS<Element, kTileM, sm90::GMMA::Major::K>>, WarpgroupLayout>;
    using TiledMmaSreg =  // with A in registers: own_keys_sm90.h
        TiledMMA<MMA_Atom<sm90::MmaRS<Element, kTileM, sm90::GMMA::Major::K>>, WarpgroupLayout>;
    using TiledMmaDkv =
        TiledMMA<MMA_Atom<sm90::MmaRS<Element, kHeadDim, sm90::GMMA::Major::MN>>, WarpgroupLayout>;
    // The first thread of a warpgroup in these three TiledMMAs.
    CUTE_HOST_DEVICE static constexpr int first_thread(int warpgroup) {
        return kWide ? 0 : warpgroup * 128;
    }
    // The k16 steps of K and of V that a warpgroup keeps in registers over a tile
    // (own_keys_sm90.h): as many as pay, without spills (docs/tried_sm90.md).
    static constexpr int kKeySteps = kFewRegisters     ? 0
                                     : kHeadDim == 192 ? 12
                                     : kHeadDim == 96  ? 4
                                     : kHeadDim <= 64  ? 2
                                                       : 0;
    static constexpr int kValueSteps = kFewRegisters     ? 0
                                       : kHeadDim == 192 ? 8
                                       : kHeadDim == 96  ? 4
                                       : kHeadDim == 32  ? 2
                                                         : 0;
    // dQ = dS K, a sum over all keys of the tile. Each warpgroup, above d = 128 each CTA, computes
    // 64 of the 128 queries of a step or, where a step has only 64, half of the columns, in whole
    // pages of K: at d = 96 the first warpgroup two of the three pages, the other one the third and
    // a page of zeros behind the tensor.
    static constexpr bool kDqByRows = kTileM == 128;
    static constexpr int kDqColumns =
        kDqByRows ? kHeadDim : ceil_div(kHeadDim / 2, kSmemRow) * kSmemRow;
    static constexpr int kColumnsK = kDqByRows ? kHeadDim : 2 * kDqColumns;  // in shared memory
    using DqTile = Shape<Int<kDqColumns>, Int<kTileN>>;                      // of K^T (d, N)
    template <int kColumns>
    using TiledMmaDqOf = TiledMMA<
        MMA_Atom<sm90::MmaSS<Element, kColumns, sm90::GMMA::Major::MN>>,
        std::conditional_t<kDqByRows, Layout<Shape<_2, _1, _1>>, Layout<Shape<_1, _1, _1>>>>;
    using TiledMmaDq = TiledMmaDqOf<kDqColumns>;

    // The columns of dQ of a warpgroup, above d = 128 of a CTA, without the zeros behind the
    // tensor.
    CUTE_HOST_DEVICE static constexpr int dq_columns(int warpgroup) {
        if constexpr (kColumnsK == kHeadDim) {
            return kDqColumns;
        }
        return warpgroup == 0 ? kDqColumns : kHeadDim - kDqColumns;
    }
    // Where the sums of dQ of a warp, which are of 16 rows, begin among those of a step. warp:
    // above d = 128 counted as if each CTA had one warpgroup; its two warpgroups divide that one's
    // columns.
    CUTE_HOST_DEVICE static constexpr int dq_begin(int warp) {
        if constexpr (kColumnsK == kHeadDim) {
            return warp * 16 * kDqColumns;
        }
        return warp / 4 * 64 * kDqColumns + warp % 4 * 16 * dq_columns(warp / 4);
    }

    using SmemAtom = std::conditional_t<kSmemRow == 64, sm90::GMMA::Layout_K_SW128_Atom<Element>,
                                        sm90::GMMA::Layout_K_SW64_Atom<Element>>;
    using SmemAtomT = std::conditional_t<kSmemRow == 64, sm90::GMMA::Layout_MN_SW128_Atom<Element>,
                                         sm90::GMMA::Layout_MN_SW64_Atom<Element>>;
    using SmemLayoutQ = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kTileM>, Int<kHeadDim>>{}));
    using SmemLayoutK = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kTileN>, Int<kHeadDim>>{}));
    // Q or dO, and K, over the same bytes as B operands of the products that sum over rows,
    // (d, rows).
    using SmemLayoutQt =
        decltype(tile_to_shape(SmemAtomT{}, Shape<Int<kHeadDim>, Int<kTileM>>{}, Step<_2, _1>{}));
    using SmemLayoutKt =
        decltype(tile_to_shape(SmemAtomT{}, Shape<Int<kColumnsK>, Int<kTileN>>{}, Step<_2, _1>{}));
    // Above d = 128 the two warpgroups divide the columns of dQ of their CTA. The first one has
    // those in front: 64 of 128 at d = 256, and at d = 192 32 of 96, which are three pages.
    template <int kWarpgroup>
    struct DqPart {
        static constexpr int kFirst = kDqColumns / 64 * 32;
        static constexpr int kBegin = kWarpgroup == 0 ? 0 : kFirst;
        static constexpr int kColumns = kWarpgroup == 0 ? kFirst : kDqColumns - kFirst;
        static constexpr int kOffset = kBegin * kTileN;  // of its pages of K
        using TiledMma = TiledMmaDqOf<kColumns>;
        using SmemLayoutKt = decltype(tile_to_shape(
            SmemAtomT{}, Shape<Int<kColumns>, Int<kTileN>>{}, Step<_2, _1>{}));
        static_assert(!kWide || (kBegin % kSmemRow == 0 && kColumns % kSmemRow == 0));
    };
    // The other CTA's keys, of which this CTA needs the columns that it computes of dQ.
    using SmemLayoutOtherKt =
        decltype(tile_to_shape(SmemAtomT{}, Shape<Int<kDqColumns>, Int<kTileN>>{}, Step<_2, _1>{}));
    // dS, A operand of dQ: pages of 64 keys.
    using SmemLayoutDs = decltype(tile_to_shape(sm90::GMMA::Layout_K_SW128_Atom<Element>{},
                                                Shape<Int<kTileM>, Int<kTileN>>{}));

    // Row and column, within a tile, of element (i, j) of an accumulator's (rows, columns) view.
    CUTE_HOST_DEVICE static constexpr int acc_row(int thread, int i) {
        return thread / 32 * 16 + thread % 32 / 4 + i * 8;
    }
    CUTE_HOST_DEVICE static constexpr int acc_col(int thread, int j) {
        return thread % 4 * 2 + j % 2 + j / 2 * 8;
    }
    // How many of a thread's columns are less than `distance` columns behind its first one.
    CUTE_HOST_DEVICE static constexpr int cols_before(int distance) {
        int const inside = cute::max(distance, 0);
        return inside / 8 * 2 + cute::min(inside % 8, 2);
    }

    // Key and query, within a tile, of element (i, j) of S^T's (keys, queries) view.
    CUTE_HOST_DEVICE static constexpr int key_of(int thread, int i) {
        return acc_row(kWide ? thread % 128 : thread, i);
    }
    CUTE_HOST_DEVICE static constexpr int query_of(int thread, int j) { return acc_col(thread, j); }

    static constexpr int kTileSlots = 2;
    // A buffer of dS is written again two steps later, without an empty barrier: a warpgroup
    // arrives at ds_full of step i + 1 when its dQ of step i is complete, and none writes dS of
    // step i + 2 before it has waited for ds_full of step i + 1. Above d = 128 only the second
    // warpgroup writes dS: that of step i + 2 with P of that step, which the first warpgroup hands
    // over when its dQ of step i is complete, and after ds_sent, which says that the other CTA has
    // read its copy.
    static constexpr int kDsStages = 2;

    // What a CTA gets from the other CTA of its cluster.
    struct OfOther {
        alignas(1024) cute::array<Element, cosize_v<SmemLayoutOtherKt>> k;
        alignas(1024) cute::array<Element, cosize_v<SmemLayoutDs>> ds[kDsStages];
        sm90::Barrier k_full, ds_full[kDsStages];
        sm90::Barrier ds_sent[kDsStages];  // the other CTA has read this one's dS
        // The next tile's number, which the first CTA draws and sends to the second one.
        sm90::Barrier next_full[kTileSlots], next_empty[kTileSlots];
        uint32_t next[kTileSlots];
    };
    struct Nothing {};

    // A buffer is full when its bytes have landed, and empty when all its readers have arrived.
    struct SharedStorage {
        alignas(1024) cute::array<Element, cosize_v<SmemLayoutKt>> k;
        alignas(1024) cute::array<Element, cosize_v<SmemLayoutK>> v;
        alignas(1024) cute::array<Element, cosize_v<SmemLayoutQ>> q[kStages];
        alignas(1024) cute::array<Element, cosize_v<SmemLayoutQ>> dout[kDoutStages];
        alignas(1024) cute::array<Element, cosize_v<SmemLayoutDs>> ds[kDsStages];
        alignas(1024) [[no_unique_address]] std::conditional_t<kWide, OfOther, Nothing> other;
        // P^T, in the order of a warpgroup's accumulators, for the other warpgroup above d = 128.
        // Arrays of 0 elements take no bytes, here and below.
        alignas(128) [[no_unique_address]] cute::array<float, kWide ? kTileM * kTileN : 0> p;
        // dQ of a step, in the order of each warp's accumulators, for bulk reductions. Reductions
        // by the consumers' threads would hold their registers, and be in flight at the fence of
        // the next dS, which waits for them. Above d = 128 there is no room for it.
        alignas(128) [[no_unique_address]] cute::array<float, kWide ? 0 : kTileM * kHeadDim> dq;
        alignas(128) float2 stats[kStages][kTileM];  // of Q's rows: LSE * log2(e) and D
        sm90::Barrier k_full, k_empty, v_full, v_empty;
        sm90::Barrier q_full[kStages], q_empty[kStages];  // and for the statistics
        sm90::Barrier dout_full[kDoutStages], dout_empty[kDoutStages];
        sm90::Barrier ds_full[kDsStages];
        sm90::Barrier dq_full, dq_empty;
        sm90::Barrier dq_turn[kDqSlots], dq_stored[kDqSlots];  // above d = 128
        sm90::Barrier tile_full[kTileSlots], tile_empty[kTileSlots];
        WorkTile tile[kTileSlots];
        // With kMayShare: from tile shared_begin on this worker computes these pieces instead of
        // tiles.
        int shared_begin, next_piece;
        SharedPiece pieces[3];
        [[no_unique_address]] cute::array<sm90::Barrier, kWide ? 1 : 0> p_full, p_empty;
    };
    static constexpr int kSmemBytes = sizeof(SharedStorage);
    // nvcc pads in front of a member without bytes up to its alignment; the host's compiler, whose
    // sizeof is launched, does not. So nothing may need padding here.
    static_assert(offsetof(SharedStorage, stats) ==
                  (kWide ? offsetof(SharedStorage, p) + sizeof(SharedStorage::p)
                         : offsetof(SharedStorage, ds) + sizeof(SharedStorage::ds) +
                               sizeof(SharedStorage::dq)));
};

}  // namespace flash
