// The torch binding: this file and the headers beside it are all of the project's C++ that knows
// torch, and only through torch's stable ABI, so that one binary serves every torch from 2.10 on,
// with and without CUDA.
//
// C++ asks, Python decides, C++ remembers: the kernel for a problem is chosen (and built, if need
// be) by a resolver that Python registers; the answer is kept in a table, so the hot path never
// enters Python. The checks here are the safety net that keeps memory safe for whoever calls the
// operator directly; the precise, typed errors are raised by flash_attn_interface.py.
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

#include "flash_api_bwd.h"
#include "flash_api_fwd.h"
#include "flash_api_plan.h"
#include "flash_api_sdpa.h"
#include "flash_api_tensors.h"
#include "flash_api_varlen.h"
#include "kernel_table.h"

namespace flash {
namespace {

std::tuple<Tensor, Tensor> fwd(const Tensor &q, const Tensor &k, const Tensor &v,
                               double softmax_scale, bool causal) {
    return named("fwd", [&] { return forward(q, k, v, softmax_scale, {.causal = causal}); });
}

std::tuple<Tensor, Tensor> attend(const Tensor &q, const Tensor &k, const Tensor &v,
                                  double softmax_scale, bool causal, int64_t window_left,
                                  int64_t window_right, MaybeTensor sinks, double softcap,
                                  MaybeTensor alibi_slopes, bool, MaybeTensor rng_state,
                                  double dropout_p) {
    Options options{causal, window_left, window_right, sinks, softcap, alibi_slopes};
    options.rng_state = std::move(rng_state);
    options.dropout_p = dropout_p;
    return named("fwd", [&] { return forward(q, k, v, softmax_scale, options); });
}

// The forward of packed queries, (total_q, h, d), whose keys are packed, too, or in pages.
std::tuple<Tensor, Tensor> forward_ragged(const Tensor &q, const Tensor &k, const Tensor &v,
                                          double softmax_scale, Options options,
                                          const Lengths &lengths, MaybeTensor block_table) {
    if (!block_table.has_value()) {
        options.num_splits = options.num_splits == 0 ? -1 : options.num_splits;
        return forward(q, k, v, softmax_scale, options, &lengths);
    }
    const Cache cache{.block_table = std::move(block_table)};
    return forward(q, k, v, softmax_scale, options, &lengths, &cache);
}

std::tuple<Tensor, Tensor> attend_varlen(
    const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &cu_seqlens_q,
    const Tensor &cu_seqlens_k, MaybeTensor seqused_q, MaybeTensor seqused_k, int64_t max_seqlen_q,
    int64_t max_seqlen_k, double softmax_scale, bool causal, int64_t window_left,
    int64_t window_right, MaybeTensor sinks, double softcap, MaybeTensor alibi_slopes,
    MaybeTensor rng_state, double dropout_p, MaybeTensor block_table, int64_t num_splits, bool) {
    const Lengths lengths{&cu_seqlens_q, &cu_seqlens_k, &seqused_q,
                          &seqused_k,    max_seqlen_q,  max_seqlen_k};
    Options options{causal, window_left, window_right, sinks, softcap, alibi_slopes, num_splits};
    options.rng_state = std::move(rng_state);
    options.dropout_p = dropout_p;
    return named("fwd", [&] {
        return forward_ragged(q, k, v, softmax_scale, options, lengths, std::move(block_table));
    });
}

std::tuple<Tensor, Tensor> attend_kvcache(const Tensor &q, const Tensor &k_cache,
                                          const Tensor &v_cache, MaybeTensor cache_seqlens,
                                          MaybeTensor cache_batch_idx, MaybeTensor cache_leftpad,
                                          MaybeTensor block_table, double softmax_scale,
                                          bool causal, int64_t window_left, int64_t window_right,
                                          MaybeTensor sinks, double softcap,
                                          MaybeTensor alibi_slopes, int64_t num_splits) {
    Options options{causal, window_left, window_right, sinks, softcap, alibi_slopes, num_splits};
    const Cache cache{std::move(cache_batch_idx), std::move(cache_leftpad), std::move(block_table)};
    const Lengths lengths{.seqused_k = &cache_seqlens};
    return named("attend_kvcache", [&] {
        return forward(q, k_cache, v_cache, softmax_scale, options, &lengths, &cache);
    });
}

std::tuple<Tensor, Tensor> append_attend_kvcache(
    const Tensor &q, const Tensor &k_cache, const Tensor &v_cache, const Tensor &k, const Tensor &v,
    MaybeTensor rotary_cos, MaybeTensor rotary_sin, bool rotary_interleaved,
    const Tensor &cache_seqlens, MaybeTensor cache_batch_idx, MaybeTensor cache_leftpad,
    MaybeTensor block_table, double softmax_scale, bool causal, int64_t window_left,
    int64_t window_right, MaybeTensor sinks, double softcap, MaybeTensor alibi_slopes,
    int64_t num_splits) {
    Options options{causal, window_left, window_right, sinks, softcap, alibi_slopes, num_splits};
    const Cache cache{.cache_batch_idx = std::move(cache_batch_idx),
                      .cache_leftpad = std::move(cache_leftpad),
                      .block_table = std::move(block_table),
                      .k = k,
                      .v = v,
                      .rotary_cos = std::move(rotary_cos),
                      .rotary_sin = std::move(rotary_sin),
                      .rotary_interleaved = rotary_interleaved};
    const MaybeTensor before = cache_seqlens;
    const Lengths lengths{.seqused_k = &before};
    return named("append_attend_kvcache", [&] {
        return forward(q, k_cache, v_cache, softmax_scale, options, &lengths, &cache);
    });
}

// Returns f(), or `refused` where the kernels cannot take the arguments.
template <typename Function, typename Result>
Result unless_refused(const char *op, Result refused, Function f) {
    return named(op, [&]() -> Result {
        try {
            return f();
        } catch (const KernelFailure &) {
            throw;
        } catch (const Failure &) {
            return std::move(refused);
        }
    });
}

std::tuple<Tensor, Tensor> attend_kvcache_no_grad(
    const Tensor &q, const Tensor &k_cache, const Tensor &v_cache, MaybeTensor cache_seqlens,
    std::optional<int64_t> in_cache, MaybeTensor block_table, std::optional<double> softmax_scale,
    bool causal, bool returns_lse, MaybeTensor k, MaybeTensor v, MaybeTensor rotary_cos,
    MaybeTensor rotary_sin, bool rotary_interleaved, int64_t num_splits, int64_t window_left,
    int64_t window_right, double softcap, MaybeTensor sinks, MaybeTensor alibi_slopes,
    MaybeTensor cache_batch_idx, MaybeTensor cache_leftpad) {
    Options options{causal, window_left, window_right, sinks, softcap, alibi_slopes, num_splits};
    options.returns_lse = returns_lse;
    options.copies = false;
    const Cache cache{.cache_batch_idx = std::move(cache_batch_idx),
                      .cache_leftpad = std::move(cache_leftpad),
                      .block_table = std::move(block_table),
                      .k = std::move(k),
                      .v = std::move(v),
                      .rotary_cos = std::move(rotary_cos),
                      .rotary_sin = std::move(rotary_sin),
                      .rotary_interleaved = rotary_interleaved};
    const Lengths lengths{.seqused_k = &cache_seqlens, .in_cache = in_cache};
    return unless_refused("attend_kvcache", std::tuple{Tensor(), Tensor()}, [&] {
        const double scale = softmax_scale.has_value() ? *softmax_scale : default_scale(q);
        return forward(q, k_cache, v_cache, scale, options, &lengths, &cache);
    });
}

std::tuple<Tensor, Tensor> attend_varlen_no_grad(
    const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &cu_seqlens_q,
    MaybeTensor cu_seqlens_k, MaybeTensor seqused_k, MaybeTensor block_table, int64_t max_seqlen_q,
    int64_t max_seqlen_k, std::optional<double> softmax_scale, bool causal, bool returns_lse,
    int64_t num_splits, int64_t window_left, int64_t window_right, double softcap,
    MaybeTensor sinks, MaybeTensor alibi_slopes, MaybeTensor seqused_q) {
    Options options{causal, window_left, window_right, sinks, softcap, alibi_slopes, num_splits};
    options.returns_lse = returns_lse;
    options.copies = false;
    return unless_refused("attend_varlen", std::tuple{Tensor(), Tensor()}, [&] {
        if (!cu_seqlens_k.has_value() && !(seqused_k.has_value() && block_table.has_value())) {
            fail("expected cu_seqlens_k, or seqused_k of keys in pages");
        }
        // Stands in for cu_seqlens_k, which is not read where there is seqused_k.
        const Tensor &starts_k = cu_seqlens_k.has_value() ? *cu_seqlens_k : cu_seqlens_q;
        const Lengths lengths{&cu_seqlens_q, &starts_k,    &seqused_q,
                              &seqused_k,    max_seqlen_q, max_seqlen_k};
        const double scale = softmax_scale.has_value() ? *softmax_scale : default_scale(q);
        return forward_ragged(q, k, v, scale, options, lengths, std::move(block_table));
    });
}

std::tuple<Tensor, int64_t> plan_kvcache(
    const Tensor &q, const Tensor &k_cache, const Tensor &v_cache, MaybeTensor cache_seqlens,
    MaybeTensor cache_batch_idx, MaybeTensor cache_leftpad, MaybeTensor block_table,
    double softmax_scale, bool causal, int64_t window_left, int64_t window_right, MaybeTensor sinks,
    double softcap, MaybeTensor alibi_slopes, int64_t num_splits, MaybeTensor k, MaybeTensor v,
    MaybeTensor rotary_cos, MaybeTensor rotary_sin, bool rotary_interleaved) {
    Options options{causal, window_left, window_right, sinks, softcap, alibi_slopes, num_splits};
    options.returns_lse = options.copies = false;
    const Cache cache{.cache_batch_idx = std::move(cache_batch_idx),
                      .cache_leftpad = std::move(cache_leftpad),
                      .block_table = std::move(block_table),
                      .k = std::move(k),
                      .v = std::move(v),
                      .rotary_cos = std::move(rotary_cos),
                      .rotary_sin = std::move(rotary_sin),
                      .rotary_interleaved = rotary_interleaved};
    const Lengths lengths{.seqused_k = &cache_seqlens};
    const auto plan = [&]() -> std::tuple<Tensor, int64_t> {
        Planned planned;
        Tensor out = std::get<0>(
            forward(q, k_cache, v_cache, softmax_scale, options, &lengths, &cache, &planned));
        return {std::move(out),
                planned.kernel != nullptr ? plan_table().add(std::move(planned)) : 0};
    };
    return unless_refused("attend_kvcache", std::tuple{Tensor(), int64_t(0)}, plan);
}

Tensor run_plan(const Tensor &q, const Tensor &k_cache, const Tensor &v_cache, int64_t plan,
                bool renews) {
    return unless_refused("attend_kvcache", Tensor(), [&] {
        return run_planned(*plan_table().find(plan), q, k_cache, v_cache, {}, renews);
    });
}

Tensor append_run_plan(const Tensor &q, const Tensor &k_cache, const Tensor &v_cache,
                       const Tensor &k, const Tensor &v, int64_t plan, bool renews) {
    return unless_refused("attend_kvcache", Tensor(), [&] {
        const Cache appended{.k = k, .v = v};
        return run_planned(*plan_table().find(plan), q, k_cache, v_cache, appended, renews);
    });
}

Tensor read_kvcache_no_grad(const Tensor &q, const Tensor &k_cache, const Tensor &v_cache,
                            MaybeTensor cache_seqlens, std::optional<int64_t> in_cache,
                            MaybeTensor block_table, std::optional<double> softmax_scale,
                            bool causal) {
    return std::get<0>(attend_kvcache_no_grad(
        q, k_cache, v_cache, std::move(cache_seqlens), in_cache, std::move(block_table),
        softmax_scale, causal, false, {}, {}, {}, {}, true, 0, -1, -1, 0, {}, {}, {}, {}));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bwd(
    const Tensor &dout, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &out,
    const Tensor &softmax_lse, MaybeTensor dlse, double softmax_scale, bool causal,
    int64_t window_left, int64_t window_right, MaybeTensor sinks, int64_t wanted,
    MaybeTensor rng_state, double dropout_p, double softcap, MaybeTensor alibi_slopes) {
    Options options{causal, window_left, window_right, sinks, softcap, alibi_slopes};
    options.rng_state = std::move(rng_state);
    options.dropout_p = dropout_p;
    return named("bwd", [&] {
        return backward({dout, q, k, v, out, softmax_lse, dlse}, softmax_scale, options, wanted);
    });
}

Gradients bwd_varlen(const Tensor &dout, const Tensor &q, const Tensor &k, const Tensor &v,
                     const Tensor &out, const Tensor &softmax_lse, MaybeTensor dlse,
                     const Tensor &cu_seqlens_q, const Tensor &cu_seqlens_k, MaybeTensor seqused_q,
                     MaybeTensor seqused_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
                     double softmax_scale, bool causal, int64_t window_left, int64_t window_right,
                     MaybeTensor sinks, int64_t wanted, MaybeTensor rng_state, double dropout_p,
                     double softcap, MaybeTensor alibi_slopes) {
    const Lengths lengths{&cu_seqlens_q, &cu_seqlens_k, &seqused_q,
                          &seqused_k,    max_seqlen_q,  max_seqlen_k};
    Options options{causal, window_left, window_right, sinks, softcap, alibi_slopes};
    options.rng_state = std::move(rng_state);
    options.dropout_p = dropout_p;
    return named("bwd_varlen", [&] {
        return backward({dout, q, k, v, out, softmax_lse, dlse}, softmax_scale, options, wanted,
                        &lengths);
    });
}

}  // namespace
}  // namespace flash

// Called by flashcute/ops.py. A new resolver is asked anew for every problem. Null, passed when the
// interpreter ends, keeps the known choices, which need no Python.
extern "C" __attribute__((visibility("default"))) void flashcute_set_resolver(
    flash::Resolver resolver) {
    flash::kernel_table().set_resolver(resolver);
}

// The next three are called by flashcute/integrations/sdpa.py. Returns what flashcute_unregister()
// takes, or null.
extern "C" __attribute__((visibility("default"))) void *flashcute_register_sdpa(
    const char *dispatch_key, flash::AsksTorch is_deterministic) {
    return flash::register_sdpa(dispatch_key, is_deterministic);
}

// Undoes flashcute_register_sdpa(): the kernels that were there before are in their place again.
extern "C" __attribute__((visibility("default"))) void flashcute_unregister(void *library) {
    aoti_torch_delete_library_object(static_cast<TorchLibraryHandle>(library));
}

// Called by the sdpa_fallback or sdpa_backward_fallback that this thread is in, to say why it
// fails.
extern "C" __attribute__((visibility("default"))) void flashcute_explain(const char *text) {
    flash::sdpa_failure() = text;
}

// Called by flashcute/kvcache_plan.py.
extern "C" __attribute__((visibility("default"))) void flashcute_remove_plan(int64_t plan) {
    flash::plan_table().remove(plan);
}

// torch's macro pastes its first argument; this one expands it first.
#define FLASHCUTE_LIBRARY(ns, m) STABLE_TORCH_LIBRARY(ns, m)

// fwd, attend, attend_varlen   traced and differentiable: Python gives them an autograd kernel, by
//                              which bwd or bwd_varlen is called
// bwd, bwd_varlen              gradients. `wanted`: bits 0 to 3 say which, in the order of the
//                              results, bit 4 that they repeat bit for bit; those that are not
//                              wanted have shape (0)
// fwd_no_grad                  fwd, for a caller that knows that no gradient is wanted
// read_kvcache_no_grad, attend_kvcache_no_grad, attend_varlen_no_grad
//                              eager, for arguments that nobody has checked: return None, and write
//                              nothing, where the kernels cannot take them. The first one lacks
//                              what most calls do not need, which torch takes a microsecond to pass
// plan_kvcache, run_plan, append_run_plan
//                              a call over a cache, repeated by number on other tensors
// attend_kvcache and append_attend_kvcache are defined by flashcute/ops_kvcache.py. A window's side
// of -1 is unlimited, `in_cache` is cache_seqlens as an int, `deterministic` is of the gradients.
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
        "float dropout_p=0., Tensor? block_table=None, int num_splits=0, "
        "bool deterministic=False) -> (Tensor out, Tensor softmax_lse)");
    // As aten::_scaled_dot_product_flash_attention, without the results of a ragged batch and the
    // lengths: torch_call_dispatcher() takes a list of results in reverse order, and so takes
    // results of different types for each other.
    m.def(
        "sdpa_fallback(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
        "bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> "
        "(Tensor output, Tensor logsumexp, Tensor rng_state, Tensor unused, "
        "Tensor debug_attn_mask)");
    // As aten::_scaled_dot_product_flash_attention_backward.
    m.def(
        "sdpa_backward_fallback(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
        "Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, "
        "SymInt max_k, float dropout_p, bool is_causal, Tensor philox_seed, "
        "Tensor philox_offset, *, float? scale=None) -> "
        "(Tensor grad_query, Tensor grad_key, Tensor grad_value)");
    m.def(
        "plan_kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? cache_seqlens, "
        "Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? block_table, "
        "float softmax_scale, bool causal, int window_left, int window_right, Tensor? sinks, "
        "float softcap, Tensor? alibi_slopes, int num_splits, Tensor? k, Tensor? v, "
        "Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved) -> "
        "(Tensor out, int plan)");
    m.def(
        "run_plan(Tensor q, Tensor k_cache, Tensor v_cache, int plan, bool renews=False) -> "
        "Tensor");
    m.def(
        "append_run_plan(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, "
        "int plan, bool renews=False) -> Tensor");
    m.def(
        "read_kvcache_no_grad(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cache_seqlens, "
        "int? in_cache, Tensor? block_table, float? softmax_scale, bool causal) -> Tensor");
    m.def(
        "attend_kvcache_no_grad(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, "
        "Tensor? cache_seqlens, int? in_cache, Tensor? block_table, float? softmax_scale, "
        "bool causal, bool returns_lse, Tensor? k=None, Tensor? v=None, Tensor? rotary_cos=None, "
        "Tensor? rotary_sin=None, bool rotary_interleaved=True, int num_splits=0, "
        "int window_left=-1, int window_right=-1, float softcap=0., Tensor? sinks=None, "
        "Tensor? alibi_slopes=None, Tensor? cache_batch_idx=None, Tensor? cache_leftpad=None) -> "
        "(Tensor out, Tensor softmax_lse)");
    m.def(
        "attend_varlen_no_grad(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, "
        "Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? block_table, int max_seqlen_q, "
        "int max_seqlen_k, float? softmax_scale, bool causal, bool returns_lse, "
        "int num_splits=0, int window_left=-1, int window_right=-1, float softcap=0., "
        "Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? seqused_q=None) -> "
        "(Tensor out, Tensor softmax_lse)");
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
    m.impl("attend_kvcache", TORCH_BOX(&flash::attend_kvcache));
    m.impl("append_attend_kvcache", TORCH_BOX(&flash::append_attend_kvcache));
    m.impl("plan_kvcache", TORCH_BOX(&flash::plan_kvcache));
    m.impl("run_plan", TORCH_BOX(&flash::run_plan));
    m.impl("append_run_plan", TORCH_BOX(&flash::append_run_plan));
    m.impl("read_kvcache_no_grad", TORCH_BOX(&flash::read_kvcache_no_grad));
    m.impl("attend_kvcache_no_grad", TORCH_BOX(&flash::attend_kvcache_no_grad));
    m.impl("attend_varlen_no_grad", TORCH_BOX(&flash::attend_varlen_no_grad));
    m.impl("bwd", TORCH_BOX(&flash::bwd));
    m.impl("bwd_varlen", TORCH_BOX(&flash::bwd_varlen));
}
