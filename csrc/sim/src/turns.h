// The order in which the concurrent blocks of a launch execute their atomics.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

namespace sim {

// Units, blocks or clusters, run on workers, of which each has every so many-th. The seed alone
// determines the sequence of workers; those that have ended are skipped. So the order does not
// depend on the speed of the OS threads, and another seed gives another order.
class Turns {
  public:
    Turns(uint64_t workers, uint64_t seed)
        : ended_(workers), random_(seed * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u) {
        draw();
    }

    void take(uint64_t unit, std::function<void()> const &action) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return turn_ == unit % ended_.size(); });
        action();
        draw();
        changed_.notify_all();
    }

    void leave(uint64_t worker) {
        std::lock_guard const lock(mutex_);
        ended_[worker] = true;
        ++count_ended_;
        if (turn_ == worker) {
            draw();
            changed_.notify_all();
        }
    }

  private:
    void draw() {
        if (count_ended_ == ended_.size()) {
            return;
        }
        do {
            random_ ^= random_ << 13;
            random_ ^= random_ >> 7;
            random_ ^= random_ << 17;
            turn_ = random_ % ended_.size();
        } while (ended_[turn_]);
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<bool> ended_;
    size_t count_ended_ = 0;
    uint64_t random_;
    uint64_t turn_ = 0;
};

}  // namespace sim
