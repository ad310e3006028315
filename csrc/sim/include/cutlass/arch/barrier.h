// Stands before CUTLASS's <cutlass/arch/barrier.h>: named barriers reach the simulator; the rest of
// that header (mbarriers) keeps CUTLASS's host bodies.
#pragma once

#define NamedBarrier CutlassNamedBarrier
#include_next <cutlass/arch/barrier.h>
#undef NamedBarrier

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

}  // namespace cutlass::arch
