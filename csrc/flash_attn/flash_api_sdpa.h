// Forward and backward of SDPA's FlashAttention backend, aten::_scaled_dot_product_flash_attention
// and its _backward, which call our kernels without Python: in a short call Python takes longer
// than all of PyTorch's own code. flashcute/integrations/sdpa.py registers them, and
// `sdpa_fallback` and `sdpa_backward_fallback` for the calls that they refuse.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "flash_api_bwd.h"
#include "flash_api_fwd.h"
#include "flash_api_tensors.h"

namespace flash {

// Output (b, h, seqlen_q, d), log-sum-exp (b, h, seqlen_q), two tensors that only a ragged batch
// has, two lengths, seed and offset of dropout, the debug mask.
using SdpaOutputs =
    std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, Tensor, Tensor, Tensor>;
using SdpaGradients = std::tuple<Tensor, Tensor, Tensor>;  // each laid out as its tensor

// The message of this thread's last call of Python that failed; torch reports only that it failed.
inline std::string &sdpa_failure() {
    thread_local std::string text;
    return text;
}

// A function that returns whether gradients must be deterministic, which torch's C interface does
// not tell.
using AsksTorch = int32_t (*)();
inline std::atomic<AsksTorch> &asks_deterministic() {
    static std::atomic<AsksTorch> ask = nullptr;
    return ask;
}

// Calls operator `op`, which is Python. It gets whatever the kernels do not take, and copies
// tensors that they cannot load, or hands the call to PyTorch's own kernel. `stack`: the arguments,
// and afterwards the results.
template <size_t size>
void call_python(const char *op, StableIValue (&stack)[size]) {
    if (torch_call_dispatcher(op, "", stack, TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS) {
        fail(sdpa_failure().c_str());
    }
}

// Returns compute() or, where that fails, python(), which finds a way, or raises the error that
// Python has for it.
template <typename Compute, typename Python>
auto or_python(Compute compute, Python python) {
    try {
        return compute();
    } catch (const std::exception &failure) {
        const std::string_view reason = failure.what();
        if (reason.starts_with("BuildError") || reason.starts_with("KeyboardInterrupt")) {
            named("sdpa", [&] { fail(failure.what()); });  // must not be compiled once more
        }
        return named("sdpa", python);
    }
}

// query (b, h, seqlen_q, d), key and value (b, h_k, seqlen_k, d).
inline SdpaOutputs sdpa(const Tensor &query, const Tensor &key, const Tensor &value,
                        double dropout_p, bool is_causal, bool return_debug_mask,
                        std::optional<double> scale) {
    const auto compute = [&]() -> SdpaOutputs {
        if (dropout_p != 0 || return_debug_mask) {
            fail("expected neither dropout nor a debug mask");
        }
        const Options options{.causal = is_causal, .heads_first = true};
        auto [out, lse] = forward(query, key, value, scale.value_or(default_scale(query)), options);
        const int32_t device = query.get_device_index(), uint64 = aoti_torch_dtype_uint64();
        const int64_t two[] = {2}, none[] = {0}, stride[] = {1};
        AtenTensorHandle offset = nullptr;
        check_shim(aoti_torch_empty_strided(0, nullptr, nullptr, uint64,
                                            aoti_torch_device_type_cuda(), device, &offset));
        return {std::move(out),
                std::move(lse),
                Tensor(),
                Tensor(),
                query.sizes()[2],
                key.sizes()[2],
                empty(two, stride, uint64, device),
                Tensor(offset),
                empty(none, stride, dtype_of(query), device)};
    };
    return or_python(compute, [&]() -> SdpaOutputs {
        using torch::stable::detail::from;
        using torch::stable::detail::to;
        StableIValue stack[] = {from(query),     from(key),       from(value),
                                from(dropout_p), from(is_causal), from(return_debug_mask),
                                from(scale)};
        call_python(FLASHCUTE_STRING(FLASHCUTE_NAMESPACE) "::sdpa_fallback", stack);
        return {to<Tensor>(stack[0]),
                to<Tensor>(stack[1]),
                Tensor(),
                Tensor(),
                query.sizes()[2],
                key.sizes()[2],
                to<Tensor>(stack[2]),
                to<Tensor>(stack[3]),
                to<Tensor>(stack[4])};
    });
}

// grad_out and out like query, logsumexp (b, h, seqlen_q); the others but for `scale` are what the
// forward returned.
inline SdpaGradients sdpa_backward(const Tensor &grad_out, const Tensor &query, const Tensor &key,
                                   const Tensor &value, const Tensor &out, const Tensor &logsumexp,
                                   const Tensor &cum_seq_q, const Tensor &cum_seq_k, int64_t max_q,
                                   int64_t max_k, double dropout_p, bool is_causal,
                                   const Tensor &philox_seed, const Tensor &philox_offset,
                                   std::optional<double> scale) {
    const auto compute = [&]() -> SdpaGradients {
        if (dropout_p != 0) {
            fail("expected no dropout");
        }
        const Options options{.causal = is_causal, .heads_first = true};
        const int64_t repeatable = asks_deterministic().load()() != 0 ? kDeterministic : 0;
        auto [dq, dk, dv, _] = backward({grad_out, query, key, value, out, logsumexp, std::nullopt},
                                        scale.value_or(default_scale(query)), options,
                                        kWantsDq | kWantsDk | kWantsDv | repeatable);
        return {std::move(dq), std::move(dk), std::move(dv)};
    };
    return or_python(compute, [&]() -> SdpaGradients {
        using torch::stable::detail::from;
        using torch::stable::detail::to;
        StableIValue stack[] = {
            from(grad_out),  from(query),     from(key),         from(value),         from(out),
            from(logsumexp), from(cum_seq_q), from(cum_seq_k),   from(max_q),         from(max_k),
            from(dropout_p), from(is_causal), from(philox_seed), from(philox_offset), from(scale)};
        call_python(FLASHCUTE_STRING(FLASHCUTE_NAMESPACE) "::sdpa_backward_fallback", stack);
        return {to<Tensor>(stack[0]), to<Tensor>(stack[1]), to<Tensor>(stack[2])};
    });
}

// Registers both in the dispatcher, in the place of the kernels that are there, until the library
// is deleted. Returns null where torch refuses.
inline TorchLibraryHandle register_sdpa(const char *dispatch_key, AsksTorch is_deterministic) {
    asks_deterministic() = is_deterministic;
    TorchLibraryHandle library = nullptr;
    if (aoti_torch_library_init_impl("aten", dispatch_key, __FILE__, __LINE__, &library) !=
        AOTI_TORCH_SUCCESS) {
        return nullptr;
    }
    const auto put = [&](const char *name, auto kernel) {
        return torch_library_impl(library, name, kernel, TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS;
    };
    if (!put("_scaled_dot_product_flash_attention", TORCH_BOX(&sdpa)) ||
        !put("_scaled_dot_product_flash_attention_backward", TORCH_BOX(&sdpa_backward))) {
        aoti_torch_delete_library_object(library);
        return nullptr;
    }
    return library;
}

}  // namespace flash
