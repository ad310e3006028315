// Rung 13: TMA and WGMMA, warp-specialised: the library's sm90 kernel, reduced to its main loop
// (mainloop_fwd_sm90.h). Types, shared memory, TMA descriptors and PTX are the library's own.
//
// WGMMA: four warps multiply 64 rows, and read K and V from shared memory without ldmatrix: twice
// the rate of mma.sync.
//
// TMA: one thread copies a tile with a few instructions. The hardware computes addresses and
// swizzle, and writes zeros beyond the last row.
//
// The producer loads ahead as far as stages are free. Full and empty mbarriers of each stage
// synchronise it with the consumer warpgroups, which get its registers.
//
// Overlap: Q K^T of a block and P V of the block before are issued together. With the ping-pong
// schedule the softmax of one consumer overlaps with the products of another. A softmax waits for
// its own P V, because it writes P to the registers that P V reads.
//
// Persistent CTAs, one per SM: while a tile's output is written, the next one's Q, K and V arrive.
// Under a causal mask tiles differ in length, and CTAs use work stealing, longest tiles first.
#pragma once

#include "tma_types.h"

namespace ladder {

template <class CudaElement, int kHeadDim, bool kCausal>
struct Rung13 : TmaTypes<CudaElement, kHeadDim, kCausal> {
    using Types = TmaTypes<CudaElement, kHeadDim, kCausal>;
    using Traits = typename Types::Traits;
    using Element = typename Types::Element;
    using SharedStorage = typename Types::SharedStorage;
    using Maps = typename Types::Maps;
    using Epilogue = flash::EpilogueFwd<Traits>;
    using SoftmaxT = flash::Softmax<2, Types::C.dtype>;
    static constexpr int kTileM = Traits::kTileM;
    static constexpr int kTileN = Traits::kTileN;
    static constexpr int kWarpgroups = Traits::kMmaWarpgroups;
    // A wgmma accumulator seen as that of m16n8 MMAs: (4, 1, columns / 8).
    template <int kColumns>
    using AccLayout = Layout<Shape<Shape<_2, _2>, _1, Int<kColumns / 8>>>;

    // The producer, one thread: loads each block's K, and V one block behind, as it is needed
    // later. It also takes the tiles from the queue and publishes them to the consumers.
    CUTE_DEVICE static void produce(Flash_fwd_params const &params, Maps const &maps,
                                    SharedStorage &storage) {
        Use k, v, t;
        uint32_t q_phase = 1;
        for (int index = blockIdx.x;; index = maps.queue.next(index)) {
            WorkTile const tile = Types::get_tile(params, maps.queue, index);
            sm90::barrier_wait(&storage.tile_empty[t.stage()], t.parity() ^ 1);
            storage.tile[t.stage()] = tile;
            storage.output[t.stage()] = Epilogue::output_offset(params, tile);
            sm90::barrier_arrive(&storage.tile_full[t.stage()]);
            ++t.i;
            if (tile.m_block < 0) {
                return;
            }
            int n = tile.blocks.count - 1;
            if (n < 0) {
                continue;
            }
            auto const load_block = [&](CUtensorMap const &map, auto &full, auto &empty, auto &smem,
                                        Use &use, int block) {
                sm90::barrier_wait(&empty[use.stage()], use.parity() ^ 1);
                Types::load(map, &full[use.stage()], kTileN, smem[use.stage()].data(), kTileN,
                            block * kTileN, tile.head_k, tile.batch);
                ++use.i;
            };
            load_block(maps.k, storage.k_full, storage.k_empty, storage.k, k, n);
            for (int wg = 0; wg < kWarpgroups; ++wg) {
                sm90::barrier_wait(&storage.q_empty[wg], q_phase);
                Types::load(maps.q, &storage.q_full[wg], 64, storage.q.data() + wg * 64 * 64,
                            kTileM, tile.m_block * kTileM + wg * 64, tile.head, tile.batch);
            }
            q_phase ^= 1;
            CUTE_NO_UNROLL
            for (; n > 0; --n) {
                load_block(maps.k, storage.k_full, storage.k_empty, storage.k, k, n - 1);
                load_block(maps.v, storage.v_full, storage.v_empty, storage.v, v, n);
            }
            load_block(maps.v, storage.v_full, storage.v_empty, storage.v, v, 0);
        }
    }

    // This warp's arrival at the empty barrier of a stage.
    CUTE_DEVICE static void release(sm90::Barrier *empty, bool now = true) {
        sm90::barrier_arrive(empty, now && threadIdx.x % 32 == 0);
    }

    // Ping-pong: warpgroup i waits at named barrier 1 + i before it issues products.
    CUTE_DEVICE static void pass_turn(int warpgroup) {
        sm90::named_barrier_arrive(1 + (warpgroup + 1) % kWarpgroups, 256);
    }

    // A consumer warpgroup, which computes 64 rows of each tile.
    CUTE_DEVICE static void consume(Flash_fwd_params const &params, SharedStorage &storage,
                                    int warpgroup, int thread) {
        typename Traits::TiledMmaQK mma_qk;
        typename Traits::TiledMmaPV mma_pv;
        auto const thr_qk = mma_qk.get_slice(warpgroup * 128);
        auto const thr_pv = mma_pv.get_slice(warpgroup * 128);
        Tensor sQ =
            make_tensor(make_smem_ptr(storage.q.data()), typename Traits::SmemLayoutQ{});  // (M, d)
        Tensor tSrQ = thr_qk.make_fragment_A(thr_qk.partition_A(sQ));  // (1, 1, d/16)
        Tensor rS =
            partition_fragment_C(mma_qk, Shape<Int<kTileM>, Int<kTileN>>{});  // ((2, 2, N/8), 1, 1)
        Tensor rO = partition_fragment_C(
            mma_pv, Shape<Int<kTileM>, Int<kHeadDim>>{});             // ((2, 2, d/8), 1, 1)
        Tensor tSrS = make_tensor(rS.data(), AccLayout<kTileN>{});    // (4, 1, N/8)
        Tensor tOrO = make_tensor(rO.data(), AccLayout<kHeadDim>{});  // (4, 1, d/8)
        Tensor tOrP = make_tensor<Element>(
            Layout<Shape<Shape<_2, _2, _2>, _1, Int<kTileN / 16>>>{});  // (8, 1, N/16)
        SoftmaxT softmax(params.scale_softmax_log2);
        typename SoftmaxT::RowTensor no_sinks;
        fill(no_sinks, -INFINITY);
        Use k, t;
        uint32_t q_phase = 0;

        // P V of a block follows the next block's Q K^T, so V's stage index is one behind K's.
        auto const v = [&] { return Use{k.i - 1}; };
        auto const issue_qk = [&] {
            Tensor sK = make_tensor(make_smem_ptr(storage.k[k.stage()].data()),
                                    typename Traits::SmemLayoutKV{});      // (N, d)
            Tensor tSrK = thr_qk.make_fragment_B(thr_qk.partition_B(sK));  // (1, 1, d/16)
            sm90::wgmma_issue<false>(mma_qk, tSrQ, tSrK, rS);
        };
        auto const issue_pv = [&] {
            Tensor sVt = make_tensor(make_smem_ptr(storage.v[v().stage()].data()),
                                     typename Traits::SmemLayoutVt{});      // (d, N)
            Tensor tOrV = thr_pv.make_fragment_B(thr_pv.partition_B(sVt));  // (1, 1, N/16)
            sm90::wgmma_issue<true>(mma_pv, tOrP, tOrV, rO);
        };
        auto const release_k = [&](int n) {  // S of block n is complete
            sm90::pin(rS);
            release(&storage.k_empty[k.stage()]);
            release(&storage.q_empty[warpgroup], n == 0);
        };
        auto const release_v = [&] {  // P V is complete
            sm90::pin(rO);
            release(&storage.v_empty[v().stage()]);
        };

        auto const tile = [&]() -> WorkTile const & { return storage.tile[t.stage()]; };
        auto const release_tile = [&] {
            __syncwarp();
            release(&storage.tile_empty[t.stage()]);
            ++t.i;
        };
        // Is there a tile with keys? The output of those without is written here. Two returns on
        // purpose: of one with both conditions nvcc no longer knows that all lanes agree, and the
        // main loop carries the buffers' numbers in every lane's registers, 395 instructions
        // instead of 370.
        auto const await_tile = [&] {
            CUTE_NO_UNROLL
            while (true) {
                sm90::barrier_wait(&storage.tile_full[t.stage()], t.parity());
                if (tile().m_block < 0) {
                    return false;
                }
                if (tile().blocks.count > 0) {
                    return true;
                }
                Epilogue::store_empty(params, tile(), storage.output[t.stage()], thread);
                release_tile();
            }
        };

        CUTE_NO_UNROLL
        while (await_tile()) {
            int n = tile().blocks.count - 1;
            int const n_unmasked = tile().blocks.unmasked;
            flash::Mask<Types::C> const mask{params, tile()};
            sm90::barrier_wait(&storage.q_full[warpgroup], q_phase);
            sm90::barrier_wait(&storage.k_full[k.stage()], k.parity());
            q_phase ^= 1;
            issue_qk();
            sm90::wgmma_wait<0>();
            release_k(n);
            ++k.i;
            if (n >= n_unmasked) mask.template apply<Traits>(tSrS, thread, n);
            softmax.start(tSrS, tOrP);
            clear(rO);

            CUTE_NO_UNROLL
            for (--n; n >= 0; --n) {
                sm90::barrier_wait(&storage.k_full[k.stage()], k.parity());
                sm90::named_barrier_sync(1 + warpgroup, 256);
                issue_qk();
                sm90::barrier_wait(&storage.v_full[v().stage()], v().parity());
                issue_pv();
                pass_turn(warpgroup);
                sm90::wgmma_wait<1>();
                release_k(n);
                bool const masked = n >= n_unmasked;
                if (masked) mask.template apply<Traits>(tSrS, thread, n);
                sm90::wgmma_wait<0>();
                release_v();
                ++k.i;
                softmax.update(tSrS, tOrP, tOrO, masked || softmax.seeks_max(), masked);
            }

            sm90::barrier_wait(&storage.v_full[v().stage()], v().parity());
            issue_pv();
            sm90::wgmma_wait<0>();
            release_v();
            auto const rows = Epilogue::template thread_rows<2>(params, tile(), thread);
            Epilogue::store(params, false, storage.output[t.stage()], rows, thread,
                            softmax.finalize(tOrO, no_sinks, 1.f), tOrO);
            release_tile();
        }
    }

    __device__ static void run(Flash_fwd_params const &params, Maps const &maps,
                               SharedStorage &storage) {
        int const warpgroup = __shfl_sync(kAllLanes, int(threadIdx.x / 128), 0);
        if (threadIdx.x == 0) {
            Types::init_barriers(storage);
        }
        __syncthreads();
        if (warpgroup == 0) {
            sm90::registers_lower<Types::kLoadRegisters>();
            if (threadIdx.x < 32 && sm90::elect_one()) {
                produce(params, maps, storage);
            }
        } else {
            sm90::registers_raise<Types::kMmaRegisters>();
            if (warpgroup == kWarpgroups) {
                pass_turn(kWarpgroups - 1);  // to the first
            }
            consume(params, storage, warpgroup - 1, static_cast<int>(threadIdx.x) - 128);
        }
    }
};

}  // namespace ladder
