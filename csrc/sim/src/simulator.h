// What the host side of the simulator (the runner, a test through ctypes) sets and reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "counters.h"

#pragma GCC visibility push(default)

namespace sim {

// When an asynchronous copy lands and a wgmma is executed. `late`: as late as the hardware may,
// their destination being poison meanwhile: a cp.async and a wgmma at the wait that covers it, a
// bulk copy when no thread can go on without it. `random`: any time between the issue and that,
// copies in random order. `eager`: at once.
enum class CopyMode : int { late, random, eager };

struct Settings {
    uint64_t seed = 0;
    CopyMode copy_mode = CopyMode::late;
    size_t smem_limit = 227 * 1024;
    // Multiprocessors of the device. Each is an OS thread that runs one block at a time.
    int sms = 3;
    // How often the runner launches the kernel, one after the other.
    int launches = 1;
    bool trace = false;
    // Warp-wide instructions one block may execute before it counts as hung.
    uint64_t max_steps = uint64_t(1) << 32;
};

// A tensor's bytes. Once any is known, an access outside all of them is an error.
struct Region {
    std::string name;
    std::byte const *first;
    size_t bytes;
};

// One asynchronous copy of a lane, or one row of a bulk copy, out of a region.
struct TraceEntry {
    uint64_t block;
    uint64_t region;
    uint64_t offset;
};

struct State {
    Settings settings;
    std::vector<Region> regions;
    // Of the last launch.
    Counters counters;
    std::vector<TraceEntry> trace;
    std::string error;
};

State &state();

}  // namespace sim

#pragma GCC visibility pop
