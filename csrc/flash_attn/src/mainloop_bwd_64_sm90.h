// The consumers' main loop of the backward for head dimensions up to 64, whose steps have 128
// queries. Here the elementwise arithmetic of a step takes longer than its products, and both
// warpgroups do it at the same time, as each waits for the other's dS. So wgmmas run underneath it
// where registers allow: dP under the first exponentials, part of dV under the other exponentials
// and dS, the rest of dV and dK while dS is written to shared memory, and S of the next step while
// dQ is.
#pragma once

#include <arch_sm90.h>

#include <cute/tensor.hpp>
#include <type_traits>

#include "mainloop_bwd_sm90.h"

namespace flash {

using namespace cute;

template <class Traits>
struct MainloopBwd64Sm90 : MainloopBwdSm90<Traits> {
    using Base = MainloopBwdSm90<Traits>;
    using Element = typename Traits::Element;
    static_assert(Traits::kHeadDim <= 64 && Traits::kTileM == 128);
    static constexpr int kSteps = Traits::kTileM / 16;  // k16 steps of dV and dK
    // With dropout or a softcap registers do not suffice to run dP under the exponentials: dV is
    // issued first, and dP once dV is complete.
    static constexpr bool kLateDp = Traits::kConfig.dropout || Traits::kConfig.softcap;
    // k16 steps of dV that are issued before dS is computed; the others are issued after it. With
    // four it was 5 % slower (docs/tried_sm90.md).
    static constexpr int kEarlyDv = kLateDp ? kSteps : 2;

    struct Consumer : Base::Consumer {
        using Shared = typename Base::Consumer;
        using Shared::ds, Shared::own_parity, Shared::step, Shared::storage;
        using typename Shared::AccDkv, typename Shared::AccS, typename Shared::Operand;
        using typename Shared::Step;

        CUTE_DEVICE void run(Flash_bwd_params const &params) {
            typename Traits::TiledMmaS mma_s;
            typename Traits::TiledMmaDkv mma_dkv;
            typename Traits::TiledMmaDq mma_dq;
            using ShapeDkv = typename Shared::ShapeDkv;
            Tensor rS =
                partition_fragment_C(mma_s, typename Shared::ShapeS{});  // ((2, 2, M/8), 1, 1)
            Tensor rDp =
                partition_fragment_C(mma_s, typename Shared::ShapeS{});  // ((2, 2, M/8), 1, 1)
            Tensor rDk = partition_fragment_C(mma_dkv, ShapeDkv{});      // ((2, 2, d/8), 1, 1)
            Tensor rDv = partition_fragment_C(mma_dkv, ShapeDkv{});      // ((2, 2, d/8), 1, 1)
            Tensor rDq =
                partition_fragment_C(mma_dq, typename Shared::ShapeDq{});  // ((2, 2, N/8), 1, 1)
            Tensor tSrS = make_tensor(rS.data(), AccS{});                  // (4, 1, M/8)
            Tensor tSrDp = make_tensor(rDp.data(), AccS{});                // (4, 1, M/8)
            Tensor tKrDk = make_tensor(rDk.data(), AccDkv{});              // (4, 1, d/8)
            Tensor tKrDv = make_tensor(rDv.data(), AccDkv{});              // (4, 1, d/8)
            Tensor tKrP = make_tensor<Element>(Operand{});                 // (8, 1, M/16)
            Tensor tKrDs = make_tensor<Element>(Operand{});                // (8, 1, M/16)

            // Runs a step whose S is complete. Afterwards S of the next step, if there is one, is
            // in flight.
            auto const run_step = [&](Step const &at,
                                      auto has_next) __attribute__((always_inline)) {
                if constexpr (!kLateDp) this->issue_dp(rDp);
                this->compute_p(params, rS, tKrP, at);
                if constexpr (kLateDp) this->await_dout();
                // ptxas keeps the exponentials of these k16 steps ahead of the wait for dP, and
                // moves most of the others, if there are any, behind it.
                this->template issue_dv<0, kEarlyDv>(tSrS, tKrP, rDv);
                if constexpr (kLateDp) {
                    sm90::wgmma_wait<0>();
                    this->issue_dp(rDp);
                }
                sm90::wgmma_wait<!kLateDp>();
                sm90::pin(rDp);
                this->differentiate(params, tSrS, tSrDp);
                convert(tSrDp, tKrDs);
                if constexpr (!kLateDp) {
                    this->template issue_dv<kEarlyDv, kSteps>(tSrS, tKrP, rDv);
                }
                this->write_ds(tKrDs);
                // dK is issued ahead of the fence in publish_ds(), so that the tensor cores are
                // busy during it.
                this->template issue_gradient<0, kSteps>(tKrDs, storage.q[step.stage()], rDk);
                this->publish_ds();
                this->issue_dq(rDq);
                ds.advance();
                sm90::wgmma_wait<1>();
                this->release_step(step);
                step.advance();
                if constexpr (has_next) this->issue_s(rS);
                sm90::wgmma_wait<has_next>();
                sm90::pin(rDq);
                this->add_dq(params, at.head, this->block(at.visit), rDq);
            };

            CUTE_NO_UNROLL
            while (this->await_tile()) {
                if (Traits::kMayOwnHeads && this->owns) this->begin_owned(params);
                clear(rDk);
                clear(rDv);
                int const ratio = params.h_h_k_ratio;
                int left = this->tile().blocks.count * ratio;  // steps
                if (left > 0) {
                    sm90::barrier_wait(&storage.k_full, own_parity);
                    this->load_k();
                    this->issue_s(rS);
                    sm90::barrier_wait(&storage.v_full, own_parity);
                    this->load_v();
                    own_parity ^= 1;
                    Step at = Base::Scheduler::first_step(params, this->tile());
                    sm90::wgmma_wait<0>();
                    CUTE_NO_UNROLL
                    for (; left > 1; --left) {
                        run_step(at, std::true_type{});
                        at.advance(ratio);
                        sm90::wgmma_wait<0>();
                    }
                    run_step(at, std::false_type{});
                    sm90::pin(rDk);
                    sm90::pin(rDv);
                    this->release_keys();
                }
                this->store_tile(params, tKrDk, tKrDv);
                this->release_tile();
            }
        }
    };
};

}  // namespace flash
