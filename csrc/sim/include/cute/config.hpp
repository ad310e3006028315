// Stands before CUTLASS's <cute/config.hpp>: what CuTe calls an invalid control path, an
// instruction that has no host implementation, becomes the verdict "not covered" instead of an
// ignored assert.
#pragma once

#include <cuda_runtime.h>

#include_next <cute/config.hpp>

#undef CUTE_INVALID_CONTROL_PATH
#define CUTE_INVALID_CONTROL_PATH(x) ::sim::not_covered(x)
