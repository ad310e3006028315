// How CTAs of the sm90 class's backward share the tiles of keys of the last wave (stream-K), which
// may be the only wave, where it is not full and all tiles are of one length.
#pragma once

#include <cstdint>
#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "flash.h"
#include "tile_scheduler_bwd_sm90.h"
#include "work_tile.h"

namespace flash {

// The visits of the tiles that are left for the last wave, one tile after the other, are cut into
// equally long ranges, one for each worker (a CTA or cluster), and at most four workers for each
// tile. A range is a piece of one tile, or the last visits of a tile and the first ones of the
// next. The worker with a tile's last visits adds up and stores its dK and dV; the workers before
// it leave their sums in global memory. WorkTile::part is -1 for a worker that leaves its sums,
// else the number of workers whose sums are to be added.
//
// A worker computes the piece with a tile's first visits before the one with another tile's last
// visits, so no worker waits for one that is itself waiting. Workers only wait for those with lower
// numbers. GPUs start CTAs in the order of their numbers, which CUDA does not promise; if all run
// at once, as they do on a GPU without other work, the order does not matter.
template <class Traits>
struct SharedTilesSm90 {
    using Scheduler = TileSchedulerBwdSm90<Traits>;

    // The number of tiles that workers share. 0: they share none, and each computes every
    // workers-th tile.
    CUTE_HOST_DEVICE static int count(Flash_bwd_params const &params, int workers) {
        constexpr int64_t kLeast = 8;  // the longest range has so many steps fewer than a tile
        int const rest = static_cast<int>(Scheduler::num_tiles(params) % workers);
        if (!Traits::kMayShare || params.dk_ptr == nullptr || params.dq_semaphore_ptr == nullptr ||
            rest == 0) {
            return 0;
        }
        int64_t const saved = visits(params) - longest_range(params, workers, rest);
        return saved * params.h_h_k_ratio >= kLeast ? rest : 0;
    }

    // The most steps of a worker where workers share tiles; 0: they do not.
    CUTE_HOST_DEVICE static int64_t most_steps(Flash_bwd_params const &params, int workers) {
        int const rest = count(params, workers);
        if (rest == 0) return 0;
        int64_t const of_waves = Scheduler::num_tiles(params) / workers * visits(params);
        return (of_waves + longest_range(params, workers, rest)) * params.h_h_k_ratio;
    }

    // Writes the pieces of worker `worker`, two at most, in the order in which it computes them,
    // and behind them one that stands for no tile. rest: count(), > 0.
    CUTE_HOST_DEVICE static void get_pieces(Flash_bwd_params const &params, TileQueue const &queue,
                                            int workers, int rest, int worker,
                                            SharedPiece *pieces) {
        int64_t const each = visits(params), all = rest * each;
        int const sharing = sharing_workers(params, workers, rest);
        pieces[0].tile = pieces[1].tile = pieces[2].tile = queue.tiles;
        if (worker >= sharing) {
            return;
        }
        int64_t const begin = all * worker / sharing, end = all * (worker + 1) / sharing;
        int const first = static_cast<int>(begin / each), last = static_cast<int>((end - 1) / each);
        for (int i = 0; i <= last - first; ++i) {
            int64_t const of_begin = (last - i) * each;
            int const from = static_cast<int>(cute::max(begin - of_begin, int64_t(0)));
            int const to = static_cast<int>(cute::min(end - of_begin, each));
            int part = -1;
            if (to == each) {
                part = 0;
                while (all * (worker - part) / sharing > of_begin) ++part;
            }
            // Visits go from a tile's last block down, so [from, to) of them begin at block
            // each - to.
            pieces[i] = {queue.tiles - rest + last - i, static_cast<int>(each) - to, to - from,
                         part};
        }
    }

    // Writes the worker's pieces to shared memory. Called by one thread, which has the registers
    // for it that the producer lacks.
    template <class Storage>
    CUTE_DEVICE static void plan(Flash_bwd_params const &params, TileQueue const &queue,
                                 Storage &storage) {
        int const workers = static_cast<int>(gridDim.x) / Traits::kCluster;
        int const rest = queue.tiles % workers;
        bool const shares = params.head_parts == 1 && params.dkv_partial_ptr != nullptr;
        storage.next_piece = 0;
        storage.shared_begin = shares ? queue.tiles - rest : INT32_MAX;
        if (shares) {
            get_pieces(params, queue, workers, rest,
                       static_cast<int>(blockIdx.x) / Traits::kCluster, storage.pieces);
        }
    }

    // Called by the producer. Returns tile `index` or, from shared_begin on, the worker's next
    // piece. m_block < 0: none is left.
    template <class Storage>
    CUTE_DEVICE static WorkTile get_tile(Flash_bwd_params const &params, TileQueue const &queue,
                                         Storage &storage, int index) {
        bool const shared = index >= storage.shared_begin;
        SharedPiece const &piece = storage.pieces[shared ? storage.next_piece++ : 0];
        WorkTile tile = Scheduler::get_tile(params, queue, shared ? piece.tile : index);
        if (shared) {
            tile.blocks.begin += piece.begin;
            tile.blocks.count = piece.count;
            tile.blocks.unmasked = tile.blocks.unmasked > 0 ? piece.count : 0;
            tile.part = piece.part;
        }
        return tile;
    }

  private:
    // The number of workers that share tiles. Each gets at least a quarter of a tile and four
    // visits, or a whole tile if tiles are shorter. Each of its CTAs needs a counter; the counters
    // lie where the semaphores of dQ would be.
    CUTE_HOST_DEVICE static int sharing_workers(Flash_bwd_params const &params, int workers,
                                                int rest) {
        int64_t const counters =
            int64_t(params.b) * params.h * (params.seqlen_q_rounded / kSemaphoreRows);
        int64_t const able = cute::min(int64_t(workers), counters / Traits::kCluster);
        int64_t const most = cute::min(int64_t(4) * rest, rest * visits(params) / 4);
        return static_cast<int>(
            cute::max(cute::min(able, cute::max(most, int64_t(rest))), int64_t(1)));
    }
    // Visits of the longest range.
    CUTE_HOST_DEVICE static int64_t longest_range(Flash_bwd_params const &params, int workers,
                                                  int rest) {
        int64_t const ranges = sharing_workers(params, workers, rest);
        return (rest * visits(params) + ranges - 1) / ranges;
    }
    // Visits of each tile, as there is no mask.
    CUTE_HOST_DEVICE static int64_t visits(Flash_bwd_params const &params) {
        return (int64_t(params.seqlen_q) + Traits::kTileM - 1) / Traits::kTileM;
    }
};

}  // namespace flash
