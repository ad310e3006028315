// The simulator's interface for host code (the runner, tests): settings, regions and results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "counters.h"

#pragma GCC visibility push(default)

namespace sim {

// When an asynchronous copy or a wgmma completes. Until then its destination holds poison (NaN).
// - late: as late as possible. A cp.async or a wgmma completes at the wait that covers it, a bulk
//   copy (TMA) when no thread is ready or, sometimes, when a thread polls.
// - random: at any time between its issue and the time of `late`, copies in random order.
// - eager: at its issue.
enum class CopyMode : int { late, random, eager };

struct Settings {
    uint64_t seed = 0;
    CopyMode copy_mode = CopyMode::late;
    size_t smem_limit = 227 * 1024;  // dynamic shared memory that a kernel may opt in to, in bytes
    int sms = 3;                     // multiprocessors of the device
    // Number of launches, one after the other.
    int launches = 1;
    bool trace = false;  // record the sources of cp.async and TMA loads
    // Budget of warp-wide instructions (Block::count_step): a block beyond it is reported as hung.
    uint64_t max_steps = uint64_t(1) << 32;
    bool plan = false;  // call Flash_kernel::plan before each launch
    // The second argument of __launch_bounds__: blocks that share an SM's registers.
    int min_ctas = 1;

    // The number of blocks that run at the same time.
    int resident_blocks() const { return sms * min_ctas; }
};

// The bytes of a tensor in global memory. If any region is set, an access outside all of them is an
// error.
struct Region {
    std::string name;
    std::byte const *first;
    size_t bytes;
};

// The source of one cp.async of a lane, or of one row of a bulk copy.
struct TraceEntry {
    uint64_t block;   // linear index in the grid
    uint64_t region;  // index in State::regions
    uint64_t offset;  // in the region, in bytes
};

struct State {
    Settings settings;
    std::vector<Region> regions;
    // Every launch adds to these; the host clears them.
    Counters counters;
    std::vector<TraceEntry> trace;
    std::string error;  // message of the last call that failed; a launch clears it at its start
};

State &state();

}  // namespace sim

#pragma GCC visibility pop
