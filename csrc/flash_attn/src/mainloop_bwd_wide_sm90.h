// The loop of the backward for head dimensions above 128, of which a warpgroup's registers hold
// dK or dV of 64 keys, not both. A CTA owns 64 keys, and its warpgroups divide the products:
//
//   warpgroup 0:  S^T = K Q^T, P = exp(S - LSE), to the other one; dV += P^T dO
//   warpgroup 1:  dP^T = V dO^T, dS = P * (dP - D), to shared memory; dK += dS^T Q
//   both:         dQ = dS K, half of the columns each, added to the sums in global memory
//
// P^T and dS^T are A operands as they come out, in registers. The first warpgroup is ahead and
// computes its half of dQ behind dV of the next step, when dS is there as a rule.
#pragma once

#include <arch_sm90.h>

#include <cute/tensor.hpp>
#include <type_traits>

#include "mainloop_bwd_sm90.h"

namespace flash {

using namespace cute;

template <class Traits>
struct MainloopBwdWideSm90 : MainloopBwdSm90<Traits> {
    using Base = MainloopBwdSm90<Traits>;
    using Element = typename Traits::Element;
    static constexpr int kTileM = Traits::kTileM;
    static constexpr int kDqParts = Traits::kDqParts;

    struct Consumer : Base::Consumer {
        using Shared = typename Base::Consumer;
        using Shared::ds, Shared::own_parity, Shared::step, Shared::storage, Shared::thread;
        using Shared::release, Shared::tile, Shared::block, Shared::issue_scores;
        Ring<1> p;

        using OfScores = Shape<Int<Traits::kTileN>, Int<kTileM>>;
        using OfDq = Shape<Int<kTileM>, Int<Traits::kPartColumns>>;
        using OfGradient = Shape<Int<Traits::kTileN>, Int<Traits::kHeadDim>>;
        using AccScores = typename Base::template AccLayout<kTileM>;
        using AccGradient = typename Base::template AccLayout<Traits::kHeadDim>;
        using Operand = Layout<Shape<Shape<_2, _2, _2>, _1, Int<kTileM / 16>>>;

        CUTE_DEVICE void await_q() const {
            sm90::barrier_wait(&storage.q_full[step.stage()], step.parity());
        }
        CUTE_DEVICE void await_dout() const {
            sm90::barrier_wait(&storage.dout_full[step.stage()], step.parity());
        }

        // Where a thread's part of P^T is: kTileM / 8 groups of four, 512 floats apart.
        CUTE_DEVICE float4 *own_p() const {
            return reinterpret_cast<float4 *>(storage.p.data()) + thread % 128;
        }

        // tSrP: P^T (4, 1, M/8). Hands it over, once the last one has been read.
        template <class Scores>
        CUTE_DEVICE void give_p(Scores const &tSrP) {
            sm90::barrier_wait(storage.p_empty.data(), p.parity() ^ 1);
            CUTE_UNROLL
            for (int j = 0; j < kTileM / 8; ++j) {
                own_p()[128 * j] =
                    make_float4(tSrP(0, 0, j), tSrP(1, 0, j), tSrP(2, 0, j), tSrP(3, 0, j));
            }
            __syncwarp();
            release(storage.p_full.data());
            p.advance();
        }

        // tSrP: P^T (4, 1, M/8), of which each thread takes what its counterpart has computed.
        template <class Scores>
        CUTE_DEVICE void take_p(Scores &tSrP) {
            sm90::barrier_wait(storage.p_full.data(), p.parity());
            CUTE_UNROLL
            for (int j = 0; j < kTileM / 8; ++j) {
                float4 const four = own_p()[128 * j];
                tSrP(0, 0, j) = four.x;
                tSrP(1, 0, j) = four.y;
                tSrP(2, 0, j) = four.z;
                tSrP(3, 0, j) = four.w;
            }
            __syncwarp();
            release(storage.p_empty.data());
            p.advance();
        }

        struct Nothing {
            CUTE_DEVICE void operator()() const {}
        };

        // Issues the one or two parts [kBegin, kEnd) of dQ, which a warpgroup computes.
        template <int kBegin, int kEnd, class Acc>
        CUTE_DEVICE void issue_dq_parts(Acc &rFirst, Acc &rSecond) const {
            this->template issue_dq<kBegin>(rFirst);
            if constexpr (kBegin + 1 < kEnd) this->template issue_dq<kBegin + 1, false>(rSecond);
        }

        // Adds them to the sums. `issue_next` issues the scores of the next step, in the place of
        // the first of two parts; they are under way afterwards.
        template <int kBegin, int kEnd, class Acc, class IssueNext>
        CUTE_DEVICE void finish_dq(Flash_bwd_params const &params, int head, int visit, Acc &rFirst,
                                   Acc &rSecond, IssueNext const &issue_next) {
            static_assert(kEnd - kBegin == 1 || kEnd - kBegin == 2);
            constexpr bool kTwo = kEnd - kBegin == 2;
            auto &rLast = kTwo ? rSecond : rFirst;
            if constexpr (kTwo) {
                sm90::wgmma_wait<1>();
                sm90::pin(rFirst);
                this->template add_dq<kBegin>(params, head, block(visit), rFirst);
            }
            issue_next();
            sm90::wgmma_wait<!std::is_same_v<IssueNext, Nothing>>();
            sm90::pin(rLast);
            this->template add_dq<kEnd - 1>(params, head, block(visit), rLast);
            ds.advance();
        }

        // S, P and dV.
        CUTE_DEVICE void run_values(Flash_bwd_params const &params) {
            constexpr int kEnd = kDqParts / 2;
            typename Traits::TiledMmaS mma_s;
            typename Traits::TiledMmaDkv mma_dkv;
            typename Traits::TiledMmaDq mma_dq;
            Tensor rS = partition_fragment_C(mma_s, OfScores{});       // ((2, 2, M/8), 1, 1)
            Tensor rDv = partition_fragment_C(mma_dkv, OfGradient{});  // ((2, 2, d/8), 1, 1)
            Tensor rFirst = partition_fragment_C(mma_dq, OfDq{});      // ((2, 2, N/8), 1, 1)
            Tensor rSecond = partition_fragment_C(mma_dq, OfDq{});     // ((2, 2, N/8), 1, 1)
            Tensor tSrS = make_tensor(rS.data(), AccScores{});         // (4, 1, M/8)
            Tensor tKrDv = make_tensor(rDv.data(), AccGradient{});     // (4, 1, d/8)
            Tensor tKrP = make_tensor<Element>(Operand{});             // (8, 1, M/16)

            auto const issue_s = [&] {
                await_q();
                issue_scores(storage.k, storage.q[step.stage()], rS);
            };
            // P of a visit, and dV += P^T dO, which is under way afterwards.
            auto const issue_dv = [&](int visit) {
                sm90::pin(rS);
                if (visit >= tile().blocks.unmasked) this->apply_mask(params, tSrS, visit);
                this->exponentiate(params, tSrS);
                give_p(tSrS);
                convert(tSrS, tKrP);
                await_dout();
                this->template issue_gradient<0, kTileM / 16>(tKrP, storage.dout[step.stage()],
                                                              rDv);
            };
            // Once dV is complete.
            auto const next_step = [&] {
                release(&storage.dout_empty[step.stage()]);
                step.advance();
            };
            // P and dV of a step, and dQ of the one before.
            auto const run_step = [&](int visit, int head, int count, auto const &issue_next) {
                issue_dv(visit);
                issue_dq_parts<0, kEnd>(rFirst, rSecond);
                sm90::wgmma_wait<(kEnd > 1 ? 2 : 1)>();
                next_step();
                bool const other_head = visit == count - 1;
                finish_dq<0, kEnd>(params, head - other_head, other_head ? 0 : visit + 1, rFirst,
                                   rSecond, issue_next);
                sm90::wgmma_wait<0>();
            };

            CUTE_NO_UNROLL
            while (this->await_tile()) {
                clear(rDv);
                int const count = tile().blocks.count;
                int left = count * params.h_h_k_ratio;  // steps
                if (left > 0) {
                    sm90::barrier_wait(&storage.k_full, own_parity);
                    own_parity ^= 1;
                    int n = count - 1;  // visits left of this head after this one
                    int head = tile().head_q;
                    auto const next_visit = [&] {
                        head += n == 0;
                        n = n == 0 ? count - 1 : n - 1;
                    };
                    issue_s();
                    sm90::wgmma_wait<0>();
                    issue_dv(n);
                    sm90::wgmma_wait<0>();
                    next_step();
                    if (left > 1) {
                        issue_s();
                        next_visit();
                        sm90::wgmma_wait<0>();
                        CUTE_NO_UNROLL
                        for (; left > 2; --left) {
                            run_step(n, head, count, issue_s);
                            next_visit();
                        }
                        run_step(n, head, count, Nothing{});
                    }
                    issue_dq_parts<0, kEnd>(rFirst, rSecond);
                    finish_dq<0, kEnd>(params, head, n, rFirst, rSecond, Nothing{});
                    sm90::pin(rDv);
                    release(&storage.k_empty);
                }
                if (params.dk_ptr != nullptr) this->store_dv(params, tKrDv);
                this->release_tile();
            }
            if constexpr (Traits::kBulkDq) sm90::bulk_wait();
        }

        // dP, dS and dK.
        CUTE_DEVICE void run_keys(Flash_bwd_params const &params) {
            constexpr int kBegin = kDqParts / 2;
            typename Traits::TiledMmaS mma_s;
            typename Traits::TiledMmaDkv mma_dkv;
            typename Traits::TiledMmaDq mma_dq;
            Tensor rDp = partition_fragment_C(mma_s, OfScores{});      // ((2, 2, M/8), 1, 1)
            Tensor rDk = partition_fragment_C(mma_dkv, OfGradient{});  // ((2, 2, d/8), 1, 1)
            Tensor rFirst = partition_fragment_C(mma_dq, OfDq{});      // ((2, 2, N/8), 1, 1)
            Tensor rSecond = partition_fragment_C(mma_dq, OfDq{});     // ((2, 2, N/8), 1, 1)
            Tensor tSrDp = make_tensor(rDp.data(), AccScores{});       // (4, 1, M/8)
            Tensor tSrP = make_tensor<float>(AccScores{});             // (4, 1, M/8)
            Tensor tKrDk = make_tensor(rDk.data(), AccGradient{});     // (4, 1, d/8)
            Tensor tKrDs = make_tensor<Element>(Operand{});            // (8, 1, M/16)

            auto const issue_dp = [&] {
                await_dout();
                issue_scores(storage.v, storage.dout[step.stage()], rDp);
            };
            // dS of a step whose dP is complete, dK += dS^T Q, and dQ.
            auto const run_step = [&](int visit, int head, auto const &issue_next) {
                sm90::pin(rDp);
                release(&storage.dout_empty[step.stage()]);
                await_q();  // for dK, and the statistics
                take_p(tSrP);
                this->differentiate(tSrP, tSrDp);
                convert(tSrDp, tKrDs);
                this->store_ds(tKrDs);
                this->template issue_gradient<0, kTileM / 16>(tKrDs, storage.q[step.stage()], rDk);
                issue_dq_parts<kBegin, kDqParts>(rFirst, rSecond);
                // Q is free: the first warpgroup has read it, and the statistics, ahead of P.
                sm90::wgmma_wait<(kDqParts - kBegin > 1 ? 2 : 1)>();
                release(&storage.q_empty[step.stage()]);
                step.advance();
                finish_dq<kBegin, kDqParts>(params, head, visit, rFirst, rSecond, issue_next);
                sm90::wgmma_wait<0>();
            };

            CUTE_NO_UNROLL
            while (this->await_tile()) {
                clear(rDk);
                int const count = tile().blocks.count;
                int left = count * params.h_h_k_ratio;  // steps
                if (left > 0) {
                    sm90::barrier_wait(&storage.v_full, own_parity);
                    issue_dp();
                    sm90::barrier_wait(&storage.k_full, own_parity);
                    own_parity ^= 1;
                    int n = count - 1;  // visits left of this head after this one
                    int head = tile().head_q;
                    sm90::wgmma_wait<0>();
                    CUTE_NO_UNROLL
                    for (; left > 1; --left) {
                        run_step(n, head, issue_dp);
                        head += n == 0;
                        n = n == 0 ? count - 1 : n - 1;
                    }
                    release(&storage.v_empty);
                    run_step(n, head, Nothing{});
                    sm90::pin(rDk);
                    release(&storage.k_empty);
                }
                if (params.dk_ptr != nullptr) this->store_dk(params, tKrDk);
                this->release_tile();
            }
            if constexpr (Traits::kBulkDq) sm90::bulk_wait();
        }

        CUTE_DEVICE void run(Flash_bwd_params const &params) {
            if (this->warpgroup == 0) {
                run_values(params);
            } else {
                run_keys(params);
            }
        }
    };
};

}  // namespace flash
