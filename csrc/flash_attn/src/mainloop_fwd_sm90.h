// Warp-specialised main loop over key blocks, on wgmma and TMA. The producer is one thread or, for
// a paged cache, four warps. Each MMA warpgroup runs S = Q K^T, mask, softmax, O += P V on 64 query
// rows. It issues S of a block with P V of the block before. The softmax waits for both, as it
// writes P to the registers that P V reads; it overlaps with the other warpgroups' products.
#pragma once

#include <arch_sm90.h>

#include <cute/tensor.hpp>

#include "block_info.h"
#include "cta_plan.h"
#include "dropout.h"
#include "epilogue_fwd.h"
#include "kernel_traits_sm90.h"
#include "mask.h"
#include "merge_parts_sm90.h"
#include "mma_traits_sm90.h"
#include "paged_load_sm90.h"
#include "pipeline_sm90.h"
#include "rest_sm90.h"
#include "score_mod.h"
#include "softmax.h"
#include "tensor_maps_sm90.h"
#include "tile_scheduler.h"
#include "utils.h"
#include "work_tile.h"

namespace flash {

using namespace cute;

template <FwdConfig C>
struct MainloopFwdSm90 {
    using Traits = KernelTraitsSm90<C>;
    using Element = typename Traits::Element;
    using SharedStorage = typename Traits::SharedStorage;
    using RingKV = Ring<Traits::kStages>;
    using RingTiles = Ring<Traits::kTileSlots>;
    static constexpr int kTileM = Traits::kTileM;
    static constexpr int kTileN = Traits::kTileN;
    static constexpr int kHeadDim = Traits::kHeadDim;
    static constexpr int kWarpgroups = Traits::kMmaWarpgroups;
    static constexpr int kQRegSteps = Traits::kQRegSteps;
    // kSmallCap: whether a softcap has a cheaper form for small scores (SmallCap). It spills with
    // ALiBi and, in tiles of three warpgroups from head dimension 128 on, under a window (kTight).
    static constexpr bool kTight = C.mask == MaskKind::local && kWarpgroups == 3 && kHeadDim >= 128;
    static constexpr bool kSmallCap = C.softcap && !C.alibi && !kTight;

    using SoftmaxT = Softmax<2, C.dtype>;
    using Epilogue = EpilogueFwd<Traits>;
    using Pages = PagedLoad<Traits>;
    // A wgmma accumulator seen as that of m16n8 MMAs: (4, 1, columns / 8).
    template <int kColumns>
    using AccLayout = Layout<Shape<Shape<_2, _2>, _1, Int<kColumns / 8>>>;

    static constexpr int kBytesQ = 64 * kHeadDim * sizeof(Element);  // of one warpgroup's rows
    static constexpr int kBytesKV = kTileN * kHeadDim * sizeof(Element);

    // Whether keys and values are loaded by cp.async, in the generic proxy, and not by TMA.
    CUTE_DEVICE static bool copies(TensorMapsSm90 const &maps) {
        if constexpr (C.paged) return maps.copies();
        return false;
    }

    CUTE_DEVICE static void init_barriers(SharedStorage &storage, TensorMapsSm90 const &maps) {
        constexpr int kReleases = 4;  // arrivals of a warpgroup: one per warp
        int const fills = copies(maps) ? 32 * Pages::kWarps : C.paged ? Pages::kWarps : 1;
        int const followers = C.paged ? 3 : 0;  // producer warps that read published tiles
        for (int i = 0; i < kWarpgroups; ++i) {
            sm90::barrier_init(&storage.q_full[i], 1);
            sm90::barrier_init(&storage.q_empty[i], kReleases);
        }
        for (int i = 0; i < Traits::kStages; ++i) {
            sm90::barrier_init(&storage.k_full[i], fills);
            sm90::barrier_init(&storage.k_empty[i], kReleases * kWarpgroups);
            sm90::barrier_init(&storage.v_full[i], fills);
            sm90::barrier_init(&storage.v_empty[i], kReleases * kWarpgroups);
        }
        for (int i = 0; i < Traits::kTileSlots; ++i) {
            sm90::barrier_init(&storage.tile_full[i], 1);
            sm90::barrier_init(&storage.tile_empty[i], kReleases * kWarpgroups + followers);
        }
        sm90::fence_barrier_init();
    }

    CUTE_DEVICE static void prefetch_descriptors(TensorMapsSm90 const &maps) {
        sm90::prefetch_descriptor(&maps.q);
        if (copies(maps)) return;
        sm90::prefetch_descriptor(&maps.k);
        sm90::prefetch_descriptor(&maps.v);
    }

    // The plan of a CTA that plans for itself; it lies behind SharedStorage in shared memory.
    CUTE_DEVICE static CtaPlan<C> &own_plan(SharedStorage &storage) {
        return *reinterpret_cast<CtaPlan<C> *>(&storage + 1);
    }

    // Returns tile number `index`; its m_block is < 0 if there is no such tile.
    CUTE_DEVICE static WorkTile get_tile(Flash_fwd_params const &params, TileQueue const &queue,
                                         CtaPlan<C> const *own, int index) {
        if (index >= queue.tiles) {
            return {.m_block = -1};
        }
        if (params.plan_ptr != nullptr) {
            return plan_tile(params, own, index);
        }
        if constexpr (Traits::kWorkStealing) {
            return TileScheduler<C>::tile_in_group(params, queue.group, index);
        } else {
            return TileScheduler<C>::tile(params, index);
        }
    }

    // Loads Q, K and V of all tiles in the order of their use, as far ahead as buffers are free.
    // Run by one thread, which also handles the dependent launch: it waits for the previous kernel
    // and lets the next one start once it has issued all loads. For a paged cache it is run by four
    // warps: two load keys, two load values, which come last, and thread 0 does everything else.
    struct Producer {
        TensorMapsSm90 const &maps;
        SharedStorage &storage;
        bool const plans;
        RingKV kv;  // of the next K block; V is one or two behind; paged: of this warp's tensor
        RingTiles tiles;
        uint32_t q_parity = 0;

        CUTE_DEVICE CtaPlan<C> const *plan() const { return plans ? &own_plan(storage) : nullptr; }

        CUTE_DEVICE static bool leads() { return !C.paged || threadIdx.x == 0; }
        // Whether this thread's warp reads its tiles from where warp 0 publishes them.
        CUTE_DEVICE static bool follows() { return C.paged && threadIdx.x >= 32; }
        CUTE_DEVICE static bool loads_v(uint32_t i) { return !C.paged || i >= 32 * Pages::kWarps; }

        // Loads each warpgroup's 64 rows: of one head, or of all packed heads of some positions.
        // Rows behind the sequence are zeros: the rows of a warp decide together when it raises its
        // references, and results must not depend on other sequences.
        CUTE_DEVICE void load_q(Flash_fwd_params const &params, WorkTile const &tile) {
            if (!leads()) return;
            for (int wg = 0; wg < kWarpgroups; ++wg) {
                int const row = tile.m_block * kTileM + wg * 64;
                int const position = row_position(params, row);
                RaggedRows const rows =
                    ragged_rows(maps.q_steps, q_box(params), tile.row_q + position,
                                tile.seqlen_q - position, tile.head, tile.batch);
                sm90::barrier_wait(&storage.q_empty[wg], q_parity ^ 1);
                load_box<Traits>(maps.q, &storage.q_full[wg], kBytesQ, sm90::CacheHint::evict_first,
                                 storage.q.data() + wg * 64 * Traits::kSmemRow,
                                 kTileM * Traits::kSmemRow, row_head(params, row), rows.x, rows.y,
                                 kRaggedZ);
            }
            q_parity ^= 1;
        }

        // Loads a block of the tile's keys, or of its values, into the stage at which `ring` is.
        // Behind the last key V's rows must be zeros: their P is 0, but 0 times NaN is NaN.
        CUTE_DEVICE void load_kv(sm90::CacheHint hint, WorkTile const &tile, bool values, int block,
                                 RingKV ring) {
            int const stage = ring.stage();
            sm90::Barrier *const full = (values ? storage.v_full : storage.k_full) + stage;
            sm90::Barrier *const empty = (values ? storage.v_empty : storage.k_empty) + stage;
            auto &smem = (values ? storage.v : storage.k)[stage];
            int const row = block * kTileN;
            auto const &steps = values ? maps.v_steps : maps.k_steps;
            RaggedRows const rows = ragged_rows(steps, kTileN, tile.row_k + row,
                                                tile.seqlen_k - row, tile.head_k, tile.batch_k);
            sm90::barrier_wait(empty, ring.parity() ^ 1);
            load_box<Traits>(values ? maps.v : maps.k, full, kBytesKV, hint, smem.data(),
                             kTileN * Traits::kSmemRow, rows.x, rows.y, kRaggedZ);
        }

        // Loads a block of keys or values from a paged cache. Called by the two warps of that
        // tensor, which read the block table while they wait for the stage.
        CUTE_DEVICE void load_paged(int thread, Flash_fwd_params const &params,
                                    WorkTile const &tile, int block) {
            bool const values = loads_v(thread);
            int const row = block * kTileN;
            auto const places = Pages::look_up(thread, params, maps, tile.batch_k, tile.row_k + row,
                                               tile.seqlen_k - row);
            int const stage = kv.stage();
            sm90::Barrier *const full = (values ? storage.v_full : storage.k_full) + stage;
            sm90::Barrier *const empty = (values ? storage.v_empty : storage.k_empty) + stage;
            auto &smem = (values ? storage.v : storage.k)[stage];
            auto const await_buffer = [&] { sm90::barrier_wait(empty, kv.parity() ^ 1); };
            if (maps.copies()) {
                auto const x =
                    values ? Pages::values(params, tile.head_k) : Pages::keys(params, tile.head_k);
                Pages::copy_rows(thread, params, x, places, await_buffer, full, smem);
            } else {
                Pages::load_boxes(thread, params, maps, values ? maps.v : maps.k,
                                  values ? maps.v_steps : maps.k_steps, places[0],
                                  tile.seqlen_k - row, tile.head_k, await_buffer, full, smem);
            }
            kv.advance();
        }

        // The number of the CTA's next tile. In paged kernels collective over warp 0.
        CUTE_DEVICE static int next(TileQueue const &queue, int index) {
            if constexpr (C.paged) {
                return __shfl_sync(0xffffffffu, leads() ? queue.next(index) : 0, 0);
            }
            return queue.next(index);
        }

        // Publishes a tile to the consumers and to the producer's other warps.
        CUTE_DEVICE void publish(Flash_fwd_params const &params, WorkTile const &tile) {
            if (leads()) {
                sm90::barrier_wait(&storage.tile_empty[tiles.stage()], tiles.parity() ^ 1);
                storage.tile[tiles.stage()] = tile;
                storage.output[tiles.stage()] = Epilogue::output_offset(params, tile);
                sm90::barrier_arrive(&storage.tile_full[tiles.stage()]);
            }
        }

        // Returns the CTA's next tile and publishes it. index holds the previous tile's number or,
        // if first, this one's; afterwards it holds this one's.
        CUTE_DEVICE WorkTile next_tile(Flash_fwd_params const &params, TileQueue &queue, int &index,
                                       bool first) {
            if (!first) {
                index = next(queue, index);
            } else if (params.plan_ptr != nullptr) {
                cudaGridDependencySynchronize();
                queue.tiles = planned_tiles(params, plan());
                // If nothing is left to steal, no atomic operation needs to delay the last loads.
                bool const steals = queue.tiles > static_cast<int>(gridDim.x);
                if (CtaPlan<C>::kFits && !steals) queue.counter = nullptr;
            }
            WorkTile const tile = get_tile(params, queue, plan(), index);
            // No thread accesses global memory earlier: the others wait for their first tile or,
            // where the CTA plans, all have already waited for the previous kernel.
            if (first) cudaGridDependencySynchronize();
            publish(params, tile);
            return tile;
        }

        CUTE_DEVICE void run(Flash_fwd_params const &params, TileQueue queue) {
            if constexpr (C.paged)
                run_paged(params, queue);
            else
                run_contiguous(params, queue);
            // The first thread that triggers does so for the whole CTA; values are loaded last.
            if (loads_v(threadIdx.x)) cudaTriggerProgrammaticLaunchCompletion();
            if (copies(maps)) sm90::await_copies();
        }

        CUTE_DEVICE void run_contiguous(Flash_fwd_params const &params, TileQueue &queue) {
            int index = blockIdx.x;
            auto const hint = CtaPlan<C>::kOfCaches ? maps.kv_hint : sm90::CacheHint::evict_last;
            WorkTile tile{};
            auto const load_k = [&](int n) {
                load_kv(hint, tile, false, tile.blocks.template block<C.mask>(n), kv);
                kv.advance();
            };
            // ring: as it was when the same block's keys were loaded.
            auto const load_v = [&](int n, RingKV ring) {
                load_kv(hint, tile, true, tile.blocks.template block<C.mask>(n), ring);
            };
            // The next tile is drawn and published before the current one's last V block, whose
            // load waits for its stage. The first tile comes the same way, behind an empty one, so
            // that this code exists once: calls over few keys wait for instruction fetches.
            bool first = true;
            WorkTile following{};
            CUTE_NO_UNROLL
            while (true) {
                if (tile.blocks.count > 0) load_v(0, kv.before());
                tile = following;
                if (tile.m_block < 0) break;
                int n = tile.blocks.count - 1;
                if (n >= 0) {
                    load_k(n);
                    load_q(params, tile);
                }
                CUTE_NO_UNROLL
                for (; n > 0; --n) {
                    load_k(n - 1);
                    load_v(n, kv.before().before());
                }
                following = next_tile(params, queue, index, first);
                tiles.advance();
                first = false;
            }
        }

        // To save registers, warps read their tile in shared memory, where it is published, and
        // nvcc is kept from hoisting what depends on the thread index out of the loop over tiles.
        CUTE_DEVICE void run_paged(Flash_fwd_params const &params, TileQueue &queue) {
            int index = blockIdx.x;
            CUTE_NO_UNROLL
            for (bool first = true;; first = false) {
                if (follows()) {
                    sm90::barrier_wait(&storage.tile_full[tiles.stage()], tiles.parity());
                } else {
                    next_tile(params, queue, index, first);
                    __syncwarp();
                }
                WorkTile const &tile = storage.tile[tiles.stage()];
                if (tile.m_block < 0) break;
                uint32_t thread = threadIdx.x;
                sm90::pin_register(thread);
                int const last = tile.blocks.count - 1;
                CUTE_NO_UNROLL
                for (int n = last; n >= 0; --n) {
                    load_paged(thread, params, tile, tile.blocks.template block<C.mask>(n));
                    if (n == last) load_q(params, tile);
                }
                __syncwarp();
                if (follows()) {
                    sm90::barrier_arrive(&storage.tile_empty[tiles.stage()], thread % 32 == 0);
                }
                tiles.advance();
            }
        }
    };

    // One MMA warpgroup. It computes 64 rows of every tile; in tiles without them it may rest.
    struct Consumer {
        SharedStorage &storage;
        unsigned *const arrivals;  // as in TileQueue
        SmallCap const &small_cap;
        int const warpgroup;
        int const thread;  // among all MMA threads
        TensorMapsSm90 const &maps;
        RingKV k;  // V's is one use behind: P V of a block follows the next block's Q K^T
        RingTiles tiles;
        uint32_t q_parity = 0;
        bool small = kSmallCap;  // until the warp has met larger scores in this tile

        // Called when this warp no longer reads the buffer: one lane arrives for it, if `now`.
        CUTE_DEVICE static void release(sm90::Barrier *empty, bool now = true) {
            sm90::barrier_arrive(empty, now && threadIdx.x % 32 == 0);
        }

        CUTE_DEVICE static uint32_t uniform(uint32_t x) { return __shfl_sync(0xffffffffu, x, 0); }

        // The current tile, as the producer has published it.
        CUTE_DEVICE WorkTile const &tile() const { return storage.tile[tiles.stage()]; }
        CUTE_DEVICE OutputOffset const &output() const { return storage.output[tiles.stage()]; }
        // The tile for the epilogue: the copy in registers or, in paged kernels and at head
        // dimension 32, the published one. Copies spill there, and with them nvcc gives the wgmma
        // of the two loops different registers in some.
        CUTE_DEVICE WorkTile const &again(WorkTile const &copy) const {
            if constexpr (!C.paged && kHeadDim != 32) return copy;
            // The copy keeps nvcc from holding the tile's address in a register all along.
            RingTiles same = tiles;
            if constexpr (kMayRest<C>) sm90::pin_register(same.uses);
            return storage.tile[same.stage()];
        }

        // Called once S is complete. Releases K's stage. Also releases Q: after the tile's first
        // block if all of Q is in registers, else after its last block.
        template <class Acc>
        CUTE_DEVICE void release_k(Acc &rS, bool first, bool last) const {
            sm90::pin(rS);
            release(&storage.k_empty[k.stage()]);
            constexpr bool kAllInRegs = kQRegSteps == Traits::kQSteps;
            if (first || !kAllInRegs) release(&storage.q_empty[warpgroup], kAllInRegs || last);
        }

        // Called once a tile is stored: counts a split tile's part; the CTA of the last one merges.
        CUTE_DEVICE void arrive(Flash_fwd_params const &params) const {
            if constexpr (MergeParts<Traits>::kCan) {
                if (arrivals != nullptr && tile().is_part()) {
                    MergeParts<Traits>::arrive(params, arrivals, own_plan(storage).is_last, tile(),
                                               1 + kWarpgroups);
                }
            }
        }

        CUTE_DEVICE void release_tile() {
            __syncwarp();
            release(&storage.tile_empty[tiles.stage()]);
            tiles.advance();
            small = kSmallCap;
        }

        // Waits for the next tile that has rows of this warpgroup; false if none is left. Stores
        // the output of tiles whose rows see no key.
        CUTE_DEVICE bool await_tile(Flash_fwd_params const &params) {
            CUTE_NO_UNROLL
            while (true) {
                sm90::barrier_wait(&storage.tile_full[tiles.stage()], tiles.parity());
                if (tile().m_block < 0) {
                    return false;
                }
                if (tile().blocks.count > 0) {
                    if (has_rows<Traits>(params, tile(), warpgroup)) {
                        // The rings' uses are warp-uniform, rested or not; nvcc needs to be told.
                        if constexpr (kMayRest<C>) tiles.uses = uniform(tiles.uses);
                        return true;
                    }
                    rest(*this);
                } else {
                    Epilogue::store_empty(params, tile(), output(), thread);
                }
                release_tile();
            }
        }

        CUTE_DEVICE RingKV v() const { return k.before(); }

        CUTE_DEVICE void await_k() const {
            sm90::barrier_wait(&storage.k_full[k.stage()], k.parity());
            fence_copies();
        }
        CUTE_DEVICE void await_v() {
            // Keeps nvcc from deriving V's stage from K's: in one kernel of eight the two loops
            // then had V's descriptor in different registers. Other kernels stay as timed.
            if constexpr (C.paged) sm90::pin_register(k.uses);
            sm90::barrier_wait(&storage.v_full[v().stage()], v().parity());
            fence_copies();
        }
        // The wait orders copies before this thread's generic-proxy accesses, but wgmma reads
        // through the async proxy. A proxy fence anywhere between write and read orders them (PTX
        // ISA, "causality order"); with it here, the producer need not wait for its copies.
        CUTE_DEVICE void fence_copies() const {
            if (copies(maps)) sm90::fence_async_proxy();
        }
        CUTE_DEVICE void await_q() {
            sm90::barrier_wait(&storage.q_full[warpgroup], q_parity);
            q_parity ^= 1;
        }

        // Loads the first kQRegSteps k16 steps of Q, which stay in registers for the whole tile.
        template <class Fragment>
        CUTE_DEVICE void load_q_fragments(Fragment &tSrQreg) const {
            Tensor sQ = make_tensor(make_smem_ptr(storage.q.data()),
                                    typename Traits::SmemLayoutQ{});  // (M, d)
            sm90::load_steps<typename Traits::TiledMmaQregK>(sQ, thread, tSrQreg);
        }

        // Applies softcap, ALiBi and mask to the scores of a visit's block. A warp decides for all
        // its rows whether SmallCap applies. It does not try in masked blocks, as scores that the
        // mask removes must not decide, nor once it has met larger scores in this tile.
        template <class Scores>
        CUTE_DEVICE void finish_scores(Flash_fwd_params const &params, WorkTile const &tile,
                                       ScoreMod<Traits, 2> const &score_mod, Scores &tSrS,
                                       int visit, bool masked) {
            auto const block = [&] { return tile.blocks.template block<C.mask>(visit); };
            bool capped = false;
            if (kSmallCap && small && !masked) capped = small = small_cap.apply(tSrS);
            score_mod.apply(tSrS, thread, block(), capped);
            if (masked) Mask<C>{params, tile}.template apply<Traits>(tSrS, thread, block());
        }

        // Ping-pong: the warpgroups issue their products in turns, so that the softmax of one runs
        // under the products of another. Named barrier 0 is __syncthreads().
        CUTE_DEVICE void wait_turn() const {
            if constexpr (C.ping_pong) {
                sm90::named_barrier_sync(1 + warpgroup, 256);
            }
        }
        CUTE_DEVICE void pass_turn() const {
            if constexpr (C.ping_pong) {
                int const next = warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1;
                sm90::named_barrier_arrive(1 + next, 256);
            }
        }
        CUTE_DEVICE void first_turn() const {
            if (warpgroup == kWarpgroups - 1) {
                pass_turn();
            }
        }

        CUTE_DEVICE void run(Flash_fwd_params const &params) {
            typename Traits::TiledMmaQK mma_qk;
            typename Traits::TiledMmaQregK mma_qreg_k;  // Q's first k16 steps, kept in registers
            typename Traits::TiledMmaPV mma_pv;
            auto const thr_qk = mma_qk.get_slice(warpgroup * 128);
            auto const thr_pv = mma_pv.get_slice(warpgroup * 128);
            Tensor tSrQreg = make_tensor<Element>(
                Layout<Shape<Shape<_2, _2, _2>, _1, Int<kQRegSteps>>>{});  // (8, 1, steps)
            Tensor rS = partition_fragment_C(
                mma_qk, Shape<Int<kTileM>, Int<kTileN>>{});  // ((2, 2, N/8), 1, 1)
            Tensor rO = partition_fragment_C(
                mma_pv, Shape<Int<kTileM>, Int<kHeadDim>>{});             // ((2, 2, d/8), 1, 1)
            Tensor tSrS = make_tensor(rS.data(), AccLayout<kTileN>{});    // (4, 1, N/8)
            Tensor tOrO = make_tensor(rO.data(), AccLayout<kHeadDim>{});  // (4, 1, d/8)
            Tensor tOrP = make_tensor<Element>(
                Layout<Shape<Shape<_2, _2, _2>, _1, Int<kTileN / 16>>>{});  // (8, 1, N/16)
            SoftmaxT softmax(params.scale_softmax_log2);

            auto const issue_qk = [&] {
                // Keeps ptxas from holding the descriptors of many steps in vector registers over
                // the loop: it cannot know that this adds 0, as a ring has fewer than 2^31 uses.
                constexpr bool kMany = Traits::kQSteps - kQRegSteps > 8;
                Element *const q = storage.q.data() + (kMany ? k.uses >> 31 : 0);
                Tensor sQ =
                    make_tensor(make_smem_ptr(q), typename Traits::SmemLayoutQ{});  // (M, d)
                Tensor tSrQ = thr_qk.make_fragment_A(thr_qk.partition_A(sQ));       // (1, 1, d/16)
                Tensor sK = make_tensor(make_smem_ptr(storage.k[k.stage()].data()),
                                        typename Traits::SmemLayoutKV{});      // (N, d)
                Tensor tSrK = thr_qk.make_fragment_B(thr_qk.partition_B(sK));  // (1, 1, d/16)
                sm90::wgmma_group(rS, [&] {
                    sm90::wgmma_steps<0, kQRegSteps, false>(mma_qreg_k, tSrQreg, tSrK, rS);
                    sm90::wgmma_steps<kQRegSteps, Traits::kQSteps, (kQRegSteps > 0)>(mma_qk, tSrQ,
                                                                                     tSrK, rS);
                });
            };
            auto const issue_pv = [&] {
                Tensor sVt = make_tensor(make_smem_ptr(storage.v[v().stage()].data()),
                                         typename Traits::SmemLayoutVt{});      // (d, N)
                Tensor tOrV = thr_pv.make_fragment_B(thr_pv.partition_B(sVt));  // (1, 1, N/16)
                sm90::wgmma_issue<true>(mma_pv, tOrP, tOrV, rO);
            };
            auto const release_v = [&] {
                sm90::pin(rO);
                release(&storage.v_empty[v().stage()]);
            };
            // Issues S = Q K^T of block n and O += P V of block n + 1 together; waits for S.
            auto const compute_scores = [&](int n) {
                await_k();
                wait_turn();
                issue_qk();
                await_v();
                issue_pv();
                pass_turn();
                sm90::wgmma_wait<1>();
                release_k(rS, false, n == 0);
            };
            auto const finish_pv = [&] {
                sm90::wgmma_wait<0>();
                release_v();
                k.advance();
            };

            CUTE_NO_UNROLL
            while (await_tile(params)) {
                WorkTile const tile = this->tile();
                int n = tile.blocks.count - 1;  // visits left after this one
                int const unmasked = tile.blocks.unmasked;
                ScoreMod<Traits, 2> const score_mod(params, tile, thread);
                Dropout<Traits> const dropout(params, tile, thread);
                await_q();
                load_q_fragments(tSrQreg);
                await_k();
                issue_qk();
                sm90::wgmma_wait<0>();
                release_k(rS, true, n == 0);
                k.advance();
                finish_scores(params, tile, score_mod, tSrS, n, n >= unmasked);
                softmax.start(tSrS, tOrP);
                dropout.apply(tOrP, tile.blocks.template block<C.mask>(n));
                clear(rO);
                --n;
                if constexpr (kMayRest<C>) k.uses = uniform(k.uses);
                // Each warp takes the loop that its rows need, but PTX asks all four of a warpgroup
                // to execute the same wgmma. In kernels that ship, both loops' are the same words
                // (test_shipped_kernels.py); in some others a register differs (facts.md).
                CUTE_NO_UNROLL
                while (n >= 0) {
                    // Blocks that are masked or likely to need their row maximum, which is computed
                    // while P V of the block before runs.
                    CUTE_NO_UNROLL
                    for (; n >= 0 && (n >= unmasked || softmax.seeks_max()); --n) {
                        compute_scores(n);
                        bool const masked = n >= unmasked;
                        finish_scores(params, tile, score_mod, tSrS, n, masked);
                        typename SoftmaxT::RowTensor factor;  // (rows)
                        bool const raised = softmax.raise_ref(tSrS, factor, masked);
                        finish_pv();
                        softmax.update_bounded(tSrS, tOrP, tOrO, raised, factor);
                        dropout.apply(tOrP, tile.blocks.template block<C.mask>(n));
                    }
                    CUTE_NO_UNROLL
                    for (; n >= 0 && !softmax.seeks_max(); --n) {
                        compute_scores(n);
                        finish_scores(params, tile, score_mod, tSrS, n, false);
                        finish_pv();
                        softmax.update_unbounded(tSrS, tOrP, tOrO);
                        dropout.apply(tOrP, tile.blocks.template block<C.mask>(n));
                    }
                }
                await_v();
                wait_turn();
                issue_pv();
                pass_turn();
                sm90::wgmma_wait<0>();
                release_v();
                Epilogue::finish(params, again(tile), output(), thread, softmax, tOrO);
                arrive(params);
                release_tile();
            }
        }
    };
};

}  // namespace flash
