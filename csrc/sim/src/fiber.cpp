#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#if defined(SIM_UCONTEXT) || !(defined(__x86_64__) || defined(__aarch64__))
#define SIM_USE_UCONTEXT 1
#include <ucontext.h>
#endif

#if defined(SIM_ASAN)
#include <pthread.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(SIM_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace sim {

#if defined(SIM_USE_UCONTEXT)

// Portable, but swapcontext saves the signal mask with a system call on each switch.
static void context_switch(Fiber &from, Fiber &to) {
    swapcontext(static_cast<ucontext_t *>(from.context), static_cast<ucontext_t *>(to.context));
}
static void context_prepare(Fiber &fiber, void (*entry)()) {
    auto *const context = new ucontext_t;
    getcontext(context);
    context->uc_stack.ss_sp = fiber.stack;
    context->uc_stack.ss_size = fiber.stack_bytes;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
    fiber.context = context;
}
static void context_adopt(Fiber &fiber) { fiber.context = new ucontext_t; }
static void context_release(Fiber &fiber) { delete static_cast<ucontext_t *>(fiber.context); }

#else

// Saves the callee-saved registers on the stack, exchanges stack pointers, restores. The floating
// point environment is not saved: kernels do not change it.
extern "C" void sim_context_switch(void **save_sp, void *load_sp);

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.type sim_context_switch,@function
sim_context_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size sim_context_switch,.-sim_context_switch
)");
// Six registers, the entry point that `ret` pops, and a return address slot: at entry() the stack
// pointer must be a multiple of 16 plus 8.
static constexpr int kFrameWords = 8;
static constexpr int kEntryWord = 6;
#else
asm(R"(
.text
.p2align 4
.type sim_context_switch,%function
sim_context_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size sim_context_switch,.-sim_context_switch
)");
// x19 to x30 and d8 to d15. The entry point is in the slot of x30.
static constexpr int kFrameWords = 20;
static constexpr int kEntryWord = 11;
#endif

static void context_switch(Fiber &from, Fiber &to) {
    sim_context_switch(&from.context, to.context);
}
static void context_prepare(Fiber &fiber, void (*entry)()) {
    auto *const top = reinterpret_cast<uintptr_t *>(fiber.stack + fiber.stack_bytes);
    uintptr_t *const frame = top - kFrameWords;
    for (int i = 0; i < kFrameWords; ++i) {
        frame[i] = 0;
    }
    frame[kEntryWord] = reinterpret_cast<uintptr_t>(entry);
    fiber.context = frame;
}
static void context_adopt(Fiber &) {}
static void context_release(Fiber &) {}

#endif

static Fiber *running = nullptr;

void fiber_prepare(Fiber &fiber, void (*entry)()) {
    context_prepare(fiber, entry);
#if defined(SIM_ASAN)
    // An aborted fibre leaves the red zones of its frames poisoned.
    __asan_unpoison_memory_region(fiber.stack, fiber.stack_bytes);
#endif
#if defined(SIM_TSAN)
    fiber.tsan = __tsan_create_fiber(0);
#endif
}

void fiber_adopt_thread(Fiber &fiber) {
    running = &fiber;
    context_adopt(fiber);
    fiber.is_thread = true;
#if defined(SIM_ASAN)
    pthread_attr_t attributes;
    void *stack = nullptr;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &stack, &fiber.stack_bytes);
    pthread_attr_destroy(&attributes);
    fiber.stack = static_cast<std::byte *>(stack);
#endif
#if defined(SIM_TSAN)
    fiber.tsan = __tsan_get_current_fiber();
#endif
}

void fiber_entered() {
#if defined(SIM_ASAN)
    __sanitizer_finish_switch_fiber(running->asan_fake_stack, nullptr, nullptr);
#endif
}

Fiber &running_fiber() { return *running; }

void fiber_switch(Fiber &to) {
    Fiber &from = *running;
    running = &to;
#if defined(SIM_ASAN)
    __sanitizer_start_switch_fiber(&from.asan_fake_stack, to.stack, to.stack_bytes);
#endif
#if defined(SIM_TSAN)
    __tsan_switch_to_fiber(to.tsan, __tsan_switch_to_fiber_no_sync);
#endif
    context_switch(from, to);
    fiber_entered();
}

void fiber_release(Fiber &fiber) {
    context_release(fiber);
#if defined(SIM_TSAN)
    if (!fiber.is_thread) {
        __tsan_destroy_fiber(fiber.tsan);
    }
#endif
    fiber.context = fiber.tsan = fiber.asan_fake_stack = nullptr;
}

Stacks::Stacks(size_t count) : guard_(sysconf(_SC_PAGESIZE)), bytes_(count * (kBytes + guard_)) {
    void *const all = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) {
        throw std::bad_alloc();
    }
    first_ = static_cast<std::byte *>(all);
    for (size_t i = 0; i < count; ++i) {
        mprotect(first_ + i * (kBytes + guard_), guard_, PROT_NONE);
    }
}

Stacks::~Stacks() { munmap(first_, bytes_); }

void Stacks::give(size_t index, Fiber &fiber) const {
    fiber.stack = first_ + index * (kBytes + guard_) + guard_;
    fiber.stack_bytes = kBytes;
}

bool Stacks::hold(void const *address) const {
    return reinterpret_cast<uint64_t>(address) - reinterpret_cast<uint64_t>(first_) < bytes_;
}

}  // namespace sim
