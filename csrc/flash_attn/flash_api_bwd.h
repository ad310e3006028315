// The binding of the backward; its checks are as strict as those of the forward.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

#include "flash.h"
#include "flash_api_tensors.h"
#include "flash_api_varlen.h"
#include "kernel_table.h"

namespace flash {

// The tensors of a backward, without the sinks.
struct BwdTensors {
    const Tensor &dout, &q, &k, &v, &out, &softmax_lse;
    const MaybeTensor &dlse;  // none: zeros
};

// A float32 tensor of the shape of the log-sum-exp, (b, h, seqlen_q) or (h, total_q).
struct RowValues {
    const float *data;
    int64_t batch_stride, head_stride;
};

inline RowValues read_row_values(const Tensor &tensor, const char *name, const Inputs &inputs,
                                 bool ragged) {
    const auto &[dtype, device, q, k, v] = inputs;
    const int64_t rank = ragged ? 2 : 3;
    if (!tensor.is_cuda() || tensor.get_device_index() != device) {
        fail("expected ", name, " on cuda:", device, " as q");
    }
    if (dtype_of(tensor) != aoti_torch_dtype_float32() || tensor.dim() != rank) {
        fail("expected ", name, " of dtype float32 and rank ", rank, ", got rank ", tensor.dim());
    }
    const int64_t *size = tensor.sizes().data() + (rank - 2);
    const int64_t *stride = tensor.strides().data() + (rank - 2);
    const int64_t b = ragged ? 1 : size[-1];
    if (ragged && (size[0] != q.h || size[1] != q.s)) {
        fail("expected ", name, " of shape (", q.h, ", ", q.s, "), got (", size[0], ", ", size[1],
             ")");
    }
    if (b != q.b || size[0] != q.h || size[1] != q.s) {
        fail("expected ", name, " of shape (", q.b, ", ", q.h, ", ", q.s, "), got (", b, ", ",
             size[0], ", ", size[1], ")");
    }
    if (q.s > 1 && stride[1] != 1) {
        fail("expected ", name, ".stride(-1) == 1, got ", stride[1]);
    }
    return {.data = static_cast<const float *>(tensor.const_data_ptr()),
            .batch_stride = b > 1 ? stride[-1] : 0,
            .head_stride = size[0] > 1 ? stride[0] : 0};
}

// Reads out or dout, whose strides are free, but whose shape, dtype and device are those of q.
inline Layout read_like_q(const Tensor &tensor, const char *name, const Inputs &inputs,
                          int64_t rank, bool heads_first) {
    check_placement(tensor, name, inputs.dtype, inputs.device);
    const Layout layout = read_layout(tensor, name, rank, heads_first), &q = inputs.q;
    if (layout.b != q.b || layout.s != q.s || layout.h != q.h || layout.d != q.d) {
        fail("expected ", name, " of the shape of q");
    }
    return layout;
}

// Bits of the operators' argument `wanted`.
enum Wanted : int64_t {
    kWantsDq = 1,
    kWantsDk = 2,
    kWantsDv = 4,
    kWantsDsinks = 8,
    kDeterministic = 16,  // the gradients are bitwise repeatable
};

// The gradients, of shape (0) where they are not wanted.
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

inline void set_bwd_strides(Flash_bwd_params &params, const Layout &dout, const Layout &dq,
                            const Layout &dk, const Layout &dv) {
    params.do_batch_stride = dout.batch_stride;
    params.do_row_stride = dout.row_stride;
    params.do_head_stride = dout.head_stride;
    params.dq_batch_stride = dq.batch_stride;
    params.dq_row_stride = dq.row_stride;
    params.dq_head_stride = dq.head_stride;
    params.dk_batch_stride = dk.batch_stride;
    params.dk_row_stride = dk.row_stride;
    params.dk_head_stride = dk.head_stride;
    params.dv_batch_stride = dv.batch_stride;
    params.dv_row_stride = dv.row_stride;
    params.dv_head_stride = dv.head_stride;
}

// Allocates a gradient that the kernels write. Its layout goes to `layout`, its address to
// `pointer`.
inline Tensor make_gradient(const Tensor &like, const char *name, const Inputs &inputs,
                            bool heads_first, Layout &layout, void *&pointer) {
    Tensor gradient = empty_like(like, inputs.dtype, inputs.device);
    layout = read_layout(gradient, name, like.dim(), heads_first);
    pointer = gradient.mutable_data_ptr();
    check_vectorised(layout, pointer, name);
    return gradient;
}

// Sets the sizes of a ragged batch, beside its lengths; returns the words of the workspace for its
// plans.
inline int64_t set_totals(Flash_bwd_params &params, const Layout &q, const Layout &k, int64_t b) {
    if (q.s > kMaxBwdTokens || k.s > kMaxBwdTokens) {
        fail("expected at most ", kMaxBwdTokens, " tokens in a ragged batch with gradients, got ",
             q.s, " and ", k.s, "; split the batch");
    }
    const int64_t rows = row_stats_rows(q.s, b);
    const int64_t tiles = plan_capacity(std::max(q.s, k.s), b, kMinBwdRows) * q.h;
    if (rows > kMaxInt32 || tiles > kMaxTiles) {
        fail("expected at most ", kMaxTiles, " tiles of ", kMinBwdRows, " rows, got ", tiles,
             ", and ", kMaxInt32, " rows of statistics, got ", rows, "; split the batch");
    }
    params.total_q = static_cast<int32_t>(q.s);
    params.total_k = static_cast<int32_t>(k.s);
    params.seqlen_q_rounded = static_cast<int32_t>(rows);
    return bwd_plan_words(q.s, k.s, b);
}

// Allocates the kernels' workspaces of 32-bit words and points params to them. The first one has
// two statistics of each row, its sums of dQ, and semaphores; the second one sums of dK and dV. The
// caller holds them until all is enqueued; then they go back to the stream's memory. The sizes and
// gradients of params must be set; head_parts is set here. rows: of statistics, of all heads.
inline std::array<MaybeTensor, 2> set_workspaces(Flash_bwd_params &params,
                                                 const Flash_bwd_kernel &kernel, int64_t rows,
                                                 int32_t device) {
    const auto make = [&](int64_t size) -> MaybeTensor {
        const int64_t sizes[] = {size}, strides[] = {1};
        return empty(sizes, strides, aoti_torch_dtype_float32(), device);
    };
    const int64_t semaphores = kernel.dq_accum > 0 ? rows / kSemaphoreRows + 1 : 0;
    std::array<MaybeTensor, 2> made = {make(rows * (2 + kernel.dq_accum) + semaphores)};
    params.row_stats_ptr = static_cast<float *>(made[0]->mutable_data_ptr());
    if (kernel.dq_accum > 0) {
        params.dq_accum_ptr = params.row_stats_ptr + 2 * rows;
        params.dq_semaphore_ptr =
            reinterpret_cast<uint32_t *>(params.dq_accum_ptr + kernel.dq_accum * rows);
    }
    params.head_parts = kernel.head_parts == nullptr ? 1 : kernel.head_parts(&params);
    const int64_t partial = kernel.dkv_partial == nullptr ? 0 : kernel.dkv_partial(&params);
    if (partial > 0) {
        made[1] = make(partial);
        params.dkv_partial_ptr = static_cast<float *>(made[1]->mutable_data_ptr());
    }
    return made;
}

// Runs a backward. lengths: of a ragged batch, whose tensors are packed; null: of a dense batch.
inline Gradients backward(const BwdTensors &x, double softmax_scale, const Options &options,
                          int64_t wanted, const Lengths *lengths = nullptr) {
    const bool ragged = lengths != nullptr;
    const bool heads_first = options.heads_first;
    const int64_t rank = ragged ? 3 : 4;
    const Inputs inputs = read_inputs(x.q, x.k, x.v, rank, false, heads_first);
    const auto &[dtype, device, q, k, v] = inputs;
    const Layout out = read_like_q(x.out, "out", inputs, rank, heads_first);
    const Layout dout = read_like_q(x.dout, "dout", inputs, rank, heads_first);
    const RowValues lse = read_row_values(x.softmax_lse, "softmax_lse", inputs, ragged);

    Flash_bwd_params params{};
    params.q_ptr = x.q.const_data_ptr();
    params.k_ptr = x.k.const_data_ptr();
    params.v_ptr = x.v.const_data_ptr();
    params.o_ptr = const_cast<void *>(x.out.const_data_ptr());  // a backward only reads it
    params.do_ptr = x.dout.const_data_ptr();
    params.sinks_ptr = read_sinks(options, q, device);
    if (misaligned(params.q_ptr) || misaligned(params.k_ptr) || misaligned(params.v_ptr) ||
        misaligned(params.o_ptr) || misaligned(params.do_ptr)) {
        const torch::stable::accelerator::DeviceGuard guard(device);
        return backward({aligned(x.dout), aligned(x.q), aligned(x.k), aligned(x.v), aligned(x.out),
                         x.softmax_lse, x.dlse},
                        softmax_scale, options, wanted, lengths);
    }
    check_vectorised(q, params.q_ptr, "q");
    check_vectorised(k, params.k_ptr, "k");
    check_vectorised(v, params.v_ptr, "v");
    check_vectorised(out, params.o_ptr, "out");
    check_vectorised(dout, params.do_ptr, "dout");
    set_scales(params, softmax_scale, options.softcap);
    const Queries queries = read_queries(q, lengths);
    const int64_t b = queries.b;
    if (ragged) {
        set_lengths(params, *lengths, b, device);
    }
    set_slopes(params, options, b, q.h, device);
    set_dropout(params, options, device);
    params.softmax_lse_ptr = const_cast<float *>(lse.data);
    params.softmax_lse_batch_stride = lse.batch_stride;
    params.softmax_lse_head_stride = lse.head_stride;
    if (x.dlse.has_value()) {
        const RowValues dlse = read_row_values(*x.dlse, "dlse", inputs, ragged);
        params.dlse_ptr = dlse.data;
        params.dlse_batch_stride = dlse.batch_stride;
        params.dlse_head_stride = dlse.head_stride;
    }
    if (wanted < 0 || wanted >= 32 ||
        ((wanted & kWantsDsinks) != 0 && params.sinks_ptr == nullptr)) {
        fail("expected wanted in 0 ... 31, and with bit 3 sinks, got ", wanted);
    }

    const torch::stable::accelerator::DeviceGuard guard(device);
    MaybeTensor dq, dk, dv, dsinks;
    Layout dq_layout{}, dk_layout{}, dv_layout{};
    if ((wanted & kWantsDq) != 0) {
        dq = make_gradient(x.q, "dq", inputs, heads_first, dq_layout, params.dq_ptr);
    }
    // One kernel computes both.
    if ((wanted & (kWantsDk | kWantsDv)) != 0) {
        dk = make_gradient(x.k, "dk", inputs, heads_first, dk_layout, params.dk_ptr);
        dv = make_gradient(x.v, "dv", inputs, heads_first, dv_layout, params.dv_ptr);
    }
    if ((wanted & kWantsDsinks) != 0) {
        const int64_t sizes[] = {q.h}, strides[] = {1};
        dsinks = empty(sizes, strides, aoti_torch_dtype_float32(), device);
        params.dsinks_ptr = static_cast<float *>(dsinks->mutable_data_ptr());
    }
    if (b == 0 || q.s == 0) {  // there is no query
        for (MaybeTensor *gradient : {&dq, &dk, &dv, &dsinks}) {
            if (gradient->has_value()) {
                check_shim(aoti_torch_zero_((*gradient)->get()));
            }
        }
    } else if (wanted % kDeterministic != 0) {
        Problem problem = make_problem(inputs);
        set_options(problem, options, queries, params.rng_state_ptr != nullptr);
        const bool every = dq.has_value() && dk.has_value();
        problem.backward = every ? 1 : 2;
        const Choice choice =
            kernel_table().find(rounded(asked_of(problem, queries, k, lengths, options)));
        set_sizes(params, problem);
        set_strides(params, q, k, v, out);
        set_bwd_strides(params, dout, dq_layout, dk_layout, dv_layout);
        params.deterministic = (wanted & kDeterministic) != 0;
        params.seqlen_q_rounded = static_cast<int32_t>((q.s + kRowStatsMultiple - 1) /
                                                       kRowStatsMultiple * kRowStatsMultiple);
        MaybeTensor plan;  // given back to the stream's memory once all is enqueued
        if (ragged) {
            const int64_t words[] = {set_totals(params, q, k, b)}, stride[] = {1};
            plan = empty(words, stride, aoti_torch_dtype_int32(), device);
            params.plan_ptr = plan->mutable_data_ptr();
        }
        const auto *kernel = static_cast<const Flash_bwd_kernel *>(choice.kernel);
        const auto workspaces =
            set_workspaces(params, *kernel, q.b * q.h * params.seqlen_q_rounded, device);
        const int32_t error = kernel->launch(&params, current_stream(device));
        if (error != 0) {
            fail(kernel->name, " failed to launch: ", kernel->error_string(error));
        }
    }
    // Each result is a tensor of its own.
    const auto result = [&](MaybeTensor &gradient, int64_t bit) {
        const int64_t sizes[] = {0}, strides[] = {1};
        return (wanted & bit) != 0 ? std::move(*gradient)
                                   : empty(sizes, strides, inputs.dtype, inputs.device);
    };
    return {result(dq, kWantsDq), result(dk, kWantsDk), result(dv, kWantsDv),
            result(dsinks, kWantsDsinks)};
}

}  // namespace flash
