// The consumers' main loop of the backward for head dimensions above 128, where a warpgroup's
// registers hold dK or dV of 64 keys, but not both. A CTA owns 64 keys, and its two warpgroups
// divide the products. Two CTAs form a cluster: they send each other dS, and each computes half of
// dQ's columns over the keys of both, so that half as much is added to the sums:
//
//   warpgroup 0:  S^T = K Q^T, P = exp(S - LSE), to the other one; dV += P^T dO
//   warpgroup 1:  dP^T = V dO^T, dS = P * (dP - D), to shared memory; dK += dS^T Q
//   both:         dQ = dS K, of which they divide the CTA's columns, at d = 192 into 32 and 64, and
//                 add their parts to the sums in global memory
//
// P^T and dS^T are A operands in the registers that they are computed in. The first warpgroup runs
// ahead and computes its part of dQ a step later, when dS is usually there.
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

    struct Consumer : Base::Consumer {
        using Shared = typename Base::Consumer;
        using Shared::ds, Shared::own_parity, Shared::step, Shared::storage, Shared::thread;
        using Shared::rank, Shared::release, Shared::tile, Shared::block, Shared::issue_scores;
        using typename Shared::Step, typename Shared::Weights;
        Ring<Traits::kDqSlots> dq_stored;

        using OfScores = Shape<Int<Traits::kTileN>, Int<kTileM>>;
        template <class Part>
        using OfDq = Shape<Int<kTileM>, Int<Part::kColumns>>;
        using OfGradient = Shape<Int<Traits::kTileN>, Int<Traits::kHeadDim>>;
        using AccScores = typename Base::template AccLayout<kTileM>;
        using AccGradient = typename Base::template AccLayout<Traits::kHeadDim>;
        using Operand = Layout<Shape<Shape<_2, _2, _2>, _1, Int<kTileM / 16>>>;

        CUTE_DEVICE void await_q() const {
            sm90::barrier_wait(&storage.q_full[step.stage()], step.parity());
        }
        CUTE_DEVICE void await_dout() const {
            sm90::barrier_wait(&storage.dout_full[dout().stage()], dout().parity());
        }

        // The rings of P and of dO at the current step, which ends with the release of Q's
        // statistics.
        CUTE_DEVICE Ring<1> p() const { return {step.uses}; }
        CUTE_DEVICE Ring<Traits::kDoutStages> dout() const { return {step.uses}; }
        // The ring of dq_turn at the step whose dQ is added.
        CUTE_DEVICE Ring<Traits::kDqSlots> dq_turn() const { return {ds.uses}; }
        // Where this thread's part of P^T is in shared memory: kTileM / 8 groups of four floats,
        // 512 floats apart.
        CUTE_DEVICE float4 *own_p() const {
            return reinterpret_cast<float4 *>(storage.p.data()) + thread % 128;
        }

        // Waits until the other warpgroup has read P of the step before.
        CUTE_DEVICE void await_room_for_p() const {
            sm90::barrier_wait(storage.p_empty.data(), p().parity() ^ 1);
        }
        // Hands P^T to the other warpgroup. tSrP: P^T (4, 1, M/8), as weigh() leaves it.
        template <class Scores>
        CUTE_DEVICE void give_p(Scores const &tSrP) {
            CUTE_UNROLL
            for (int j = 0; j < kTileM / 8; ++j) {
                own_p()[128 * j] =
                    make_float4(tSrP(0, 0, j), tSrP(1, 0, j), tSrP(2, 0, j), tSrP(3, 0, j));
            }
            __syncwarp();
            release(storage.p_full.data());
        }

        // Takes P^T from the other warpgroup, each thread what its counterpart has computed. tSrP:
        // (4, 1, M/8).
        template <class Scores>
        CUTE_DEVICE void take_p(Scores &tSrP) {
            sm90::barrier_wait(storage.p_full.data(), p().parity());
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
        }

        // Issues the warpgroup's part of rDq = dS K, over the keys of both CTAs.
        template <class Part, class Acc>
        CUTE_DEVICE void issue_dq(Acc &rDq) const {
            using Ds = typename Traits::SmemLayoutDs;
            typename Part::TiledMma mma;
            auto const thr_mma = mma.get_slice(0);
            auto &other = storage.other;
            int const stage = ds.stage();
            using Kt = typename Part::SmemLayoutKt;
            int const offset = Part::kOffset + static_cast<int>(ds.uses >> 31);
            constexpr int kHalf = cosize_v<typename Traits::SmemLayoutOtherKt>;
            Tensor sKtPart = make_tensor(make_smem_ptr(storage.k.data() + rank * kHalf + offset),
                                         Kt{});                                         // (cols, N)
            Tensor sOther = make_tensor(make_smem_ptr(other.k.data() + offset), Kt{});  // (cols, N)
            Tensor sDs = make_tensor(make_smem_ptr(storage.ds[stage].data()), Ds{});    // (M, N)
            Tensor sOtherDs = make_tensor(make_smem_ptr(other.ds[stage].data()), Ds{});  // (M, N)
            Tensor tQrDs = thr_mma.make_fragment_A(thr_mma.partition_A(sDs));       // (1, 1, N/16)
            Tensor tQrK = thr_mma.make_fragment_B(thr_mma.partition_B(sKtPart));    // (1, 1, N/16)
            Tensor tOrDs = thr_mma.make_fragment_A(thr_mma.partition_A(sOtherDs));  // (1, 1, N/16)
            Tensor tOrK = thr_mma.make_fragment_B(thr_mma.partition_B(sOther));     // (1, 1, N/16)
            constexpr int kSteps = Traits::kTileN / 16;
            sm90::barrier_wait(&storage.ds_full[stage], ds.parity());
            sm90::wgmma_group(rDq, [&] {
                sm90::wgmma_steps<0, kSteps, false>(mma, tQrDs, tQrK, rDq);
                sm90::barrier_wait(&other.ds_full[stage], ds.parity());
                sm90::wgmma_fence();  // behind a loop; else ptxas adds a fence and says so (C7519)
                sm90::wgmma_steps<0, kSteps, true>(mma, tOrDs, tOrK, rDq);
            });
        }

        // Adds the warpgroup's part of dQ of a block to the sums, which lie in the order of each
        // warp's accumulators, or stores it as the first part (FirstSumsSm90). rDq:
        // ((2, 2, N/8), 1, 1).
        template <int kFirstColumn, class Acc>
        CUTE_DEVICE void add_dq(Flash_bwd_params const &params, int head, int block,
                                Acc const &rDq) {
            constexpr int kColumns = 2 * decltype(size(rDq))::value;
            static_assert(Traits::kColumnsK == Traits::kHeadDim);
            int64_t const row = Base::Scheduler::sums_row(params, tile(), head, block);
            int const begin = Traits::dq_begin(rank * 4 + thread / 32 % 4) + 16 * kFirstColumn;
            float *const sums =
                params.dq_accum_ptr + row * Traits::kHeadDim + begin + thread % 32 * 4;
            bool const stores = Base::Scheduler::stores(params, tile(), block);
            if (Base::Scheduler::waits_turn(params)) {
                sm90::barrier_wait(&storage.dq_turn[dq_turn().stage()], dq_turn().parity());
            }
            CUTE_UNROLL
            for (int i = 0; i < kColumns / 8; ++i) {
                auto const write = [&](auto const &how) {
                    how(sums + i * 128, rDq(4 * i), rDq(4 * i + 1), rDq(4 * i + 2), rDq(4 * i + 3));
                };
                stores ? write(sm90::store_first) : write(sm90::reduce_add);
            }
            if (Base::Scheduler::counts(params, tile(), block)) {
                __syncwarp();
                release(&storage.dq_stored[dq_stored.stage()]);
                dq_stored.advance();
            }
        }

        // Waits for the warpgroup's part of dQ, tells the other CTA that its dS has been read, and
        // adds the part to the sums. With kNext S or dP of the next step stays in flight.
        template <class Part, bool kNext, class Acc>
        CUTE_DEVICE void finish_dq(Flash_bwd_params const &params, Step const &of, Acc &rDq) {
            sm90::wgmma_wait<kNext>();
            sm90::pin(rDq);
            sm90::barrier_arrive_at(1 - rank, &storage.other.ds_sent[ds.stage()], thread % 32 == 0);
            add_dq<Part::kBegin>(params, of.head, block(of.visit), rDq);
            ds.advance();
        }

        // Sends dS to the other CTA, once all warps of the warpgroup have written it.
        CUTE_DEVICE void send_ds() const {
            constexpr uint32_t kBytes = cosize_v<typename Traits::SmemLayoutDs> * sizeof(Element);
            auto &other = storage.other;
            int const stage = ds.stage();
            sm90::barrier_wait(&storage.ds_full[stage], ds.parity());
            if (thread / 32 % 4 == 0 && sm90::elect_one()) {
                sm90::barrier_arrive_expect(&other.ds_full[stage], kBytes);
                sm90::bulk_copy_to(1 - rank, other.ds[stage].data(), storage.ds[stage].data(),
                                   kBytes, &other.ds_full[stage]);
            }
            __syncwarp();
        }

        // The main loop of warpgroup 0: S, P, dV and the first part of dQ.
        CUTE_DEVICE void run_values(Flash_bwd_params const &params) {
            using Part = typename Traits::template DqPart<0>;
            typename Traits::TiledMmaS mma_s;
            typename Traits::TiledMmaDkv mma_dkv;
            typename Part::TiledMma mma_dq;
            Tensor rS = partition_fragment_C(mma_s, OfScores{});       // ((2, 2, M/8), 1, 1)
            Tensor rDv = partition_fragment_C(mma_dkv, OfGradient{});  // ((2, 2, d/8), 1, 1)
            Tensor rDq = partition_fragment_C(mma_dq, OfDq<Part>{});   // ((2, 2, N/8), 1, 1)
            Tensor tSrS = make_tensor(rS.data(), AccScores{});         // (4, 1, M/8)
            Tensor tKrDv = make_tensor(rDv.data(), AccGradient{});     // (4, 1, d/8)
            Tensor tKrP = make_tensor<Element>(Operand{});             // (8, 1, M/16)

            auto const issue_s = [&] {
                await_q();
                issue_scores(this->own_k, storage.k, storage.q[step.stage()], rS);
            };
            // Computes P of a step and issues dV += P^T dO, which is in flight afterwards.
            auto const issue_dv = [&](Step const &at) {
                sm90::pin(rS);
                // Behind weigh(), ptxas moves derivatives of the softcap behind this wait and may
                // spill.
                if constexpr (Traits::kSeveralOptions) await_room_for_p();
                this->weigh(params, tSrS, tKrP, at);
                if constexpr (!Traits::kSeveralOptions) await_room_for_p();
                give_p(tSrS);
                if constexpr (!Weights::kRoundsEarly) Weights::round(tSrS, tKrP);
                await_dout();
                this->template issue_gradient<0, kTileM / 16>(tKrP, storage.dout[dout().stage()],
                                                              rDv);
                sm90::fence_async_proxy();  // orders reads of the statistics: release_step()
                __syncwarp();
                release(&storage.q_empty[step.stage()]);
                step.advance();
            };
            // Releases dO of the step before, once its dV is complete.
            auto const release_dout = [&] {
                release(&storage.dout_empty[dout().before().stage()]);
            };
            // Runs P and dV of a step, and dQ of the step before.
            auto const run_step = [&](Step const &at, auto has_next) {
                issue_dv(at);
                issue_dq<Part>(rDq);
                sm90::wgmma_wait<1>();
                release_dout();
                if constexpr (has_next) issue_s();
                finish_dq<Part, has_next>(params, at.before(params.h_h_k_ratio), rDq);
                sm90::wgmma_wait<0>();
            };

            CUTE_NO_UNROLL
            while (this->await_tile()) {
                clear(rDv);
                int const ratio = params.h_h_k_ratio;
                int left = tile().blocks.count * ratio;  // steps
                if (left > 0) {
                    sm90::barrier_wait(&storage.k_full, own_parity);
                    Step at = Base::Scheduler::first_step(params, tile());
                    this->load_k();
                    issue_s();
                    sm90::wgmma_wait<0>();
                    issue_dv(at);
                    sm90::wgmma_wait<0>();
                    release_dout();
                    sm90::barrier_wait(&storage.other.k_full, own_parity);
                    own_parity ^= 1;
                    if (left > 1) {
                        issue_s();
                        at.advance(ratio);
                        sm90::wgmma_wait<0>();
                        CUTE_NO_UNROLL
                        for (; left > 2; --left) {
                            run_step(at, std::true_type{});
                            at.advance(ratio);
                        }
                        run_step(at, std::false_type{});
                    }
                    issue_dq<Part>(rDq);
                    finish_dq<Part, false>(params, at, rDq);
                    sm90::pin(rDv);
                    release(&storage.k_empty);
                }
                if (params.dk_ptr != nullptr) this->store_dv(params, tKrDv);
                this->release_tile();
            }
        }

        // The main loop of warpgroup 1: dP, dS, dK and the second part of dQ.
        CUTE_DEVICE void run_keys(Flash_bwd_params const &params) {
            using Part = typename Traits::template DqPart<1>;
            typename Traits::TiledMmaS mma_s;
            typename Traits::TiledMmaDkv mma_dkv;
            typename Part::TiledMma mma_dq;
            Tensor rDp = partition_fragment_C(mma_s, OfScores{});      // ((2, 2, M/8), 1, 1)
            Tensor rDk = partition_fragment_C(mma_dkv, OfGradient{});  // ((2, 2, d/8), 1, 1)
            Tensor rDq = partition_fragment_C(mma_dq, OfDq<Part>{});   // ((2, 2, N/8), 1, 1)
            Tensor tSrDp = make_tensor(rDp.data(), AccScores{});       // (4, 1, M/8)
            Tensor tSrP = make_tensor<float>(AccScores{});             // (4, 1, M/8)
            Tensor tKrDk = make_tensor(rDk.data(), AccGradient{});     // (4, 1, d/8)
            Tensor tKrDs = make_tensor<Element>(Operand{});            // (8, 1, M/16)

            auto const issue_dp = [&] {
                await_dout();
                issue_scores(this->own_v, storage.v, storage.dout[dout().stage()], rDp);
            };
            // Runs a step whose dP is complete: dS, dK += dS^T Q and dQ.
            auto const run_step = [&](Step const &at, auto has_next) {
                sm90::pin(rDp);
                release(&storage.dout_empty[dout().stage()]);
                await_q();  // for the statistics
                take_p(tSrP);
                this->differentiate(params, tSrP, tSrDp);
                convert(tSrDp, tKrDs);
                sm90::barrier_wait(&storage.other.ds_sent[ds.stage()], ds.parity() ^ 1);
                this->store_ds(tKrDs);
                this->template issue_gradient<0, kTileM / 16>(tKrDs, storage.q[step.stage()], rDk);
                send_ds();
                issue_dq<Part>(rDq);
                sm90::wgmma_wait<1>();
                release(&storage.q_empty[step.stage()]);
                step.advance();
                if constexpr (has_next) issue_dp();
                finish_dq<Part, has_next>(params, at, rDq);
                sm90::wgmma_wait<0>();
            };

            CUTE_NO_UNROLL
            while (this->await_tile()) {
                clear(rDk);
                int const ratio = params.h_h_k_ratio;
                int left = tile().blocks.count * ratio;  // steps
                if (left > 0) {
                    sm90::barrier_wait(&storage.v_full, own_parity);
                    this->load_v();
                    issue_dp();
                    sm90::barrier_wait(&storage.k_full, own_parity);
                    sm90::barrier_wait(&storage.other.k_full, own_parity);
                    own_parity ^= 1;
                    Step at = Base::Scheduler::first_step(params, tile());
                    sm90::wgmma_wait<0>();
                    CUTE_NO_UNROLL
                    for (; left > 1; --left) {
                        run_step(at, std::true_type{});
                        at.advance(ratio);
                    }
                    release(&storage.v_empty);
                    run_step(at, std::false_type{});
                    sm90::pin(rDk);
                    release(&storage.k_empty);
                }
                if (params.dk_ptr != nullptr) this->store_dk(params, tKrDk);
                this->release_tile();
            }
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
