// The lengths of a ragged batch, and of a cache, in the binding.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "flash.h"
#include "flash_api_tensors.h"
#include "kernel_table.h"

namespace flash {

// The lengths of sequences: device tensors, and what the host knows. Without cu_seqlens_q the
// queries are (b, seqlen_q, h, d), over a cache.
struct Lengths {
    const Tensor *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr;
    const MaybeTensor *seqused_q = nullptr, *seqused_k = nullptr;
    int64_t max_seqlen_q = 0, max_seqlen_k = 0;
    std::optional<int64_t> in_cache = {};  // tokens of every sequence before an append, if known
};

// How the queries are stored.
struct Queries {
    int64_t b, s, total;  // of a ragged batch s is the longest sequence that is computed
    bool packed;          // (total, h, d), else (b, s, h, d)
};

inline const int32_t *read_index(const Tensor &index, const char *name, int64_t size,
                                 int32_t device) {
    if (!index.is_cuda() || index.get_device_index() != device) {
        fail("expected ", name, " on cuda:", device, " as q");
    }
    if (dtype_of(index) != aoti_torch_dtype_int32() || index.dim() != 1 ||
        index.sizes()[0] != size || !index.is_contiguous()) {
        fail("expected contiguous ", name, " of dtype int32 and shape (", size, ")");
    }
    return static_cast<const int32_t *>(index.const_data_ptr());
}

inline const int32_t *read_index(const MaybeTensor *index, const char *name, int64_t size,
                                 int32_t device) {
    return index != nullptr && index->has_value() ? read_index(**index, name, size, device)
                                                  : nullptr;
}

// Returns the number of sequences of a ragged batch.
inline int64_t count_sequences(const Lengths &lengths) {
    if (lengths.cu_seqlens_q->dim() != 1 || lengths.cu_seqlens_q->sizes()[0] < 1) {
        fail("expected cu_seqlens_q of shape (b + 1)");
    }
    if (lengths.max_seqlen_q < 0 || lengths.max_seqlen_k < 0) {
        fail("expected max_seqlen_q and max_seqlen_k >= 0, got ", lengths.max_seqlen_q, " and ",
             lengths.max_seqlen_k);
    }
    return lengths.cu_seqlens_q->sizes()[0] - 1;
}

inline Queries read_queries(const Layout &q, const Lengths *lengths) {
    if (lengths == nullptr || lengths->cu_seqlens_q == nullptr) {
        const int64_t total = q.b * q.s;
        if (lengths != nullptr && total > kMaxSeqlen) {
            fail("expected batch size times seqlen_q <= ", kMaxSeqlen, ", got ", q.b, " times ",
                 q.s);
        }
        return {.b = q.b, .s = q.s, .total = total, .packed = false};
    }
    // Rows of a sequence from max_seqlen_q on count as rows of no sequence.
    return {.b = count_sequences(*lengths),
            .s = std::min(lengths->max_seqlen_q, q.s),
            .total = q.s,
            .packed = true};
}

inline void set_lengths(Flash_fwd_params &params, const Lengths &lengths, int64_t b,
                        int32_t device) {
    if (b > kMaxInt32 / 4) {
        fail("expected at most ", kMaxInt32 / 4, " sequences, got ", b);
    }
    if (lengths.cu_seqlens_q != nullptr) {
        params.cu_seqlens_q_ptr = read_index(*lengths.cu_seqlens_q, "cu_seqlens_q", b + 1, device);
        params.cu_seqlens_k_ptr = read_index(*lengths.cu_seqlens_k, "cu_seqlens_k", b + 1, device);
    }
    params.seqused_q_ptr = read_index(lengths.seqused_q, "seqused_q", b, device);
    params.seqused_k_ptr = read_index(lengths.seqused_k, "seqused_k", b, device);
}

// Sets what depends on the queries and the options, with the mask.
inline void set_options(Problem &problem, const Options &options, const Queries &queries,
                        bool dropout) {
    problem.b = static_cast<int32_t>(queries.b);
    problem.seqlen_q = static_cast<int32_t>(queries.s);
    problem.softcap = options.softcap > 0;
    problem.alibi = options.alibi_slopes.has_value();
    problem.dropout = dropout;
    set_mask(problem, options);
}

// Returns the most keys that a sequence may have: `room`, which the cache has room for, or fewer
// where the host knows how many tokens the cache has.
inline int64_t keys_known(const Flash_fwd_params &params, const Lengths *lengths, bool appends,
                          int64_t room) {
    if (lengths == nullptr || !lengths->in_cache.has_value()) {
        if (appends && params.seqused_k_ptr == nullptr) {
            fail("expected cache_seqlens with k and v");
        }
        return room;
    }
    const int64_t before = *lengths->in_cache;
    if (params.seqused_k_ptr != nullptr || before < 0 || before > room - params.seqlen_new) {
        fail("expected one length of all sequences, from 0 to ", room - params.seqlen_new, ", got ",
             before);
    }
    return before + params.seqlen_new;
}

// Returns the problem that the kernel is chosen for, with lengths that stand for those of a batch.
inline Problem asked_of(const Problem &problem, const Queries &queries, const Layout &k,
                        const Lengths *lengths, const Options &options) {
    Problem asked = problem;
    asked.varlen = queries.packed ? 1 : 0;
    if (options.num_splits > 0) {
        asked.b = 1;
        asked.seqlen_q = queries.packed ? 128 : problem.seqlen_q;
        asked.seqlen_k = 4096;
        if (asked.mask == MaskKind::local) {
            set_window(asked, options);  // that of problem is clamped to this batch's tensors
        }
        return asked;
    }
    if (lengths == nullptr) {
        return asked;
    }
    asked.b = rounded_length(problem.b);
    if (queries.packed) {
        const int64_t keys = problem.cache != 0 ? queries.b * int64_t(problem.seqlen_k) : k.s;
        const auto length = [&](int64_t total, int64_t longest) {
            if (problem.backward != 0) {
                // The mean, of at least 2, as the cost of each sequence's padding goes by it,
                // however long the longest one is.
                longest = std::min(longest, std::max((total - 1) / queries.b + 1, int64_t(2)));
            }
            return typical_length(total, queries.b, longest);
        };
        asked.seqlen_q = length(queries.total, lengths->max_seqlen_q);
        asked.seqlen_k = length(keys, lengths->max_seqlen_k);
    }
    return asked;
}

}  // namespace flash
