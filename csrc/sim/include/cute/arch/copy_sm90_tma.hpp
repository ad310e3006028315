// Wraps CUTLASS's <cute/arch/copy_sm90_tma.hpp>: TMA loads and stores of boxes get host bodies.
// im2col, reductions and bulk copies without a tensor map keep CUTLASS's, which end in "not
// covered".
#pragma once

#define SM90_TMA_LOAD_1D Cutlass_SM90_TMA_LOAD_1D
#define SM90_TMA_LOAD_2D Cutlass_SM90_TMA_LOAD_2D
#define SM90_TMA_LOAD_3D Cutlass_SM90_TMA_LOAD_3D
#define SM90_TMA_LOAD_4D Cutlass_SM90_TMA_LOAD_4D
#define SM90_TMA_LOAD_5D Cutlass_SM90_TMA_LOAD_5D
#define SM90_TMA_LOAD Cutlass_SM90_TMA_LOAD
#define SM90_TMA_LOAD_MULTICAST_1D Cutlass_SM90_TMA_LOAD_MULTICAST_1D
#define SM90_TMA_LOAD_MULTICAST_2D Cutlass_SM90_TMA_LOAD_MULTICAST_2D
#define SM90_TMA_LOAD_MULTICAST_3D Cutlass_SM90_TMA_LOAD_MULTICAST_3D
#define SM90_TMA_LOAD_MULTICAST_4D Cutlass_SM90_TMA_LOAD_MULTICAST_4D
#define SM90_TMA_LOAD_MULTICAST_5D Cutlass_SM90_TMA_LOAD_MULTICAST_5D
#define SM90_TMA_LOAD_MULTICAST Cutlass_SM90_TMA_LOAD_MULTICAST
#define SM90_TMA_STORE_1D Cutlass_SM90_TMA_STORE_1D
#define SM90_TMA_STORE_2D Cutlass_SM90_TMA_STORE_2D
#define SM90_TMA_STORE_3D Cutlass_SM90_TMA_STORE_3D
#define SM90_TMA_STORE_4D Cutlass_SM90_TMA_STORE_4D
#define SM90_TMA_STORE_5D Cutlass_SM90_TMA_STORE_5D
#define SM90_TMA_STORE Cutlass_SM90_TMA_STORE
#define tma_store_fence Cutlass_tma_store_fence
#define tma_store_arrive Cutlass_tma_store_arrive
#define tma_store_wait Cutlass_tma_store_wait
#include_next <cute/arch/copy_sm90_tma.hpp>
#undef SM90_TMA_LOAD_1D
#undef SM90_TMA_LOAD_2D
#undef SM90_TMA_LOAD_3D
#undef SM90_TMA_LOAD_4D
#undef SM90_TMA_LOAD_5D
#undef SM90_TMA_LOAD
#undef SM90_TMA_LOAD_MULTICAST_1D
#undef SM90_TMA_LOAD_MULTICAST_2D
#undef SM90_TMA_LOAD_MULTICAST_3D
#undef SM90_TMA_LOAD_MULTICAST_4D
#undef SM90_TMA_LOAD_MULTICAST_5D
#undef SM90_TMA_LOAD_MULTICAST
#undef SM90_TMA_STORE_1D
#undef SM90_TMA_STORE_2D
#undef SM90_TMA_STORE_3D
#undef SM90_TMA_STORE_4D
#undef SM90_TMA_STORE_5D
#undef SM90_TMA_STORE
#undef tma_store_fence
#undef tma_store_arrive
#undef tma_store_wait

#include <sim/runtime_sm90.h>

namespace cute {

// With kRank 0 the number of coordinates gives the rank. A prefetch has no effect on results.
template <int kRank>
struct SimTmaLoad {
    template <class... Coordinates>
    static void copy(void const *descriptor, uint64_t *barrier, uint64_t, void *smem,
                     Coordinates const &...coordinates) {
        static_assert(kRank == 0 || kRank == sizeof...(Coordinates));
        int const at[] = {coordinates...};
        sim::tma_load(descriptor, barrier, smem, at, sizeof...(Coordinates));
    }
    struct PREFETCH {
        template <class... Coordinates>
        static void copy(void const *, Coordinates const &...) {}
    };
};

template <int kRank>
struct SimTmaLoadMulticast {
    template <class... Coordinates>
    static void copy(void const *descriptor, uint64_t *barrier, uint16_t mask, uint64_t, void *smem,
                     Coordinates const &...coordinates) {
        static_assert(kRank == 0 || kRank == sizeof...(Coordinates));
        int const at[] = {coordinates...};
        sim::tma_load_multicast(descriptor, barrier, smem, at, sizeof...(Coordinates), mask);
    }
};

template <int kRank>
struct SimTmaStore {
    template <class... Coordinates>
    static void copy(void const *descriptor, void const *smem, Coordinates const &...coordinates) {
        static_assert(kRank == 0 || kRank == sizeof...(Coordinates));
        int const at[] = {coordinates...};
        sim::tma_store(descriptor, smem, at, sizeof...(Coordinates));
    }
};

struct SM90_TMA_LOAD_1D : SimTmaLoad<1> {};
struct SM90_TMA_LOAD_2D : SimTmaLoad<2> {};
struct SM90_TMA_LOAD_3D : SimTmaLoad<3> {};
struct SM90_TMA_LOAD_4D : SimTmaLoad<4> {};
struct SM90_TMA_LOAD_5D : SimTmaLoad<5> {};
struct SM90_TMA_LOAD : SimTmaLoad<0> {};
struct SM90_TMA_LOAD_MULTICAST_1D : SimTmaLoadMulticast<1> {};
struct SM90_TMA_LOAD_MULTICAST_2D : SimTmaLoadMulticast<2> {};
struct SM90_TMA_LOAD_MULTICAST_3D : SimTmaLoadMulticast<3> {};
struct SM90_TMA_LOAD_MULTICAST_4D : SimTmaLoadMulticast<4> {};
struct SM90_TMA_LOAD_MULTICAST_5D : SimTmaLoadMulticast<5> {};
struct SM90_TMA_LOAD_MULTICAST : SimTmaLoadMulticast<0> {};
struct SM90_TMA_STORE_1D : SimTmaStore<1> {};
struct SM90_TMA_STORE_2D : SimTmaStore<2> {};
struct SM90_TMA_STORE_3D : SimTmaStore<3> {};
struct SM90_TMA_STORE_4D : SimTmaStore<4> {};
struct SM90_TMA_STORE_5D : SimTmaStore<5> {};
struct SM90_TMA_STORE : SimTmaStore<0> {};

inline void tma_store_fence() { sim::fence_async_proxy(); }
inline void tma_store_arrive() { sim::tma_store_commit(); }
template <int kPending>
void tma_store_wait() {
    sim::tma_store_wait(kPending, true);
}

}  // namespace cute
