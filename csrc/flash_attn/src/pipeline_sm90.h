// What producer and consumers of the sm90 class's kernels share: rings of pipeline stages, and the
// TMA loads that fill them.
#pragma once

#include <arch_sm90.h>
#include <cuda.h>

#include <cstdint>
#include <cute/config.hpp>

namespace flash {

// The state of a ring of kStages buffers: how often one was used so far. It gives the next buffer's
// stage and the parity of its mbarriers' current phase.
template <int kStages>
struct Ring {
    static_assert((kStages & (kStages - 1)) == 0);
    uint32_t uses = 0;

    CUTE_DEVICE int stage() const { return uses % kStages; }
    CUTE_DEVICE uint32_t parity() const { return uses / kStages % 2; }
    CUTE_DEVICE Ring before() const { return {uses - 1}; }
    CUTE_DEVICE void advance() { ++uses; }
};

// Loads rows at the given coordinates, from `column` on, as kPages TMA boxes of kSmemRow columns,
// page_stride elements apart in shared memory. Called by one thread, whose arrival at `full`
// expects `bytes`.
template <class Traits, int kPages, class... Coordinates>
CUTE_DEVICE void load_columns(CUtensorMap const &map, sm90::Barrier *full, int bytes,
                              sm90::CacheHint hint, typename Traits::Element *smem, int page_stride,
                              int column, Coordinates... coordinates) {
    sm90::barrier_arrive_expect(full, bytes);
    CUTE_UNROLL
    for (int page = 0; page < kPages; ++page) {
        sm90::tma_load(&map, full, hint, smem + page * page_stride,
                       column + page * Traits::kSmemRow, coordinates...);
    }
}
template <class Traits, int kPages = Traits::kPages, class... Coordinates>
CUTE_DEVICE void load_box(CUtensorMap const &map, sm90::Barrier *full, int bytes,
                          sm90::CacheHint hint, typename Traits::Element *smem, int page_stride,
                          Coordinates... coordinates) {
    load_columns<Traits, kPages>(map, full, bytes, hint, smem, page_stride, 0, coordinates...);
}

}  // namespace flash
