// Fibres: the execution contexts of CUDA threads, announced to the sanitizers.
#pragma once

#include <cstddef>

namespace sim {

struct Fiber {
    void *context = nullptr;  // stack pointer at the last switch, or a ucontext_t
    std::byte *stack = nullptr;
    size_t stack_bytes = 0;
    void *tsan = nullptr;
    void *asan_fake_stack = nullptr;
    bool is_thread = false;  // stands for an OS thread's own stack
};

// Makes `fiber`, whose stack is set, start at entry() when it is switched to; entry must not
// return.
void fiber_prepare(Fiber &fiber, void (*entry)());
// Describes the calling OS thread, so that fibres can switch back to it.
void fiber_adopt_thread(Fiber &fiber);
// To be called first thing in entry().
void fiber_entered(Fiber &fiber);
void fiber_switch(Fiber &from, Fiber &to);
// Releases what fiber_prepare or fiber_adopt_thread acquired; the fibre must not be running.
void fiber_release(Fiber &fiber);

}  // namespace sim
