// The sm90 class's backward kernels: the persistent main kernel, whose warpgroup 0 is the producer,
// and the one that rounds the sums of dQ.
#pragma once

#include <arch_sm90.h>

#include "flash.h"
#include "flash_bwd_preprocess_kernel.h"
#include "mainloop_bwd_wide_sm90.h"

namespace flash {

// Parametrised by the traits type, as the forward kernel.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    flash_bwd_kernel_sm90(__grid_constant__ Flash_bwd_params const params,
                          __grid_constant__ TensorMapsBwdSm90 const maps,
                          __grid_constant__ TileQueue const queue) {
    using Mainloop =
        std::conditional_t<Traits::kWide, MainloopBwdWideSm90<Traits>, MainloopBwdSm90<Traits>>;
    extern __shared__ __align__(1024) char smem[];
    auto &storage = *reinterpret_cast<typename Traits::SharedStorage *>(smem);

    int const warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x / 128), 0);
    if (threadIdx.x == 0) {
        Mainloop::init_barriers(storage);
    }
    if constexpr (Traits::kCluster > 1) {
        __syncwarp();
        sm90::cluster_arrive();
        sm90::cluster_wait();
    } else {
        __syncthreads();
    }

    int const rank = Traits::kCluster > 1 ? static_cast<int>(sm90::cluster_rank()) : 0;
    if (warpgroup == 0) {
        sm90::registers_lower<Traits::kLoadRegisters>();
        if (threadIdx.x < 32 && sm90::elect_one()) {
            typename Mainloop::Producer producer{maps, storage, rank};
            producer.run(params, queue);
        }
    } else {
        sm90::registers_raise<Traits::kMmaRegisters>();
        typename Mainloop::Consumer consumer{storage, warpgroup - 1,
                                             static_cast<int>(threadIdx.x) - 128, rank};
        consumer.run(params);
    }
    if constexpr (Traits::kCluster > 1) {  // a CTA may reach the other's memory until its end
        __syncwarp();
        sm90::cluster_arrive();
        sm90::cluster_wait();
    }
}

// Rounds the sums of dQ, times the softmax scale. A CTA takes the block of queries of one step, in
// the order in which the main kernel's threads hold its accumulators. In a ragged batch all
// sequences count as one entry, and rows of no sequence get zeros.
template <class Traits>
struct PostprocessBwdSm90 {
    static constexpr int kThreads = Traits::kMmaThreads;
    static constexpr int kTileM = Traits::kTileM;
    static constexpr int kColumns = Traits::kDqColumns;

    static constexpr bool kVarlen = Traits::kVarlen;
    using Stats = RowStats<Traits::kConfig>;

    CUTE_HOST_DEVICE static int num_m_blocks(Flash_bwd_params const &params) {
        int const rows = kVarlen ? params.seqlen_q_rounded : params.seqlen_q;
        return (rows + kTileM - 1) / kTileM;
    }
    CUTE_HOST_DEVICE static int64_t num_ctas(Flash_bwd_params const &params) {
        return int64_t(kVarlen ? 1 : params.b) * params.h * num_m_blocks(params);
    }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kMmaThreads)
    flash_bwd_postprocess_kernel_sm90(__grid_constant__ Flash_bwd_params const params) {
    using Post = PostprocessBwdSm90<Traits>;
    using Element = typename Traits::Element;
    constexpr int kColumns = Post::kColumns;
    int const thread = threadIdx.x;
    int const warpgroup = thread / 128;
    int const m_blocks = Post::num_m_blocks(params);
    int const batch_head = blockIdx.x / m_blocks;
    int const block = blockIdx.x - batch_head * m_blocks;
    int const batch = batch_head / params.h;
    int const head = batch_head - batch * params.h;
    int64_t const first = int64_t(batch_head) * params.seqlen_q_rounded + block * Post::kTileM;
    float const *const sums = params.dq_accum_ptr + first * Traits::kHeadDim +
                              Traits::dq_begin(thread / 32) + thread % 32 * 4;
    int const columns = Traits::dq_columns(warpgroup);
    cudaGridDependencySynchronize();

    Tensor tQrDq = make_tensor<float>(Shape<_4, _1, Int<kColumns / 8>>{});  // (4, 1, N/8)
    CUTE_UNROLL
    for (int i = 0; i < kColumns / 8; ++i) {
        float4 const four = 8 * i < columns ? *reinterpret_cast<float4 const *>(sums + i * 128)
                                            : make_float4(0.f, 0.f, 0.f, 0.f);
        tQrDq(0, 0, i) = four.x * params.scale_softmax;
        tQrDq(1, 0, i) = four.y * params.scale_softmax;
        tQrDq(2, 0, i) = four.z * params.scale_softmax;
        tQrDq(3, 0, i) = four.w * params.scale_softmax;
    }
    // The second warpgroup has the second half of the rows or of the columns.
    int const first_row = block * Post::kTileM + (Traits::kDqByRows ? warpgroup * 64 : 0);
    int const first_col = Traits::kDqByRows ? 0 : warpgroup * kColumns;
    Element *const dq = head_begin<Element>(params.dq_ptr, batch, params.dq_batch_stride, head,
                                            params.dq_head_stride) +
                        first_col;
    auto const segment = Post::Stats::segment_at(params, block * Post::kTileM);
    auto const position = [&](int i) {
        return first_row - segment.stats_begin + Traits::acc_row(thread % 128, i);
    };
    if constexpr (Post::kVarlen) {
        CUTE_UNROLL
        for (int i = 0; i < size(tQrDq); ++i) {
            if (position(i % 4 / 2) >= segment.length) tQrDq(i) = 0.f;
        }
    }
    store_accumulator<kColumns>(tQrDq, thread, params.d - first_col,
                                [&](int i) -> GmemRow<Element> {
                                    int const row = segment.begin + position(i);
                                    return {dq + row * params.dq_row_stride, row < segment.end};
                                });
}

}  // namespace flash
