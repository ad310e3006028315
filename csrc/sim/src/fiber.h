// Fibres: the execution contexts of CUDA threads and of SMs, with the sanitizers' annotations for
// switches. All of them share one OS thread.
#pragma once

#include <cstddef>

namespace sim {

struct Fiber {
    void *context = nullptr;  // stack pointer at the last switch, or a ucontext_t
    std::byte *stack = nullptr;
    size_t stack_bytes = 0;
    void *tsan = nullptr;
    void *asan_fake_stack = nullptr;
    bool is_thread = false;  // the context of the OS thread, on its own stack
};

// Prepares `fiber`, whose stack is set, to start at entry() at its first switch. entry() must not
// return.
void fiber_prepare(Fiber &fiber, void (*entry)());
// Describes the OS thread as the running fibre, so that others can switch back to it.
void fiber_adopt_thread(Fiber &fiber);
// Must be the first call in entry(): completes the switch to the fibre for AddressSanitizer.
void fiber_entered();
Fiber &running_fiber();
// Leaves the running fibre for another one, and returns when one switches back.
void fiber_switch(Fiber &to);
// Releases what fiber_prepare or fiber_adopt_thread acquired; the fibre must not be running.
void fiber_release(Fiber &fiber);

// The stacks of `count` fibres, with a guard page below each: a stack that overflows faults instead
// of corrupting its neighbour.
class Stacks {
  public:
    explicit Stacks(size_t count);
    ~Stacks();
    Stacks(Stacks const &) = delete;
    Stacks &operator=(Stacks const &) = delete;

    void give(size_t index, Fiber &fiber) const;
    bool hold(void const *address) const;  // whether `address` is in one of these stacks

  private:
    static constexpr size_t kBytes = 512 * 1024;
    size_t const guard_;
    size_t const bytes_;
    std::byte *first_;
};

}  // namespace sim
