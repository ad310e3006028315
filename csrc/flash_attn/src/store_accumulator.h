// Stores a wgmma accumulator to global memory, straight from registers.
#pragma once

#include <cute/tensor.hpp>

#include "utils.h"

namespace flash {

using namespace cute;

// Transposes a 4 x 4 matrix of words in each quad: lane i holds column i before and row i after.
CUTE_DEVICE void transpose_quad(uint32_t (&w)[4], int lane) {
    CUTE_UNROLL
    for (int bit = 1; bit <= 2; bit *= 2) {
        bool const upper = lane & bit;
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j) {
            if (!(j & bit)) {
                uint32_t &low = w[j];
                uint32_t &high = w[j | bit];
                uint32_t const got = __shfl_xor_sync(0xffffffffu, upper ? low : high, bit);
                (upper ? low : high) = got;
            }
        }
    }
}

// Rounds an accumulator to 16 bits and stores it; collective over a warp. The four lanes of a row
// exchange words of two columns, 32 columns at a time, so that each has 8 neighbouring columns to
// store. acc: (4, 1, kColumns/8), of which the tensor has `columns`. row_at(i): the GmemRow of the
// thread's row i, 0 or 1.
template <int kColumns, class Acc, class RowAt>
CUTE_DEVICE void store_accumulator(Acc const &acc, int thread, int columns, RowAt const &row_at) {
    static_assert(kColumns % 32 == 0);
    int const lane = thread % 4;
    auto const rows = cute::make_tuple(row_at(0), row_at(1));
    using Element = std::remove_pointer_t<decltype(get<0>(rows).gmem)>;
    CUTE_UNROLL
    for (int col = 0; col < kColumns; col += 32) {
        uint32_t w[2][4];  // (row, n8 step), two columns each
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j) {
            Tensor four = acc(_, 0, col / 8 + j);     // (4)
            Tensor rO = convert_type<Element>(four);  // (4)
            Tensor words = recast<uint32_t>(rO);      // (2)
            w[0][j] = words(0);
            w[1][j] = words(1);
        }
        for_each(make_int_sequence<2>{}, [&](auto i) {
            transpose_quad(w[i], lane);
            if (get<i>(rows).exists && col + lane * 8 < columns) {
                *reinterpret_cast<uint4 *>(get<i>(rows).gmem + col + lane * 8) =
                    make_uint4(w[i][0], w[i][1], w[i][2], w[i][3]);
            }
        });
    }
}

}  // namespace flash
