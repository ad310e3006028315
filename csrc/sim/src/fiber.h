// Fibres: the execution contexts of CUDA threads, with the sanitizers' annotations for switches.
#pragma once

#include <cstddef>

namespace sim {

struct Fiber {
    void *context = nullptr;  // stack pointer at the last switch, or a ucontext_t
    std::byte *stack = nullptr;
    size_t stack_bytes = 0;
    void *tsan = nullptr;
    void *asan_fake_stack = nullptr;
    bool is_thread = false;  // the context of an OS thread, on its own stack
};

// Prepares `fiber`, whose stack is set, to start at entry() at its first switch. entry() must not
// return.
void fiber_prepare(Fiber &fiber, void (*entry)());
// Describes the calling OS thread, so that fibres can switch back to it.
void fiber_adopt_thread(Fiber &fiber);
// The first call in entry().
void fiber_entered(Fiber &fiber);
void fiber_switch(Fiber &from, Fiber &to);
// Releases what fiber_prepare or fiber_adopt_thread acquired; the fibre must not be running.
void fiber_release(Fiber &fiber);

}  // namespace sim
