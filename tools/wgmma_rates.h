// Kernels whose clocks tools/wgmma_rates.py counts: wgmma alone, and the instructions of the sm90
// class's main loop without loads, barriers of buffers and masks, all data in registers and shared
// memory. One CTA an SM; the results come back so that they can be checked.
#pragma once

#include <arch_sm90.h>

#include <algorithm>
#include <cstdint>
#include <cute/tensor.hpp>

#include "kernel_traits_sm90.h"
#include "softmax.h"
#include "utils.h"

namespace rates {

using namespace cute;
namespace sm90 = flash::sm90;

// A launch: operands row-major and without gaps, each CTA reads the same.
struct Problem {
    void const *a;    // A of each warpgroup, or Q
    void const *b;    // B, or K
    void const *v;    // loops only
    float *out;       // of CTA 0: A B^T or the attention's output
    int64_t *clocks;  // of each CTA
    int32_t ctas;
    int32_t warpgroups;
    int32_t iterations;  // at least 1
    float scale;         // of the softmax
    float scale_log2;    // scale * log2(e); were it computed here, ptxas would spill
};

template <class Engine, class Layout>
CUTE_DEVICE void fill_smem(Tensor<Engine, Layout> &&smem, void const *gmem) {
    using Element = typename Engine::value_type;
    constexpr int kColumns = decltype(size<1>(smem))::value;
    for (int i = threadIdx.x; i < size(smem); i += blockDim.x) {
        smem(i / kColumns, i % kColumns) = static_cast<Element const *>(gmem)[i];
    }
}

// From lane 0, so that the compiler knows it to be the same in all lanes: what follows from it, as
// the descriptors of A, is then computed in uniform registers.
CUTE_DEVICE int warpgroup_of_thread() {
    return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
}

// What is timed runs between two of these.
CUTE_DEVICE int64_t clock_of_all() {
    __syncthreads();
    return clock64();
}

enum class Operands { ss, rs, rs_transposed };  // A's place; B K-major, or MN-major as V is

// m64nNk16, back to back into one accumulator a warpgroup.
template <class Element_, int N, Operands kOperands>
struct Rate {
    using Element = Element_;
    // N / 2 accumulators a thread leave no room for A's registers in a third of the register file.
    static constexpr int kMaxThreads = N == 256 && kOperands != Operands::ss ? 256 : 384;
    static constexpr int kDepth = 64;
    static constexpr int kGroups = 4;  // an iteration: kGroups * kDepth / 16 wgmmas
    static constexpr bool kTransposed = kOperands == Operands::rs_transposed;
    static constexpr auto kMajorB = kTransposed ? sm90::GMMA::Major::MN : sm90::GMMA::Major::K;
    using Atom = std::conditional_t<kOperands == Operands::ss, sm90::MmaSS<Element, N, kMajorB>,
                                    sm90::MmaRS<Element, N, kMajorB>>;
    using AtomK = sm90::GMMA::Layout_K_SW128_Atom<Element>;
    using AtomB = std::conditional_t<kTransposed, sm90::GMMA::Layout_MN_SW128_Atom<Element>, AtomK>;
    using LayoutA = decltype(tile_to_shape(AtomK{}, Shape<_64, Int<kDepth>>{}));
    using LayoutB = decltype(tile_to_shape(AtomB{}, Shape<Int<N>, Int<kDepth>>{}));

    struct SharedStorage {
        alignas(1024) cute::array<Element, cosize_v<LayoutA>> a[kMaxThreads / 128];
        alignas(1024) cute::array<Element, cosize_v<LayoutB>> b;
    };

    CUTE_DEVICE static void run(Problem const &problem, SharedStorage &storage) {
        int const warpgroup = warpgroup_of_thread();
        for (int i = 0; i < problem.warpgroups; ++i) {
            fill_smem(make_tensor(make_smem_ptr(storage.a[i].data()), LayoutA{}),
                      static_cast<Element const *>(problem.a) + i * 64 * kDepth);
        }
        fill_smem(make_tensor(make_smem_ptr(storage.b.data()), LayoutB{}), problem.b);
        sm90::fence_async_proxy();
        __syncthreads();

        TiledMMA<MMA_Atom<Atom>, Layout<Shape<_1, _1, _1>>> mma;
        auto const thr_mma = mma.get_slice(threadIdx.x % 128);
        Tensor sA = make_tensor(make_smem_ptr(storage.a[warpgroup].data()), LayoutA{});
        Tensor sB = make_tensor(make_smem_ptr(storage.b.data()), LayoutB{});
        Tensor tCrA = thr_mma.make_fragment_A(thr_mma.partition_A(sA));  // (.., 1, kDepth/16)
        if constexpr (kOperands != Operands::ss) {
            copy(thr_mma.partition_A(sA), tCrA);
        }
        Tensor tCrB = thr_mma.make_fragment_B(thr_mma.partition_B(sB));  // (1, 1, kDepth/16)
        Tensor acc = partition_fragment_C(mma, Shape<_64, Int<N>>{});
        clear(acc);

        int64_t const start = clock_of_all();
        CUTE_NO_UNROLL
        for (int i = 0; i < problem.iterations; ++i) {
            CUTE_UNROLL
            for (int group = 0; group < kGroups; ++group) {
                sm90::wgmma_issue<true>(mma, tCrA, tCrB, acc);
            }
            sm90::wgmma_wait<1>();  // the next ones are issued before the last ones end
        }
        sm90::wgmma_wait<0>();
        int64_t const end = clock_of_all();
        sm90::pin(acc);
        problem.clocks[blockIdx.x] = end - start;
        if (blockIdx.x == 0) {
            Tensor out = make_tensor(make_gmem_ptr(problem.out + warpgroup * 64 * N),
                                     Layout<Shape<_64, Int<N>>, Stride<Int<N>, _1>>{});
            copy(acc, thr_mma.partition_C(out));
        }
    }
};

enum class Part {
    products,  // Q K^T and P V alone
    softmax,   // what lies between them alone
    both,      // as the main loop orders them
    turns,     // the same, and warpgroups take turns in issuing products
    eager,     // the same, and each block's maximum is sought and O rescaled
};

// The main loop's `step`, each time with the same keys: O grows by P V, the row sums with it.
template <flash::FwdConfig C, Part kPart>
struct Loop {
    static_assert(C.q_in_regs == 0, "Q is read from shared memory here");
    using Traits = flash::KernelTraitsSm90<C>;
    using Element = typename Traits::Element;
    using Softmax = flash::Softmax<2, kPart != Part::eager>;
    using LayoutQ = typename Traits::SmemLayoutQ;
    using LayoutKV = typename Traits::SmemLayoutKV;
    static constexpr int kMaxThreads = Traits::kMmaThreads;
    static constexpr bool kProducts = kPart != Part::softmax;
    static constexpr bool kSoftmax = kPart != Part::products;
    static constexpr bool kTurns = kPart == Part::turns || kPart == Part::eager;
    template <int kColumns>
    using AccLayout = Layout<Shape<Shape<_2, _2>, _1, Int<kColumns / 8>>>;

    struct SharedStorage {
        alignas(1024) cute::array<Element, cosize_v<LayoutQ>> q;
        alignas(1024) cute::array<Element, cosize_v<LayoutKV>> k;
        alignas(1024) cute::array<Element, cosize_v<LayoutKV>> v;
    };

    // Named barrier 0 is __syncthreads().
    CUTE_DEVICE static void wait_turn(int warpgroup) {
        if constexpr (kTurns) {
            sm90::named_barrier_sync(1 + warpgroup, 256);
        }
    }
    CUTE_DEVICE static void pass_turn(int warpgroup) {
        if constexpr (kTurns) {
            int const next = warpgroup + 1 == Traits::kMmaWarpgroups ? 0 : warpgroup + 1;
            sm90::named_barrier_arrive(1 + next, 256);
        }
    }

    CUTE_DEVICE static void run(Problem const &problem, SharedStorage &storage) {
        int const warpgroup = warpgroup_of_thread();
        Tensor sQ = make_tensor(make_smem_ptr(storage.q.data()), LayoutQ{});   // (M, d)
        Tensor sK = make_tensor(make_smem_ptr(storage.k.data()), LayoutKV{});  // (N, d)
        Tensor sVt = make_tensor(make_smem_ptr(storage.v.data()),
                                 typename Traits::SmemLayoutVt{});  // (d, N)
        fill_smem(make_tensor(make_smem_ptr(storage.q.data()), LayoutQ{}), problem.a);
        fill_smem(make_tensor(make_smem_ptr(storage.k.data()), LayoutKV{}), problem.b);
        fill_smem(make_tensor(make_smem_ptr(storage.v.data()), LayoutKV{}), problem.v);
        sm90::fence_async_proxy();
        __syncthreads();

        typename Traits::TiledMmaQK mma_qk;
        typename Traits::TiledMmaPV mma_pv;
        auto const thr_qk = mma_qk.get_slice(warpgroup * 128);
        auto const thr_pv = mma_pv.get_slice(warpgroup * 128);
        Tensor tSrQ = thr_qk.make_fragment_A(thr_qk.partition_A(sQ));   // (1, 1, d/16)
        Tensor tSrK = thr_qk.make_fragment_B(thr_qk.partition_B(sK));   // (1, 1, d/16)
        Tensor tOrV = thr_pv.make_fragment_B(thr_pv.partition_B(sVt));  // (1, 1, N/16)
        Tensor rS = partition_fragment_C(mma_qk, Shape<Int<C.tile_m>, Int<C.tile_n>>{});
        Tensor rO = partition_fragment_C(mma_pv, Shape<Int<C.tile_m>, Int<C.head_dim>>{});
        Tensor tSrS = make_tensor(rS.data(), AccLayout<C.tile_n>{});    // (4, 1, N/8)
        Tensor tOrO = make_tensor(rO.data(), AccLayout<C.head_dim>{});  // (4, 1, d/8)
        Tensor tOrP = make_tensor<Element>(
            Layout<Shape<Shape<_2, _2, _2>, _1, Int<C.tile_n / 16>>>{});  // (8, 1, N/16)
        Softmax softmax(problem.scale, problem.scale_log2);

        sm90::wgmma_issue<false>(mma_qk, tSrQ, tSrK, rS);
        sm90::wgmma_wait<0>();
        sm90::pin(rS);
        softmax.start(tSrS, tOrP);
        clear(rO);

        int64_t const start = clock_of_all();
        if (warpgroup == Traits::kMmaWarpgroups - 1) {
            pass_turn(warpgroup);
        }
        // At least one iteration: for none ptxas keeps the first S beside the loop's, and spills.
        int i = 0;
        CUTE_NO_UNROLL
        do {
            if constexpr (kProducts) {
                wait_turn(warpgroup);
                sm90::wgmma_issue<false>(mma_qk, tSrQ, tSrK, rS);
                sm90::wgmma_issue<true>(mma_pv, tOrP, tOrV, rO);
                pass_turn(warpgroup);
                sm90::wgmma_wait<1>();
            }
            sm90::pin(rS);
            if constexpr (kProducts) {
                sm90::wgmma_wait<0>();
                sm90::pin(rO);
            }
            if constexpr (kSoftmax) {
                softmax.take_block(tSrS, tOrP, tOrO, false);
                if constexpr (!kProducts) sm90::pin(tOrP);  // nothing else reads it
            }
        } while (++i < problem.iterations);
        int64_t const end = clock_of_all();
        problem.clocks[blockIdx.x] = end - start;

        if constexpr (!kSoftmax) {  // ptxas shortens products whose result nobody reads
            softmax.start(tSrS, tOrP);
        }
        sm90::wgmma_issue<true>(mma_pv, tOrP, tOrV, rO);
        sm90::wgmma_wait<0>();
        sm90::pin(rO);
        softmax.finalize(tOrO);
        if (blockIdx.x == 0) {
            Tensor out = make_tensor(
                make_gmem_ptr(problem.out),
                Layout<Shape<Int<C.tile_m>, Int<C.head_dim>>, Stride<Int<C.head_dim>, _1>>{});
            copy(rO, mma_pv.get_slice(threadIdx.x).partition_C(out));
        }
    }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kMaxThreads, 1) kernel(Problem const problem) {
    extern __shared__ __align__(1024) uint8_t smem[];
    Kernel::run(problem, *reinterpret_cast<typename Kernel::SharedStorage *>(smem));
}

// Launches and waits; returns what went wrong, or null.
template <class Kernel>
char const *run(Problem const &problem) {
    // More than half of an SM's shared memory: CTAs share none.
    int const bytes = std::max<int>(sizeof(typename Kernel::SharedStorage), 120 * 1024);
    cudaError_t error =
        cudaFuncSetAttribute(kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess) {
        kernel<Kernel><<<problem.ctas, 128 * problem.warpgroups, bytes>>>(problem);
        error = cudaGetLastError();
    }
    if (error == cudaSuccess) {
        error = cudaDeviceSynchronize();
    }
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace rates
