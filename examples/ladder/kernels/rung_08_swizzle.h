// Rung 8: shared memory without bank conflicts.
//
// Only the layout changes. A row of 128 elements is 256 bytes, twice the width of all banks. So in
// rung 7 the eight 16-byte rows that ldmatrix reads at a time are in the same four banks: eight
// wavefronts instead of one. The XOR of the piece's index with the row's last three bits puts eight
// consecutive rows into different banks, without the memory that padding needs. Writes of whole
// rows still have no conflicts.
#pragma once

#include "rung_07_mma.h"

namespace ladder {

struct Swizzled {
    template <int kCols>
    __device__ static constexpr int offset(int row, int col) {
        return row * kCols + (col ^ row % 8 * kVec);
    }
};

template <class Element, int kHeadDim, bool kCausal>
using Rung08 = Rung07<Element, kHeadDim, kCausal, Swizzled>;

}  // namespace ladder
