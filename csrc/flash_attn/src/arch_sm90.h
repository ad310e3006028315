// Hopper's instructions, one function each: mbarriers, clusters, named barriers, register
// reallocation, TMA, cp.async, reductions. This file and wgmma_sm90.h hold the sm90 class's inline
// PTX, but for that of dropout.h; the simulator has headers of its own in their place. PTX ISA
// sections are in brackets.
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>
#include <cute/config.hpp>

namespace flash::sm90 {

// An mbarrier: it counts the pending arrivals of the current phase, and the bytes that async copies
// have yet to complete (tx-count).
using Barrier = uint64_t;

CUTE_DEVICE uint32_t smem_address(void const *ptr) { return cute::cast_smem_ptr_to_uint(ptr); }

// True in one lane of a converged warp, in the same one every time. [elect.sync]
CUTE_DEVICE bool elect_one() {
    uint32_t elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(elected));
    return elected != 0;
}

// ---- mbarriers [mbarrier] ----

CUTE_DEVICE void barrier_init(Barrier *barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(smem_address(barrier)),
                 "r"(arrivals));
}

// Makes initialised barriers visible to copies of the async proxy (TMA) and to the cluster.
CUTE_DEVICE void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

// Arrives if `arrive`, predicated and without a branch.
CUTE_DEVICE void barrier_arrive(Barrier *barrier, bool arrive = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %1, 0;\n"
        "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n"
        "}\n" ::"r"(smem_address(barrier)),
        "r"(uint32_t(arrive))
        : "memory");
}

// Arrives with expect_tx: the phase completes only once `bytes` of copies have landed, too.
CUTE_DEVICE void barrier_arrive_expect(Barrier *barrier, uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(smem_address(barrier)),
        "r"(bytes)
        : "memory");
}

// Waits until the phase of this parity has completed. On a fresh barrier, that of parity 1 has.
CUTE_DEVICE void barrier_wait(Barrier *barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(smem_address(barrier)),
        "r"(parity)
        : "memory");
}

// ---- clusters [mapa, barrier.cluster, st.async, cp.async.bulk] ----
// Objects of another CTA of the cluster are given by its rank and their address in this CTA.

CUTE_DEVICE uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
    return rank;
}
CUTE_DEVICE uint32_t smem_address_at(uint32_t rank, void const *ptr) {
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n"
                 : "=r"(address)
                 : "r"(smem_address(ptr)), "r"(rank));
    return address;
}

// All threads of all CTAs of the cluster arrive. Those that wait see what these wrote before.
CUTE_DEVICE void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.aligned;\n" ::: "memory");
}
CUTE_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;\n" ::: "memory"); }

CUTE_DEVICE void barrier_arrive_at(uint32_t rank, Barrier *barrier, bool arrive) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %1, 0;\n"
        "@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n"
        "}\n" ::"r"(smem_address_at(rank, barrier)),
        "r"(uint32_t(arrive))
        : "memory");
}

// Stores a word to CTA `rank` and completes its 4 bytes at that CTA's barrier.
CUTE_DEVICE void store_async_at(uint32_t rank, uint32_t *to, uint32_t value, Barrier *barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];\n" ::"r"(
            smem_address_at(rank, to)),
        "r"(value), "r"(smem_address_at(rank, barrier))
        : "memory");
}

// Copies from shared memory to that of CTA `rank`, and completes the bytes at that CTA's barrier.
CUTE_DEVICE void bulk_copy_to(uint32_t rank, void *to, void const *from, uint32_t bytes,
                              Barrier *barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];\n" ::"r"(smem_address_at(rank, to)),
        "r"(smem_address(from)), "r"(bytes), "r"(smem_address_at(rank, barrier))
        : "memory");
}

// ---- named barriers [bar] ----

CUTE_DEVICE void named_barrier_sync(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

CUTE_DEVICE void named_barrier_arrive(uint32_t id, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// ---- the warpgroup's share of the register file [setmaxnreg] ----

// Raises the registers of each thread to kRegisters, which must not be fewer than the warpgroup
// has, or the effect is undefined.
template <int kRegisters>
CUTE_DEVICE void registers_raise() {
    static_assert(kRegisters % 8 == 0 && kRegisters <= 256);
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// Lowers the registers of each thread to kRegisters, which must not be more than the warpgroup has,
// or the effect is undefined.
template <int kRegisters>
CUTE_DEVICE void registers_lower() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24);
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// ---- TMA [cp.async.bulk.tensor] ----

// L2 eviction priorities, as the 64-bit policies that createpolicy makes of them.
enum class CacheHint : uint64_t {
    evict_first = 0x12f0000000000000,
    evict_last = 0x14f0000000000000,
};

// Prefetches a TMA descriptor before its first use.
CUTE_DEVICE void prefetch_descriptor(void const *descriptor) {
    asm volatile("prefetch.tensormap [%0];\n" ::"l"(descriptor) : "memory");
}

// Loads the descriptor's box at coordinates (c0, c1, ...), innermost first, into smem. Elements
// outside the tensor arrive as zeros; `barrier` gets the bytes of the whole box in any case.
CUTE_DEVICE void tma_load(void const *descriptor, Barrier *barrier, CacheHint hint, void *smem,
                          int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;\n" ::"r"(smem_address(smem)),
        "l"(descriptor), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
        "l"(static_cast<uint64_t>(hint))
        : "memory");
}
CUTE_DEVICE void tma_load(void const *descriptor, Barrier *barrier, CacheHint hint, void *smem,
                          int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;\n" ::"r"(smem_address(smem)),
        "l"(descriptor), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4),
        "l"(static_cast<uint64_t>(hint))
        : "memory");
}

// Makes generic-proxy writes to shared memory, this thread's own and those that it has waited for,
// visible to the async proxy (wgmma, TMA).
CUTE_DEVICE void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// Orders generic-proxy accesses to global memory and those of bulk reductions, either way.
CUTE_DEVICE void fence_async_proxy_global() {
    asm volatile("fence.proxy.async.global;\n" ::: "memory");
}

// ---- copies of the generic proxy [cp.async] ----

// Copies 16 bytes from global to shared memory, past L1; if !valid, writes zeros, reads nothing.
CUTE_DEVICE void copy_async(void *smem, void const *gmem, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(smem_address(smem)),
                 "l"(gmem), "r"(valid ? 16 : 0)
                 : "memory");
}

// Issues this thread's arrival, which takes effect once all its copy_async() so far have landed. It
// does not wait for them. [cp.async.mbarrier]
CUTE_DEVICE void barrier_arrive_copies(Barrier *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(smem_address(barrier))
                 : "memory");
}

// Waits until all copy_async() of this thread have landed.
CUTE_DEVICE void await_copies() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

// ---- sums in global memory [red, atom, ld] ----

// Adds to a counter in global memory and returns its old value, with acquire and release semantics.
// What the CTA's threads wrote before a barrier with this thread is ordered before the addition,
// and what they read behind the next barrier after it (PTX ISA, "causality order").
CUTE_DEVICE unsigned add_acq_rel(unsigned *counter, unsigned value) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;\n"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(counter)), "r"(value)
                 : "memory");
    return before;
}

// Adds to a counter in global memory, with release semantics: accesses before add_release() are
// ordered before the addition. Those that follow are not ordered behind it, and the thread does not
// wait for the old value.
CUTE_DEVICE void add_release(unsigned *counter, unsigned value) {
    asm volatile(
        "red.release.gpu.global.add.u32 [%0], %1;\n" ::"l"(__cvta_generic_to_global(counter)),
        "r"(value)
        : "memory");
}

// Loads a counter in global memory, with acquire semantics: what is ordered before the additions
// that it sees is ordered before what follows.
CUTE_DEVICE unsigned load_acquire(unsigned const *counter) {
    unsigned x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n"
                 : "=r"(x)
                 : "l"(__cvta_generic_to_global(counter))
                 : "memory");
    return x;
}

// Loads four neighbouring floats from L2, where reductions add, and no stale copy from L1.
CUTE_DEVICE float4 load_from_l2(float4 const *gmem) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(gmem)
                 : "memory");
    return x;
}

// Stores four neighbouring floats, at a multiple of 16 bytes: the first terms of sums to which
// other CTAs add later.
CUTE_DEVICE void store_first(float *gmem, float a, float b, float c, float d) {
    *reinterpret_cast<float4 *>(gmem) = make_float4(a, b, c, d);
}

// Adds four neighbouring floats, at a multiple of 16 bytes. Each of the four additions is atomic,
// the vector is not.
CUTE_DEVICE void reduce_add(float *gmem, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(gmem), "f"(a),
                 "f"(b), "f"(c), "f"(d)
                 : "memory");
}

// ---- bulk reductions and stores [cp.reduce.async.bulk, cp.async.bulk] ----

// Adds floats of shared memory to global memory, both at multiples of 16 bytes, asynchronously, in
// this thread's next bulk group. Each addition is atomic, the whole is not.
CUTE_DEVICE void bulk_reduce_add(float *gmem, float const *smem, uint32_t bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(gmem),
        "r"(smem_address(smem)), "r"(bytes)
        : "memory");
}

// Stores floats of shared memory to global memory, both at multiples of 16 bytes, asynchronously,
// in this thread's next bulk group.
CUTE_DEVICE void bulk_store(float *gmem, float const *smem, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(gmem),
                 "r"(smem_address(smem)), "r"(bytes)
                 : "memory");
}

CUTE_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }

// Waits until all bulk groups of this thread have read shared memory, which may then be reused.
CUTE_DEVICE void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
}
// Waits until all bulk groups of this thread are complete.
CUTE_DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory"); }

}  // namespace flash::sm90
