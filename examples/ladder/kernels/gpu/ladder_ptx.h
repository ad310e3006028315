// The PTX instructions of rungs 7 to 10 (PTX ISA, "Warp-Level Matrix Instructions" and
// "Asynchronous Data Movement").
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ladder {

__device__ inline uint32_t smem_address(void const *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8 x 8 matrices of 16-bit elements. Lanes 8 i to 8 i + 7 give the addresses of the rows of
// matrix i; of each matrix lane l gets elements 2 (l % 4) and + 1 of row l / 4.
__device__ inline void ldmatrix(void const *row, uint32_t (&dst)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(dst[0]), "=r"(dst[1]), "=r"(dst[2]), "=r"(dst[3])
                 : "r"(smem_address(row))
                 : "memory");
}

// The same, of each matrix's transpose.
__device__ inline void ldmatrix_transposed(void const *row, uint32_t (&dst)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(dst[0]), "=r"(dst[1]), "=r"(dst[2]), "=r"(dst[3])
                 : "r"(smem_address(row))
                 : "memory");
}

// c (16 x 8) += a (16 x 16) b (16 x 8).
template <class Element>
__device__ inline void mma_m16n8k16(float (&c)[4], uint32_t const (&a)[4], uint32_t b0,
                                    uint32_t b1);
template <>
__device__ inline void mma_m16n8k16<__half>(float (&c)[4], uint32_t const (&a)[4], uint32_t b0,
                                            uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void mma_m16n8k16<__nv_bfloat16>(float (&c)[4], uint32_t const (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Copies 16 bytes from global to shared memory, without registers and L1. If !valid, writes zeros
// and reads nothing.
__device__ inline void cp_async(void *smem, void const *gmem, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(smem_address(smem)), "l"(gmem), "r"(valid ? 16 : 0)
                 : "memory");
}

// Waits for the completion of all copies that this thread has issued.
__device__ inline void cp_async_wait_all() { asm volatile("cp.async.wait_all;" : : : "memory"); }

}  // namespace ladder
