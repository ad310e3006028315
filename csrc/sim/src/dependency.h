// Programmatic dependent launch: a kernel that starts before the one in front of it has ended.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "simulator.h"

namespace sim {

// The kernel before ends as late as it may: once no block of the first wave, units 0 to `wave` - 1,
// can go on without that, unless copies are to land at once. Until then every tensor holds poison,
// so that a load that comes too early brings NaN, and a store that does shows.
class Dependency {
  public:
    // `dependent`: the launch does not wait for the kernel before.
    Dependency(bool dependent, uint64_t wave, CopyMode mode);
    ~Dependency();
    Dependency(Dependency const &) = delete;
    Dependency &operator=(Dependency const &) = delete;

    bool dependent() const { return dependent_; }
    bool over() const { return over_.load(); }
    // Whether any thread has asked.
    std::atomic<bool> awaited{false};

    // The unit cannot go on; returns once the kernel before has ended.
    void await(uint64_t unit);
    // The unit is not running any more.
    void leave(uint64_t unit);
    // Empty, or what was written meanwhile; once it is over.
    std::string const &damage() const { return damage_; }

  private:
    void arrive(uint64_t unit);
    void end();

    bool const dependent_;
    std::atomic<bool> over_{true};
    std::mutex mutex_;  // guards what follows
    std::condition_variable changed_;
    std::vector<bool> running_;  // units of the first wave that may go on
    uint64_t count_running_ = 0;
    std::vector<std::vector<std::byte>> contents_;  // of each region, while it holds poison
    std::string damage_;
};

}  // namespace sim
