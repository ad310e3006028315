// What an MMA warpgroup of the sm90 class does in a tile that has no rows for it. Batches over
// pages mix prefill chunks, whose tiles are full, with decoding tokens, whose tiles have few rows.
#pragma once

#include <arch_sm90.h>

#include <cute/config.hpp>

#include "flash.h"
#include "work_tile.h"

namespace flash {

// Whether warpgroups may rest: only where that was timed and is faster (docs/tried_sm90.md). It
// made no call faster at d = 64 and was not tried above 128. At d = 96 and under a window nvcc then
// gives the two loops' wgmma different registers (test_shipped_kernels.py).
template <FwdConfig C>
inline constexpr bool kMayRest = C.paged && C.warps > 4 && C.head_dim == 128 &&
                                 C.mask != MaskKind::local && !C.softcap && !C.alibi && !C.dropout;

// Whether a tile has rows of this warpgroup; in other kernels every warpgroup computes.
template <class Traits>
CUTE_DEVICE bool has_rows(Flash_fwd_params const &params, WorkTile const &tile, int warpgroup) {
    if constexpr (!kMayRest<Traits::kConfig>) return true;
    return tile.m_block * Traits::kTileM + warpgroup * 64 < num_rows(params, tile.seqlen_q);
}

// Releases the tile's buffers as they arrive, without reading them. The warpgroup still takes its
// ping-pong turns. Lanes leave an mbarrier wait one by one, so each warp reconverges before one
// lane releases for all.
template <class Consumer>
CUTE_DEVICE void rest(Consumer &consumer) {
    auto &storage = consumer.storage;
    consumer.await_q();
    __syncwarp();
    Consumer::release(&storage.q_empty[consumer.warpgroup]);
    CUTE_NO_UNROLL
    for (int n = consumer.tile().blocks.count; n > 0; --n) {
        consumer.await_k();
        __syncwarp();
        Consumer::release(&storage.k_empty[consumer.k.stage()]);
        consumer.k.advance();
        consumer.await_v();
        __syncwarp();
        consumer.wait_turn();
        consumer.pass_turn();
        Consumer::release(&storage.v_empty[consumer.v().stage()]);
    }
}

}  // namespace flash
