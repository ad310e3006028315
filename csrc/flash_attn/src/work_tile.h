// A tile of query rows: where it is, how long its sequences are, which key blocks it visits. In a
// backward it may be a tile of keys, which visits blocks of queries; m_block then counts tiles of
// keys. All other headers get a tile's position from this one.
#pragma once

#include <cute/config.hpp>

#include "flash.h"

namespace flash {

// The visits of a tile to its key blocks. The main loop counts them down to 0, so that visit n is
// followed by n more. First come the blocks that need the mask, those cut on the right before those
// cut on the left, then the whole ones, each from right to left. In the sm90 class's backward visit
// i is to block begin + i instead (step_bwd_sm90.h).
struct BlockRange {
    int count;     // all visits
    int unmasked;  // the last visits, to blocks that every row sees whole
    // 0 unless under MaskKind::local, or in tiles of keys:
    int begin;  // the leftmost block
    int left;   // blocks cut on the left; 0 where no block is whole

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
    int m_block;   // number among the tiles of this (batch, head); < 0: no tile is left
    int head;      // grid head: a query head; with packed heads, and for tiles of keys, a key head
    int batch;     // in a ragged batch 0, in its backward the sequence
    int head_q;    // the query head, or the first of the packed ones
    int head_k;    // the key head
    int row_q;     // where the sequence begins in q and o, and
    int row_k;     // in k and v; 0 in a dense batch
    int seqlen_q;  // query positions
    int seqlen_k;  // keys; -1: the rows are of no sequence
    int batch_k;   // of k and v; in a cache the entry, with pages the row of the block table
    BlockRange blocks;
    // Where the tile is a part of a split one: the workspace row where the part's rows of the
    // sequence begin. Else -1.
    int partial_row = -1;
    // In kernels whose CTAs may plan, a split tile's part: it is number `part` of `parts`. In a
    // backward see shared_tiles_sm90.h.
    int part = 0, parts = 1;

    CUTE_HOST_DEVICE bool in_sequence() const { return seqlen_k >= 0; }
    CUTE_HOST_DEVICE bool is_part() const { return partial_row >= 0; }
};

// A range of visits of a tile of keys in a backward (shared_tiles_sm90.h).
struct SharedPiece {
    int tile;          // its index
    int begin, count;  // of the tile's blocks of queries
    int part;          // becomes WorkTile::part
};

// Makes a tile its part `part` of `parts`, each with equally many consecutive key blocks; the first
// ones may have one more. The keys before the part are cut off the sequence, which is correct, as
// masks and the distances of ALiBi count from its end.
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

// Returns the sequence that a planned tile's rows belong to: with cu_seqlens_q the last one that
// begins where they do, as others that begin there are empty. Whatever cu_seqlens holds, the result
// is in [0, b).
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

    // Offset from the tile's first head, in elements.
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

// Where a tile's first head begins in the outputs, in elements. No pointers: nvcc does not know
// that a pointer that is read from shared memory points to global memory.
struct OutputOffset {
    int64_t o;
    int64_t lse;
};

}  // namespace flash
