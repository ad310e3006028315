// Manual poisoning of memory for AddressSanitizer. Without SIM_ASAN all functions are empty.
#pragma once

#include <cstddef>

#if defined(SIM_ASAN)
#include <sanitizer/asan_interface.h>

namespace sim::asan {

inline void forbid(void const *at, size_t bytes) { __asan_poison_memory_region(at, bytes); }
inline void allow(void const *at, size_t bytes) { __asan_unpoison_memory_region(at, bytes); }
// `action` is called with each report.
inline void on_report(void (*action)(char const *)) { __asan_set_error_report_callback(action); }
inline void *report_address() { return __asan_get_report_address(); }

}  // namespace sim::asan
#else
namespace sim::asan {

inline void forbid(void const *, size_t) {}
inline void allow(void const *, size_t) {}
inline void on_report(void (*)(char const *)) {}
inline void *report_address() { return nullptr; }

}  // namespace sim::asan
#endif
