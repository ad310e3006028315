// Wraps CUTLASS's <cute/config.hpp>. CUTE_INVALID_CONTROL_PATH, which is reached by an instruction
// without a host implementation, gives the verdict "not covered" instead of an ignored assert.
#pragma once

#include <cuda_runtime.h>

#include_next <cute/config.hpp>

#undef CUTE_INVALID_CONTROL_PATH
#define CUTE_INVALID_CONTROL_PATH(x) ::sim::not_covered(x)
