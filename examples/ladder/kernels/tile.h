// Copies of tiles of 16-bit elements in pieces of 16 bytes, for rungs 4 to 10.
#pragma once

#include "ladder.h"

namespace ladder {

inline constexpr int kVec = 8;  // elements in 16 bytes

// The offset of element (row, col) of a tile with kCols columns: row-major, without padding.
struct RowMajor {
    template <int kCols>
    __device__ static constexpr int offset(int row, int col) {
        return row * kCols + col;
    }
};

// Copies (kRows, kCols) from global memory through registers into shared memory. Rows from `rows`
// on are not read and become zeros. All kThreads threads of the CTA take part; consecutive threads
// copy consecutive pieces.
template <int kRows, int kCols, int kThreads, class Layout = RowMajor, class Element>
__device__ inline void load_tile(Element *smem, Element const *gmem, int64_t stride, int rows) {
    constexpr int kPieces = kCols / kVec;  // per row
    static_assert(kRows * kPieces % kThreads == 0);
#pragma unroll
    for (int i = 0; i < kRows * kPieces / kThreads; ++i) {
        int const piece = i * kThreads + threadIdx.x;
        int const row = piece / kPieces;
        int const col = piece % kPieces * kVec;
        uint4 value = {0, 0, 0, 0};
        if (row < rows) {
            value = *reinterpret_cast<uint4 const *>(gmem + row * stride + col);
        }
        *reinterpret_cast<uint4 *>(smem + Layout::template offset<kCols>(row, col)) = value;
    }
}

}  // namespace ladder
