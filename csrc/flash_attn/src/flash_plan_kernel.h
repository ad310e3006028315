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
#include "block_info.h"
#include "flash.h"
#include "work_plan.h"
#include "work_tile.h"

namespace flash {

// Segments of the rows of q, or of k and v: sequence i is segment 2 i + 1, and rows of no sequence
// before it, or behind the last one, are segments 2 i. Whatever cu_seqlens and seqused hold, no
// segment leaves the tensors.
template <bool kOfKeys>
struct Segments {
    Flash_fwd_params const &params;

    // The rows of q, or those of k and v.
    struct Rows {
        int const *cu_seqlens, *seqused;
        int seqlen;  // of the longest sequence that counts
        int total;
    };
    CUTE_DEVICE Rows queries() const {
        return {params.cu_seqlens_q_ptr, params.seqused_q_ptr, params.seqlen_q, params.total_q};
    }
    CUTE_DEVICE Rows keys() const {
        return {params.cu_seqlens_k_ptr, params.seqused_k_ptr, INT32_MAX, params.total_k};
    }

    CUTE_DEVICE int count() const { return 2 * params.b + 1; }

    CUTE_DEVICE static int clamp(int64_t x, int low, int high) {
        return static_cast<int>(cute::min(cute::max(x, int64_t(low)), int64_t(high)));
    }

    // Where sequence i begins.
    CUTE_DEVICE static int first_row(Rows const &rows, int i) {
        int const *const starts = rows.cu_seqlens;
        return clamp(starts != nullptr ? starts[i] : int64_t(i) * rows.seqlen, 0, rows.total);
    }
    // And how many of its rows count.
    CUTE_DEVICE static void read(Rows const &rows, int i, int &begin, int &length) {
        begin = first_row(rows, i);
        int const end = first_row(rows, i + 1);
        length = clamp(end - begin, 0, rows.seqlen);
        if (rows.seqused != nullptr) {
            length = clamp(rows.seqused[i], 0, length);
        }
    }

    // Likewise, of a cache, and the entry that holds them.
    CUTE_DEVICE void read_cache(int i, PlanTile &tile) const {
        int const *const entries = params.cache_batch_idx_ptr;
        int const entry = entries != nullptr ? entries[i] : i;
        if (entry < 0 || entry >= params.b_k) {
            return;  // no keys
        }
        int const *const leftpad = params.leftpad_k_ptr;
        tile.batch = entry;
        tile.row_k = leftpad != nullptr ? clamp(leftpad[i], 0, params.seqlen_k) : 0;
        tile.seqlen_k = clamp(keys_in_cache(i), tile.row_k, params.seqlen_k) - tile.row_k;
    }

    CUTE_DEVICE int keys_in_cache(int i) const {
        if (params.seqused_k_ptr != nullptr) {
            int64_t const keys = int64_t(params.seqused_k_ptr[i]) + params.seqlen_new;
            return static_cast<int>(cute::min(keys, int64_t(params.seqlen_k)));
        }
        int const *const starts = params.cu_seqlens_k_ptr;
        if (starts == nullptr) {
            return params.seqlen_k;
        }
        return clamp(int64_t(starts[i + 1]) - starts[i], 0, params.seqlen_k);
    }

    CUTE_DEVICE PlanTile operator[](int segment) const {
        int const i = segment / 2;
        PlanTile tile{.batch = params.is_cache != 0 ? 0 : i, .partial_row = -1};
        if (segment % 2 == 1) {
            read(queries(), i, tile.row_q, tile.seqlen_q);
            if (params.is_cache != 0) {
                read_cache(i, tile);
            } else {
                read(keys(), i, tile.row_k, tile.seqlen_k);
            }
            return tile;
        }
        Rows const rows = kOfKeys ? keys() : queries();
        int begin = 0, length = 0;
        if (i > 0) read(rows, i - 1, begin, length);
        int const row = begin + length;
        int const end = i < params.b ? first_row(rows, i) : rows.total;
        (kOfKeys ? tile.row_k : tile.row_q) = row;
        (kOfKeys ? tile.seqlen_k : tile.seqlen_q) = cute::max(end - row, 0);
        if (!kOfKeys) tile.seqlen_k = -1;
        return tile;
    }
};

// What a plan is of: here the tiles of a forward kernel's queries.
template <FwdConfig C>
struct PlanFwd {
    static constexpr int kArch = C.arch;
    static constexpr DType kDtype = C.dtype;
    static constexpr int kRows = C.tile_m;
    static constexpr bool kOfKeys = false;

    CUTE_HOST_DEVICE static BlockRange blocks(Flash_fwd_params const &params,
                                              WorkTile const &tile) {
        return BlockInfo<C.mask, C.tile_m, C.tile_n>::block_range(params, tile);
    }
};

// One CTA. Decides into how many parts the tiles of each segment are split and counts them, then
// sorts them by the blocks that they visit (a counting sort in logarithmic buckets, so that the
// order among equals is free). Tiles of a backward are not split.
template <class Tiles>
struct Planner {
    using Segments = flash::Segments<Tiles::kOfKeys>;
    static constexpr int kThreads = 1024;
    static constexpr int kBuckets = 128;
    static constexpr int kCopies = 8;  // of each bucket, as atomics on one address are serialised
    static constexpr int kMaxFirst = 5120;  // within the 48 KB that any launch may have
    static_assert(kThreads == 32 * 32 && kBuckets * kCopies == kThreads);

    // Of the segments before one.
    struct Before {
        int tiles;
        int partial_rows;
    };

    struct SharedStorage {
        int64_t of_warps[kThreads / 32];
        unsigned bucket[kThreads];  // tiles in it; then where its next one goes
        int64_t tiles, partial_rows;
        int part_blocks;  // key blocks of a part at least
        unsigned split_positions;
        Before first[kMaxFirst];  // if as many suffice; else they are in global memory
    };

    CUTE_DEVICE static int num_m_blocks(Flash_fwd_params const &params, PlanTile const &segment) {
        int const rows = Tiles::kOfKeys ? segment.seqlen_k : num_rows(params, segment.seqlen_q);
        return (rows + Tiles::kRows - 1) / Tiles::kRows;
    }

    // By the exponent and three bits of the mantissa of the number of blocks, most first; from
    // 2^15.75 on all are in one.
    CUTE_DEVICE static int bucket_of(int blocks) {
        int const bits = (__float_as_int(static_cast<float>(blocks)) >> 20) - (127 << 3);
        int const bucket = blocks > 0 ? kBuckets - 2 - cute::min(bits, kBuckets - 2) : kBuckets - 1;
        return bucket * kCopies + threadIdx.x % kCopies;
    }

    struct Plus {
        CUTE_DEVICE int64_t operator()(int64_t a, int64_t b) const { return a + b; }
    };
    struct Max {
        CUTE_DEVICE int64_t operator()(int64_t a, int64_t b) const { return a > b ? a : b; }
    };

    // This thread's sum, or maximum, of all values up to its own, none of which is negative.
    template <class Op = Plus>
    CUTE_DEVICE static int64_t inclusive_scan(int64_t *of_warps, int64_t value) {
        int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int64_t const own = warp_scan<Op>(value, lane);
        if (lane == 31) {
            of_warps[warp] = own;
        }
        __syncthreads();
        int64_t const warps = warp_scan<Op>(of_warps[lane], lane);
        int64_t const before = __shfl_sync(0xffffffffu, warps, cute::max(warp - 1, 0));
        __syncthreads();
        return warp == 0 ? own : Op{}(before, own);
    }
    template <class Op>
    CUTE_DEVICE static int64_t warp_scan(int64_t value, int lane) {
        CUTE_UNROLL
        for (int distance = 1; distance < 32; distance *= 2) {
            int64_t const before = __shfl_up_sync(0xffffffffu, value, distance);
            value = Op{}(value, lane >= distance ? before : 0);
        }
        return value;
    }

    // Of the segment's last tile, which sees most keys, or about as many as the others.
    CUTE_DEVICE static int key_blocks(Flash_fwd_params const &params, PlanTile const &segment) {
        WorkTile const work{.m_block = num_m_blocks(params, segment) - 1,
                            .seqlen_q = segment.seqlen_q,
                            .seqlen_k = segment.seqlen_k};
        return work.m_block < 0 || !work.in_sequence() ? 0 : Tiles::blocks(params, work).count;
    }
    // Of each tile of the segment. All have the same number: a part may be empty.
    CUTE_DEVICE static int num_parts(Flash_fwd_params const &params, SharedStorage const &storage,
                                     PlanTile const &segment) {
        if (params.num_splits <= 1) {
            return 1;
        }
        int const blocks = key_blocks(params, segment);
        int const parts = (blocks + storage.part_blocks - 1) / storage.part_blocks;
        return cute::min(cute::max(parts, 1), params.num_splits);
    }

    // Tiles of the batch and its heads have `all` key blocks together, and the longest of them
    // `longest`. They are split as that many of the longest would be: into as few parts as keep
    // all CTAs busy for most of the time.
    CUTE_DEVICE static int balanced_part_blocks(int ctas, int64_t all, int longest) {
        float const tiles = static_cast<float>(all) / static_cast<float>(cute::max(longest, 1));
        float best = 0.f;
        int parts = 1;
        for (int waves = 1; waves <= kSplitWaves && best < 0.9f; ++waves) {
            float const slots = static_cast<float>(ctas * waves);
            int const of_tile = static_cast<int>(slots / cute::max(tiles, 1.f));
            float const busy = static_cast<float>(of_tile) * tiles / slots;
            if (busy > best) {
                best = busy;
                parts = of_tile;
            }
        }
        return (longest + parts - 1) / parts;
    }

    CUTE_DEVICE static void choose_part_blocks(Flash_fwd_params const &params,
                                               SharedStorage &storage) {
        Segments const segments{params};
        int64_t blocks = 0, longest = 0;
        if (params.num_splits > 1 && params.split_ctas > 0) {
            for (int i = threadIdx.x; i < segments.count(); i += kThreads) {
                PlanTile const segment = segments[i];
                int const of_tile = key_blocks(params, segment);
                blocks += int64_t(num_m_blocks(params, segment)) * of_tile;
                longest = cute::max(longest, int64_t(of_tile));
            }
        }
        blocks = inclusive_scan(storage.of_warps, blocks);
        longest = inclusive_scan<Max>(storage.of_warps, longest);
        if (threadIdx.x == kThreads - 1) {
            int least = cute::max(params.split_blocks, 1);
            if (params.split_ctas > 0) {
                int64_t const all = blocks * num_grid_heads(params);
                least = cute::max(
                    least, balanced_part_blocks(params.split_ctas, all, static_cast<int>(longest)));
            }
            storage.part_blocks = least;
        }
        __syncthreads();
    }

    CUTE_DEVICE static void count_tiles(Flash_fwd_params const &params, SharedStorage &storage,
                                        Before *first) {
        Segments const segments{params};
        if (threadIdx.x == 0) {
            storage.tiles = storage.partial_rows = 0;
            storage.split_positions = 0;
            first[0] = {0, 0};
        }
        __syncthreads();
        CUTE_NO_UNROLL
        for (int begin = 0; begin < segments.count(); begin += kThreads) {
            int const i = begin + static_cast<int>(threadIdx.x);
            int64_t tiles = 0, rows = 0;
            if (i < segments.count()) {
                PlanTile const segment = segments[i];
                int const parts = num_parts(params, storage, segment);
                tiles = int64_t(num_m_blocks(params, segment)) * parts;
                rows = parts > 1 ? int64_t(num_rows(params, segment.seqlen_q)) * parts : 0;
            }
            // Values that are no lengths may ask for more than there is room for.
            auto const up_to = [&](int64_t before, int64_t value, int most) {
                int64_t const sum = before + inclusive_scan(storage.of_warps, value);
                return cute::min(sum, int64_t(most));
            };
            tiles = up_to(storage.tiles, tiles, params.plan_capacity);
            rows = up_to(storage.partial_rows, rows, params.partial_rows);
            if (i < segments.count()) {
                first[i + 1] = {static_cast<int>(tiles), static_cast<int>(rows)};
            }
            __syncthreads();
            if (threadIdx.x == kThreads - 1) {
                storage.tiles = tiles;
                storage.partial_rows = rows;
            }
            __syncthreads();
        }
    }

    // Tile `index` in the order of the segments.
    CUTE_DEVICE static PlanTile find_tile(Flash_fwd_params const &params,
                                          SharedStorage const &storage, Before const *first,
                                          int index) {
        Segments const segments{params};
        int low = 0, high = segments.count();  // first[low] <= index < first[high]
        while (high - low > 1) {
            int const middle = (low + high) / 2;
            (first[middle].tiles <= index ? low : high) = middle;
        }
        PlanTile tile = segments[low];
        int const parts = num_parts(params, storage, tile);
        int const within = index - first[low].tiles;
        int const part = within % parts;
        tile.m_block = within / parts;
        tile.part = PlanTile::kParts * part + parts;
        if (parts > 1) {
            int const rows = num_rows(params, tile.seqlen_q);
            // Where there is no room, parts share it.
            int const begin =
                cute::min(first[low].partial_rows, params.partial_rows - rows * parts);
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
        Before *const first = 2 * params.b + 2 <= kMaxFirst
                                  ? storage.first
                                  : reinterpret_cast<Before *>(plan.tiles + params.plan_capacity);
        auto *const positions = const_cast<SplitPosition *>(plan.positions(params));
        int const thread = threadIdx.x;
        storage.bucket[thread] = 0;
        choose_part_blocks(params, storage);
        count_tiles(params, storage, first);
        int const count = first[2 * params.b + 1].tiles;
        PlanTile tile;  // this thread's last
        for (int i = thread; i < count; i += kThreads) {
            tile = find_tile(params, storage, first, i);
            atomicAdd(&bucket(params, storage, tile), 1u);
        }
        __syncthreads();
        int64_t const size = storage.bucket[thread];
        int64_t const end = inclusive_scan(storage.of_warps, size);
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

}  // namespace flash
