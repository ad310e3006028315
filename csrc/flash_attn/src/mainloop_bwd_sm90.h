// The main loop of the backward on wgmma and TMA for d 96 and 128, and what the others share; the
// consumers have loops of their own up to d = 64 (mainloop_bwd_64_sm90.h) and above d = 128
// (mainloop_bwd_wide_sm90.h). A CTA owns a tile of keys and visits blocks of queries of all query
// heads of its key head; each MMA warpgroup owns 64 of the keys:
//
//   S^T = K Q^T, dP^T = V dO^T, P = exp(S - LSE), dS = P * (dP - D), D of preprocess
//   dV += P^T dO, dK += dS^T Q      per warpgroup, in registers
//   dQ += dS K                      over all keys of the CTA, summed up in global memory
//
// The accumulators of P^T and dS^T are A operands as they are, in registers. dS also goes to shared
// memory, where each warpgroup reads the other's, too, and so does dQ, for one thread that adds it
// to the sums. dQ of a step needs both warpgroups' dS and so is issued behind S of the next step.
// ptxas moves the exponentials behind the wait for dQ. While a warpgroup computes them, the other's
// products keep the tensor cores busy: the warpgroups take turns with dK, S and dQ, as both at once
// would share the tensor cores and then both compute. Waiting for dO ahead of dQ, which kept the
// exponentials under dQ, cost 1 to 8 % (docs/tried_sm90.md).
#pragma once

#include <arch_sm90.h>

#include <cute/arch/copy_sm90.hpp>
#include <cute/tensor.hpp>

#include "block_info.h"
#include "dq_sums_sm90.h"
#include "flash_bwd_postprocess.h"
#include "head_parts.h"
#include "kernel_traits_bwd_sm90.h"
#include "mask.h"
#include "mma_traits_sm90.h"
#include "order_dq_sm90.h"
#include "own_keys_sm90.h"
#include "pipeline_sm90.h"
#include "producer_bwd_sm90.h"
#include "shared_sums_sm90.h"
#include "store_accumulator.h"
#include "tile_scheduler_bwd_sm90.h"
#include "utils.h"
#include "weights_bwd_sm90.h"
#include "work_tile.h"
#include "writer_dq_sm90.h"

namespace flash {

using namespace cute;

template <class Traits>
struct MainloopBwdSm90 {
    using Element = typename Traits::Element;
    using SharedStorage = typename Traits::SharedStorage;
    using Scheduler = TileSchedulerBwdSm90<Traits>;
    using RingSteps = Ring<Traits::kStages>;
    using RingTiles = Ring<Traits::kTileSlots>;
    using RingDs = Ring<Traits::kDsStages>;
    static constexpr int kTileM = Traits::kTileM;
    static constexpr int kTileN = Traits::kTileN;
    static constexpr int kHeadDim = Traits::kHeadDim;
    // A wgmma accumulator seen as that of m16n8 MMAs: (4, 1, columns / 8).
    template <int kColumns>
    using AccLayout = Layout<Shape<Shape<_2, _2>, _1, Int<kColumns / 8>>>;

    // writers: threads of Writer, which write dQ or keep its order; they, too, read the tiles.
    CUTE_DEVICE static void init_barriers(SharedStorage &storage, int writers) {
        constexpr int kWarps = 4;  // of a warpgroup, with one arrival each
        constexpr int kReaders = kWarps * Traits::kWarpgroups;
        auto const init = [&](sm90::Barrier *full, int writers, sm90::Barrier *empty) {
            sm90::barrier_init(full, writers);
            if (empty != nullptr) sm90::barrier_init(empty, kReaders);
        };
        init(&storage.k_full, 1, &storage.k_empty);
        sm90::barrier_init(&storage.v_full, 1);
        sm90::barrier_init(&storage.v_empty, Traits::kWide ? kWarps : kReaders);
        for (int i = 0; i < Traits::kStages; ++i) {
            init(&storage.q_full[i], 1, &storage.q_empty[i]);
        }
        for (int i = 0; i < Traits::kDoutStages; ++i) {
            init(&storage.dout_full[i], 1, &storage.dout_empty[i]);
        }
        for (int i = 0; i < Traits::kDsStages; ++i) {
            init(&storage.ds_full[i], Traits::kWide ? kWarps : kReaders, nullptr);
        }
        if constexpr (Traits::kWide) {
            sm90::barrier_init(storage.p_full.data(), kWarps);
            sm90::barrier_init(storage.p_empty.data(), kWarps);
            auto &other = storage.other;
            sm90::barrier_init(&other.k_full, 1);
            for (int i = 0; i < Traits::kDsStages; ++i) {
                sm90::barrier_init(&other.ds_full[i], 1);
                sm90::barrier_init(&other.ds_sent[i], kReaders);
            }
            for (int i = 0; i < Traits::kTileSlots; ++i) {
                sm90::barrier_init(&other.next_full[i], 1);
                sm90::barrier_init(&other.next_empty[i], 1);
            }
        }
        for (int i = 0; i < Traits::kTileSlots; ++i) {
            sm90::barrier_init(&storage.tile_full[i], 1);
            sm90::barrier_init(&storage.tile_empty[i], kReaders + writers);
        }
        if constexpr (Traits::kWide) {
            for (int i = 0; i < Traits::kDqSlots; ++i) {
                init(&storage.dq_turn[i], cute::max(writers, 1), &storage.dq_stored[i]);
            }
        } else {
            sm90::barrier_init(&storage.dq_full, kReaders);
            sm90::barrier_init(&storage.dq_empty, cute::max(writers, 1));
        }
        sm90::fence_barrier_init();
    }

    using Producer = ProducerBwdSm90<Traits>;
    using Writer = std::conditional_t<Traits::kWide, OrderDqSm90<Traits>, WriterDqSm90<Traits>>;

    // One MMA warpgroup. mainloop_bwd_64_sm90.h and mainloop_bwd_wide_sm90.h derive theirs from it.
    struct Consumer {
        using Step = typename Scheduler::Step;
        SharedStorage &storage;
        int const warpgroup;
        int const thread;  // among all MMA threads
        int const rank;    // in the cluster
        bool const owns;   // heads: TileSchedulerBwdSm90::owns_heads()
        RingSteps step;    // of Q and, up to d = 128, of dO
        RingDs ds;
        RingTiles tiles;
        uint32_t own_parity = 0;
        Ring<1> dq;
        OwnKeysSm90<Traits, Traits::kKeySteps> own_k;
        OwnKeysSm90<Traits, Traits::kValueSteps> own_v;

        // One lane arrives for the warp, which no longer reads the buffer, or has filled it.
        CUTE_DEVICE static void release(sm90::Barrier *empty) {
            sm90::barrier_arrive(empty, threadIdx.x % 32 == 0);
        }

        // The current tile.
        CUTE_DEVICE WorkTile const &tile() const { return storage.tile[tiles.stage()]; }
        CUTE_DEVICE int block(int visit) const { return tile().blocks.begin + visit; }

        // Releases Q, dO and the statistics of a step. Ordinary loads read the statistics, and TMA
        // overwrites them: the proxy fence and __syncwarp() of publish_ds(), behind the last of
        // these loads, order the two.
        CUTE_DEVICE void release_step(RingSteps const &ring) const {
            release(&storage.q_empty[ring.stage()]);
            release(&storage.dout_empty[ring.stage()]);
        }

        // The statistics (LSE, D) of two neighbouring queries, those of elements (., ., j).
        CUTE_DEVICE float4 stats(int j) const {
            return reinterpret_cast<float4 const *>(
                storage.stats[step.stage()])[Traits::query_of(thread, 0) / 2 + 4 * j];
        }

        template <class Scores>
        CUTE_DEVICE void apply_mask(Flash_bwd_params const &params, Scores &tSrS, int visit) const {
            WorkTile const tile = this->tile();
            int const first_query = block(visit) * kTileM;
            mask_scores_of_keys<Traits::kMask>(
                params, tile,
                make_tensor(tSrS.data(), layout_acc_rowcol(tSrS.layout())),  // (keys, queries)
                [&](int i) { return Scheduler::key_begin(tile, rank) + Traits::key_of(thread, i); },
                [&](int query) {
                    return Traits::cols_before(query - first_query - Traits::query_of(thread, 0));
                });
        }

        // Softcap, ALiBi and dropout of a step.
        using Weights = WeightsBwdSm90<Traits>;
        CUTE_DEVICE Weights weights(Flash_bwd_params const &params, Step const &at) const {
            return {params, tile(), at.head, block(at.visit) * kTileM + Traits::query_of(thread, 0),
                    Scheduler::key_begin(tile(), rank) + Traits::key_of(thread, 0)};
        }

        // Turns elements (., 0, j) of S^T into P^T, in place. tSrS: (4, 1, M/8).
        template <class Scores>
        CUTE_DEVICE void exponentiate(Flash_bwd_params const &params, Scores &tSrS, int j) const {
            float4 const of_two = stats(j);
            CUTE_UNROLL
            for (int i = 0; i < 4; ++i) {
                float const lse_log2 = i % 2 == 0 ? of_two.x : of_two.z;
                tSrS(i, 0, j) = exp2f(tSrS(i, 0, j) * params.scale_softmax_log2 - lse_log2);
            }
        }

        // Turns dP^T into dS^T, in place. tSrDp: (4, 1, M/8).
        template <class P, class Scores>
        CUTE_DEVICE void differentiate(Flash_bwd_params const &params, P const &tSrP,
                                       Scores &tSrDp) const {
            CUTE_UNROLL
            for (int j = 0; j < kTileM / 8; ++j) {
                float4 const of_two = stats(j);
                CUTE_UNROLL
                for (int i = 0; i < 4; ++i) {
                    float const d = i % 2 == 0 ? of_two.y : of_two.w;
                    tSrDp(i, 0, j) = Weights::ds(params, tSrP(i, 0, j), tSrDp(i, 0, j), d);
                }
            }
        }

        // Writes dS^T, in tSrDs as A operand (8, 1, M/16), transposed to a page of shared memory:
        // each stmatrix of a warp writes 16 queries of 16 keys.
        template <class Fragment>
        CUTE_DEVICE void write_ds(Fragment const &tSrDs) const {
            int const query = thread % 32 / 16 * 8 + thread % 8;
            int const key = Traits::key_of(thread / 32 * 32, 0) + thread / 8 % 2 * 8;
            auto const layout =
                as_position_independent_swizzle_layout(typename Traits::SmemLayoutDs{});  // (M, N)
            Element *const begin = storage.ds[ds.stage()].data() + layout(query, key);
            Tensor words = recast<uint32_t>(tSrDs);  // (4, 1, M/16)
            CUTE_UNROLL
            for (int j = 0; j < kTileM / 16; ++j) {
                SM90_U16x8_STSM_T::copy(words(0, 0, j), words(1, 0, j), words(2, 0, j),
                                        words(3, 0, j),
                                        *reinterpret_cast<uint128_t *>(begin + j * 16 * 64));
            }
        }
        // Makes dS of this warp visible to wgmma, and arrives at ds_full for the warp.
        CUTE_DEVICE void publish_ds() const {
            sm90::fence_async_proxy();
            __syncwarp();
            release(&storage.ds_full[ds.stage()]);
        }
        template <class Fragment>
        CUTE_DEVICE void store_ds(Fragment const &tSrDs) const {
            write_ds(tSrDs);
            publish_ds();
        }

        // The first row of the sums of a block of an owned head. They lie in the CTA's own place.
        CUTE_DEVICE int64_t sums_row(Flash_bwd_params const &params, int head, int block) const {
            int64_t const place = int64_t(blockIdx.x) * params.h_h_k_ratio + head - tile().head_q;
            return place * params.seqlen_q_rounded + block * kTileM;
        }

        // Calls f(sums, index of the block) for all blocks of queries of an owned key head.
        template <class Function>
        CUTE_DEVICE void for_each_sums(Flash_bwd_params const &params, Function const &f) const {
            int const blocks = Block::blocks_of_head(params);
            CUTE_NO_UNROLL
            for (int i = 0; i < params.h_h_k_ratio * blocks; ++i) {
                int const head = tile().head_q + i / blocks;
                int const block = i % blocks;
                f(DqSumsSm90<Traits>(params.dq_accum_ptr, sums_row(params, head, block), thread),
                  (tile().batch * params.h + head) * blocks + block);
            }
        }
        // Begins a tile of an owned head; zeroes the head's sums before the first one. Each tile
        // waits until the one before has added its parts, so dQ has the same bits each time.
        CUTE_DEVICE void begin_owned(Flash_bwd_params const &params) const {
            sm90::bulk_wait();
            if (tile().m_block > 0) return;
            for_each_sums(params, [](auto const &sums, int) { sums.zero(); });
            sm90::fence_async_proxy_global();
            __syncwarp();
        }
        // Behind an owned head's last tile: rounds its sums to dQ.
        CUTE_DEVICE void end_head(Flash_bwd_params const &params) const {
            sm90::bulk_wait();
            __syncwarp();
            sm90::fence_async_proxy_global();
            if (params.dq_ptr == nullptr) return;
            for_each_sums(params,
                          [&](auto const &sums, int i) { sums.round(params, Block(params, i)); });
        }

        // Writes the CTA's part of dQ of a block to shared memory, in the order of each warp's
        // accumulators. The writer adds it to the sums or, for an owned head, this warp, by a bulk
        // reduction. rDq: ((2, 2, N/8), 1, 1).
        template <class Acc>
        CUTE_DEVICE void add_dq(Flash_bwd_params const &params, int head, int block,
                                Acc const &rDq) {
            bool const adds = Traits::kMayOwnHeads && owns;
            if (adds) {
                sm90::bulk_wait_read();  // of the step before, by the lane that issued it
                __syncwarp();
            } else {
                sm90::barrier_wait(&storage.dq_empty, dq.parity() ^ 1);
                dq.advance();
            }
            constexpr int kColumns = 2 * decltype(size(rDq))::value;
            int const begin = Traits::dq_begin(thread / 32);
            int const columns = Traits::dq_columns(warpgroup);
            float *const smem = storage.dq.data() + begin;
            CUTE_UNROLL
            for (int i = 0; i < kColumns / 8; ++i) {
                if (8 * i < columns) {
                    *reinterpret_cast<float4 *>(smem + i * 128 + thread % 32 * 4) =
                        make_float4(rDq(4 * i), rDq(4 * i + 1), rDq(4 * i + 2), rDq(4 * i + 3));
                }
            }
            if (adds) {
                sm90::fence_async_proxy();
                __syncwarp();
                if (sm90::elect_one()) {
                    float *const sums =
                        params.dq_accum_ptr + sums_row(params, head, block) * kHeadDim + begin;
                    sm90::bulk_reduce_add(sums, smem, 16 * columns * sizeof(float));
                    sm90::bulk_commit();
                }
            } else {
                __syncwarp();
                release(&storage.dq_full);
            }
        }

        // `thread` plus a 0 that ptxas does not know to be 0: so it keeps nothing that follows from
        // `thread` in registers over the tiles, and spills nothing.
        CUTE_DEVICE int own_thread() const { return thread + static_cast<int>(tiles.uses >> 31); }
        // Adds up the sums of a shared tile. Returns whether this CTA stores the gradient: not if
        // another CTA has the tile's last visits.
        template <class Acc>
        CUTE_DEVICE bool combine(Flash_bwd_params const &params, bool is_dk, Acc &tKrX) const {
            if constexpr (Traits::kMayShare) {
                return SharedSumsSm90<Traits>::combine(params, tile(), is_dk, own_thread(), tKrX);
            }
            return true;
        }

        // Stores the gradient of the tile's keys, times scale. tKrX: (4, 1, d/8); gmem: the row of
        // the head's first key, in a ragged batch of the sequence's first key.
        template <class Acc>
        CUTE_DEVICE void store_gradient(Element *gmem, int64_t row_stride, int d, float scale,
                                        Acc &tKrX) const {
            CUTE_UNROLL
            for (int i = 0; i < size(tKrX); ++i) {
                tKrX(i) *= scale;
            }
            int const index = own_thread();
            store_accumulator<kHeadDim>(tKrX, index, d, [&](int i) -> GmemRow<Element> {
                int const row = Scheduler::key_begin(tile(), rank) + Traits::key_of(index, i);
                return {gmem + row * row_stride, row < tile().seqlen_k};
            });
        }

        // Stores the unscaled sums of a part of a key head, in float32 (head_parts.h).
        template <class Acc>
        CUTE_DEVICE void store_part(Flash_bwd_params const &params, bool is_dk,
                                    Acc const &tKrX) const {
            int const index = own_thread();
            HeadPartSums<Traits::kVarlen>::template store<typename Traits::TiledMmaDkv, ShapeDkv>(
                params, tile(), is_dk, Scheduler::key_begin(tile(), rank),
                Traits::kWide ? index % 128 : index, tKrX);
        }

        template <class Acc>
        CUTE_DEVICE void store_dk(Flash_bwd_params const &params, Acc &tKrDk) const {
            if (params.head_parts > 1) return store_part(params, true, tKrDk);
            if (!combine(params, true, tKrDk)) return;
            Element *const head =
                head_begin<Element>(params.dk_ptr, tile().batch, params.dk_batch_stride,
                                    tile().head_k, params.dk_head_stride);
            store_gradient(head + first_row() * params.dk_row_stride, params.dk_row_stride,
                           params.d, params.scale_softmax, tKrDk);
        }
        template <class Acc>
        CUTE_DEVICE void store_dv(Flash_bwd_params const &params, Acc &tKrDv) const {
            if (params.head_parts > 1) return store_part(params, false, tKrDv);
            if (!combine(params, false, tKrDv)) return;
            Element *const head =
                head_begin<Element>(params.dv_ptr, tile().batch, params.dv_batch_stride,
                                    tile().head_k, params.dv_head_stride);
            store_gradient(head + first_row() * params.dv_row_stride, params.dv_row_stride,
                           params.d, Traits::kConfig.dropout ? params.dropout_scale : 1.f, tKrDv);
        }
        // The first row of the sequence's keys, in a dense batch 0.
        CUTE_DEVICE int first_row() const { return Traits::kVarlen ? tile().row_k : 0; }

        // Issues S^T or dP^T of a step: own is K or V, visited Q or dO.
        template <class OwnKeys, class Own, class Visited, class Acc>
        CUTE_DEVICE void issue_scores(OwnKeys const &keys, Own &own, Visited &visited,
                                      Acc &acc) const {
            // 0, as a ring has fewer than 2^31 uses.
            int const zero = static_cast<int>(step.uses >> 31);
            keys.issue(own, zero, visited, Traits::first_thread(warpgroup), acc);
        }
        // Load the k16 steps of K or V that stay in registers over a tile, once its buffer is full.
        CUTE_DEVICE void load_k() { own_k.load(storage.k, mma_thread()); }
        CUTE_DEVICE void load_v() { own_v.load(storage.v, mma_thread()); }
        CUTE_DEVICE int mma_thread() const { return Traits::kWide ? thread % 128 : thread; }

        // Issues the k16 steps [kBegin, kEnd) of acc += tKrX visited: P^T dO or dS^T Q.
        template <int kBegin, int kEnd, class Fragment, class Visited, class Acc>
        CUTE_DEVICE void issue_gradient(Fragment const &tKrX, Visited &visited, Acc &acc) const {
            typename Traits::TiledMmaDkv mma;
            auto const thr_mma = mma.get_slice(Traits::first_thread(warpgroup));
            Tensor sBt = make_tensor(make_smem_ptr(visited.data()),
                                     typename Traits::SmemLayoutQt{});        // (d, M)
            Tensor tKrB = thr_mma.make_fragment_B(thr_mma.partition_B(sBt));  // (1, 1, M/16)
            sm90::wgmma_group(acc,
                              [&] { sm90::wgmma_steps<kBegin, kEnd, true>(mma, tKrX, tKrB, acc); });
        }

        // Issues the warpgroup's part of rDq = dS K, once both warpgroups have written dS.
        template <class Acc>
        CUTE_DEVICE void issue_dq(Acc &rDq) const {
            typename Traits::TiledMmaDq mma;
            auto const thr_mma = mma.get_slice(Traits::kDqByRows ? warpgroup * 128 : 0);
            sm90::barrier_wait(&storage.ds_full[ds.stage()], ds.parity());
            Tensor sDs = make_tensor(make_smem_ptr(storage.ds[ds.stage()].data()),
                                     typename Traits::SmemLayoutDs{});  // (M, N)
            Tensor sKt = make_tensor(make_smem_ptr(storage.k.data() + (ds.uses >> 31)),
                                     typename Traits::SmemLayoutKt{});  // (d, N)
            Tensor sKtPart = local_tile(sKt, typename Traits::DqTile{},
                                        make_coord(Traits::kDqByRows ? 0 : warpgroup, _0{}));
            Tensor tQrDs = thr_mma.make_fragment_A(thr_mma.partition_A(sDs));     // (1, 1, N/16)
            Tensor tQrK = thr_mma.make_fragment_B(thr_mma.partition_B(sKtPart));  // (1, 1, N/16)
            sm90::wgmma_issue<false>(mma, tQrDs, tQrK, rDq);
        }

        // Waits for the next tile; false: there is none.
        CUTE_DEVICE bool await_tile() const {
            sm90::barrier_wait(&storage.tile_full[tiles.stage()], tiles.parity());
            return tile().m_block >= 0;
        }

        CUTE_DEVICE void release_tile() {
            __syncwarp();
            release(&storage.tile_empty[tiles.stage()]);
            tiles.advance();
        }

        using Block = BlockOfDq<Traits::kConfig, kTileM>;
        using ShapeS = Shape<Int<kTileN>, Int<kTileM>>;
        using ShapeDkv = Shape<Int<kTileN>, Int<kHeadDim>>;
        using ShapeDq = Shape<Int<kTileM>, Int<Traits::kDqColumns>>;
        using AccS = AccLayout<kTileM>;
        using AccDkv = AccLayout<kHeadDim>;
        using Operand = Layout<Shape<Shape<_2, _2, _2>, _1, Int<kTileM / 16>>>;

        CUTE_DEVICE void await_dout() const {
            sm90::barrier_wait(&storage.dout_full[step.stage()], step.parity());
        }
        template <class Acc>
        CUTE_DEVICE void issue_s(Acc &rS) const {
            sm90::barrier_wait(&storage.q_full[step.stage()], step.parity());
            issue_scores(own_k, storage.k, storage.q[step.stage()], rS);
        }
        template <class Acc>
        CUTE_DEVICE void issue_dp(Acc &rDp) const {
            await_dout();
            issue_scores(own_v, storage.v, storage.dout[step.stage()], rDp);
        }
        // Computes P of a step from S, which is complete. tSrS: S^T (4, 1, M/8), afterwards P^T as
        // Weights::ds() takes it. tKrP: P^T as operand (8, 1, M/16), rounded here if kRoundsEarly.
        template <class Scores, class Fragment>
        CUTE_DEVICE void weigh(Flash_bwd_params const &params, Scores &tSrS, Fragment &tKrP,
                               Step const &at) const {
            Weights const weights = this->weights(params, at);
            if constexpr (Traits::kConfig.softcap) cap_scores(params, tSrS);
            if (!tile().blocks.is_whole(at.visit)) apply_mask(params, tSrS, at.visit);
            Layout const eight = Layout<_8>{};
            CUTE_UNROLL
            for (int k = 0; k < kTileM / 16; ++k) {
                Tensor block = make_tensor(tSrS.data() + 8 * k, eight);  // (8)
                Tensor capped = make_fragment_like(block);               // (8)
                copy(block, capped);
                weights.lower(block, k);
                exponentiate(params, tSrS, 2 * k);
                exponentiate(params, tSrS, 2 * k + 1);
                weights.mark(block, k);
                if constexpr (Weights::kRoundsEarly) {
                    Tensor rounded = make_tensor(tKrP.data() + 8 * k, eight);  // (8)
                    Weights::round(block, rounded);
                    Weights::multiply(block, capped);
                }
            }
        }
        template <class Acc, class Fragment>
        CUTE_DEVICE void compute_p(Flash_bwd_params const &params, Acc &rS, Fragment &tKrP,
                                   Step const &at) const {
            sm90::pin(rS);
            Tensor tSrS = make_tensor(rS.data(), AccS{});  // (4, 1, M/8)
            weigh(params, tSrS, tKrP, at);
            sm90::pin(rS);  // in PTX P is ahead of the next wait; ptxas moves most of it behind
        }
        // Issues the k16 steps [kBegin, kEnd) of dV += P^T dO. tSrP: P^T (4, 1, M/8).
        template <int kBegin, int kEnd, class Scores, class Fragment, class Acc>
        CUTE_DEVICE void issue_dv(Scores const &tSrP, Fragment &tKrP, Acc &rDv) const {
            Layout const part = Layout<Int<8 * (kEnd - kBegin)>>{};
            Tensor to = make_tensor(tKrP.data() + 8 * kBegin, part);
            if constexpr (!Weights::kRoundsEarly) {
                Weights::round(make_tensor(tSrP.data() + 8 * kBegin, part), to);
            }
            issue_gradient<kBegin, kEnd>(tKrP, storage.dout[step.stage()], rDv);
        }

        // The warpgroups take turns, the first one first, by a named barrier each.
        CUTE_DEVICE void wait_turn() const { sm90::named_barrier_sync(1 + warpgroup, 256); }
        CUTE_DEVICE void pass_turn() const { sm90::named_barrier_arrive(2 - warpgroup, 256); }

        CUTE_DEVICE void release_keys() const {
            release(&storage.k_empty);
            release(&storage.v_empty);
        }
        // Stores what a tile completes: dK and dV and, behind an owned head's last tile, dQ.
        template <class Acc>
        CUTE_DEVICE void store_tile(Flash_bwd_params const &params, Acc &tKrDk, Acc &tKrDv) const {
            if (params.dk_ptr != nullptr) {
                store_dv(params, tKrDv);
                store_dk(params, tKrDk);
            }
            bool const last = tile().m_block == Scheduler::num_n_blocks(params) - 1;
            if (Traits::kMayOwnHeads && owns && last) end_head(params);
        }

        CUTE_DEVICE void run(Flash_bwd_params const &params) {
            if (warpgroup == 1) pass_turn();
            typename Traits::TiledMmaS mma_s;
            typename Traits::TiledMmaDkv mma_dkv;
            typename Traits::TiledMmaDq mma_dq;
            Tensor rS = partition_fragment_C(mma_s, ShapeS{});       // ((2, 2, M/8), 1, 1)
            Tensor rDp = partition_fragment_C(mma_s, ShapeS{});      // ((2, 2, M/8), 1, 1)
            Tensor rDk = partition_fragment_C(mma_dkv, ShapeDkv{});  // ((2, 2, d/8), 1, 1)
            Tensor rDv = partition_fragment_C(mma_dkv, ShapeDkv{});  // ((2, 2, d/8), 1, 1)
            Tensor rDq = partition_fragment_C(mma_dq, ShapeDq{});    // ((2, 2, N/8), 1, 1)
            Tensor tSrS = make_tensor(rS.data(), AccS{});            // (4, 1, M/8)
            Tensor tSrDp = make_tensor(rDp.data(), AccS{});          // (4, 1, M/8)
            Tensor tKrDk = make_tensor(rDk.data(), AccDkv{});        // (4, 1, d/8)
            Tensor tKrDv = make_tensor(rDv.data(), AccDkv{});        // (4, 1, d/8)
            Tensor tKrP = make_tensor<Element>(Operand{});           // (8, 1, M/16)
            Tensor tKrDs = make_tensor<Element>(Operand{});          // (8, 1, M/16)

            // Computes dS of a step, and issues dV += P^T dO and dK += dS^T Q, which are in flight
            // afterwards.
            auto const issue_gradients = [&] {
                auto &q = storage.q[step.stage()];
                issue_dp(rDp);
                sm90::wgmma_wait<0>();
                sm90::pin(rDp);
                this->template issue_dv<0, kTileM / 16>(tSrS, tKrP, rDv);
                // dO is there. Waiting for it again keeps ptxas from issuing half of dV behind dS,
                // as it moves no wgmma behind a loop that waits at an mbarrier.
                await_dout();
                differentiate(params, tSrS, tSrDp);
                convert(tSrDp, tKrDs);
                store_ds(tKrDs);
                wait_turn();
                issue_gradient<0, kTileM / 16>(tKrDs, q, rDk);
            };
            auto const finish_dq = [&](Step const &of) {
                sm90::wgmma_wait<0>();
                sm90::pin(rDq);
                add_dq(params, of.head, block(of.visit), rDq);
            };

            CUTE_NO_UNROLL
            while (await_tile()) {
                if (Traits::kMayOwnHeads && owns) begin_owned(params);
                clear(rDk);
                clear(rDv);
                int left = tile().blocks.count * params.h_h_k_ratio;  // steps
                if (left > 0) {
                    sm90::barrier_wait(&storage.k_full, own_parity);
                    load_k();
                    issue_s(rS);
                    sm90::wgmma_wait<0>();
                    int const ratio = params.h_h_k_ratio;
                    Step at = Scheduler::first_step(params, tile());
                    compute_p(params, rS, tKrP, at);
                    sm90::barrier_wait(&storage.v_full, own_parity);
                    load_v();
                    own_parity ^= 1;

                    CUTE_NO_UNROLL
                    for (; left > 1; --left) {
                        issue_gradients();
                        Step const done = at;
                        at.advance(ratio);
                        RingSteps const used = step;
                        step.advance();
                        issue_s(rS);
                        sm90::wgmma_wait<1>();
                        release_step(used);
                        issue_dq(rDq);
                        ds.advance();
                        sm90::wgmma_wait<1>();
                        pass_turn();
                        // With several options registers do not hold dQ while P is computed.
                        if constexpr (Traits::kSeveralOptions) finish_dq(done);
                        compute_p(params, rS, tKrP, at);
                        if constexpr (!Traits::kSeveralOptions) finish_dq(done);
                    }
                    issue_gradients();
                    issue_dq(rDq);
                    pass_turn();
                    ds.advance();
                    finish_dq(at);
                    sm90::pin(rDk);
                    sm90::pin(rDv);
                    release_step(step);
                    step.advance();
                    release_keys();
                }
                store_tile(params, tKrDk, tKrDv);
                release_tile();
            }
        }
    };
};

}  // namespace flash
