// wgmma as CuTe MMA atoms, for every N that wgmma_sm90.h lists; the issue of a whole product; and
// loads of those steps of an operand that stay in registers.
#pragma once

#include <arch_sm90.h>
#include <wgmma_sm90.h>

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

namespace flash::sm90 {

namespace GMMA = cute::SM90::GMMA;

// A (64, 16), K-major, from shared memory (SS) or registers (RS); B (N, 16) from shared memory.
template <class Element, int N, GMMA::Major kMajorB>
struct MmaSS {};
template <class Element, int N, GMMA::Major kMajorB>
struct MmaRS {};

// Called by cute::MMA_Atom::call(). C is D, the accumulator.
template <class Element, int N, GMMA::Major kMajorB, class TD, class LD, class TA, class LA,
          class TB, class LB, class TC, class LC>
CUTE_DEVICE void mma_unpack(cute::MMA_Traits<MmaSS<Element, N, kMajorB>> const &traits,
                            cute::Tensor<TD, LD> &D, cute::Tensor<TA, LA> const &A,
                            cute::Tensor<TB, LB> const &B, cute::Tensor<TC, LC> const &) {
    Wgmma<Element, N, kMajorB == GMMA::Major::MN>::ss(*reinterpret_cast<float (*)[N / 2]>(D.data()),
                                                      A(0), B(0),
                                                      traits.accumulate_ == GMMA::ScaleOut::One);
}
template <class Element, int N, GMMA::Major kMajorB, class TD, class LD, class TA, class LA,
          class TB, class LB, class TC, class LC>
CUTE_DEVICE void mma_unpack(cute::MMA_Traits<MmaRS<Element, N, kMajorB>> const &traits,
                            cute::Tensor<TD, LD> &D, cute::Tensor<TA, LA> const &A,
                            cute::Tensor<TB, LB> const &B, cute::Tensor<TC, LC> const &) {
    Wgmma<Element, N, kMajorB == GMMA::Major::MN>::rs(
        *reinterpret_cast<float (*)[N / 2]>(D.data()),
        *reinterpret_cast<uint32_t const(*)[4]>(A.data()), B(0),
        traits.accumulate_ == GMMA::ScaleOut::One);
}

// Keeps the compiler from moving reads and writes of a fragment's registers, as 32-bit words,
// across this point.
template <class Engine, class Layout>
CUTE_DEVICE void pin(cute::Tensor<Engine, Layout> &fragment) {
    cute::Tensor words = cute::recast<
        std::conditional_t<std::is_same_v<typename Engine::value_type, float>, float, uint32_t>>(
        fragment);
    CUTE_UNROLL
    for (int i = 0; i < cute::size(words); ++i) {
        pin_register(words(i));
    }
}

// Issues the k16 steps [kBegin, kEnd) of acc = A B or, with kAccumulate, of acc += A B.
template <int kBegin, int kEnd, bool kAccumulate, class TiledMma, class FragA, class FragB,
          class Acc>
CUTE_DEVICE void wgmma_steps(TiledMma mma, FragA const &tCrA, FragB const &tCrB, Acc &acc) {
    mma.accumulate_ = kAccumulate ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int k = kBegin; k < kEnd; ++k) {
        cute::Tensor tCrC = acc(cute::_, 0, 0);
        mma.call(tCrA(cute::_, 0, k), tCrB(cute::_, 0, k), tCrC);
        mma.accumulate_ = GMMA::ScaleOut::One;
    }
}

// Issues the wgmmas of steps() as one group and does not wait for it. Until wgmma_wait() has, no
// thread may touch acc, A's registers or the shared memory of either operand.
template <class Acc, class Steps>
CUTE_DEVICE void wgmma_group(Acc &acc, Steps const &steps) {
    pin(acc);
    wgmma_fence();
    steps();
    wgmma_commit();
    pin(acc);
}

// Issues acc = A B or, with kAccumulate, acc += A B as one group.
template <bool kAccumulate, class TiledMma, class FragA, class FragB, class Acc>
CUTE_DEVICE void wgmma_issue(TiledMma mma, FragA const &tCrA, FragB const &tCrB, Acc &acc) {
    constexpr int kSteps = decltype(cute::size<2>(tCrA))::value;
    static_assert(decltype(cute::size<2>(tCrB))::value == kSteps);
    wgmma_group(acc, [&] { wgmma_steps<0, kSteps, kAccumulate>(mma, tCrA, tCrB, acc); });
}

}  // namespace flash::sm90

namespace cute {

template <class Element, int N, SM90::GMMA::Major kMajorB>
struct MMA_Traits<flash::sm90::MmaSS<Element, N, kMajorB>> {
    using ValTypeD = float;
    using ValTypeA = Element;
    using ValTypeB = Element;
    using ValTypeC = float;
    using FrgTypeA = SM90::GMMA::smem_desc<SM90::GMMA::Major::K>;
    using FrgTypeB = SM90::GMMA::smem_desc<kMajorB>;
    using Shape_MNK = Shape<_64, Int<N>, _16>;
    using ThrID = Layout<_128>;
    using ALayout = SM90::GMMA::ABLayout<64, 16>;
    using BLayout = SM90::GMMA::ABLayout<N, 16>;
    using CLayout = SM90::GMMA::CLayout_64xN<N>;
    SM90::GMMA::ScaleOut accumulate_ = SM90::GMMA::ScaleOut::One;
};

template <class Element, int N, SM90::GMMA::Major kMajorB>
struct MMA_Traits<flash::sm90::MmaRS<Element, N, kMajorB>>
    : MMA_Traits<flash::sm90::MmaSS<Element, N, kMajorB>> {
    using FrgTypeA = Element;
    using ALayout = SM90::GMMA::ALayout_64x16;
};

}  // namespace cute

namespace flash::sm90 {

// Loads the first k16 steps of A, as many as the fragment has, to registers. TMA overwrites their
// buffer later, through the async proxy; an arrival alone does not order that behind generic-proxy
// loads, so this ends with a proxy fence.
template <class TiledMma, class SmemA, class FragA>
CUTE_DEVICE void load_steps(SmemA const &sA, int thread, FragA &tCrA) {
    constexpr int kSteps = decltype(cute::size<2>(tCrA))::value;
    if constexpr (kSteps > 0) {
        auto const copy_a = cute::make_tiled_copy_A(
            cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, typename FragA::value_type>{}, TiledMma{});
        auto const thr_copy = copy_a.get_slice(thread);
        cute::Tensor tCsA =
            thr_copy.partition_S(cute::as_position_independent_swizzle_tensor(sA));  // (8, 1, K/16)
        cute::Tensor tXrA = thr_copy.retile_D(tCrA);  // (8, 1, steps)
        CUTE_UNROLL
        for (int k = 0; k < kSteps; ++k) {
            cute::copy(copy_a, tCsA(cute::_, cute::_, k), tXrA(cute::_, cute::_, k));
        }
        fence_async_proxy();
        __syncwarp();
    }
}

}  // namespace flash::sm90
