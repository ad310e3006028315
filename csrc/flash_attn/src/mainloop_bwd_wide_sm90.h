// The loop of the backward for head dimensions above 128, of which a warpgroup's registers hold
// dK or dV of 64 keys, not both. A CTA owns 64 keys, and its warpgroups divide the products:
//
//   warpgroup 0:  S^T = K Q^T, P = exp(S - LSE), to the other one; dV += P^T dO
//   warpgroup 1:  dP^T = V dO^T, dS = P * (dP - D), to shared memory; dK += dS^T Q
//   both:         dQ = dS K, half of the columns each, summed up in global memory
//
// P^T and dS^T are A operands as they come out, in registers. The second warpgroup begins a step
// when the first one has P, and the first goes on to the next step, so that one's products fill the
// tensor cores while the other computes or adds dQ to the sums.
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
    using typename Base::RingSteps;
    static constexpr int kTileM = Traits::kTileM;

    struct Consumer : Base::Consumer {
        using Shared = typename Base::Consumer;
        using Shared::ds, Shared::own_parity, Shared::step, Shared::storage, Shared::thread;
        using Shared::warpgroup, Shared::release, Shared::tile, Shared::block;
        Ring<1> p;

        // Where a thread's part of P^T is, kTileM / 8 groups of four that are 512 floats apart.
        CUTE_DEVICE float4 *own_p() const {
            return reinterpret_cast<float4 *>(storage.p.data()) + thread % 128;
        }

        // tSrP: P^T (4, 1, M/8). Hands it to the other warpgroup, once that has read the last one.
        // The fence orders the reads of the statistics and TMA's writes, as in store_ds().
        template <class Scores>
        CUTE_DEVICE void give_p(Scores const &tSrP) {
            sm90::barrier_wait(storage.p_empty.data(), p.parity() ^ 1);
            CUTE_UNROLL
            for (int j = 0; j < kTileM / 8; ++j) {
                own_p()[128 * j] =
                    make_float4(tSrP(0, 0, j), tSrP(1, 0, j), tSrP(2, 0, j), tSrP(3, 0, j));
            }
            sm90::fence_async_proxy();
            __syncwarp();
            release(storage.p_full.data());
            p.advance();
        }

        // tSrP: P^T (4, 1, M/8). The thread's own part of the other warpgroup's.
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

        CUTE_DEVICE void await_q() const {
            sm90::barrier_wait(&storage.q_full[step.stage()], step.parity());
        }
        CUTE_DEVICE void await_dout() const {
            sm90::barrier_wait(&storage.dout_full[step.stage()], step.parity());
        }

        // S^T of a step, or dP^T.
        template <bool kOfValues, class Acc>
        CUTE_DEVICE void issue_scores(Acc &rS) const {
            if constexpr (kOfValues) {
                await_q();
                Shared::issue_scores(storage.k, storage.q[step.stage()], rS);
            } else {
                await_dout();
                Shared::issue_scores(storage.v, storage.dout[step.stage()], rS);
            }
        }

        // tSrS: S^T (4, 1, M/8), afterwards P^T, or dP^T, afterwards dS^T. tKrX: the same as A
        // operand, (8, 1, M/16).
        template <bool kOfValues, class Scores, class Fragment>
        CUTE_DEVICE void compute_weights(Flash_bwd_params const &params, int visit, Scores &tSrS,
                                         Fragment &tKrX) {
            if constexpr (kOfValues) {
                if (visit >= tile().blocks.unmasked) this->apply_mask(params, tSrS, visit);
                this->exponentiate(params, tSrS);
                give_p(tSrS);
                convert(tSrS, tKrX);
            } else {
                Tensor tSrP = make_tensor_like(tSrS);  // (4, 1, M/8)
                await_q();                             // the statistics
                take_p(tSrP);
                this->differentiate(tSrP, tSrS);
                convert(tSrS, tKrX);
                this->store_ds(tKrX);
            }
        }

        // dV += P^T dO of a step, or dK += dS^T Q.
        template <bool kOfValues, class Fragment, class Acc>
        CUTE_DEVICE void issue_gradient(Fragment const &tKrX, Acc &rDx) const {
            if constexpr (kOfValues) {
                await_dout();
                Shared::template issue_gradient<0, kTileM / 16>(tKrX, storage.dout[step.stage()],
                                                                rDx);
            } else {
                Shared::template issue_gradient<0, kTileM / 16>(tKrX, storage.q[step.stage()], rDx);
            }
        }

        // The loop of one of the warpgroups.
        template <bool kOfValues>
        CUTE_DEVICE void run_as(Flash_bwd_params const &params) {
            typename Traits::TiledMmaS mma_s;
            typename Traits::TiledMmaDkv mma_dkv;
            typename Traits::TiledMmaDq mma_dq;
            using Scores = Shape<Int<Traits::kTileN>, Int<kTileM>>;
            using Gradient = Shape<Int<Traits::kTileN>, Int<Traits::kHeadDim>>;
            Tensor rS = partition_fragment_C(mma_s, Scores{});       // ((2, 2, M/8), 1, 1)
            Tensor rDx = partition_fragment_C(mma_dkv, Gradient{});  // ((2, 2, d/8), 1, 1)
            using OfDq = Shape<Int<kTileM>, Int<Traits::kPartColumns>>;
            Tensor rDq = partition_fragment_C(mma_dq, OfDq{});      // ((2, 2, N/8), 1, 1)
            Tensor rSecond = partition_fragment_C(mma_dq, OfDq{});  // the same, of two parts
            using OfQueries = typename Base::template AccLayout<kTileM>;
            using OfColumns = typename Base::template AccLayout<Traits::kHeadDim>;
            Tensor tSrS = make_tensor(rS.data(), OfQueries{});    // (4, 1, M/8)
            Tensor tKrDx = make_tensor(rDx.data(), OfColumns{});  // (4, 1, d/8)
            using Operand = Layout<Shape<Shape<_2, _2, _2>, _1, Int<kTileM / 16>>>;
            Tensor tKrX = make_tensor<Element>(Operand{});  // (8, 1, M/16)

            auto const compute_weights = [&](int visit) {
                sm90::pin(rS);
                this->template compute_weights<kOfValues>(params, visit, tSrS, tKrX);
            };
            // dV or dK of a step, and dQ in parts. The first of two parts is added before the
            // scores of the next step take its registers, the last one under their product.
            constexpr bool kTwoParts = Traits::kDqParts == 2;
            auto const issue_products = [&] {
                issue_gradient<kOfValues>(tKrX, rDx);
                this->template issue_dq<0>(rDq);
                if constexpr (kTwoParts) this->template issue_dq<1>(rSecond);
                ds.advance();
            };
            auto const add_first = [&](int visit, int head) {
                if constexpr (kTwoParts) {
                    sm90::pin(rDq);
                    this->template add_dq<0>(params, head, block(visit), rDq);
                }
            };
            auto const add_last = [&](int visit, int head) {
                auto &last = kTwoParts ? rSecond : rDq;
                sm90::pin(last);
                this->template add_dq<kTwoParts>(params, head, block(visit), last);
            };

            CUTE_NO_UNROLL
            while (this->await_tile()) {
                clear(rDx);
                int const count = tile().blocks.count;
                int left = count * params.h_h_k_ratio;  // steps
                if (left > 0) {
                    sm90::barrier_wait(&storage.k_full, own_parity);
                    if constexpr (!kOfValues) sm90::barrier_wait(&storage.v_full, own_parity);
                    own_parity ^= 1;
                    issue_scores<kOfValues>(rS);
                    int n = count - 1;  // visits left of this head after this one
                    int head = tile().head_q;
                    sm90::wgmma_wait<0>();

                    CUTE_NO_UNROLL
                    for (; left > 1; --left) {
                        compute_weights(n);
                        issue_products();
                        sm90::wgmma_wait<1>();
                        this->release_step(step);
                        step.advance();
                        add_first(n, head);
                        issue_scores<kOfValues>(rS);
                        sm90::wgmma_wait<1>();
                        add_last(n, head);
                        bool const next_head = --n < 0;
                        n = next_head ? count - 1 : n;
                        head += next_head;
                        sm90::wgmma_wait<0>();
                    }
                    compute_weights(n);
                    issue_products();
                    sm90::wgmma_wait<0>();
                    add_first(n, head);
                    add_last(n, head);
                    sm90::pin(rDx);
                    this->release_step(step);
                    step.advance();
                    release(&storage.k_empty);
                    release(&storage.v_empty);
                }
                if (params.dk_ptr != nullptr) {
                    if constexpr (kOfValues) {
                        this->store_dv(params, tKrDx);
                    } else {
                        this->store_dk(params, tKrDx);
                    }
                }
                this->release_tile();
            }
            if constexpr (Traits::kBulkDq) sm90::bulk_wait();
        }

        CUTE_DEVICE void run(Flash_bwd_params const &params) {
            if (warpgroup == 0) {
                run_as<true>(params);
            } else {
                run_as<false>(params);
            }
        }
    };
};

}  // namespace flash
