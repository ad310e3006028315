// Writes new keys and values to a cache, in CTAs of the plan kernel, and rotates the new keys and
// the queries (rotary position embedding, Su et al., https://arxiv.org/abs/2104.09864).
#pragma once

#include <cutlass/numeric_types.h>

#include <bit>
#include <cstdint>
#include <cute/config.hpp>
#include <cute/numeric/math.hpp>
#include <type_traits>

#include "flash.h"

namespace flash {

template <DType kDType>
struct Append {
    using Element = std::conditional_t<kDType == DType::fp16, cutlass::half_t, cutlass::bfloat16_t>;
    static constexpr int kVec = 8;        // elements that a thread moves at a time
    static constexpr int kMaxCtas = 512;  // at this limit threads move vectors of several tokens
    struct alignas(16) Vec {
        Element x[kVec];
    };
    struct alignas(16) Words {  // of two elements each
        uint32_t x[kVec / 2];
    };

    // The position of a vector in a (b, rows, heads, d) tensor.
    struct Place {
        int col, head, row, batch;
    };

    CUTE_HOST_DEVICE static bool rotates(Flash_fwd_params const &params) {
        return params.rotary_cos_ptr != nullptr;
    }
    // Returns the rows of a batch entry: of new keys and values, of queries to be rotated, or the
    // more of both.
    CUTE_HOST_DEVICE static int num_rows(Flash_fwd_params const &params) {
        return cute::max(params.seqlen_new, rotates(params) ? params.seqlen_q : 0);
    }
    // Returns the heads of a row: first those of keys and values, then those of queries.
    CUTE_HOST_DEVICE static int num_heads(Flash_fwd_params const &params) {
        return params.h_k + (rotates(params) ? params.h : 0);
    }
    CUTE_HOST_DEVICE static int num_vecs(Flash_fwd_params const &params) {
        return num_heads(params) * (params.d / kVec);
    }
    // num_pieces() returns how many CTAs a row takes, at one vector a thread; rows_at_once(), how
    // many rows a CTA has threads for, at least 1.
    CUTE_HOST_DEVICE static int num_pieces(Flash_fwd_params const &params, int threads) {
        return (num_vecs(params) + threads - 1) / threads;
    }
    CUTE_HOST_DEVICE static int rows_at_once(Flash_fwd_params const &params, int threads) {
        return cute::max(threads / num_vecs(params), 1);
    }
    // Returns the CTAs to be launched, a multiple of num_pieces().
    static unsigned num_ctas(Flash_fwd_params const &params, int threads) {
        int64_t const rows = int64_t(params.b) * num_rows(params);
        int const at_once = rows_at_once(params, threads), pieces = num_pieces(params, threads);
        int64_t const most = cute::max(kMaxCtas / pieces, 1);
        return static_cast<unsigned>(cute::min((rows + at_once - 1) / at_once, most) * pieces);
    }

    CUTE_DEVICE static Vec load(Element const *x) { return *reinterpret_cast<Vec const *>(x); }
    CUTE_DEVICE static bool is_aligned(Element const *x) {
        return reinterpret_cast<uintptr_t>(x) % sizeof(Vec) == 0;
    }

    // Returns the vector at `col` of a row x (d), rotated by row `position` of the tables.
    // It is unchanged where they have no such row.
    CUTE_DEVICE static Vec rotated(Flash_fwd_params const &params, Element const *x, int col,
                                   int64_t position) {
        Vec vec = load(x + col);
        if (params.rotary_cos_ptr == nullptr || col >= params.rotary_dim || position < 0 ||
            position >= params.seqlen_rotary) {
            return vec;
        }
        int const half = params.rotary_dim / 2;
        auto const *const cos =
            static_cast<Element const *>(params.rotary_cos_ptr) + position * half;
        auto const *const sin =
            static_cast<Element const *>(params.rotary_sin_ptr) + position * half;
        auto const turn = [](Element own, Element other, Element c, Element s, bool first) {
            float const part = float(other) * float(s);
            return Element(float(own) * float(c) + (first ? -part : part));
        };
        bool const interleaved = params.rotary_interleaved != 0;
        bool const aligned = half % kVec == 0 && is_aligned(cos) && is_aligned(sin);
        if (interleaved && aligned) {  // the vector's four pairs take half a vector of the tables
            int const pair = col / 2, before = pair % kVec;
            Vec const own = vec, c = load(cos + pair - before), s = load(sin + pair - before);
            CUTE_UNROLL
            for (int i = 0; i < kVec; ++i) {
                Element const of_c = before == 0 ? c.x[i / 2] : c.x[kVec / 2 + i / 2];
                Element const of_s = before == 0 ? s.x[i / 2] : s.x[kVec / 2 + i / 2];
                vec.x[i] = turn(own.x[i], own.x[i ^ 1], of_c, of_s, i % 2 == 0);
            }
            return vec;
        }
        if (aligned) {
            bool const first = col < half;
            int const pair = first ? col : col - half;
            Vec const other = load(x + (first ? col + half : pair));
            Vec const c = load(cos + pair), s = load(sin + pair);
            CUTE_UNROLL
            for (int i = 0; i < kVec; ++i) {
                vec.x[i] = turn(vec.x[i], other.x[i], c.x[i], s.x[i], first);
            }
            return vec;
        }
        // Element by element, as nvcc would load ahead, and spill. The vector is a queue: its first
        // element is taken out, and the result put in behind the last one. An index that is not
        // known when compiling would put it into local memory.
        auto words = std::bit_cast<Words>(vec);
        CUTE_NO_UNROLL
        for (int at = col; at < col + kVec; ++at) {
            Element one = Element::bitcast(static_cast<uint16_t>(words.x[0]));
            if (at < params.rotary_dim) {
                bool const first = interleaved ? at % 2 == 0 : at < half;
                int const pair = interleaved ? at / 2 : first ? at : at - half;
                int const other = interleaved ? at ^ 1 : first ? at + half : at - half;
                one = turn(one, x[other], cos[pair], sin[pair], first);
            }
            CUTE_UNROLL
            for (int i = 0; i < 3; ++i) {
                words.x[i] = words.x[i] >> 16 | words.x[i + 1] << 16;
            }
            words.x[3] = words.x[3] >> 16 | static_cast<uint32_t>(one.raw()) << 16;
        }
        return std::bit_cast<Vec>(words);
    }

    CUTE_DEVICE static int64_t tokens_before(Flash_fwd_params const &params, int batch) {
        return params.seqused_k_ptr != nullptr ? params.seqused_k_ptr[batch]
                                               : params.seqlen_k - params.seqlen_new;
    }

    // Finds the page, or entry, of a token, and its row there. Returns false if there is none.
    CUTE_DEVICE static bool find(Flash_fwd_params const &params, int batch, int64_t token,
                                 int64_t &page, int64_t &row) {
        int const *const entries = params.cache_batch_idx_ptr;
        int const entry = entries != nullptr ? entries[batch] : batch;
        if (entry < 0 || entry >= params.b_k || token < 0 || token >= params.seqlen_k) {
            return false;
        }
        page = entry;
        row = token;
        if (params.block_table_ptr != nullptr) {
            int const column = static_cast<int>(token) / params.page_size;
            page = params.block_table_ptr[entry * params.block_table_batch_stride + column];
            row = token - int64_t(column) * params.page_size;
        }
        return page >= 0 && page < params.num_pages;
    }

    CUTE_DEVICE static void append(Flash_fwd_params const &params, Place const &place) {
        int64_t const token = tokens_before(params, place.batch) + place.row;
        int64_t page, row;
        if (!find(params, place.batch, token, page, row)) {
            return;
        }
        auto const *const k = static_cast<Element const *>(params.k_new_ptr) +
                              place.batch * params.k_new_batch_stride +
                              place.row * params.k_new_row_stride +
                              place.head * params.k_new_head_stride;
        auto const *const v = static_cast<Element const *>(params.v_new_ptr) +
                              place.batch * params.v_new_batch_stride +
                              place.row * params.v_new_row_stride +
                              place.head * params.v_new_head_stride;
        auto *const k_cache = static_cast<Element *>(const_cast<void *>(params.k_ptr)) +
                              page * params.k_batch_stride + row * params.k_row_stride +
                              place.head * params.k_head_stride;
        auto *const v_cache = static_cast<Element *>(const_cast<void *>(params.v_ptr)) +
                              page * params.v_batch_stride + row * params.v_row_stride +
                              place.head * params.v_head_stride;
        *reinterpret_cast<Vec *>(k_cache + place.col) = rotated(params, k, place.col, token);
        *reinterpret_cast<Vec *>(v_cache + place.col) = load(v + place.col);
    }

    CUTE_DEVICE static void rotate_query(Flash_fwd_params const &params, Place const &place) {
        int64_t const position =
            tokens_before(params, place.batch) + place.row * params.rotary_q_step;
        auto const *const from = static_cast<Element const *>(params.q_unrotated_ptr) +
                                 place.batch * params.q_unrotated_batch_stride +
                                 place.row * params.q_unrotated_row_stride +
                                 place.head * params.q_unrotated_head_stride;
        int64_t const row = int64_t(place.batch) * params.seqlen_q + place.row;
        auto *const to = static_cast<Element *>(const_cast<void *>(params.q_ptr)) +
                         row * params.q_row_stride + place.head * params.q_head_stride;
        *reinterpret_cast<Vec *>(to + place.col) = rotated(params, from, place.col, position);
    }

    // Appends and rotates as CTA `cta` of `ctas`. Divisions are of 32 bits, to keep the code short:
    // a kernel that takes this little time fetches its code from memory.
    CUTE_DEVICE static void run(Flash_fwd_params const &params, int cta, int ctas) {
        int const threads = blockDim.x, rows = num_rows(params), vecs = num_vecs(params);
        int const at_once = rows_at_once(params, threads), pieces = num_pieces(params, threads);
        int const within = cta % pieces * threads + threadIdx.x;  // among a round's vectors
        int const own_row = pieces > 1 ? 0 : within / vecs;
        int const vec = within - own_row * vecs;
        if (own_row >= at_once || vec >= vecs) {
            return;
        }
        int const first = cta / pieces * at_once + own_row, step = ctas / pieces * at_once;
        int const of_head = params.d / kVec, head = vec / of_head;
        Place place{vec % of_head * kVec, head, first % rows, first / rows};
        int const step_rows = step % rows, step_entries = step / rows;
        CUTE_NO_UNROLL
        while (place.batch < params.b) {
            if (head < params.h_k) {
                if (place.row < params.seqlen_new) append(params, place);
            } else if (place.row < params.seqlen_q) {
                rotate_query(params, {place.col, head - params.h_k, place.row, place.batch});
            }
            place.row += step_rows;
            place.batch += step_entries;
            if (place.row >= rows) {
                place.row -= rows;
                ++place.batch;
            }
        }
    }
};

}  // namespace flash
