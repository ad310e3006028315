#include "workers.h"

#include <utility>

#include "tsan.h"

namespace sim {

static Workers *current = nullptr;

Workers::Workers(uint64_t count, uint64_t seed, std::function<void(uint64_t)> work)
    : work_(std::move(work)),
      workers_(count),
      stacks_(count),
      random_(seed * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u) {
    draw();
}

void Workers::run() {
    current = this;
    fiber_adopt_thread(main_);
    // Fibres are prepared here, not in the constructor: ThreadSanitizer orders what the host has
    // done until now before their start.
    for (uint64_t i = 0; i < count(); ++i) {
        Worker &worker = workers_[i];
        stacks_.give(i, worker.fiber);
        fiber_prepare(worker.fiber, &entry);
        worker.left = &worker.fiber;
    }
    running_ = turn_;
    fiber_switch(*workers_[turn_].left);
    for (Worker &worker : workers_) {
        fiber_release(worker.fiber);
    }
    fiber_release(main_);
    current = nullptr;
    tsan::acquire(&end_tag_);
}

void Workers::entry() {
    fiber_entered();
    {
        tsan::Unwatched const unwatched;  // the workers share the runtime's state, in turns
        current->work_(current->running_);
    }
    current->end();
}

void Workers::await_turn() {
    while (turn_ != running_) {
        switch_to(turn_);
    }
}

void Workers::end_turn(bool last) {
    if (--left_ == 0 || last) {
        draw();
        await_turn();
    }
}

void Workers::switch_to(uint64_t worker) {
    uint64_t const self = running_;
    workers_[self].left = &running_fiber();
    running_ = worker;
    fiber_switch(*workers_[worker].left);
}

void Workers::end() {
    tsan::release(&end_tag_);
    workers_[running_].ended = true;
    ++count_ended_;
    if (count_ended_ == count()) {
        fiber_switch(main_);
    }
    if (turn_ == running_) {
        draw();
    }
    running_ = turn_;
    fiber_switch(*workers_[turn_].left);
    __builtin_unreachable();
}

void Workers::draw() {
    do {
        random_ ^= random_ << 13;
        random_ ^= random_ >> 7;
        random_ ^= random_ << 17;
        turn_ = random_ % count();
    } while (workers_[turn_].ended);
    left_ = uint64_t(1) << (random_ >> 32) % 8;
}

}  // namespace sim
