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

template <class Traits>
struct MergeParts {
    static constexpr FwdConfig C = Traits::kConfig;
    using Merge = Combine<C>;
    // Kernels whose CTAs plan have at most two CTAs an SM; their consumer, if it is one, has
    // registers to spare. A window leaves few keys to split.
    static constexpr bool kCan = CtaPlan<C>::kFits && C.warps == 4 && C.mask != MaskKind::local;
    static constexpr int kGroups = Merge::kGroups;
    // Parts of a row whose loads are in flight: one latency for most tiles up to d = 128, fewer
    // where eight sums and more, or O above it, take the registers, and with pages where CTAs share
    // an SM.
    static constexpr bool kWide = C.head_dim > 128;
    static constexpr bool kFew = kWide || kGroups > 8 || (C.paged && C.min_ctas > 1);
    static constexpr int kAhead = kFew ? 4 : kGroups < 8 ? 16 : 8;
    static constexpr int kRound = cute::max(kAhead, kGroups);
    // Parts whose weights the lanes of a row have at a time.
    static constexpr int kWeighed = cute::max(kRound, Merge::kWidth);
    static_assert(kWeighed % kRound == 0 && kRound % kGroups == 0, "sums are known when compiled");

    // Tiles with many rows are left to a kernel of many CTAs.
    CUTE_HOST_DEVICE static bool suits(Flash_fwd_params const &params) {
        return kCan && params.num_splits > 1 && CtaPlan<C>::suits(params) &&
               num_rows(params, params.seqlen_q) <= kMostRowsMerged &&
               int64_t(params.b) * num_grid_heads(params) <= kArrivals;
    }

    // By all threads of the consumer once a part is stored; of a sequence's only tile no part is
    // empty.
    // arrivals: counters of the launch, all zero. is_last: in shared memory. barrier: a named one.
    CUTE_DEVICE static void arrive(Flash_fwd_params const &params, unsigned *arrivals, int &is_last,
                                   WorkTile const &tile, int barrier) {
        static_assert(Traits::kMmaThreads == Merge::kThreads || !kCan);
        sm90::named_barrier_sync(barrier, Merge::kThreads);
        if (threadIdx.x % Merge::kThreads == 0) {
            unsigned *const stored = arrivals + tile.head * params.b + tile.row_q / params.seqlen_q;
            bool const last =
                sm90::add_acq_rel(stored, 1u) == static_cast<unsigned>(tile.parts) - 1;
            is_last = last;
            if (last) atomicExch(stored, 0u);
        }
        sm90::named_barrier_sync(barrier, Merge::kThreads);
        if (is_last != 0) {
            // Not the same before every tile to the compiler, which would keep what it computes
            // from it in registers of the main loop.
            merge(params, tile, static_cast<int>(threadIdx.x) % Merge::kThreads & -is_last);
        }
    }

  private:
    // A sequence's only tile of queries. thread: of the consumer.
    CUTE_DEVICE static void merge(Flash_fwd_params const &params, WorkTile const &tile,
                                  int thread) {
        int const rows = num_rows(params, tile.seqlen_q);
        int64_t const first =
            int64_t(tile.head) * params.partial_rows + tile.partial_row - tile.part * rows;
        CUTE_NO_UNROLL
        for (int begin = 0; begin < rows; begin += kGroups) {
            int const i = begin + thread / Merge::kLanes;
            TileRow const of_tile = tile_row(params, tile, Traits::kTileM, i);
            typename Merge::Row row{};
            if (of_tile.exists) {
                row = {first + i, rows, tile.parts, tile.head_q + of_tile.head,
                       tile.row_q + of_tile.position};
            }
            merge_row(params, row, tile.parts, thread);
        }
    }

    // Of parts, one or a few for each lane of a row, which it hands to the others.
    struct Weights {
        float of_lane[kWeighed / Merge::kWidth];  // negative: the part sees no key, or is none

        // Of kWeighed parts from `begin` on. ref: the largest log-sum-exp, found with the first
        // ones.
        CUTE_DEVICE void weigh(typename Merge::Row const &row, float const *lse, int begin,
                               float sink, float &ref, float &sum, int thread) {
            int const stride = static_cast<int>(row.stride);
            int const first = begin + thread % Merge::kWidth;
            CUTE_UNROLL
            for (int i = 0; i < kWeighed / Merge::kWidth; ++i) {
                int const part = first + i * Merge::kWidth;
                of_lane[i] = part < row.parts ? lse[part * stride] : -INFINITY;
            }
            if (begin == 0) {
                float most = sink;
                for (float const x : of_lane) {
                    most = fmaxf(most, x);
                }
                CUTE_NO_UNROLL
                for (int part = first + kWeighed; part < row.parts; part += Merge::kWidth) {
                    most = fmaxf(most, lse[part * stride]);
                }
                ref = Merge::reference(most);
            }
            for (float &x : of_lane) {
                float const weight = Merge::weight(x, ref);
                sum += weight;
                // Of a part that sees no key nothing may come, as of no key.
                x = x == -INFINITY ? -1.f : weight;
            }
        }
        // part: from `begin` on, of which this is the index-th one of its lane.
        CUTE_DEVICE float of(int part, int index) const {
            return __shfl_sync(0xffffffffu, of_lane[index], part, Merge::kWidth);
        }
    };

    // As Merge::merge() of a group with a row of its own, and with the same result; but all sums at
    // a time, of parts that are neighbours. parts: of all groups; a row that does not exist has 0.
    CUTE_DEVICE static void merge_row(Flash_fwd_params const &params,
                                      typename Merge::Row const &row, int parts, int thread) {
        int const lane = thread % Merge::kLanes;
        int const col = lane * Merge::kVec;
        int const mine = col < params.d ? row.parts : 0;
        float const *const lse = params.lse_partial_ptr + row.first;
        float const *o = params.o_partial_ptr + row.first * params.d + col;
        // At most kMostRowsMerged rows, so that all parts of a round are within 32 bits.
        int const step = static_cast<int>(row.stride) * params.d;
        float const sink = params.sinks_ptr != nullptr ? params.sinks_ptr[row.head] : -INFINITY;
        float ref = 0.f, sum = 0.f;
        float4 sums[kGroups] = {};
        Weights weights;
        CUTE_NO_UNROLL
        for (int begin = 0; begin < parts; begin += kRound) {
            CUTE_UNROLL
            for (int i = 0; i < kRound; i += kAhead) {
                float4 x[kAhead];
                CUTE_UNROLL
                for (int j = 0; j < kAhead; ++j) {
                    if (i + j < mine - begin) {
                        x[j] = *reinterpret_cast<float4 const *>(o + (i + j) * step);
                    }
                }
                if (i == 0 && begin % kWeighed == 0) {  // while these are loaded
                    weights.weigh(row, lse, begin, sink, ref, sum, thread);
                }
                CUTE_UNROLL
                for (int j = 0; j < kAhead; ++j) {
                    float const weight =
                        weights.of(begin % kWeighed + i + j, (i + j) / Merge::kWidth);
                    if (!(weight < 0.f) && mine > 0) {
                        Merge::add(sums[(i + j) % kGroups], weight, x[j]);
                    }
                }
            }
            o += kRound * step;
        }
        sum = Merge::sum(sum) + Merge::weight(sink, ref);
        CUTE_UNROLL
        for (int g = 1; g < kGroups; ++g) {
            if (g < mine) Merge::add(sums[0], 1.f, sums[g]);
        }
        if (mine > 0) {
            Merge::store(params, row, lane, sums[0], ref, sum);
        }
    }
};

}  // namespace flash
