// The torch binding: the only file of the project that knows torch, and only through torch's stable
// ABI, so that one binary serves every torch from 2.10 on, with and without CUDA.
//
// C++ asks, Python decides, C++ remembers: the kernel for a problem is chosen (and built, if need
// be) by a resolver that Python registers; the answer is kept in a table, so the hot path never
// enters Python. The checks here are the safety net that keeps memory safe for whoever calls the
// operator directly; the precise, typed errors are raised by flash_attn_interface.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <optional>
#include <tuple>
#include <utility>

#include "flash.h"
#include "kernel_table.h"

// Exported by CUDA builds of torch only. Weak, so that the same binary loads under a CPU build.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device,
                                                                                   void **stream);

namespace flash {
namespace {

using torch::stable::Tensor;

constexpr int kMaxHeadDim = 256;
// Persistent kernels count on beyond the last tile, by a CTA for each SM, in 32-bit arithmetic.
constexpr int64_t kMaxTiles = kMaxInt32 - 1023;

// torch's own macro for this has another name in 2.10 and 2.11 than later.
void check_shim(AOTITorchError error) {
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
};

Layout read_layout(const Tensor &tensor, const char *name, int64_t rank) {
    if (tensor.dim() != rank) {
        fail("expected ", name, " of rank ", rank, ", got rank ", tensor.dim());
    }
    const int64_t *size = tensor.sizes().data() + (rank - 3);
    const int64_t *stride = tensor.strides().data() + (rank - 3);
    const bool dense = rank == 4;
    return {.b = dense ? size[-1] : 1,
            .s = size[0],
            .h = size[1],
            .d = size[2],
            .batch_stride = dense && size[-1] > 1 ? stride[-1] : 0,
            .row_stride = size[0] <= 1 ? 0 : stride[0],
            .head_stride = size[1] <= 1 ? 0 : stride[1],
            .last_stride = stride[2]};
}

int32_t dtype_of(const Tensor &tensor) {
    int32_t dtype = 0;
    check_shim(aoti_torch_get_dtype(tensor.get(), &dtype));
    return dtype;
}

void check_placement(const Tensor &tensor, const char *name, int32_t dtype, int32_t device) {
    if (!tensor.is_cuda() || tensor.get_device_index() != device) {
        fail("expected ", name, " on cuda:", device, " as q");
    }
    if (dtype_of(tensor) != dtype) {
        fail("expected ", name, " of the dtype of q");
    }
}

bool misaligned(const void *data) { return reinterpret_cast<uintptr_t>(data) % 16 != 0; }

// Kernels load 16 bytes at a time.
void check_vectorised(const Layout &layout, const void *data, const char *name) {
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

// The tensor, or a copy of it: of the same strides where they leave no gaps.
Tensor aligned(const Tensor &tensor) {
    if (!misaligned(tensor.const_data_ptr())) {
        return tensor;
    }
    Tensor copy = torch::stable::clone(tensor);
    if (misaligned(copy.const_data_ptr())) {
        fail("expected torch to allocate memory at multiples of 16 bytes");
    }
    return copy;
}

void check_shapes(const Layout &q, const Layout &k, const Layout &v) {
    if (k.b != q.b || k.d != q.d) {
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

template <int64_t rank>
Tensor empty(const int64_t (&sizes)[rank], const int64_t (&strides)[rank], int32_t dtype,
             int32_t device) {
    AtenTensorHandle handle = nullptr;
    check_shim(aoti_torch_empty_strided(rank, sizes, strides, dtype, aoti_torch_device_type_cuda(),
                                        device, &handle));
    return Tensor(handle);
}

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
    if (!q.is_contiguous()) {
        return {torch::stable::empty_like(q), std::move(lse)};
    }
    // The same result without the dispatcher's boxing, which takes 0.4 us more.
    const int64_t *strides = q.strides().data();
    const int64_t out_sizes[] = {ql.b, ql.s, ql.h, ql.d};
    const int64_t out_strides[] = {strides[0], strides[1], strides[2], strides[3]};
    return {empty(out_sizes, out_strides, dtype, device), std::move(lse)};
}

void *current_stream(int32_t device) {
    if (aoti_torch_get_current_cuda_stream == nullptr) {
        fail("expected a build of torch with CUDA, got one without");
    }
    void *stream = nullptr;
    check_shim(aoti_torch_get_current_cuda_stream(device, &stream));
    return stream;
}

// What a call may ask for beside q, k, v and the scale. A window's side is -1 where it is
// unlimited.
struct Options {
    bool causal = false;
    int64_t window_left = -1;
    int64_t window_right = -1;
    std::optional<Tensor> sinks;
    double softcap = 0;  // 0: none
    std::optional<Tensor> alibi_slopes;
    std::optional<Tensor> rng_state;
    double dropout_p = 0;  // 0: none
};

// What a ragged batch has instead of two lengths.
struct Lengths {
    const Tensor &cu_seqlens_q, &cu_seqlens_k;
    const std::optional<Tensor> &seqused_q, &seqused_k;
    int64_t max_seqlen_q, max_seqlen_k;
};

const int32_t *read_lengths(const Tensor &lengths, const char *name, int64_t size, int32_t device) {
    if (!lengths.is_cuda() || lengths.get_device_index() != device) {
        fail("expected ", name, " on cuda:", device, " as q");
    }
    if (dtype_of(lengths) != aoti_torch_dtype_int32() || lengths.dim() != 1 ||
        lengths.sizes()[0] != size || !lengths.is_contiguous()) {
        fail("expected contiguous ", name, " of dtype int32 and shape (", size, ")");
    }
    return static_cast<const int32_t *>(lengths.const_data_ptr());
}

// Returns the number of sequences.
int64_t set_lengths(Flash_fwd_params &params, const Lengths &lengths, int32_t device) {
    if (lengths.cu_seqlens_q.dim() != 1 || lengths.cu_seqlens_q.sizes()[0] < 1) {
        fail("expected cu_seqlens_q of shape (b + 1)");
    }
    if (lengths.max_seqlen_q < 0 || lengths.max_seqlen_k < 0) {
        fail("expected max_seqlen_q and max_seqlen_k >= 0, got ", lengths.max_seqlen_q, " and ",
             lengths.max_seqlen_k);
    }
    const int64_t b = lengths.cu_seqlens_q.sizes()[0] - 1;
    if (b > kMaxInt32 / 4) {
        fail("expected at most ", kMaxInt32 / 4, " sequences, got ", b);
    }
    params.cu_seqlens_q_ptr = read_lengths(lengths.cu_seqlens_q, "cu_seqlens_q", b + 1, device);
    params.cu_seqlens_k_ptr = read_lengths(lengths.cu_seqlens_k, "cu_seqlens_k", b + 1, device);
    if (lengths.seqused_q.has_value()) {
        params.seqused_q_ptr = read_lengths(*lengths.seqused_q, "seqused_q", b, device);
    }
    if (lengths.seqused_k.has_value()) {
        params.seqused_k_ptr = read_lengths(*lengths.seqused_k, "seqused_k", b, device);
    }
    return b;
}

// The mask with the least work that says the same, and the window of MaskKind::local.
void set_mask(FwdProblem &problem, const Options &options) {
    const int64_t seqlen_q = problem.seqlen_q, seqlen_k = problem.seqlen_k;
    const int64_t left = options.window_left;
    const int64_t right = options.causal ? 0 : options.window_right;
    const bool all_left = left < 0 || left >= seqlen_k - 1;
    const bool all_right = right < 0 || right >= seqlen_q - 1;
    if (all_left && (all_right || right == 0)) {
        problem.mask = all_right ? MaskKind::none : MaskKind::causal;
        return;
    }
    if (2 * (seqlen_q + seqlen_k) > kMaxInt32) {
        fail("expected seqlen_q + seqlen_k <= ", kMaxInt32 / 2, " with a window, got ", seqlen_q,
             " and ", seqlen_k);
    }
    problem.mask = MaskKind::local;
    problem.window_left = static_cast<int32_t>(all_left ? seqlen_k : left);
    problem.window_right = static_cast<int32_t>(all_right ? seqlen_q : right);
}

// Between the mean and the longest: of what the host knows of a ragged batch, the length whose
// tiles suit most of the work.
int32_t typical_length(int64_t total, int64_t b, int64_t longest) {
    const double most = static_cast<double>(std::min(longest, total));
    const double of_each =
        static_cast<double>(total) / static_cast<double>(std::max(b, int64_t(1)));
    const double mean = std::min(of_each, most);
    return std::max(static_cast<int32_t>(std::sqrt(mean * most)), 1);
}

const float *read_sinks(const Options &options, const Layout &q, int32_t device) {
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

// b: entries, or sequences of a ragged batch.
void set_slopes(Flash_fwd_params &params, const Options &options, int64_t b, int64_t h,
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
    params.alibi_slopes_ptr = static_cast<const float *>(slopes.const_data_ptr());
    params.alibi_slopes_batch_stride = rank == 2 ? h : 0;
}

// The threshold is 0 where there is no dropout.
void set_dropout(Flash_fwd_params &params, const Options &options, int32_t device) {
    const double threshold = std::nearbyint(options.dropout_p * 65536);
    if (!(threshold >= 0 && threshold <= 65535)) {
        fail("expected 0 <= dropout_p <= 1 - 2**-16, got ", options.dropout_p);
    }
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
    params.dropout_threshold = static_cast<uint32_t>(threshold);
    params.dropout_scale = static_cast<float>(1 / (1 - threshold / 65536));
}

// Kernels multiply masked scores, -inf, by the scale after taking the maximum: with zero or less
// that is NaN or the wrong maximum. What is not normal is 0 to them.
void set_scales(Flash_fwd_params &params, double softmax_scale, double softcap) {
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

// The shape and what the choice for it says. total_q: of a ragged batch.
void set_problem(Flash_fwd_params &params, const FwdProblem &problem, const FwdChoice &choice,
                 const int64_t *total_q) {
    params.b = problem.b;
    params.seqlen_q = problem.seqlen_q;
    params.seqlen_k = problem.seqlen_k;
    params.h = problem.h;
    params.h_k = problem.h_k;
    params.d = problem.d;
    params.window_left = problem.window_left;
    params.window_right = problem.window_right;
    params.h_h_k_ratio = problem.h / problem.h_k;
    params.pack_shift =
        choice.pack_heads != 0 ? std::bit_width(static_cast<uint32_t>(params.h_h_k_ratio) - 1) : 0;
    const int tile_m = choice.kernel->tile_m;
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

void set_strides(Flash_fwd_params &params, const Layout &q, const Layout &k, const Layout &v,
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
    params.softmax_lse_batch_stride = q.h * q.s;
    params.softmax_lse_head_stride = q.s;
}

// lengths: of a ragged batch, whose q, k and v are packed to (total, heads, d).
std::tuple<Tensor, Tensor> forward(const Tensor &q, const Tensor &k, const Tensor &v,
                                   double softmax_scale, const Options &options,
                                   const Lengths *lengths = nullptr) {
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
    const int64_t rank = lengths != nullptr ? 3 : 4;
    const Layout ql = read_layout(q, "q", rank);
    const Layout kl = read_layout(k, "k", rank);
    const Layout vl = read_layout(v, "v", rank);
    check_shapes(ql, kl, vl);

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
    FwdProblem problem{.device = device,
                       .dtype = dtype == aoti_torch_dtype_float16() ? DType::fp16 : DType::bf16,
                       .b = static_cast<int32_t>(b),
                       .seqlen_q = static_cast<int32_t>(ql.s),
                       .seqlen_k = static_cast<int32_t>(kl.s),
                       .h = static_cast<int32_t>(ql.h),
                       .h_k = static_cast<int32_t>(kl.h),
                       .d = static_cast<int32_t>(ql.d),
                       .softcap = options.softcap > 0,
                       .alibi = options.alibi_slopes.has_value(),
                       .dropout = params.rng_state_ptr != nullptr};
    if (lengths != nullptr) {
        // Rows from max_seqlen_q on count as none, but max_seqlen_k is no more than a hint.
        problem.seqlen_q = static_cast<int32_t>(std::min(lengths->max_seqlen_q, ql.s));
    }
    set_mask(problem, options);
    FwdProblem asked = problem;  // of the heuristics
    if (lengths != nullptr) {
        asked.b = rounded_length(problem.b);
        asked.seqlen_q = typical_length(ql.s, b, lengths->max_seqlen_q);
        asked.seqlen_k = typical_length(kl.s, b, lengths->max_seqlen_k);
    }
    const FwdChoice choice = kernel_table().find(rounded(asked));
    set_problem(params, problem, choice, lengths != nullptr ? &ql.s : nullptr);

    std::tuple<Tensor, Tensor> outputs = make_outputs(q, ql, dtype, device);
    const Layout ol = read_layout(std::get<0>(outputs), "out", rank);
    params.o_ptr = std::get<0>(outputs).mutable_data_ptr();
    check_vectorised(ol, params.o_ptr, "out");
    params.softmax_lse_ptr = static_cast<float *>(std::get<1>(outputs).mutable_data_ptr());
    set_strides(params, ql, kl, vl, ol);

    const Flash_kernel *kernel = choice.kernel;
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
    return forward(q, k, v, softmax_scale, {.causal = causal});
}

std::tuple<Tensor, Tensor> attend(const Tensor &q, const Tensor &k, const Tensor &v,
                                  double softmax_scale, bool causal, int64_t window_left,
                                  int64_t window_right, std::optional<Tensor> sinks, double softcap,
                                  std::optional<Tensor> alibi_slopes,
                                  std::optional<Tensor> rng_state, double dropout_p) {
    return forward(q, k, v, softmax_scale,
                   {.causal = causal,
                    .window_left = window_left,
                    .window_right = window_right,
                    .sinks = std::move(sinks),
                    .softcap = softcap,
                    .alibi_slopes = std::move(alibi_slopes),
                    .rng_state = std::move(rng_state),
                    .dropout_p = dropout_p});
}

std::tuple<Tensor, Tensor> attend_varlen(
    const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &cu_seqlens_q,
    const Tensor &cu_seqlens_k, std::optional<Tensor> seqused_q, std::optional<Tensor> seqused_k,
    int64_t max_seqlen_q, int64_t max_seqlen_k, double softmax_scale, bool causal,
    int64_t window_left, int64_t window_right, std::optional<Tensor> sinks, double softcap,
    std::optional<Tensor> alibi_slopes, std::optional<Tensor> rng_state, double dropout_p) {
    const Lengths lengths{cu_seqlens_q, cu_seqlens_k, seqused_q,
                          seqused_k,    max_seqlen_q, max_seqlen_k};
    return forward(q, k, v, softmax_scale,
                   {.causal = causal,
                    .window_left = window_left,
                    .window_right = window_right,
                    .sinks = std::move(sinks),
                    .softcap = softcap,
                    .alibi_slopes = std::move(alibi_slopes),
                    .rng_state = std::move(rng_state),
                    .dropout_p = dropout_p},
                   &lengths);
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

// Python gives `fwd` and `attend` an autograd kernel, which refuses inputs that want a gradient.
// `fwd_no_grad` is `fwd` without it, for a caller that has looked already: no Python between call
// and kernel. `attend` takes everything optional; a window's side of -1 is unlimited.
// `attend_varlen` is that of a ragged batch.
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
        "Tensor? rng_state=None, float dropout_p=0.) -> (Tensor out, Tensor softmax_lse)");
    m.def(
        "attend_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        "Tensor? seqused_q, Tensor? seqused_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
        "float softmax_scale, bool causal, int window_left, int window_right, Tensor? sinks, "
        "float softcap=0., Tensor? alibi_slopes=None, Tensor? rng_state=None, float dropout_p=0.) "
        "-> "
        "(Tensor out, Tensor softmax_lse)");
}

STABLE_TORCH_LIBRARY_IMPL(FLASHCUTE_NAMESPACE, CUDA, m) {
    m.impl("fwd", TORCH_BOX(&flash::fwd));
    m.impl("fwd_no_grad", TORCH_BOX(&flash::fwd));
    m.impl("attend", TORCH_BOX(&flash::attend));
    m.impl("attend_varlen", TORCH_BOX(&flash::attend_varlen));
}
