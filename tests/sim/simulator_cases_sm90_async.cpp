// Small kernels: programmatic dependent launch, stmatrix, TMA stores.
#include <arch_sm90.h>
#include <cases.h>
#include <cutlass/arch/grid_dependency_control.h>
#include <cutlass/numeric_types.h>

#include <cmath>
#include <cute/tensor.hpp>

using namespace cute;
using namespace flash;
using cutlass::half_t;

namespace {

sm90::Barrier *barrier_at(int i) { return reinterpret_cast<sm90::Barrier *>(smem()) + i; }

// out = in + 1 by blocks of two warps, in a dependent launch after the kernel that wrote `in`.
struct Dependent {
    static constexpr int kBlocks = 3, kThreads = 64;
    enum Fault {
        none,
        load,
        store,
        plain_load,
        plain_store,
        async_copy,
        box,
        atomic,
        never,
        untold
    };
    struct Arguments {
        CUtensorMap map;
        float *in, *out;
        unsigned *counter;
    };

    // The fault of thread 40, while thread 0 waits for the previous kernel.
    template <Fault kFault>
    static float meanwhile(Arguments const &x, int i) {
        float value = 0;
        if constexpr (kFault == load) {
            value = __ldg(x.in + i);
        } else if constexpr (kFault == store) {
            UniversalCopy<float>::copy(value, x.out[i]);
        } else if constexpr (kFault == plain_load) {
            value = *static_cast<float volatile *>(x.in + i);
        } else if constexpr (kFault == plain_store) {
            *static_cast<float volatile *>(x.out + i) = 7;
        } else if constexpr (kFault == async_copy) {
            SM80_CP_ASYNC_CACHEALWAYS<float>::copy(x.in[i], *reinterpret_cast<float *>(smem()));
        } else if constexpr (kFault == box) {
            sm90::barrier_init(barrier_at(0), 1);
            sm90::fence_barrier_init();
            sm90::tma_load(&x.map, barrier_at(0), sm90::CacheHint::evict_first, smem() + 128, 0, 0,
                           0, 0);
        } else if constexpr (kFault == atomic) {
            atomicAdd(x.counter, 1u);
        }
        return value;
    }

    template <Fault kFault>
    static __global__ void kernel(Arguments const x) {
        int const i = blockIdx.x * kThreads + threadIdx.x;
        cutlass::arch::launch_dependent_grids();
        float early = 0;
        if (threadIdx.x == 40) {
            early = meanwhile<kFault>(x, i);
        }
        if (threadIdx.x == 0 && kFault != never) {
            cutlass::arch::wait_on_dependent_grids();
        }
        if constexpr (kFault == untold) {
            __syncwarp();
        } else {
            __syncthreads();
        }
        float const late = early != 0 ? early : __ldg(x.in + i);
        x.out[i] = late + 1;
        if (threadIdx.x == 0) {
            atomicAdd(x.counter, 1u);
        }
    }

    // An mbarrier at which warp 0 arrives orders warp 1 after the previous kernel's end. kAsks:
    // warp 1 polls with test_wait.
    template <bool kAsks>
    static __global__ void by_mbarrier(Arguments const x) {
        int const i = blockIdx.x * kThreads + threadIdx.x;
        if (threadIdx.x == 0) {
            sm90::barrier_init(barrier_at(0), 32);
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            cudaGridDependencySynchronize();
            sm90::barrier_arrive(barrier_at(0));
        } else if constexpr (kAsks) {
            while (!sim::mbarrier_test(barrier_at(0), 0)) {
            }
        } else {
            sm90::barrier_wait(barrier_at(0), 0);
        }
        x.out[i] = __ldg(x.in + i) + 1;
        if (threadIdx.x == 32) {
            atomicAdd(x.counter, 1u);
        }
    }

    static __global__ void idle(Arguments const) {}

    static cudaError_t run(void (*of)(Arguments), bool dependent, sim::CopyMode mode, int early) {
        std::vector<float> in(kBlocks * kThreads), out(in.size(), -1);
        std::vector<half_t> boxes(64);
        std::vector<unsigned> counter(1);
        for (size_t i = 0; i < in.size(); ++i) {
            in[i] = float(3 * i + 1);
        }
        know("in", in), know("out", out), know("boxes", boxes), know("counter", counter);
        sim::state().settings.copy_mode = mode;
        cudaLaunchAttribute attribute{};
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = dependent;
        Arguments const x{encode(boxes.data(), 8, 8, 8, 8, 8), in.data(), out.data(),
                          counter.data()};
        auto const error = launch_with({attribute}, of, kBlocks, kThreads, 1024, x);
        for (size_t i = 0; i < in.size() && error == cudaSuccess; ++i) {
            bool const nan = i % kThreads == size_t(early);
            expect(nan ? std::isnan(out[i]) : out[i] == float(3 * i + 2),
                   "element " + std::to_string(i));
        }
        expect(error != cudaSuccess || counter[0] == kBlocks, "counter");
        expect(in[5] == 16, "what the kernel before wrote");
        return error;
    }

    template <Fault kFault>
    static std::function<cudaError_t()> with(bool dependent = true,
                                             sim::CopyMode mode = sim::CopyMode::late) {
        int const early = kFault == plain_load && mode != sim::CopyMode::eager ? 40 : -1;
        return [=] { return run(&kernel<kFault>, dependent, mode, early); };
    }
};
using D = Dependent;

uint32_t pair(float low, float high) {
    half_t const both[] = {half_t(low), half_t(high)};
    uint32_t bits;
    std::memcpy(&bits, both, sizeof bits);
    return bits;
}

// Register m of lane l holds 100 m + 2 l and 100 m + 2 l + 1; rows of 16 bytes, 40 bytes apart.
struct Stmatrix {
    static constexpr int kPitch = 48;
    enum Fault { none, outside, misaligned, missing_lane };

    template <class Atom, int kMatrices>
    static void store(uint32_t const *r, uint128_t &row) {
        if constexpr (kMatrices == 1) {
            Atom::copy(r[0], row);
        } else if constexpr (kMatrices == 2) {
            Atom::copy(r[0], r[1], row);
        } else {
            Atom::copy(r[0], r[1], r[2], r[3], row);
        }
    }

    template <class Atom, int kMatrices, Fault kFault>
    static __global__ void kernel(int *wrong) {
        constexpr bool kTransposed = std::is_same_v<Atom, SM90_U16x2_STSM_T> ||
                                     std::is_same_v<Atom, SM90_U16x4_STSM_T> ||
                                     std::is_same_v<Atom, SM90_U16x8_STSM_T>;
        int const lane = threadIdx.x;
        if (kFault == missing_lane && lane == 7) {
            return;
        }
        uint32_t r[kMatrices];
        for (int m = 0; m < kMatrices; ++m) {
            r[m] = pair(100 * m + 2 * lane, 100 * m + 2 * lane + 1);
        }
        int const shift = kFault == outside && lane == 3 ? 32 * kPitch
                          : kFault == misaligned         ? 8
                                                         : 0;
        store<Atom, kMatrices>(r, *reinterpret_cast<uint128_t *>(smem() + lane * kPitch + shift));
        __syncwarp();
        for (int i = 0; i < 64 * kMatrices; ++i) {
            int const m = i / 64, row = i / 8 % 8, column = i % 8;
            auto const found = *reinterpret_cast<half_t *>(smem() + (i / 8) * kPitch + column * 2);
            int const within = kTransposed ? column * 8 + row : row * 8 + column;
            *wrong += lane == 0 && float(found) != float(100 * m + within);
        }
    }

    template <class Atom, int kMatrices, Fault kFault = none>
    static cudaError_t run() {
        int wrong = 0;
        auto const error = launch(&kernel<Atom, kMatrices, kFault>, 1, 32, 32 * kPitch, &wrong);
        expect(wrong == 0, "elements");
        return error;
    }
    static cudaError_t run_all() {
        for (auto const of :
             {&run<SM90_U32x1_STSM_N, 1>, &run<SM90_U32x2_STSM_N, 2>, &run<SM90_U32x4_STSM_N, 4>,
              &run<SM90_U16x2_STSM_T, 1>, &run<SM90_U16x4_STSM_T, 2>, &run<SM90_U16x8_STSM_T, 4>}) {
            if (auto const error = of(); error != cudaSuccess) {
                return error;
            }
        }
        return cudaSuccess;
    }
};

// The accumulators of a 64 x 64 product, element (i, j) being 8 i + j, through stmatrix and a TMA
// store to a tensor. Without kOrdered the store is not ordered after the other warps' stmatrix.
template <bool kSwizzled, bool kOrdered = true>
struct Epilogue {
    using Mma = TiledMMA<MMA_Atom<SM80_16x8x16_F32F16F16F32_TN>, Layout<Shape<_4, _1, _1>>,
                         Tile<_64, _16, _16>>;
    using Atom = decltype(composition(Swizzle<kSwizzled ? 3 : 0, 3, 3>{},
                                      Layout<Shape<_8, _64>, Stride<_64, _1>>{}));
    using SmemLayout = decltype(tile_to_shape(Atom{}, Shape<_64, _64>{}));

    static __global__ void kernel(CUtensorMap const map) {
        Tensor sO = make_tensor(make_smem_ptr(reinterpret_cast<half_t *>(smem())), SmemLayout{});
        Mma mma;
        Tensor rO = make_fragment_like<half_t>(partition_fragment_C(mma, Shape<_64, _64>{}));
        Tensor where =
            mma.get_slice(threadIdx.x).partition_C(make_identity_tensor(Shape<_64, _64>{}));
        for (int i = 0; i < size(rO); ++i) {
            rO(i) = half_t(float(8 * get<0>(where(i)) + get<1>(where(i))));
        }
        auto const copy_o = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, half_t>{}, mma);
        auto const thr = copy_o.get_slice(threadIdx.x);
        copy(copy_o, thr.retile_S(rO), thr.partition_D(sO));
        tma_store_fence();
        if constexpr (kOrdered) {
            __syncthreads();
        }
        if (threadIdx.x == 0) {
            SM90_TMA_STORE_4D::copy(&map, smem(), 0, 0, 0, 0);
            tma_store_arrive();
            tma_store_wait<0>();
        }
    }

    static cudaError_t run() {
        std::vector<half_t> out(64 * 64, half_t(-1));
        auto const swizzle = kSwizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE;
        auto const error =
            launch(&kernel, 1, 128, 8192, encode(out.data(), 64, 64, 64, 64, 64, swizzle));
        for (int i = 0; i < 64 * 64 && error == cudaSuccess; ++i) {
            expect(float(out[i]) == 8 * (i / 64) + i % 64, "element " + std::to_string(i));
        }
        return error;
    }
};

// Boxes of a (20, 40) tensor of pitch 64, at the edges and beyond.
struct BoxesOut {
    static constexpr int kRows = 20, kColumns = 40, kPitch = 64, kBoxRows = 16;

    static __global__ void kernel(CUtensorMap const map, int columns, int span, int c0, int c1) {
        for (int i = threadIdx.x; i < kBoxRows * columns; i += blockDim.x) {
            int byte = 1024 + i * 2;
            byte ^= (byte >> 7 & (span == 0 ? 0 : span / 16 - 1)) << 4;
            *reinterpret_cast<half_t *>(smem() + byte) = half_t(float(i));
        }
        tma_store_fence();
        __syncthreads();
        if (threadIdx.x == 0) {
            SM90_TMA_STORE::copy(&map, smem() + 1024, c0, c1, 0, 0);
            tma_store_arrive();
            tma_store_wait<0>();
        }
    }

    static cudaError_t run() {
        sim::Counters const &counters = sim::state().counters;
        for (auto const &[swizzle, span] : {std::pair{CU_TENSOR_MAP_SWIZZLE_NONE, 0},
                                            {CU_TENSOR_MAP_SWIZZLE_32B, 32},
                                            {CU_TENSOR_MAP_SWIZZLE_64B, 64},
                                            {CU_TENSOR_MAP_SWIZZLE_128B, 128}}) {
            int const columns = span == 0 ? 24 : span / 2;
            for (auto const &[c0, c1] :
                 {std::pair{0, 0}, {3, 10}, {-8, -3}, {32, 0}, {40, 0}, {0, 20}, {-5, -15}}) {
                std::vector<half_t> out(kRows * kPitch, half_t(-1));
                auto const map = encode(out.data(), kRows, kColumns, kPitch, kBoxRows,
                                        static_cast<uint32_t>(columns), swizzle);
                auto const error = launch(&kernel, 1, 32, 8192, map, columns, span, c0, c1);
                if (error != cudaSuccess) {
                    return error;
                }
                int inside = 0, wrong = 0;
                for (int i = 0; i < kRows * kPitch; ++i) {
                    int const m = i / kPitch - c1, n = i % kPitch - c0;
                    bool const written =
                        m >= 0 && m < kBoxRows && n >= 0 && n < columns && i % kPitch < kColumns;
                    inside += written;
                    wrong += float(out[i]) != (written ? float(m * columns + n) : -1.f);
                }
                expect(wrong == 0, "box at " + std::to_string(c0) + ", " + std::to_string(c1) +
                                       ", span " + std::to_string(span));
                int const bytes = kBoxRows * columns * 2;
                expect(counters.tma_stores == 1, "tma_stores");
                expect(counters.tma_store_bytes == uint64_t(bytes), "tma_store_bytes");
                expect(counters.tma_store_outside_bytes == uint64_t(bytes - inside * 2),
                       "tma_store_outside_bytes");
            }
        }
        return cudaSuccess;
    }
};

// Two boxes of 8 x 8 from shared memory to a tensor, by thread 0 of two warps, and misuses of it.
struct StoreOut {
    enum Fault {
        none,
        visible,
        only_read,
        fence,
        unwritten,
        wait,
        commit,
        weak_wait,
        overwritten,
        loaded_over,
        untold,
        unawaited_load
    };
    struct Arguments {
        CUtensorMap map;
        half_t *out;
        int *seen;
    };

    static void load(Arguments const &x, void *to) {
        sm90::barrier_arrive_expect(barrier_at(32), 128);
        sm90::tma_load(&x.map, barrier_at(32), sm90::CacheHint::evict_first, to, 0, 8, 0, 0);
    }

    template <Fault kFault>
    static void issue(Arguments const &x) {
        if constexpr (kFault == unawaited_load) {
            load(x, smem());
        }
        for (int box = 0; box < 2; ++box) {
            SM90_TMA_STORE_4D::copy(&x.map, smem() + 128 * box, 0, 8 * box, 0, 0);
            if constexpr (kFault != commit) {
                tma_store_arrive();
            }
        }
        if constexpr (kFault == loaded_over) {
            tma_store_wait<1>();  // that of the first box
            load(x, smem() + 128);
        }
        if constexpr (kFault == visible) {
            sim::tma_store_wait(0, false);
        } else if constexpr (kFault == weak_wait) {
            tma_store_wait<1>();
        } else if constexpr (kFault != wait && kFault != overwritten) {
            tma_store_wait<0>();
        }
        *x.seen = static_cast<int>(float(x.out[5]));
    }

    template <Fault kFault>
    static __global__ void kernel(Arguments const x) {
        if (threadIdx.x == 0) {
            sm90::barrier_init(barrier_at(32), 1);
            sm90::fence_barrier_init();
        }
        for (int i = threadIdx.x; i < 128 && kFault != unwritten; i += 64) {
            reinterpret_cast<half_t *>(smem())[i] = half_t(float(i));
        }
        if constexpr (kFault != fence) {
            tma_store_fence();
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            issue<kFault>(x);
        }
        if constexpr (kFault != untold) {
            __syncthreads();
        }
        if constexpr (kFault == overwritten) {
            smem()[threadIdx.x] = 1;
            __syncthreads();
            if (threadIdx.x == 0) {
                tma_store_wait<0>();
            }
        }
        if (threadIdx.x == 32 && kFault == untold) {
            load(x, smem());
            sm90::barrier_wait(barrier_at(32), 0);
        }
    }

    template <Fault kFault>
    static std::function<cudaError_t()> in_mode(sim::CopyMode mode) {
        return [=] {
            std::vector<half_t> out(16 * 8, half_t(-1));
            int seen = 0;
            sim::state().settings.copy_mode = mode;
            Arguments const x{encode(out.data(), 16, 8, 8, 8, 8), out.data(), &seen};
            auto const error = launch(&kernel<kFault>, 1, 64, 512, x);
            for (int i = 0; i < 128 && error == cudaSuccess; ++i) {
                expect(float(out[i]) == float(i), "element " + std::to_string(i));
            }
            expect(error != cudaSuccess || kFault != visible || seen == 5, "after wait_group");
            expect(error != cudaSuccess || kFault != only_read || seen == -1,
                   "after wait_group.read");
            return error;
        };
    }
    template <Fault kFault>
    static std::function<cudaError_t()> with() {
        return in_mode<kFault>(sim::CopyMode::late);
    }
    // A box of a tensor of which only half is registered as a region.
    static cudaError_t run_outside() {
        std::vector<half_t> known(64);
        know("known", known);
        int seen = 0;
        Arguments const x{encode(known.data(), 16, 8, 8, 8, 8), known.data(), &seen};
        return launch(&kernel<none>, 1, 64, 512, x);
    }
};
using S = StoreOut;

// Warp 0 loads from a box. Thread 32 then issues a TMA load that overwrites it.
struct LoadedOver {
    enum Way {
        ldmatrix,       // lane 0 arrives for the warp
        each_arrives,   // without __syncwarp
        by_barrier,     // bar.sync in the place of the mbarrier
        one_lane,       // loads, fences and arrives
        unfenced,       // from here on faults
        unfenced_lane,  // as one_lane
        fence_before,
        fence_behind,  // the arrival
        one_fences,
        unordered,  // nothing brings the lanes' fences to the one that arrives
        too_early   // released before the load
    };
    static constexpr bool of_one_lane(Way way) { return way == one_lane || way == unfenced_lane; }
    static constexpr bool fences_behind_load(Way way) {
        return way < unfenced || way > fence_behind;
    }

    static void load_box(CUtensorMap const &map) {
        sm90::barrier_arrive_expect(barrier_at(0), 512);
        sm90::tma_load(&map, barrier_at(0), sm90::CacheHint::evict_first, smem() + 1024, 0, 0, 0,
                       0);
    }

    template <Way kWay>
    static void reader(int *wrong) {
        int const lane = threadIdx.x;
        sm90::barrier_wait(barrier_at(0), 0);
        if constexpr (kWay == fence_before) {
            sm90::fence_async_proxy();
        }
        if constexpr (kWay == too_early) {
            sm90::barrier_arrive(barrier_at(1), lane == 0);
        }
        uint32_t found[4] = {};
        if (of_one_lane(kWay) && lane == 5) {
            UniversalCopy<uint32_t>::copy(*reinterpret_cast<uint32_t *>(smem() + 1044), found[0]);
        } else if constexpr (!of_one_lane(kWay)) {
            SM75_U32x4_LDSM_N::copy(*reinterpret_cast<uint128_t *>(smem() + 1024 + 16 * lane),
                                    found[0], found[1], found[2], found[3]);
        }
        if (fences_behind_load(kWay) && (kWay != one_fences || lane == 0)) {
            sm90::fence_async_proxy();
        }
        if constexpr (kWay != each_arrives && kWay != unordered) {
            __syncwarp();
        }
        if constexpr (kWay == by_barrier) {
            __syncthreads();
        } else if constexpr (kWay != too_early) {
            int const arrives = of_one_lane(kWay) ? 5 : 0;
            sm90::barrier_arrive(barrier_at(1), kWay == each_arrives || lane == arrives);
        }
        if constexpr (kWay == fence_behind) {
            sm90::fence_async_proxy();
        }
        for (int m = 0; m < 4; ++m) {
            *wrong +=
                !of_one_lane(kWay) && found[m] != pair(64 * m + 2 * lane, 64 * m + 2 * lane + 1);
        }
        *wrong += kWay == one_lane && lane == 5 && found[0] != pair(10, 11);
    }

    template <Way kWay>
    static __global__ void kernel(CUtensorMap const map, int *wrong) {
        if (threadIdx.x == 0) {
            sm90::barrier_init(barrier_at(0), 1);
            sm90::barrier_init(barrier_at(1), kWay == each_arrives ? 32 : 1);
            sm90::fence_barrier_init();
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            reader<kWay>(wrong);
            return;
        }
        if (threadIdx.x == 32) {
            load_box(map);
        }
        if constexpr (kWay == by_barrier) {
            __syncthreads();
        }
        if (threadIdx.x == 32) {
            if constexpr (kWay != by_barrier) {
                sm90::barrier_wait(barrier_at(1), 0);
            }
            sm90::barrier_wait(barrier_at(0), 0);
            load_box(map);
            sm90::barrier_wait(barrier_at(0), 1);
        }
    }

    template <Way kWay>
    static cudaError_t run() {
        std::vector<half_t> box(256);
        for (int i = 0; i < 256; ++i) {
            box[i] = half_t(float(i));
        }
        int wrong = 0;
        auto const map = encode(box.data(), 32, 8, 8, 32, 8);
        auto const error = launch(&kernel<kWay>, 1, 64, 2048, map, &wrong);
        expect(error != cudaSuccess || wrong == 0, "what was loaded");
        return error;
    }
};
using L = LoadedOver;

Cases const cases{
    {"dependent_late", D::with<D::none>()},
    {"dependent_random", D::with<D::none>(true, sim::CopyMode::random)},
    {"dependent_eager", D::with<D::none>(true, sim::CopyMode::eager)},
    {"dependent_by_mbarrier",
     [] { return D::run(&D::by_mbarrier<false>, true, sim::CopyMode::late, -1); }},
    {"dependent_by_asking",
     [] { return D::run(&D::by_mbarrier<true>, true, sim::CopyMode::late, -1); }},
    {"independent", D::with<D::load>(false)},
    {"independent_never", D::with<D::never>(false)},
    {"early_plain_load", D::with<D::plain_load>()},
    {"early_load", D::with<D::load>()},
    {"early_load_eager", D::with<D::load>(true, sim::CopyMode::eager)},
    {"early_store", D::with<D::store>()},
    {"early_plain_store", D::with<D::plain_store>()},
    {"early_async_copy", D::with<D::async_copy>()},
    {"early_box", D::with<D::box>()},
    {"early_atomic", D::with<D::atomic>()},
    {"untold", D::with<D::untold>()},
    {"never_waits", D::with<D::never>()},
    {"stmatrix", &Stmatrix::run_all},
    {"stmatrix_outside", &Stmatrix::run<SM90_U32x4_STSM_N, 4, Stmatrix::outside>},
    {"stmatrix_misaligned", &Stmatrix::run<SM90_U16x2_STSM_T, 1, Stmatrix::misaligned>},
    {"stmatrix_missing_lane", &Stmatrix::run<SM90_U32x2_STSM_N, 2, Stmatrix::missing_lane>},
    {"epilogue", &Epilogue<true>::run},
    {"epilogue_plain", &Epilogue<false>::run},
    {"epilogue_unordered", &Epilogue<true, false>::run},
    {"boxes_out", &BoxesOut::run},
    {"store_late", S::with<S::none>()},
    {"store_random", S::in_mode<S::none>(sim::CopyMode::random)},
    {"store_eager", S::in_mode<S::none>(sim::CopyMode::eager)},
    {"store_visible", S::with<S::visible>()},
    {"store_only_read", S::with<S::only_read>()},
    {"store_without_fence", S::with<S::fence>()},
    {"store_unwritten", S::with<S::unwritten>()},
    {"store_unawaited", S::with<S::wait>()},
    {"store_uncommitted", S::with<S::commit>()},
    {"store_weakly_awaited", S::with<S::weak_wait>()},
    {"store_overwritten", S::with<S::overwritten>()},
    {"store_overwritten_eager", S::in_mode<S::overwritten>(sim::CopyMode::eager)},
    {"store_loaded_over", S::with<S::loaded_over>()},
    {"store_untold", S::with<S::untold>()},
    {"store_of_unawaited_load", S::with<S::unawaited_load>()},
    {"store_outside", &S::run_outside},
    {"loaded_over", &L::run<L::ldmatrix>},
    {"loaded_over_each_arrives", &L::run<L::each_arrives>},
    {"loaded_over_by_barrier", &L::run<L::by_barrier>},
    {"loaded_over_one_lane", &L::run<L::one_lane>},
    {"loaded_over_unfenced", &L::run<L::unfenced>},
    {"loaded_over_unfenced_lane", &L::run<L::unfenced_lane>},
    {"loaded_over_fence_before", &L::run<L::fence_before>},
    {"loaded_over_fence_behind", &L::run<L::fence_behind>},
    {"loaded_over_one_fences", &L::run<L::one_fences>},
    {"loaded_over_unordered", &L::run<L::unordered>},
    {"loaded_over_too_early", &L::run<L::too_early>},
    {"idle", [] { return D::run(&D::idle, true, sim::CopyMode::late, -1); }},
};

}  // namespace

int main(int argc, char **argv) { return run_case(cases, argc, argv); }
