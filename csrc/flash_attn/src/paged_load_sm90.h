// Loads the keys or values of a block from the pages of a cache, which a block table lists, to
// shared memory: in TMA boxes, or from small pages in cp.async copies of 16 bytes.
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

    // Two warps of the producer warpgroup load keys, the other two values.
    static constexpr int kWarps = 2;
    // cp.async copies: kLanes adjacent lanes copy kSmemRow columns of a row, and both warps kStep
    // rows at a time. Each lane looks up one of 32 rows that its warp copies.
    static constexpr int kLanes = kSmemRow / 8;
    static constexpr int kWarpRows = 32 / kLanes;
    static constexpr int kStep = kWarps * kWarpRows;
    static constexpr int kWarpSteps = 32 / kWarpRows;
    static constexpr int kRowsLookedUp = kWarpSteps * kStep;  // by both warps at a time
    static constexpr int kPlaces = (kTileN + kRowsLookedUp - 1) / kRowsLookedUp;
    static constexpr int kUnrolled = Traits::kPages > 2 ? 1 : 4;  // more steps take more registers
    static_assert(kStep % 8 == 0, "all rows of a thread are swizzled alike");
    static_assert(kWarpSteps % kUnrolled == 0);
    static_assert(!Traits::kConfig.paged ||
                      kTileN * Traits::kPages <= 32 * kWarps * TensorMapsSm90::kLeastBoxRows,
                  "a lane loads one box");

    CUTE_DEVICE static PagedHead<Element> keys(Flash_fwd_params const &params, int head) {
        auto const *const gmem = static_cast<Element const *>(params.k_ptr);
        return {gmem + head * params.k_head_stride, params.k_batch_stride, params.k_row_stride};
    }
    CUTE_DEVICE static PagedHead<Element> values(Flash_fwd_params const &params, int head) {
        auto const *const gmem = static_cast<Element const *>(params.v_ptr);
        return {gmem + head * params.v_head_stride, params.v_batch_stride, params.v_row_stride};
    }

    // Where a key is: the page that the table names, which may not exist, and the row there.
    struct Place {
        int page, row;
    };
    CUTE_DEVICE static bool exists(Flash_fwd_params const &params, Place const &place) {
        return static_cast<unsigned>(place.page) < static_cast<unsigned>(params.num_pages);
    }
    // The rows of a block that a thread looks up.
    using Places = cute::array<Place, kPlaces>;

    // Returns the thread's warp among those that load the same tensor.
    CUTE_DEVICE static int warp(int thread) { return thread / 32 % kWarps; }

    // The TMA box of a block that a thread loads: its first row, and its column in units of
    // kSmemRow.
    struct Box {
        int row, column;
    };
    CUTE_DEVICE static Box box_of(int thread, TensorMapsSm90 const &maps) {
        int const number = thread % 32 * kWarps + warp(thread);
        return {number / Traits::kPages * maps.box_rows, number % Traits::kPages};
    }

    // Looks up in the block table where a thread's rows of a block are: the first row of its box,
    // or its share of the rows that its warp copies. row: the block's first one in the entry; keys:
    // of the sequence, from there on. Behind the last key the table is not read, and the page is
    // -1.
    CUTE_DEVICE static Places look_up(int thread, Flash_fwd_params const &params,
                                      TensorMapsSm90 const &maps, int batch, int row, int keys) {
        int const *const table = params.block_table_ptr + batch * params.block_table_batch_stride;
        int const lane = thread % 32;
        int const first =
            maps.copies() ? warp(thread) * kWarpRows + lane / kWarpRows * kStep + lane % kWarpRows
                          : box_of(thread, maps).row;
        Places places{};
        CUTE_UNROLL
        for (int i = 0; i < kPlaces; ++i) {
            int const of_lane = first + i * kRowsLookedUp;
            places[i].page = -1;
            if (of_lane < keys && of_lane < kTileN) {
                int column = 0;
                maps.page(column, places[i].row, row + of_lane);
                places[i].page = table[column];
            }
            if (!maps.copies()) break;
        }
        return places;
    }

    // Loads a block in TMA boxes of maps.box_rows rows, one after the other in the buffer; zeros
    // behind `keys` rows and where no page exists. Called by all lanes of a warp, each of which
    // loads one box at most; lane 0 arrives at `full` and adds the bytes of all (expect_tx).
    template <class Await>
    CUTE_DEVICE static void load_boxes(int thread, Flash_fwd_params const &params,
                                       TensorMapsSm90 const &maps, CUtensorMap const &map,
                                       RaggedSteps const &steps, Place place, int keys, int head,
                                       Await const &await_buffer, sm90::Barrier *full,
                                       Buffer &buffer) {
        Box const box = box_of(thread, maps);
        bool const any = exists(params, place);
        RaggedRows const rows = ragged_rows(steps, maps.box_rows, place.row,
                                            any ? keys - box.row : 0, head, any ? place.page : 0);
        await_buffer();
        bool const loads = box.row < kTileN;
        int const boxes = __popc(__ballot_sync(0xffffffffu, loads));
        int const bytes = boxes * maps.box_rows * kSmemRow * int(sizeof(Element));
        if (thread % 32 == 0) sm90::barrier_arrive_expect(full, bytes);
        __syncwarp();
        if (loads) {
            Element *const to = buffer.data() + (box.column * kTileN + box.row) * kSmemRow;
            sm90::tma_load(&map, full, maps.kv_hint, to, box.column * kSmemRow, rows.x, rows.y,
                           kRaggedZ);
        }
    }

    // Loads a block in cp.async copies; zeros where no page exists. Called by all lanes of a warp.
    // Each thread arrives at `full` once its copies have landed, so that they are visible to those
    // who wait there, but only in the generic proxy: before wgmma reads them the waiting thread
    // needs a proxy fence (MainloopFwdSm90::Consumer::fence_copies()).
    template <class Await>
    CUTE_DEVICE static void copy_rows(int thread, Flash_fwd_params const &params,
                                      PagedHead<Element> const &x, Places const &places,
                                      Await const &await_buffer, sm90::Barrier *full,
                                      Buffer &buffer) {
        int const lane = thread % 32;
        int const row = warp(thread) * kWarpRows + lane / kLanes;
        int const col = lane % kLanes * 8;
        Tensor sX = as_position_independent_swizzle_tensor(
            make_tensor(make_smem_ptr(buffer.data()), typename Traits::SmemLayoutKV{}));  // (N, d)
        Element *const to = &sX(row, col);
        await_buffer();
        CUTE_UNROLL
        for (int part = 0; part < kPlaces; ++part) {
            Place const place = places[part];
            int const begin = part * kRowsLookedUp;
            bool const any = exists(params, place);
            int64_t const offset =
                any ? place.page * x.page_stride + place.row * x.row_stride : int64_t(0);
            auto const address = reinterpret_cast<unsigned long long>(x.gmem + offset);
            uint32_t const existing = __ballot_sync(0xffffffffu, any);
            // The lane that looked up a row hands its address to those that copy it.
            auto const copy_step = [&](int i) {
                int const source = lane / kLanes + i * kWarpRows;
                Element const *const from =
                    reinterpret_cast<Element const *>(__shfl_sync(0xffffffffu, address, source)) +
                    col;
                bool const copies = existing >> source & 1;
                int const step = begin + i * kStep;
                if (kTileN % (kStep * kUnrolled) == 0 || row + step < kTileN) {
                    CUTE_UNROLL
                    for (int c = 0; c < Traits::kPages; ++c) {
                        sm90::copy_async(to + (step + c * kTileN) * kSmemRow, from + c * kSmemRow,
                                         copies && col + c * kSmemRow < params.d);
                    }
                }
            };
            CUTE_NO_UNROLL
            for (int i = 0; i < kWarpSteps && begin + i * kStep < kTileN; i += kUnrolled) {
                CUTE_UNROLL
                for (int j = 0; j < kUnrolled; ++j) {
                    copy_step(i + j);
                }
            }
        }
        sm90::barrier_arrive_copies(full);
    }
};

}  // namespace flash
