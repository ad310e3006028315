// The dynamic shared memory of a CTA. The simulator replaces this header by one in
// csrc/sim/include: on a CPU no variable has another address in each CTA.
#pragma once

namespace flash {

// Returns it, aligned to the 1024 bytes that TMA boxes of 128-byte rows (128-byte swizzle) need.
template <class Storage>
__device__ Storage &dynamic_smem() {
    static_assert(alignof(Storage) <= 1024);
    extern __shared__ __align__(1024) char smem[];
    return *reinterpret_cast<Storage *>(smem);
}

}  // namespace flash
