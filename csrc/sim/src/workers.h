// The workers of a launch, as fibres, and the order in which their blocks execute atomics.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "fiber.h"

namespace sim {

// Each worker is a fibre that runs every count()-th unit; a unit is a cluster, or a block without
// one. The worker that has the turn runs, until an atomic ends its turn or its last unit has ended.
// Another one runs out of turn only while units wait for the previous kernel's end. The seed alone
// determines the sequence of turns, and another seed gives another sequence. An atomic ends its
// turn, except for stores and additions to sums: 1, 2, 4, ... or 128 of them share a turn, a number
// that is drawn for each turn, so that a worker may get far ahead of the others.
class Workers {
  public:
    // `work(i)` is the code of worker i, 0 <= i < `count`.
    Workers(uint64_t count, uint64_t seed, std::function<void(uint64_t)> work);
    Workers(Workers const &) = delete;
    Workers &operator=(Workers const &) = delete;

    uint64_t count() const { return workers_.size(); }
    // Runs the workers; returns when all have ended.
    void run();
    // Runs other workers until the running one has the turn.
    void await_turn();
    // Called after each atomic. Ends the turn if `last`, or if no atomic is left in it, and then
    // runs other workers until the running one has the turn again.
    void end_turn(bool last);
    // Runs another worker, until one switches back to the running one.
    void switch_to(uint64_t worker);

  private:
    struct Worker {
        Fiber fiber;
        Fiber *left = nullptr;  // where to resume it: its own fibre or that of a CUDA thread
        bool ended = false;
    };

    static void entry();
    void draw();  // draws the worker that gets the turn, and the turn's number of atomics
    [[noreturn]] void end();

    std::function<void(uint64_t)> const work_;
    std::vector<Worker> workers_;
    Stacks const stacks_;
    Fiber main_;
    uint64_t count_ended_ = 0;
    uint64_t random_;
    uint64_t turn_ = 0, running_ = 0;
    uint64_t left_ = 0;  // atomics until the turn ends
    char end_tag_ = 0;   // ThreadSanitizer's: orders the workers before what follows the launch
};

}  // namespace sim
