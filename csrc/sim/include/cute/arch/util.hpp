// Wraps CUTLASS's <cute/arch/util.hpp>: 32-bit shared memory addresses, as matrix descriptors hold.
#pragma once

#define cast_smem_ptr_to_uint cutlass_cast_smem_ptr_to_uint
#include_next <cute/arch/util.hpp>
#undef cast_smem_ptr_to_uint

#include <sim/runtime_sm90.h>

namespace cute {

inline uint32_t cast_smem_ptr_to_uint(void const *ptr) { return sim::smem_address(ptr); }

}  // namespace cute
