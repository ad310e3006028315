// The merge of a split tile's parts by the CTA whose part is stored last, in place of a kernel
// behind the main one.
#pragma once

#include <arch_sm90.h>
#include <cuda_runtime.h>

#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "cta_plan.h"
#include "flash.h"
#include "flash_fwd_combine_kernel.h"
#include "persistent_launch.h"
#include "work_tile.h"

namespace flash {

// Whether CTAs merge where they can.
inline constexpr bool kCtasMerge = true;

template <class Traits>
struct MergeParts {
    static constexpr FwdConfig C = Traits::kConfig;
    using Merge = Combine<C>;
    static constexpr int kThreads = 128;  // of a warpgroup, which merges the rows that it owns
    static_assert(kThreads == Merge::kThreads);
    // One CTA merges a tile: of many rows a kernel of many CTAs does.
    static constexpr int kMostRows = 16;

    CUTE_HOST_DEVICE static bool suits(Flash_fwd_params const &params) {
        return kCtasMerge && params.num_splits > 1 && CtaPlan<C>::suits(params) &&
               num_rows(params, params.seqlen_q) <= kMostRows &&
               int64_t(params.b) * num_grid_heads(params) * Traits::kMmaWarpgroups <= kArrivals;
    }

    // By all threads of a warpgroup once their rows of a part are stored. arrivals: counters of the
    // launch, all zero; is_last: in shared memory, of the warpgroup. barrier: a named one, of it.
    CUTE_DEVICE static void arrive(Flash_fwd_params const &params, unsigned *arrivals, int &is_last,
                                   WorkTile const &tile, int warpgroup, int barrier) {
        int const thread = static_cast<int>(threadIdx.x) % kThreads;
        int const sequence = tile.row_q / params.seqlen_q;
        int const index = (tile.head * params.b + sequence) * Traits::kMmaWarpgroups + warpgroup;
        __threadfence();
        sm90::named_barrier_sync(barrier, kThreads);
        if (thread == 0) {
            unsigned const before = atomicAdd(&arrivals[index], 1u);
            is_last = before == static_cast<unsigned>(tile.parts) - 1;
            if (is_last) atomicExch(&arrivals[index], 0u);
            __threadfence();
        }
        sm90::named_barrier_sync(barrier, kThreads);
        if (is_last) merge(params, tile, warpgroup * 64);
    }

  private:
    // Rows [begin, begin + 64) of a sequence's only tile of queries.
    CUTE_DEVICE static void merge(Flash_fwd_params const &params, WorkTile const &tile, int begin) {
        int const rows = num_rows(params, tile.seqlen_q);
        int const group = static_cast<int>(threadIdx.x) % kThreads / Merge::kLanes;
        int64_t const first =
            int64_t(tile.head) * params.partial_rows + tile.partial_row - tile.part * rows;
        typename Merge::SharedStorage none;  // where each group has a row of its own
        CUTE_NO_UNROLL
        for (int i = begin; i < cute::min(begin + 64, rows); i += Merge::kGroups) {
            TileRow const of_tile = tile_row(params, tile, Traits::kTileM, i + group);
            typename Merge::Row row{};
            if (of_tile.exists) {
                row = {first + i + group, rows, tile.parts, tile.head_q + of_tile.head,
                       tile.row_q + of_tile.position};
            }
            Merge::merge(params, none, row, true);
        }
    }
};

}  // namespace flash
