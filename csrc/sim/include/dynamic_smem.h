// Replaces csrc/flash_attn/src/dynamic_smem.h: the shared memory of the block that runs.
#pragma once

#include <sim/runtime.h>

namespace flash {

template <class Storage>
Storage &dynamic_smem() {
    static_assert(alignof(Storage) <= 1024);
    return *static_cast<Storage *>(sim::dynamic_smem());
}

}  // namespace flash
