// Keys or values of a block from the pages of a cache, which a block table lists, to shared memory:
// in TMA boxes, or from small pages in copies of 16 bytes.
#pragma once

#include <arch_sm90.h>

#include <cstdint>
#include <cute/tensor.hpp>

#include "flash.h"
#include "kernel_traits_sm90.h"
#include "tensor_maps_sm90.h"

namespace flash {

using namespace cute;

// Keys or values of one head in all pages. Strides count elements.
template <class Element>
struct PagedHead {
    Element const *gmem;
    int64_t page_stride, row_stride;
};

template <class Traits>
struct PagedLoad {
    static constexpr int kTileN = Traits::kTileN;
    static constexpr int kSmemRow = Traits::kSmemRow;
    using Element = typename Traits::Element;
    using Buffer = cute::array<Element, cosize_v<typename Traits::SmemLayoutKV>>;

    // Copies are made by all warps of the producer. In each, kLanes lanes side by side copy a row
    // of a page of kSmemRow columns; all four warps copy kStep rows at a time.
    static constexpr int kLanes = kSmemRow / 8;
    static constexpr int kWarpRows = 32 / kLanes;
    static constexpr int kStep = 4 * kWarpRows;
    static constexpr int kUnrolled = Traits::kPages > 2 ? 1 : 2;  // more take more registers
    static_assert(kStep % 8 == 0, "all rows of a thread are swizzled alike");
    static_assert(!Traits::kConfig.paged || kTileN <= 128, "a lane looks up one row of its warp's");
    static_assert(!Traits::kConfig.paged || kTileN <= 32 * TensorMapsSm90::kLeastBoxRows,
                  "a lane loads one box");

    CUTE_DEVICE static PagedHead<Element> keys(Flash_fwd_params const &params, int head) {
        auto const *const gmem = static_cast<Element const *>(params.k_ptr);
        return {gmem + head * params.k_head_stride, params.k_batch_stride, params.k_row_stride};
    }
    CUTE_DEVICE static PagedHead<Element> values(Flash_fwd_params const &params, int head) {
        auto const *const gmem = static_cast<Element const *>(params.v_ptr);
        return {gmem + head * params.v_head_stride, params.v_batch_stride, params.v_row_stride};
    }

    // Where a key is: its page as the table names it, which may not exist, and its row there.
    struct Place {
        int page, row;
    };

    // The row of a block that this lane looks up: the first one of its box, or one of the rows that
    // its warp copies. At or behind the last one: the lane has none.
    CUTE_DEVICE static int row_of_lane(TensorMapsSm90 const &maps) {
        int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        return maps.copies() ? warp * kWarpRows + lane / kWarpRows * kStep + lane % kWarpRows
                             : lane * maps.box_rows;
    }

    // Looks up this lane's row of a block. row: of the sequence, the block's first one; keys: of
    // the sequence from there on. Behind the keys the table is not read, and no page exists.
    CUTE_DEVICE static Place look_up(Flash_fwd_params const &params, TensorMapsSm90 const &maps,
                                     int batch, int row, int keys) {
        int const of_lane = row_of_lane(maps);
        int const column = (row + of_lane) / params.page_size;
        Place place{-1, row + of_lane - column * params.page_size};
        if (of_lane < keys && of_lane < kTileN) {
            int const *const table =
                params.block_table_ptr + batch * params.block_table_batch_stride;
            place.page = table[column];
        }
        return place;
    }

    // Boxes of maps.box_rows rows, all of them one after the other in the buffer; by one warp.
    template <class Await>
    CUTE_DEVICE static void load_boxes(Flash_fwd_params const &params, TensorMapsSm90 const &maps,
                                       CUtensorMap const &map, Place place, int head,
                                       Await const &await_buffer, sm90::Barrier *full,
                                       Buffer &buffer) {
        int const row = row_of_lane(maps);
        // Instead of a page that does not exist the one behind the last: zeros.
        int const page = static_cast<int>(
            cute::min(static_cast<unsigned>(place.page), static_cast<unsigned>(params.num_pages)));
        await_buffer();
        if (threadIdx.x == 0) sm90::barrier_arrive_expect(full, sizeof buffer);
        __syncwarp();
        if (row < kTileN) {
            Element *const to = buffer.data() + row * kSmemRow;
            CUTE_UNROLL
            for (int c = 0; c < Traits::kPages; ++c) {
                sm90::tma_load(&map, full, sm90::CacheHint::evict_last, to + c * kTileN * kSmemRow,
                               c * kSmemRow, place.row, head, page);
            }
        }
    }

    // Copies, by all warps; zeros where no page exists. The barrier gets an arrival of each thread
    // once that thread's copies have landed, which puts them before the reads of those who wait
    // there, but in the generic proxy: wgmma's reads are ordered by the waiting thread's fence.
    template <class Await>
    CUTE_DEVICE static void copy_rows(Flash_fwd_params const &params, PagedHead<Element> const &x,
                                      Place place, Await const &await_buffer, sm90::Barrier *full,
                                      Buffer &buffer) {
        int const lane = threadIdx.x % 32;
        int const row = threadIdx.x / 32 * kWarpRows + lane / kLanes;
        int const col = lane % kLanes * 8;
        Tensor sX = as_position_independent_swizzle_tensor(
            make_tensor(make_smem_ptr(buffer.data()), typename Traits::SmemLayoutKV{}));  // (N, d)
        Element *const to = &sX(row, col);
        bool const exists =
            static_cast<unsigned>(place.page) < static_cast<unsigned>(params.num_pages);
        int64_t const offset =
            exists ? place.page * x.page_stride + place.row * x.row_stride : int64_t(0);
        uint32_t const existing = __ballot_sync(0xffffffffu, exists);
        await_buffer();
        auto const copy_step = [&](int i) {
            int const source = lane / kLanes + i * kWarpRows;  // the lane that has looked it up
            Element const *const from = x.gmem + __shfl_sync(0xffffffffu, offset, source) + col;
            bool const copies = existing >> source & 1;
            if (kTileN % (kStep * kUnrolled) == 0 || row + i * kStep < kTileN) {
                CUTE_UNROLL
                for (int c = 0; c < Traits::kPages; ++c) {
                    sm90::copy_async(to + (i * kStep + c * kTileN) * kSmemRow, from + c * kSmemRow,
                                     copies && col + c * kSmemRow < params.d,
                                     sm90::CacheHint::evict_last);
                }
            }
        };
        CUTE_NO_UNROLL
        for (int i = 0; i * kStep < kTileN; i += kUnrolled) {
            CUTE_UNROLL
            for (int j = 0; j < kUnrolled; ++j) {
                copy_step(i + j);
            }
        }
        sm90::barrier_arrive_copies(full);
    }
};

}  // namespace flash
