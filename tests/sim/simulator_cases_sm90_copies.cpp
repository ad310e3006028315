// Small kernels: cp.async into operands of wgmma, and cp.async.mbarrier.arrive.noinc.
#include <arch_sm90.h>
#include <cases.h>
#include <mma_traits_sm90.h>

#include <algorithm>
#include <cmath>
#include <cute/tensor.hpp>

using namespace cute;
using namespace flash;
using cutlass::half_t;

namespace {

// C = X X^T for two X of 64 x 64, one after the other in one buffer, into which warpgroup 0 copies
// them; warpgroup 1 multiplies.
struct Copied {
    enum Way {
        noinc,
        zeros,     // half of the rows
        generic,   // ordinary loads instead of wgmma
        waits,     // the writers wait, fence and arrive
        unfenced,  // from here on faults
        fenced_early,
        unawaited,
        one_fences,  // of the readers
        reused,      // not having waited for the readers
        unread,      // by ordinary loads, not having waited
        raced,       // by plain ones
        early,       // arrives before the copies
        twice,
        silent  // one thread never arrives
    };
    static constexpr int kN = 64, kRounds = 2;
    using SmemLayout =
        decltype(tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<half_t>{}, Shape<_64, _64>{}));
    using Mma = TiledMMA<MMA_Atom<sm90::MmaSS<half_t, kN, SM90::GMMA::Major::K>>,
                         Layout<Shape<_1, _1, _1>>>;
    static constexpr int kBytes = kN * kN * sizeof(half_t);

    static sm90::Barrier *full() { return reinterpret_cast<sm90::Barrier *>(smem() + kBytes); }
    static sm90::Barrier *empty() { return full() + 1; }
    static half_t x(int round, int m, int k) {
        return half_t(float((m * 37 + k * 11 + round * 5) % 101 - 50) / 16);
    }

    template <Way kWay>
    static void write(half_t const *gmem, int round) {
        Tensor sX = as_position_independent_swizzle_tensor(make_tensor(
            make_smem_ptr(reinterpret_cast<half_t *>(smem())), SmemLayout{}));  // (M, K)
        if constexpr (kWay != reused) {
            sm90::barrier_wait(empty(), round % 2 ^ 1);
        }
        if constexpr (kWay == early) {
            sm90::barrier_arrive_copies(full());
        }
        for (int i = threadIdx.x; i < kN * 8; i += 128) {
            bool const valid = kWay != zeros || i / 8 < 32;
            sm90::copy_async(&sX(i / 8, i % 8 * 8), gmem + (round * kN * 8 + i) * 8, valid);
        }
        if constexpr (kWay == waits) {
            sm90::await_copies();
            sm90::fence_async_proxy();
            sm90::barrier_arrive(full());
        } else if (kWay != early && (kWay != silent || threadIdx.x != 77)) {
            sm90::barrier_arrive_copies(full());
        }
        if constexpr (kWay == twice) {
            sm90::barrier_arrive_copies(full());
        }
    }

    template <Way kWay>
    static void read(float *c, int round) {
        Tensor sX =
            make_tensor(make_smem_ptr(reinterpret_cast<half_t *>(smem())), SmemLayout{});  // (M, K)
        int const thread = threadIdx.x - 128;
        if constexpr (kWay == fenced_early) {
            sm90::fence_async_proxy();
        }
        if constexpr (kWay != unawaited && kWay != unread && kWay != raced) {
            sm90::barrier_wait(full(), round % 2);
        }
        if (kWay != unfenced && kWay != fenced_early && kWay != waits &&
            (kWay != one_fences || thread == 0)) {
            sm90::fence_async_proxy();
        }
        Mma mma;
        auto const thr = mma.get_slice(thread);
        Tensor acc = partition_fragment_C(mma, Shape<_64, Int<kN>>{});  // ((2, 2, N/8), 1, 1)
        if constexpr (kWay == raced) {
            c[thread] = *reinterpret_cast<float volatile *>(smem() + 4 * thread);
        } else if constexpr (kWay == generic || kWay == unread) {
            Tensor sI = as_position_independent_swizzle_tensor(sX);  // (M, K)
            uint32_t found;
            UniversalCopy<uint32_t>::copy(*reinterpret_cast<uint32_t *>(&sI(thread % 64, 0)),
                                          found);
            c[thread] += (found & 0xffff) != x(round, thread % 64, 0).storage;
        } else {
            Tensor tCrA = thr.make_fragment_A(thr.partition_A(sX));  // (1, 1, K/16)
            Tensor tCrB = thr.make_fragment_B(thr.partition_B(sX));  // (1, 1, K/16)
            sm90::wgmma_issue<false>(mma, tCrA, tCrB, acc);
            sm90::wgmma_wait<0>();
            Tensor gC = make_tensor(make_gmem_ptr(c + round * kN * kN), Shape<_64, Int<kN>>{},
                                    Stride<Int<kN>, _1>{});  // (M, N)
            copy(acc, thr.partition_C(gC));
        }
        sm90::barrier_arrive(empty());
    }

    template <Way kWay>
    static __global__ void kernel(half_t const *gmem, float *c) {
        if (threadIdx.x == 0) {
            sm90::barrier_init(full(), 128);
            sm90::barrier_init(empty(), 128);
            sm90::fence_barrier_init();
        }
        __syncthreads();
        for (int round = 0; round < kRounds; ++round) {
            if (threadIdx.x < 128) {
                write<kWay>(gmem, round);
            } else {
                read<kWay>(c, round);
            }
        }
        if (threadIdx.x < 128) {
            sm90::await_copies();
        }
    }

    template <Way kWay>
    static std::function<cudaError_t()> with(sim::CopyMode mode = sim::CopyMode::late) {
        return [=] {
            std::vector<half_t> storage(kRounds * kN * kN + 8);
            auto *const gmem = reinterpret_cast<half_t *>(
                (reinterpret_cast<uintptr_t>(storage.data()) + 15) / 16 * 16);
            for (int i = 0; i < kRounds * kN * kN; ++i) {
                gmem[i] = x(i / (kN * kN), i / kN % kN, i % kN);
            }
            std::vector<float> c(kRounds * kN * kN, kWay == generic ? 0.f : NAN);
            sim::state().settings.copy_mode = mode;
            auto const error = launch(&kernel<kWay>, 1, 256, kBytes + 1024, gmem, c.data());
            if (kWay == generic) {
                bool const right = std::all_of(&c[0], &c[128], [](float n) { return n == 0; });
                expect(error != cudaSuccess || right, "what was loaded");
                return error;
            }
            for (int i = 0; i < kRounds * kN * kN && error == cudaSuccess; ++i) {
                double exact = 0;
                int const m = i / kN % kN, n = i % kN;
                for (int k = 0; k < kN && (kWay != zeros || std::max(m, n) < 32); ++k) {
                    int const round = i / (kN * kN);
                    exact += double(float(x(round, m, k))) * double(float(x(round, n, k)));
                }
                if (!(std::abs(c[i] - exact) <= 2e-3)) {
                    expect(false, "element " + std::to_string(i));
                    return error;
                }
            }
            return error;
        };
    }
};
using C = Copied;

Cases const cases{
    {"copies_late", C::with<C::noinc>()},
    {"copies_random", C::with<C::noinc>(sim::CopyMode::random)},
    {"copies_eager", C::with<C::noinc>(sim::CopyMode::eager)},
    {"copies_of_zeros", C::with<C::zeros>()},
    {"copies_loaded", C::with<C::generic>()},
    {"copies_awaited_by_writers", C::with<C::waits>()},
    {"copies_unfenced", C::with<C::unfenced>()},
    {"copies_unfenced_eager", C::with<C::unfenced>(sim::CopyMode::eager)},
    {"copies_fenced_early", C::with<C::fenced_early>()},
    {"copies_fenced_early_eager", C::with<C::fenced_early>(sim::CopyMode::eager)},
    {"copies_unawaited", C::with<C::unawaited>()},
    {"copies_one_fences", C::with<C::one_fences>()},
    {"copies_reused", C::with<C::reused>()},
    {"copies_unread", C::with<C::unread>()},
    {"copies_raced", C::with<C::raced>()},
    {"copies_early", C::with<C::early>()},
    {"copies_twice", C::with<C::twice>()},
    {"copies_silent", C::with<C::silent>()},
};

}  // namespace

int main(int argc, char **argv) { return run_case(cases, argc, argv); }
