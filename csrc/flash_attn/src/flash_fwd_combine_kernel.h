// Merges what the parts of split tiles wrote: for each query position and head a log-sum-exp and a
// row of O from each part. Always in the same order, so that results repeat.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "flash.h"
#include "persistent_launch.h"
#include "work_plan.h"
#include "work_tile.h"

namespace flash {

// A CTA merges one row at a time. Its threads form groups that hold a whole row of O; group g adds
// up parts g, g + kGroups and so on.
template <FwdConfig C>
struct Combine {
    using Element =
        std::conditional_t<C.dtype == DType::fp16, cutlass::half_t, cutlass::bfloat16_t>;
    static constexpr float kLog2e = 1.44269504088896341f;
    static constexpr int kThreads = 128;
    static constexpr int kVec = 4;
    static constexpr int kLanes = int(std::bit_ceil(unsigned(C.head_dim / kVec)));  // of a group
    static constexpr int kGroups = kThreads / kLanes;
    static constexpr int kAhead = 4;  // parts whose loads are in flight
    static constexpr int kCtas = 8;   // per SM
    static_assert(C.arch == 80 || C.arch == 90);

    struct SharedStorage {
        float4 sums[kGroups][kLanes];
    };

    // One row of the workspace and the output.
    struct Row {
        int64_t first;   // of the workspace: the first part's
        int64_t stride;  // from part to part
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

    // The largest of the parts' log-sum-exps and the sink; 0 where all are -inf.
    CUTE_DEVICE static float reference(Row const &row, float const *lse, float sink) {
        float max = sink;
        for (int i = threadIdx.x % 32; i < row.parts; i += 32) {
            max = fmaxf(max, lse[i * row.stride]);
        }
        CUTE_UNROLL
        for (int lane = 16; lane > 0; lane /= 2) {
            max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, lane));
        }
        return max == -INFINITY ? 0.f : max;
    }

    // exp(x - reference); a part that sees no key, and no sink, weigh 0.
    CUTE_DEVICE static float weight(float x, float reference) {
        return exp2f((x - reference) * kLog2e);
    }

    CUTE_DEVICE static void add(float4 &total, float weight, float4 const &x) {
        total.x += weight * x.x;
        total.y += weight * x.y;
        total.z += weight * x.z;
        total.w += weight * x.w;
    }

    CUTE_DEVICE static void merge(Flash_fwd_params const &params, SharedStorage &storage,
                                  Row const &row) {
        int const thread = threadIdx.x;
        int const lane = thread % kLanes, group = thread / kLanes;
        float const *const lse = params.lse_partial_ptr + row.first;
        float const sink = params.sinks_ptr != nullptr ? params.sinks_ptr[row.head] : -INFINITY;
        float const ref = reference(row, lse, sink);
        float sum = 0.f;
        for (int i = thread % 32; i < row.parts; i += 32) {
            sum += weight(lse[i * row.stride], ref);
        }
        CUTE_UNROLL
        for (int distance = 16; distance > 0; distance /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        }
        sum += weight(sink, ref);

        int const col = lane * kVec;
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
        if (col < params.d) {
            float const *const o = params.o_partial_ptr + row.first * params.d + col;
            for (int begin = group; begin < row.parts; begin += kAhead * kGroups) {
                float w[kAhead];
                float4 x[kAhead];
                CUTE_UNROLL
                for (int j = 0; j < kAhead; ++j) {
                    int const i = cute::min(begin + j * kGroups, row.parts - 1);
                    w[j] = lse[i * row.stride];
                    x[j] = *reinterpret_cast<float4 const *>(o + i * row.stride * params.d);
                }
                CUTE_UNROLL
                for (int j = 0; j < kAhead; ++j) {
                    // Of a part that sees no key nothing may come, as of no key.
                    if (begin + j * kGroups < row.parts && w[j] != -INFINITY) {
                        add(total, weight(w[j], ref), x[j]);
                    }
                }
            }
        }
        storage.sums[group][lane] = total;
        __syncthreads();
        if (group == 0 && col < params.d) {
            CUTE_UNROLL
            for (int g = 1; g < kGroups; ++g) {
                add(total, 1.f, storage.sums[g][lane]);
            }
            // Without a key there is a sink at most.
            float const factor = sum == 0.f ? 0.f : 1.f / sum;
            struct alignas(8) Piece {
                Element x[kVec];
            };
            Piece const piece{Element(total.x * factor), Element(total.y * factor),
                              Element(total.z * factor), Element(total.w * factor)};
            auto *const out = static_cast<Element *>(params.o_ptr) +
                              row.row_q * params.o_row_stride + row.head * params.o_head_stride;
            *reinterpret_cast<Piece *>(out + col) = piece;
            if (lane == 0) {
                params.softmax_lse_ptr[row.head * params.softmax_lse_head_stride + row.row_q] =
                    sum == 0.f ? -INFINITY : ref + __logf(sum);
            }
        }
        __syncthreads();  // the sums have been read
    }
};

template <class Traits>
__global__ void __launch_bounds__(Combine<Traits::kConfig>::kThreads)
    flash_fwd_combine_kernel(__grid_constant__ Flash_fwd_params const params) {
    using Merge = Combine<Traits::kConfig>;
    if constexpr (Traits::kConfig.arch == 90) cudaGridDependencySynchronize();
    extern __shared__ __align__(1024) char smem[];
    auto &storage = *reinterpret_cast<typename Merge::SharedStorage *>(smem);
    auto const &plan = *static_cast<WorkPlan const *>(params.plan_ptr);
    int64_t const rows = int64_t(plan.split_positions) * params.h;
    for (int64_t i = blockIdx.x; i < rows; i += gridDim.x) {
        SplitPosition const position = plan.positions(params)[i / params.h];
        Merge::merge(params, storage, Merge::row(params, position, int(i % params.h)));
    }
}

// Enqueues the merge behind the main kernel, if tiles may have been split.
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
    cudaLaunchAttribute dependent{};
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
    if (Traits::kConfig.arch == 90) {
        config.attrs = &dependent;
        config.numAttrs = 1;
    }
    return cudaLaunchKernelEx(&config, &flash_fwd_combine_kernel<Traits>, params);
}

}  // namespace flash
