// Programmatic dependent launch: a kernel that starts before the previous kernel has ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "simulator.h"

namespace sim {

class Workers;

// Models the end of the previous kernel, which comes as late as possible: once every unit of the
// first wave, 0 to `wave` - 1, waits for it or has ended. In copy mode `eager` it comes at once.
// Until then every tensor holds poison, so that an early load reads NaN and an early store is
// detected.
class Dependency {
  public:
    // `dependent`: the launch may overlap the previous kernel.
    Dependency(bool dependent, uint64_t wave, CopyMode mode);
    ~Dependency();
    Dependency(Dependency const &) = delete;
    Dependency &operator=(Dependency const &) = delete;

    bool dependent() const { return dependent_; }
    bool over() const { return over_; }  // whether the previous kernel has ended
    // Whether any thread has executed griddepcontrol.wait.
    bool awaited = false;

    // Called when threads of the unit wait for the previous kernel and the others wait or poll.
    // Runs other workers; returns once the previous kernel has ended.
    void await(uint64_t unit, Workers &workers);
    // Called when the unit has ended, and by await().
    void leave(uint64_t unit);
    // Once over(): a message about the first byte that was written too early, or empty.
    std::string const &early_write() const { return early_write_; }

  private:
    void end();

    bool const dependent_;
    bool over_ = true;
    // By unit of the first wave, so by worker: true until the unit waits in await() or has ended.
    std::vector<bool> running_;
    uint64_t count_running_ = 0;
    std::vector<std::vector<std::byte>> contents_;  // of each region, saved while it holds poison
    std::string early_write_;
};

}  // namespace sim
