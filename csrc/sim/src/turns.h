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
// depend on the speed of the OS threads, and another seed gives another order. An atomic ends its
// turn. Only the words that threads store or add to sums share turns, up to 1, 2, 4 ... 128 of them
// as drawn: a switch of OS threads for each of them would take most of the time.
class Turns {
  public:
    Turns(uint64_t workers, uint64_t seed)
        : ended_(workers),
          may_go_(workers),
          random_(seed * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u) {
        draw();
    }

    // Calls action() in a turn of the unit's worker, which ends with it if it is the `last`. One OS
    // thread of a worker at a time, as of a cluster's blocks one runs.
    void take(uint64_t unit, bool last, std::function<void()> const &action) {
        std::unique_lock lock(mutex_);
        uint64_t const worker = unit % ended_.size();
        may_go_[worker].wait(lock, [&] { return turn_ == worker; });
        action();
        if (--left_ == 0 || last) {
            draw();
            may_go_[turn_].notify_one();
        }
    }

    void leave(uint64_t worker) {
        std::lock_guard const lock(mutex_);
        ended_[worker] = true;
        ++count_ended_;
        if (turn_ == worker) {
            draw();
            may_go_[turn_].notify_one();
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
        left_ = 1u << (random_ >> 32) % 8;
    }

    std::mutex mutex_;
    std::vector<bool> ended_;
    std::vector<std::condition_variable> may_go_;  // by worker
    size_t count_ended_ = 0;
    uint64_t random_;
    uint64_t turn_ = 0;
    uint64_t left_ = 0;  // atomics until the turn ends
};

}  // namespace sim
