// What softcap, ALiBi and dropout change in scores, weights and dS in the sm90 class's backward.
#pragma once

#include <cute/tensor.hpp>

#include "dropout.h"
#include "flash.h"
#include "score_mod.h"
#include "utils.h"
#include "work_tile.h"

namespace flash {

using namespace cute;

// The options of a step of one query head. A warp has 16 keys. A block is the warp's part of 16
// queries, eight elements of each thread: a k16 step of dV += P^T dO, and a 16 x 16 block of
// DropoutMask.
template <class Traits>
struct WeightsBwdSm90 {
    static constexpr BwdConfig C = Traits::kConfig;
    // Whether P is rounded for dV as soon as it is computed, because it is then multiplied by the
    // derivatives of the softcap: kept until dS, they would take registers of their own.
    static constexpr bool kRoundsEarly = C.softcap;

    Flash_bwd_params const &params;
    WorkTile const &tile;
    int const head;         // of the queries
    int const first_query;  // of this thread, in the sequence
    int const first_key;

    // Applies ALiBi to block k of S^T. Masked scores stay -inf.
    template <class Block>
    CUTE_DEVICE void lower(Block &block, int k) const {
        if constexpr (C.alibi) {
            int64_t const entry = tile.batch * params.alibi_slopes_batch_stride;
            float const slope = -params.alibi_slopes_ptr[entry + head] * params.alibi_scale;
            using Acc = Layout<Shape<Shape<_2, _2>, _1, _2>>;
            lower_scores(
                make_tensor(block.data(),
                            select<1, 0>(layout_acc_rowcol(Acc{}))),  // (queries, keys)
                [&](int) { return slope; },
                [&](int i) {
                    int const query = first_query + 16 * k + Traits::query_of(0, i);
                    return query + tile.seqlen_k - tile.seqlen_q;
                },
                first_key, [](int j) { return Traits::key_of(0, j); });
        }
    }

    // Negates the dropped weights of block k of P^T. This takes two calls of the generator, for
    // neighbouring queries. The thread of an even key and that of the next key each need half of
    // every word of both calls, so each makes one of the calls, and they exchange halves.
    template <class Block>
    CUTE_DEVICE void mark(Block &block, int k) const {
        if constexpr (C.dropout) {
            DropoutMask mask{params};
            mask.load();
            bool const odd = first_key % 2 != 0;
            uint32_t const of_head = static_cast<uint32_t>(tile.batch) * params.h + head;
            uint32_t random[4];
            mask.draw(random, mask.row_of(first_query + 16 * k + odd), mask.column_of(first_key),
                      of_head);
            CUTE_UNROLL
            for (int i = 0; i < 2; ++i) {  // keys 8 apart: two words each, for queries 8 apart
                uint32_t const first = random[2 * i], second = random[2 * i + 1];
                uint32_t const low = (first & 0xFFFF) | second << 16;
                uint32_t const high = first >> 16 | (second & 0xFFFF0000);
                uint32_t const own = odd ? high : low;
                uint32_t const other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 4);
                drop(block, 2 * i, odd ? other : own);
                drop(block, 2 * i + 1, odd ? own : other);
            }
        }
    }

    // Rounds the kept weights of P^T to an operand; the dropped ones become 0.
    template <class Weights, class Rounded>
    CUTE_DEVICE static void round(Weights const &weights, Rounded &rounded) {
        if constexpr (C.dropout) {
            Tensor kept = make_fragment_like(weights);
            CUTE_UNROLL
            for (int i = 0; i < size(kept); ++i) {
                kept(i) = fmaxf(weights(i), 0.f);
            }
            convert(kept, rounded);
        } else {
            convert(weights, rounded);
        }
    }

    // Multiplies P^T by the derivatives of the softcap. capped: its scores ahead of ALiBi, -inf
    // where they are masked.
    template <class Block, class Capped>
    CUTE_DEVICE static void multiply(Block &block, Capped const &capped) {
        CUTE_UNROLL
        for (int i = 0; i < size(block); ++i) {
            block(i) *= derivative_of_capped(fmaxf(capped(i), -1.f));
        }
    }

    // Returns an element of dS, from P, which mark() and multiply() may have changed, and dP, an
    // element of dO V^T.
    CUTE_DEVICE static float ds(Flash_bwd_params const &params, float p, float dp, float d) {
        if constexpr (C.dropout) {
            dp = p < 0.f ? 0.f : dp * params.dropout_scale;
            p = fabsf(p);
        }
        return p * (dp - d);
    }

  private:
    // Negates elements i and i + 4 if the lower and the upper half of the word, respectively, drop
    // them.
    template <class Block>
    CUTE_DEVICE void drop(Block &block, int i, uint32_t word) const {
        constexpr uint32_t kSign = 0x80000000;
        uint32_t const dropped = halves_less(word, params.dropout_bound) ^ params.dropout_flip;
        block(i) = __uint_as_float(__float_as_uint(block(i)) ^ (dropped << 16 & kSign));
        block(i + 4) = __uint_as_float(__float_as_uint(block(i + 4)) ^ (dropped & kSign));
    }
};

}  // namespace flash
