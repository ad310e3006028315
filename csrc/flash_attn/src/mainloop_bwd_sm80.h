// The main loop of the backward kernels on mma.sync, cp.async and ldmatrix. A CTA owns rows of one
// side and visits blocks of the other:
//
//   dQ:        owns Q and dO,  visits K and V:  S   = Q K^T, dP   = dO V^T, dQ += dS K
//   dK and dV: owns K and V,   visits Q and dO: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO,
//                                               dK += dS^T Q
//   all: as dK and dV, and                      dQ += dS K, summed up in global memory
//
// with P = exp(S - LSE) and dS = P * (dP - D), where the preprocess kernel computes D; dropout.h
// and score_mod.h say what they change. In names X stands for the operands of S, Q and K, and Y for
// those of dP, dO and V. P and dS stay in registers: the rows of their accumulators are those that
// the warp owns, so they are A operands of the products that follow. With warps_step > 1 several
// warps divide the columns of a row of scores, and P and dS go through shared memory. For the dQ of
// `all` dS goes there in any case, as dQ is the only sum that crosses warps and CTAs.
#pragma once

#include <cute/tensor.hpp>

#include "block_info.h"
#include "dq_sums.h"
#include "dropout.h"
#include "kernel_traits_bwd_sm80.h"
#include "mask.h"
#include "order_dq_sm80.h"
#include "score_mod.h"
#include "tile_copy_sm80.h"
#include "utils.h"
#include "work_tile.h"

namespace flash {

using namespace cute;

// kOrdered: CTAs add their parts of dQ in the order of their tiles of keys. As a branch at run time
// it cost the other launches up to 4 % (docs/tried_sm80.md).
template <class Traits, bool kOrdered = false>
struct MainloopBwdSm80 {
    using Element = typename Traits::Element;
    using TiledMma = typename Traits::TiledMma;
    using SharedStorage = typename Traits::SharedStorage;
    static constexpr int kTileM = Traits::kTileM;
    static constexpr int kTileN = Traits::kTileN;
    static constexpr int kHeadDim = Traits::kHeadDim;
    static constexpr int kStages = Traits::kStages;
    static constexpr bool kOwnsQueries = Traits::kOwnsQueries;
    static constexpr bool kDrops = Traits::kConfig.dropout;
    static constexpr bool kCaps = Traits::kConfig.softcap;
    static constexpr bool kModifies = kCaps || Traits::kConfig.alibi;
    static constexpr bool kVarlen = Traits::kConfig.varlen;
    static constexpr int kCountingThread = Traits::kThreads - 32;  // counts parts: OrderDqSm80
    static constexpr int kRowsPerThread = 2 * kTileM / (16 * Traits::kWarpsM);

    // Rows of one head of a tensor of queries or keys.
    struct Rows {
        Element const *gmem;
        int64_t row_stride;
    };
    CUTE_DEVICE static Rows rows_of_q(Flash_bwd_params const &params, WorkTile const &tile,
                                      int head) {
        return {head_begin<Element const>(params.q_ptr, tile.batch, params.q_batch_stride, head,
                                          params.q_head_stride) +
                    tile.row_q * params.q_row_stride,
                params.q_row_stride};
    }
    CUTE_DEVICE static Rows rows_of_do(Flash_bwd_params const &params, WorkTile const &tile,
                                       int head) {
        return {head_begin<Element const>(params.do_ptr, tile.batch, params.do_batch_stride, head,
                                          params.do_head_stride) +
                    tile.row_q * params.do_row_stride,
                params.do_row_stride};
    }
    CUTE_DEVICE static Rows rows_of_k(Flash_bwd_params const &params, WorkTile const &tile,
                                      int head) {
        return {head_begin<Element const>(params.k_ptr, tile.batch, params.k_batch_stride, head,
                                          params.k_head_stride) +
                    tile.row_k * params.k_row_stride,
                params.k_row_stride};
    }
    CUTE_DEVICE static Rows rows_of_v(Flash_bwd_params const &params, WorkTile const &tile,
                                      int head) {
        return {head_begin<Element const>(params.v_ptr, tile.batch, params.v_batch_stride, head,
                                          params.v_head_stride) +
                    tile.row_k * params.v_row_stride,
                params.v_row_stride};
    }
    // The row of the workspaces, for statistics and for sums of dQ, where block n of kQueries rows
    // begins.
    CUTE_DEVICE static int64_t workspace_row(Flash_bwd_params const &params, WorkTile const &tile,
                                             int head, int n) {
        int const entry = kVarlen ? 0 : tile.batch;
        return (int64_t(entry) * params.h + head) * params.seqlen_q_rounded +
               (kVarlen ? row_stats_begin(tile.row_q, tile.batch) : 0) + n * Traits::kQueries;
    }
    CUTE_DEVICE static float2 const *stats_of(Flash_bwd_params const &params, WorkTile const &tile,
                                              int head, int n) {
        return reinterpret_cast<float2 const *>(params.row_stats_ptr) +
               workspace_row(params, tile, head, n);
    }

    CUTE_DEVICE static void load_own(Flash_bwd_params const &params, SharedStorage &storage,
                                     WorkTile const &tile) {
        Rows const x = kOwnsQueries ? rows_of_q(params, tile, tile.head_q)
                                    : rows_of_k(params, tile, tile.head_k);
        Rows const y = kOwnsQueries ? rows_of_do(params, tile, tile.head_q)
                                    : rows_of_v(params, tile, tile.head_k);
        int const seqlen = kOwnsQueries ? tile.seqlen_q : tile.seqlen_k;
        load_block<Traits, kTileM>(x.gmem, x.row_stride, own(storage, 0), tile.m_block, seqlen,
                                   params.d);
        if constexpr (Traits::kNeedsDs) {
            load_block<Traits, kTileM>(y.gmem, y.row_stride, own(storage, 1), tile.m_block, seqlen,
                                       params.d);
        }
    }

    // Loads block n of the visited side, with its statistics if these rows are queries. head: the
    // query head.
    CUTE_DEVICE static void load_step(Flash_bwd_params const &params, SharedStorage &storage,
                                      WorkTile const &tile, int head, int n, int stage) {
        Rows const x =
            kOwnsQueries ? rows_of_k(params, tile, tile.head_k) : rows_of_q(params, tile, head);
        Rows const y =
            kOwnsQueries ? rows_of_v(params, tile, tile.head_k) : rows_of_do(params, tile, head);
        int const seqlen = kOwnsQueries ? tile.seqlen_k : tile.seqlen_q;
        using Layout = typename Traits::SmemLayoutN;
        load_block<Traits, kTileN>(
            x.gmem, x.row_stride,
            make_tensor(make_smem_ptr(storage.step_x[stage].data()), Layout{}), n, seqlen,
            params.d);
        load_block<Traits, kTileN>(
            y.gmem, y.row_stride,
            make_tensor(make_smem_ptr(storage.step_y[stage].data()), Layout{}), n, seqlen,
            params.d);
        if constexpr (!kOwnsQueries) {
            using Piece = uint128_t;
            constexpr int kPieces = kTileN * sizeof(float2) / sizeof(Piece);
            static_assert(kPieces <= Traits::kThreads);
            int const thread = threadIdx.x;
            if (thread < kPieces) {
                auto const *from = reinterpret_cast<Piece const *>(stats_of(params, tile, head, n));
                auto *to = reinterpret_cast<Piece *>(storage.stats[stage]);
                SM80_CP_ASYNC_CACHEGLOBAL<Piece>::copy(from[thread], to[thread]);
            }
        }
    }

    CUTE_DEVICE static auto own(SharedStorage &storage, int i) {
        return make_tensor(make_smem_ptr(storage.own[i].data()),
                           typename Traits::SmemLayoutM{});  // (M, d)
    }

    // acc = own step^T, both from shared memory.
    template <class Acc, class Array>
    CUTE_DEVICE static void scores(Acc &acc, SharedStorage &storage, int i, Array &step) {
        int const thread = threadIdx.x;
        TiledMma mma;
        auto const copy_a = make_tiled_copy_A(typename Traits::SmemCopyAtom{}, mma);
        auto const copy_b = make_tiled_copy_B(typename Traits::SmemCopyAtom{}, mma);
        Tensor sB =
            make_tensor(make_smem_ptr(step.data()), typename Traits::SmemLayoutN{});  // (N, d)
        Tensor tSrA = make_tensor<Element>(
            partition_shape_A(mma, Shape<Int<kTileM>, Int<kHeadDim>>{}));  // (8, MMA_M, d/16)
        Tensor tSrB = make_tensor<Element>(
            partition_shape_B(mma, Shape<Int<kTileN>, Int<kHeadDim>>{}));  // (4, N/8, d/16)
        clear(acc);
        gemm_smem(mma, copy_a, copy_b, acc, tSrA, tSrB,
                  copy_a.get_slice(thread).partition_S(own(storage, i)),
                  copy_b.get_slice(thread).partition_S(sB));
    }

    // acc += rS step. rS: P or dS, or their transposes, rounded, (4, MMA_M, N/8).
    template <class Acc, class Scores, class Array>
    CUTE_DEVICE static void accumulate(Acc &acc, Scores &&rS, Array &step) {
        int const thread = threadIdx.x;
        TiledMma mma;
        auto const copy_b = make_tiled_copy_B(typename Traits::SmemCopyAtomTransposed{}, mma);
        Tensor sBt =
            make_tensor(make_smem_ptr(step.data()), typename Traits::SmemLayoutNt{});  // (d, N)
        Tensor tOrS =
            make_tensor(rS.data(), layout_acc_as_operand_a(rS.layout()));  // (8, MMA_M, N/16)
        Tensor tOrBt = make_tensor<Element>(
            partition_shape_B(mma, Shape<Int<kHeadDim>, Int<kTileN>>{}));  // (4, d/8, N/16)
        Tensor tOsBt = copy_b.get_slice(thread).partition_S(sBt);          // (8, d/16, N/16)
        gemm_smem(mma, NoCopy{}, copy_b, acc, tOrS, tOrBt, tOsBt, tOsBt);
    }

    // acc += scores step. scores: P^T or dS^T in shared memory, as share() writes them.
    template <class Acc, class Scores, class Array>
    CUTE_DEVICE static void accumulate_shared(Acc &acc, Scores &scores, Array &step) {
        int const thread = threadIdx.x;
        TiledMma mma;
        auto const copy_a = make_tiled_copy_A(typename Traits::SmemCopyAtom{}, mma);
        auto const copy_b = make_tiled_copy_B(typename Traits::SmemCopyAtomTransposed{}, mma);
        Tensor sA =
            make_tensor(make_smem_ptr(scores.data()), typename Traits::SmemLayoutDst{});  // (M, N)
        Tensor sBt =
            make_tensor(make_smem_ptr(step.data()), typename Traits::SmemLayoutNt{});  // (d, N)
        Tensor tOrA = make_tensor<Element>(
            partition_shape_A(mma, Shape<Int<kTileM>, Int<kTileN>>{}));  // (8, MMA_M, N/16)
        Tensor tOrBt = make_tensor<Element>(
            partition_shape_B(mma, Shape<Int<kHeadDim>, Int<kTileN>>{}));  // (4, MMA_N, N/16)
        gemm_smem(mma, copy_a, copy_b, acc, tOrA, tOrBt, copy_a.get_slice(thread).partition_S(sA),
                  copy_b.get_slice(thread).partition_S(sBt));
    }

    // Writes P^T or dS^T, rounded, (4, MMA_M, MMA_N), to shared memory.
    template <class Scores, class Array>
    CUTE_DEVICE static void share(Scores const &rS, Array &scores) {
        auto const copy_c = make_tiled_copy_C(typename Traits::SmemCopyAtomO{}, TiledMma{});
        auto const copy_thr = copy_c.get_slice(threadIdx.x);
        Tensor sS =
            make_tensor(make_smem_ptr(scores.data()), typename Traits::SmemLayoutDst{});  // (M, N)
        copy(copy_c, copy_thr.retile_S(rS), copy_thr.partition_D(sS));
    }

    // Adds dS K of block n to the sums of dQ in global memory.
    CUTE_DEVICE static void add_dq(Flash_bwd_params const &params, SharedStorage &storage,
                                   WorkTile const &tile, int head, int n) {
        int const thread = threadIdx.x;
        typename Traits::TiledMmaDq mma;
        using Atom = typename Traits::SmemCopyAtomTransposed;
        auto const copy_a = make_tiled_copy_A(Atom{}, mma);
        auto const copy_b = make_tiled_copy_B(Atom{}, mma);
        Tensor sDs = make_tensor(make_smem_ptr(storage.ds.data()),
                                 typename Traits::SmemLayoutDs{});  // (M, N)
        Tensor sKt = make_tensor(make_smem_ptr(storage.own[0].data()),
                                 typename Traits::SmemLayoutMt{});  // (d, N)
        constexpr int kRows = Traits::kDqRows, kN = Traits::kKeys;
        Tensor tQrDs = make_tensor<Element>(
            partition_shape_A(mma, Shape<Int<kRows>, Int<kN>>{}));  // (8, MMA_M, N/16)
        Tensor tQrKt = make_tensor<Element>(
            partition_shape_B(mma, Shape<Int<kHeadDim>, Int<kN>>{}));  // (4, MMA_N, N/16)
        Tensor tQrDq =
            partition_fragment_C(mma, Shape<Int<kRows>, Int<kHeadDim>>{});  // (4, MMA_M, MMA_N)
        int64_t const first_row = workspace_row(params, tile, head, n);
        CUTE_NO_UNROLL  // 112 bytes spill at d = 192 otherwise
            for (int part = 0; part < Traits::kQueries / kRows; ++part) {
            Tensor sPart = local_tile(sDs, Shape<Int<kRows>, Int<kN>>{},
                                      make_coord(part, _0{}));  // (kRows, N)
            clear(tQrDq);
            gemm_smem(mma, copy_a, copy_b, tQrDq, tQrDs, tQrKt,
                      copy_a.get_slice(thread).partition_S(sPart),
                      copy_b.get_slice(thread).partition_S(sKt));
            DqSums<Traits> const sums(params, first_row + part * kRows, thread);
            CUTE_UNROLL
            for (int i = 0; i < size(tQrDq); i += 4) {
                sums.add(i, tQrDq(i), tQrDq(i + 1), tQrDq(i + 2), tQrDq(i + 3));
            }
        }
    }

    // The accumulator of a score tile seen as (queries, keys).
    template <class Acc>
    CUTE_DEVICE static auto queries_by_keys(Acc &acc) {
        auto const rowcol = layout_acc_rowcol(acc.layout());
        if constexpr (kOwnsQueries) {
            return make_tensor(acc.data(), rowcol);
        } else {
            return make_tensor(acc.data(), select<1, 0>(rowcol));
        }
    }
    // The query and the key, within the tile, of element (i, j) of a thread's (queries, keys) view.
    CUTE_HOST_DEVICE static constexpr int query_of(int thread, int i) {
        return kOwnsQueries ? Traits::acc_row(thread, i) : Traits::acc_col(thread, i);
    }
    CUTE_HOST_DEVICE static constexpr int key_of(int thread, int j) {
        return kOwnsQueries ? Traits::acc_col(thread, j) : Traits::acc_row(thread, j);
    }

    template <class Acc>
    CUTE_DEVICE static void mask(Flash_bwd_params const &params, WorkTile const &tile, Acc &tSrS,
                                 int n) {
        int const thread = threadIdx.x;
        int const first_query = (kOwnsQueries ? tile.m_block : n) * Traits::kQueries;
        int const first_key = (kOwnsQueries ? n : tile.m_block) * Traits::kKeys;
        mask_scores<Traits::kMask>(
            params, tile, queries_by_keys(tSrS),
            [&](int i) { return first_query + query_of(thread, i); }, first_key + key_of(thread, 0),
            [](int j) { return key_of(0, j); });
    }

    // Applies softcap and ALiBi to the products tSrS. The derivatives of the softcap go to tSrG.
    template <class Acc>
    CUTE_DEVICE static void modify(Flash_bwd_params const &params, WorkTile const &tile, Acc &tSrS,
                                   Acc &tSrG, int n, int head_q) {
        int const thread = threadIdx.x;
        int const first_query = (kOwnsQueries ? tile.m_block : n) * Traits::kQueries;
        int const first_key = (kOwnsQueries ? n : tile.m_block) * Traits::kKeys;
        auto const position_at = [&](int i) { return first_query + query_of(thread, i); };
        ScoreModBwd<Traits>::apply(params, tile, tSrS, tSrG, queries_by_keys(tSrS), head_q,
                                   position_at, first_key + key_of(thread, 0),
                                   [](int j) { return key_of(0, j); });
    }

    // Makes P of masked scores, in place. p: (queries, keys); stats_at(i): the statistics, LSE *
    // log2(e) and D, of the thread's i-th query.
    template <class P, class StatsAt>
    CUTE_DEVICE static void exponentiate(Flash_bwd_params const &params, P &p,
                                         StatsAt const &stats_at) {
        CUTE_UNROLL
        for (int i = 0; i < size<0>(p); ++i) {
            float const lse_log2 = stats_at(i).x;
            CUTE_UNROLL
            for (int j = 0; j < size<1>(p); ++j) {
                p(i, j) = exp2f(p(i, j) * params.scale_softmax_log2 - lse_log2);
            }
        }
    }

    // The block of visit n, where n counts down. Blocks of keys are visited in the order of the
    // forward, blocks of queries in that of a local window (BlockRange::block()). With kOrdered a
    // tile visits its blocks from the last one down, so that under every mask it comes to a block
    // before the tiles behind it do.
    CUTE_DEVICE static int block_of(WorkTile const &tile, int n) {
        if constexpr (kOrdered) {
            return tile.blocks.begin + n;
        }
        constexpr MaskKind kOrder = kOwnsQueries ? Traits::kMask : MaskKind::local;
        return tile.blocks.template block<kOrder>(n);
    }
    // Whether the block of visit n needs the mask, as not every query sees every key.
    CUTE_DEVICE static bool is_cut(WorkTile const &tile, int n) {
        return kOrdered ? !tile.blocks.is_whole(n) : n >= tile.blocks.unmasked;
    }

    using Order = OrderDqSm80<Traits>;
    // Called by all threads ahead of visit n of a head. If the visit is the tile's first one at a
    // semaphore, thread 0 waits there for the tile's turn, and kCountingThread counts this tile's
    // parts at the semaphore before, which may be the previous head's.
    CUTE_DEVICE static void take_turn(Flash_bwd_params const &params, WorkTile const &tile,
                                      int head, int n) {
        int const thread = threadIdx.x, block = block_of(tile, n);
        if (!Order::is_first(tile, block, n)) return;
        if (thread == 0) {
            Order::await(params, tile, block, workspace_row(params, tile, head, 0));
        } else if (thread == kCountingThread && n < tile.blocks.count - 1) {
            Order::count(params, block + 1, workspace_row(params, tile, head, 0));
        } else if (thread == kCountingThread && head > tile.head_q) {
            count_last(params, tile, head - 1);
        }
    }
    CUTE_DEVICE static void count_last(Flash_bwd_params const &params, WorkTile const &tile,
                                       int head) {
        Order::count(params, block_of(tile, 0), workspace_row(params, tile, head, 0));
    }

    // Runs the main loop of a tile. dX and dY are the accumulators (4, MMA_M, d/8) of dQ or dK, not
    // yet scaled, and of dV.
    template <class AccX, class AccY>
    CUTE_DEVICE static void run(Flash_bwd_params const &params, SharedStorage &storage,
                                WorkTile const &tile, AccX &dX, AccY &dY) {
        int const thread = threadIdx.x;
        TiledMma mma;
        auto const block = [&](int n) { return block_of(tile, n); };
        DropoutBwd<Traits> const dropout(params, tile, thread);

        // Statistics of owned queries, in registers; those of visited queries are loaded with their
        // block.
        cute::array<float2, kOwnsQueries ? kRowsPerThread : 1> own_stats;
        if constexpr (kOwnsQueries) {
            float2 const *const stats = stats_of(params, tile, tile.head_q, tile.m_block);
            CUTE_UNROLL
            for (int i = 0; i < kRowsPerThread; ++i) {
                own_stats[i] = stats[Traits::acc_row(thread, i)];
            }
        }

        int const count = tile.blocks.count;
        int left = kOwnsQueries ? count : count * params.h_h_k_ratio;  // visits
        int n = count - 1;                                             // the visit, counting down
        int head = tile.head_q;
        int stage = 0;
        load_own(params, storage, tile);
        if (left > 0) load_step(params, storage, tile, head, block(n), stage);
        cp_async_fence();

        CUTE_NO_UNROLL
        for (; left > 0; --left) {
            int const next = n > 0 ? n - 1 : count - 1;
            int const next_head = n > 0 ? head : head + 1;
            auto const load_next = [&](int to) {
                load_step(params, storage, tile, next_head, block(next), to);
                cp_async_fence();
            };
            // This step's tiles have landed; all warps are done with the other stage.
            cp_async_wait<0>();
            __syncthreads();
            if constexpr (kOrdered) take_turn(params, tile, head, n);
            if constexpr (kStages == 2) {
                if (left > 1) load_next(stage ^ 1);
            }

            auto &step_x = storage.step_x[stage];
            auto &step_y = storage.step_y[stage];
            Tensor tSrS =
                partition_fragment_C(mma, Shape<Int<kTileM>, Int<kTileN>>{});  // (4, MMA_M, N/8)
            Tensor tSrG = make_fragment_like(tSrS);  // (4, MMA_M, N/8), derivatives of the softcap
            scores(tSrS, storage, 0, step_x);
            if constexpr (kModifies) modify(params, tile, tSrS, tSrG, block(n), head);
            if (is_cut(tile, n)) mask(params, tile, tSrS, block(n));
            Tensor p = queries_by_keys(tSrS);
            Tensor g = queries_by_keys(tSrG);
            auto const stats_at = [&](int i) {
                if constexpr (kOwnsQueries) {
                    return own_stats[i];
                } else {
                    return storage.stats[stage][query_of(thread, i)];
                }
            };
            exponentiate(params, p, stats_at);
            if constexpr (kDrops) dropout.mark(tSrS, block(n), head);
            auto const rounded_p = [&] {
                if constexpr (kDrops) {
                    return convert_type<Element>(dropout.kept(tSrS));
                } else {
                    return convert_type<Element>(tSrS);
                }
            };
            if constexpr (Traits::kSharesP) {
                share(rounded_p(), storage.p);
            } else if constexpr (Traits::kNeedsDv) {
                accumulate(dY, rounded_p(), step_y);
            }
            if constexpr (Traits::kNeedsDs) {
                Tensor tSrDp = make_fragment_like(tSrS);  // (4, MMA_M, N/8)
                scores(tSrDp, storage, 1, step_y);
                Tensor ds = queries_by_keys(tSrDp);
                CUTE_UNROLL
                for (int i = 0; i < size<0>(p); ++i) {
                    float const d = stats_at(i).y;
                    CUTE_UNROLL
                    for (int j = 0; j < size<1>(p); ++j) {
                        if constexpr (kDrops) dropout.finish(p(i, j), ds(i, j));
                        ds(i, j) = p(i, j) * (ds(i, j) - d);
                        if constexpr (kCaps) ds(i, j) *= g(i, j);
                    }
                }
                Tensor rDs = convert_type<Element>(tSrDp);  // (4, MMA_M, N/8)
                if constexpr (Traits::kSumsDq) share(rDs, storage.ds);
                if constexpr (!Traits::kSharesP) accumulate(dX, rDs, step_x);
            }
            if constexpr (Traits::kSumsDq) {
                __syncthreads();  // dS is complete; without kSharesP all have read the step's tiles
                if constexpr (Traits::kSharesP) {
                    accumulate_shared(dY, storage.p, step_y);
                    accumulate_shared(dX, storage.ds, step_x);
                    if (kStages == 1) __syncthreads();
                }
                if (kStages == 1 && left > 1) load_next(stage);
                if (params.dq_ptr != nullptr) add_dq(params, storage, tile, head, block(n));
            }

            if constexpr (kStages == 2) {
                stage ^= 1;
            } else if (!Traits::kSumsDq && left > 1) {
                __syncthreads();  // every warp has read this step's tiles
                load_next(stage);
            }
            n = next;
            head = next_head;
        }
        cp_async_wait<0>();
        if constexpr (kOrdered) {
            __syncthreads();  // all warps have added the last part
            if (thread == kCountingThread && count > 0) count_last(params, tile, head - 1);
        }
    }
};

}  // namespace flash
