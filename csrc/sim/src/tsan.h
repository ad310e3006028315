// ThreadSanitizer annotations for what the runtime does on behalf of CUDA threads. The runtime
// itself is not instrumented, so its own bookkeeping gives no reports. Without SIM_TSAN all of this
// is empty.
#pragma once

#include <cstddef>

#if defined(SIM_TSAN)
#include <sanitizer/tsan_interface.h>

extern "C" void __tsan_read_range(void *address, unsigned long size);
extern "C" void __tsan_write_range(void *address, unsigned long size);
extern "C" void AnnotateIgnoreReadsBegin(char const *file, int line);
extern "C" void AnnotateIgnoreReadsEnd(char const *file, int line);
extern "C" void AnnotateIgnoreWritesBegin(char const *file, int line);
extern "C" void AnnotateIgnoreWritesEnd(char const *file, int line);

namespace sim::tsan {

// A scope in which ThreadSanitizer ignores the calling fibre's accesses. Needed around the
// runtime's own memcpy and memset, which are intercepted even in code that is not instrumented.
struct Unwatched {
    Unwatched() {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
    ~Unwatched() {
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    }
    Unwatched(Unwatched const &) = delete;
    Unwatched &operator=(Unwatched const &) = delete;
};

inline void release(void *tag) { __tsan_release(tag); }
inline void acquire(void *tag) { __tsan_acquire(tag); }
inline void read(void const *address, size_t size) {
    __tsan_read_range(const_cast<void *>(address), size);
}
inline void write(void *address, size_t size) { __tsan_write_range(address, size); }

// Runs `action` as the agent, which is a separate thread for the race detector.
template <class Action>
void as_agent(void *&agent, Action const &action) {
    if (agent == nullptr) {
        agent = __tsan_create_fiber(0);
    }
    void *const self = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(agent, __tsan_switch_to_fiber_no_sync);
    action();
    __tsan_switch_to_fiber(self, __tsan_switch_to_fiber_no_sync);
}
inline void destroy_agent(void *&agent) {
    if (agent != nullptr) {
        __tsan_destroy_fiber(agent);
    }
    agent = nullptr;
}

}  // namespace sim::tsan
#else
namespace sim::tsan {

struct Unwatched {
    Unwatched() {}
    ~Unwatched() {}
};
inline void release(void *) {}
inline void acquire(void *) {}
inline void read(void const *, size_t) {}
inline void write(void *, size_t) {}
template <class Action>
void as_agent(void *&, Action const &action) {
    action();
}
inline void destroy_agent(void *&) {}

}  // namespace sim::tsan
#endif
