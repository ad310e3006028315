// Dropout: which attention weights count as 0, drawn anew wherever they are needed.
#pragma once

#include <cute/tensor.hpp>

#include "flash.h"
#include "work_tile.h"

namespace flash {

using namespace cute;

// The counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
// 2011. 7 rounds are the fewest that pass all tests of BigCrush.
template <int kRounds = 7>
CUTE_HOST_DEVICE void philox4x32(uint32_t (&counter)[4], uint32_t key_low, uint32_t key_high) {
    CUTE_UNROLL
    for (int round = 0; round < kRounds; ++round) {
        uint64_t const a = uint64_t(0xD2511F53) * counter[0];
        uint64_t const b = uint64_t(0xCD9E8D57) * counter[2];
        counter[0] = static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key_low;
        counter[1] = static_cast<uint32_t>(b);
        counter[2] = static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key_high;
        counter[3] = static_cast<uint32_t>(a);
        key_low += 0x9E3779B9;
        key_high += 0xBB67AE85;
    }
}

// One call of the generator serves the eight weights that a thread holds of a 16 x 16 block of P:
// of queries r and r + 8 and keys c, c + 1, c + 8 and c + 9, relative to the block. 16 bits decide
// on each: it is kept where they are at least the threshold. The counter is
//     (query / 16 * 8 + query % 8, key / 16 * 4 + key % 8 / 2, entry * h + head, offset)
// with positions in the sequence and its number in a ragged batch; the key is the seed; result
// word query % 16 / 8 + key % 16 / 8 * 2, half key % 2 is for (query, key). So a weight's fate
// depends on nothing that a configuration chooses. flashcute/dropout.py computes the same mask.
template <class Traits>
struct Dropout {
    static constexpr FwdConfig C = Traits::kConfig;

    Flash_fwd_params const &params;
    int const thread;
    uint32_t key_low, key_high, offset;
    uint32_t head;       // among those of all entries
    uint32_t first_row;  // the counter's first word, of the thread's first rows

    // Heads must not be packed.
    CUTE_DEVICE Dropout(Flash_fwd_params const &params, WorkTile const &tile, int thread)
        : params(params), thread(thread) {
        if constexpr (C.dropout) {
            uint64_t const seed = params.rng_state_ptr[0];
            key_low = static_cast<uint32_t>(seed);
            key_high = static_cast<uint32_t>(seed >> 32);
            offset = static_cast<uint32_t>(params.rng_state_ptr[1]);
            int const entry = params.plan_ptr == nullptr ? tile.batch
                              : tile.blocks.count > 0    ? sequence_of(params, tile)
                                                         : 0;  // of no sequence, perhaps
            head = static_cast<uint32_t>(entry) * params.h + tile.head_q;
            int const row = tile.m_block * C.tile_m + Traits::acc_row(thread, 0);
            first_row = row / 16 * 8 + row % 8;
        }
    }

    // tOrP: weights (8, MMA_M, N/16) of key block n_block, as operand of P V.
    template <class Engine, class Layout>
    CUTE_DEVICE void apply(Tensor<Engine, Layout> &tOrP, int n_block) const {
        if constexpr (C.dropout) {
            Tensor words = recast<uint32_t>(tOrP);  // (4, MMA_M, N/16)
            uint32_t const first_column = n_block * (C.tile_n / 4) + Traits::acc_col(thread, 0) / 2;
            uint32_t const threshold = params.dropout_threshold << 16;  // as the upper halves
            CUTE_UNROLL
            for (int k = 0; k < size<2>(words); ++k) {
                uint32_t const column = first_column + k * 4;
                CUTE_UNROLL
                for (int m = 0; m < size<1>(words); ++m) {
                    uint32_t random[4] = {first_row + m * (C.warps * 8), column, head, offset};
                    philox4x32(random, key_low, key_high);
                    CUTE_UNROLL
                    for (int i = 0; i < 4; ++i) {
                        uint32_t &pair = words(i, m, k);
                        if (random[i] << 16 < threshold) pair &= 0xFFFF0000;
                        if (random[i] < threshold) pair &= 0x0000FFFF;
                    }
                }
            }
        }
    }
};

}  // namespace flash
