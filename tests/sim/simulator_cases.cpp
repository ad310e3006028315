// Small kernels, each for one property of the simulator.
#include <cases.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>

#include <algorithm>
#include <cmath>
#include <cute/tensor.hpp>

using namespace cute;
using cutlass::bfloat16_t;
using cutlass::half_t;

namespace {

// C = A B^T on one warp group of 4: cp.async into shared memory, ldmatrix (B transposed where it is
// stored k-major), MMA.
template <class Element, bool kSwizzled>
struct Gemm {
    static constexpr int kM = 64, kN = 64, kK = 64;
    using Op = std::conditional_t<std::is_same_v<Element, half_t>, SM80_16x8x16_F32F16F16F32_TN,
                                  SM80_16x8x16_F32BF16BF16F32_TN>;
    using Mma = TiledMMA<MMA_Atom<Op>, Layout<Shape<_4, _1, _1>>, Tile<_64, _16, _16>>;
    using Atom = decltype(composition(Swizzle<kSwizzled ? 3 : 0, 3, 3>{},
                                      Layout<Shape<_8, _64>, Stride<_64, _1>>{}));
    using SmemLayout = decltype(tile_to_shape(Atom{}, Shape<_64, _64>{}));

    static __global__ void kernel(Element const *a, Element const *bt, float *c) {
        auto *const base = reinterpret_cast<Element *>(smem());
        Tensor sA = make_tensor(make_smem_ptr(base), SmemLayout{});             // (M, K)
        Tensor sBt = make_tensor(make_smem_ptr(base + kM * kK), SmemLayout{});  // (K, N)
        Tensor sB = make_tensor(
            sBt.data(), composition(SmemLayout{}, Layout<Shape<_64, _64>, Stride<_64, _1>>{}));
        auto const load = [&](Element const *g, auto const &s) {
            for (int i = threadIdx.x; i < kM * kK / 8; i += blockDim.x) {
                auto *const dst = raw_pointer_cast(&s(i / 8, i % 8 * 8));
                SM80_CP_ASYNC_CACHEGLOBAL<uint128_t>::copy(
                    reinterpret_cast<uint128_t const *>(g)[i], *reinterpret_cast<uint128_t *>(dst));
            }
        };
        load(a, sA);
        load(bt, sBt);
        cp_async_fence();
        cp_async_wait<0>();
        __syncthreads();
        Mma mma;
        auto const thr = mma.get_slice(threadIdx.x);
        Tensor acc = partition_fragment_C(mma, Shape<_64, _64>{});
        clear(acc);
        Tensor rA = thr.partition_fragment_A(sA);
        Tensor rB = make_tensor<Element>(partition_shape_B(mma, Shape<_64, _64>{}));
        auto const copy_a = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma);
        auto const copy_b = make_tiled_copy_B(Copy_Atom<SM75_U16x8_LDSM_T, Element>{}, mma);
        auto const thr_a = copy_a.get_slice(threadIdx.x);
        auto const thr_b = copy_b.get_slice(threadIdx.x);
        copy(copy_a, thr_a.partition_S(sA), thr_a.retile_D(rA));
        copy(copy_b, thr_b.partition_S(sB), thr_b.retile_D(rB));
        for (int k = 0; k < size<2>(rA); ++k) {
            gemm(mma, rA(_, _, k), rB(_, _, k), acc);
        }
        Tensor gC = make_tensor(make_gmem_ptr(c), Shape<_64, _64>{}, Stride<_64, _1>{});
        Tensor tC = thr.partition_C(gC);
        for (int i = 0; i < size(acc); ++i) {
            tC(i) = acc(i);
        }
    }

    static cudaError_t run() {
        // As cudaMalloc aligns, so that requests begin at sectors.
        alignas(256) static Element a[kM * kK], bt[kK * kN];
        for (int i = 0; i < kM * kK; ++i) {
            a[i] = Element(float(i * 37 % 101 - 50) / 16);
            bt[i] = Element(float(i * 53 % 89 - 44) / 16);
        }
        std::vector<float> c(kM * kN, NAN);
        auto const error = launch(&kernel, 1, 128, 2 * kM * kK * sizeof(Element), a, bt, c.data());
        for (int m = 0; m < kM && error == cudaSuccess; ++m) {
            for (int n = 0; n < kN; ++n) {
                double exact = 0;
                for (int k = 0; k < kK; ++k) {
                    exact += double(float(a[m * kK + k])) * double(float(bt[k * kN + n]));
                }
                if (!(std::abs(c[m * kN + n] - exact) <= 1e-3)) {
                    expect(false, "product");
                    return error;
                }
            }
        }
        return error;
    }
};

__global__ void shuffles(int *wrong) {
    int const lane = threadIdx.x % 32;
    auto const check = [&](bool ok) {
        if (!ok) {
            ++*wrong;
        }
    };
    check(__shfl_xor_sync(~0u, lane, 5) == (lane ^ 5));
    check(__shfl_sync(~0u, lane, 7, 16) == (lane & 16) + 7);
    check(__shfl_up_sync(~0u, lane, 3) == (lane < 3 ? lane : lane - 3));
    check(__shfl_down_sync(~0u, lane, 3, 8) == (lane % 8 < 5 ? lane + 3 : lane));
    check(__shfl_xor_sync(~0u, 1.0 / (lane + 1), 1) == 1.0 / ((lane ^ 1) + 1));
    // The halves of the warp exchange independently, with masks of their own.
    unsigned const half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    if (lane < 16) {
        check(__shfl_xor_sync(half, lane * 2, 1) == (lane ^ 1) * 2);
    } else {
        check(__shfl_xor_sync(half, lane * 3, 2) == (lane ^ 2) * 3);
    }
    check(__ballot_sync(~0u, lane % 3 == 0) == 0x49249249u);
    check(__any_sync(~0u, lane == 31) && !__all_sync(~0u, lane != 31));
}

// A producer warp and a consumer warp with two named barriers, for two rounds.
__global__ void produce_consume(int *wrong) {
    auto *const box = reinterpret_cast<int volatile *>(smem());
    for (int round = 0; round < 2; ++round) {
        if (threadIdx.x < 32) {
            if (round > 0) {
                cutlass::arch::NamedBarrier::sync(64, 1);
            }
            box[threadIdx.x] = 100 * round + threadIdx.x;
            cutlass::arch::NamedBarrier::arrive(64, 0);
        } else {
            cutlass::arch::NamedBarrier::sync(64, 0);
            if (box[63 - threadIdx.x] != 100 * round + 63 - int(threadIdx.x)) {
                ++*wrong;
            }
            if (round == 0) {
                cutlass::arch::NamedBarrier::arrive(64, 1);
            }
        }
    }
}

__global__ void deadlock() {
    if (threadIdx.x < 32) {
        cutlass::arch::NamedBarrier::sync(64, 0);
    }
    if (threadIdx.x >= 32) {
        cutlass::arch::NamedBarrier::sync(64, 1);
    }
}
__global__ void unequal_counts() {
    cutlass::arch::NamedBarrier::sync(threadIdx.x < 32 ? 64 : 32, 0);
}
__global__ void divergent_barrier() {
    if (threadIdx.x < 40) {
        __syncthreads();
    }
}
__global__ void missing_lane() {
    if (threadIdx.x == 9) {
        return;
    }
    uint32_t r;
    SM75_U32x1_LDSM_N::copy(*reinterpret_cast<uint128_t *>(smem() + threadIdx.x % 8 * 16), r);
}
__global__ void foreign_mask() { __shfl_sync(threadIdx.x == 3 ? 0x7u : ~0u, 0, 0); }
__global__ void hang() {
    while (true) {
        __syncwarp();
    }
}
__global__ void outside_smem() {
    uint32_t r;
    SM75_U32x1_LDSM_N::copy(*reinterpret_cast<uint128_t *>(smem() + 16 * threadIdx.x), r);
}
__global__ void misaligned() {
    uint32_t r;
    SM75_U32x1_LDSM_N::copy(*reinterpret_cast<uint128_t *>(smem() + 8), r);
}
__global__ void unmodelled() {
    uint32_t d[2]{}, a[4]{}, b[2]{};
    SM80_16x8x16_F16F16F16F16_TN::fma(d[0], d[1], a[0], a[1], a[2], a[3], b[0], b[1], d[0], d[1]);
}

// A thread's view of its own two copies: before any wait, after the wait for the first, for both.
__global__ void copies(float const *source, float *seen) {
    auto *const box = reinterpret_cast<float volatile *>(smem());
    auto const copy = [&](int i, bool valid) {
        SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(source[i], const_cast<float &>(box[i]), valid);
        cp_async_fence();
    };
    copy(0, true);
    copy(1, true);
    copy(2, false);
    int at = 0;
    auto const look = [&] {
        for (int i = 0; i < 3; ++i) {
            seen[at++] = box[i];
        }
    };
    look();
    cp_async_wait<2>();
    look();
    cp_async_wait<0>();
    look();
}

cudaError_t run_copies(sim::CopyMode mode) {
    sim::state().settings.copy_mode = mode;
    std::vector<float> source{1, 2, 3}, seen(9);
    auto const error = launch(&copies, 1, 1, 16, source.data(), seen.data());
    bool const eager = mode == sim::CopyMode::eager;
    float const poison = std::bit_cast<float>(0x7FBF7FBFu);
    float const early[] = {eager ? 1 : poison, eager ? 2 : poison, eager ? 0 : poison};
    float const first[] = {1, early[1], early[2]};
    float const both[] = {1, 2, 0};
    expect(std::memcmp(&seen[0], early, sizeof early) == 0, "before the wait");
    expect(std::memcmp(&seen[3], first, sizeof first) == 0, "after the first");
    expect(std::memcmp(&seen[6], both, sizeof both) == 0, "after both");
    return error;
}

__global__ void indices(int *hits) {
    int const block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int const thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    ++hits[block * blockDim.x * blockDim.y * blockDim.z + thread];
}

__global__ void fresh_smem(int *wrong) {
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) {
        bool const nan = std::isnan(reinterpret_cast<float volatile *>(smem())[i]) &&
                         std::isnan(float(reinterpret_cast<half_t *>(smem())[2 * i])) &&
                         std::isnan(float(reinterpret_cast<bfloat16_t *>(smem())[2 * i + 1]));
        if (!nan) {
            ++*wrong;
        }
        reinterpret_cast<float volatile *>(smem())[i] = 0;  // the next block must find NaN again
    }
}

template <class Kernel>
std::function<cudaError_t()> counting(Kernel *kernel, int blocks, int threads, int smem_bytes) {
    return [=] {
        int wrong = 0;
        auto const error = launch(kernel, blocks, threads, smem_bytes, &wrong);
        expect(wrong == 0, "values");
        return error;
    };
}

cudaError_t run_indices() {
    std::vector<int> hits(3 * 2 * 4 * 24);
    auto const error = launch(&indices, dim3(3, 2, 4), dim3(4, 3, 2), 0, hits.data());
    for (int const n : hits) {
        expect(n == 1, "number of visits");
    }
    return error;
}

cudaError_t run_conversions() {
    for (int bits = 0; bits < 1 << 16; ++bits) {
        float const fp16 = sim::from_fp16(bits), bf16 = sim::from_bf16(bits);
        float const exact16 = float(half_t::bitcast(bits)),
                    exactb = float(bfloat16_t::bitcast(bits));
        expect(fp16 == exact16 || (std::isnan(fp16) && std::isnan(exact16)), "fp16");
        expect(bf16 == exactb || (std::isnan(bf16) && std::isnan(exactb)), "bf16");
    }
    // And back: to the nearest, of two the even one.
    for (int exponent = -60; exponent < 16; ++exponent) {
        float const ulp = std::ldexp(1.f, std::max(exponent - 10, -24));
        for (float mantissa = 1.f; mantissa < 2.f; mantissa += 0x1p-13f) {
            float const x = std::ldexp(mantissa, exponent), rounded = std::nearbyint(x / ulp) * ulp;
            cutlass::Array<float, 2> const both{x, -x};
            auto const halves = cutlass::NumericArrayConverter<half_t, float, 2>::convert(both);
            bool const inf = rounded == 0x1p16f;
            expect(float(halves[0]) == (inf ? INFINITY : rounded), "rounded");
            expect(float(halves[1]) == (inf ? -INFINITY : -rounded), "negative rounded");
        }
    }
    return cudaSuccess;
}

cudaError_t run_smem_limits() {
    auto *const kernel = &fresh_smem;
    int wrong = 0;
    sim::state().settings.smem_limit = 99 * 1024;
    auto const ask = [&](int kib) {
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    kib * 1024);
    };
    expect(launch(kernel, 1, 32, 49 * 1024, &wrong) == cudaErrorInvalidValue,
           "launch without opt-in");
    expect(ask(100) == cudaErrorInvalidValue, "attribute beyond the limit");
    expect(ask(99) == cudaSuccess, "attribute at the limit");
    expect(launch(kernel, 1, 32, 99 * 1024, &wrong) == cudaSuccess, "launch at the limit");
    expect(launch(kernel, 1, 1025, 0, &wrong) == cudaErrorInvalidConfiguration, "1025 threads");
    expect(launch(kernel, dim3(1, 65536), 32, 0, &wrong) == cudaErrorInvalidConfiguration,
           "grid.y");
    cudaGetLastError();
    expect(cudaGetLastError() == cudaSuccess, "error cleared");
    return cudaSuccess;
}

template <class Kernel>
std::function<cudaError_t()> plain(Kernel *kernel, int threads, int smem_bytes) {
    return [=] { return launch(kernel, 1, threads, smem_bytes); };
}

Cases const cases{
    {"gemm_fp16", Gemm<half_t, true>::run},
    {"gemm_bf16", Gemm<bfloat16_t, true>::run},
    {"gemm_conflicts", Gemm<half_t, false>::run},
    {"shuffles", counting(&shuffles, 3, 64, 0)},
    {"produce_consume", counting(&produce_consume, 2, 64, 128)},
    {"fresh_smem", counting(&fresh_smem, 5, 64, 4096)},
    {"deadlock", plain(&deadlock, 64, 0)},
    {"unequal_counts", plain(&unequal_counts, 64, 0)},
    {"divergent_barrier", plain(&divergent_barrier, 64, 0)},
    {"missing_lane", plain(&missing_lane, 32, 128)},
    {"foreign_mask", plain(&foreign_mask, 32, 0)},
    {"outside_smem", plain(&outside_smem, 32, 64)},
    {"misaligned", plain(&misaligned, 32, 256)},
    {"unmodelled", plain(&unmodelled, 32, 0)},
    {"hang",
     [] {
         sim::state().settings.max_steps = 1000;
         return launch(&hang, 1, 32, 0);
     }},
    {"copies_late", [] { return run_copies(sim::CopyMode::late); }},
    {"copies_eager", [] { return run_copies(sim::CopyMode::eager); }},
    {"indices", run_indices},
    {"conversions", run_conversions},
    {"smem_limits", run_smem_limits},
};

}  // namespace

int main(int argc, char **argv) { return run_case(cases, argc, argv); }
