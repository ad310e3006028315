// Turns a configuration into the types of an sm80-class kernel: MMA, shared memory layouts, copies.
#pragma once

#include <cutlass/numeric_types.h>

#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "flash.h"

namespace flash {

using namespace cute;

// What all sm80-class kernels share. A CTA owns kTileM_ rows; each main loop step visits kTileN_
// rows of the other side. The warps form a grid of kWarpsM x kWarpsN: kWarpsM divide the former,
// kWarpsN the latter.
template <DType kType, int kHeadDim_, int kTileM_, int kTileN_, int kWarps, int kWarpsN = 1>
struct TileTraitsSm80 {
    static constexpr int kWarpsM = kWarps / kWarpsN;
    static_assert(kHeadDim_ % 32 == 0 && kHeadDim_ <= 256);
    static_assert(kTileM_ % (16 * kWarpsM) == 0, "each warp owns whole 16-row MMA tiles");
    static_assert(kTileN_ % (16 * kWarpsN) == 0, "P's fragments are k16 steps of the second GEMM");

    using Element = std::conditional_t<kType == DType::fp16, cutlass::half_t, cutlass::bfloat16_t>;

    static constexpr int kTileM = kTileM_;
    static constexpr int kTileN = kTileN_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kThreads = 32 * kWarps;

    using MmaAtom = std::conditional_t<kType == DType::fp16, MMA_Atom<SM80_16x8x16_F32F16F16F32_TN>,
                                       MMA_Atom<SM80_16x8x16_F32BF16BF16F32_TN>>;
    // With kWarpsN = 1 warps are stacked along M: a row's scores stay within one warp, so the
    // softmax needs no exchange between warps. N = 16 a warp lets one ldmatrix.x4 feed two MMAs.
    using TiledMma = TiledMMA<
        MmaAtom, Layout<Shape<Int<kWarpsM>, Int<kWarpsN>, _1>>,
        Tile<Int<16 * kWarpsM>, Layout<Shape<_8, Int<kWarpsN>, _2>, Stride<_1, _16, _8>>, _16>>;

    // Rows of 64 elements (128 bytes, all banks) where the head dimension allows, else of 32. The
    // XOR swizzle moves 16-byte chunks so that the 8 rows an ldmatrix reads lie in distinct banks.
    static constexpr int kSmemRow = kHeadDim % 64 == 0 ? 64 : 32;
    template <int kRow>
    using SmemAtomOf = decltype(composition(Swizzle<(kRow == 64 ? 3 : 2), 3, 3>{},
                                            Layout<Shape<_8, Int<kRow>>, Stride<Int<kRow>, _1>>{}));
    using SmemAtom = SmemAtomOf<kSmemRow>;
    using SmemLayoutM = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kTileM>, Int<kHeadDim>>{}));
    using SmemLayoutN = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kTileN>, Int<kHeadDim>>{}));
    // SmemLayoutN as the B operand of P V, (d, N): the same bytes, read by transposing ldmatrix.
    using SmemLayoutNt = decltype(composition(
        SmemLayoutN{}, Layout<Shape<Int<kHeadDim>, Int<kTileN>>, Stride<Int<kTileN>, _1>>{}));

    using SmemCopyAtom = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
    using SmemCopyAtomTransposed = Copy_Atom<SM75_U16x8_LDSM_T, Element>;
    using SmemCopyAtomO = Copy_Atom<AutoVectorizingCopyWithAssumedAlignment<32>, Element>;

    // 16 bytes a thread; a smem row's threads are neighbours, so a warp reads whole 128-byte
    // (64-byte) segments and its shared memory writes hit all banks once.
    static constexpr int kGmemVec = 16 / sizeof(Element);
    static constexpr int kThreadsPerRow = kSmemRow / kGmemVec;
    static constexpr int kRowsPerCopy = kThreads / kThreadsPerRow;
    static_assert(kTileM % kRowsPerCopy == 0 && kTileN % kRowsPerCopy == 0,
                  "a tile must be whole passes of the global memory copy");
    template <class Atom>
    using GmemCopy = decltype(make_tiled_copy(
        Copy_Atom<Atom, Element>{},
        Layout<Shape<Int<kRowsPerCopy>, Int<kThreadsPerRow>>, Stride<Int<kThreadsPerRow>, _1>>{},
        Layout<Shape<_1, Int<kGmemVec>>>{}));
    // cp.async past L1; a false predicate writes zeros and reads nothing.
    using GmemCopyLoad = GmemCopy<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>>;
    using GmemCopyStore = GmemCopy<UniversalCopy<uint128_t>>;

    // Row and column, within a tile, of the first element that a thread copies in pass (r, c).
    CUTE_HOST_DEVICE static constexpr int gmem_row(int thread, int r) {
        return thread / kThreadsPerRow + r * kRowsPerCopy;
    }
    CUTE_HOST_DEVICE static constexpr int gmem_col(int thread, int c) {
        return thread % kThreadsPerRow * kGmemVec + c * kSmemRow;
    }

    // Row and column, within an accumulator tile, of element (i, j) of its (rows, columns) view.
    CUTE_HOST_DEVICE static constexpr int acc_row(int thread, int i) {
        return thread / 32 % kWarpsM * 16 + thread % 32 / 4 + i % 2 * 8 + i / 2 * (16 * kWarpsM);
    }
    CUTE_HOST_DEVICE static constexpr int acc_col(int thread, int j) {
        return thread / (32 * kWarpsM) * 16 + thread % 4 * 2 + j % 2 + j / 2 % 2 * 8 +
               j / 4 * (16 * kWarpsN);
    }
};

template <FwdConfig C>
struct KernelTraitsSm80 : TileTraitsSm80<C.dtype, C.head_dim, C.tile_m, C.tile_n, C.warps> {
    static_assert(C.arch == 80);
    static_assert(C.stages == 1 || C.stages == 2);

    using Base = TileTraitsSm80<C.dtype, C.head_dim, C.tile_m, C.tile_n, C.warps>;
    using typename Base::Element;
    using SmemLayoutQ = typename Base::SmemLayoutM;
    using SmemLayoutKV = typename Base::SmemLayoutN;
    using SmemLayoutVt = typename Base::SmemLayoutNt;

    static constexpr FwdConfig kConfig = C;
    static constexpr int kStages = C.stages;
    static constexpr bool kQInRegs = C.q_in_regs > 0;

    struct SharedStorage {
        // O reuses Q's bytes: a tile is stored after its last read of Q.
        alignas(128) cute::array<Element, cosize_v<SmemLayoutQ>> q_or_o;
        alignas(128) cute::array<Element, cosize_v<SmemLayoutKV>> k[kStages];
        alignas(128) cute::array<Element, cosize_v<SmemLayoutKV>> v[kStages];
    };
    static constexpr int kSmemBytes = sizeof(SharedStorage);
};

}  // namespace flash
