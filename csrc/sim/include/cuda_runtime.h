// Stands before CUDA's own <cuda_runtime.h>: the same types and declarations, with the calls that a
// kernel's launch code makes answered by the simulator. CUDA's versions are renamed out of the way
// rather than overloaded, so that no call can reach a CUDA runtime that happens to be loaded.
#pragma once

#define cudaLaunchKernelEx cuda_runtime_LaunchKernelEx
#define cudaFuncSetAttribute cuda_runtime_FuncSetAttribute
#define cudaGetErrorString cuda_runtime_GetErrorString
#define cudaGetLastError cuda_runtime_GetLastError
#define cudaPeekAtLastError cuda_runtime_PeekAtLastError
#define cudaGetDevice cuda_runtime_GetDevice
#include_next <cuda_runtime.h>
#undef cudaLaunchKernelEx
#undef cudaFuncSetAttribute
#undef cudaGetErrorString
#undef cudaGetLastError
#undef cudaPeekAtLastError
#undef cudaGetDevice

#include <sim/cuda_builtins.h>

inline char const *cudaGetErrorString(cudaError_t error) { return sim::error_text(error); }
inline cudaError_t cudaGetLastError() { return static_cast<cudaError_t>(sim::last_error(true)); }
inline cudaError_t cudaPeekAtLastError() {
    return static_cast<cudaError_t>(sim::last_error(false));
}
inline cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel *kernel, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) {
        return cudaErrorNotSupported;
    }
    return static_cast<cudaError_t>(
        sim::set_max_dynamic_smem(reinterpret_cast<void const *>(kernel), value));
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(cudaLaunchConfig_t const *config, void (*kernel)(Parameters...),
                               Arguments &&...arguments) {
    if (config->numAttrs != 0) {
        return cudaErrorNotSupported;
    }
    sim::Launch const launch{
        .grid = {config->gridDim.x, config->gridDim.y, config->gridDim.z},
        .block = {config->blockDim.x, config->blockDim.y, config->blockDim.z},
        .smem_bytes = config->dynamicSmemBytes,
        .kernel = reinterpret_cast<void const *>(kernel),
        .dynamic_smem = &sim_dynamic_smem,
    };
    return static_cast<cudaError_t>(sim::launch(launch, [&] { kernel(arguments...); }));
}
