// Merges the parts of a split tile in the CTA that stores the last one, in place of a combine
// kernel behind the main one.
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
    // Whether the kernel can merge. Kernels whose CTAs plan have at most two CTAs an SM, so that a
    // single consumer has registers to spare. A window leaves few keys to split.
    static constexpr bool kCan = CtaPlan<C>::kFits && C.warps == 4 && C.mask != MaskKind::local;
    static constexpr int kGroups = Merge::kGroups;
    // Parts of a row whose loads are in flight: enough that most tiles up to d = 128 wait for
    // memory once. Fewer where eight sums or more, or O above d = 128, take the registers, and with
    // pages where CTAs share an SM.
    static constexpr bool kWide = C.head_dim > 128;
    static constexpr bool kFew = kWide || kGroups > 8 || (C.paged && C.min_ctas > 1);
    static constexpr int kAhead = kFew ? 4 : kGroups < 8 ? 16 : 8;
    static constexpr int kRound = cute::max(kAhead, kGroups);
    // Parts whose weights the lanes of a row hold at a time.
    static constexpr int kWeighed = cute::max(kRound, Merge::kWidth);
    static_assert(kWeighed % kRound == 0 && kRound % kGroups == 0, "sums are known when compiled");

    // Returns whether CTAs merge in this launch. Tiles with many rows are left to the combine
    // kernel, which spreads them over many CTAs.
    CUTE_HOST_DEVICE static bool suits(Flash_fwd_params const &params) {
        return kCan && params.num_splits > 1 && CtaPlan<C>::suits(params) &&
               num_rows(params, params.seqlen_q) <= kMostRowsMerged &&
               int64_t(params.b) * num_grid_heads(params) <= kArrivals;
    }

    // Counts a stored part, and merges all parts if it was the tile's last. Called by all threads
    // of the consumer once they have stored the part. Empty parts would not be counted, but those
    // of a sequence's only tile are never empty. arrivals: counters of the launch, all zero before
    // it. is_last: in shared memory. barrier: the number of a named barrier.
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
            // Masked with -is_last, which is all ones, the thread index is not the same for every
            // tile to nvcc, which would keep what it computes from it in registers throughout the
            // main loop.
            merge(params, tile, static_cast<int>(threadIdx.x) % Merge::kThreads & -is_last);
        }
    }

  private:
    // Merges the parts of a sequence's only tile of queries. thread: within the consumer.
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

    // Weights of kWeighed parts of a row: each lane has one or a few, and shuffles hand them to
    // others.
    struct Weights {
        float of_lane[kWeighed / Merge::kWidth];  // negative: the part sees no key, or is none

        // Loads the LSE of kWeighed parts from `begin` on and adds their weights to `sum`. ref: the
        // largest LSE of all parts, found in the call with begin = 0.
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
                // A part that sees no key must contribute nothing, not even 0 times its O.
                x = x == -INFINITY ? -1.f : weight;
            }
        }
        // Returns the weight of part `part` from `begin` on, the index-th one of its lane.
        CUTE_DEVICE float of(int part, int index) const {
            return __shfl_sync(0xffffffffu, of_lane[index], part, Merge::kWidth);
        }
    };

    // Merges the parts of a row, with the same result as Merge::merge() of a group that is alone,
    // but computes all kGroups sums at a time, from consecutive parts. parts: the same in all
    // groups; of a row that does not exist row.parts is 0.
    CUTE_DEVICE static void merge_row(Flash_fwd_params const &params,
                                      typename Merge::Row const &row, int parts, int thread) {
        int const lane = thread % Merge::kLanes;
        int const col = lane * Merge::kVec;
        int const mine = col < params.d ? row.parts : 0;
        float const *const lse = params.lse_partial_ptr + row.first;
        float const *o = params.o_partial_ptr + row.first * params.d + col;
        // There are at most kMostRowsMerged rows, so that offsets within a round fit into 32 bits.
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
