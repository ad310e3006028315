// Small kernels: bulk reductions, and polls of a counter.
#include <arch_sm90.h>
#include <cases.h>

using namespace flash;

namespace {

// Each of four blocks adds 64 floats to global memory, twice; the rounding of a sum shows the order
// of the blocks.
struct BulkReduce {
    enum Fault { none, fence, unwritten, only_read, overwritten, misaligned, outside };
    static constexpr int kBlocks = 4, kFloats = 64;

    template <Fault kFault>
    static __global__ void kernel(float *sums) {
        auto *const mine = reinterpret_cast<float *>(smem());
        constexpr float kLarge = 1 << 24;
        float const x = blockIdx.x == 0 ? kLarge : blockIdx.x == 3 ? -kLarge : 1.f;
        for (int i = threadIdx.x; i < kFloats && kFault != unwritten; i += 32) {
            mine[i] = i == 0 ? x : float(i);
        }
        for (int time = 0; time < 2; ++time) {
            if constexpr (kFault != fence) {
                sm90::fence_async_proxy();
            }
            __syncwarp();
            if (sm90::elect_one()) {
                sm90::bulk_reduce_add(sums + (kFault == misaligned), mine, kFloats * sizeof(float));
                sm90::bulk_commit();
            }
            if constexpr (kFault != overwritten) {
                sm90::bulk_wait_read();
            }
            __syncwarp();
            mine[32 + threadIdx.x] *= 2;
        }
        if constexpr (kFault != only_read) {
            sm90::bulk_wait();
        }
    }

    template <Fault kFault>
    static std::function<cudaError_t()> with(sim::CopyMode mode = sim::CopyMode::late) {
        return [=] {
            std::vector<float> storage(kFloats + 8);
            auto *const sums = reinterpret_cast<float *>(
                (reinterpret_cast<uintptr_t>(storage.data()) + 15) / 16 * 16);
            std::vector<float> other(4);
            if constexpr (kFault == outside) {
                know("other", other);
            }
            sim::state().settings.copy_mode = mode;
            sim::state().settings.sms = kBlocks;
            auto const error = launch(&kernel<kFault>, kBlocks, 32, 512, sums);
            for (int i = 1; i < kFloats && error == cudaSuccess; ++i) {
                expect(sums[i] == float(i) * kBlocks * (i < 32 ? 2 : 3),
                       "element " + std::to_string(i));
            }
            expect(error != cudaSuccess ||
                       sim::state().counters.reduction_bytes == 2 * kBlocks * kFloats * 4,
                   "bytes");
            std::printf("order %g\n", sums[0]);
            return error;
        };
    }
};
using B = BulkReduce;

// One block stores 64 floats, and another one, which waits for a counter, adds 1 to each.
struct BulkStore {
    enum Fault { none, fence, unordered, misaligned };
    static constexpr int kFloats = 64;

    template <Fault kFault>
    static __global__ void kernel(float *sums, unsigned *counter) {
        constexpr uint32_t kBytes = kFloats * sizeof(float);
        auto *const mine = reinterpret_cast<float *>(smem());
        for (int i = threadIdx.x; i < kFloats; i += 32) {
            mine[i] = blockIdx.x == 0 ? float(i) : 1.f;
        }
        if constexpr (kFault != fence) {
            sm90::fence_async_proxy();
        }
        __syncwarp();
        if (!sm90::elect_one()) {
            return;
        }
        if (blockIdx.x == 0) {
            sm90::bulk_store(sums + (kFault == misaligned), mine, kBytes);
            sm90::bulk_commit();
            sm90::bulk_wait();
            sm90::add_acq_rel(counter, 1u);
        } else {
            while (kFault != unordered && sm90::load_acquire(counter) == 0) {
            }
            sm90::bulk_reduce_add(sums, mine, kBytes);
            sm90::bulk_commit();
            sm90::bulk_wait();
        }
    }

    template <Fault kFault>
    static std::function<cudaError_t()> with() {
        return [] {
            std::vector<float> storage(kFloats + 8);
            auto *const sums = reinterpret_cast<float *>(
                (reinterpret_cast<uintptr_t>(storage.data()) + 15) / 16 * 16);
            unsigned counter = 0;
            sim::state().settings.sms = 2;
            auto const error = launch(&kernel<kFault>, 2, 32, 512, sums, &counter);
            for (int i = 0; i < kFloats && error == cudaSuccess && kFault == none; ++i) {
                expect(sums[i] == float(i) + 1, "element " + std::to_string(i));
            }
            expect(error != cudaSuccess ||
                       sim::state().counters.reduction_bytes == kFloats * sizeof(float),
                   "bytes");
            std::printf("order %g\n", sums[1]);
            return error;
        };
    }
};
using S = BulkStore;

// The first of four blocks adds to a counter when its second warp has stored a number, for which
// the others poll with one warp while another one goes on.
struct Poll {
    enum Fault { none, nobody };
    static constexpr int kBlocks = 4;

    template <Fault kFault>
    static __global__ void kernel(unsigned *counter, float *number, float *found) {
        auto *const barrier = reinterpret_cast<sm90::Barrier *>(smem());
        if (threadIdx.x == 0) {
            sm90::barrier_init(barrier, 1);
            sm90::fence_barrier_init();
        }
        __syncthreads();
        if (threadIdx.x == 32) {
            if (blockIdx.x == 0) *number = 7.f;
            sm90::barrier_arrive(barrier);
        }
        if (threadIdx.x != 0) return;
        if (blockIdx.x == 0) {
            sm90::barrier_wait(barrier, 0);
            if constexpr (kFault == none) sm90::add_acq_rel(counter, 1u);
            return;
        }
        while (sm90::load_acquire(counter) < 1) {
        }
        found[blockIdx.x] = *number;
        sm90::barrier_wait(barrier, 0);
    }

    template <Fault kFault>
    static std::function<cudaError_t()> with() {
        return [] {
            unsigned counter = 0;
            float number = 0.f;
            std::vector<float> found(kBlocks);
            sim::state().settings.sms = kBlocks;
            auto const error =
                launch(&kernel<kFault>, kBlocks, 64, 512, &counter, &number, found.data());
            for (int i = 1; i < kBlocks && error == cudaSuccess; ++i) {
                expect(found[i] == 7.f, "block " + std::to_string(i));
            }
            return error;
        };
    }
};

Cases const cases{
    {"reduce_late", B::with<B::none>()},
    {"reduce_random", B::with<B::none>(sim::CopyMode::random)},
    {"reduce_eager", B::with<B::none>(sim::CopyMode::eager)},
    {"reduce_without_fence", B::with<B::fence>()},
    {"reduce_unwritten", B::with<B::unwritten>()},
    {"reduce_only_read", B::with<B::only_read>()},
    {"store", S::with<S::none>()},
    {"store_without_fence", S::with<S::fence>()},
    {"store_unordered", S::with<S::unordered>()},
    {"store_misaligned", S::with<S::misaligned>()},
    {"reduce_overwritten", B::with<B::overwritten>()},
    {"reduce_misaligned", B::with<B::misaligned>()},
    {"reduce_outside", B::with<B::outside>()},
    {"poll", Poll::with<Poll::none>()},
    {"poll_for_nothing", Poll::with<Poll::nobody>()},
};

}  // namespace

int main(int argc, char **argv) { return run_case(cases, argc, argv); }
