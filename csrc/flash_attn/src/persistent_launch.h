// What the launch of a persistent kernel needs of the device: the number of SMs, and counters of
// tiles and of stored parts.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>

#include "flash.h"

namespace flash {

// Sets `count` to the SMs of the current device, which is asked once per device.
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

// Counters of a launch, all zero before it and after it: one of tiles, for work stealing, and in
// kernels whose CTAs merge one of stored parts for each split tile.
template <bool kMerges>
struct LaunchCounters {
    unsigned tiles;
    static constexpr unsigned *arrivals = nullptr;
};
template <>
struct LaunchCounters<true> {
    unsigned tiles;
    unsigned arrivals[kArrivals];
};

// Launches of one stream follow each other and share counters. A captured launch may run beside any
// other, so each has its own, which are never given back. A graph does not run beside itself; two
// executables of one capture could, which is not supported: tiles would be left out.
inline constexpr int kLaunches = 4096;
inline constexpr int kStreams = 256;  // of these for streams, the others for captured launches
template <bool kMerges>
__device__ LaunchCounters<kMerges> counters_of_launches[kLaunches];

// Finds the counters of a launch on `stream` of the current device; null once all for streams, or
// for captured launches, are in use.
template <bool kMerges>
cudaError_t launch_counters(LaunchCounters<kMerges> *&counters, cudaStream_t stream) {
    struct Table {
        LaunchCounters<kMerges> *counters = nullptr;
        std::unordered_map<unsigned long long, int> of_stream;
        int captured = kStreams;
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
        error = cudaGetSymbolAddress(&symbol, counters_of_launches<kMerges>);
        if (error != cudaSuccess) {
            return error;
        }
        table.counters = static_cast<LaunchCounters<kMerges> *>(symbol);
    }
    counters = nullptr;
    if (capture != cudaStreamCaptureStatusNone) {
        if (table.captured < kLaunches) counters = table.counters + table.captured++;
        return cudaSuccess;
    }
    unsigned long long id = 0;
    if (error = cudaStreamGetId(stream, &id); error != cudaSuccess) {
        return error;
    }
    auto const known = table.of_stream.find(id);
    if (known != table.of_stream.end()) {
        counters = table.counters + known->second;
    } else if (table.of_stream.size() < kStreams) {
        int const slot = static_cast<int>(table.of_stream.size());
        table.of_stream.emplace(id, slot);
        counters = table.counters + slot;
    }
    return cudaSuccess;
}

}  // namespace flash
