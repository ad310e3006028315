// The forward of SDPA's FlashAttention backend, aten::_scaled_dot_product_flash_attention, on our
// kernels without Python between the two: what Python adds to a short call costs more than all of
// PyTorch's own. flashcute/integrations/sdpa.py registers it, and `sdpa_fallback` for the rest.
#pragma once

#include <cmath>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "flash_api_fwd.h"
#include "flash_api_tensors.h"

namespace flash {

// Output (b, h, seqlen_q, d), log-sum-exp (b, h, seqlen_q), two tensors of a ragged batch, which
// this is not, two lengths, seed and offset of dropout, the debug mask.
using SdpaOutputs =
    std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, Tensor, Tensor, Tensor>;

// Why the last call of sdpa_fallback() failed, as Python says it: torch returns no more than that
// it failed.
inline std::string &sdpa_failure() {
    thread_local std::string text;
    return text;
}

// Whatever sdpa() below does not take goes to Python, which copies tensors that the kernels cannot
// load, or hands the call to PyTorch's own kernel.
inline SdpaOutputs sdpa_fallback(const Tensor &query, const Tensor &key, const Tensor &value,
                                 double dropout_p, bool is_causal, bool return_debug_mask,
                                 std::optional<double> scale) {
    using torch::stable::detail::from;
    using torch::stable::detail::to;
    StableIValue stack[7] = {from(query),     from(key),       from(value),
                             from(dropout_p), from(is_causal), from(return_debug_mask),
                             from(scale)};
    if (torch_call_dispatcher(FLASHCUTE_STRING(FLASHCUTE_NAMESPACE) "::sdpa_fallback", "", stack,
                              TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS) {
        fail(sdpa_failure().c_str());
    }
    return {to<Tensor>(stack[0]),
            to<Tensor>(stack[1]),
            Tensor(),
            Tensor(),
            query.sizes()[2],
            key.sizes()[2],
            to<Tensor>(stack[2]),
            to<Tensor>(stack[3]),
            to<Tensor>(stack[4])};
}

// query (b, h, seqlen_q, d), key and value (b, h_k, seqlen_k, d).
inline SdpaOutputs sdpa(const Tensor &query, const Tensor &key, const Tensor &value,
                        double dropout_p, bool is_causal, bool return_debug_mask,
                        std::optional<double> scale) {
    const auto fallback = [&] {
        return named("sdpa", [&] {
            return sdpa_fallback(query, key, value, dropout_p, is_causal, return_debug_mask, scale);
        });
    };
    if (dropout_p != 0 || return_debug_mask || query.dim() != 4 || key.dim() != 4) {
        return fallback();
    }
    try {
        const Options options{.causal = is_causal, .heads_first = true};
        const auto d = static_cast<double>(query.sizes()[3]);
        auto [out, lse] =
            forward(query, key, value, scale.value_or(1 / std::sqrt(d)), options);  // b, h, s, d
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
    } catch (const std::exception &failure) {
        const std::string_view reason = failure.what();
        if (reason.starts_with("BuildError") || reason.starts_with("KeyboardInterrupt")) {
            named("sdpa", [&] { fail(failure.what()); });  // not to be compiled once more
        }
        return fallback();  // which raises the error that Python has for it, or finds a way
    }
}

// Puts sdpa() into the dispatcher, in the place of the kernel that is there, until the library is
// deleted. Null where torch refuses.
inline TorchLibraryHandle register_sdpa(const char *dispatch_key) {
    TorchLibraryHandle library = nullptr;
    if (aoti_torch_library_init_impl("aten", dispatch_key, __FILE__, __LINE__, &library) !=
        AOTI_TORCH_SUCCESS) {
        return nullptr;
    }
    if (torch_library_impl(library, "_scaled_dot_product_flash_attention", TORCH_BOX(&sdpa),
                           TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS) {
        aoti_torch_delete_library_object(library);
        return nullptr;
    }
    return library;
}

}  // namespace flash
