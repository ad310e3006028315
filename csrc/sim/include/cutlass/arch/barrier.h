// Wraps CUTLASS's <cutlass/arch/barrier.h>: named barriers and mbarriers, implemented by the
// simulator.
#pragma once

#define NamedBarrier CutlassNamedBarrier
#define ClusterBarrier CutlassClusterBarrier
#define ClusterTransactionBarrier CutlassClusterTransactionBarrier
#define fence_barrier_init cutlass_fence_barrier_init
#define fence_view_async_shared cutlass_fence_view_async_shared
#define cpasync_barrier_arrive cutlass_cpasync_barrier_arrive
#define cpasync_barrier_arrive_noinc cutlass_cpasync_barrier_arrive_noinc
#include_next <cutlass/arch/barrier.h>
#undef NamedBarrier
#undef ClusterBarrier
#undef ClusterTransactionBarrier
#undef fence_barrier_init
#undef fence_view_async_shared
#undef cpasync_barrier_arrive
#undef cpasync_barrier_arrive_noinc

namespace cutlass::arch {

class NamedBarrier {
  public:
    static constexpr uint32_t ReservedNamedBarrierCount =
        static_cast<uint32_t>(ReservedNamedBarriers::FirstUserBarrier);
    static constexpr uint32_t HardwareMaxNumNamedBarriers = 16;

    explicit NamedBarrier(uint32_t num_threads, uint32_t id = 0)
        : num_threads_(num_threads), id_(id + ReservedNamedBarrierCount) {}
    NamedBarrier(uint32_t num_threads, ReservedNamedBarriers id)
        : num_threads_(num_threads), id_(static_cast<uint32_t>(id)) {}

    void arrive_and_wait() const { sim::barrier_sync(id_, num_threads_); }
    void sync() const { arrive_and_wait(); }
    void arrive() const { sim::barrier_arrive(id_, num_threads_); }

    static void arrive_and_wait(uint32_t num_threads, uint32_t id) {
        sim::barrier_sync(id + ReservedNamedBarrierCount, num_threads);
    }
    static void arrive_and_wait(uint32_t num_threads, ReservedNamedBarriers id) {
        sim::barrier_sync(static_cast<int>(id), num_threads);
    }
    static void sync(uint32_t num_threads, uint32_t id) { arrive_and_wait(num_threads, id); }
    static void sync(uint32_t num_threads, ReservedNamedBarriers id) {
        arrive_and_wait(num_threads, id);
    }
    static void arrive(uint32_t num_threads, uint32_t id) {
        sim::barrier_arrive(id + ReservedNamedBarrierCount, num_threads);
    }
    static void arrive(uint32_t num_threads, ReservedNamedBarriers id) {
        sim::barrier_arrive(static_cast<int>(id), num_threads);
    }

  private:
    uint32_t num_threads_;
    uint32_t id_;
};

// An mbarrier in shared memory, at which threads of the whole cluster may arrive.
struct ClusterBarrier {
    using ValueType = uint64_t;

    ClusterBarrier() = delete;

    void init(uint32_t arrivals) const { init(&barrier_, arrivals); }
    bool test_wait(uint32_t phase, uint32_t pred = true) const {
        return test_wait(&barrier_, phase, pred);
    }
    bool try_wait(uint32_t phase) const { return try_wait(&barrier_, phase); }
    void wait(uint32_t phase) const { wait(&barrier_, phase); }
    void arrive() const { arrive(&barrier_); }
    void arrive(uint32_t rank, uint32_t pred = true) const { arrive(&barrier_, rank, pred); }

    static void init(ValueType const *barrier, uint32_t arrivals) {
        sim::mbarrier_init(address(barrier), arrivals);
    }
    static void wait(ValueType const *barrier, uint32_t phase) {
        sim::mbarrier_wait(address(barrier), phase);
    }
    static bool test_wait(ValueType const *barrier, uint32_t phase, uint32_t pred) {
        return pred && sim::mbarrier_test(address(barrier), phase);
    }
    static bool try_wait(ValueType const *barrier, uint32_t phase) {
        return sim::mbarrier_test(address(barrier), phase);
    }
    static void arrive(ValueType const *barrier, uint32_t rank, uint32_t pred) {
        if (pred) {
            sim::mbarrier_arrive_remote(address(barrier), 0, rank);
        }
    }
    static void arrive(ValueType const *barrier) { sim::mbarrier_arrive(address(barrier), 0); }
    static void invalidate(ValueType const *) { sim::not_covered("mbarrier.inval"); }

  protected:
    static void *address(ValueType const *barrier) { return const_cast<ValueType *>(barrier); }

    ValueType barrier_;
};

// An mbarrier that also counts transaction bytes.
struct ClusterTransactionBarrier : ClusterBarrier {
    ClusterTransactionBarrier() = delete;

    void arrive_and_expect_tx(uint32_t bytes) const { arrive_and_expect_tx(&barrier_, bytes); }
    void arrive_and_expect_tx(uint32_t bytes, uint32_t rank, uint32_t pred = 1) const {
        arrive_and_expect_tx(&barrier_, bytes, rank, pred);
    }
    void expect_transaction(uint32_t bytes) const { expect_transaction(&barrier_, bytes); }
    void complete_transaction(uint32_t bytes, uint32_t pred = 1) const {
        complete_transaction(&barrier_, cute::block_rank_in_cluster(), bytes, pred);
    }
    void complete_transaction(uint32_t rank, uint32_t bytes, uint32_t pred) const {
        complete_transaction(&barrier_, rank, bytes, pred);
    }

    static void arrive_and_expect_tx(ValueType const *barrier, uint32_t bytes) {
        sim::mbarrier_arrive(address(barrier), bytes);
    }
    static void arrive_and_expect_tx(ValueType const *barrier, uint32_t bytes, uint32_t rank,
                                     uint32_t pred) {
        if (pred) {
            sim::mbarrier_arrive_remote(address(barrier), bytes, rank);
        }
    }
    static void expect_transaction(ValueType const *barrier, uint32_t bytes) {
        sim::mbarrier_transaction(address(barrier), bytes, cute::block_rank_in_cluster());
    }
    static void complete_transaction(ValueType const *barrier, uint32_t rank, uint32_t bytes,
                                     uint32_t pred = 1) {
        if (pred) {
            sim::mbarrier_transaction(address(barrier), -int64_t(bytes), rank);
        }
    }
};

inline void fence_barrier_init() { sim::mbarrier_fence_init(); }
inline void fence_view_async_shared() { sim::fence_async_proxy(); }
inline void cpasync_barrier_arrive(uint64_t const *) {
    sim::not_covered("cp.async.mbarrier.arrive");
}
inline void cpasync_barrier_arrive_noinc(uint64_t const *) {
    sim::not_covered("cp.async.mbarrier.arrive.noinc");
}

}  // namespace cutlass::arch
