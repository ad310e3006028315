// Writes new keys and values to a cache, in the CTAs of the kernel that plans, and rotates them and
// the queries (rotary position embedding, Su et al., https://arxiv.org/abs/2104.09864).
#pragma once

#include <cutlass/numeric_types.h>

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
    static constexpr int kMaxCtas = 512;  // then threads move several vectors
    struct alignas(16) Vec {
        Element x[kVec];
    };

    // A vector of a (b, rows, heads, d) tensor.
    struct Place {
        int col, head, row, batch;

        CUTE_DEVICE static Place of(int64_t vec, int rows, int heads, int d) {
            int const vecs = d / kVec;
            int64_t const row = vec / vecs / heads;
            return {static_cast<int>(vec % vecs) * kVec, static_cast<int>(vec / vecs % heads),
                    static_cast<int>(row % rows), static_cast<int>(row / rows)};
        }
    };

    CUTE_HOST_DEVICE static int64_t new_vecs(Flash_fwd_params const &params) {
        return int64_t(params.b) * params.seqlen_new * params.h_k * (params.d / kVec);
    }
    CUTE_HOST_DEVICE static int64_t query_vecs(Flash_fwd_params const &params) {
        bool const rotates = params.rotary_cos_ptr != nullptr;
        return rotates ? int64_t(params.total_q) * params.h * (params.d / kVec) : 0;
    }
    static unsigned num_ctas(Flash_fwd_params const &params, int threads) {
        int64_t const ctas = (new_vecs(params) + query_vecs(params) + threads - 1) / threads;
        return static_cast<unsigned>(ctas < kMaxCtas ? ctas : kMaxCtas);
    }

    // The vector at `col` of a row x (d), rotated for `position`; as it is where the tables have no
    // such row.
    CUTE_DEVICE static Vec rotated(Flash_fwd_params const &params, Element const *x, int col,
                                   int64_t position) {
        Vec vec = *reinterpret_cast<Vec const *>(x + col);
        if (params.rotary_cos_ptr == nullptr || col >= params.rotary_dim || position < 0 ||
            position >= params.seqlen_rotary) {
            return vec;
        }
        int const half = params.rotary_dim / 2;
        auto const *const cos =
            static_cast<Element const *>(params.rotary_cos_ptr) + position * half;
        auto const *const sin =
            static_cast<Element const *>(params.rotary_sin_ptr) + position * half;
        Vec const before = vec;
        CUTE_UNROLL
        for (int i = 0; i < kVec; ++i) {
            int const at = col + i;
            if (at >= params.rotary_dim) {
                break;
            }
            bool const interleaved = params.rotary_interleaved != 0;
            bool const first = interleaved ? at % 2 == 0 : at < half;
            int const pair = interleaved ? at / 2 : first ? at : at - half;
            Element const other = interleaved ? before.x[i ^ 1] : x[first ? at + half : at - half];
            float const turn = float(other) * float(sin[pair]);
            vec.x[i] = Element(float(before.x[i]) * float(cos[pair]) + (first ? -turn : turn));
        }
        return vec;
    }

    CUTE_DEVICE static int64_t tokens_before(Flash_fwd_params const &params, int batch) {
        return params.seqused_k_ptr != nullptr ? params.seqused_k_ptr[batch]
                                               : params.seqlen_k - params.seqlen_new;
    }

    // The page, or entry, and the row in it of a token; false: there is none.
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
        *reinterpret_cast<Vec *>(v_cache + place.col) =
            *reinterpret_cast<Vec const *>(v + place.col);
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

    // All vectors, shared among `ctas` CTAs, of which this is number `cta`.
    CUTE_DEVICE static void run(Flash_fwd_params const &params, int cta, int ctas) {
        int64_t const of_cache = new_vecs(params);
        int64_t const all = of_cache + query_vecs(params);
        int64_t const step = int64_t(ctas) * blockDim.x;
        for (int64_t i = int64_t(cta) * blockDim.x + threadIdx.x; i < all; i += step) {
            if (i < of_cache) {
                append(params, Place::of(i, params.seqlen_new, params.h_k, params.d));
            } else {
                rotate_query(params, Place::of(i - of_cache, params.seqlen_q, params.h, params.d));
            }
        }
    }
};

}  // namespace flash
