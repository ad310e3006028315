// Programmatic dependent launch: a kernel starts while the previous kernel in the stream still
// runs, and waits for its end before it accesses global memory. GPUs of compute capability 9.0 and
// later have it.
#pragma once

#include <cuda_runtime.h>

#include <cute/config.hpp>

namespace flash {

// Whether the GPUs that this file is compiled for have it. nvcc lists their compute capabilities,
// in ascending order, for the host's code, too; the simulator's compiler lists none.
#if defined(__CUDA_ARCH_LIST__)
inline constexpr int kTargets[] = {__CUDA_ARCH_LIST__};
inline constexpr bool kHasDependentLaunch = kTargets[0] >= 900;
#else
inline constexpr bool kHasDependentLaunch = true;
#endif

// Waits until the previous kernel has ended and its writes are visible. In a kernel that is
// launched with dependent_launch(), every access to global memory must come after a call of this,
// or of cudaGridDependencySynchronize(), by the same thread or by one that it waits for.
CUTE_DEVICE void await_previous_kernel() {
    if constexpr (kHasDependentLaunch) cudaGridDependencySynchronize();
}

// Lets the next kernel start once each CTA of this one has called it or has ended.
CUTE_DEVICE void let_next_kernel_start() {
    if constexpr (kHasDependentLaunch) cudaTriggerProgrammaticLaunchCompletion();
}

// Returns the launch attribute; without dependent launch one that changes nothing.
inline cudaLaunchAttribute dependent_launch() {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = kHasDependentLaunch;
    return attribute;
}

}  // namespace flash
