// How a CTA of the sm90 class's backward hands the sums of dK and dV of its part of a shared tile
// to the CTA that stores them.
#pragma once

#include <arch_sm90.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cute/config.hpp>
#include <cute/tensor.hpp>

#include "flash.h"
#include "work_tile.h"

namespace flash {

using namespace cute;

// A CTA leaves partial sums of one tile at most (shared_tiles_sm90.h), at its place in
// dkv_partial_ptr: those of dV in front of those of dK. Each warp that has left its sums of a
// gradient adds 1 to the CTA's counter, which is zero before the launch.
template <class Traits>
struct SharedSumsSm90 {
    static constexpr int kFloats = Traits::kTileN * Traits::kHeadDim;  // of a gradient
    // What a CTA's counter reaches when all its sums are there. Up to d = 128 both warpgroups hold
    // dV and dK, above d = 128 each holds one of them.
    static constexpr unsigned kStores = (Traits::kWide ? 1 : 2) * Traits::kWarpgroups * 4;
    static_assert(!Traits::kWide || Traits::kWarpgroups == 2);

    // Floats of the workspace of so many CTAs.
    CUTE_HOST_DEVICE static int64_t workspace(int ctas) { return int64_t(ctas) * 2 * kFloats; }

    // Called by all threads that hold a gradient of a tile. Leaves their sums in the workspace, or
    // adds to them what other CTAs left. Returns whether this CTA stores the gradient. acc:
    // (4, 1, d/8). thread: among all MMA threads.
    template <class Acc>
    CUTE_DEVICE static bool combine(Flash_bwd_params const &params, WorkTile const &tile,
                                    bool is_dk, int thread, Acc &acc) {
        if (tile.part == 0) {
            return true;
        }
        if (tile.part < 0) {
            leave(params, is_dk, thread, acc);
            return false;
        }
        CUTE_NO_UNROLL
        for (int before = tile.part; before > 0; --before) {
            add(params, static_cast<int>(blockIdx.x) - before * Traits::kCluster, is_dk, thread,
                acc);
        }
        return true;
    }

  private:
    // The thread's first four sums, among those that a CTA left: the sums of dK are behind those of
    // dV, and within a gradient the first four sums of all threads come before the next four.
    // thread: modulo the threads that hold the gradient.
    template <int kThreads>
    CUTE_DEVICE static float4 *sums(Flash_bwd_params const &params, int cta, bool is_dk,
                                    int thread) {
        float *const of_cta = params.dkv_partial_ptr + (int64_t(cta) * 2 + is_dk) * kFloats;
        return reinterpret_cast<float4 *>(of_cta) + thread % kThreads;
    }

    template <class Acc>
    CUTE_DEVICE static void leave(Flash_bwd_params const &params, bool is_dk, int thread,
                                  Acc const &acc) {
        constexpr int kSize = decltype(size(acc))::value, kThreads = kFloats / kSize;
        int const cta = static_cast<int>(blockIdx.x);
        float4 *const to = sums<kThreads>(params, cta, is_dk, thread);
        CUTE_UNROLL
        for (int i = 0; i < kSize / 4; ++i) {
            to[i * kThreads] =
                make_float4(acc(4 * i), acc(4 * i + 1), acc(4 * i + 2), acc(4 * i + 3));
        }
        __syncwarp();
        if (thread % 32 == 0) sm90::add_release(params.dq_semaphore_ptr + cta, 1u);
    }

    template <class Acc>
    CUTE_DEVICE static void add(Flash_bwd_params const &params, int cta, bool is_dk, int thread,
                                Acc &acc) {
        constexpr int kSize = decltype(size(acc))::value, kThreads = kFloats / kSize;
        if (thread % 32 == 0) {
            CUTE_NO_UNROLL
            while (sm90::load_acquire(params.dq_semaphore_ptr + cta) < kStores) {
            }
        }
        float4 const *const from = sums<kThreads>(params, cta, is_dk, thread);
        CUTE_UNROLL
        for (int i = 0; i < kSize / 4; ++i) {
            // The first __syncwarp() makes all lanes wait for lane 0. The others keep the compiler
            // from issuing more loads at once than there are registers for.
            if (i % 4 == 0) __syncwarp();
            float4 const x = sm90::load_from_l2(from + i * kThreads);
            acc(4 * i) += x.x;
            acc(4 * i + 1) += x.y;
            acc(4 * i + 2) += x.z;
            acc(4 * i + 3) += x.w;
        }
    }
};

}  // namespace flash
