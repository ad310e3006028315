// One tile of query rows: where it is, how long its sequences are, which key blocks it visits. In a
// backward a tile of keys, too, which visits blocks of queries: then m_block counts tiles of keys.
// Every other header asks this one.
#pragma once

#include <cute/config.hpp>

#include "flash.h"

namespace flash {

// The visits of a tile to its key blocks, counted down to 0: the main loop's counter is the number
// of visits that are left. First come the blocks that need the mask, those cut on the right before
// those cut on the left, then the whole ones, each from right to left. In the sm90 class's backward
// visit i is that of block begin + i instead (step_bwd_sm90.h).
struct BlockRange {
    int count;     // of all visits
    int unmasked;  // of the last ones, to blocks that every row sees whole
    // 0 but for MaskKind::local and tiles of keys:
    int begin;  // the leftmost block
    int left;   // blocks cut on the left, where there are whole ones

    template <MaskKind kMask>
    CUTE_HOST_DEVICE int block(int visit) const {
        if constexpr (kMask != MaskKind::local) {
            return visit;
        }
        int const shift = visit >= unmasked + left ? 0 : visit >= unmasked ? -unmasked : left;
        return begin + visit + shift;
    }
    // Whether every row sees all of block begin + i.
    CUTE_HOST_DEVICE bool is_whole(int i) const {
        return static_cast<unsigned>(i - left) < static_cast<unsigned>(unmasked);
    }
};

struct WorkTile {
    int m_block;   // of the rows of this (batch, head); < 0: no tile is left
    int head;      // in the grid: a query head; of packed heads, and of tiles of keys, a key head
    int batch;     // in a ragged batch 0, in its backward the sequence
    int head_q;    // the query head, or the first of the packed ones
    int head_k;    // the key head
    int row_q;     // of q and o, and
    int row_k;     // of k and v: where the sequence begins; 0 in a dense batch
    int seqlen_q;  // query positions
    int seqlen_k;  // keys; -1: the rows are of no sequence
    int batch_k;   // of k and v: an entry of the cache, or a row of the block table
    BlockRange blocks;
    // Of the workspace, where the tile is a part of a split one: its sequence's first row there.
    int partial_row = -1;
    // Then, where CTAs may plan, it is this one of so many. In a backward: shared_tiles_sm90.h.
    int part = 0, parts = 1;

    CUTE_HOST_DEVICE bool in_sequence() const { return seqlen_k >= 0; }
    CUTE_HOST_DEVICE bool is_part() const { return partial_row >= 0; }
};

// A range of visits of a tile of keys in a backward (shared_tiles_sm90.h).
struct SharedPiece {
    int tile;          // its index
    int begin, count;  // of the tile's blocks of queries
    int part;          // of the WorkTile
};

// Makes a tile one of `parts` parts with equally many neighbouring key blocks, or the first ones
// one more. The keys before them are taken off the sequence: masks, and distances of queries and
// keys, count from its end.
CUTE_HOST_DEVICE void take_part(WorkTile &tile, int tile_n, int part, int parts) {
    BlockRange &blocks = tile.blocks;
    int const each = blocks.count / parts, more = blocks.count - each * parts;
    int const first = each * part + (part < more ? part : more);
    int const end = first + each + (part < more ? 1 : 0);
    auto const within = [&](int n) { return (n < first ? first : n > end ? end : n) - first; };
    int const whole = within(blocks.left);
    blocks.unmasked = within(blocks.left + blocks.unmasked) - whole;
    blocks.left = blocks.unmasked > 0 ? whole : 0;
    blocks.count = end - first;
    tile.row_k += first * tile_n;
    tile.seqlen_k -= first * tile_n;
}

// A tile's rows are the positions of one query head or, where the query heads of a key head are
// packed (pack-GQA), 2^pack_shift rows for each position, of which the first h_h_k_ratio are heads
// and the others padding. A power of two, as it takes a shift and no division to find a row.
CUTE_HOST_DEVICE int row_position(Flash_fwd_params const &params, int row) {
    return row >> params.pack_shift;
}
CUTE_HOST_DEVICE int row_head(Flash_fwd_params const &params, int row) {
    return row & ((1 << params.pack_shift) - 1);
}
// Rows of a (batch, head) of the tile grid.
CUTE_HOST_DEVICE int num_rows(Flash_fwd_params const &params, int seqlen_q) {
    return seqlen_q << params.pack_shift;
}
// Heads of the tile grid in one batch entry.
CUTE_HOST_DEVICE int num_grid_heads(Flash_fwd_params const &params) {
    return params.pack_shift > 0 ? params.h_k : params.h;
}

// The sequence of a planned batch that a tile's rows are of; in a ragged one the last that begins
// where they do, as others that begin there are empty. Whatever cu_seqlens holds, the result is in
// [0, b).
CUTE_DEVICE int sequence_of(Flash_fwd_params const &params, WorkTile const &tile) {
    if (params.cu_seqlens_q_ptr == nullptr) {
        return tile.row_q / params.seqlen_q;
    }
    int low = 0, high = params.b;
    CUTE_NO_UNROLL
    while (high - low > 1) {
        int const middle = (low + high) / 2;
        (params.cu_seqlens_q_ptr[middle] <= tile.row_q ? low : high) = middle;
    }
    return low;
}

// One row of a tile, as loads and stores need it.
struct TileRow {
    int position;  // in the sequence
    int head;      // among the packed heads; 0 where none are packed
    bool exists;   // in the tensors of the queries

    // From the tile's first head, in elements.
    CUTE_HOST_DEVICE int64_t offset(int64_t row_stride, int64_t head_stride) const {
        return position * row_stride + head * head_stride;
    }
};
CUTE_HOST_DEVICE TileRow tile_row(Flash_fwd_params const &params, WorkTile const &tile, int tile_m,
                                  int row) {
    int const in_grid = tile.m_block * tile_m + row;
    int const position = row_position(params, in_grid);
    int const head = row_head(params, in_grid);
    return {position, head, position < tile.seqlen_q && head < params.h_h_k_ratio};
}

// Where a tile's first head begins in the outputs, in elements. No pointers: of a pointer that is
// read from shared memory nvcc does not know that it is to global memory.
struct OutputOffset {
    int64_t o;
    int64_t lse;
};

}  // namespace flash
