// The producer of the sm90 class's backward: one thread, which loads what the consumers read.
#pragma once

#include <arch_sm90.h>
#include <cuda_runtime.h>

#include "kernel_traits_bwd_sm90.h"
#include "pipeline_sm90.h"
#include "shared_tiles_sm90.h"
#include "tensor_maps_bwd_sm90.h"
#include "tile_scheduler_bwd_sm90.h"
#include "work_tile.h"

namespace flash {

using namespace cute;

// Loads as far ahead as buffers are free, in the order of use, except that above d = 128 a tile's K
// comes behind V and dO, as its buffers are released last. Run by one thread, which also keeps the
// order of kernels (programmatic dependent launch), as in the forward.
template <class Traits>
struct ProducerBwdSm90 {
    using Element = typename Traits::Element;
    using Scheduler = TileSchedulerBwdSm90<Traits>;
    static constexpr int kTileM = Traits::kTileM;
    static constexpr int kTileN = Traits::kTileN;
    static constexpr int kHeadDim = Traits::kHeadDim;
    static constexpr int kBytesStep = kTileM * kHeadDim * sizeof(Element);
    static constexpr int kBytesStats = kTileM * sizeof(float2);

    TensorMapsBwdSm90 const &maps;
    typename Traits::SharedStorage &storage;
    int const rank;  // in the cluster
    Ring<Traits::kStages> q;
    Ring<Traits::kDoutStages> dout;
    Ring<Traits::kTileSlots> tiles, numbers;
    uint32_t own_parity = 0;  // of K and V

    // Loads kColumns columns of kRows rows of a head, from row `row` of a sequence on, which has
    // `length` rows and begins at row `begin` of the tensor. Rows behind its end arrive as zeros.
    template <int kRows, int kColumns = kHeadDim>
    CUTE_DEVICE static void load_rows(CUtensorMap const &map, sm90::Barrier *full, int bytes,
                                      sm90::CacheHint hint, Element *smem, int row, int begin,
                                      int length, int head, int batch, int column = 0) {
        constexpr int kPages = kColumns / Traits::kSmemRow;
        if constexpr (Traits::kVarlen) {
            load_columns<Traits, kPages>(map, full, bytes, hint, smem, kRows * Traits::kSmemRow,
                                         column, kRaggedRows - length + row, head, begin + length,
                                         kRaggedZ);
        } else {
            load_columns<Traits, kPages>(map, full, bytes, hint, smem, kRows * Traits::kSmemRow,
                                         column, row, head, batch);
        }
    }

    // Loads kColumns columns, from `column` on, of the keys or values of a tile that the cluster's
    // CTA `owner` owns.
    template <int kColumns>
    CUTE_DEVICE void load_keys(CUtensorMap const &map, sm90::Barrier *full, sm90::Barrier *empty,
                               Element *smem, WorkTile const &tile, int owner, int column = 0) {
        sm90::barrier_wait(empty, own_parity ^ 1);
        load_rows<kTileN, kColumns>(map, full, kTileN * kColumns * sizeof(Element),
                                    sm90::CacheHint::evict_first, smem,
                                    Scheduler::key_begin(tile, owner), tile.row_k, tile.seqlen_k,
                                    tile.head_k, tile.batch, column);
    }
    // Returns the number of the worker's next tile. If tiles are drawn from a counter, the first
    // CTA of a cluster draws for both and sends the number to the second.
    CUTE_DEVICE int next(Flash_bwd_params const &params, TileQueue const &queue, int index) {
        int const workers = static_cast<int>(gridDim.x) / Traits::kCluster;
        if (Traits::kMayOwnHeads && queue.group == 0) {
            return Scheduler::next_owned(params, index, workers);
        }
        if constexpr (!Traits::kSteals) return index + workers;
        auto const draw = [&] {
            return Scheduler::waits_turn(params) ? queue.draw(queue.tiles + workers)
                                                 : queue.next(index, workers);
        };
        if constexpr (Traits::kCluster > 1) {
            if (queue.counter == nullptr) return draw();
            auto &other = storage.other;
            int const slot = numbers.stage();
            if (rank == 0) {
                index = draw();
                sm90::barrier_wait(&other.next_empty[slot], numbers.parity() ^ 1);
                sm90::store_async_at(1, &other.next[slot], index, &other.next_full[slot]);
            } else {
                sm90::barrier_arrive_expect(&other.next_full[slot], sizeof(uint32_t));
                sm90::barrier_wait(&other.next_full[slot], numbers.parity());
                index = other.next[slot];
                sm90::barrier_arrive_at(0, &other.next_empty[slot], true);
            }
            numbers.advance();
            return index;
        } else {
            return draw();
        }
    }

    CUTE_DEVICE void load_q(WorkTile const &tile, int head, int block) {
        sm90::Barrier *const full = &storage.q_full[q.stage()];
        sm90::barrier_wait(&storage.q_empty[q.stage()], q.parity() ^ 1);
        load_rows<kTileM>(maps.q, full, kBytesStep + kBytesStats, sm90::CacheHint::evict_last,
                          storage.q[q.stage()].data(), block * kTileM, tile.row_q, tile.seqlen_q,
                          head, tile.batch);
        sm90::tma_load(&maps.stats, full, sm90::CacheHint::evict_last, storage.stats[q.stage()], 0,
                       Scheduler::stats_begin(tile) / kStatsRow + block * (kTileM / kStatsRow),
                       head, Traits::kVarlen ? 0 : tile.batch);
        q.advance();
    }

    CUTE_DEVICE void load_dout(WorkTile const &tile, int head, int block) {
        sm90::barrier_wait(&storage.dout_empty[dout.stage()], dout.parity() ^ 1);
        load_rows<kTileM>(maps.dout, &storage.dout_full[dout.stage()], kBytesStep,
                          sm90::CacheHint::evict_last, storage.dout[dout.stage()].data(),
                          block * kTileM, tile.row_q, tile.seqlen_q, head, tile.batch);
        dout.advance();
    }

    // Tile `index`, or the next piece of a shared one.
    CUTE_DEVICE WorkTile get_tile(Flash_bwd_params const &params, TileQueue const &queue,
                                  int index) {
        if constexpr (Traits::kMayShare) {
            return SharedTilesSm90<Traits>::get_tile(params, queue, storage, index);
        }
        return Scheduler::get_tile(params, queue, index);
    }

    // Hands a tile to the consumers and the threads of Writer.
    CUTE_DEVICE void publish(WorkTile const &tile) {
        sm90::barrier_wait(&storage.tile_empty[tiles.stage()], tiles.parity() ^ 1);
        storage.tile[tiles.stage()] = tile;
        sm90::barrier_arrive(&storage.tile_full[tiles.stage()]);
        tiles.advance();
    }

    CUTE_DEVICE void run(Flash_bwd_params const &params, TileQueue const &launched) {
        // No thread of the CTA accesses global memory before this one has synchronised here, as the
        // others wait for their first tile.
        bool const waits_first = Traits::kVarlen || Scheduler::waits_turn(params);
        if (waits_first) cudaGridDependencySynchronize();
        auto const &queue = Scheduler::queue(params, launched);
        int index = static_cast<int>(blockIdx.x) / Traits::kCluster;
        if (Traits::kMayOwnHeads && queue.group == 0) index = Scheduler::first_owned(params, index);
        if (Traits::kSteals && Scheduler::waits_turn(params)) index = next(params, queue, index);
        WorkTile tile = get_tile(params, queue, index);
        if (!waits_first) cudaGridDependencySynchronize();
        publish(tile);
        CUTE_NO_UNROLL
        while (tile.m_block >= 0) {
            int const ratio = params.h_h_k_ratio, steps = tile.blocks.count * ratio;
            auto step = Scheduler::first_step(params, tile);
            CUTE_NO_UNROLL
            for (int i = 0; i < steps; ++i) {
                int const block = tile.blocks.begin + step.visit;
                bool const first = i == 0;
                auto const load_k = [&] {
                    load_keys<Traits::kColumnsK>(maps.k, &storage.k_full, &storage.k_empty,
                                                 storage.k.data(), tile, rank);
                    if constexpr (Traits::kWide) {  // the other CTA's K, for this CTA's part of dQ
                        constexpr int kColumns = Traits::kDqColumns;
                        load_keys<kColumns>(maps.k, &storage.other.k_full, &storage.k_empty,
                                            storage.other.k.data(), tile, 1 - rank,
                                            rank * kColumns);
                    }
                };
                load_q(tile, step.head, block);
                if (!Traits::kWide && first) load_k();
                if (first) {
                    load_keys<kHeadDim>(maps.v, &storage.v_full, &storage.v_empty, storage.v.data(),
                                        tile, rank);
                }
                load_dout(tile, step.head, block);
                if (Traits::kWide && first) load_k();  // its buffers are released last
                own_parity ^= first;
                step.advance(ratio);
            }
            // Drawn only now, so that the worker that ends first gets the next tile.
            index = next(params, queue, index);
            tile = get_tile(params, queue, index);
            publish(tile);
        }
        cudaTriggerProgrammaticLaunchCompletion();
    }
};

}  // namespace flash
