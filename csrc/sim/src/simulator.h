// What the host side of the simulator (the runner, a test through ctypes) sets and reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "counters.h"

#pragma GCC visibility push(default)

namespace sim {

// When an asynchronous copy lands. `late`: at the wait that covers it, its destination being poison
// meanwhile, which is the latest the hardware may. `random`: any time from its issue to that wait,
// in random order. `eager`: at once.
enum class CopyMode : int { late, random, eager };

struct Settings {
    uint64_t seed = 0;
    CopyMode copy_mode = CopyMode::late;
    size_t smem_limit = 227 * 1024;
    int workers = 2;
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

// One asynchronous copy of a lane out of a region.
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
