// Dropout: decides which attention weights count as 0. The mask is not stored but drawn again
// wherever it is needed.
#pragma once

#include <cute/tensor.hpp>

#include "flash.h"
#include "utils.h"
#include "work_tile.h"

namespace flash {

using namespace cute;

// a * b in one instruction: with 64-bit factors nvcc also multiplies their upper halves, which are
// 0, and adds these products.
CUTE_HOST_DEVICE uint64_t wide_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    uint64_t product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
#else
    return uint64_t(a) * b;
#endif
}

// Whether a < b as numbers of type half. False if either is NaN; subnormals are not flushed to 0.
CUTE_HOST_DEVICE bool half_less(uint16_t a, uint16_t b) {
#if defined(__CUDA_ARCH__)
    int less;
    asm("{ .reg .pred p; setp.lt.f16 p, %1, %2; selp.s32 %0, 1, 0, p; }"
        : "=r"(less)
        : "h"(a), "h"(b));
    return less != 0;
#else
    return static_cast<float>(half_t::bitcast(a)) < static_cast<float>(half_t::bitcast(b));
#endif
}

// half_less() of both 16-bit halves of a word: all ones in a half where it is true, else zeros.
CUTE_HOST_DEVICE uint32_t halves_less(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    uint32_t less;
    asm("set.lt.u32.f16x2 %0, %1, %2;" : "=r"(less) : "r"(a), "r"(b));
    return less;
#else
    bool const lower = half_less(static_cast<uint16_t>(a), static_cast<uint16_t>(b));
    bool const upper = half_less(static_cast<uint16_t>(a >> 16), static_cast<uint16_t>(b >> 16));
    return (lower ? 0xFFFFu : 0) | (upper ? 0xFFFF0000u : 0);
#endif
}

// The counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
// 2011. 7 rounds are the fewest that pass all tests of BigCrush.
template <int kRounds = 7>
CUTE_HOST_DEVICE void philox4x32(uint32_t (&counter)[4], uint32_t key_low, uint32_t key_high) {
    CUTE_UNROLL
    for (int round = 0; round < kRounds; ++round) {
        uint64_t const a = wide_product(0xD2511F53, counter[0]);
        uint64_t const b = wide_product(0xCD9E8D57, counter[2]);
        counter[0] = static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key_low;
        counter[1] = static_cast<uint32_t>(b);
        counter[2] = static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key_high;
        counter[3] = static_cast<uint32_t>(a);
        key_low += 0x9E3779B9;
        key_high += 0xBB67AE85;
    }
}

// One call of the generator serves the eight weights that a thread holds of a 16 x 16 block of P:
// of queries r and r + 8 and keys c, c + 1, c + 8 and c + 9, relative to the block. Each weight has
// 16 random bits, which DropoutBound turns into a decision. The counter is
//     (query / 16 * 8 + query % 8, key / 16 * 4 + key % 8 / 2, entry * h + head, offset)
// with positions in the sequence and, in a ragged batch, its number as entry; the seed is Philox's
// key. Result word query % 16 / 8 + key % 16 / 8 * 2, half key % 2 is for (query, key). So the mask
// does not depend on the kernel's configuration. flashcute/dropout.py computes the same mask.
struct DropoutMask {
    Flash_fwd_params const &params;
    uint32_t key_low, key_high, offset;

    CUTE_DEVICE void load() {
        uint64_t const seed = params.rng_state_ptr[0];
        key_low = static_cast<uint32_t>(seed);
        key_high = static_cast<uint32_t>(seed >> 32);
        offset = static_cast<uint32_t>(params.rng_state_ptr[1]);
    }

    // Draws the 128 bits of one counter. row, column: its first two words; head: entry * h + head.
    CUTE_DEVICE void draw(uint32_t (&random)[4], uint32_t row, uint32_t column,
                          uint32_t head) const {
        random[0] = row;
        random[1] = column;
        random[2] = head;
        random[3] = offset;
        philox4x32(random, key_low, key_high);
    }
    // Whether a random word's upper or lower half drops its weight.
    CUTE_DEVICE bool drops(uint32_t word, bool upper) const {
        auto const half = static_cast<uint16_t>(upper ? word >> 16 : word);
        auto const bound = static_cast<uint16_t>(params.dropout_bound);
        return half_less(half, bound) != (params.dropout_flip != 0);
    }

    // Zeroes those weights of a pair that the two halves of word drop. The sm80 class compares one
    // half at a time: operands of the packed comparison spill there at head dimension 128.
    template <int kArch>
    CUTE_DEVICE void drop(uint32_t &pair, uint32_t word) const {
        if constexpr (kArch == 90) {
            pair &= ~(halves_less(word, params.dropout_bound) ^ params.dropout_flip);
        } else {
            if (drops(word, false)) pair &= 0xFFFF0000;
            if (drops(word, true)) pair &= 0x0000FFFF;
        }
    }

    CUTE_HOST_DEVICE static uint32_t row_of(int query) { return query / 16 * 8 + query % 8; }
    CUTE_HOST_DEVICE static uint32_t column_of(int key) { return key / 16 * 4 + key % 8 / 2; }
};

template <class Traits>
struct Dropout {
    static constexpr FwdConfig C = Traits::kConfig;

    int const thread;
    DropoutMask mask;
    uint32_t head;
    uint32_t first_row;  // the counter's row word for the thread's first row

    // Heads must not be packed.
    CUTE_DEVICE Dropout(Flash_fwd_params const &params, WorkTile const &tile, int thread)
        : thread(thread), mask{params} {
        if constexpr (C.dropout) {
            mask.load();
            int const entry = params.plan_ptr == nullptr ? tile.batch
                              : tile.blocks.count > 0    ? sequence_of(params, tile)
                                                         : 0;  // may be of no sequence
            head = static_cast<uint32_t>(entry) * params.h + tile.head_q;
            first_row = mask.row_of(tile.m_block * C.tile_m + Traits::acc_row(thread, 0));
        }
    }

    // Drops weights of key block n_block. tOrP: (8, MMA_M, N/16), the A operand of P V.
    template <class Engine, class Layout>
    CUTE_DEVICE void apply(Tensor<Engine, Layout> &tOrP, int n_block) const {
        if constexpr (C.dropout) {
            Tensor words = recast<uint32_t>(tOrP);  // (4, MMA_M, N/16)
            uint32_t const first_column = n_block * (C.tile_n / 4) + Traits::acc_col(thread, 0) / 2;
            CUTE_UNROLL
            for (int k = 0; k < size<2>(words); ++k) {
                uint32_t const column = first_column + k * 4;
                CUTE_UNROLL
                for (int m = 0; m < size<1>(words); ++m) {
                    uint32_t random[4];
                    mask.draw(random, first_row + m * (C.warps * 8), column, head);
                    CUTE_UNROLL
                    for (int i = 0; i < 4; ++i) {
                        mask.template drop<C.arch>(words(i, m, k), random[i]);
                    }
                }
            }
        }
    }
};

// The dropout mask in an sm80-class backward kernel, whose rows are queries or keys. With P' = P *
// mask * scale, dV = P'^T dO and dP = dO V^T * mask * scale; dV is multiplied by its scale once, at
// the end.
template <class Traits>
struct DropoutBwd {
    static constexpr bool kDrops = Traits::kConfig.dropout;
    static constexpr bool kOwnsQueries = Traits::kOwnsQueries;
    static constexpr int kWarps = Traits::kWarpsM;

    DropoutMask mask;
    uint32_t first_head;  // the counter's word for the entry's head 0
    uint32_t first_own;   // its word for the thread's first row
    uint32_t first_step;  // its word for the thread's first column, in block 0
    bool key_is_odd;      // where rows are keys: selects the half of a random word

    CUTE_DEVICE DropoutBwd(Flash_bwd_params const &params, WorkTile const &tile, int thread)
        : mask{params} {
        if constexpr (kDrops) {
            mask.load();
            first_head = static_cast<uint32_t>(tile.batch) * params.h;
            int const row = tile.m_block * Traits::kTileM + Traits::acc_row(thread, 0);
            int const column = Traits::acc_col(thread, 0);
            first_own = kOwnsQueries ? mask.row_of(row) : mask.column_of(row);
            first_step = kOwnsQueries ? mask.column_of(column) : mask.row_of(column);
            key_is_odd = row % 2 != 0;
        }
    }

    // Negates the dropped weights of P, (4, MMA_M, N/8), in block n of the visited side.
    template <class Engine, class Layout>
    CUTE_DEVICE void mark(Tensor<Engine, Layout> &tSrP, int n, int head_q) const {
        constexpr int kOwnOf16 = kOwnsQueries ? 8 : 4;  // values of the counter's word in 16 rows
        constexpr int kStepOf16 = kOwnsQueries ? 4 : 8;
        Tensor blocks = make_tensor(
            tSrP.data(), layout_acc_as_operand_a(tSrP.layout()));  // ((4, 2), MMA_M, N/16)
        uint32_t const first = first_step + n * (Traits::kTileN / 16 * kStepOf16);
        CUTE_UNROLL
        for (int k = 0; k < size<2>(blocks); ++k) {
            CUTE_UNROLL
            for (int m = 0; m < size<1>(blocks); ++m) {
                uint32_t const own = first_own + m * (kWarps * kOwnOf16);
                uint32_t const step = first + k * (Traits::kTile.warps_step * kStepOf16);
                // Where columns are queries, one call serves every other column only.
                CUTE_UNROLL
                for (int call = 0; call < (kOwnsQueries ? 1 : 2); ++call) {
                    uint32_t random[4];
                    mask.draw(random, kOwnsQueries ? own : step + call, kOwnsQueries ? step : own,
                              first_head + head_q);
                    CUTE_UNROLL
                    for (int i = 0; i < 8; ++i) {
                        int const right = i / 4, low = i / 2 % 2;  // the half of the 16 x 16 block
                        if (!kOwnsQueries && i % 2 != call) continue;
                        uint32_t const word =
                            random[kOwnsQueries ? low + right * 2 : right + low * 2];
                        float &p = blocks(i, m, k);
                        if (mask.drops(word, kOwnsQueries ? i % 2 != 0 : key_is_odd)) p = -p;
                    }
                }
            }
        }
    }

    // Returns the kept weights of P as mark() leaves it, and 0 for the dropped ones.
    template <class Engine, class Layout>
    CUTE_DEVICE static auto kept(Tensor<Engine, Layout> const &tSrP) {
        Tensor result = make_fragment_like(tSrP);
        CUTE_UNROLL
        for (int i = 0; i < size(result); ++i) {
            result(i) = fmaxf(tSrP(i), 0.f);
        }
        return result;
    }

    // Restores a weight P that mark() may have negated, and turns dO V^T into dP.
    CUTE_DEVICE void finish(float &p, float &dp) const {
        dp = p < 0.f ? 0.f : dp * mask.params.dropout_scale;
        p = fabsf(p);
    }
};

}  // namespace flash
