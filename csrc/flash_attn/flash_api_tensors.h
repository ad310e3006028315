// What forward and backward share in the binding: reading tensors, checks, shapes.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <optional>
#include <utility>

#include "flash.h"
#include "kernel_table.h"

// Exported by CUDA builds of torch only. Weak, so that the same binary loads under a CPU build.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device,
                                                                                   void **stream);

namespace flash {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline constexpr int kMaxHeadDim = 256;
// Persistent kernels count on beyond the last tile, by one for each CTA, in 32-bit arithmetic.
inline constexpr int64_t kMaxTiles = kMaxInt32 - 1023;

// Fails if a call into torch failed. torch's own macro for this has another name in 2.10 and 2.11
// than later.
inline void check_shim(AOTITorchError error) {
    if (error != AOTI_TORCH_SUCCESS) {
        fail("a call into torch failed");
    }
}

// Sizes and strides of a (b, s, h, d) tensor, or of a (total, h, d) one as of a batch of one, read
// once. Strides of dimensions of size 0 or 1 are never used to move, and torch allows any value
// there, so they count as 0.
struct Layout {
    int64_t b, s, h, d;
    int64_t batch_stride, row_stride, head_stride, last_stride;

    bool same_sizes(const Layout &x) const { return b == x.b && s == x.s && h == x.h && d == x.d; }
};

// heads_first: of a (b, heads, s, d) tensor, read as if it were (b, s, heads, d).
inline Layout read_layout(const Tensor &tensor, const char *name, int64_t rank,
                          bool heads_first = false) {
    if (tensor.dim() != rank) {
        fail("expected ", name, " of rank ", rank, ", got rank ", tensor.dim());
    }
    const int64_t *size = tensor.sizes().data() + (rank - 3);
    const int64_t *stride = tensor.strides().data() + (rank - 3);
    const bool dense = rank == 4;
    const int row = heads_first ? 1 : 0, head = 1 - row;
    return {.b = dense ? size[-1] : 1,
            .s = size[row],
            .h = size[head],
            .d = size[2],
            .batch_stride = dense && size[-1] > 1 ? stride[-1] : 0,
            .row_stride = size[row] <= 1 ? 0 : stride[row],
            .head_stride = size[head] <= 1 ? 0 : stride[head],
            .last_stride = stride[2]};
}

inline int32_t dtype_of(const Tensor &tensor) {
    int32_t dtype = 0;
    check_shim(aoti_torch_get_dtype(tensor.get(), &dtype));
    return dtype;
}

inline void check_placement(const Tensor &tensor, const char *name, int32_t dtype, int32_t device) {
    if (!tensor.is_cuda() || tensor.get_device_index() != device) {
        fail("expected ", name, " on cuda:", device, " as q");
    }
    if (dtype_of(tensor) != dtype) {
        fail("expected ", name, " of the dtype of q");
    }
}

inline bool misaligned(const void *data) { return reinterpret_cast<uintptr_t>(data) % 16 != 0; }

// Checks that kernels can load the tensor 16 bytes at a time.
inline void check_vectorised(const Layout &layout, const void *data, const char *name) {
    if (layout.last_stride != 1) {
        fail("expected ", name, ".stride(-1) == 1, got ", layout.last_stride);
    }
    if ((layout.batch_stride | layout.row_stride | layout.head_stride) % 8 != 0) {
        fail("expected strides of ", name, " that are multiples of 8 elements, got (",
             layout.batch_stride, ", ", layout.row_stride, ", ", layout.head_stride, ", 1)");
    }
    if (misaligned(data)) {
        fail("expected ", name, " aligned to 16 bytes, got data_ptr() % 16 == ",
             reinterpret_cast<uintptr_t>(data) % 16);
    }
}

// Reports that an allocation failed; flashcute/resolver_errors.py turns this into torch's own
// error.
template <typename Sizes>
[[noreturn]] void fail_to_allocate(const Sizes &sizes, int32_t dtype, int32_t device) {
    double bytes = static_cast<double>(aoti_torch_dtype_element_size(dtype));
    for (const int64_t size : sizes) {
        bytes *= static_cast<double>(size);
    }
    fail<KernelFailure>("failed to allocate ", static_cast<int64_t>(std::min(bytes, 0x1p62)),
                        " bytes on cuda:", device);
}

// Calls an operator of torch that makes a tensor of the same sizes from `tensor`. Not by torch's
// C++ function for it, which puts a number into a stream where the operator fails: see fail().
template <typename... Args>
Tensor call_torch(const char *op, const Tensor &tensor, Args... args) {
    StableIValue stack[] = {torch::stable::detail::from(tensor),
                            torch::stable::detail::from(args)...};
    if (torch_call_dispatcher(op, "", stack, TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS) {
        fail_to_allocate(tensor.sizes(), dtype_of(tensor), tensor.get_device_index());
    }
    return torch::stable::detail::to<Tensor>(stack[0]);
}

// Returns the tensor or, if it is misaligned, a copy, with the same strides where they leave no
// gaps.
inline Tensor aligned(const Tensor &tensor) {
    if (!misaligned(tensor.const_data_ptr())) {
        return tensor;
    }
    Tensor copy = call_torch("aten::clone", tensor, std::nullopt);
    if (misaligned(copy.const_data_ptr())) {
        fail("expected torch to allocate memory at multiples of 16 bytes");
    }
    return copy;
}

// is_cache: k and v have batch entries, or pages, of their own.
inline void check_shapes(const Layout &q, const Layout &k, const Layout &v, bool is_cache) {
    if ((k.b != q.b && !is_cache) || k.d != q.d) {
        fail("expected k of q's batch size ", q.b, " and head dimension ", q.d, ", got ", k.b,
             " and ", k.d);
    }
    if (v.b != k.b || v.s != k.s || v.h != k.h || v.d != k.d) {
        fail("expected v of the shape of k");
    }
    if (q.d < 8 || q.d > kMaxHeadDim || q.d % 8 != 0) {
        fail("expected a head dimension in 8, 16, ..., ", kMaxHeadDim, ", got ", q.d);
    }
    if (q.h < 1 || k.h < 1 || q.h % k.h != 0) {
        fail("expected a number of query heads divisible by the number of key heads, got ", q.h,
             " and ", k.h);
    }
    if (q.s > kMaxSeqlen || k.s > kMaxSeqlen) {
        fail("expected sequences of at most ", kMaxSeqlen, " tokens, got ", q.s, " and ", k.s);
    }
    if (q.b > kMaxInt32 || q.h > kMaxInt32 || q.b * q.h > kMaxInt32) {
        fail("expected batch size times heads <= ", kMaxInt32, ", got ", q.b, " times ", q.h);
    }
}

// What every operator reads of q, k and v.
struct Inputs {
    int32_t dtype, device;
    Layout q, k, v;
};

inline Inputs read_inputs(const Tensor &q, const Tensor &k, const Tensor &v, int64_t rank,
                          bool is_cache = false, bool heads_first = false) {
    const int32_t dtype = dtype_of(q);
    const int32_t device = q.get_device_index();
    if (dtype != aoti_torch_dtype_float16() && dtype != aoti_torch_dtype_bfloat16()) {
        fail("expected q of dtype float16 or bfloat16");
    }
    if (!q.is_cuda()) {
        fail("expected q on cuda, got a tensor elsewhere");
    }
    check_placement(k, "k", dtype, device);
    check_placement(v, "v", dtype, device);
    Inputs inputs{.dtype = dtype,
                  .device = device,
                  .q = read_layout(q, "q", rank, heads_first),
                  .k = read_layout(k, "k", is_cache ? 4 : rank, heads_first),
                  .v = read_layout(v, "v", is_cache ? 4 : rank, heads_first)};
    check_shapes(inputs.q, inputs.k, inputs.v, is_cache);
    return inputs;
}

template <int64_t rank>
Tensor empty(const int64_t (&sizes)[rank], const int64_t (&strides)[rank], int32_t dtype,
             int32_t device) {
    AtenTensorHandle handle = nullptr;
    if (aoti_torch_empty_strided(rank, sizes, strides, dtype, aoti_torch_device_type_cuda(), device,
                                 &handle) != AOTI_TORCH_SUCCESS) {
        fail_to_allocate(sizes, dtype, device);
    }
    return Tensor(handle);
}

// Returns an uninitialised tensor of the sizes of `tensor` and, where it leaves no gaps, its
// strides.
inline Tensor empty_like(const Tensor &tensor, int32_t dtype, int32_t device) {
    if (tensor.dim() != 4 || !tensor.is_contiguous()) {
        const std::nullopt_t as_it_is = std::nullopt;
        return call_torch("aten::empty_like", tensor, as_it_is, as_it_is, as_it_is, as_it_is,
                          as_it_is);
    }
    // The same result without the dispatcher's boxing, which takes 0.4 us more.
    const int64_t *size = tensor.sizes().data(), *stride = tensor.strides().data();
    const int64_t sizes[] = {size[0], size[1], size[2], size[3]};
    const int64_t strides[] = {stride[0], stride[1], stride[2], stride[3]};
    return empty(sizes, strides, dtype, device);
}

inline void *current_stream(int32_t device) {
    if (aoti_torch_get_current_cuda_stream == nullptr) {
        fail("expected a build of torch with CUDA, got one without");
    }
    void *stream = nullptr;
    check_shim(aoti_torch_get_current_cuda_stream(device, &stream));
    return stream;
}

// What a call may ask for beside q, k, v and the scale. A window's side is -1 where it is
// unlimited. The first seven are in the order of the operators' schemas.
struct Options {
    bool causal = false;
    int64_t window_left = -1;
    int64_t window_right = -1;
    MaybeTensor sinks;
    double softcap = 0;  // 0: none
    MaybeTensor alibi_slopes;
    // Split-KV: into how many parts a ragged batch's keys are split at most; 0: by shape, -1: not.
    // If it is given (> 0), the kernel does not depend on the lengths and the number of the
    // sequences, so that a sequence's result is the same bits in any batch.
    int64_t num_splits = -1;
    MaybeTensor rng_state;
    double dropout_p = 0;      // 0: none
    bool heads_first = false;  // a dense batch of tensors (b, heads, s, d), as SDPA has them
    bool returns_lse = true;   // must be true for a dense batch
    bool copies = true;        // copies misaligned inputs; else refuses them
};

// b: entries, or sequences of a ragged batch.
inline void set_slopes(Flash_fwd_params &params, const Options &options, int64_t b, int64_t h,
                       int32_t device) {
    if (!options.alibi_slopes.has_value()) {
        return;
    }
    const Tensor &slopes = *options.alibi_slopes;
    if (!slopes.is_cuda() || slopes.get_device_index() != device) {
        fail("expected alibi_slopes on cuda:", device, " as q");
    }
    const int64_t rank = slopes.dim();
    const bool has_shape =
        (rank == 1 || (rank == 2 && slopes.sizes()[0] == b)) && slopes.sizes()[rank - 1] == h;
    if (dtype_of(slopes) != aoti_torch_dtype_float32() || !has_shape || !slopes.is_contiguous()) {
        fail("expected contiguous alibi_slopes of dtype float32 and shape (", h, ") or (", b, ", ",
             h, ")");
    }
    if (!(params.alibi_scale >= 0x1p-64 && params.alibi_scale <= 0x1p64)) {
        fail(
            "expected softcap, or without one softmax_scale, from 2**-64 to 2**64 with "
            "alibi_slopes");
    }
    params.alibi_slopes_ptr = static_cast<const float *>(slopes.const_data_ptr());
    params.alibi_slopes_batch_stride = rank == 2 ? h : 0;
}

// Returns the problem of a dense batch, without its mask.
inline Problem make_problem(const Inputs &inputs) {
    const bool fp16 = inputs.dtype == aoti_torch_dtype_float16();
    return {.device = inputs.device,
            .dtype = fp16 ? DType::fp16 : DType::bf16,
            .b = static_cast<int32_t>(inputs.q.b),
            .seqlen_q = static_cast<int32_t>(inputs.q.s),
            .seqlen_k = static_cast<int32_t>(inputs.k.s),
            .h = static_cast<int32_t>(inputs.q.h),
            .h_k = static_cast<int32_t>(inputs.k.h),
            .d = static_cast<int32_t>(inputs.q.d)};
}

// Sets the window of MaskKind::local, clamped to the lengths of the sequences.
inline void set_window(Problem &problem, const Options &options) {
    const auto bounded = [](int64_t side, int32_t length) {
        return side < 0 || side >= length - 1 ? length : static_cast<int32_t>(side);
    };
    problem.window_left = bounded(options.window_left, problem.seqlen_k);
    problem.window_right = bounded(options.causal ? 0 : options.window_right, problem.seqlen_q);
}

// Sets the mask that needs the least work of those equivalent to the options, and its window.
inline void set_mask(Problem &problem, const Options &options) {
    const int64_t seqlen_q = problem.seqlen_q, seqlen_k = problem.seqlen_k;
    const int64_t left = options.window_left;
    const int64_t right = options.causal ? 0 : options.window_right;
    if (left < -1 || options.window_right < -1) {
        fail("expected a window of two sides >= -1, got ", left, " and ", options.window_right);
    }
    const bool by_lengths = options.num_splits <= 0;
    const bool all_left = left < 0 || (by_lengths && left >= seqlen_k - 1);
    const bool all_right = right < 0 || (by_lengths && right >= seqlen_q - 1);
    if (all_left && (all_right || right == 0)) {
        problem.mask = all_right ? MaskKind::none : MaskKind::causal;
        return;
    }
    if (2 * (seqlen_q + seqlen_k) > kMaxInt32) {
        fail("expected seqlen_q + seqlen_k <= ", kMaxInt32 / 2, " with a window, got ", seqlen_q,
             " and ", seqlen_k);
    }
    problem.mask = MaskKind::local;
    set_window(problem, options);
}

inline const float *read_sinks(const Options &options, const Layout &q, int32_t device) {
    if (!options.sinks.has_value()) {
        return nullptr;
    }
    const Tensor &sinks = *options.sinks;
    if (!sinks.is_cuda() || sinks.get_device_index() != device) {
        fail("expected sinks on cuda:", device, " as q");
    }
    if (dtype_of(sinks) != aoti_torch_dtype_float32() || sinks.dim() != 1 ||
        sinks.sizes()[0] != q.h || !sinks.is_contiguous()) {
        fail("expected contiguous sinks of dtype float32 and shape (", q.h, ")");
    }
    return static_cast<const float *>(sinks.const_data_ptr());
}

inline void set_dropout(Flash_fwd_params &params, const Options &options, int32_t device) {
    if (!(options.dropout_p >= 0 && options.dropout_p <= 65535. / 65536)) {
        fail("expected 0 <= dropout_p <= 1 - 2**-16, got ", options.dropout_p);
    }
    const double threshold = std::nearbyint(options.dropout_p * 65536);
    const DropoutBound bound(static_cast<uint32_t>(threshold));
    params.dropout_bound = bound.bound;
    params.dropout_flip = bound.flip;
    if (threshold == 0) {
        return;
    }
    if (!options.rng_state.has_value()) {
        fail("expected rng_state with dropout_p > 0, got none");
    }
    const Tensor &state = *options.rng_state;
    if (!state.is_cuda() || state.get_device_index() != device) {
        fail("expected rng_state on cuda:", device, " as q");
    }
    if (dtype_of(state) != aoti_torch_dtype_int64() || state.dim() != 1 || state.sizes()[0] != 2 ||
        !state.is_contiguous()) {
        fail("expected contiguous rng_state of dtype int64 and shape (2)");
    }
    params.rng_state_ptr = static_cast<const int64_t *>(state.const_data_ptr());
    params.dropout_scale = static_cast<float>(1 / (1 - threshold / 65536));
}

inline double default_scale(const Tensor &q) {
    const int64_t rank = q.dim();
    const int64_t d = rank > 0 ? q.sizes()[rank - 1] : 0;
    return d > 0 ? 1 / std::sqrt(static_cast<double>(d)) : 1;
}

// Sets the scales. Kernels multiply masked scores, -inf, by the scale after taking the row maximum:
// with a scale of 0 that gives NaN, with a negative one the maximum is wrong. Subnormal scales are
// 0 to them.
inline void set_scales(Flash_fwd_params &params, double softmax_scale, double softcap) {
    const double unit = softcap > 0 ? softcap : softmax_scale;  // of the scores
    params.scale_softmax = static_cast<float>(softmax_scale);
    params.scale_softmax_log2 = static_cast<float>(unit * std::numbers::log2e);
    params.scale_softcap = static_cast<float>(softmax_scale / unit);
    params.alibi_scale = static_cast<float>(1 / unit);
    if (!(softmax_scale > 0) || !std::isnormal(params.scale_softmax) ||
        !std::isnormal(static_cast<float>(softmax_scale * std::numbers::log2e))) {
        fail("expected a finite softmax_scale > 0, got ", softmax_scale);
    }
    if (!(softcap >= 0) || !std::isnormal(params.scale_softmax_log2) ||
        !std::isnormal(params.scale_softcap)) {
        fail(
            "expected softcap 0, or > 0 with softmax_scale / softcap within the range of float32, "
            "got ",
            softcap);
    }
}

inline void set_sizes(Flash_fwd_params &params, const Problem &problem) {
    params.b = problem.b;
    params.seqlen_q = problem.seqlen_q;
    params.seqlen_k = problem.seqlen_k;
    params.h = problem.h;
    params.h_k = problem.h_k;
    params.d = problem.d;
    params.window_left = problem.window_left;
    params.window_right = problem.window_right;
    params.h_h_k_ratio = problem.h / problem.h_k;
}

inline void set_strides(Flash_fwd_params &params, const Layout &q, const Layout &k, const Layout &v,
                        const Layout &o) {
    params.q_batch_stride = q.batch_stride;
    params.q_row_stride = q.row_stride;
    params.q_head_stride = q.head_stride;
    params.k_batch_stride = k.batch_stride;
    params.k_row_stride = k.row_stride;
    params.k_head_stride = k.head_stride;
    params.v_batch_stride = v.batch_stride;
    params.v_row_stride = v.row_stride;
    params.v_head_stride = v.head_stride;
    params.o_batch_stride = o.batch_stride;
    params.o_row_stride = o.row_stride;
    params.o_head_stride = o.head_stride;
}

}  // namespace flash
