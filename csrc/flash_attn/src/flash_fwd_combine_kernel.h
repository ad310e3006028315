// The combine kernel of split-KV: merges the partial results of split tiles, for each query
// position and head an LSE and a row of O from each part. The order is always the same, so that
// results repeat.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>
#include <dynamic_smem.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "dependent_launch.h"
#include "flash.h"
#include "persistent_launch.h"
#include "work_plan.h"
#include "work_tile.h"

namespace flash {

// Threads form kGroups groups, each of which can hold a whole row of O. The parts of a row are
// added up in kGroups sums, parts g, g + kGroups and so on in sum g. Where there are few rows, the
// groups of a CTA share a row and have a sum each; else each group has a row of its own and all its
// sums. The result is the same.
template <FwdConfig C>
struct Combine {
    using Element =
        std::conditional_t<C.dtype == DType::fp16, cutlass::half_t, cutlass::bfloat16_t>;
    static constexpr float kLog2e = 1.44269504088896341f;
    static constexpr int kThreads = 128;
    static constexpr int kVec = 4;
    static constexpr int kLanes = int(std::bit_ceil(unsigned(C.head_dim / kVec)));  // in a group
    static constexpr int kGroups = kThreads / kLanes;
    static constexpr int kWidth = kLanes < 32 ? kLanes : 32;  // lanes that reduce LSE
    static constexpr int kAhead = 4;                          // parts whose loads are in flight
    static constexpr int kCtas = 8;                           // per SM
    static_assert(C.arch == 80 || C.arch == 90);

    struct SharedStorage {
        float4 sums[kGroups][kLanes];
    };

    // One row of the workspace and the output.
    struct Row {
        int64_t first;   // workspace row of the first part
        int64_t stride;  // workspace rows from part to part
        int parts;
        int head;
        int row_q;
    };
    CUTE_DEVICE static Row row(Flash_fwd_params const &params, SplitPosition const &position,
                               int head) {
        bool const packed = params.pack_shift > 0;
        int const grid_head = packed ? head / params.h_h_k_ratio : head;
        int const within = packed ? head - grid_head * params.h_h_k_ratio : 0;
        int64_t const first =
            int64_t(grid_head) * params.partial_rows + position.partial_row + within;
        return {first, position.stride, position.parts, head, position.row_q};
    }

    // Reduces the values of the lanes of a row's group, or of the warp if that is smaller.
    template <class Reduce>
    CUTE_DEVICE static float all_lanes(float x, Reduce const &reduce) {
        CUTE_UNROLL
        for (int lane = kWidth / 2; lane > 0; lane /= 2) {
            x = reduce(x, __shfl_xor_sync(0xffffffffu, x, lane));
        }
        return x;
    }

    // Returns the row's largest LSE, given the largest that this lane has found; 0 where all are
    // -inf.
    CUTE_DEVICE static float reference(float max) {
        max = all_lanes(max, [](float x, float y) { return fmaxf(x, y); });
        return max == -INFINITY ? 0.f : max;
    }
    CUTE_DEVICE static float sum(float x) {
        return all_lanes(x, [](float x, float y) { return x + y; });
    }

    // Returns exp(x - reference): 0 for a part that sees no key, and where there is no sink.
    CUTE_DEVICE static float weight(float x, float reference) {
        return exp2f((x - reference) * kLog2e);
    }

    CUTE_DEVICE static void add(float4 &total, float weight, float4 const &x) {
        total.x += weight * x.x;
        total.y += weight * x.y;
        total.z += weight * x.z;
        total.w += weight * x.w;
    }

    // kAhead parts in registers: every step-th one from part `begin` on. o: this thread's columns
    // of the first part.
    struct Parts {
        float lse[kAhead];
        float4 x[kAhead];

        CUTE_DEVICE void load(Flash_fwd_params const &params, Row const &row, float const *lse_of,
                              float const *o, int begin, int step) {
            CUTE_UNROLL
            for (int j = 0; j < kAhead; ++j) {
                int const i = begin + j * step;
                lse[j] = -INFINITY;
                if (i < row.parts) {
                    lse[j] = lse_of[i * row.stride];
                    x[j] = *reinterpret_cast<float4 const *>(o + i * row.stride * params.d);
                }
            }
        }
        // Adds the j-th of them to `total`, times its weight.
        CUTE_DEVICE void add_to(float4 &total, float reference, int j) const {
            // A part that sees no key must contribute nothing, not even 0 times its O.
            if (lse[j] != -INFINITY) add(total, weight(lse[j], reference), x[j]);
        }
    };

    // Merges the parts of a row. Called by all kThreads threads. alone: each group has a row of its
    // own; else all have the same. row.parts is 0 where a group has none.
    CUTE_DEVICE static void merge(Flash_fwd_params const &params, SharedStorage &storage,
                                  Row const &row, bool alone, int thread) {
        int const lane = thread % kLanes, group = thread / kLanes;
        int const col = lane * kVec;
        int const first = alone ? 0 : group;  // the group's first sum
        bool const holds = col < params.d;
        // Where no sum has two parts, a group that is alone loads the parts of all sums together.
        bool const few = alone && row.parts <= kGroups;
        int const step = few ? 1 : kGroups;
        float const *const lse = params.lse_partial_ptr + row.first;
        float const *const o = params.o_partial_ptr + row.first * params.d + col;
        Parts parts;
        if (holds) parts.load(params, row, lse, o, first, step);
        float const sink = params.sinks_ptr != nullptr ? params.sinks_ptr[row.head] : -INFINITY;
        float max = sink;
        for (int i = thread % kWidth; i < row.parts; i += kWidth) {
            max = fmaxf(max, lse[i * row.stride]);
        }
        float const ref = reference(max);
        float of_lane = 0.f;
        for (int i = thread % kWidth; i < row.parts; i += kWidth) {
            of_lane += weight(lse[i * row.stride], ref);
        }
        float const sum = Combine::sum(of_lane) + weight(sink, ref);

        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
        auto const add_sum = [&](float4 &to, int g) {
            for (int begin = g; begin < row.parts; begin += kAhead * kGroups) {
                if (begin != first) parts.load(params, row, lse, o, begin, step);
                CUTE_UNROLL
                for (int j = 0; j < kAhead; ++j) {
                    parts.add_to(to, ref, j);
                }
            }
        };
        if (few) {
            for (int begin = 0; holds && begin < row.parts; begin += kAhead) {
                if (begin > 0) parts.load(params, row, lse, o, begin, step);
                CUTE_UNROLL
                for (int j = 0; j < kAhead; ++j) {
                    float4 of_part = make_float4(0.f, 0.f, 0.f, 0.f);
                    parts.add_to(of_part, ref, j);
                    if (begin + j > 0) {
                        add(total, 1.f, of_part);
                    } else {
                        total = of_part;
                    }
                }
            }
        } else if (alone) {
            if (holds) add_sum(total, first);
            for (int g = 1; holds && g < cute::min(int(kGroups), row.parts); ++g) {
                float4 next = make_float4(0.f, 0.f, 0.f, 0.f);
                add_sum(next, g);
                add(total, 1.f, next);
            }
        } else {
            if (holds) add_sum(total, first);
            storage.sums[group][lane] = total;
            __syncthreads();
            for (int g = 1; g < cute::min(int(kGroups), row.parts); ++g) {
                add(total, 1.f, storage.sums[g][lane]);
            }
            __syncthreads();  // the sums have been read
        }
        if (first == 0 && holds && row.parts > 0) {
            store(params, row, lane, total, ref, sum);
        }
    }

    CUTE_DEVICE static void store(Flash_fwd_params const &params, Row const &row, int lane,
                                  float4 const &total, float ref, float sum) {
        // The sum is 0 where a row sees no key and has no sink.
        float const factor = sum == 0.f ? 0.f : 1.f / sum;
        struct alignas(8) Piece {
            Element x[kVec];
        };
        Piece const piece{Element(total.x * factor), Element(total.y * factor),
                          Element(total.z * factor), Element(total.w * factor)};
        auto *const out = static_cast<Element *>(params.o_ptr) + row.row_q * params.o_row_stride +
                          row.head * params.o_head_stride;
        *reinterpret_cast<Piece *>(out + lane * kVec) = piece;
        if (lane == 0) {
            params.softmax_lse_ptr[row.head * params.softmax_lse_head_stride + row.row_q] =
                sum == 0.f ? -INFINITY : ref + __logf(sum);
        }
    }
};

template <class Traits>
__global__ void __launch_bounds__(Combine<Traits::kConfig>::kThreads,
                                  Combine<Traits::kConfig>::kCtas)
    flash_fwd_combine_kernel(__grid_constant__ Flash_fwd_params const params) {
    using Merge = Combine<Traits::kConfig>;
    await_previous_kernel();
    auto &storage = dynamic_smem<typename Merge::SharedStorage>();
    auto const &plan = *static_cast<WorkPlan const *>(params.plan_ptr);
    int64_t const rows = int64_t(plan.split_positions) * params.h;
    bool const alone = rows > gridDim.x;
    int const of_cta = alone ? Merge::kGroups : 1;
    int const thread = threadIdx.x;
    int const mine = alone ? thread / Merge::kLanes : 0;
    for (int64_t begin = int64_t(blockIdx.x) * of_cta; begin < rows;
         begin += int64_t(gridDim.x) * of_cta) {
        typename Merge::Row row{};
        if (int64_t const i = begin + mine; i < rows) {
            SplitPosition const position = plan.positions(params)[i / params.h];
            row = Merge::row(params, position, static_cast<int>(i % params.h));
        }
        Merge::merge(params, storage, row, alone, thread);
    }
}

// Enqueues the combine kernel behind the main one, if tiles may have been split.
template <class Traits>
cudaError_t enqueue_combine(Flash_fwd_params const &params, void *stream) {
    using Merge = Combine<Traits::kConfig>;
    if (params.plan_ptr == nullptr || params.num_splits <= 1) {
        return cudaSuccess;
    }
    int64_t const rows = int64_t(params.total_q) * params.h;
    if (rows == 0) {
        return cudaSuccess;
    }
    int sms = 0;
    if (cudaError_t const error = sm_count(sms); error != cudaSuccess) {
        return error;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(rows, sms * Merge::kCtas)));
    config.blockDim = dim3(Merge::kThreads);
    config.dynamicSmemBytes = sizeof(typename Merge::SharedStorage);
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute dependent = dependent_launch();
    config.attrs = &dependent;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, &flash_fwd_combine_kernel<Traits>, params);
}

}  // namespace flash
