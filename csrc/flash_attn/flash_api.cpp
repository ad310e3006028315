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
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <numbers>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "flash.h"

#ifndef FLASHCUTE_NAMESPACE
#define FLASHCUTE_NAMESPACE flashcute  // flashcute.config.NAMESPACE
#endif

// Exported by CUDA builds of torch only. Weak, so that the same binary loads under a CPU build.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device,
                                                                                   void **stream);

namespace flash {

// One forward call as far as the choice of a kernel depends on it; flashcute/ops.py mirrors the
// layout.
struct FwdProblem {
    int32_t device;  // CUDA device index
    DType dtype;
    MaskKind mask;
    int32_t b, seqlen_q, seqlen_k, h, h_k, d;
    int32_t window_left, window_right;  // MaskKind::local; else 0

    bool operator==(const FwdProblem &) const = default;
};

// How a problem is computed; flashcute/ops.py mirrors the layout.
struct FwdChoice {
    const Flash_kernel *kernel;
    int32_t pack_heads;  // the query heads of a key head share tiles
};

// Fills in the choice for a problem and returns 0, or writes a message of at most `error_size`
// bytes, terminating zero included, into `error` and returns another number.
using Resolver = int32_t (*)(const FwdProblem *problem, FwdChoice *choice, char *error,
                             int32_t error_size);

namespace {

using torch::stable::Tensor;

constexpr int kMaxHeadDim = 256;
constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
// Kernels round sequence lengths up to whole tiles in 32-bit arithmetic.
constexpr int64_t kMaxSeqlen = kMaxInt32 - 1023;
// Persistent kernels count on beyond the last tile, by a CTA for each SM, in 32-bit arithmetic.
constexpr int64_t kMaxTiles = kMaxInt32 - 1023;
// Bounds the table for workloads in which every call has another sequence length.
constexpr size_t kMaxRemembered = 4096;

std::string to_text(const char *text) { return text; }
template <typename Number>
std::string to_text(Number number) {
    return std::to_string(number);
}

// Without iostreams: their number formatting crashes where torch carries another libstdc++ than the
// one this file was compiled against (seen with g++ 13 and torch 2.11).
template <typename... Args>
[[noreturn]] void fail(const Args &...args) {
    throw std::runtime_error(std::string(C10_STRINGIZE(FLASHCUTE_NAMESPACE) "::fwd: ") +
                             (to_text(args) + ...));
}

// torch's own macro for this has another name in 2.10 and 2.11 than later.
void check_shim(AOTITorchError error) {
    if (error != AOTI_TORCH_SUCCESS) {
        fail("a call into torch failed");
    }
}

struct FwdProblemHash {
    size_t operator()(const FwdProblem &problem) const {
        // FNV-1a over the words; the high bits are folded back as buckets use the low ones.
        static_assert(sizeof(FwdProblem) == 11 * sizeof(uint32_t), "no padding may enter the hash");
        uint32_t words[11];
        std::memcpy(words, &problem, sizeof(words));
        uint64_t hash = 0xcbf29ce484222325;
        for (const uint32_t word : words) {
            hash = (hash ^ word) * 0x100000001b3;
        }
        return hash ^ (hash >> 32);
    }
};

class KernelTable {
  public:
    void set_resolver(Resolver resolver) {
        const std::lock_guard lock(mutex_);
        resolver_ = resolver;
        if (resolver != nullptr) {
            choices_.clear();
        }
    }

    FwdChoice find(const FwdProblem &problem) {
        Resolver resolver = nullptr;
        {
            const std::lock_guard lock(mutex_);
            const auto found = choices_.find(problem);
            if (found != choices_.end()) {
                return found->second;
            }
            resolver = resolver_;
        }
        // Unlocked: the resolver takes the interpreter lock and may spend minutes in a compiler.
        const FwdChoice choice = resolve(resolver, problem);
        const std::lock_guard lock(mutex_);
        if (choices_.size() >= kMaxRemembered) {
            choices_.clear();
        }
        choices_.insert_or_assign(problem, choice);
        return choice;
    }

  private:
    static FwdChoice resolve(Resolver resolver, const FwdProblem &problem) {
        if (resolver == nullptr) {
            fail(
                "expected a kernel resolver, got none; import flashcute and call its functions "
                "before the interpreter ends");
        }
        char error[4096] = "";
        FwdChoice choice{};
        if (resolver(&problem, &choice, error, sizeof(error)) != 0) {
            fail(error);
        }
        const Flash_kernel *kernel = choice.kernel;
        if (kernel->abi_version != kAbiVersion ||
            kernel->params_size != static_cast<int32_t>(sizeof(Flash_fwd_params))) {
            fail("expected a kernel of ABI version ", kAbiVersion, " with ",
                 sizeof(Flash_fwd_params), " bytes of parameters, got version ",
                 kernel->abi_version, " with ", kernel->params_size,
                 " bytes; remove the stale kernel from the cache");
        }
        return choice;
    }

    std::mutex mutex_;
    Resolver resolver_ = nullptr;
    std::unordered_map<FwdProblem, FwdChoice, FwdProblemHash> choices_;
};

KernelTable &kernel_table() {
    static KernelTable table;
    return table;
}

// Sizes and strides of a (b, s, h, d) tensor, read once. Strides of dimensions of size 0 or 1 are
// never used to move, and torch allows any value there, so they count as 0.
struct Layout {
    int64_t b, s, h, d;
    int64_t batch_stride, row_stride, head_stride, last_stride;
};

Layout read_layout(const Tensor &tensor, const char *name) {
    if (const int64_t rank = tensor.dim(); rank != 4) {
        fail("expected ", name, " of rank 4, got rank ", rank);
    }
    const int64_t *size = tensor.sizes().data();
    const int64_t *stride = tensor.strides().data();
    return {.b = size[0],
            .s = size[1],
            .h = size[2],
            .d = size[3],
            .batch_stride = size[0] <= 1 ? 0 : stride[0],
            .row_stride = size[1] <= 1 ? 0 : stride[1],
            .head_stride = size[2] <= 1 ? 0 : stride[2],
            .last_stride = stride[3]};
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

template <size_t rank>
Tensor empty(const int64_t (&sizes)[rank], const int64_t (&strides)[rank], int32_t dtype,
             int32_t device) {
    AtenTensorHandle handle = nullptr;
    check_shim(aoti_torch_empty_strided(rank, sizes, strides, dtype, aoti_torch_device_type_cuda(),
                                        device, &handle));
    return Tensor(handle);
}

// Both outputs are fresh: out as empty_like(q), softmax_lse contiguous float32 (b, h, seqlen_q).
std::tuple<Tensor, Tensor> make_outputs(const Tensor &q, const Layout &ql, int32_t dtype,
                                        int32_t device) {
    // torch never makes a contiguous stride smaller than 1, even beside a dimension of size 0.
    const int64_t rows = ql.s > 0 ? ql.s : 1;
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
};

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

// Choices are remembered by lengths rounded up, so that a call with another length rarely enters
// Python: exact up to 16, then in steps of 16, from 256 on in 16 steps an octave.
// heuristics.rounded_length() is the same.
int32_t rounded_length(int32_t length) {
    if (length <= 16) {
        return length;
    }
    const int64_t step =
        std::max<int64_t>(16, std::bit_floor(static_cast<uint32_t>(length - 1)) / 16);
    return static_cast<int32_t>(std::min((length + step - 1) / step * step, kMaxSeqlen));
}

FwdProblem rounded(FwdProblem problem) {
    problem.window_left = rounded_length(std::min(problem.window_left, problem.seqlen_k));
    problem.window_right = rounded_length(std::min(problem.window_right, problem.seqlen_q));
    problem.seqlen_q = rounded_length(problem.seqlen_q);
    problem.seqlen_k = rounded_length(problem.seqlen_k);
    return problem;
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

// The scale, the shape and what the choice for them says.
void set_problem(Flash_fwd_params &params, const FwdProblem &problem, const FwdChoice &choice) {
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
    const int64_t rows = int64_t(problem.seqlen_q) << params.pack_shift;
    const int64_t grid_heads =
        int64_t(problem.b) * (params.pack_shift > 0 ? problem.h_k : problem.h);
    // The grid is one-dimensional, and its limit is that of a 32-bit int, as is that of a row.
    const int64_t tiles = grid_heads * ((rows + tile_m - 1) / tile_m);
    if (rows > kMaxSeqlen || tiles > kMaxTiles) {
        fail("expected at most ", kMaxTiles, " tiles of ", tile_m, " query rows, got ", tiles,
             "; split the batch");
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

std::tuple<Tensor, Tensor> forward(const Tensor &q, const Tensor &k, const Tensor &v,
                                   double softmax_scale, const Options &options) {
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
    const Layout ql = read_layout(q, "q");
    const Layout kl = read_layout(k, "k");
    const Layout vl = read_layout(v, "v");
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
        return forward(aligned(q), aligned(k), aligned(v), softmax_scale, options);
    }
    check_vectorised(ql, params.q_ptr, "q");
    check_vectorised(kl, params.k_ptr, "k");
    check_vectorised(vl, params.v_ptr, "v");
    params.scale_softmax = static_cast<float>(softmax_scale);
    params.scale_softmax_log2 = static_cast<float>(softmax_scale * std::numbers::log2e);
    // Kernels multiply masked scores, -inf, by the scale after taking the maximum: with zero or
    // less that is NaN or the wrong maximum.
    if (!(params.scale_softmax > 0) || !std::isnormal(params.scale_softmax) ||
        !std::isnormal(params.scale_softmax_log2)) {
        fail("expected a finite softmax_scale > 0, got ", softmax_scale);
    }

    const torch::stable::accelerator::DeviceGuard guard(device);
    if (ql.b == 0 || ql.s == 0) {
        return make_outputs(q, ql, dtype, device);
    }
    FwdProblem problem{.device = device,
                       .dtype = dtype == aoti_torch_dtype_float16() ? DType::fp16 : DType::bf16,
                       .b = static_cast<int32_t>(ql.b),
                       .seqlen_q = static_cast<int32_t>(ql.s),
                       .seqlen_k = static_cast<int32_t>(kl.s),
                       .h = static_cast<int32_t>(ql.h),
                       .h_k = static_cast<int32_t>(kl.h),
                       .d = static_cast<int32_t>(ql.d)};
    set_mask(problem, options);
    const FwdChoice choice = kernel_table().find(rounded(problem));
    set_problem(params, problem, choice);

    std::tuple<Tensor, Tensor> outputs = make_outputs(q, ql, dtype, device);
    const Layout ol = read_layout(std::get<0>(outputs), "out");
    params.o_ptr = std::get<0>(outputs).mutable_data_ptr();
    check_vectorised(ol, params.o_ptr, "out");
    params.softmax_lse_ptr = static_cast<float *>(std::get<1>(outputs).mutable_data_ptr());
    set_strides(params, ql, kl, vl, ol);

    const Flash_kernel *kernel = choice.kernel;
    if (const int32_t error = kernel->launch(&params, current_stream(device)); error != 0) {
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
                                  int64_t window_right, std::optional<Tensor> sinks) {
    return forward(q, k, v, softmax_scale,
                   {.causal = causal,
                    .window_left = window_left,
                    .window_right = window_right,
                    .sinks = std::move(sinks)});
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
FLASHCUTE_LIBRARY(FLASHCUTE_NAMESPACE, m) {
    m.def(
        "fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal) -> "
        "(Tensor out, Tensor softmax_lse)");
    m.def(
        "fwd_no_grad(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal) -> "
        "(Tensor out, Tensor softmax_lse)");
    m.def(
        "attend(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, int window_left, "
        "int window_right, Tensor? sinks) -> (Tensor out, Tensor softmax_lse)");
}

STABLE_TORCH_LIBRARY_IMPL(FLASHCUTE_NAMESPACE, CUDA, m) {
    m.impl("fwd", TORCH_BOX(&flash::fwd));
    m.impl("fwd_no_grad", TORCH_BOX(&flash::fwd));
    m.impl("attend", TORCH_BOX(&flash::attend));
}
