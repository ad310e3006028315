// Replaces CUTLASS's <cute/arch/copy_sm80.hpp>: cp.async with its groups.
#pragma once

#include <cute/arch/copy.hpp>

namespace cute {

template <class TS, class TD, int kSmallest>
struct SimCpAsync {
    using SRegisters = TS[1];
    using DRegisters = TD[1];
    static_assert(sizeof(TS) == sizeof(TD));
    static_assert(sizeof(TS) >= kSmallest &&
                  (sizeof(TS) == 4 || sizeof(TS) == 8 || sizeof(TS) == 16));

    static void copy(TS const &gmem_src, TD &smem_dst) {
        sim::cp_async(&smem_dst, &gmem_src, sizeof(TS), true);
    }
};

template <class TS, class TD, int kSmallest>
struct SimCpAsyncZfill : SimCpAsync<TS, TD, kSmallest> {
    static void copy(TS const &gmem_src, TD &smem_dst, bool pred) {
        sim::cp_async(&smem_dst, &gmem_src, sizeof(TS), pred);
    }
};

// cp.async.ca copies 4, 8 or 16 bytes, cp.async.cg (past L1) 16 only.
template <class TS, class TD = TS>
struct SM80_CP_ASYNC_CACHEALWAYS : SimCpAsync<TS, TD, 4> {};
template <class TS, class TD = TS>
struct SM80_CP_ASYNC_CACHEGLOBAL : SimCpAsync<TS, TD, 16> {};
template <class TS, class TD = TS>
struct SM80_CP_ASYNC_CACHEALWAYS_ZFILL : SimCpAsyncZfill<TS, TD, 4> {};
template <class TS, class TD = TS>
struct SM80_CP_ASYNC_CACHEGLOBAL_ZFILL : SimCpAsyncZfill<TS, TD, 16> {};

inline void cp_async_fence() { sim::cp_async_commit(); }

template <int N>
void cp_async_wait() {
    if constexpr (N == 0) {
        sim::cp_async_wait_all();
    } else {
        sim::cp_async_wait_group(N);
    }
}
template <int N>
void cp_async_wait(Int<N>) {
    cp_async_wait<N>();
}

}  // namespace cute
