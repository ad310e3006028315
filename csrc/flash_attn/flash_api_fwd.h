// The forward in the binding: dense and ragged batches, and queries over a cache.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

#include "flash.h"
#include "flash_api_tensors.h"
#include "flash_api_varlen.h"
#include "kernel_table.h"

namespace flash {

inline constexpr int64_t kMaxSplitsGiven = 128;  // MAX_SPLITS of checks_kvcache.py

// The further arguments of a call whose k and v are a cache, with what is appended to it, if
// anything.
struct Cache {
    MaybeTensor cache_batch_idx, cache_leftpad, block_table;
    MaybeTensor k, v;
    MaybeTensor rotary_cos, rotary_sin;
    bool rotary_interleaved = false;
};

// Sets what describes the cache. Returns how many tokens of a sequence it has room for.
inline int64_t set_cache(Flash_fwd_params &params, const Cache &cache, const Layout &k, int64_t b,
                         int32_t device) {
    params.is_cache = 1;
    if (k.b > kMaxInt32) {
        fail("expected a cache of at most ", kMaxInt32, " entries or pages, got ", k.b);
    }
    params.num_pages = static_cast<int32_t>(k.b);
    params.page_size = static_cast<int32_t>(k.s);
    params.b_k = params.num_pages;
    params.cache_batch_idx_ptr = read_index(&cache.cache_batch_idx, "cache_batch_idx", b, device);
    params.leftpad_k_ptr = read_index(&cache.cache_leftpad, "cache_leftpad", b, device);
    if (!cache.block_table.has_value()) {
        if (k.b < b && !cache.cache_batch_idx.has_value()) {
            fail("expected a cache of at least q's batch size ", b, ", got ", k.b, " entries");
        }
        return k.s;
    }
    const Tensor &table = *cache.block_table;
    if (!table.is_cuda() || table.get_device_index() != device) {
        fail("expected block_table on cuda:", device, " as q");
    }
    if (dtype_of(table) != aoti_torch_dtype_int32() || table.dim() != 2 || table.sizes()[0] != b ||
        (table.sizes()[1] > 1 && table.strides()[1] != 1)) {
        fail("expected block_table of dtype int32, shape (", b,
             ", max_pages) and stride 1 in its last dimension");
    }
    if (k.s < 1) {
        fail("expected pages of at least one token");
    }
    if (cache.cache_batch_idx.has_value() || cache.cache_leftpad.has_value()) {
        fail("expected neither cache_batch_idx nor cache_leftpad with a block_table");
    }
    params.block_table_ptr = static_cast<const int32_t *>(table.const_data_ptr());
    params.block_table_batch_stride = table.strides()[0];
    params.b_k = static_cast<int32_t>(b);
    const int64_t columns = table.sizes()[1];
    if (columns > kMaxSeqlen / k.s) {
        fail("expected a block_table of at most ", kMaxSeqlen / k.s, " columns with pages of ", k.s,
             " tokens, got ", columns);
    }
    return columns * k.s;
}

// Reads the layout of a (b, s, heads, d) tensor that a kernel reads or writes in vectors.
inline Layout read_vectors(const Tensor &tensor, const char *name, int32_t dtype, int32_t device) {
    check_placement(tensor, name, dtype, device);
    const Layout layout = read_layout(tensor, name, 4);
    check_vectorised(layout, tensor.const_data_ptr(), name);
    return layout;
}

inline const void *read_table(const Tensor &table, const char *name, int32_t dtype,
                              int32_t device) {
    check_placement(table, name, dtype, device);
    if (table.dim() != 2 || !table.is_contiguous()) {
        fail("expected contiguous ", name, " of shape (seqlen_ro, rotary_dim / 2)");
    }
    return table.const_data_ptr();
}

// Whether the address ranges of x and y, each from its first to its last element, overlap. Neither
// is empty.
inline bool overlap(const void *x, const Layout &xl, const void *y, const Layout &yl) {
    const auto bytes = [](const Layout &l) {
        return 2 * ((l.b - 1) * l.batch_stride + (l.s - 1) * l.row_stride +
                    (l.h - 1) * l.head_stride + l.d);
    };
    const auto begin_x = reinterpret_cast<uintptr_t>(x), begin_y = reinterpret_cast<uintptr_t>(y);
    return begin_x < begin_y + bytes(yl) && begin_y < begin_x + bytes(xl);
}

// Checks that the cache can be written to, and does not overlap the new keys and values, which are
// read meanwhile.
inline void check_written(const Flash_fwd_params &params, const Inputs &inputs, const Layout &k,
                          const Layout &v) {
    for (const Layout &x : {inputs.k, inputs.v}) {
        if ((x.batch_stride == 0 && x.b > 1) || (x.row_stride == 0 && x.s > 1) ||
            (x.head_stride == 0 && x.h > 1)) {
            fail("expected a cache with memory for each element, as k and v are written to it");
        }
    }
    if (k.b == 0 || k.s == 0 || inputs.k.b == 0) {
        return;  // nothing is written
    }
    for (const auto &[ptr, layout] :
         {std::pair{params.k_ptr, inputs.k}, std::pair{params.v_ptr, inputs.v}}) {
        if (overlap(ptr, layout, params.k_new_ptr, k) ||
            overlap(ptr, layout, params.v_new_ptr, v)) {
            fail("expected k and v that are not in the cache");
        }
    }
    if (params.k_ptr == params.v_ptr) {
        fail("expected k_cache and v_cache in places of their own, got both at one address");
    }
}

// Sets the new keys and values. room: tokens of a sequence that the cache has room for.
inline void set_new(Flash_fwd_params &params, const Cache &cache, const Inputs &inputs,
                    int64_t room) {
    const auto &[dtype, device, ql, kl, vl] = inputs;
    const Layout k = read_vectors(*cache.k, "k", dtype, device);
    const Layout v = read_vectors(*cache.v, "v", dtype, device);
    for (const Layout &x : {k, v}) {
        if (x.b != ql.b || x.s != k.s || x.h != kl.h || x.d != ql.d) {
            fail("expected k and v of shape (", ql.b, ", seqlen_new, ", kl.h, ", ", ql.d, ")");
        }
    }
    if (k.s > room) {
        fail("expected at most ", room, " new tokens, which the cache has room for, got ", k.s);
    }
    params.k_new_ptr = cache.k->const_data_ptr();
    params.v_new_ptr = cache.v->const_data_ptr();
    check_written(params, inputs, k, v);
    params.seqlen_new = static_cast<int32_t>(k.s);
    params.k_new_batch_stride = k.batch_stride;
    params.k_new_row_stride = k.row_stride;
    params.k_new_head_stride = k.head_stride;
    params.v_new_batch_stride = v.batch_stride;
    params.v_new_row_stride = v.row_stride;
    params.v_new_head_stride = v.head_stride;
}

// Makes the kernel that appends rotate the queries into `rotated`, a contiguous (b, s, h, d).
inline void rotate_queries(Flash_fwd_params &params, const Layout &q, const Tensor &rotated) {
    params.q_unrotated_ptr = params.q_ptr;
    params.q_unrotated_batch_stride = q.batch_stride;
    params.q_unrotated_row_stride = q.row_stride;
    params.q_unrotated_head_stride = q.head_stride;
    params.q_ptr = rotated.const_data_ptr();
}

// Sets what is appended to a cache. room: tokens of a sequence that it has room for. Returns the
// tensor of the rotated queries, to which params.q_ptr then points, or none where nothing is
// rotated.
inline MaybeTensor set_append(Flash_fwd_params &params, const Cache &cache, const Inputs &inputs,
                              const Options &options, int64_t room) {
    const bool rotates = cache.rotary_cos.has_value();
    if (cache.k.has_value() != cache.v.has_value() || rotates != cache.rotary_sin.has_value() ||
        (rotates && !cache.k.has_value())) {
        fail("expected k and v or neither, and rotary_cos and rotary_sin with them or neither");
    }
    if (!cache.k.has_value()) {
        return std::nullopt;
    }
    set_new(params, cache, inputs, room);
    if (!rotates) {
        return std::nullopt;
    }
    const auto &[dtype, device, ql, kl, vl] = inputs;
    params.rotary_cos_ptr = read_table(*cache.rotary_cos, "rotary_cos", dtype, device);
    params.rotary_sin_ptr = read_table(*cache.rotary_sin, "rotary_sin", dtype, device);
    const int64_t *const size = cache.rotary_cos->sizes().data();
    const int64_t *const of_sin = cache.rotary_sin->sizes().data();
    if (size[0] != of_sin[0] || size[1] != of_sin[1] || size[0] > kMaxInt32 || size[1] < 1 ||
        2 * size[1] > ql.d) {
        fail(
            "expected rotary_cos and rotary_sin of one shape, (seqlen_ro, rotary_dim / 2) with 2 "
            "<= rotary_dim <= ",
            ql.d);
    }
    if (size[0] < room) {
        fail("expected rotary_cos of at least ", room, " rows, got ", size[0]);
    }
    params.seqlen_rotary = static_cast<int32_t>(size[0]);
    params.rotary_dim = static_cast<int32_t>(2 * size[1]);
    const bool is_local = options.causal || options.window_left >= 0 || options.window_right >= 0;
    params.rotary_q_step = is_local ? 1 : 0;
    params.rotary_interleaved = cache.rotary_interleaved ? 1 : 0;
    const int64_t sizes[] = {ql.b, ql.s, ql.h, ql.d};
    const int64_t strides[] = {ql.s * ql.h * ql.d, ql.h * ql.d, ql.d, 1};
    Tensor rotated = empty(sizes, strides, dtype, device);
    rotate_queries(params, ql, rotated);
    return rotated;
}

// Allocates the outputs: out as empty_like(q), softmax_lse contiguous float32 (b, h, seqlen_q); of
// a ragged batch out is contiguous, and softmax_lse (h, total_q). Over a cache softmax_lse is (b,
// h, seqlen_q) with the strides of (h, b, seqlen_q). An LSE that is not wanted is None.
inline std::tuple<Tensor, Tensor> make_outputs(const Tensor &q, const Inputs &inputs, bool is_cache,
                                               bool returns_lse) {
    const auto &[dtype, device, ql, kl, vl] = inputs;
    const auto make_lse = [&](const auto &sizes, const auto &strides) {
        const int32_t float32 = aoti_torch_dtype_float32();
        return returns_lse ? empty(sizes, strides, float32, inputs.device) : Tensor();
    };
    // torch never makes a contiguous stride smaller than 1, even beside a dimension of size 0.
    const int64_t rows = std::max(ql.s, int64_t(1));
    if (q.dim() == 3) {
        const int64_t lse_sizes[] = {ql.h, ql.s}, lse_strides[] = {rows, 1};
        const int64_t out_sizes[] = {ql.s, ql.h, ql.d}, out_strides[] = {ql.h * ql.d, ql.d, 1};
        return {empty(out_sizes, out_strides, dtype, device), make_lse(lse_sizes, lse_strides)};
    }
    const int64_t lse_sizes[] = {ql.b, ql.h, ql.s};
    if (is_cache) {
        const int64_t sizes[] = {ql.b, ql.s, ql.h, ql.d};
        const int64_t strides[] = {rows * ql.h * ql.d, ql.h * ql.d, ql.d, 1};
        const int64_t lse_strides[] = {rows, std::max(ql.b, int64_t(1)) * rows, 1};
        return {empty(sizes, strides, dtype, device), make_lse(lse_sizes, lse_strides)};
    }
    const int64_t lse_strides[] = {ql.h * rows, rows, 1};
    Tensor lse = make_lse(lse_sizes, lse_strides);
    return {empty_like(q, dtype, device), std::move(lse)};
}

inline void set_splits(Problem &problem, const Options &options) {
    const int64_t most = problem.dropout != 0 ? 1 : kMaxSplitsGiven;
    if (options.num_splits < -1 || options.num_splits > most) {
        fail("expected 0 <= num_splits <= ", most, problem.dropout != 0 ? " with dropout" : "",
             ", got ", options.num_splits);
    }
    problem.num_splits = static_cast<int32_t>(options.num_splits);
}

// Sets the sizes of a problem, and what follows from the choice for it.
inline void set_problem(Flash_fwd_params &params, const Problem &problem, const Choice &choice,
                        const Queries &queries, bool is_ragged) {
    set_sizes(params, problem);
    params.pack_shift =
        choice.pack_heads != 0 ? std::bit_width(static_cast<uint32_t>(params.h_h_k_ratio) - 1) : 0;
    const int tile_m = static_cast<const Flash_kernel *>(choice.kernel)->tile_m;
    const int64_t heads = params.pack_shift > 0 ? problem.h_k : problem.h;
    const int64_t rows = (is_ragged ? queries.total : problem.seqlen_q) << params.pack_shift;
    params.num_splits = choice.num_splits;
    params.split_blocks = choice.split_blocks;
    params.split_ctas = choice.split_ctas;
    const int64_t of_a_head = is_ragged ? plan_capacity(rows, problem.b, tile_m, params.num_splits,
                                                        params.split_ctas, heads)
                                        : problem.b * ((rows + tile_m - 1) / tile_m);
    // The grid is one-dimensional, and tiles and rows are numbered by 32-bit ints.
    const int64_t tiles = of_a_head * heads;
    const int64_t partial = partial_rows(rows, tile_m, params.num_splits, params.split_ctas, heads);
    if (rows > kMaxSeqlen || tiles > kMaxTiles || partial > kMaxSeqlen) {
        fail("expected at most ", kMaxTiles, " tiles of ", tile_m, " query rows, got ", tiles,
             "; split the batch");
    }
    if (is_ragged) {
        params.total_q = static_cast<int32_t>(queries.total);
        params.total_k = problem.seqlen_k;
        params.plan_capacity = static_cast<int32_t>(of_a_head);
        params.partial_rows = static_cast<int32_t>(partial);
    }
}

// Allocates the plan of a ragged batch, and behind it the workspace for partial results of split
// tiles and an LSE that is not returned.
inline Tensor make_plan(Flash_fwd_params &params, int32_t device) {
    const int64_t plan =
        plan_words(params.plan_capacity, params.b, params.total_q, params.num_splits);
    const int64_t partial =
        int64_t(params.pack_shift > 0 ? params.h_k : params.h) * params.partial_rows;
    const int64_t lse = params.softmax_lse_ptr == nullptr ? int64_t(params.h) * params.total_q : 0;
    const int64_t words[] = {plan + partial * (params.d + 1) + lse}, strides[] = {1};
    Tensor memory = empty(words, strides, aoti_torch_dtype_int32(), device);
    auto *const begin = static_cast<int32_t *>(memory.mutable_data_ptr());
    params.plan_ptr = begin;
    if (partial > 0) {
        params.o_partial_ptr = reinterpret_cast<float *>(begin + plan);
        params.lse_partial_ptr = params.o_partial_ptr + partial * params.d;
    }
    if (lse > 0) {
        params.softmax_lse_ptr = reinterpret_cast<float *>(begin + (words[0] - lse));
    }
    return memory;
}

// Plans take the queries (b, seqlen_q, h, d) over a cache for (b * seqlen_q, h, d): folds() says
// whether strides allow that, fold_batch() sets the strides.
inline bool folds(const Layout &q) {
    return q.b <= 1 || q.s <= 1 || q.batch_stride == q.s * q.row_stride;
}
inline void fold_batch(Flash_fwd_params &params, const Layout &q, const Layout &out) {
    params.q_row_stride = q.s > 1 ? q.row_stride : q.batch_stride;
    params.q_head_stride = q.head_stride;
    params.o_row_stride = out.s > 1 ? out.row_stride : out.batch_stride;
    params.q_batch_stride = params.o_batch_stride = 0;
}

inline void check_launch(const Flash_kernel &kernel, int32_t error) {
    if (error != 0) {
        fail<KernelFailure>(kernel.name, " failed to launch: ", kernel.error_string(error));
    }
}

// A call over a cache, to be repeated on other tensors of the same sizes: other layers of a model.
struct Planned {
    const Flash_kernel *kernel = nullptr;
    Flash_fwd_params params{};
    Inputs inputs{};
    bool appends = false;
    MaybeTensor workspace, rotated;
};

// Enqueues the plan kernel of a ragged batch and the attention kernel. Returns the plan's memory,
// which the caller gives back to the stream's once all is enqueued.
inline MaybeTensor enqueue(const Flash_kernel &kernel, Flash_fwd_params &params, bool is_ragged,
                           int32_t device) {
    void *const stream = current_stream(device);
    MaybeTensor plan;
    if (is_ragged) {
        plan = make_plan(params, device);
        check_launch(kernel, kernel.plan(&params, stream));
    }
    // Without queries the call only appends, which the plan kernel has done.
    if (!is_ragged || params.total_q > 0) {
        check_launch(kernel, kernel.launch(&params, stream));
    }
    return plan;
}

// Runs a forward. lengths: of a ragged batch, whose q, k and v are packed to (total, heads, d), or
// of a call over a cache, whose k and v are (entries or pages, seqlen, h_k, d); null: of a dense
// batch. planned: if given, gets what run_planned() needs.
inline std::tuple<Tensor, Tensor> forward(const Tensor &q, const Tensor &k, const Tensor &v,
                                          double softmax_scale, const Options &options,
                                          const Lengths *lengths = nullptr,
                                          const Cache *cache = nullptr,
                                          Planned *planned = nullptr) {
    const bool is_packed = lengths != nullptr && lengths->cu_seqlens_q != nullptr;
    const Inputs inputs =
        read_inputs(q, k, v, is_packed ? 3 : 4, cache != nullptr, options.heads_first);
    const auto &[dtype, device, ql, kl, vl] = inputs;
    const bool appends = cache != nullptr && cache->k.has_value();

    Flash_fwd_params params{};
    params.q_ptr = q.const_data_ptr();
    params.k_ptr = k.const_data_ptr();
    params.v_ptr = v.const_data_ptr();
    params.sinks_ptr = read_sinks(options, ql, device);
    // Misaligned inputs are copied here, on the GPU of the tensors, as a traced program does not
    // know where its inputs start. A cache that is written to is not copied.
    const bool copies_kv = !appends && (misaligned(params.k_ptr) || misaligned(params.v_ptr));
    if (options.copies && (misaligned(params.q_ptr) || copies_kv)) {
        const torch::stable::accelerator::DeviceGuard guard(device);
        return forward(aligned(q), appends ? k : aligned(k), appends ? v : aligned(v),
                       softmax_scale, options, lengths, cache, planned);
    }
    if (options.copies && appends && cache->v.has_value() &&
        (misaligned(cache->k->const_data_ptr()) || misaligned(cache->v->const_data_ptr()))) {
        const torch::stable::accelerator::DeviceGuard guard(device);
        Cache copied = *cache;
        copied.k = aligned(*cache->k);
        copied.v = aligned(*cache->v);
        return forward(q, k, v, softmax_scale, options, lengths, &copied, planned);
    }
    if (cache != nullptr && !is_packed && !folds(ql)) {
        const torch::stable::accelerator::DeviceGuard guard(device);
        const auto contiguous = torch::headeronly::MemoryFormat::Contiguous;
        return forward(call_torch("aten::contiguous", q, contiguous), k, v, softmax_scale, options,
                       lengths, cache, planned);
    }
    check_vectorised(ql, params.q_ptr, "q");
    check_vectorised(kl, params.k_ptr, "k");
    check_vectorised(vl, params.v_ptr, "v");
    set_scales(params, softmax_scale, options.softcap);

    const Queries queries = read_queries(ql, lengths);
    if (lengths != nullptr) {
        set_lengths(params, *lengths, queries.b, device);
    }
    const int64_t room = cache != nullptr ? set_cache(params, *cache, kl, queries.b, device) : kl.s;
    set_slopes(params, options, queries.b, ql.h, device);
    set_dropout(params, options, device);
    const torch::stable::accelerator::DeviceGuard guard(device);
    MaybeTensor rotated;
    if (cache != nullptr) {
        rotated = set_append(params, *cache, inputs, options, room);
    }
    const int64_t known = keys_known(params, lengths, appends, room);
    if (ql.b == 0 || (ql.s == 0 && params.seqlen_new == 0)) {
        return make_outputs(q, inputs, cache != nullptr, options.returns_lse);
    }
    Problem problem = make_problem(inputs);
    problem.seqlen_k = static_cast<int32_t>(room);
    problem.cache = cache != nullptr;
    problem.page_size = params.block_table_ptr != nullptr ? params.page_size : 0;
    set_options(problem, options, queries, params.rng_state_ptr != nullptr);
    set_splits(problem, options);
    const Choice choice =
        kernel_table().find(rounded(asked_of(problem, queries, kl, lengths, options)));
    set_problem(params, problem, choice, queries, lengths != nullptr);
    params.seqlen_k = static_cast<int32_t>(kl.b > 0 ? known : 0);

    std::tuple<Tensor, Tensor> outputs =
        make_outputs(q, inputs, cache != nullptr, options.returns_lse);
    const Layout ol = read_layout(std::get<0>(outputs), "out", q.dim(), options.heads_first);
    params.o_ptr = std::get<0>(outputs).mutable_data_ptr();
    check_vectorised(ol, params.o_ptr, "out");
    if (options.returns_lse) {
        params.softmax_lse_ptr = static_cast<float *>(std::get<1>(outputs).mutable_data_ptr());
    }
    set_strides(params, ql, kl, vl, ol);
    params.softmax_lse_batch_stride = ql.h * ql.s;
    params.softmax_lse_head_stride = cache != nullptr ? queries.total : ql.s;
    if (cache != nullptr) {
        fold_batch(params, rotated.has_value() ? read_layout(*rotated, "q", 4) : ql, ol);
    }
    const auto *kernel = static_cast<const Flash_kernel *>(choice.kernel);
    MaybeTensor workspace = enqueue(*kernel, params, lengths != nullptr, device);
    if (planned != nullptr) {
        *planned = {kernel, params, inputs, appends, std::move(workspace), std::move(rotated)};
    }
    return outputs;
}

}  // namespace flash
