// nvcuda::wmma for the simulator: the part that rungs 4 to 6 use, as two m16n8k16 MMAs for each
// 16 x 16 x 16 one. The programming guide does not define which elements a lane holds. Here it is
// the layout of those MMAs, and no rung may depend on it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace nvcuda::wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int kM, int kN, int kK, class Element, class Layout = void>
struct fragment {
    static_assert(kM == 16 && kN == 16 && kK == 16);
    static constexpr int num_elements = 8;
    Element x[num_elements];
};

// Row and column of a lane's element i of an A operand or accumulator: 8 x 8 blocks from top to
// bottom, then from left to right. For a B operand, rows and columns are exchanged.
inline void sim_place(int i, int &row, int &col) {
    int const lane = threadIdx.x % 32;
    row = lane / 4 + 8 * (i / 2 % 2);
    col = 2 * (lane % 4) + i % 2 + 8 * (i / 4);
}

template <class Element, class Layout>
void load_matrix_sync(fragment<matrix_a, 16, 16, 16, Element, Layout> &a, Element const *pointer,
                      unsigned ldm) {
    static_assert(std::is_same_v<Layout, row_major>);
    for (int i = 0; i < a.num_elements; ++i) {
        int row, col;
        sim_place(i, row, col);
        a.x[i] = pointer[row * ldm + col];
    }
    __syncwarp();
}

template <class Element, class Layout>
void load_matrix_sync(fragment<matrix_b, 16, 16, 16, Element, Layout> &b, Element const *pointer,
                      unsigned ldm) {
    for (int i = 0; i < b.num_elements; ++i) {
        int n, k;
        sim_place(i, n, k);
        b.x[i] = pointer[std::is_same_v<Layout, row_major> ? k * ldm + n : n * ldm + k];
    }
    __syncwarp();
}

inline void load_matrix_sync(fragment<accumulator, 16, 16, 16, float> &c, float const *pointer,
                             unsigned ldm, layout_t layout) {
    for (int i = 0; i < c.num_elements; ++i) {
        int row, col;
        sim_place(i, row, col);
        c.x[i] = pointer[layout == mem_row_major ? row * ldm + col : col * ldm + row];
    }
    __syncwarp();
}

inline void store_matrix_sync(float *pointer, fragment<accumulator, 16, 16, 16, float> const &c,
                              unsigned ldm, layout_t layout) {
    for (int i = 0; i < c.num_elements; ++i) {
        int row, col;
        sim_place(i, row, col);
        pointer[layout == mem_row_major ? row * ldm + col : col * ldm + row] = c.x[i];
    }
    __syncwarp();
}

inline void fill_fragment(fragment<accumulator, 16, 16, 16, float> &c, float value) {
    for (float &element : c.x) {
        element = value;
    }
}

template <class Element, class LayoutA, class LayoutB>
void mma_sync(fragment<accumulator, 16, 16, 16, float> &d,
              fragment<matrix_a, 16, 16, 16, Element, LayoutA> const &a,
              fragment<matrix_b, 16, 16, 16, Element, LayoutB> const &b,
              fragment<accumulator, 16, 16, 16, float> const &c) {
    constexpr bool kHalf = std::is_same_v<Element, __half>;
    uint32_t a_registers[4], b_registers[4];
    std::memcpy(a_registers, a.x, sizeof a_registers);
    std::memcpy(b_registers, b.x, sizeof b_registers);
    for (int half = 0; half < 2; ++half) {  // columns 0 to 7, then 8 to 15
        float acc[4];
        std::memcpy(acc, c.x + 4 * half, sizeof acc);
        uint32_t const b_half[2] = {b_registers[half], b_registers[half + 2]};
        sim::mma_m16n8(kHalf ? sim::MmaInput::fp16 : sim::MmaInput::bf16, 2, acc, a_registers,
                       b_half);
        std::memcpy(d.x + 4 * half, acc, sizeof acc);
    }
}

}  // namespace nvcuda::wmma
