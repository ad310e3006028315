// Lays out the tiles of a ragged batch (varlen) on the device, as the lengths of its sequences are
// known there only. The host knows only an upper bound of the number of tiles. Further CTAs of the
// same launch append to a cache.
#pragma once

#include <cuda_runtime.h>
#include <dynamic_smem.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "append_kvcache.h"
#include "cta_plan.h"
#include "dependent_launch.h"
#include "flash.h"
#include "plan_segments.h"
#include "work_plan.h"
#include "work_tile.h"

namespace flash {

// Plans with one CTA: decides into how many parts the tiles of each segment are split, counts the
// tiles and lists them, those with most key blocks first. Tiles of a backward are not split.
template <class Tiles>
struct Planner {
    using Segments = flash::Segments<Tiles::kOfKeys>;
    using Splits = TileSplits<Tiles>;
    static constexpr int kMaxThreads = 1024;
    static constexpr int kMinThreads = 128;
    static constexpr int kAppendThreads = 256;  // of CTAs, where all append and none plans
    static constexpr int kBuckets = 128;
    static constexpr int kCopies = 8;  // of each bucket, as atomics on one address are serialised
    static constexpr int kMaxSegments = 1280;  // within the 48 KB that any launch may have
    static_assert(kMaxThreads == 32 * 32 && kBuckets <= kMinThreads);
    static constexpr bool kTakesTurns = Tiles::kOfKeys && Tiles::kArch == 80;
    static constexpr int kMostRanked = 256;  // segments, where each is compared with all others
    static_assert(2 * kMostRanked <= kBuckets * kCopies);
    // Tiles whose numbers of key blocks differ by no more than this may come in any order.
    static constexpr int kAlike = 3;

    enum class Order {
        // In the order of the segments, where all tiles have about equally many blocks: tiles that
        // are neighbours in memory follow each other, and share their keys in L2.
        of_segments,
        // Where the sequences are alike: the last tiles of all sequences, then those before them,
        // and so on. Tiles of keys: the first tiles, which have the most blocks, then the second
        // ones.
        of_levels,
        // Most blocks first, by a counting sort in logarithmic buckets; the order within a bucket
        // is not fixed. Of tiles of keys the first one of a sequence comes before its others.
        sorted,
        // The sequences in such buckets, by their first tile; each with its tiles in order.
        of_sequences,
        // Groups of plan_in_order sequences, ranked by their first tile: all first tiles of a
        // group, then all second ones, and so on.
        in_turns,
    };

    // Maxima over all tiles; minima are maxima of negated values. Of tiles' key blocks, of the key
    // blocks of segments' longest tiles, of sequences' tiles.
    enum { kMostBlocks, kLeastBlocks, kLeastLongest, kMostTiles, kLeastTiles, kExtremes };

    struct SharedStorage {
        int of_warps[kMaxThreads / 32];
        int extremes[kExtremes][kMaxThreads / 32];
        unsigned bucket[kBuckets * kCopies];  // tiles in it; then its next one's place; or ranks
        int part_blocks;                      // least key blocks of a part
        unsigned split_positions;
        // Each segment as its first tile, except that m_block holds the tiles before it, and part
        // its number of parts. In global memory if there are more than kMaxSegments.
        PlanTile segments[kMaxSegments];
    };

    // Returns a counter of the bucket of `blocks`: by the exponent and three bits of the mantissa,
    // most first; from 1.75 * 2^15 on all are in one.
    CUTE_DEVICE static int bucket_of(int blocks) {
        int const bits = (__float_as_int(static_cast<float>(blocks)) >> 20) - (127 << 3);
        int const bucket = blocks > 0 ? kBuckets - 2 - cute::min(bits, kBuckets - 2) : kBuckets - 1;
        return bucket * kCopies + threadIdx.x % kCopies;
    }

    // Sum and product of counts >= 0, saturated: invalid values of cu_seqlens and seqused may ask
    // for more than an int holds.
    CUTE_DEVICE static int sum(int a, int b) {
        unsigned const exact = static_cast<unsigned>(a) + static_cast<unsigned>(b);
        return static_cast<int>(cute::min(exact, static_cast<unsigned>(INT32_MAX)));
    }
    CUTE_DEVICE static int product(int a, int b) {
        return static_cast<int>(cute::min(int64_t(a) * b, int64_t(INT32_MAX)));
    }

    CUTE_DEVICE static int warp_scan(int value, int lane) {
        CUTE_UNROLL
        for (int distance = 1; distance < 32; distance *= 2) {
            int const before = __shfl_up_sync(0xffffffffu, value, distance);
            if (lane >= distance) value = sum(before, value);
        }
        return value;
    }
    // Returns the sum of the values of all threads before this one; `all` becomes the sum of all
    // values. Collective over the CTA; __syncthreads() has to come before the next scan.
    CUTE_DEVICE static int scan(SharedStorage &storage, int value, int &all) {
        int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int const own = warp_scan(value, lane);
        if (lane == 31) {
            storage.of_warps[warp] = own;
        }
        __syncthreads();
        int const of_warp = 32 * lane < static_cast<int>(blockDim.x) ? storage.of_warps[lane] : 0;
        int const warps = warp_scan(of_warp, lane);
        all = __shfl_sync(0xffffffffu, warps, 31);
        int const warps_before = __shfl_sync(0xffffffffu, warps, cute::max(warp - 1, 0));
        int const lanes_before = __shfl_up_sync(0xffffffffu, own, 1);
        return sum(warp > 0 ? warps_before : 0, lane > 0 ? lanes_before : 0);
    }

    // Reduces a value over the warp for extreme(), which needs __syncthreads() in between. Called
    // by all threads.
    CUTE_DEVICE static void put_extreme(SharedStorage &storage, int which, int value) {
        int const of_warp = __reduce_max_sync(0xffffffffu, value);
        if (threadIdx.x % 32 == 0) {
            storage.extremes[which][threadIdx.x / 32] = of_warp;
        }
    }
    CUTE_DEVICE static int extreme(SharedStorage const &storage, int which) {
        int const warp = cute::min(threadIdx.x % 32, blockDim.x / 32 - 1);
        return __reduce_max_sync(0xffffffffu, storage.extremes[which][warp]);
    }

    CUTE_DEVICE static int blocks_of(Flash_fwd_params const &params, PlanTile const &segment,
                                     int m_block) {
        WorkTile const work{
            .m_block = m_block, .seqlen_q = segment.seqlen_q, .seqlen_k = segment.seqlen_k};
        return Tiles::blocks(params, work).count;
    }
    CUTE_DEVICE static int of_part(int blocks, int parts) {
        return parts == 1 ? blocks : blocks / parts;  // mostly without the latency of a division
    }

    CUTE_DEVICE static void choose_part_blocks(Flash_fwd_params const &params,
                                               SharedStorage &storage) {
        Segments const segments{params};
        int all = 0, longest = 0;
        if (params.split_ctas > 0) {
            int blocks = 0;
            for (int i = threadIdx.x; i < segments.count(); i += blockDim.x) {
                PlanTile const segment = segments[i];
                int const of_tile = Splits::key_blocks(params, segment);
                blocks = sum(blocks, product(Splits::num_m_blocks(params, segment), of_tile));
                longest = cute::max(longest, of_tile);
            }
            put_extreme(storage, kMostBlocks, longest);
            scan(storage, blocks, all);
            longest = extreme(storage, kMostBlocks);
        }
        if (threadIdx.x == 0) {
            storage.part_blocks = Splits::part_blocks(params, all, longest);
        }
        __syncthreads();
    }

    // Writes the segments and returns the number of tiles. Collective over the CTA.
    CUTE_DEVICE static int count_tiles(Flash_fwd_params const &params, SharedStorage &storage,
                                       PlanTile *written) {
        Segments const segments{params};
        bool const may_split = params.num_splits > 1;
        int tiles = 0, rows = 0;              // of the segments before; rows: of the workspace
        constexpr int kNone = INT32_MIN / 2;  // two of them can be added
        int most[kExtremes] = {kNone, kNone, kNone, kNone, kNone};
        auto const see = [&](int which, int value) { most[which] = cute::max(most[which], value); };
        CUTE_NO_UNROLL
        for (int begin = 0; begin < segments.count(); begin += blockDim.x) {
            int const i = begin + static_cast<int>(threadIdx.x);
            PlanTile segment;
            int count = 0, of_parts = 0;
            if (i < segments.count()) {
                segment = segments[i];
                int const m_blocks = Splits::num_m_blocks(params, segment);
                int const last = blocks_of(params, segment, cute::max(m_blocks - 1, 0));
                int parts = 1;
                if (may_split) {
                    parts = Splits::num_parts(params, storage.part_blocks,
                                              Splits::key_blocks(params, segment));
                    if (parts > 1) of_parts = product(num_rows(params, segment.seqlen_q), parts);
                }
                count = product(m_blocks, parts);
                segment.part = parts;
                if (count > 0) {
                    int const first = blocks_of(params, segment, 0);
                    int const longest = of_part(cute::max(first, last), parts);
                    see(kMostBlocks, longest);
                    see(kLeastBlocks, -of_part(cute::min(first, last), parts));
                    see(kLeastLongest, -longest);
                    see(kMostTiles, count);
                }
                // Tiles of rows of no sequence make the least 0, which rules out Order::of_levels.
                if (i % 2 == 1 || count > 0) see(kLeastTiles, i % 2 == 1 ? -count : 0);
            }
            CUTE_UNROLL
            for (int which = 0; which < kExtremes; ++which) {
                put_extreme(storage, which, most[which]);
            }
            int all = 0;
            int const before = sum(tiles, scan(storage, count, all));
            tiles = sum(tiles, all);
            if (may_split) {
                __syncthreads();
                int const rows_before = sum(rows, scan(storage, of_parts, all));
                rows = sum(rows, all);
                if (of_parts > 0) {
                    // Where there is no room in the workspace, parts share rows.
                    segment.partial_row =
                        cute::max(cute::min(rows_before, params.partial_rows - of_parts), -1);
                }
            }
            if (i < segments.count()) {
                segment.m_block = cute::min(before, params.plan_capacity);
                written[i] = segment;
            }
            __syncthreads();
        }
        return tiles;
    }

    // Returns the order of so many tiles, by what count_tiles() found.
    CUTE_DEVICE static Order choose_order(Flash_fwd_params const &params,
                                          SharedStorage const &storage, int tiles) {
        if (params.plan_in_order != 0) {
            bool const few = 2 * params.b + 1 <= kMostRanked;
            return kTakesTurns && few && params.plan_in_order > 1 ? Order::in_turns
                                                                  : Order::of_sequences;
        }
        int const most = extreme(storage, kMostBlocks);
        if (most + extreme(storage, kLeastBlocks) <= kAlike) {
            return Order::of_segments;
        }
        bool const alike = most + extreme(storage, kLeastLongest) <= kAlike &&
                           extreme(storage, kMostTiles) + extreme(storage, kLeastTiles) == 0;
        return alike && tiles <= params.plan_capacity ? Order::of_levels : Order::sorted;
    }

    // Sorts the sequences, of `count` tiles in all, by the blocks of their first tile, which has
    // the most under a causal mask: partial_row becomes the place of a sequence's first tile.
    CUTE_DEVICE static void place_sequences(Flash_fwd_params const &params, SharedStorage &storage,
                                            PlanTile *segments, int count) {
        clear_buckets(storage);
        for (int pass = 0; pass < 2; ++pass) {
            for (int i = threadIdx.x; i < 2 * params.b + 1; i += blockDim.x) {
                int const begin = segments[i].m_block;
                int const end = i < 2 * params.b ? segments[i + 1].m_block : count;
                unsigned *const bucket =
                    storage.bucket + bucket_of(blocks_of(params, segments[i], 0));
                unsigned const at = atomicAdd(bucket, static_cast<unsigned>(end - begin));
                if (pass == 1) segments[i].partial_row = static_cast<int>(at);
            }
            if (pass == 0) place_buckets(storage);
        }
        __syncthreads();
    }

    // Returns the number of tiles of segment i. count: of all segments.
    CUTE_DEVICE static int num_tiles(Flash_fwd_params const &params, PlanTile const *segments,
                                     int i, int count) {
        return (i < 2 * params.b ? segments[i + 1].m_block : count) - segments[i].m_block;
    }

    // Ranks the segments by the blocks of their first tile: `part` becomes a segment's rank, and
    // partial_row of segment r the number of the segment with rank r. bucket[kMostRanked + r]
    // becomes the number of tiles before that segment's.
    CUTE_DEVICE static void rank_sequences(Flash_fwd_params const &params, SharedStorage &storage,
                                           PlanTile *segments, int count) {
        int const all = 2 * params.b + 1;
        for (int i = threadIdx.x; i < all; i += blockDim.x) {
            storage.bucket[i] = static_cast<unsigned>(blocks_of(params, segments[i], 0));
        }
        __syncthreads();
        for (int i = threadIdx.x; i < all; i += blockDim.x) {
            unsigned const mine = storage.bucket[i];
            int rank = 0, before = 0;
            CUTE_NO_UNROLL
            for (int j = 0; j < all; ++j) {
                unsigned const other = storage.bucket[j];
                if (other > mine || (other == mine && j < i)) {
                    ++rank;
                    before += num_tiles(params, segments, j, count);
                }
            }
            segments[i].part = rank;
            segments[rank].partial_row = i;
            storage.bucket[kMostRanked + rank] = static_cast<unsigned>(before);
        }
        __syncthreads();
    }

    // Returns the place in the plan of tile `within` of the segment with rank `rank`.
    CUTE_DEVICE static int place_in_turns(Flash_fwd_params const &params,
                                          SharedStorage const &storage, PlanTile const *segments,
                                          int count, int rank, int within) {
        int const begin = rank / params.plan_in_order * params.plan_in_order;
        int const end = cute::min(begin + params.plan_in_order, 2 * params.b + 1);
        int place = static_cast<int>(storage.bucket[kMostRanked + begin]);
        CUTE_NO_UNROLL
        for (int r = begin; r < end; ++r) {
            int const tiles = num_tiles(params, segments, segments[r].partial_row, count);
            place += cute::min(tiles, within + (r < rank ? 1 : 0));
        }
        return place;
    }

    // Returns tile `index` of `tiles` in the order of the segments. place: set to its place in the
    // plan, unless the order is sorted.
    CUTE_DEVICE static PlanTile find_tile(Flash_fwd_params const &params,
                                          SharedStorage const &storage, PlanTile const *segments,
                                          Order order, int tiles, int index, int &place) {
        int low = 0, high = 2 * params.b + 1;  // tile `index` is in segments [low, high)
        CUTE_NO_UNROLL
        while (high - low > 1) {
            int const middle = (low + high) / 2;
            (segments[middle].m_block <= index ? low : high) = middle;
        }
        PlanTile tile = segments[low];
        int const within = index - tile.m_block;
        // Unsigned, as these overflow, unused, where the order is not of_levels.
        unsigned const level = within * static_cast<unsigned>(params.b);
        place = static_cast<int>((Tiles::kOfKeys ? level : tiles - level - params.b) + low / 2);
        if (order == Order::of_segments) place = index;
        if (Tiles::kOfKeys && params.plan_in_order != 0) {
            place = tile.partial_row + within;
            if constexpr (kTakesTurns) {
                if (order == Order::in_turns) {
                    int const count = cute::min(tiles, params.plan_capacity);
                    place = place_in_turns(params, storage, segments, count, tile.part, within);
                    tile.part = 1;
                }
            }
            tile.partial_row = -1;
        }
        int const parts = tile.part;
        tile.m_block = within;
        if (parts > 1) {
            int const part = within % parts;
            tile.m_block = within / parts;
            tile.part += PlanTile::kParts * part;
            if (tile.partial_row >= 0) tile.partial_row += part * num_rows(params, tile.seqlen_q);
        }
        return tile;
    }

    // Lists, for the combine kernel, the query positions whose first row is in a split tile.
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

    CUTE_DEVICE static void clear_buckets(SharedStorage &storage) {
        for (int i = threadIdx.x; i < kBuckets * kCopies; i += blockDim.x) {
            storage.bucket[i] = 0;
        }
        __syncthreads();
    }
    // Replaces the number of tiles in each bucket by the place of its first one. Collective over
    // the CTA.
    CUTE_DEVICE static void place_buckets(SharedStorage &storage) {
        bool const owns = threadIdx.x < kBuckets;
        unsigned *const copies = storage.bucket + (owns ? threadIdx.x * kCopies : 0);
        __syncthreads();
        unsigned size = 0;
        for (int i = 0; owns && i < kCopies; ++i) {
            size += copies[i];
        }
        int all = 0;
        unsigned next = scan(storage, static_cast<int>(size), all);
        for (int i = 0; owns && i < kCopies; ++i) {
            unsigned const of_copy = copies[i];
            copies[i] = next;
            next += of_copy;
        }
        __syncthreads();
    }

    CUTE_DEVICE static void run(Flash_fwd_params const &params, SharedStorage &storage) {
        auto &plan = *static_cast<WorkPlan *>(params.plan_ptr);
        PlanTile *const segments =
            2 * params.b + 1 <= kMaxSegments ? storage.segments : plan.tiles + params.plan_capacity;
        auto *const positions = const_cast<SplitPosition *>(plan.positions(params));
        int const thread = threadIdx.x;
        bool const may_split = params.num_splits > 1;
        if (may_split) {
            if (thread == 0) storage.split_positions = 0;
            choose_part_blocks(params, storage);
        }
        int const tiles = count_tiles(params, storage, segments);
        int const count = cute::min(tiles, params.plan_capacity);
        Order const order = choose_order(params, storage, tiles);
        bool const sorts = order == Order::sorted;
        if (sorts) clear_buckets(storage);
        if constexpr (Tiles::kOfKeys) {
            if (order == Order::of_sequences) place_sequences(params, storage, segments, count);
        }
        if constexpr (kTakesTurns) {
            if (order == Order::in_turns) rank_sequences(params, storage, segments, count);
        }
        // A sorted order takes two passes: the first counts the tiles in each bucket, the second
        // places them. One copy of the code, which is rarely in the instruction cache.
        CUTE_NO_UNROLL
        for (int pass = sorts ? 0 : 1; pass < 2; ++pass) {
            bool const places = pass == 1;
            CUTE_NO_UNROLL
            for (int i = thread; i < count; i += blockDim.x) {
                int place = 0;
                PlanTile const tile = find_tile(params, storage, segments, order, tiles, i, place);
                if (sorts) {
                    int const parts = tile.part % PlanTile::kParts;
                    int blocks = of_part(blocks_of(params, tile, tile.m_block), parts);
                    // So many more blocks are another bucket: a sequence's first tile comes before
                    // the others, which may wait for it (first_sums_sm90.h).
                    if (Tiles::kOfKeys && tile.m_block == 0) blocks += blocks / 8 + 1;
                    place = static_cast<int>(atomicAdd(&storage.bucket[bucket_of(blocks)], 1u));
                }
                if (places) {
                    plan.tiles[place] = tile;
                    if (may_split) list_positions(params, storage, positions, tile);
                }
            }
            if (!places) place_buckets(storage);
        }
        if (may_split) __syncthreads();
        if (thread == 0) {
            unsigned const listed = may_split ? storage.split_positions : 0;
            plan.count = count;
            plan.split_positions = static_cast<int>(cute::min(listed, unsigned(params.total_q)));
        }
    }
};

// CTA 0 plans, if there is a plan to be made; the others append. kAppends: false in calls that
// append nothing, whose kernel has 0.6 of the code: a kernel runs once, and fetches its code from
// memory. Launch bounds of one CTA an SM: for two ptxas took half of the registers, and spilled.
template <class Tiles, bool kAppends>
__global__ void __launch_bounds__(Planner<Tiles>::kMaxThreads, 1)
    flash_plan_kernel(__grid_constant__ Flash_fwd_params const params) {
    using Plan = Planner<Tiles>;
    // An attention kernel that is launched as dependent waits for this kernel's end itself.
    let_next_kernel_start();
    if constexpr (kAppends) {
        unsigned const planners = params.plan_ptr != nullptr ? 1 : 0;
        if (blockIdx.x >= planners) {
            Append<Tiles::kDtype>::run(params, blockIdx.x - planners, gridDim.x - planners);
            return;
        }
    }
    Plan::run(params, dynamic_smem<typename Plan::SharedStorage>());
}

// Enqueues the kernel that writes the plan, if plan_ptr is not null, and appends to a cache. A plan
// holds while lengths and shapes stay the same; each layer of a model appends tokens of its own.
template <class Tiles, bool kAppends>
cudaError_t enqueue_plan(Flash_fwd_params const &params, void *stream) {
    using Plan = Planner<Tiles>;
    unsigned const planners = params.plan_ptr != nullptr ? 1 : 0;
    // CTAs of few threads start faster, and their barriers take less time: a CTA that plans has one
    // thread for each tile. Where others append beside it, all have kMaxThreads.
    int const wanted = std::max(params.plan_capacity, 2 * params.b + 1);
    int const threads = planners == 0 ? Plan::kAppendThreads
                        : kAppends || wanted > Plan::kMaxThreads
                            ? Plan::kMaxThreads
                            : std::max((wanted + 31) / 32 * 32, Plan::kMinThreads);
    unsigned ctas = planners;
    if constexpr (kAppends) ctas += Append<Tiles::kDtype>::num_ctas(params, threads);
    if (ctas == 0) {
        return cudaSuccess;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(ctas);
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = planners * sizeof(typename Plan::SharedStorage);
    config.stream = static_cast<cudaStream_t>(stream);
    return cudaLaunchKernelEx(&config, &flash_plan_kernel<Tiles, kAppends>, params);
}

// Flash_kernel::plan. Enqueues no plan where the attention kernel's CTAs plan for themselves.
template <FwdConfig C>
int32_t launch_fwd_plan(Flash_fwd_params const *params, void *stream) {
    using Tiles = PlanFwd<C>;
    Flash_fwd_params launched = *params;
    if (CtaPlan<C>::suits(*params)) launched.plan_ptr = nullptr;
    return Append<C.dtype>::num_rows(*params) > 0 ? enqueue_plan<Tiles, true>(launched, stream)
                                                  : enqueue_plan<Tiles, false>(launched, stream);
}

}  // namespace flash
