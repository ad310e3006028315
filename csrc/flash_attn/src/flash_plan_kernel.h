// Lays out the tiles of a ragged batch (varlen) on the device, as the lengths of its sequences are
// known there only. The host knows only an upper bound of the number of tiles.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

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

    CUTE_DEVICE int count() const { return 2 * params.b + 1; }

    CUTE_DEVICE static int clamp(int x, int low, int high) {
        return cute::min(cute::max(x, low), high);
    }

    // Where the rows of sequence i that count begin, and their number; of q or of k.
    CUTE_DEVICE static void read(int const *cu_seqlens, int const *seqused, int i, int total,
                                 int most, int &begin, int &length) {
        begin = clamp(cu_seqlens[i], 0, total);
        length = clamp(cu_seqlens[i + 1], begin, total) - begin;
        if (seqused != nullptr) {
            length = clamp(seqused[i], 0, length);
        }
        length = cute::min(length, most);
    }

    CUTE_DEVICE void read_queries(int i, int &begin, int &length) const {
        read(params.cu_seqlens_q_ptr, params.seqused_q_ptr, i, params.total_q, params.seqlen_q,
             begin, length);
    }
    CUTE_DEVICE void read_keys(int i, int &begin, int &length) const {
        read(params.cu_seqlens_k_ptr, params.seqused_k_ptr, i, params.total_k, INT32_MAX, begin,
             length);
    }

    CUTE_DEVICE PlanTile operator[](int segment) const {
        PlanTile tile{};
        int const i = tile.sequence = segment / 2;
        if (segment % 2 == 1) {
            read_queries(i, tile.row_q, tile.seqlen_q);
            read_keys(i, tile.row_k, tile.seqlen_k);
            return tile;
        }
        if (!kOfKeys) tile.seqlen_k = -1;
        int &row = kOfKeys ? tile.row_k : tile.row_q;
        if (i > 0) {
            int begin, length;
            kOfKeys ? read_keys(i - 1, begin, length) : read_queries(i - 1, begin, length);
            row = begin + length;
        }
        int const total = kOfKeys ? params.total_k : params.total_q;
        int const *const starts = kOfKeys ? params.cu_seqlens_k_ptr : params.cu_seqlens_q_ptr;
        int const end = i < params.b ? clamp(starts[i], 0, total) : total;
        (kOfKeys ? tile.seqlen_k : tile.seqlen_q) = cute::max(end - row, 0);
        return tile;
    }
};

// What a plan is of: here the tiles of a forward kernel's queries.
template <FwdConfig C>
struct PlanFwd {
    static constexpr int kArch = C.arch;
    static constexpr int kRows = C.tile_m;
    static constexpr bool kOfKeys = false;

    CUTE_HOST_DEVICE static BlockRange blocks(Flash_fwd_params const &params,
                                              WorkTile const &tile) {
        return BlockInfo<C.mask, C.tile_m, C.tile_n>::block_range(params, tile);
    }
};

// One CTA. Counts the segments' tiles, then sorts them by the blocks that they visit (a counting
// sort in logarithmic buckets, so that the order among equals is free).
template <class Tiles>
struct Planner {
    using SegmentsT = Segments<Tiles::kOfKeys>;
    static constexpr int kThreads = 1024;
    static constexpr int kBuckets = 128;
    static constexpr int kCopies = 8;  // of each bucket, as atomics on one address are serialised
    static constexpr int kMaxFirst = 10240;  // within the 48 KB that any launch may have
    static_assert(kThreads == 32 * 32 && kBuckets * kCopies == kThreads);

    struct SharedStorage {
        int64_t warp_sums[kThreads / 32];
        unsigned bucket[kThreads];  // tiles in it; then where its next one goes
        int64_t carry;
        int first[kMaxFirst];  // if as many suffice; else they are in global memory
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

    // This thread's sum of all values up to its own.
    CUTE_DEVICE static int64_t inclusive_scan(int64_t *warp_sums, int64_t value) {
        int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int64_t const sum = warp_scan(value, lane);
        if (lane == 31) {
            warp_sums[warp] = sum;
        }
        __syncthreads();
        int64_t const warps = warp_scan(warp_sums[lane], lane);
        int64_t const before = __shfl_sync(0xffffffffu, warps, cute::max(warp - 1, 0));
        __syncthreads();
        return warp == 0 ? sum : before + sum;
    }
    CUTE_DEVICE static int64_t warp_scan(int64_t value, int lane) {
        CUTE_UNROLL
        for (int distance = 1; distance < 32; distance *= 2) {
            int64_t const before = __shfl_up_sync(0xffffffffu, value, distance);
            value += lane >= distance ? before : 0;
        }
        return value;
    }

    // first[i]: tiles of the segments before i.
    CUTE_DEVICE static void count_tiles(Flash_fwd_params const &params, SharedStorage &storage,
                                        int *first) {
        SegmentsT const segments{params};
        if (threadIdx.x == 0) {
            storage.carry = 0;
            first[0] = 0;
        }
        __syncthreads();
        CUTE_NO_UNROLL
        for (int begin = 0; begin < segments.count(); begin += kThreads) {
            int const i = begin + static_cast<int>(threadIdx.x);
            int const tiles = i < segments.count() ? num_m_blocks(params, segments[i]) : 0;
            // Values that are no lengths may ask for more tiles than there is room for.
            int64_t const sum = storage.carry + inclusive_scan(storage.warp_sums, tiles);
            int64_t const up_to = cute::min(sum, int64_t(params.plan_capacity));
            if (i < segments.count()) {
                first[i + 1] = static_cast<int>(up_to);
            }
            __syncthreads();
            if (threadIdx.x == kThreads - 1) {
                storage.carry = up_to;
            }
            __syncthreads();
        }
    }

    // Tile `index` in the order of the segments.
    CUTE_DEVICE static PlanTile find_tile(Flash_fwd_params const &params, int const *first,
                                          int index) {
        SegmentsT const segments{params};
        int low = 0, high = segments.count();  // first[low] <= index < first[high]
        while (high - low > 1) {
            int const middle = (low + high) / 2;
            (first[middle] <= index ? low : high) = middle;
        }
        PlanTile tile = segments[low];
        tile.m_block = index - first[low];
        return tile;
    }

    // The bucket of a tile.
    CUTE_DEVICE static unsigned &bucket(Flash_fwd_params const &params, SharedStorage &storage,
                                        PlanTile const &tile) {
        WorkTile const work{
            .m_block = tile.m_block, .seqlen_q = tile.seqlen_q, .seqlen_k = tile.seqlen_k};
        return storage.bucket[bucket_of(Tiles::blocks(params, work).count)];
    }

    CUTE_DEVICE static void run(Flash_fwd_params const &params, SharedStorage &storage) {
        auto &plan = *static_cast<WorkPlan *>(params.plan_ptr);
        int *const first = 2 * params.b + 2 <= kMaxFirst
                               ? storage.first
                               : reinterpret_cast<int *>(plan.tiles + params.plan_capacity);
        int const thread = threadIdx.x;
        storage.bucket[thread] = 0;
        count_tiles(params, storage, first);
        int const count = first[2 * params.b + 1];
        for (int i = thread; i < count; i += kThreads) {
            atomicAdd(&bucket(params, storage, find_tile(params, first, i)), 1u);
        }
        __syncthreads();
        int64_t const size = storage.bucket[thread];
        int64_t const end = inclusive_scan(storage.warp_sums, size);
        storage.bucket[thread] = static_cast<unsigned>(end - size);
        __syncthreads();
        for (int i = thread; i < count; i += kThreads) {
            PlanTile const tile = find_tile(params, first, i);
            plan.tiles[atomicAdd(&bucket(params, storage, tile), 1u)] = tile;
        }
        if (thread == 0) {
            plan.count = count;
        }
    }
};

template <class Tiles>
__global__ void __launch_bounds__(Planner<Tiles>::kThreads)
    flash_plan_kernel(__grid_constant__ Flash_fwd_params const params) {
    using Plan = Planner<Tiles>;
    // An attention kernel of the sm90 class may be launched already; it waits for this one's end.
    if constexpr (Tiles::kArch == 90) cudaTriggerProgrammaticLaunchCompletion();
    extern __shared__ __align__(1024) char smem[];
    Plan::run(params, *reinterpret_cast<typename Plan::SharedStorage *>(smem));
}

// Enqueues the plan of params->plan_ptr; not needed again while lengths and shapes stay the same.
template <class Tiles>
int32_t launch_plan(Flash_fwd_params const *params, void *stream) {
    using Plan = Planner<Tiles>;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1);
    config.blockDim = dim3(Plan::kThreads);
    config.dynamicSmemBytes = sizeof(typename Plan::SharedStorage);
    config.stream = static_cast<cudaStream_t>(stream);
    return cudaLaunchKernelEx(&config, &flash_plan_kernel<Tiles>, *params);
}

}  // namespace flash
