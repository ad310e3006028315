// Replaces csrc/flash_attn/src/arch_sm90.h: the same functions, implemented by the simulator.
#pragma once

#include <sim/runtime_sm90.h>

#include <cstdint>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/util.hpp>
#include <cute/config.hpp>

namespace flash::sm90 {

using Barrier = uint64_t;

inline uint32_t smem_address(void const *ptr) { return sim::smem_address(ptr); }

inline bool elect_one() { return sim::elect_one(); }

inline void barrier_init(Barrier *barrier, uint32_t arrivals) {
    sim::mbarrier_init(barrier, arrivals);
}
inline void fence_barrier_init() { sim::mbarrier_fence_init(); }
inline void barrier_arrive(Barrier *barrier, bool arrive = true) {
    if (arrive) {
        sim::mbarrier_arrive(barrier, 0);
    }
}
inline void barrier_arrive_expect(Barrier *barrier, uint32_t bytes) {
    sim::mbarrier_arrive(barrier, bytes);
}
inline void barrier_wait(Barrier *barrier, uint32_t parity) { sim::mbarrier_wait(barrier, parity); }

inline void named_barrier_sync(uint32_t id, uint32_t threads) {
    sim::barrier_sync(static_cast<int>(id), static_cast<int>(threads));
}
inline void named_barrier_arrive(uint32_t id, uint32_t threads) {
    sim::barrier_arrive(static_cast<int>(id), static_cast<int>(threads));
}

// The simulator models no memory ordering weaker than program order; across threads, barriers and
// atomics order accesses.
inline unsigned add_acq_rel(unsigned *counter, unsigned value) { return atomicAdd(counter, value); }
inline void add_release(unsigned *counter, unsigned value) { atomicAdd(counter, value); }
inline unsigned load_acquire(unsigned const *counter) { return sim::load_acquire(counter); }

template <int kRegisters>
void registers_raise() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
    sim::registers_change(kRegisters, true);
}
template <int kRegisters>
void registers_lower() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
    sim::registers_change(kRegisters, false);
}

// ---- clusters: objects of another block are given by its rank and their address in this block
inline uint32_t cluster_rank() { return cute::block_rank_in_cluster(); }
inline void cluster_arrive() { sim::cluster_arrive(false); }
inline void cluster_wait() { sim::cluster_wait(); }
inline void barrier_arrive_at(uint32_t rank, Barrier *barrier, bool arrive) {
    if (arrive) {
        sim::mbarrier_arrive_remote(barrier, 0, rank);
    }
}
inline void store_async_at(uint32_t rank, uint32_t *to, uint32_t value, Barrier *barrier) {
    sim::store_async(value, sim::smem_address(to), sim::smem_address(barrier), rank);
}
inline void bulk_copy_to(uint32_t rank, void *to, void const *from, uint32_t bytes,
                         Barrier *barrier) {
    sim::bulk_copy_to(to, from, bytes, barrier, rank);
}

// L2 cache hints have no effect here: no cache is modelled.
enum class CacheHint : uint64_t { evict_first, evict_last };

inline void prefetch_descriptor(void const *) {}

template <class... Coordinates>
void tma_load(void const *descriptor, Barrier *barrier, CacheHint, void *smem,
              Coordinates... coordinates) {
    int const at[] = {coordinates...};
    sim::tma_load(descriptor, barrier, smem, at, sizeof...(Coordinates));
}

inline void copy_async(void *smem, void const *gmem, bool valid) {
    sim::cp_async(smem, gmem, 16, valid);
}
inline void barrier_arrive_copies(Barrier *barrier) { sim::mbarrier_arrive_copies(barrier); }
inline void await_copies() { sim::cp_async_wait_all(); }

inline void fence_async_proxy() { sim::fence_async_proxy(); }
// A no-op: global memory has a single proxy in the simulator.
inline void fence_async_proxy_global() {}

// An ordinary load: no cache is modelled.
inline float4 load_from_l2(float4 const *gmem) { return *gmem; }

// Takes its place in the drawn order of atomics, so that a block that adds to the sums without
// having waited for this store is found.
inline void store_first(float *gmem, float a, float b, float c, float d) {
    float const values[] = {a, b, c, d};
    sim::store_in_turn(gmem, values, 4);
}

inline void reduce_add(float *gmem, float a, float b, float c, float d) {
    float const values[] = {a, b, c, d};
    sim::reduce_add(gmem, values, 4);
}

inline void bulk_reduce_add(float *gmem, float const *smem, uint32_t bytes) {
    sim::bulk_reduce_add(gmem, smem, bytes);
}
inline void bulk_store(float *gmem, float const *smem, uint32_t bytes) {
    sim::bulk_store(gmem, smem, bytes);
}
inline void bulk_commit() { sim::tma_store_commit(); }
inline void bulk_wait_read() { sim::tma_store_wait(0, true); }
inline void bulk_wait() { sim::tma_store_wait(0, false); }

}  // namespace flash::sm90
