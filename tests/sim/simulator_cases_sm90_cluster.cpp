// Small kernels for clusters: barrier.cluster, access to other blocks' shared memory, multicast.
#include <arch_sm90.h>
#include <cases.h>
#include <cutlass/arch/barrier.h>
#include <wgmma_sm90.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/tensor.hpp>

using namespace cute;
using namespace flash;
using cutlass::half_t;
using cutlass::arch::ClusterBarrier;
using cutlass::arch::ClusterTransactionBarrier;

namespace {

template <class... Args>
cudaError_t launch_clusters(void (*kernel)(Args...), dim3 cluster, dim3 grid, int threads,
                            int smem_bytes, std::type_identity_t<Args>... args) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {cluster.x, cluster.y, cluster.z};
    return launch_with({attribute}, kernel, grid, threads, smem_bytes, args...);
}

uint64_t *word_at(int i) { return reinterpret_cast<uint64_t *>(smem()) + i; }

// ---- ranks and cluster dimensions

__global__ void identity(int *wrong) {
    dim3 const id = block_id_in_cluster(), cluster = cluster_id_in_grid();
    *wrong += cluster_shape().x != 2 || cluster_shape().y != 3 || cluster_shape().z != 1;
    *wrong += cluster_grid_dims().x != 2 || cluster_grid_dims().y != 1;
    *wrong += blockIdx.x != cluster.x * 2 + id.x || blockIdx.y != cluster.y * 3 + id.y;
    *wrong += block_rank_in_cluster() != id.x + 2 * id.y;
    cluster_sync();
}

cudaError_t run_identity() {
    int wrong = 0;
    auto const error = launch_clusters(&identity, {2, 3}, {4, 3}, 32, 0, &wrong);
    expect(wrong == 0, "identities");
    return error;
}

__global__ void idle() {}

cudaError_t run_sizes() {
    auto const size = [](unsigned cluster, unsigned grid) {
        return launch_clusters(&idle, cluster, grid, 32, 0);
    };
    auto const allow = [](int value) {
        return cudaFuncSetAttribute(&idle, cudaFuncAttributeNonPortableClusterSizeAllowed, value);
    };
    expect(size(8, 16) == cudaSuccess, "8 blocks");
    expect(size(16, 16) == cudaErrorInvalidClusterSize, "16 blocks");
    expect(size(4, 6) == cudaErrorInvalidClusterSize, "no multiple");
    expect(size(0, 4) == cudaErrorInvalidClusterSize, "no block");
    expect(allow(1) == cudaSuccess && size(16, 32) == cudaSuccess, "16 blocks, allowed");
    expect(size(17, 17) == cudaErrorInvalidClusterSize, "17 blocks");
    return cudaSuccess;
}

// ---- other blocks' shared memory: every block reads its neighbour's

enum class Exchange { right, not_begun, ended, outside, unordered };

template <Exchange kWay>
__global__ void exchange(int *out) {
    auto const shared = reinterpret_cast<int *>(smem());
    unsigned const rank = block_rank_in_cluster();
    unsigned const blocks = cluster_shape().x;
    shared[threadIdx.x] = static_cast<int>(100 * rank + threadIdx.x);
    if constexpr (kWay == Exchange::not_begun) {
        __syncthreads();
    } else {
        cluster_sync();
    }
    if (kWay == Exchange::ended && rank > 0) {
        return;
    }
    for (int i = 0; i < 100 && kWay == Exchange::ended; ++i) {
        __syncthreads();
    }
    unsigned const next = kWay == Exchange::outside ? blocks : (rank + 1) % blocks;
    auto const *const there = static_cast<int *>(__cluster_map_shared_rank(shared, next));
    int got = 0;
    UniversalCopy<int>::copy(there[threadIdx.x], got);
    if constexpr (kWay == Exchange::unordered) {
        shared[threadIdx.x] = 0;
    }
    cluster_sync();
    out[blockIdx.x * blockDim.x + threadIdx.x] = got;
}

template <Exchange kWay>
cudaError_t run_exchange() {
    constexpr int kBlocks = 8, kThreads = 64;
    std::vector<int> out(2 * kBlocks * kThreads, -1);
    auto const error =
        launch_clusters(&exchange<kWay>, kBlocks, 2 * kBlocks, kThreads, kThreads * 4, out.data());
    for (int i = 0; i < static_cast<int>(out.size()) && error == cudaSuccess; ++i) {
        int const next = (i / kThreads + 1) % kBlocks;
        expect(kWay != Exchange::right || out[i] == 100 * next + i % kThreads,
               "element " + std::to_string(i));
    }
    return error;
}

// ---- st.async: rank 0 sends 64 words to rank 1

enum class Send { right, too_many_bytes, to_nobody };

template <Send kWay>
__global__ void send(int *wrong) {
    unsigned const rank = block_rank_in_cluster();
    if (threadIdx.x == 0) {
        ClusterBarrier::init(word_at(0), 1);
        cutlass::arch::fence_barrier_init();
    }
    cluster_arrive_relaxed();
    cluster_wait();
    if (rank == 1 && threadIdx.x == 0) {
        ClusterTransactionBarrier::arrive_and_expect_tx(
            word_at(0), kWay == Send::too_many_bytes ? 63 * 4 : 64 * 4);
    }
    if (rank == 0) {
        store_shared_remote(1000 + threadIdx.x,
                            cast_smem_ptr_to_uint(smem() + 64 + 4 * threadIdx.x),
                            cast_smem_ptr_to_uint(word_at(0)), kWay == Send::to_nobody ? 2 : 1);
    } else {
        ClusterBarrier::wait(word_at(0), 0);
        *wrong +=
            *reinterpret_cast<unsigned *>(smem() + 64 + 4 * threadIdx.x) != 1000 + threadIdx.x;
    }
    cluster_sync();
}

// ---- cp.async.bulk between blocks: rank 0 sends 64 words to rank 1

enum class Deliver { right, unfenced, overwritten, unexpected, to_nobody };

template <Deliver kWay>
__global__ void deliver(int *wrong) {
    constexpr int kBytes = 64 * 4;
    int const thread = static_cast<int>(threadIdx.x);
    auto *const sent = reinterpret_cast<int *>(smem() + 64);
    auto *const received = reinterpret_cast<int *>(smem() + 64 + kBytes);
    if (thread == 0) {
        sm90::barrier_init(word_at(0), 1);
        sm90::fence_barrier_init();
    }
    sm90::cluster_arrive();
    sm90::cluster_wait();
    if (sm90::cluster_rank() == 0) {
        sent[thread] = 1000 + thread;
        if constexpr (kWay != Deliver::unfenced) {
            sm90::fence_async_proxy();
        }
        __syncthreads();
        if (thread == 0) {
            sm90::bulk_copy_to(kWay == Deliver::to_nobody ? 2 : 1, received, sent, kBytes,
                               word_at(0));
        }
        __syncthreads();
        if constexpr (kWay == Deliver::overwritten) {
            sent[thread] = 0;
        }
    } else {
        if (thread == 0) {
            sm90::barrier_arrive_expect(word_at(0),
                                        kWay == Deliver::unexpected ? kBytes - 16 : kBytes);
        }
        sm90::barrier_wait(word_at(0), 0);
        *wrong += received[thread] != 1000 + thread;
    }
    cluster_sync();
}

// ---- mbarriers of other blocks: rank 0 counts the arrivals of all

enum class Arrive { right, outside, unfenced, polled, last, unawaited };

template <Arrive kWay>
__global__ void arrive_at_rank_0(int *order) {
    unsigned const rank = block_rank_in_cluster();
    if (rank == 0 && threadIdx.x == 0) {
        ClusterBarrier::init(word_at(0), cluster_shape().x);
        if constexpr (kWay != Arrive::unfenced) {
            cutlass::arch::fence_barrier_init();
        }
    }
    cluster_arrive_relaxed();
    cluster_wait();
    if (threadIdx.x == 0) {
        order[rank] = 1;
        ClusterBarrier::arrive(word_at(0), kWay == Arrive::outside ? 4 : 0, true);
    }
    if (rank == 0 && kWay != Arrive::unawaited) {
        if constexpr (kWay == Arrive::polled) {
            while (!ClusterBarrier::try_wait(word_at(0), 0)) {
            }
        } else {
            ClusterBarrier::wait(word_at(0), 0);
        }
        for (unsigned r = 0; r < cluster_shape().x; ++r) {
            order[8] += order[r];
        }
    }
    if constexpr (kWay != Arrive::last && kWay != Arrive::unawaited) {
        cluster_sync();
    }
}

template <Arrive kWay>
cudaError_t run_arrive() {
    std::vector<int> order(9);
    auto const error = launch_clusters(&arrive_at_rank_0<kWay>, 4, 4, 32, 64, order.data());
    expect(error != cudaSuccess || order[8] == 4 * 32, "arrivals");
    return error;
}

// ---- with atomics, and in a dependent launch

// Each block publishes a word by an atomic, and the last one reads all. kCounted: or before it
// knows that it is the last.
template <bool kCounted>
__global__ void publish(int *words, unsigned *counter, int *sum) {
    if (threadIdx.x != 0) {
        return;
    }
    words[blockIdx.x] = 1;
    unsigned const last = gridDim.x - 1;
    if ((kCounted ? atomicAdd(counter, 1u) : blockIdx.x) == last) {
        for (unsigned i = 0; i <= last; ++i) {
            *sum += words[i];
        }
    }
}
template <bool kCounted>
cudaError_t run_publish() {
    std::vector<int> words(4);
    unsigned counter = 0;
    int sum = 0;
    auto const error = launch(&publish<kCounted>, 4, 32, 0, words.data(), &counter, &sum);
    expect(!kCounted || sum == 4, "sum");
    return error;
}

__global__ void count(unsigned *counter) {
    if (threadIdx.x == 0) {
        atomicAdd(counter, 1 + block_rank_in_cluster());
    }
    cluster_sync();
}
cudaError_t run_atomics() {
    unsigned counter = 0;
    sim::state().settings.sms = 4;
    auto const error = launch_clusters(&count, 2, 4, 32, 0, &counter);
    expect(counter == 6, "count");
    return error;
}

template <bool kTold>
__global__ void dependent(float const *in, float *out) {
    if (block_rank_in_cluster() == 0 && threadIdx.x == 0) {
        sim::grid_dependency_wait();
    }
    if constexpr (kTold) {
        cluster_sync();
    } else {
        __syncthreads();
    }
    int const i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = __ldg(in + i) + 1;
    cluster_sync();
}
template <bool kTold>
cudaError_t run_dependent() {
    std::vector<float> in(128, 3), out(128);
    know("in", in), know("out", out);
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {2, 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    auto const error = launch_with({attributes[0], attributes[1]}, &dependent<kTold>, 4, 32, 0,
                                   in.data(), out.data());
    expect(error != cudaSuccess || out == std::vector<float>(128, 4), "values");
    return error;
}

// ---- misuses of barrier.cluster

enum class Misuse { twice, unarrived, missing_lane, elsewhere };

template <Misuse kFault>
__global__ void barrier_misuse() {
    if constexpr (kFault == Misuse::twice) {
        cluster_arrive();
        cluster_arrive();
    } else if constexpr (kFault == Misuse::unarrived) {
        cluster_wait();
    } else if constexpr (kFault == Misuse::missing_lane) {
        if (threadIdx.x == 5) {
            __syncwarp();
        }
    } else if (block_rank_in_cluster() == 1 && threadIdx.x < 32) {
        sm90::named_barrier_sync(3, 64);
    }
    cluster_sync();
}

// ---- multicast: blocks load parts of X (64, 64) for all, and each computes X X^T

struct Multicast {
    static constexpr int kRounds = 3, kSide = 64, kBytes = kSide * kSide * 2;
    // Threads 0 to 127 multiply, 128 loads.
    static constexpr int kThreads = 160;
    enum Fault {
        none,
        loads,  // not a fault: X is loaded, too
        loads_unfenced,
        released_early,
        outside,
        nowhere,
        unawaited,
        unexpected
    };
    struct Arguments {
        CUtensorMap map;
        float *out;
    };
    using T = half_t;
    using Layout = decltype(tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<T>{}, Shape<_64, _64>{}));

    template <Fault kFault>
    static void load(Arguments const &x) {
        unsigned const blocks = cluster_shape().x, rank = block_rank_in_cluster();
        int const rows = kSide / static_cast<int>(blocks);
        auto mask = static_cast<uint16_t>((1u << blocks) - 1);
        if constexpr (kFault == outside) {
            mask |= 1u << blocks;
        } else if constexpr (kFault == nowhere) {
            mask = 0;
        }
        for (int round = 0; round < kRounds; ++round) {
            ClusterBarrier::wait(empty(), (round & 1) ^ 1);
            if (kFault != unexpected || rank == 0) {
                ClusterTransactionBarrier::arrive_and_expect_tx(full(), kBytes);
            }
            int const row = static_cast<int>(rank) * rows;
            SM90_TMA_LOAD_MULTICAST_4D::copy(&x.map, full(), mask, 0, smem() + row * kSide * 2, 0,
                                             round * kSide + row, 0, 0);
        }
    }

    template <Fault kFault>
    static void release() {
        if (threadIdx.x < cluster_shape().x) {
            ClusterBarrier::arrive(empty(), threadIdx.x, true);
        }
    }

    template <Fault kFault>
    static void multiply(Arguments const &x) {
        Tensor sX = make_tensor(make_smem_ptr(reinterpret_cast<T *>(smem())), Layout{});
        for (int round = 0; round < kRounds; ++round) {
            ClusterBarrier::wait(full(), round & 1);
            float d[kSide / 2] = {};
            sm90::wgmma_fence();
            for (int k = 0; k < kSide / 16; ++k) {
                uint64_t const slice = SM90::GMMA::make_gmma_desc<SM90::GMMA::Major::K>(
                                           local_tile(sX, Shape<_64, _16>{}, make_coord(0, k)))
                                           .desc_;
                sm90::Wgmma<T, kSide, false>::ss(d, slice, slice, k > 0);
            }
            sm90::wgmma_commit();
            if constexpr (kFault == released_early) {
                release<kFault>();
            }
            sm90::wgmma_wait<0>();
            if constexpr (kFault == loads || kFault == loads_unfenced) {
                uint32_t found[4];
                SM75_U32x4_LDSM_N::copy(*reinterpret_cast<uint128_t *>(smem() + threadIdx.x * 64),
                                        found[0], found[1], found[2], found[3]);
                if constexpr (kFault == loads) {
                    sm90::fence_async_proxy();
                }
            }
            sm90::named_barrier_sync(1, 128);
            if constexpr (kFault != released_early) {
                release<kFault>();
            }
            float *const out = x.out + (blockIdx.x * kRounds + round) * kSide * kSide;
            for (int i = 0; i < kSide / 2; ++i) {
                int const t = threadIdx.x;
                int const row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8;
                out[row * kSide + t % 4 * 2 + i % 2 + i / 4 * 8] = d[i];
            }
        }
    }

    static uint64_t *full() { return word_at(kBytes / 8); }
    static uint64_t *empty() { return word_at(kBytes / 8 + 1); }

    template <Fault kFault>
    static __global__ void kernel(Arguments const x) {
        if (threadIdx.x == 0) {
            ClusterBarrier::init(full(), 1);
            ClusterBarrier::init(empty(), cluster_shape().x);
            cutlass::arch::fence_barrier_init();
        }
        cluster_sync();
        if (kFault == unawaited && block_rank_in_cluster() == 1) {
            return;
        }
        if (threadIdx.x == 128) {
            load<kFault>(x);
        } else if (threadIdx.x < 128) {
            multiply<kFault>(x);
        }
        __syncwarp();
        cluster_sync();
    }

    static float element(int row, int column) {
        return float((row * 7 + column * 5) % 23 - 11) / 8;
    }

    template <Fault kFault>
    static std::function<cudaError_t()> with(int blocks, sim::CopyMode mode = sim::CopyMode::late) {
        return [=] {
            sim::state().settings.copy_mode = mode;
            std::vector<half_t> in(kRounds * kSide * kSide);
            std::vector<float> out(2 * blocks * kRounds * kSide * kSide, -1);
            for (int i = 0; i < static_cast<int>(in.size()); ++i) {
                in[i] = half_t(element(i / kSide, i % kSide));
            }
            Arguments const x{encode(in.data(), kRounds * kSide, kSide, kSide, kSide / blocks,
                                     kSide, CU_TENSOR_MAP_SWIZZLE_128B),
                              out.data()};
            auto const error =
                launch_clusters(&kernel<kFault>, blocks, 2 * blocks, kThreads, kBytes + 64, x);
            for (int i = 0; i < static_cast<int>(out.size()) && error == cudaSuccess; ++i) {
                int const round = i / kSide / kSide % kRounds;
                int const m = round * kSide + i / kSide % kSide, n = round * kSide + i % kSide;
                float exact = 0;
                for (int k = 0; k < kSide; ++k) {
                    exact += element(m, k) * element(n, k);
                }
                expect(out[i] == exact, "element " + std::to_string(i));
            }
            return error;
        };
    }
};
using M = Multicast;

std::function<cudaError_t()> two_blocks(void (*kernel)()) {
    return [=] { return launch_clusters(kernel, 2, 2, 64, 64); };
}
std::function<cudaError_t()> sending(void (*kernel)(int *), sim::CopyMode mode) {
    return [=] {
        sim::state().settings.copy_mode = mode;
        int wrong = 0;
        auto const error = launch_clusters(kernel, 2, 2, 64, 64 + 2 * 64 * 4, &wrong);
        expect(wrong == 0, "words");
        return error;
    };
}

Cases const cases{
    {"identity", &run_identity},
    {"published", &run_publish<true>},
    {"unpublished", &run_publish<false>},
    {"sizes", &run_sizes},
    {"exchange", &run_exchange<Exchange::right>},
    {"exchange_not_begun", &run_exchange<Exchange::not_begun>},
    {"exchange_ended", &run_exchange<Exchange::ended>},
    {"exchange_outside", &run_exchange<Exchange::outside>},
    {"exchange_unordered", &run_exchange<Exchange::unordered>},
    {"send_late", sending(&send<Send::right>, sim::CopyMode::late)},
    {"send_random", sending(&send<Send::right>, sim::CopyMode::random)},
    {"send_eager", sending(&send<Send::right>, sim::CopyMode::eager)},
    {"send_too_many_bytes", sending(&send<Send::too_many_bytes>, sim::CopyMode::late)},
    {"send_to_nobody", sending(&send<Send::to_nobody>, sim::CopyMode::late)},
    {"deliver_late", sending(&deliver<Deliver::right>, sim::CopyMode::late)},
    {"deliver_random", sending(&deliver<Deliver::right>, sim::CopyMode::random)},
    {"deliver_eager", sending(&deliver<Deliver::right>, sim::CopyMode::eager)},
    {"deliver_unfenced", sending(&deliver<Deliver::unfenced>, sim::CopyMode::late)},
    {"deliver_overwritten", sending(&deliver<Deliver::overwritten>, sim::CopyMode::late)},
    {"deliver_unexpected", sending(&deliver<Deliver::unexpected>, sim::CopyMode::late)},
    {"deliver_to_nobody", sending(&deliver<Deliver::to_nobody>, sim::CopyMode::late)},
    {"arrive", &run_arrive<Arrive::right>},
    {"arrive_polled", &run_arrive<Arrive::polled>},
    {"arrive_last", &run_arrive<Arrive::last>},
    {"arrive_unawaited", &run_arrive<Arrive::unawaited>},
    {"arrive_outside", &run_arrive<Arrive::outside>},
    {"arrive_unfenced", &run_arrive<Arrive::unfenced>},
    {"atomics", &run_atomics},
    {"dependent", &run_dependent<true>},
    {"dependent_untold", &run_dependent<false>},
    {"barrier_twice", two_blocks(&barrier_misuse<Misuse::twice>)},
    {"barrier_unarrived", two_blocks(&barrier_misuse<Misuse::unarrived>)},
    {"barrier_missing_lane", two_blocks(&barrier_misuse<Misuse::missing_lane>)},
    {"barrier_elsewhere", two_blocks(&barrier_misuse<Misuse::elsewhere>)},
    {"multicast_late", M::with<M::none>(2)},
    {"multicast_random", M::with<M::none>(2, sim::CopyMode::random)},
    {"multicast_eager", M::with<M::none>(2, sim::CopyMode::eager)},
    {"multicast_4", M::with<M::none>(4)},
    {"multicast_released_early", M::with<M::released_early>(2)},
    {"multicast_loads", M::with<M::loads>(2)},
    {"multicast_loads_unfenced", M::with<M::loads_unfenced>(2)},
    {"multicast_outside", M::with<M::outside>(2)},
    {"multicast_nowhere", M::with<M::nowhere>(2)},
    {"multicast_unawaited", M::with<M::unawaited>(2)},
    {"multicast_unexpected", M::with<M::unexpected>(2)},
};

}  // namespace

int main(int argc, char **argv) { return run_case(cases, argc, argv); }
