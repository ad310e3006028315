// The loop of the backward for head dimensions above 128, of which dK and dV of 64 keys exceed a
// warpgroup's registers. A CTA owns 64 keys, and its two warpgroups share each product:
//
//   S^T = K Q^T, dP^T = V dO^T      half of the queries, P^T and dS^T into shared memory
//   dV += P^T dO, dK += dS^T Q      half of the columns, in registers
//   dQ = dS K                       half of the columns, summed up in global memory
//
// Clocks of a step of 64 queries at d = 256: 2,560 of the tensor cores, 3,328 of shared memory (A
// takes 16 for each m64k16, B N/4 for each k16, what is loaded or stored 1 for 128 bytes); at
// d = 192 1,920 and 2,624. Loads and sums of dQ are 12.5 bytes in L2 for each 1,000 FLOPs. With
// keys as columns, of dK^T and dV^T, a tile may have 80 at d = 256 and 96 at d = 192: 10 and 8.3
// bytes, and 1.24 and 1.33 clocks of shared memory for one of the tensor cores, here 1.30 and 1.37.
// But at d = 256 160 + 64 + 20 of 240 registers would hold dK, dV, dQ and S of the next step.
//
// Products under arithmetic: dP under P, dV under dS, dK and S of the next step under the
// reductions of dQ. None is under way where the loop begins again: ptxas would wait for each.
#pragma once

#include <arch_sm90.h>

#include <cute/tensor.hpp>

#include "mainloop_bwd_sm90.h"

namespace flash {

using namespace cute;

template <class Traits>
struct MainloopBwdWideSm90 : MainloopBwdSm90<Traits> {
    using Base = MainloopBwdSm90<Traits>;
    using Element = typename Traits::Element;
    using typename Base::RingDs;
    using typename Base::RingSteps;
    static constexpr int kOwnColumns = Traits::kOwnColumns;
    static constexpr int kOwnQueries = Traits::kOwnQueries;

    struct Consumer : Base::Consumer {
        using Shared = typename Base::Consumer;
        using Shared::ds, Shared::own_parity, Shared::step, Shared::storage, Shared::warpgroup;
        using Shared::release, Shared::tile, Shared::block;

        // The buffer of P of this step.
        CUTE_DEVICE Element *p() const {
            return storage.p.data() + ds.stage() * cosize_v<typename Traits::SmemLayoutDs>;
        }

        // acc += weights visited, of P^T and dO or of dS^T and Q.
        template <class Visited, class Acc>
        CUTE_DEVICE void issue_gradient(Element *weights, Visited &visited, Acc &acc) const {
            typename Traits::TiledMmaDkv mma;
            auto const thr_mma = mma.get_slice(warpgroup * 128);
            Tensor sA =
                make_tensor(make_smem_ptr(weights), typename Traits::SmemLayoutDst{});  // (N, M)
            Tensor sBt = make_tensor(make_smem_ptr(visited.data()),
                                     typename Traits::SmemLayoutQt{});        // (d, M)
            Tensor tKrA = thr_mma.make_fragment_A(thr_mma.partition_A(sA));   // (1, 1, M/16)
            Tensor tKrB = thr_mma.make_fragment_B(thr_mma.partition_B(sBt));  // (1, 1, M/16)
            sm90::wgmma_issue<true>(mma, tKrA, tKrB, acc);
        }

        CUTE_DEVICE void run(Flash_bwd_params const &params) {
            typename Traits::TiledMmaS mma_s;
            typename Traits::TiledMmaDkv mma_dkv;
            typename Traits::TiledMmaDq mma_dq;
            using Scores = Shape<Int<Traits::kTileN>, Int<Traits::kTileM>>;
            using Gradient = Shape<Int<Traits::kTileN>, Int<Traits::kHeadDim>>;
            Tensor rS = partition_fragment_C(mma_s, Scores{});       // ((2, 2, M/16), 1, 1)
            Tensor rDp = partition_fragment_C(mma_s, Scores{});      // ((2, 2, M/16), 1, 1)
            Tensor rDk = partition_fragment_C(mma_dkv, Gradient{});  // ((2, 2, d/16), 1, 1)
            Tensor rDv = partition_fragment_C(mma_dkv, Gradient{});  // ((2, 2, d/16), 1, 1)
            Tensor rDq = partition_fragment_C(
                mma_dq, Shape<Int<Traits::kTileM>, Int<Traits::kHeadDim>>{});  // like rDk
            using OfQueries = typename Base::template AccLayout<kOwnQueries>;
            using OfColumns = typename Base::template AccLayout<kOwnColumns>;
            Tensor tSrS = make_tensor(rS.data(), OfQueries{});    // (4, 1, M/16)
            Tensor tSrDp = make_tensor(rDp.data(), OfQueries{});  // (4, 1, M/16)
            Tensor tKrDk = make_tensor(rDk.data(), OfColumns{});  // (4, 1, d/16)
            Tensor tKrDv = make_tensor(rDv.data(), OfColumns{});  // (4, 1, d/16)
            using Operand = Layout<Shape<Shape<_2, _2, _2>, _1, Int<kOwnQueries / 16>>>;
            Tensor tSrX = make_tensor<Element>(Operand{});  // (8, 1, M/32), of P^T or dS^T

            auto const issue_s = [&] {
                sm90::barrier_wait(&storage.q_full[step.stage()], step.parity());
                this->issue_scores(storage.k, storage.q[step.stage()], rS);
            };
            // dV += P^T dO of a step whose S is complete, and dS.
            auto const issue_dv_and_compute_ds = [&](int visit) {
                sm90::barrier_wait(&storage.dout_full[step.stage()], step.parity());
                this->issue_scores(storage.v, storage.dout[step.stage()], rDp);
                sm90::pin(rS);
                if (visit >= tile().blocks.unmasked) this->apply_mask(params, tSrS, visit);
                this->exponentiate(params, tSrS);
                convert(tSrS, tSrX);
                this->store_weights(tSrX, p(), &storage.p_full[ds.stage()]);
                sm90::barrier_wait(&storage.p_full[ds.stage()], ds.parity());
                issue_gradient(p(), storage.dout[step.stage()], rDv);
                sm90::wgmma_wait<1>();
                sm90::pin(rDp);
                this->differentiate(tSrS, tSrDp);
                convert(tSrDp, tSrX);
                this->store_ds(tSrX);
            };
            // dQ = dS K, and dK += dS^T Q behind it.
            auto const issue_dq_and_dk = [&] {
                RingDs const of = ds;
                this->issue_dq(rDq);
                issue_gradient(storage.ds[of.stage()].data(), storage.q[step.stage()], rDk);
            };
            auto const add_dq = [&](int visit, int head) {
                sm90::pin(rDq);
                Shared::add_dq(params, head, block(visit), rDq);
            };

            CUTE_NO_UNROLL
            while (this->await_tile()) {
                clear(rDk);
                clear(rDv);
                int const count = tile().blocks.count;
                int left = count * params.h_h_k_ratio;  // steps
                if (left > 0) {
                    sm90::barrier_wait(&storage.k_full, own_parity);
                    issue_s();
                    int n = count - 1;  // visits left of this head after this one
                    int head = tile().head_q;
                    sm90::barrier_wait(&storage.v_full, own_parity);
                    own_parity ^= 1;
                    sm90::wgmma_wait<0>();

                    CUTE_NO_UNROLL
                    for (; left > 1; --left) {
                        issue_dv_and_compute_ds(n);
                        issue_dq_and_dk();
                        RingSteps const used = step;
                        step.advance();
                        issue_s();
                        sm90::wgmma_wait<2>();
                        add_dq(n, head);
                        bool const next_head = --n < 0;
                        n = next_head ? count - 1 : n;
                        head += next_head;
                        sm90::wgmma_wait<1>();
                        this->release_step(used);
                        sm90::wgmma_wait<0>();
                    }
                    issue_dv_and_compute_ds(n);
                    issue_dq_and_dk();
                    sm90::wgmma_wait<1>();
                    add_dq(n, head);
                    sm90::wgmma_wait<0>();
                    sm90::pin(rDk);
                    sm90::pin(rDv);
                    this->release_step(step);
                    step.advance();
                    release(&storage.k_empty);
                    release(&storage.v_empty);
                }
                if (params.dk_ptr != nullptr) this->store_gradients(params, tKrDk, tKrDv);
                this->release_tile();
            }
        }
    };
};

}  // namespace flash
