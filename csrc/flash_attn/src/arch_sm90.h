// Hopper's instructions, one function each: mbarriers, clusters, named barriers, register
// reallocation, TMA, cp.async, reductions.
// With wgmma_sm90.h the only inline PTX of the sm90 class; the simulator has headers of its own in
// their place. PTX ISA section in brackets.
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>
#include <cute/config.hpp>

namespace flash::sm90 {

// An mbarrier: arrivals of the current phase and bytes that asynchronous copies still owe it.
using Barrier = uint64_t;

CUTE_DEVICE uint32_t smem_address(void const *ptr) { return cute::cast_smem_ptr_to_uint(ptr); }

// One lane of a converged warp, the same one every time. [elect.sync]
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

// Makes initialised barriers visible to the copies of the asynchronous proxy and to the cluster.
CUTE_DEVICE void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

// Arrives if told to, without a branch.
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

// Arrives and promises `bytes` of copies: the phase ends when they have landed too.
CUTE_DEVICE void barrier_arrive_expect(Barrier *barrier, uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(smem_address(barrier)),
        "r"(bytes)
        : "memory");
}

// Waits until the phase of this parity has ended. A fresh barrier counts as having ended phase 1.
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
// What another CTA of the cluster has is given by its rank and the own address.

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

// All threads of all CTAs arrive, and those that wait see what these did before.
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

// Stores a word and completes its 4 bytes at the barrier, both of the other CTA.
CUTE_DEVICE void store_async_at(uint32_t rank, uint32_t *to, uint32_t value, Barrier *barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];\n" ::"r"(
            smem_address_at(rank, to)),
        "r"(value), "r"(smem_address_at(rank, barrier))
        : "memory");
}

// Copies from this CTA's shared memory to the other's and completes the bytes at its barrier.
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

// To no fewer than the warpgroup has, or the effect is undefined.
template <int kRegisters>
CUTE_DEVICE void registers_raise() {
    static_assert(kRegisters % 8 == 0 && kRegisters <= 256);
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// To no more than it has, likewise.
template <int kRegisters>
CUTE_DEVICE void registers_lower() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24);
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// ---- TMA [cp.async.bulk.tensor] ----

// L2 eviction priorities as the 64-bit policies that createpolicy makes of them.
enum class CacheHint : uint64_t {
    evict_first = 0x12f0000000000000,
    evict_last = 0x14f0000000000000,
};

// Brings a descriptor closer before it is first used.
CUTE_DEVICE void prefetch_descriptor(void const *descriptor) {
    asm volatile("prefetch.tensormap [%0];\n" ::"l"(descriptor) : "memory");
}

// Loads the descriptor's box at coordinates (c0, c1, ...), innermost first, into smem. Elements
// outside the tensor arrive as zeros; either way `barrier` is paid the whole box.
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

// Makes ordinary shared memory writes that this thread knows of, its own and those that it has
// waited for, visible to wgmma and TMA.
CUTE_DEVICE void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// Orders ordinary accesses to global memory and those of bulk reductions, either way.
CUTE_DEVICE void fence_async_proxy_global() {
    asm volatile("fence.proxy.async.global;\n" ::: "memory");
}

// ---- copies of the generic proxy [cp.async] ----

// Copies 16 bytes from global to shared memory, past L1; writes zeros and reads nothing if !valid.
CUTE_DEVICE void copy_async(void *smem, void const *gmem, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(smem_address(smem)),
                 "l"(gmem), "r"(valid ? 16 : 0)
                 : "memory");
}

// Arrives once all copies that this thread has issued so far have landed. [cp.async.mbarrier]
CUTE_DEVICE void barrier_arrive_copies(Barrier *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(smem_address(barrier))
                 : "memory");
}

// Waits until they have landed.
CUTE_DEVICE void await_copies() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

// ---- sums in global memory [red, atom, ld] ----

// Adds to a counter in global memory and returns what it was. What the threads of a CTA wrote
// before a barrier with this thread comes before it, and what they read behind the next one after
// it (PTX ISA, "causality order").
CUTE_DEVICE unsigned add_acq_rel(unsigned *counter, unsigned value) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;\n"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(counter)), "r"(value)
                 : "memory");
    return before;
}

// Adds to such a counter. What came before add_release() comes before the addition; what follows is
// not ordered behind it, and the thread does not wait for the old value.
CUTE_DEVICE void add_release(unsigned *counter, unsigned value) {
    asm volatile(
        "red.release.gpu.global.add.u32 [%0], %1;\n" ::"l"(__cvta_generic_to_global(counter)),
        "r"(value)
        : "memory");
}

// Loads such a counter. What came before the additions that it has seen comes before what follows.
CUTE_DEVICE unsigned load_acquire(unsigned const *counter) {
    unsigned x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n"
                 : "=r"(x)
                 : "l"(__cvta_generic_to_global(counter))
                 : "memory");
    return x;
}

// Loads four neighbouring floats from L2, where sums are, and not an older copy of L1's.
CUTE_DEVICE float4 load_from_l2(float4 const *gmem) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(gmem)
                 : "memory");
    return x;
}

// Stores four neighbouring floats, at a multiple of 16 bytes, to which others add later.
CUTE_DEVICE void store_first(float *gmem, float a, float b, float c, float d) {
    *reinterpret_cast<float4 *>(gmem) = make_float4(a, b, c, d);
}

// Adds four neighbouring floats, at a multiple of 16 bytes. Each of the four sums is atomic, the
// vector is not.
CUTE_DEVICE void reduce_add(float *gmem, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(gmem), "f"(a),
                 "f"(b), "f"(c), "f"(d)
                 : "memory");
}

// ---- bulk reductions and stores [cp.reduce.async.bulk, cp.async.bulk] ----

// Adds floats of shared memory to global memory, both at multiples of 16 bytes, asynchronously, in
// bulk groups of this thread. Each sum is atomic, the whole is not.
CUTE_DEVICE void bulk_reduce_add(float *gmem, float const *smem, uint32_t bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(gmem),
        "r"(smem_address(smem)), "r"(bytes)
        : "memory");
}

// Likewise stores them.
CUTE_DEVICE void bulk_store(float *gmem, float const *smem, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(gmem),
                 "r"(smem_address(smem)), "r"(bytes)
                 : "memory");
}

CUTE_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }

// Waits until this thread's groups have read shared memory.
CUTE_DEVICE void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
}
// Waits until they are complete.
CUTE_DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory"); }

}  // namespace flash::sm90
