// Lays out the tiles of a ragged batch (varlen) on the device, as the lengths of its sequences are
// known there only. The host knows only an upper bound of the number of tiles. Further CTAs of the
// same launch append to a cache.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "append_kvcache.h"
#include "cta_plan.h"
#include "flash.h"
#include "plan_segments.h"
#include "work_plan.h"
#include "work_tile.h"

namespace flash {

// One CTA. Decides into how many parts the tiles of each segment are split and counts them, then
// sorts them by the blocks that they visit (a counting sort in logarithmic buckets, so that the
// order among equals is free). Tiles of a backward are not split.
template <class Tiles>
struct Planner {
    using Segments = flash::Segments<Tiles::kOfKeys>;
    using Splits = TileSplits<Tiles>;
    static constexpr int kThreads = 1024;
    static constexpr int kBuckets = 128;
    static constexpr int kCopies = 8;  // of each bucket, as atomics on one address are serialised
    static constexpr int kMaxFirst = 5120;  // within the 48 KB that any launch may have
    static_assert(kThreads == 32 * 32 && kBuckets * kCopies == kThreads);

    // Of the segments before one: x tiles, y rows of the workspace.
    struct Counts {
        int x, y;
    };

    struct SharedStorage {
        Counts of_warps[kThreads / 32];
        unsigned bucket[kThreads];  // tiles in it; then where its next one goes
        Counts before;
        int part_blocks;  // key blocks of a part at least
        unsigned split_positions;
        Counts first[kMaxFirst];  // if as many suffice; else they are in global memory
    };

    // By the exponent and three bits of the mantissa of the number of blocks, most first; from
    // 2^15.75 on all are in one.
    CUTE_DEVICE static int bucket_of(int blocks) {
        int const bits = (__float_as_int(static_cast<float>(blocks)) >> 20) - (127 << 3);
        int const bucket = blocks > 0 ? kBuckets - 2 - cute::min(bits, kBuckets - 2) : kBuckets - 1;
        return bucket * kCopies + threadIdx.x % kCopies;
    }

    // Of counts, none of which is negative. Values that are no lengths may ask for more than an int
    // holds.
    CUTE_DEVICE static int sum(int a, int b) {
        unsigned const exact = static_cast<unsigned>(a) + static_cast<unsigned>(b);
        return static_cast<int>(cute::min(exact, static_cast<unsigned>(INT32_MAX)));
    }
    CUTE_DEVICE static int product(int a, int b) {
        return static_cast<int>(cute::min(int64_t(a) * b, int64_t(INT32_MAX)));
    }
    struct Sums {
        CUTE_DEVICE Counts operator()(Counts const &a, Counts const &b) const {
            return {sum(a.x, b.x), sum(a.y, b.y)};
        }
    };
    struct SumAndMax {
        CUTE_DEVICE Counts operator()(Counts const &a, Counts const &b) const {
            return {sum(a.x, b.x), cute::max(a.y, b.y)};
        }
    };

    // Of all values up to this thread's own.
    template <class Op>
    CUTE_DEVICE static Counts inclusive_scan(Counts *of_warps, Counts const &value) {
        int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        Counts const own = warp_scan<Op>(value, lane);
        if (lane == 31) {
            of_warps[warp] = own;
        }
        __syncthreads();
        Counts const warps = warp_scan<Op>(of_warps[lane], lane);
        int const last = cute::max(warp - 1, 0);
        Counts const before{__shfl_sync(0xffffffffu, warps.x, last),
                            __shfl_sync(0xffffffffu, warps.y, last)};
        __syncthreads();
        return warp == 0 ? own : Op{}(before, own);
    }
    template <class Op>
    CUTE_DEVICE static Counts warp_scan(Counts value, int lane) {
        CUTE_UNROLL
        for (int distance = 1; distance < 32; distance *= 2) {
            Counts const before{__shfl_up_sync(0xffffffffu, value.x, distance),
                                __shfl_up_sync(0xffffffffu, value.y, distance)};
            if (lane >= distance) value = Op{}(value, before);
        }
        return value;
    }

    CUTE_DEVICE static int num_parts(Flash_fwd_params const &params, SharedStorage const &storage,
                                     PlanTile const &segment) {
        if (params.num_splits <= 1) {
            return 1;
        }
        return Splits::num_parts(params, storage.part_blocks, Splits::key_blocks(params, segment));
    }

    CUTE_DEVICE static void choose_part_blocks(Flash_fwd_params const &params,
                                               SharedStorage &storage) {
        Segments const segments{params};
        Counts blocks{0, 0};  // of all tiles; of the longest
        if (params.num_splits > 1 && params.split_ctas > 0) {
            for (int i = threadIdx.x; i < segments.count(); i += kThreads) {
                PlanTile const segment = segments[i];
                int const of_tile = Splits::key_blocks(params, segment);
                int const of_all = product(Splits::num_m_blocks(params, segment), of_tile);
                blocks = SumAndMax{}(blocks, {of_all, of_tile});
            }
            blocks = inclusive_scan<SumAndMax>(storage.of_warps, blocks);
        }
        if (threadIdx.x == kThreads - 1) {
            storage.part_blocks = Splits::part_blocks(params, blocks.x, blocks.y);
        }
        __syncthreads();
    }

    CUTE_DEVICE static void count_tiles(Flash_fwd_params const &params, SharedStorage &storage,
                                        Counts *first) {
        Segments const segments{params};
        if (threadIdx.x == 0) {
            storage.split_positions = 0;
            storage.before = first[0] = {0, 0};
        }
        __syncthreads();
        CUTE_NO_UNROLL
        for (int begin = 0; begin < segments.count(); begin += kThreads) {
            int const i = begin + static_cast<int>(threadIdx.x);
            Counts counts{0, 0};
            if (i < segments.count()) {
                PlanTile const segment = segments[i];
                int const parts = num_parts(params, storage, segment);
                counts.x = product(Splits::num_m_blocks(params, segment), parts);
                counts.y = parts > 1 ? product(num_rows(params, segment.seqlen_q), parts) : 0;
            }
            Counts const before = storage.before;
            counts = Sums{}(before, inclusive_scan<Sums>(storage.of_warps, counts));
            counts = {cute::min(counts.x, params.plan_capacity),
                      cute::min(counts.y, params.partial_rows)};
            if (i < segments.count()) {
                first[i + 1] = counts;
            }
            if (threadIdx.x == kThreads - 1) {
                storage.before = counts;
            }
            __syncthreads();
        }
    }

    // Tile `index` in the order of the segments.
    CUTE_DEVICE static PlanTile find_tile(Flash_fwd_params const &params,
                                          SharedStorage const &storage, Counts const *first,
                                          int index) {
        Segments const segments{params};
        int low = 0, high = segments.count();  // first[low] <= index < first[high]
        while (high - low > 1) {
            int const middle = (low + high) / 2;
            (first[middle].x <= index ? low : high) = middle;
        }
        PlanTile tile = segments[low];
        int const parts = num_parts(params, storage, tile);
        int const within = index - first[low].x;
        int const part = within % parts;
        tile.m_block = within / parts;
        tile.part = PlanTile::kParts * part + parts;
        if (parts > 1) {
            int const rows = num_rows(params, tile.seqlen_q);
            // Where there is no room, parts share it.
            int const begin = cute::min(first[low].y, params.partial_rows - rows * parts);
            tile.partial_row = begin < 0 ? -1 : begin + part * rows;
        }
        return tile;
    }

    // Lists the positions whose first row is in a split tile.
    CUTE_DEVICE static void list_positions(Flash_fwd_params const &params, SharedStorage &storage,
                                           SplitPosition *positions, PlanTile const &tile) {
        int const parts = tile.part % PlanTile::kParts;
        if (parts == 1 || tile.part >= PlanTile::kParts || tile.partial_row < 0) {
            return;
        }
        int const one = (1 << params.pack_shift) - 1;
        int const begin = (tile.m_block * Tiles::kRows + one) >> params.pack_shift;
        int const end = cute::min(((tile.m_block + 1) * Tiles::kRows + one) >> params.pack_shift,
                                  tile.seqlen_q);
        unsigned const at = atomicAdd(&storage.split_positions, cute::max(end - begin, 0));
        for (int i = begin; i < end; ++i) {
            int64_t const index = int64_t(at) + i - begin;
            if (index < params.total_q) {
                positions[index] = {tile.row_q + i, tile.partial_row + (i << params.pack_shift),
                                    num_rows(params, tile.seqlen_q), parts};
            }
        }
    }

    // The bucket of a tile.
    CUTE_DEVICE static unsigned &bucket(Flash_fwd_params const &params, SharedStorage &storage,
                                        PlanTile const &tile) {
        WorkTile const work{
            .m_block = tile.m_block, .seqlen_q = tile.seqlen_q, .seqlen_k = tile.seqlen_k};
        int const parts = tile.part % PlanTile::kParts;
        return storage.bucket[bucket_of(Tiles::blocks(params, work).count / parts)];
    }

    CUTE_DEVICE static void run(Flash_fwd_params const &params, SharedStorage &storage) {
        auto &plan = *static_cast<WorkPlan *>(params.plan_ptr);
        Counts *const first = 2 * params.b + 2 <= kMaxFirst
                                  ? storage.first
                                  : reinterpret_cast<Counts *>(plan.tiles + params.plan_capacity);
        auto *const positions = const_cast<SplitPosition *>(plan.positions(params));
        int const thread = threadIdx.x;
        storage.bucket[thread] = 0;
        choose_part_blocks(params, storage);
        count_tiles(params, storage, first);
        int const count = first[2 * params.b + 1].x;
        PlanTile tile;  // this thread's last
        for (int i = thread; i < count; i += kThreads) {
            tile = find_tile(params, storage, first, i);
            atomicAdd(&bucket(params, storage, tile), 1u);
        }
        __syncthreads();
        int const size = static_cast<int>(storage.bucket[thread]);
        int const end = inclusive_scan<Sums>(storage.of_warps, {size, 0}).x;
        storage.bucket[thread] = static_cast<unsigned>(end - size);
        __syncthreads();
        for (int i = thread; i < count; i += kThreads) {
            if (count > kThreads) tile = find_tile(params, storage, first, i);
            plan.tiles[atomicAdd(&bucket(params, storage, tile), 1u)] = tile;
            list_positions(params, storage, positions, tile);
        }
        __syncthreads();
        if (thread == 0) {
            plan.count = count;
            plan.split_positions =
                static_cast<int>(cute::min(storage.split_positions, unsigned(params.total_q)));
        }
    }
};

// One CTA plans, if there is a plan to be made.
CUTE_HOST_DEVICE unsigned num_planners(Flash_fwd_params const &params) {
    return params.plan_ptr != nullptr ? 1 : 0;
}

template <class Tiles>
__global__ void __launch_bounds__(Planner<Tiles>::kThreads)
    flash_plan_kernel(__grid_constant__ Flash_fwd_params const params) {
    using Plan = Planner<Tiles>;
    // An attention kernel of the sm90 class may be launched already; it waits for this one's end.
    if constexpr (Tiles::kArch == 90) cudaTriggerProgrammaticLaunchCompletion();
    unsigned const planners = num_planners(params);
    if (blockIdx.x >= planners) {
        Append<Tiles::kDtype>::run(params, blockIdx.x - planners, gridDim.x - planners);
        return;
    }
    extern __shared__ __align__(1024) char smem[];
    Plan::run(params, *reinterpret_cast<typename Plan::SharedStorage *>(smem));
}

// Enqueues the plan of params->plan_ptr, if it is not null, and what is appended to a cache. A plan
// holds while lengths and shapes stay the same; what is appended is of each layer.
template <class Tiles>
int32_t launch_plan(Flash_fwd_params const *params, void *stream) {
    using Plan = Planner<Tiles>;
    unsigned const planners = num_planners(*params);
    unsigned const ctas = planners + Append<Tiles::kDtype>::num_ctas(*params, Plan::kThreads);
    if (ctas == 0) {
        return cudaSuccess;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(ctas);
    config.blockDim = dim3(Plan::kThreads);
    config.dynamicSmemBytes = planners * sizeof(typename Plan::SharedStorage);
    config.stream = static_cast<cudaStream_t>(stream);
    return cudaLaunchKernelEx(&config, &flash_plan_kernel<Tiles>, *params);
}

// Likewise, for a forward kernel, unless its CTAs plan for themselves.
template <FwdConfig C>
int32_t launch_fwd_plan(Flash_fwd_params const *params, void *stream) {
    return CtaPlan<C>::suits(*params) ? cudaSuccess : launch_plan<PlanFwd<C>>(params, stream);
}

}  // namespace flash
