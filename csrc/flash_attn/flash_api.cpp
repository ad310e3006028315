// The torch binding: this file and the headers beside it are all of the project's C++ that knows
// torch, and only through torch's stable ABI, so that one binary serves every torch from 2.10 on,
// with and without CUDA.
//
// C++ asks, Python decides, C++ remembers: the kernel for a problem is chosen (and built, if need
// be) by a resolver that Python registers; the answer is kept in a table, so the hot path never
// enters Python. The checks here are the safety net that keeps memory safe for whoever calls the
// operator directly; the precise, typed errors are raised by flash_attn_interface.py.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

#include "flash.h"
#include "flash_api_bwd.h"
#include "flash_api_tensors.h"
#include "kernel_table.h"

namespace flash {
namespace {

// Both outputs are fresh: out as empty_like(q), softmax_lse contiguous float32 (b, h, seqlen_q); of
// a ragged batch out is contiguous, and softmax_lse (h, total_q).
std::tuple<Tensor, Tensor> make_outputs(const Tensor &q, const Layout &ql, int32_t dtype,
                                        int32_t device) {
    // torch never makes a contiguous stride smaller than 1, even beside a dimension of size 0.
    const int64_t rows = ql.s > 0 ? ql.s : 1;
    if (q.dim() == 3) {
        const int64_t lse_sizes[] = {ql.h, ql.s}, lse_strides[] = {rows, 1};
        const int64_t out_sizes[] = {ql.s, ql.h, ql.d}, out_strides[] = {ql.h * ql.d, ql.d, 1};
        return {empty(out_sizes, out_strides, dtype, device),
                empty(lse_sizes, lse_strides, aoti_torch_dtype_float32(), device)};
    }
    const int64_t lse_sizes[] = {ql.b, ql.h, ql.s};
    const int64_t lse_strides[] = {ql.h * rows, rows, 1};
    Tensor lse = empty(lse_sizes, lse_strides, aoti_torch_dtype_float32(), device);
    return {empty_like(q, dtype, device), std::move(lse)};
}

// The shape and what the choice for it says. total_q: of a ragged batch.
void set_problem(Flash_fwd_params &params, const Problem &problem, const Choice &choice,
                 const int64_t *total_q) {
    set_sizes(params, problem);
    params.pack_shift =
        choice.pack_heads != 0 ? std::bit_width(static_cast<uint32_t>(params.h_h_k_ratio) - 1) : 0;
    const int tile_m = static_cast<const Flash_kernel *>(choice.kernel)->tile_m;
    const int64_t rows = (total_q != nullptr ? *total_q : problem.seqlen_q) << params.pack_shift;
    const int64_t of_a_head = total_q != nullptr ? plan_capacity(rows, problem.b, tile_m)
                                                 : problem.b * ((rows + tile_m - 1) / tile_m);
    // The grid is one-dimensional, and its limit is that of a 32-bit int, as is that of a row.
    const int64_t tiles = of_a_head * (params.pack_shift > 0 ? problem.h_k : problem.h);
    if (rows > kMaxSeqlen || tiles > kMaxTiles) {
        fail("expected at most ", kMaxTiles, " tiles of ", tile_m, " query rows, got ", tiles,
             "; split the batch");
    }
    if (total_q != nullptr) {
        params.total_q = static_cast<int32_t>(*total_q);
        params.total_k = problem.seqlen_k;
        params.plan_capacity = static_cast<int32_t>(of_a_head);
    }
}

// lengths: of a ragged batch, whose q, k and v are packed to (total, heads, d).
std::tuple<Tensor, Tensor> forward(const Tensor &q, const Tensor &k, const Tensor &v,
                                   double softmax_scale, const Options &options,
                                   const Lengths *lengths = nullptr) {
    const Inputs inputs = read_inputs(q, k, v, lengths != nullptr ? 3 : 4);
    const auto &[dtype, device, ql, kl, vl] = inputs;

    Flash_fwd_params params{};
    params.q_ptr = q.const_data_ptr();
    params.k_ptr = k.const_data_ptr();
    params.v_ptr = v.const_data_ptr();
    params.sinks_ptr = read_sinks(options, ql, device);
    // A traced program does not know where its inputs start, so this is decided here, on the GPU of
    // the tensors.
    if (misaligned(params.q_ptr) || misaligned(params.k_ptr) || misaligned(params.v_ptr)) {
        const torch::stable::accelerator::DeviceGuard guard(device);
        return forward(aligned(q), aligned(k), aligned(v), softmax_scale, options, lengths);
    }
    check_vectorised(ql, params.q_ptr, "q");
    check_vectorised(kl, params.k_ptr, "k");
    check_vectorised(vl, params.v_ptr, "v");
    set_scales(params, softmax_scale, options.softcap);

    const int64_t b = lengths != nullptr ? set_lengths(params, *lengths, device) : ql.b;
    set_slopes(params, options, b, ql.h, device);
    set_dropout(params, options, device);
    const torch::stable::accelerator::DeviceGuard guard(device);
    if (ql.b == 0 || ql.s == 0) {
        return make_outputs(q, ql, dtype, device);
    }
    Problem problem = make_problem(inputs);
    set_options(problem, options, params.rng_state_ptr != nullptr, b, lengths);
    const Choice choice = kernel_table().find(asked_of(problem, inputs, lengths));
    set_problem(params, problem, choice, lengths != nullptr ? &ql.s : nullptr);

    std::tuple<Tensor, Tensor> outputs = make_outputs(q, ql, dtype, device);
    const Layout ol = read_layout(std::get<0>(outputs), "out", q.dim());
    params.o_ptr = std::get<0>(outputs).mutable_data_ptr();
    check_vectorised(ol, params.o_ptr, "out");
    params.softmax_lse_ptr = static_cast<float *>(std::get<1>(outputs).mutable_data_ptr());
    set_strides(params, ql, kl, vl, ol);
    params.softmax_lse_batch_stride = ql.h * ql.s;
    params.softmax_lse_head_stride = ql.s;

    const auto *kernel = static_cast<const Flash_kernel *>(choice.kernel);
    void *const stream = current_stream(device);
    std::optional<Tensor> plan;  // given back to the stream's memory once both are enqueued
    int32_t error = 0;
    if (lengths != nullptr) {
        const int64_t words[] = {plan_words(params.plan_capacity, b)}, strides[] = {1};
        plan = empty(words, strides, aoti_torch_dtype_int32(), device);
        params.plan_ptr = plan->mutable_data_ptr();
        error = kernel->plan(&params, stream);
    }
    if (error == 0) {
        error = kernel->launch(&params, stream);
    }
    if (error != 0) {
        fail(kernel->name, " failed to launch: ", kernel->error_string(error));
    }
    return outputs;
}

std::tuple<Tensor, Tensor> fwd(const Tensor &q, const Tensor &k, const Tensor &v,
                               double softmax_scale, bool causal) {
    return named("fwd", [&] { return forward(q, k, v, softmax_scale, {.causal = causal}); });
}

std::tuple<Tensor, Tensor> attend(const Tensor &q, const Tensor &k, const Tensor &v,
                                  double softmax_scale, bool causal, int64_t window_left,
                                  int64_t window_right, std::optional<Tensor> sinks, double softcap,
                                  std::optional<Tensor> alibi_slopes, bool,
                                  std::optional<Tensor> rng_state, double dropout_p) {
    const Options options{.causal = causal,
                          .window_left = window_left,
                          .window_right = window_right,
                          .sinks = std::move(sinks),
                          .softcap = softcap,
                          .alibi_slopes = std::move(alibi_slopes),
                          .rng_state = std::move(rng_state),
                          .dropout_p = dropout_p};
    return named("fwd", [&] { return forward(q, k, v, softmax_scale, options); });
}

std::tuple<Tensor, Tensor> attend_varlen(
    const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &cu_seqlens_q,
    const Tensor &cu_seqlens_k, std::optional<Tensor> seqused_q, std::optional<Tensor> seqused_k,
    int64_t max_seqlen_q, int64_t max_seqlen_k, double softmax_scale, bool causal,
    int64_t window_left, int64_t window_right, std::optional<Tensor> sinks, double softcap,
    std::optional<Tensor> alibi_slopes, std::optional<Tensor> rng_state, double dropout_p) {
    const Lengths lengths{cu_seqlens_q, cu_seqlens_k, seqused_q,
                          seqused_k,    max_seqlen_q, max_seqlen_k};
    const Options options{.causal = causal,
                          .window_left = window_left,
                          .window_right = window_right,
                          .sinks = std::move(sinks),
                          .softcap = softcap,
                          .alibi_slopes = std::move(alibi_slopes),
                          .rng_state = std::move(rng_state),
                          .dropout_p = dropout_p};
    return named("fwd", [&] { return forward(q, k, v, softmax_scale, options, &lengths); });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bwd(
    const Tensor &dout, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &out,
    const Tensor &softmax_lse, std::optional<Tensor> dlse, double softmax_scale, bool causal,
    int64_t window_left, int64_t window_right, std::optional<Tensor> sinks, int64_t wanted,
    std::optional<Tensor> rng_state, double dropout_p, double softcap,
    std::optional<Tensor> alibi_slopes) {
    const Options options{.causal = causal,
                          .window_left = window_left,
                          .window_right = window_right,
                          .sinks = std::move(sinks),
                          .softcap = softcap,
                          .alibi_slopes = std::move(alibi_slopes),
                          .rng_state = std::move(rng_state),
                          .dropout_p = dropout_p};
    return named("bwd", [&] {
        return backward({dout, q, k, v, out, softmax_lse, dlse}, softmax_scale, options, wanted);
    });
}

Gradients bwd_varlen(const Tensor &dout, const Tensor &q, const Tensor &k, const Tensor &v,
                     const Tensor &out, const Tensor &softmax_lse, std::optional<Tensor> dlse,
                     const Tensor &cu_seqlens_q, const Tensor &cu_seqlens_k,
                     std::optional<Tensor> seqused_q, std::optional<Tensor> seqused_k,
                     int64_t max_seqlen_q, int64_t max_seqlen_k, double softmax_scale, bool causal,
                     int64_t window_left, int64_t window_right, std::optional<Tensor> sinks,
                     int64_t wanted, std::optional<Tensor> rng_state, double dropout_p,
                     double softcap, std::optional<Tensor> alibi_slopes) {
    const Lengths lengths{cu_seqlens_q, cu_seqlens_k, seqused_q,
                          seqused_k,    max_seqlen_q, max_seqlen_k};
    const Options options{.causal = causal,
                          .window_left = window_left,
                          .window_right = window_right,
                          .sinks = std::move(sinks),
                          .softcap = softcap,
                          .alibi_slopes = std::move(alibi_slopes),
                          .rng_state = std::move(rng_state),
                          .dropout_p = dropout_p};
    return named("bwd_varlen", [&] {
        return backward({dout, q, k, v, out, softmax_lse, dlse}, softmax_scale, options, wanted,
                        &lengths);
    });
}

}  // namespace
}  // namespace flash

// Called by flashcute/ops.py. A new resolver is asked anew for every kernel. Null, passed when the
// interpreter ends, leaves those that are known: they need no Python.
extern "C" __attribute__((visibility("default"))) void flashcute_set_resolver(
    flash::Resolver resolver) {
    flash::kernel_table().set_resolver(resolver);
}

// The macros paste their first argument; the detour expands it first.
#define FLASHCUTE_LIBRARY(ns, m) STABLE_TORCH_LIBRARY(ns, m)

// Python gives all but `fwd_no_grad` an autograd kernel: for `fwd` and `attend` one that calls
// `bwd` for the gradients, for `attend_varlen` one that calls `bwd_varlen`, and for these one that
// refuses inputs that want a gradient. `fwd_no_grad` is `fwd` without it, for a caller that has
// looked already: no Python between call and kernel. `attend` takes everything optional. A window's
// side of -1 is unlimited, and `deterministic` is of its gradients, as those of `attend_varlen`, a
// ragged batch, always are. Of `bwd` and `bwd_varlen` bits 0 to 3 of `wanted` ask for the results
// in their order; one that is not wanted has shape (0). Bit 4 asks for bitwise repeatable ones.
FLASHCUTE_LIBRARY(FLASHCUTE_NAMESPACE, m) {
    m.def(
        "fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal) -> "
        "(Tensor out, Tensor softmax_lse)");
    m.def(
        "fwd_no_grad(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal) -> "
        "(Tensor out, Tensor softmax_lse)");
    m.def(
        "attend(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, int window_left, "
        "int window_right, Tensor? sinks, float softcap=0., Tensor? alibi_slopes=None, "
        "bool deterministic=False, Tensor? rng_state=None, float dropout_p=0.) -> "
        "(Tensor out, Tensor softmax_lse)");
    m.def(
        "attend_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        "Tensor? seqused_q, Tensor? seqused_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
        "float softmax_scale, bool causal, int window_left, int window_right, Tensor? sinks, "
        "float softcap=0., Tensor? alibi_slopes=None, Tensor? rng_state=None, "
        "float dropout_p=0.) -> (Tensor out, Tensor softmax_lse)");
    m.def(
        "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
        "Tensor? dlse, float softmax_scale, bool causal, int window_left, int window_right, "
        "Tensor? sinks, int wanted, Tensor? rng_state=None, float dropout_p=0., "
        "float softcap=0., Tensor? alibi_slopes=None) -> "
        "(Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
    m.def(
        "bwd_varlen(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
        "Tensor? dlse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, "
        "Tensor? seqused_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, "
        "bool causal, int window_left, int window_right, Tensor? sinks, int wanted, "
        "Tensor? rng_state=None, float dropout_p=0., float softcap=0., "
        "Tensor? alibi_slopes=None) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
}

STABLE_TORCH_LIBRARY_IMPL(FLASHCUTE_NAMESPACE, CUDA, m) {
    m.impl("fwd", TORCH_BOX(&flash::fwd));
    m.impl("fwd_no_grad", TORCH_BOX(&flash::fwd));
    m.impl("attend", TORCH_BOX(&flash::attend));
    m.impl("attend_varlen", TORCH_BOX(&flash::attend_varlen));
    m.impl("bwd", TORCH_BOX(&flash::bwd));
    m.impl("bwd_varlen", TORCH_BOX(&flash::bwd_varlen));
}
