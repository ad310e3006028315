// What an MMA warpgroup of the sm90 class does in a tile without rows of it. Batches over pages mix
// chunks of prompts, whose tiles are full, with tokens in generation, whose tiles have a few rows.
#pragma once

#include <arch_sm90.h>

#include <cute/config.hpp>

#include "flash.h"
#include "work_tile.h"

namespace flash {

// Where it was timed (docs/tried_sm90.md): at d = 64 it made no call faster, above 128 it was not
// tried. At d = 96 and under a window nvcc gives the two loops' wgmma different registers with it
// (test_shipped_kernels.py).
template <FwdConfig C>
inline constexpr bool kMayRest = C.paged && C.warps > 4 && C.head_dim == 128 &&
                                 C.mask != MaskKind::local && !C.softcap && !C.alibi && !C.dropout;

// Whether a tile has rows of this warpgroup; in other kernels every warpgroup computes.
template <class Traits>
CUTE_DEVICE bool has_rows(Flash_fwd_params const &params, WorkTile const &tile, int warpgroup) {
    if constexpr (!kMayRest<Traits::kConfig>) return true;
    return tile.m_block * Traits::kTileM + warpgroup * 64 < num_rows(params, tile.seqlen_q);
}

// Releases the tile's buffers without reading them, and keeps the warpgroup's turns and its share
// of zeros in V. Lanes leave the wait of a barrier one by one: each warp reconverges before one of
// them releases for all.
template <class Consumer>
CUTE_DEVICE void rest(Consumer &consumer, Flash_fwd_params const &params) {
    auto &storage = consumer.storage;
    consumer.await_q();
    __syncwarp();
    Consumer::release(&storage.q_empty[consumer.warpgroup]);
    int const last = consumer.tile().blocks.count - 1;
    CUTE_NO_UNROLL
    for (int n = last; n >= 0; --n) {
        consumer.await_k();
        __syncwarp();
        Consumer::release(&storage.k_empty[consumer.k.stage()]);
        consumer.k.advance();
        if (n == last) consumer.zero_rows_behind_keys(params, consumer.tile(), n);
        consumer.await_v();
        __syncwarp();
        consumer.wait_turn();
        consumer.pass_turn();
        Consumer::release(&storage.v_empty[consumer.v().stage()]);
    }
}

}  // namespace flash
