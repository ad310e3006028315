// Small kernels of what Hopper does behind a thread's back: programmatic dependent launch.
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

sm90::Barrier *barrier_at(int i) { return reinterpret_cast<sm90::Barrier *>(smem) + i; }

// A descriptor of a (rows, columns) fp16 tensor of `pitch` columns, with whole boxes (M, N).
CUtensorMap encode(half_t *data, uint64_t rows, uint64_t columns, uint64_t pitch, uint32_t box_m,
                   uint32_t box_n, CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE) {
    alignas(64) CUtensorMap map;
    cuuint64_t const extents[] = {columns, rows, 1, 1};
    cuuint64_t const strides[] = {pitch * 2, 16, 16};
    cuuint32_t const box[] = {box_n, box_m, 1, 1};
    cuuint32_t const ones[] = {1, 1, 1, 1};
    auto const result = sim::tensor_map_encode_tiled(
        &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, data, extents, strides, box, ones,
        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    expect(result == CUDA_SUCCESS, "encoding");
    return map;
}

template <class T>
void know(char const *name, std::vector<T> &tensor) {
    sim::state().regions.push_back(
        {name, reinterpret_cast<std::byte const *>(tensor.data()), tensor.size() * sizeof(T)});
}

// out = in + 1, by blocks of two warps, behind the kernel that wrote `in`.
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

    // What thread 40 does while thread 0 waits for the kernel before.
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
            SM80_CP_ASYNC_CACHEALWAYS<float>::copy(x.in[i], *reinterpret_cast<float *>(smem));
        } else if constexpr (kFault == box) {
            sm90::barrier_init(barrier_at(0), 1);
            sm90::fence_barrier_init();
            sm90::tma_load(&x.map, barrier_at(0), sm90::CacheHint::evict_first, smem + 128, 0, 0, 0,
                           0);
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

    // Warp 1 learns of the end through an mbarrier at which warp 0 arrives.
    static __global__ void by_mbarrier(Arguments const x) {
        int const i = blockIdx.x * kThreads + threadIdx.x;
        if (threadIdx.x == 0) {
            sm90::barrier_init(barrier_at(0), 32);
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            cudaGridDependencySynchronize();
            sm90::barrier_arrive(barrier_at(0));
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

Cases const cases{
    {"dependent_late", D::with<D::none>()},
    {"dependent_random", D::with<D::none>(true, sim::CopyMode::random)},
    {"dependent_eager", D::with<D::none>(true, sim::CopyMode::eager)},
    {"dependent_by_mbarrier",
     [] { return D::run(&D::by_mbarrier, true, sim::CopyMode::late, -1); }},
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
    {"idle", [] { return D::run(&D::idle, true, sim::CopyMode::late, -1); }},
};

}  // namespace

int main(int argc, char **argv) { return run_case(cases, argc, argv); }
