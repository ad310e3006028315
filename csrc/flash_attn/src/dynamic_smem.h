// The dynamic shared memory of a CTA. The simulator has a header of its own in csrc/sim/include: a
// CPU has no variable whose address is another one for each CTA.
#pragma once

namespace flash {

// Aligned as TMA's boxes of 128-byte rows are.
template <class Storage>
__device__ Storage &dynamic_smem() {
    static_assert(alignof(Storage) <= 1024);
    extern __shared__ __align__(1024) char smem[];
    return *reinterpret_cast<Storage *>(smem);
}

}  // namespace flash
