// Rung 8: shared memory without bank conflicts.
//
// Nothing but the layout changes. A row of 128 elements is 256 bytes, twice all banks, so in rung 7
// the eight 16-byte rows that ldmatrix reads at a time began in the same four banks: eight trips
// for one. Exclusive-or of the piece's number with the row's last three bits gives each of eight
// neighbouring rows banks of its own, without the memory that padding (skew) costs, and writes of
// whole rows stay as free of conflicts as they were.
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
