// The SMs of a launch, and the order in which the blocks that they run execute their atomics.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "fiber.h"

namespace sim {

// Each worker is a fibre that runs every so many-th unit, a block or a cluster. One of them has the
// turn and runs, up to an atomic that ends its turn or to its last unit's end. Another one runs out
// of turn only where all wait for the previous kernel's end. The seed alone determines the sequence
// of turns, and another seed gives another one. The words that threads store or add to sums share
// turns, up to 1, 2, 4 ... 128 of them as drawn, so that a worker may be far ahead of the others.
class Workers {
  public:
    // work(0) to work(count - 1) are the workers' code.
    Workers(uint64_t count, uint64_t seed, std::function<void(uint64_t)> work);
    Workers(Workers const &) = delete;
    Workers &operator=(Workers const &) = delete;

    uint64_t count() const { return workers_.size(); }
    // Returns when all workers have ended.
    void run();
    // Returns when the running worker has the turn.
    void await_turn();
    // Called after an atomic. It ends the turn if it is the `last`, or the turn has no more.
    void end_turn(bool last);
    // Runs another worker out of turn, until one switches back.
    void switch_to(uint64_t worker);

  private:
    struct Worker {
        Fiber fiber;
        Fiber *left = nullptr;  // what it was running, of its own fibre or of its blocks'
        bool ended = false;
    };

    static void entry();
    void draw();
    [[noreturn]] void end();

    std::function<void(uint64_t)> const work_;
    std::vector<Worker> workers_;
    Stacks const stacks_;
    Fiber main_;
    uint64_t count_ended_ = 0;
    uint64_t random_;
    uint64_t turn_ = 0, running_ = 0;
    uint64_t left_ = 0;  // atomics until the turn ends
    char end_tag_ = 0;   // orders what the workers did before what follows the launch
};

}  // namespace sim
