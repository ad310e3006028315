// Hopper's matrix multiply: wgmma.mma_async, the four warps of a warpgroup together multiply 64
// rows of A with N columns of B, B always read from shared memory and A from there or from
// registers. The instruction of every N is one line at the end of this file. [PTX ISA,
// wgmma.mma_async]
//
// CuTe has wrappers for all N of all types behind a macro that takes 20 s to parse; these take
// none.
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>
#include <cute/config.hpp>
#include <type_traits>

namespace flash::sm90 {

// Orders earlier register writes (accumulators, A fragments) before the next wgmma.
CUTE_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }

// Closes the group of wgmmas issued since the last call.
CUTE_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }

// Waits until at most kPending groups are unfinished.
template <int kPending>
CUTE_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads and writes of a register across this point.
CUTE_DEVICE void pin_register(float &value) { asm volatile("" : "+f"(value)::"memory"); }
CUTE_DEVICE void pin_register(uint32_t &value) { asm volatile("" : "+r"(value)::"memory"); }

// d = A B + (accumulate ? d : 0), A (64, 16), B (16, N). Descriptors as the PTX ISA's "matrix
// descriptor". B is K-major, or MN-major where kTransposeB.
template <class Element, int N, bool kTransposeB>
struct Wgmma;  // defined for the N listed below

#define FLASH_REGISTERS_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASH_REGISTERS_2 FLASH_REGISTERS_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASH_REGISTERS_3 FLASH_REGISTERS_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FLASH_REGISTERS_4 FLASH_REGISTERS_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASH_REGISTERS_5 FLASH_REGISTERS_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FLASH_REGISTERS_6 FLASH_REGISTERS_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASH_REGISTERS_7 FLASH_REGISTERS_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FLASH_REGISTERS_8 FLASH_REGISTERS_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASH_REGISTERS_9 FLASH_REGISTERS_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FLASH_REGISTERS_10 FLASH_REGISTERS_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FLASH_REGISTERS_11 FLASH_REGISTERS_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FLASH_REGISTERS_12 FLASH_REGISTERS_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASH_REGISTERS_13 FLASH_REGISTERS_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FLASH_REGISTERS_14 FLASH_REGISTERS_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define FLASH_REGISTERS_15 FLASH_REGISTERS_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FLASH_REGISTERS_16 FLASH_REGISTERS_15 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define FLASH_OPERANDS(i)                                                                       \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define FLASH_OPERANDS_1 FLASH_OPERANDS(0)
#define FLASH_OPERANDS_2 FLASH_OPERANDS_1, FLASH_OPERANDS(8)
#define FLASH_OPERANDS_3 FLASH_OPERANDS_2, FLASH_OPERANDS(16)
#define FLASH_OPERANDS_4 FLASH_OPERANDS_3, FLASH_OPERANDS(24)
#define FLASH_OPERANDS_5 FLASH_OPERANDS_4, FLASH_OPERANDS(32)
#define FLASH_OPERANDS_6 FLASH_OPERANDS_5, FLASH_OPERANDS(40)
#define FLASH_OPERANDS_7 FLASH_OPERANDS_6, FLASH_OPERANDS(48)
#define FLASH_OPERANDS_8 FLASH_OPERANDS_7, FLASH_OPERANDS(56)
#define FLASH_OPERANDS_9 FLASH_OPERANDS_8, FLASH_OPERANDS(64)
#define FLASH_OPERANDS_10 FLASH_OPERANDS_9, FLASH_OPERANDS(72)
#define FLASH_OPERANDS_11 FLASH_OPERANDS_10, FLASH_OPERANDS(80)
#define FLASH_OPERANDS_12 FLASH_OPERANDS_11, FLASH_OPERANDS(88)
#define FLASH_OPERANDS_13 FLASH_OPERANDS_12, FLASH_OPERANDS(96)
#define FLASH_OPERANDS_14 FLASH_OPERANDS_13, FLASH_OPERANDS(104)
#define FLASH_OPERANDS_15 FLASH_OPERANDS_14, FLASH_OPERANDS(112)
#define FLASH_OPERANDS_16 FLASH_OPERANDS_15, FLASH_OPERANDS(120)

#define FLASH_WGMMA_SS(N, GROUPS, TYPE, P0, P1, P2, P3)                                            \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P2                                          \
                 ", 0;\n"                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                   \
                 " {" FLASH_REGISTERS_##GROUPS "}, %" #P0 ", %" #P1 ", p, 1, 1, 0, %" #P3 ";\n}\n" \
                 : FLASH_OPERANDS_##GROUPS                                                         \
                 : "l"(a), "l"(b), "r"(int32_t(accumulate)), "n"(int32_t(kTransposeB)))

#define FLASH_WGMMA_RS(N, GROUPS, TYPE, P0, P1, P2, P3, P4, P5, P6)                              \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P5                                        \
                 ", 0;\n"                                                                        \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                 \
                 " {" FLASH_REGISTERS_##GROUPS "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3         \
                                               "}, %" #P4 ", p, 1, 1, %" #P6 ";\n}\n"            \
                 : FLASH_OPERANDS_##GROUPS                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int32_t(accumulate)), \
                   "n"(int32_t(kTransposeB)))

// N, N / 16, and the numbers of the operands that follow the N / 2 accumulators.
#define FLASH_WGMMA(N, GROUPS, P0, P1, P2, P3, P4, P5, P6)                                       \
    template <class Element, bool kTransposeB>                                                   \
    struct Wgmma<Element, N, kTransposeB> {                                                      \
        CUTE_DEVICE static void ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) { \
            if constexpr (std::is_same_v<Element, cutlass::half_t>) {                            \
                FLASH_WGMMA_SS(N, GROUPS, "f16", P0, P1, P2, P3);                                \
            } else {                                                                             \
                FLASH_WGMMA_SS(N, GROUPS, "bf16", P0, P1, P2, P3);                               \
            }                                                                                    \
        }                                                                                        \
        CUTE_DEVICE static void rs(float (&d)[N / 2], uint32_t const (&a)[4], uint64_t b,        \
                                   bool accumulate) {                                            \
            if constexpr (std::is_same_v<Element, cutlass::half_t>) {                            \
                FLASH_WGMMA_RS(N, GROUPS, "f16", P0, P1, P2, P3, P4, P5, P6);                    \
            } else {                                                                             \
                FLASH_WGMMA_RS(N, GROUPS, "bf16", P0, P1, P2, P3, P4, P5, P6);                   \
            }                                                                                    \
        }                                                                                        \
    };

FLASH_WGMMA(32, 2, 16, 17, 18, 19, 20, 21, 22)
FLASH_WGMMA(48, 3, 24, 25, 26, 27, 28, 29, 30)
FLASH_WGMMA(64, 4, 32, 33, 34, 35, 36, 37, 38)
FLASH_WGMMA(80, 5, 40, 41, 42, 43, 44, 45, 46)
FLASH_WGMMA(96, 6, 48, 49, 50, 51, 52, 53, 54)
FLASH_WGMMA(112, 7, 56, 57, 58, 59, 60, 61, 62)
FLASH_WGMMA(128, 8, 64, 65, 66, 67, 68, 69, 70)
FLASH_WGMMA(144, 9, 72, 73, 74, 75, 76, 77, 78)
FLASH_WGMMA(160, 10, 80, 81, 82, 83, 84, 85, 86)
FLASH_WGMMA(176, 11, 88, 89, 90, 91, 92, 93, 94)
FLASH_WGMMA(192, 12, 96, 97, 98, 99, 100, 101, 102)
FLASH_WGMMA(208, 13, 104, 105, 106, 107, 108, 109, 110)
FLASH_WGMMA(224, 14, 112, 113, 114, 115, 116, 117, 118)
FLASH_WGMMA(240, 15, 120, 121, 122, 123, 124, 125, 126)
FLASH_WGMMA(256, 16, 128, 129, 130, 131, 132, 133, 134)

#undef FLASH_WGMMA
#undef FLASH_WGMMA_RS
#undef FLASH_WGMMA_SS

}  // namespace flash::sm90
