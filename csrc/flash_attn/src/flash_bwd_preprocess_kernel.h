// The preprocess kernels of the backward: the row statistics that its main kernels read, and the
// gradient of the sinks, which needs nothing else.
#pragma once

#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>
#include <dynamic_smem.h>

#include <cute/config.hpp>

#include "first_sums_sm90.h"
#include "flash.h"
#include "flash_plan_kernel.h"
#include "utils.h"

namespace flash {

template <BwdConfig C>
struct RowStats {
    using Element =
        std::conditional_t<C.dtype == DType::fp16, cutlass::half_t, cutlass::bfloat16_t>;
    static constexpr float kLog2e = 1.44269504088896341f;
    static constexpr int kThreads = 256;
    static constexpr int kVec = 16 / sizeof(Element);
    // Lanes that share a row, each with kVec columns; a power of two for the shuffles.
    static constexpr int kLanes = C.head_dim <= 32    ? 4
                                  : C.head_dim <= 64  ? 8
                                  : C.head_dim <= 128 ? 16
                                                      : 32;
    static constexpr int kRowsAtOnce = kThreads / kLanes;
    // Rows of a thread, whose loads are in flight together; one at d = 32.
    static constexpr int kPerThread = cute::min(2, kSemaphoreRows / kRowsAtOnce);
    static constexpr int kRows = kPerThread * kRowsAtOnce;  // of a CTA
    static constexpr int kHeadDim = C.head_dim;
    static constexpr bool kZerosDq = C.fused;
    static constexpr bool kLaunchesEarly = C.arch == 90;
    static constexpr bool kVarlen = C.varlen;
    static constexpr bool kSemaphores = C.fused;
    static_assert(kPerThread <= kLanes && kSemaphoreRows % kRows == 0 &&
                  kRowStatsMultiple % kSemaphoreRows == 0);
    static_assert(kLanes * kVec >= C.head_dim && kRowStatsMultiple % kRows == 0);

    CUTE_HOST_DEVICE static int64_t num_ctas(Flash_bwd_params const &params) {
        int const entries = kVarlen ? 1 : params.b;
        return int64_t(entries) * params.h * (params.seqlen_q_rounded / kRows);
    }

    // The counter that tiles are drawn from; it lies behind the semaphores.
    CUTE_HOST_DEVICE static uint32_t *tile_counter(Flash_bwd_params const &params) {
        return params.dq_semaphore_ptr + num_ctas(params) / (kSemaphoreRows / kRows);
    }

    // Neighbouring rows of the queries whose statistics are neighbours, too: a sequence and the
    // rows of no sequence behind it, or the rows before the first sequence.
    struct Segment {
        int sequence;     // -1: rows before the first sequence
        int stats_begin;  // first row of its statistics within those of a head
        int begin, end;   // [begin, end) of the rows of the queries
        int length;       // rows of the sequence
    };
    // The segment that row `row` of a head's statistics belongs to. Collective over a warp, whose
    // lanes pass the same row.
    CUTE_DEVICE static Segment segment_at(Flash_bwd_params const &params, int row) {
        if constexpr (!kVarlen) {
            return {0, 0, 0, params.seqlen_q, params.seqlen_q};
        }
        Segments<false> const segments{params};
        auto const queries = segments.queries();
        // A 33-ary search of the warp for the last sequence whose statistics begin at or before
        // `row`.
        int low = -1, high = params.b;
        CUTE_NO_UNROLL
        while (high - low > 1) {
            int const step = (high - low + 32) / 33;
            int const at = low + step * (static_cast<int>(threadIdx.x) % 32 + 1);
            bool before = at < high;
            if (before) before = row_stats_begin(segments.first_row(queries, at), at) <= row;
            low += step * (32 - __clz(__ballot_sync(0xffffffffu, before)));
            high = cute::min(high, low + step);
        }
        int begin = 0, length = 0;
        if (low >= 0) segments.read(queries, low, begin, length);
        int const end = high < params.b ? segments.first_row(queries, high) : params.total_q;
        return {low, row_stats_begin(begin, low), begin, end, length};
    }

    // Whether the first tile of keys that visits a block of the segment's queries stores the
    // block's sums of dQ.
    CUTE_DEVICE static bool are_stored(Flash_bwd_params const &params, Segment const &segment) {
        if (!kSemaphores || params.stores_first == 0) return false;
        int seqlen_k = params.seqlen_k, begin = 0;
        if constexpr (kVarlen) {
            if (segment.sequence < 0) return false;
            Segments<false> const segments{params};
            segments.read(segments.keys(), segment.sequence, begin, seqlen_k);
        }
        return FirstSumsSm90<C>::are_stored(params, segment.length, seqlen_k);
    }

    // Neighbouring elements of a row, kept as the vector that is loaded. nvcc unpacks an array of
    // elements right behind its load, and so waits for one load before it issues the next.
    struct Piece {
        uint4 words;

        CUTE_DEVICE cutlass::Array<float, kVec> values() const {
            using Elements = cutlass::Array<Element, kVec>;
            return cutlass::NumericArrayConverter<float, Element, kVec>::convert(
                reinterpret_cast<Elements const &>(words));
        }
    };
    static_assert(sizeof(Piece) == kVec * sizeof(Element));
    // exp(logit - LSE) from the LSE in base 2, which the exponentials of the scores also take.
    CUTE_DEVICE static float exponential(float logit, float lse_log2) {
        return exp2f(logit * kLog2e - lse_log2);
    }
};

// Writes D = rowsum(dO * O) - dLSE and LSE * log2(e) of each row. Writes zeros to the semaphores
// and the tile counter of the main kernel and, unless dq_accum_ptr is null or that kernel stores
// the first sums, to the sums of dQ. A row that sees no key has LSE = -inf and P = 0: +inf in its
// place makes exp2(S - LSE) 0 and not NaN. Rows past the end get +inf, too. In a ragged batch all
// sequences count as one batch entry here.
template <class Stats>
__global__ void __launch_bounds__(Stats::kThreads)
    flash_bwd_row_stats_kernel(__grid_constant__ Flash_bwd_params const params) {
    using Piece = typename Stats::Piece;
    int const thread = threadIdx.x;
    int const blocks = params.seqlen_q_rounded / Stats::kRows;
    int const batch_head = blockIdx.x / blocks;
    int const block = blockIdx.x - batch_head * blocks;
    int const batch = batch_head / params.h;
    int const head = batch_head - batch * params.h;
    int const lane = thread % Stats::kLanes;
    int const col = lane * Stats::kVec;

    if constexpr (Stats::kLaunchesEarly) cudaTriggerProgrammaticLaunchCompletion();
    if (Stats::kSemaphores && params.dq_semaphore_ptr != nullptr) {
        int64_t const first_row = int64_t(blockIdx.x) * Stats::kRows;  // among those of all heads
        if (thread == 0 && first_row % kSemaphoreRows == 0) {
            params.dq_semaphore_ptr[first_row / kSemaphoreRows] = 0;
            if (first_row == 0) *Stats::tile_counter(params) = 0;
        }
    }
    // All rows of a CTA are of one segment, as its statistics begin at a multiple of kRows.
    typename Stats::Segment const segment = Stats::segment_at(params, block * Stats::kRows);
    if (Stats::kZerosDq && params.dq_accum_ptr != nullptr && !Stats::are_stored(params, segment)) {
        constexpr int kPieces = Stats::kRows * Stats::kHeadDim / 4;  // of 16 bytes
        auto *const zeros =
            reinterpret_cast<float4 *>(params.dq_accum_ptr) + int64_t(blockIdx.x) * kPieces;
        CUTE_UNROLL
        for (int i = thread; i < kPieces; i += Stats::kThreads) {
            zeros[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        }
    }

    // The thread's r-th row, as a row of the queries; -1: it is of no sequence.
    auto const row_of = [&](int r) {
        int const row = block * Stats::kRows + thread / Stats::kLanes + r * Stats::kRowsAtOnce;
        int const position = row - segment.stats_begin;
        return position < segment.length ? segment.begin + position : -1;
    };
    using Element = typename Stats::Element;
    auto const *const o = head_begin<Element const>(params.o_ptr, batch, params.o_batch_stride,
                                                    head, params.o_head_stride);
    auto const *const d_o = head_begin<Element const>(params.do_ptr, batch, params.do_batch_stride,
                                                      head, params.do_head_stride);
    Piece x[Stats::kPerThread], y[Stats::kPerThread];
    CUTE_UNROLL
    for (int r = 0; r < Stats::kPerThread; ++r) {
        int64_t const row = row_of(r);
        x[r].words = y[r].words = make_uint4(0, 0, 0, 0);
        if (row >= 0 && col < params.d) {
            x[r] = *reinterpret_cast<Piece const *>(o + row * params.o_row_stride + col);
            y[r] = *reinterpret_cast<Piece const *>(d_o + row * params.do_row_stride + col);
        }
    }
    // Lane r loads the LSE of the r-th row, and stores that row's statistics.
    int const own = row_of(cute::min(lane, Stats::kPerThread - 1));
    float lse = -INFINITY, d_lse = 0.f;
    if (own >= 0) {
        lse = params.softmax_lse_ptr[batch * params.softmax_lse_batch_stride +
                                     head * params.softmax_lse_head_stride + own];
        if (params.dlse_ptr != nullptr) {
            d_lse = params.dlse_ptr[batch * params.dlse_batch_stride +
                                    head * params.dlse_head_stride + own];
        }
    }
    float sum = 0.f;  // of the lane's own row
    CUTE_UNROLL
    for (int r = 0; r < Stats::kPerThread; ++r) {
        float part = 0.f;
        auto const xs = x[r].values(), ys = y[r].values();
        CUTE_UNROLL
        for (int i = 0; i < Stats::kVec; ++i) {
            part += xs[i] * ys[i];
        }
        CUTE_UNROLL
        for (int far = Stats::kLanes / 2; far > 0; far /= 2) {
            part += __shfl_xor_sync(0xffffffffu, part, far);
        }
        if (lane == r) sum = part;
    }
    if (lane < Stats::kPerThread) {
        bool const sees = lse != -INFINITY;  // else it counts for nothing, whatever dO and dLSE are
        auto *const stats = reinterpret_cast<float2 *>(params.row_stats_ptr);
        stats[int64_t(batch_head) * params.seqlen_q_rounded + block * Stats::kRows +
              thread / Stats::kLanes + lane * Stats::kRowsAtOnce] =
            make_float2(sees ? lse * Stats::kLog2e : INFINITY, sees ? sum - d_lse : 0.f);
    }
}

// Computes the gradient of the sinks. A sink's column has no value, so its dP is 0: dsink = -sum
// over rows of exp(sink - LSE) * D. One CTA per head, which always adds in the same order.
template <class Stats>
__global__ void __launch_bounds__(Stats::kThreads)
    flash_bwd_sinks_kernel(__grid_constant__ Flash_bwd_params const params) {
    constexpr int kWarps = Stats::kThreads / 32;
    auto &sums = dynamic_smem<float[kWarps]>();
    int const thread = threadIdx.x;
    int const head = blockIdx.x;
    float const sink = params.sinks_ptr[head];
    float sum = 0.f;
    int const entries = Stats::kVarlen ? 1 : params.b;
    int const rows = Stats::kVarlen ? params.seqlen_q_rounded : params.seqlen_q;
    for (int batch = 0; batch < entries; ++batch) {
        auto const *const stats = reinterpret_cast<float2 const *>(params.row_stats_ptr) +
                                  (int64_t(batch) * params.h + head) * params.seqlen_q_rounded;
        // Unsigned, as rows may be less than kThreads below 2^31.
        for (unsigned row = thread; row < static_cast<unsigned>(rows); row += Stats::kThreads) {
            sum -= Stats::exponential(sink, stats[row].x) * stats[row].y;
        }
    }
    CUTE_UNROLL
    for (int lane = 16; lane > 0; lane /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    }
    if (thread % 32 == 0) {
        sums[thread / 32] = sum;
    }
    __syncthreads();
    if (thread == 0) {
        for (int warp = 1; warp < kWarps; ++warp) {
            sum += sums[warp];
        }
        params.dsinks_ptr[head] = sum;
    }
}

}  // namespace flash
