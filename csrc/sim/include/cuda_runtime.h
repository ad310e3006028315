// Wraps CUDA's own <cuda_runtime.h> and keeps its types and declarations. The simulator implements
// the calls that a kernel's launch code makes. CUDA's versions of these are renamed rather than
// overloaded, so that no call can reach a CUDA runtime that happens to be loaded.
#pragma once

#define cudaLaunchKernelEx cuda_runtime_LaunchKernelEx
#define cudaFuncSetAttribute cuda_runtime_FuncSetAttribute
#define cudaGetErrorString cuda_runtime_GetErrorString
#define cudaGetLastError cuda_runtime_GetLastError
#define cudaPeekAtLastError cuda_runtime_PeekAtLastError
#define cudaGetDevice cuda_runtime_GetDevice
#define cudaDeviceGetAttribute cuda_runtime_DeviceGetAttribute
#define cudaGetSymbolAddress cuda_runtime_GetSymbolAddress
#define cudaStreamIsCapturing cuda_runtime_StreamIsCapturing
#define cudaStreamGetId cuda_runtime_StreamGetId
#define cudaGetDriverEntryPointByVersion cuda_runtime_GetDriverEntryPointByVersion
#include_next <cuda_runtime.h>
#undef cudaLaunchKernelEx
#undef cudaFuncSetAttribute
#undef cudaGetErrorString
#undef cudaGetLastError
#undef cudaPeekAtLastError
#undef cudaGetDevice
#undef cudaDeviceGetAttribute
#undef cudaGetSymbolAddress
#undef cudaStreamIsCapturing
#undef cudaStreamGetId
#undef cudaGetDriverEntryPointByVersion

#include <sim/cuda_builtins.h>
#include <sim/tensor_map.h>

#include <cstring>

inline char const *cudaGetErrorString(cudaError_t error) { return sim::error_text(error); }
inline cudaError_t cudaGetLastError() { return static_cast<cudaError_t>(sim::last_error(true)); }
inline cudaError_t cudaPeekAtLastError() {
    return static_cast<cudaError_t>(sim::last_error(false));
}
inline cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    if (attribute != cudaDevAttrMultiProcessorCount) {
        return cudaErrorNotSupported;
    }
    *value = sim::sm_count();
    return cudaSuccess;
}
template <class T>
cudaError_t cudaGetSymbolAddress(void **address, T const &symbol) {
    *address = const_cast<std::remove_const_t<T> *>(&symbol);
    return cudaSuccess;
}
// There is one stream, and no graph capture.
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
inline cudaError_t cudaStreamGetId(cudaStream_t, unsigned long long *id) {
    *id = 1;
    return cudaSuccess;
}
inline cudaError_t cudaGetDriverEntryPointByVersion(char const *name, void **function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult *found) {
    bool const known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
    *function = known ? reinterpret_cast<void *>(&sim::tensor_map_encode_tiled) : nullptr;
    *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel *kernel, cudaFuncAttribute attribute, int value) {
    if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) {
        sim::allow_large_clusters(reinterpret_cast<void const *>(kernel), value != 0);
        return cudaSuccess;
    }
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) {
        return cudaErrorNotSupported;
    }
    return static_cast<cudaError_t>(
        sim::set_max_dynamic_smem(reinterpret_cast<void const *>(kernel), value));
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(cudaLaunchConfig_t const *config, void (*kernel)(Parameters...),
                               Arguments &&...arguments) {
    sim::Launch launch{
        .grid = {config->gridDim.x, config->gridDim.y, config->gridDim.z},
        .block = {config->blockDim.x, config->blockDim.y, config->blockDim.z},
        .smem_bytes = config->dynamicSmemBytes,
        .kernel = reinterpret_cast<void const *>(kernel),
    };
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        cudaLaunchAttribute const &attribute = config->attrs[i];
        if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
            launch.dependent = attribute.val.programmaticStreamSerializationAllowed != 0;
        } else if (attribute.id == cudaLaunchAttributeClusterDimension) {
            auto const &cluster = attribute.val.clusterDim;
            launch.cluster = {cluster.x, cluster.y, cluster.z};
        } else {
            return cudaErrorNotSupported;
        }
    }
    return static_cast<cudaError_t>(sim::launch(launch, [&] { kernel(arguments...); }));
}
