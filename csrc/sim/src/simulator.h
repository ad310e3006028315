// The simulator's interface for host code (the runner, tests): settings, regions and results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "counters.h"

#pragma GCC visibility push(default)

namespace sim {

// When an asynchronous copy or a wgmma completes. Until then its destination holds poison.
// - late: as late as possible: a cp.async or a wgmma at the wait that covers it, a bulk copy when
// no
//   thread is ready.
// - random: any time between the issue and that, copies in random order.
// - eager: at once.
enum class CopyMode : int { late, random, eager };

struct Settings {
    uint64_t seed = 0;
    CopyMode copy_mode = CopyMode::late;
    size_t smem_limit = 227 * 1024;
    int sms = 3;  // multiprocessors of the device
    // Number of launches, one after the other.
    int launches = 1;
    bool trace = false;
    // Warp-wide instructions that a block may execute before it is reported as hung.
    uint64_t max_steps = uint64_t(1) << 32;
    bool plan = false;  // Flash_kernel::plan before each launch
    // The second argument of __launch_bounds__: blocks that share an SM's registers.
    int min_ctas = 1;

    // Blocks at a time.
    int resident_blocks() const { return sms * min_ctas; }
};

// A tensor's bytes. If there is any region, an access outside all regions is an error.
struct Region {
    std::string name;
    std::byte const *first;
    size_t bytes;
};

// The source of one cp.async of a lane, or of one row of a bulk copy.
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
