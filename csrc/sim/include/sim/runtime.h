// The functions that a kernel compiled for the simulator calls: one per instruction that CuTe's
// arch layer or a CUDA built-in would issue. Implemented in csrc/sim/src.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

#pragma GCC visibility push(default)

namespace sim {

// The largest dynamic shared memory of a CTA on any modelled GPU (compute capability 9.0).
inline constexpr size_t kMaxSmemBytes = 227 * 1024;

enum class MmaInput { fp16, bf16 };
enum class Shuffle { index, up, down, exclusive_or };

// Warp-wide: every lane of the warp must execute it. `row` is the address of a row of 16 bytes.
// Only those of lanes 0 to 8 * matrices - 1 are used. `dst` receives one 32-bit register per 8x8
// matrix.
void ldmatrix(void const *row, uint32_t *dst, int matrices, bool transposed);

// Warp-wide: stores one 32-bit register per 8x8 matrix to rows; lanes 0 to 8 * matrices - 1 give
// the addresses of these.
void stmatrix(void *row, uint32_t const *src, int matrices, bool transposed);

// Warp-wide m16n8k(8 * b_registers) MMA: acc (4 registers) += A (2 * b_registers) B (b_registers).
void mma_m16n8(MmaInput input, int b_registers, float *acc, uint32_t const *a, uint32_t const *b);

// Copies 4, 8 or 16 bytes asynchronously; writes zeros and reads nothing when !valid.
void cp_async(void *smem, void const *gmem, int bytes, bool valid);
void cp_async_commit();
void cp_async_wait_group(int pending_groups);
void cp_async_wait_all();

// bar.sync and bar.arrive; threads == 0 means all threads of the block.
void barrier_sync(int id, int threads);
void barrier_arrive(int id, int threads);

void warp_sync(uint32_t mask);
uint32_t shuffle(Shuffle kind, uint32_t mask, uint32_t value, uint32_t argument, int width);
// Returns the ballot of `predicate` over the lanes of `mask`.
uint32_t ballot(uint32_t mask, bool predicate);

// Ends the launch with cudaErrorNotSupported: the verdict is "not covered".
[[noreturn]] void not_covered(char const *what);
// Ends the launch as a device-side trap would.
[[noreturn]] void trap(char const *what);

// Counts and checks one ordinary access of `bytes` bytes by a CuTe copy, to shared or global
// memory. Accesses to register fragments (fibre stacks) are recognised and ignored.
void note_access(void const *address, int bytes, bool write);

// Returns the dynamic shared memory of the running block, at a multiple of 1024 bytes.
void *dynamic_smem();

struct Dim3 {
    unsigned x, y, z;
};

struct Launch {
    Dim3 grid, block;
    size_t smem_bytes;
    void const *kernel;      // identifies the kernel whose function attributes apply
    Dim3 cluster{1, 1, 1};   // in blocks
    bool dependent = false;  // programmatic dependent launch: may overlap the previous kernel
};

// Runs every block of the grid to completion; returns a cudaError_t.
int launch(Launch const &launch, std::function<void()> const &body);
int set_max_dynamic_smem(void const *kernel, int bytes);
// Sets whether the kernel may be launched in clusters of more than 8 blocks, up to 16.
void allow_large_clusters(void const *kernel, bool allowed);
// Returns the error of the last launch or set_max_dynamic_smem() that failed; resets it if `clear`.
int last_error(bool clear);
char const *error_text(int error);

}  // namespace sim

#pragma GCC visibility pop
