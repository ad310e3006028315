// From a configuration of the sm90 class to the shared object's description and launch function.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>

#include "flash.h"
#include "flash_fwd_kernel_sm90.h"
#include "flash_plan_kernel.h"
#include "kernel_description.h"
#include "tensor_maps_sm90.h"
#include "tile_scheduler.h"

namespace flash {

// SMs of the current device, asked once per device.
inline cudaError_t sm_count(int &count) {
    static std::atomic<int> known[64];
    int device = 0;
    if (cudaError_t const error = cudaGetDevice(&device); error != cudaSuccess) {
        return error;
    }
    count = device < 64 ? known[device].load(std::memory_order_relaxed) : 0;
    if (count > 0) {
        return cudaSuccess;
    }
    cudaError_t const error =
        cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess && device < 64) {
        known[device].store(count, std::memory_order_relaxed);
    }
    return error;
}

// Counters of work stealing, all zero between launches. Launches of one stream follow each other
// and share one; a captured launch may run beside any other, so each has one of its own that is
// never given back. A graph does not run beside itself; two executables of one capture could, which
// is not supported.
inline constexpr int kTileCounters = 4096;
inline constexpr int kStreamCounters = 256;  // of these for streams, the rest for captured launches
__device__ unsigned tile_counters[kTileCounters];

// The counter for a launch on `stream` of the current device; null once all of its kind are in use.
inline cudaError_t tile_counter(unsigned *&counter, cudaStream_t stream) {
    struct Table {
        unsigned *counters = nullptr;
        std::unordered_map<unsigned long long, int> of_stream;
        int captured = kStreamCounters;
    };
    static std::map<int, Table> tables;
    static std::mutex mutex;
    int device = 0;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaStreamIsCapturing(stream, &capture);
    if (error != cudaSuccess) {
        return error;
    }
    std::lock_guard const lock(mutex);
    Table &table = tables[device];
    if (table.counters == nullptr) {
        void *symbol = nullptr;
        if (error = cudaGetSymbolAddress(&symbol, tile_counters); error != cudaSuccess) {
            return error;
        }
        table.counters = static_cast<unsigned *>(symbol);
    }
    counter = nullptr;
    if (capture != cudaStreamCaptureStatusNone) {
        if (table.captured < kTileCounters) counter = table.counters + table.captured++;
        return cudaSuccess;
    }
    unsigned long long id = 0;
    if (error = cudaStreamGetId(stream, &id); error != cudaSuccess) {
        return error;
    }
    auto const known = table.of_stream.find(id);
    if (known != table.of_stream.end()) {
        counter = table.counters + known->second;
    } else if (table.of_stream.size() < kStreamCounters) {
        int const slot = static_cast<int>(table.of_stream.size());
        table.of_stream.emplace(id, slot);
        counter = table.counters + slot;
    }
    return cudaSuccess;
}

template <FwdConfig C>
int32_t launch_fwd(Flash_fwd_params const *params, void *stream) {
    using Traits = KernelTraitsSm90<C>;
    constexpr auto *kernel = &flash_fwd_kernel_sm90<Traits>;
    int sms = 0;
    if (cudaError_t const error = sm_count(sms); error != cudaSuccess) {
        return error;
    }
    int64_t const tiles = TileScheduler<C>::num_tiles(*params);
    int64_t const most = int64_t(sms) * Traits::kMinCtas;
    if (tiles <= 0 || tiles > INT32_MAX - most) {  // CTAs count on beyond the last tile
        return cudaErrorInvalidConfiguration;
    }
    if (cudaError_t const error = allow_smem<kernel>(Traits::kSmemBytes); error != cudaSuccess) {
        return error;
    }
    TensorMapsSm90 maps;
    if (cudaError_t const error = make_tensor_maps<Traits>(maps, *params); error != cudaSuccess) {
        return error;
    }
    int64_t const ctas = std::min<int64_t>(tiles, most);
    TileQueue queue{static_cast<int>(tiles), 1, nullptr};
    if (Traits::kWorkStealing && params->plan_ptr == nullptr) {
        queue.group = TileScheduler<C>::heads_in_group(*params, sms);
    }
    if ((Traits::kWorkStealing || params->plan_ptr != nullptr) && tiles > ctas) {
        cudaError_t const error = tile_counter(queue.counter, static_cast<cudaStream_t>(stream));
        if (error != cudaSuccess) {
            return error;
        }
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(ctas));
    config.blockDim = dim3(Traits::kThreads);
    config.dynamicSmemBytes = Traits::kSmemBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    // May start while the kernel before is still running, up to its producers' wait.
    cudaLaunchAttribute dependent{};
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &dependent;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, *params, maps, queue);
}

template <FwdConfig C>
Flash_kernel const *describe_fwd(char const *name) {
    using Traits = KernelTraitsSm90<C>;
    return describe<Traits>(name, &launch_fwd<C>, &launch_plan<Traits>);
}

}  // namespace flash
