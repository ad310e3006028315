// The part of runtime.h for Hopper's instructions, and the encoding of tensor maps on the host.
#pragma once

#include "runtime.h"

#pragma GCC visibility push(default)

namespace sim {

// Returns the 32-bit shared memory address: the offset in the block's dynamic shared memory, plus
// the 1 KiB that the system reserves.
uint32_t smem_address(void const *ptr);

// Warp-wide; returns true in one lane, always the same one of a warp.
bool elect_one();

void mbarrier_init(void *barrier, uint32_t arrivals);
void mbarrier_fence_init();
void mbarrier_arrive(void *barrier, uint32_t expected_bytes);
// cp.async.mbarrier.arrive.noinc: arrives once this thread's cp.asyncs so far have landed.
void mbarrier_arrive_copies(void *barrier);
void mbarrier_wait(void *barrier, uint32_t parity);
// Returns whether the phase is complete. If it is not, runs other lanes and looks again.
bool mbarrier_test(void *barrier, uint32_t parity);
// expect_tx (bytes > 0) or complete_tx (bytes < 0) at the mbarrier of block `rank`, without an
// arrival.
void mbarrier_transaction(void *barrier, int64_t bytes, uint32_t rank);
// Arrives at the mbarrier that block `rank` has at this address.
void mbarrier_arrive_remote(void *barrier, uint32_t expected_bytes, uint32_t rank);

// ---- clusters
Dim3 cluster_shape();
void cluster_arrive(bool relaxed);
void cluster_wait();
// mapa, for generic and for 32-bit addresses: returns the corresponding one in block `rank`.
void *map_shared_rank(void const *address, uint32_t rank);
uint32_t map_smem_address(uint32_t address, uint32_t rank);
// st.async: stores 32 bits in block `rank` and completes the 4 bytes at its mbarrier. Both
// addresses are given as those in the issuing block.
void store_async(uint32_t value, uint32_t address, uint32_t barrier, uint32_t rank);
// cp.async.bulk from the block's shared memory to the shared memory that block `rank` has at `to`.
// Completes transaction bytes at the mbarrier that block `rank` has at `barrier`.
void bulk_copy_to(void *to, void const *from, uint32_t bytes, void *barrier, uint32_t rank);

// setmaxnreg; all 128 threads of a warpgroup must execute it.
void registers_change(int registers, bool raise);

// Loads one box of the tensor that a descriptor of encode_tensor_map() describes; `coordinates` are
// innermost first.
void tma_load(void const *descriptor, void *barrier, void *smem, int const *coordinates, int rank);
// Loads the box to each block of `mask`; completes transaction bytes at each block's own mbarrier.
void tma_load_multicast(void const *descriptor, void *barrier, void *smem, int const *coordinates,
                        int rank, uint16_t mask);
// Stores a box of shared memory to the tensor, asynchronously, in a bulk group of the issuing
// thread. tma_store_wait() returns once all but the newest `pending_groups` have read shared memory
// and, unless `read_only`, written the tensor.
void tma_store(void const *descriptor, void const *smem, int const *coordinates, int rank);
// cp.reduce.async.bulk: adds `bytes` of floats to global memory, in the same bulk groups. Addresses
// and `bytes` are multiples of 16.
void bulk_reduce_add(float *gmem, void const *smem, uint32_t bytes);
// cp.async.bulk: stores the floats. Takes its place in the drawn order of atomics, so that a block
// that adds to the sums without having waited for this store is found.
void bulk_store(float *gmem, void const *smem, uint32_t bytes);
void tma_store_commit();
void tma_store_wait(int pending_groups, bool read_only);
void fence_async_proxy();

// One wgmma.mma_async m64 n k16 with fp32 accumulators. A is read from registers if the argument
// `a` of wgmma() is not null, else from shared memory.
struct Wgmma {
    MmaInput input;
    int n;
    bool transposed_b;
    bool accumulate;
    uint64_t a, b;  // matrix descriptors
    bool operator==(Wgmma const &) const = default;
};
void wgmma(Wgmma const &instruction, float *acc, uint32_t *a);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending_groups);

// The arguments of cuTensorMapEncodeTiled for elements of `element_bytes`; spans in bytes.
struct TensorMapArguments {
    int element_bytes;
    uint32_t rank;
    uint64_t address;
    uint64_t const *extents, *strides;
    uint32_t const *box, *element_strides;
    int swizzle_span;  // 0: rows are not swizzled
};
// Returns a CUresult; after a failure error_text() gives the reason.
int encode_tensor_map(void *map, TensorMapArguments const &arguments);
int refuse_tensor_map(int result, char const *why);

// griddepcontrol.wait. In a dependent launch every access to global memory must be ordered after
// it.
void grid_dependency_wait();
// griddepcontrol.launch_dependents. A no-op: only the next kernel's own wait orders memory
// accesses.
inline void grid_dependency_launch() {}

// Blocks that run at the same time execute their atomics in an order drawn from the seed.
uint32_t atomic_add(uint32_t *address, uint32_t value);
uint32_t atomic_exchange(uint32_t *address, uint32_t value);
uint32_t load_acquire(uint32_t const *address);
// red.add of `count` neighbouring floats (1, 2 or 4), as one atomic. The address must be a multiple
// of their total size. store_in_turn() stores them instead.
void reduce_add(float *address, float const *values, int count);
void store_in_turn(float *address, float const *values, int count);

int sm_count();

}  // namespace sim

#pragma GCC visibility pop
