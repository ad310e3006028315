// Small kernels for Hopper's instructions, like simulator_cases.cpp.
#include <arch_sm90.h>
#include <cases.h>
#include <mma_traits_sm90.h>

#include <cmath>
#include <cute/tensor.hpp>

using namespace cute;
using namespace flash;
using cutlass::bfloat16_t;
using cutlass::half_t;
using SM90::GMMA::Major;

namespace {

// C = A B^T by one warpgroup, with operands written by ordinary stores in CuTe's layouts.
template <class Element, int N, Major kMajorB, bool kRegistersA, class AtomA, class AtomB>
struct Product {
    static constexpr int kK = 64;
    using LayoutA = decltype(tile_to_shape(AtomA{}, Shape<_64, Int<kK>>{}));
    using LayoutB = decltype(tile_to_shape(AtomB{}, Shape<Int<N>, Int<kK>>{}));
    using Atom = std::conditional_t<kRegistersA, sm90::MmaRS<Element, N, kMajorB>,
                                    sm90::MmaSS<Element, N, kMajorB>>;
    using Mma = TiledMMA<MMA_Atom<Atom>, Layout<Shape<_1, _1, _1>>>;

    static Element a(int m, int k) { return Element(float((m * 37 + k * 11) % 101 - 50) / 16); }
    static Element b(int n, int k) { return Element(float((n * 53 + k * 29) % 89 - 44) / 16); }

    static __global__ void kernel(float *c) {
        auto *const base = reinterpret_cast<Element *>(smem());
        Tensor sA = make_tensor(make_smem_ptr(base), LayoutA{});                      // (M, K)
        Tensor sB = make_tensor(make_smem_ptr(base + cosize_v<LayoutA>), LayoutB{});  // (N, K)
        for (int i = threadIdx.x; i < size(sA); i += 128) {
            sA(i % 64, i / 64) = a(i % 64, i / 64);
        }
        for (int i = threadIdx.x; i < size(sB); i += 128) {
            sB(i % N, i / N) = b(i % N, i / N);
        }
        sm90::fence_async_proxy();
        __syncthreads();
        Mma mma;
        auto const thr = mma.get_slice(threadIdx.x);
        Tensor acc = partition_fragment_C(mma, Shape<_64, Int<N>>{});
        Tensor tCrB = thr.make_fragment_B(thr.partition_B(sB));
        Tensor tCrA = thr.make_fragment_A(thr.partition_A(sA));
        if constexpr (kRegistersA) {
            copy(thr.partition_A(sA), tCrA);
        }
        sm90::wgmma_issue<false>(mma, tCrA, tCrB, acc);
        sm90::wgmma_issue<true>(mma, tCrA, tCrB, acc);
        sm90::wgmma_wait<0>();
        Tensor gC = make_tensor(make_gmem_ptr(c), Shape<_64, Int<N>>{}, Stride<Int<N>, _1>{});
        copy(acc, thr.partition_C(gC));
    }

    static cudaError_t run() {
        std::vector<float> c(64 * N, NAN);
        int const bytes = (cosize_v<LayoutA> + cosize_v<LayoutB>)*sizeof(Element);
        auto const error = launch(&kernel, 1, 128, bytes, c.data());
        for (int i = 0; i < 64 * N && error == cudaSuccess; ++i) {
            double exact = 0;
            for (int k = 0; k < kK; ++k) {
                exact += 2 * double(float(a(i / N, k))) * double(float(b(i % N, k)));
            }
            if (!(std::abs(c[i] - exact) <= 2e-3)) {
                expect(false, "element " + std::to_string(i));
                return error;
            }
        }
        return error;
    }
};

template <class T, int N, class AtomA, class AtomB>
using KMajor = Product<T, N, Major::K, false, AtomA, AtomB>;
template <class T, int N, class AtomB>
using MnMajor = Product<T, N, Major::MN, false, SM90::GMMA::Layout_K_SW128_Atom<T>, AtomB>;
template <class T, int N, class AtomB>
using Registers = Product<T, N, Major::MN, true, SM90::GMMA::Layout_K_SW128_Atom<T>, AtomB>;

// One product of zeros by one warpgroup, in which each step can be left out or misused.
struct Misuse {
    using T = half_t;
    using Layout = decltype(tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<T>{}, Shape<_64, _64>{}));
    enum Fault {
        none,
        proxy_fence,
        read,
        write,
        write_a,
        fence,
        commit,
        divergence,
        shape,
        unwritten
    };

    template <Fault kFault>
    static __global__ void kernel(float *seen) {
        Tensor sA = make_tensor(make_smem_ptr(reinterpret_cast<T *>(smem())), Layout{});  // (M, K)
        for (int i = threadIdx.x; i < size(sA) && kFault != unwritten; i += 128) {
            sA(i % 64, i / 64) = T(0);
        }
        if constexpr (kFault != proxy_fence) {
            sm90::fence_async_proxy();
        }
        __syncthreads();
        uint64_t const a = SM90::GMMA::make_gmma_desc<Major::K>(
                               local_tile(sA, Shape<_64, _16>{}, make_coord(0, 0)))
                               .desc_;
        uint64_t const b = kFault == divergence && threadIdx.x > 64 ? a + 2 : a;
        float d[32];
        uint32_t fragment[4] = {};
        for (float &x : d) {
            x = 1;
        }
        if constexpr (kFault != fence) {
            sm90::wgmma_fence();
        }
        sm90::Wgmma<T, 64, false>::rs(d, fragment, b, true);
        if constexpr (kFault == shape) {
            sm90::Wgmma<T, 32, false>::ss(reinterpret_cast<float (&)[16]>(d[8]), a, b, true);
        }
        if constexpr (kFault != commit) {
            sm90::wgmma_commit();
        }
        if constexpr (kFault == read) {
            seen[threadIdx.x] = d[5];
        }
        if constexpr (kFault == write) {
            d[threadIdx.x / 4] = 3;
        }
        if constexpr (kFault == write_a) {
            fragment[1] = 7;
        }
        sm90::wgmma_wait<0>();
        seen[128 + threadIdx.x] = d[5];
    }

    template <Fault kFault>
    static cudaError_t run() {
        std::vector<float> seen(256);
        auto const error = launch(&kernel<kFault>, 1, 128, 64 * 64 * 2, seen.data());
        if (error == cudaSuccess) {
            expect(kFault != read || std::isnan(seen[77]), "a value before the wait");
            expect(seen[128 + 77] == 1, "the value after the wait");
        }
        return error;
    }
};

// A (rows, columns) fp16 tensor, element (i, j) being 64 i + j, boxes of (box_rows, 8 chunks).
struct Boxes {
    static constexpr int kRows = 20, kColumns = 40, kPitch = 64, kBoxRows = 16;

    struct Maps {
        CUtensorMap map;
    };
    static CUresult encode(Maps &maps, half_t *data, CUtensorMapSwizzle swizzle, int box_columns) {
        auto *const function = &sim::tensor_map_encode_tiled;
        cuuint64_t const extents[] = {kColumns, kRows, 1, 1};
        cuuint64_t const strides[] = {kPitch * 2, 16, 16};
        cuuint32_t const box[] = {cuuint32_t(box_columns), kBoxRows, 1, 1};
        cuuint32_t const ones[] = {1, 1, 1, 1};
        return function(&maps.map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, data, extents, strides, box,
                        ones, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                        CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    }

    static __global__ void kernel(Maps const maps, int columns, int span, int c0, int c1,
                                  int *wrong) {
        auto *const barrier = reinterpret_cast<sm90::Barrier *>(smem() + 8192);
        if (threadIdx.x == 0) {
            sm90::barrier_init(barrier, 1);
            sm90::fence_barrier_init();
            sm90::barrier_arrive_expect(barrier, kBoxRows * columns * 2);
            sm90::tma_load(&maps.map, barrier, sm90::CacheHint::evict_first, smem() + 1024, c0, c1,
                           0, 0);
        }
        __syncthreads();
        sm90::barrier_wait(barrier, 0);
        for (int i = threadIdx.x; i < kBoxRows * columns; i += blockDim.x) {
            int const row = i / columns, column = i % columns;
            // Swizzle<B, 4, 3> on bytes, B the logarithm of the 16-byte pieces in the span.
            int byte = 1024 + i * 2;
            int const pieces = span == 0 ? 1 : span / 16;
            byte ^= (byte >> 7 & (pieces - 1)) << 4;
            int const m = c1 + row, n = c0 + column;
            bool const inside = m >= 0 && m < kRows && n >= 0 && n < kColumns;
            float const value = float(*reinterpret_cast<half_t *>(smem() + byte));
            *wrong += value != (inside ? float(64 * m + n) : 0.f);
        }
    }

    static cudaError_t run() {
        alignas(256) static half_t data[kRows * kPitch];
        for (int i = 0; i < kRows * kPitch; ++i) {
            data[i] = half_t(float(i));
        }
        uint64_t zeros = 0;
        for (auto const &[swizzle, span] : {std::pair{CU_TENSOR_MAP_SWIZZLE_NONE, 0},
                                            {CU_TENSOR_MAP_SWIZZLE_32B, 32},
                                            {CU_TENSOR_MAP_SWIZZLE_64B, 64},
                                            {CU_TENSOR_MAP_SWIZZLE_128B, 128}}) {
            int const columns = span == 0 ? 24 : span / 2;
            alignas(64) Maps maps;
            expect(encode(maps, data, swizzle, columns) == CUDA_SUCCESS, "encoding");
            for (auto const &[c0, c1] :
                 {std::pair{0, 0}, {8, 10}, {-8, -3}, {32, 0}, {40, 0}, {0, 20}, {0, -16}}) {
                int wrong = 0;
                auto const error =
                    launch(&kernel, 1, 32, 9216, maps, columns, span, c0, c1, &wrong);
                if (error != cudaSuccess) {
                    return error;
                }
                expect(wrong == 0, "box at " + std::to_string(c0) + ", " + std::to_string(c1) +
                                       ", span " + std::to_string(span));
                int inside = 0;
                for (int i = 0; i < kBoxRows * columns; ++i) {
                    int const m = c1 + i / columns, n = c0 + i % columns;
                    inside += m >= 0 && m < kRows && n >= 0 && n < kColumns;
                }
                sim::Counters const &counters = sim::state().counters;
                expect(counters.tma_bytes == uint64_t(kBoxRows * columns * 2), "tma_bytes");
                zeros = kBoxRows * columns * 2 - inside * 2;
                expect(counters.tma_zero_bytes == zeros, "tma_zero_bytes");
            }
        }
        return cudaSuccess;
    }
};

// Ordinary loads of a TMA load's destination, by threads that have not waited for it.
template <bool kLdmatrix>
struct Unawaited {
    static __global__ void kernel(CUtensorMap const map, float *seen) {
        auto *const barrier = reinterpret_cast<sm90::Barrier *>(smem() + 8192);
        if (threadIdx.x == 0) {
            sm90::barrier_init(barrier, 1);
            sm90::fence_barrier_init();
            sm90::barrier_arrive_expect(barrier, 8 * 8 * 2);
            sm90::tma_load(&map, barrier, sm90::CacheHint::evict_first, smem(), 0, 0, 0, 0);
        }
        __syncthreads();
        char *const row = smem() + threadIdx.x % 8 * 16;
        if constexpr (kLdmatrix) {
            uint32_t pair;
            SM75_U32x1_LDSM_N::copy(*reinterpret_cast<uint128_t *>(row), pair);
            seen[threadIdx.x] = static_cast<float>(pair);
        } else {
            Tensor sRow = make_tensor(make_smem_ptr(reinterpret_cast<half_t *>(row)), Layout<_8>{});
            Tensor rRow = make_fragment_like(sRow);
            copy(sRow, rRow);
            seen[threadIdx.x] = float(rRow(0));
        }
        sm90::barrier_wait(barrier, 0);
    }

    static cudaError_t run() {
        alignas(256) static half_t data[64];
        float seen[32];
        return launch(&kernel, 1, 32, 9216, ::encode(data, 8, 8, 8, 8, 8), seen);
    }
};

// Tensor maps that the driver rejects, one condition each.
cudaError_t run_encoding() {
    struct Arguments {
        CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
        cuuint32_t rank = 2;
        uint64_t address = 4096;
        cuuint64_t extents[5] = {64, 100, 1, 1, 1}, strides[4] = {128, 16, 16, 16};
        cuuint32_t box[5] = {64, 16, 1, 1, 1}, steps[5] = {1, 1, 1, 1, 1};
        CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
        int offset = 0;  // of the descriptor
    };
    auto const encode = [](Arguments x) {
        alignas(64) std::array<std::byte, 256> bytes;
        return sim::tensor_map_encode_tiled(
            reinterpret_cast<CUtensorMap *>(bytes.data() + x.offset), x.type, x.rank,
            reinterpret_cast<void *>(x.address), x.extents, x.strides, x.box, x.steps,
            CU_TENSOR_MAP_INTERLEAVE_NONE, x.swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    auto const refused = [&](char const *what, auto const &change,
                             CUresult result = CUDA_ERROR_INVALID_VALUE) {
        Arguments x;
        change(x);
        expect(encode(x) == result, what);
    };
    expect(encode({}) == CUDA_SUCCESS, "a good one");
    refused("descriptor alignment", [](auto &x) { x.offset = 32; });
    refused("rank 0", [](auto &x) { x.rank = 0; });
    refused("rank 6", [](auto &x) { x.rank = 6; });
    refused("address", [](auto &x) { x.address += 8; });
    refused("extent 0", [](auto &x) { x.extents[1] = 0; });
    refused("extent", [](auto &x) { x.extents[1] = (1ull << 32) + 1; });
    refused("stride alignment", [](auto &x) { x.strides[0] = 136; });
    refused("stride", [](auto &x) { x.strides[0] = 1ull << 40; });
    refused("box 0", [](auto &x) { x.box[1] = 0; });
    refused("box", [](auto &x) { x.box[1] = 257; });
    refused("row of the box", [](auto &x) { x.box[0] = 4; });
    refused("row beyond the span", [](auto &x) { x.swizzle = CU_TENSOR_MAP_SWIZZLE_64B; });
    refused("step 0", [](auto &x) { x.steps[1] = 0; });
    refused("step", [](auto &x) { x.steps[1] = 9; });
    CUresult const uncovered = CUDA_ERROR_NOT_SUPPORTED;
    refused("type", [](auto &x) { x.type = CU_TENSOR_MAP_DATA_TYPE_FLOAT64; }, uncovered);
    refused("steps", [](auto &x) { x.steps[1] = 2; }, uncovered);
    refused("short rows", [](auto &x) { x.box[0] = 32; }, uncovered);
    return cudaSuccess;
}

sm90::Barrier *barrier_at(int i) { return reinterpret_cast<sm90::Barrier *>(smem()) + i; }

// A producer warp fills a ring of two boxes, a consumer warp reads it. Only mbarriers order them.
__global__ void ring(int *wrong) {
    auto *const box = reinterpret_cast<int volatile *>(smem() + 64);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            sm90::barrier_init(barrier_at(i), 32);
            sm90::barrier_init(barrier_at(2 + i), 32);
        }
    }
    __syncthreads();
    int const lane = threadIdx.x % 32;
    for (int round = 0; round < 7; ++round) {
        int const stage = round % 2;
        int const parity = round / 2 % 2;
        if (threadIdx.x < 32) {
            sm90::barrier_wait(barrier_at(2 + stage), parity ^ 1);
            box[32 * stage + lane] = 100 * round + lane;
            sm90::barrier_arrive(barrier_at(stage));
        } else {
            sm90::barrier_wait(barrier_at(stage), parity);
            *wrong += box[32 * stage + 31 - lane] != 100 * round + 31 - lane;
            sm90::barrier_arrive(barrier_at(2 + stage));
        }
    }
}

__global__ void elect(int *wrong) {
    int elected[2] = {-1, -1};
    for (int &lane : elected) {
        unsigned const all = __ballot_sync(~0u, sm90::elect_one());
        *wrong += __popc(all) != 1;
        lane = __ffs(all);
    }
    *wrong += elected[0] != elected[1];
}

__global__ void uninitialised() { sm90::barrier_arrive(barrier_at(0)); }
__global__ void unsynchronised() {
    if (threadIdx.x == 0) {
        sm90::barrier_init(barrier_at(0), 64);
    }
    __syncwarp();
    sm90::barrier_arrive(barrier_at(0));
}
__global__ void initialised_twice() {
    sm90::barrier_init(barrier_at(0), 1);
    sm90::barrier_init(barrier_at(0), 1);
}
__global__ void overwritten() {
    sm90::barrier_init(barrier_at(0), 1);
    *reinterpret_cast<int volatile *>(smem() + 4) = 0;
    sm90::barrier_arrive(barrier_at(0));
}
__global__ void arrives_twice() {
    sm90::barrier_init(barrier_at(0), 1);
    sm90::barrier_arrive_expect(barrier_at(0), 16);
    sm90::barrier_arrive(barrier_at(0));
}
template <bool kAsks>
__global__ void never_completes() {
    if (threadIdx.x == 0) {
        sm90::barrier_init(barrier_at(0), 32);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        sm90::barrier_arrive(barrier_at(0));
    }
    sm90::barrier_wait(barrier_at(0), 0);
    if (threadIdx.x >= 32) {
        while (kAsks && !sim::mbarrier_test(barrier_at(0), 1)) {
        }
        sm90::barrier_wait(barrier_at(0), 1);
    }
}
__global__ void no_descriptor() {
    alignas(64) char bytes[128] = {};
    sm90::barrier_init(barrier_at(0), 1);
    sm90::fence_barrier_init();
    sm90::tma_load(bytes, barrier_at(0), sm90::CacheHint::evict_first, smem(), 0, 0, 0, 0);
}

// 384 threads: 168 registers each at launch.
template <int kLower, int kRaise>
__global__ void registers() {
    if (threadIdx.x < 128) {
        sm90::registers_lower<kLower>();
    } else {
        sm90::registers_raise<kRaise>();
    }
}
__global__ void half_a_warpgroup() {
    if (threadIdx.x % 128 < 64) {
        sm90::registers_lower<24>();
    }
}

// Each block takes two numbers from a counter.
__global__ void numbers(unsigned *counter, int *owner) {
    for (int i = 0; i < 2; ++i) {
        if (threadIdx.x == 0) {
            owner[atomicAdd(counter, 1u)] = blockIdx.x;
        }
    }
}
cudaError_t run_numbers_on(int sms) {
    unsigned counter = 0;
    std::vector<int> owner(8, -1);
    sim::state().settings.sms = sms;
    auto const error = launch(&numbers, 4, 32, 0, &counter, owner.data());
    expect(counter == 8, "count");
    std::printf("order ");
    for (int const block : owner) {
        std::printf("%d", block);
    }
    std::printf("\n");
    return error;
}
cudaError_t run_numbers() { return run_numbers_on(4); }
// One block starts when another has ended.
cudaError_t run_more_blocks_than_run() { return run_numbers_on(3); }

// Each block adds to two groups of four floats; the rounding of a sum shows its order.
__global__ void sums(float *sum) {
    if (threadIdx.x < 2) {
        constexpr float kLarge = 1 << 24;
        float const x = blockIdx.x == 0 ? kLarge : blockIdx.x == 3 ? -kLarge : 1.f;
        sm90::reduce_add(sum + 4 * threadIdx.x, x, 1.f, 2.f, x);
    }
}
cudaError_t run_sums() {
    alignas(16) float sum[8] = {};
    sim::state().settings.sms = 4;
    auto const error = launch(&sums, 4, 32, 0, &sum[0]);
    expect(sum[1] == 4 && sum[2] == 8 && sum[6] == 8 && sum[0] == sum[3], "sums");
    expect(sim::state().counters.reduction_bytes == 4 * 2 * 16, "bytes");
    std::printf("order %g%g\n", sum[0], sum[4]);
    return error;
}
cudaError_t run_sums_misaligned() {
    alignas(16) float sum[12] = {};
    sim::state().settings.sms = 4;
    return launch(&sums, 4, 32, 0, &sum[2]);
}

// Statistics as TMA loads them: rows of 512 bytes of floats, of which the last is outside.
__global__ void floats(__grid_constant__ CUtensorMap const map, int *wrong) {
    sm90::Barrier *const barrier = reinterpret_cast<sm90::Barrier *>(smem() + 2048);
    if (threadIdx.x == 0) {
        sm90::barrier_init(barrier, 1);
        sm90::fence_barrier_init();
        sm90::barrier_arrive_expect(barrier, 1024);
        sm90::tma_load(&map, barrier, sm90::CacheHint::evict_last, smem(), 0, 2, 0, 0);
    }
    __syncthreads();
    sm90::barrier_wait(barrier, 0);
    for (int i = threadIdx.x; i < 256; i += 32) {
        *wrong += reinterpret_cast<float *>(smem())[i] != (i < 128 ? 256.f + i : 0.f);
    }
}
cudaError_t run_floats() {
    alignas(16) float data[3 * 128];
    for (int i = 0; i < 3 * 128; ++i) {
        data[i] = static_cast<float>(i);
    }
    alignas(64) CUtensorMap map;
    cuuint64_t const extents[] = {128, 3, 1, 1}, strides[] = {512, 16, 16};
    cuuint32_t const box[] = {128, 2, 1, 1}, ones[] = {1, 1, 1, 1};
    auto const result = sim::tensor_map_encode_tiled(
        &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, data, extents, strides, box, ones,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    expect(result == CUDA_SUCCESS, "encoding");
    int wrong = 0;
    auto const error = launch(&floats, 1, 32, 4096, map, &wrong);
    expect(wrong == 0, "values");
    return error;
}

template <class Kernel>
std::function<cudaError_t()> counting(Kernel *kernel, int threads, int smem_bytes) {
    return [=] {
        int wrong = 0;
        auto const error = launch(kernel, 1, threads, smem_bytes, &wrong);
        expect(wrong == 0, "values");
        return error;
    };
}
template <class Kernel>
std::function<cudaError_t()> plain(Kernel *kernel, int threads) {
    return [=] { return launch(kernel, 1, threads, 256); };
}

std::function<cudaError_t()> in_mode(sim::CopyMode mode, cudaError_t (*run)()) {
    return [=] {
        sim::state().settings.copy_mode = mode;
        return run();
    };
}

namespace G = SM90::GMMA;
Cases const cases{
    {"k_128",
     KMajor<half_t, 176, G::Layout_K_SW64_Atom<half_t>, G::Layout_K_SW128_Atom<half_t>>::run},
    {"k_64", KMajor<bfloat16_t, 48, G::Layout_K_SW128_Atom<bfloat16_t>,
                    G::Layout_K_SW64_Atom<bfloat16_t>>::run},
    {"k_32",
     KMajor<half_t, 32, G::Layout_K_INTER_Atom<half_t>, G::Layout_K_SW32_Atom<half_t>>::run},
    {"k_none", KMajor<bfloat16_t, 80, G::Layout_K_SW32_Atom<bfloat16_t>,
                      G::Layout_K_INTER_Atom<bfloat16_t>>::run},
    {"mn_128", MnMajor<half_t, 128, G::Layout_MN_SW128_Atom<half_t>>::run},
    {"mn_64", MnMajor<bfloat16_t, 96, G::Layout_MN_SW64_Atom<bfloat16_t>>::run},
    {"mn_32", MnMajor<half_t, 48, G::Layout_MN_SW32_Atom<half_t>>::run},
    {"mn_none", MnMajor<half_t, 40, G::Layout_MN_INTER_Atom<half_t>>::run},
    {"registers_256", Registers<bfloat16_t, 256, G::Layout_MN_SW128_Atom<bfloat16_t>>::run},
    {"registers_32", Registers<half_t, 32, G::Layout_MN_SW64_Atom<half_t>>::run},
    {"product_eager", in_mode(sim::CopyMode::eager, &Misuse::run<Misuse::none>)},
    {"product_late", in_mode(sim::CopyMode::late, &Misuse::run<Misuse::none>)},
    {"read_in_flight", &Misuse::run<Misuse::read>},
    {"no_proxy_fence", &Misuse::run<Misuse::proxy_fence>},
    {"write_in_flight", &Misuse::run<Misuse::write>},
    {"write_a_in_flight", &Misuse::run<Misuse::write_a>},
    {"no_wgmma_fence", &Misuse::run<Misuse::fence>},
    {"no_commit", &Misuse::run<Misuse::commit>},
    {"different_wgmmas", &Misuse::run<Misuse::divergence>},
    {"unwritten", &Misuse::run<Misuse::unwritten>},
    {"overlapping_shapes", &Misuse::run<Misuse::shape>},
    {"boxes", &Boxes::run},
    {"unawaited_load", &Unawaited<false>::run},
    {"unawaited_load_eager", in_mode(sim::CopyMode::eager, &Unawaited<false>::run)},
    {"unawaited_ldmatrix", &Unawaited<true>::run},
    {"unawaited_ldmatrix_eager", in_mode(sim::CopyMode::eager, &Unawaited<true>::run)},
    {"encoding", &run_encoding},
    {"ring", counting(&ring, 64, 1024)},
    {"elect", counting(&elect, 32, 0)},
    {"uninitialised", plain(&uninitialised, 32)},
    {"unsynchronised", plain(&unsynchronised, 64)},
    {"initialised_twice", plain(&initialised_twice, 1)},
    {"overwritten", plain(&overwritten, 1)},
    {"arrives_twice", plain(&arrives_twice, 1)},
    {"never_completes", plain(&never_completes<false>, 64)},
    {"never_completes_asking", plain(&never_completes<true>, 64)},
    {"no_descriptor", plain(&no_descriptor, 1)},
    {"registers_fit", plain(&registers<24, 240>, 384)},
    {"registers_overdrawn", plain(&registers<32, 240>, 384)},
    {"registers_raised_to_less", plain(&registers<24, 160>, 384)},
    {"registers_lowered_to_more", plain(&registers<176, 168>, 384)},
    {"half_a_warpgroup", plain(&half_a_warpgroup, 384)},
    {"numbers", &run_numbers},
    {"more_blocks_than_run", &run_more_blocks_than_run},
    {"sums", &run_sums},
    {"sums_misaligned", &run_sums_misaligned},
    {"floats", &run_floats},
};

}  // namespace

int main(int argc, char **argv) { return run_case(cases, argc, argv); }
