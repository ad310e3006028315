// The sm80 class's backward kernels: each CTA computes the gradients of one tile of rows.
#pragma once

#include <dynamic_smem.h>

#include "dq_sums.h"
#include "flash.h"
#include "flash_bwd_postprocess.h"
#include "flash_bwd_preprocess_kernel.h"
#include "head_parts.h"
#include "mainloop_bwd_sm80.h"
#include "tile_scheduler.h"
#include "work_plan.h"

namespace flash {

// From the index of a CTA to its tile of queries or of keys. In a ragged batch a plan lists the
// tiles.
template <class Traits>
struct TileSchedulerBwd {
    using Info = BlockInfo<Traits::kMask, Traits::kQueries, Traits::kKeys>;
    static constexpr bool kVarlen = Traits::kConfig.varlen;
    // For Planner: what the plan's tiles are.
    static constexpr int kArch = Traits::kConfig.arch;
    static constexpr int kRows = Traits::kTileM;
    static constexpr bool kOfKeys = !Traits::kOwnsQueries;

    CUTE_HOST_DEVICE static BlockRange blocks(Flash_fwd_params const &params,
                                              WorkTile const &tile) {
        return kOfKeys ? Info::query_block_range(params, tile, tile.m_block)
                       : Info::block_range(params, tile);
    }

    CUTE_HOST_DEVICE static int num_blocks(Flash_bwd_params const &params) {
        int const rows = Traits::kOwnsQueries ? params.seqlen_q : params.seqlen_k;
        return (rows + Traits::kTileM - 1) / Traits::kTileM;
    }
    CUTE_HOST_DEVICE static int num_heads(Flash_bwd_params const &params) {
        return Traits::kOwnsQueries ? params.h : params.h_k;
    }
    CUTE_HOST_DEVICE static int64_t num_tiles(Flash_bwd_params const &params) {
        int64_t const of_a_head =
            kVarlen ? params.plan_capacity : int64_t(params.b) * num_blocks(params);
        return of_a_head * num_heads(params);
    }
    // The number of heads whose tiles are scheduled together: first the first tile of each head,
    // then the second ones, and so on. The tiles of a head that are in flight share in L2 what they
    // visit. Under a causal mask short tiles of some heads fill the SMs that long tiles of others
    // leave idle. Where tiles keep their order, a tile adds to a block of dQ once the tile before
    // has: the more tiles of a head are in flight, the later the last of them begins; the fewer,
    // the more heads L2 has to hold (docs/tried_sm80.md).
    CUTE_HOST_DEVICE static int heads_in_group(Flash_bwd_params const &params, int workers,
                                               bool ordered) {
        bool const causal = Traits::kMask == MaskKind::causal;
        if (!Traits::kSumsDq || !(ordered || (causal && !kVarlen))) return 1;
        int const all = cute::max((kVarlen ? 1 : params.b) * num_heads(params), 1);
        return as_equal_as_can_be(all, cute::min(all, heads_in_flight(params, workers, ordered)));
    }
    // The number of sequences of a ragged batch that take turns where tiles keep their order
    // (plan_in_order): enough that as many heads are in flight as in a dense batch, but at most 16.
    // Without a causal mask only one, as the tiles of the longest sequence are the last to end, and
    // come first. Tiles of unequal sequences do not visit a block of dQ soon after each other, so
    // with many heads in flight the block has left L2 in between. Tiles of 64 keys visit it twice
    // as often as those of 128. With more than kRowsOfWorker rows of dQ per worker turns took
    // longer, as measured, than the waits that they save (docs/tried_sm80.md).
    CUTE_HOST_DEVICE static int sequences_in_turns(Flash_bwd_params const &params, int workers) {
        constexpr int kMost = 16;
        constexpr int64_t kRowsOfWorker = 950;
        if (Traits::kMask != MaskKind::causal) return 1;
        int const heads = cute::max(num_heads(params), 1);
        int64_t most = cute::min(heads_in_flight(params, workers, true) / heads, kMost);
        if (Traits::kKeys <= 64 && int64_t(params.b) * params.seqlen_q != params.total_q) {
            int const longest = cute::min(params.seqlen_q, params.total_q);
            // A tile visits one of its query heads, while tiles ahead of it or behind it may visit
            // another.
            int64_t const rows = int64_t(longest) * heads * cute::min(params.h / heads, 2);
            most = cute::min(most, kRowsOfWorker * workers / cute::max(rows, int64_t(1)));
        }
        return as_equal_as_can_be(cute::max(params.b, 1), cute::max(static_cast<int>(most), 1));
    }
    // Draws the index of the CTA's tile from a counter, where tiles wait for those before them, as
    // CUDA does not say in which order CTAs start. Collective over the CTA.
    CUTE_DEVICE static int draw_tile(Flash_bwd_params const &params,
                                     typename Traits::SharedStorage &storage) {
        auto *const drawn = reinterpret_cast<unsigned *>(storage.stats);
        if (threadIdx.x == 0) {
            *drawn = atomicAdd(RowStats<Traits::kConfig>::tile_counter(params), 1u);
        }
        __syncthreads();
        int const index = static_cast<int>(*drawn);
        __syncthreads();  // the tile's first statistics overwrite it
        return index;
    }
    // Whether tile `index` exists: in a ragged batch num_tiles() is only an upper bound.
    CUTE_HOST_DEVICE static bool has_tile(Flash_bwd_params const &params, int index) {
        return !kVarlen || index < plan(params).count * num_heads(params);
    }

    // Returns tile `index`. In a ragged batch its batch is the number of the sequence, and the
    // tensors' batch strides are 0.
    CUTE_HOST_DEVICE static WorkTile tile(Flash_bwd_params const &params, int index) {
        WorkTile tile;
        if constexpr (kVarlen) {
            int const group = kOfKeys ? params.heads_in_group : params.h_h_k_ratio;
            PlanIndex const at = groups_last(plan(params).count, num_heads(params), group, index);
            tile = planned_tile(plan(params).tiles[at.tile], params.h_h_k_ratio, at.head).tile;
        } else {
            tile = dense_tile(params, index);
        }
        if (kOfKeys) tile.head_k = tile.head / params.head_parts;
        tile.head_q = kOfKeys ? tile.head * params.h_h_k_ratio : tile.head;
        tile.blocks = blocks(params, tile);
        if constexpr (Traits::kSumsDq) Info::mask_behind_keys(tile, tile.seqlen_k);
        return tile;
    }

  private:
    // The size of groups if `all` are divided into the fewest groups of at most `most`, as equally
    // as can be.
    CUTE_HOST_DEVICE static int as_equal_as_can_be(int all, int most) {
        int const groups = (all + most - 1) / most;
        return (all + groups - 1) / groups;
    }
    // The number of heads, of all sequences, that should be in flight, so that each of them has the
    // best number of tiles in flight.
    CUTE_HOST_DEVICE static int heads_in_flight(Flash_bwd_params const &params, int workers,
                                                bool ordered) {
        int const tiles = num_blocks(params);
        bool const causal = Traits::kMask == MaskKind::causal;
        int const of_head = !causal ? tiles / 4 : !ordered ? 8 : tiles < 48 ? 2 : 4;
        return cute::max(workers / cute::max(of_head, 1), 1);
    }
    CUTE_HOST_DEVICE static WorkPlan const &plan(Flash_bwd_params const &params) {
        return *static_cast<WorkPlan const *>(params.plan_ptr);
    }

    // Under a causal mask the tiles with most visits come first: the last queries, the first keys.
    CUTE_HOST_DEVICE static WorkTile dense_tile(Flash_bwd_params const &params, int index) {
        int const blocks = num_blocks(params);
        int const heads = num_heads(params);
        int const group = kOfKeys ? params.heads_in_group : 1;
        PlanIndex const at = groups_last(blocks, params.b * heads, group, index);
        bool const reversed = Traits::kOwnsQueries && Traits::kMask == MaskKind::causal;
        WorkTile tile{.m_block = reversed ? blocks - 1 - at.tile : at.tile,
                      .batch = at.head / heads};
        tile.head = at.head - tile.batch * heads;
        tile.head_k = tile.head / params.h_h_k_ratio;
        tile.seqlen_q = params.seqlen_q;
        tile.seqlen_k = params.seqlen_k;
        return tile;
    }
};

// Stores a gradient of the tile's rows, times scale. Collective over the CTA. gmem: the head's row
// 0 in the tensor, to which the row of the tile's sequence is added here.
template <class Traits, class Acc>
CUTE_DEVICE void store_gradient(typename Traits::SharedStorage &storage, WorkTile const &tile,
                                typename Traits::Element *gmem, int64_t row_stride, int d, Acc &acc,
                                float scale) {
    using Element = typename Traits::Element;
    CUTE_UNROLL
    for (int i = 0; i < size(acc); ++i) {
        acc(i) *= scale;
    }
    int const seqlen = Traits::kOwnsQueries ? tile.seqlen_q : tile.seqlen_k;
    gmem += (Traits::kOwnsQueries ? tile.row_q : tile.row_k) * row_stride;
    __syncthreads();  // every warp is done with the tile whose bytes the gradient takes
    store_rows<Traits>(
        MainloopBwdSm80<Traits>::own(storage, 0), acc, d, [&](int r) -> GmemRow<Element> {
            int const row = tile.m_block * Traits::kTileM + Traits::gmem_row(threadIdx.x, r);
            return {gmem + row * row_stride, row < seqlen};
        });
}

// Stores the gradients of a tile of keys: dX is dK, dY is dV.
template <class Traits, class Acc>
CUTE_DEVICE void store_keys(Flash_bwd_params const &params, typename Traits::SharedStorage &storage,
                            WorkTile const &tile, Acc &dX, Acc &dY) {
    using Element = typename Traits::Element;
    if (Traits::kSumsDq && params.dk_ptr == nullptr) {
        return;
    }
    if (params.head_parts > 1) {
        auto const store_part = [&](bool is_dk, Acc const &acc) {
            HeadPartSums<Traits::kConfig.varlen>::template store<
                typename Traits::TiledMma, Shape<Int<Traits::kTileM>, Int<Traits::kHeadDim>>>(
                params, tile, is_dk, tile.m_block * Traits::kTileM, threadIdx.x, acc);
        };
        if constexpr (Traits::kNeedsDs) store_part(true, dX);
        if constexpr (Traits::kNeedsDv) store_part(false, dY);
        return;
    }
    if constexpr (Traits::kNeedsDs) {
        store_gradient<Traits>(
            storage, tile,
            head_begin<Element>(params.dk_ptr, tile.batch, params.dk_batch_stride, tile.head_k,
                                params.dk_head_stride),
            params.dk_row_stride, params.d, dX, params.scale_softmax);
    }
    if constexpr (Traits::kNeedsDv) {
        store_gradient<Traits>(
            storage, tile,
            head_begin<Element>(params.dv_ptr, tile.batch, params.dv_batch_stride, tile.head_k,
                                params.dv_head_stride),
            params.dv_row_stride, params.d, dY,
            Traits::kConfig.dropout ? params.dropout_scale : 1.f);
    }
}

// Computes one tile. Parametrised by the traits type, as the forward kernel. kOrdered: tiles of
// keys add to dQ in their order.
template <class Traits, bool kOrdered = false>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinCtas)
    flash_bwd_kernel_sm80(__grid_constant__ Flash_bwd_params const params) {
    using Element = typename Traits::Element;
    auto &storage = dynamic_smem<typename Traits::SharedStorage>();

    using Scheduler = TileSchedulerBwd<Traits>;
    int index = blockIdx.x;
    if constexpr (kOrdered) index = Scheduler::draw_tile(params, storage);
    if (!Scheduler::has_tile(params, index)) {
        return;
    }
    WorkTile const tile = Scheduler::tile(params, index);
    using Shape = Shape<Int<Traits::kTileM>, Int<Traits::kHeadDim>>;
    Tensor dX = partition_fragment_C(typename Traits::TiledMma{}, Shape{});  // (4, MMA_M, d/8)
    Tensor dY = partition_fragment_C(typename Traits::TiledMma{}, Shape{});  // (4, MMA_M, d/8)
    clear(dX);
    clear(dY);
    MainloopBwdSm80<Traits, kOrdered>::run(params, storage, tile, dX, dY);

    if constexpr (Traits::kOwnsQueries) {
        store_gradient<Traits>(
            storage, tile,
            head_begin<Element>(params.dq_ptr, tile.batch, params.dq_batch_stride, tile.head_q,
                                params.dq_head_stride),
            params.dq_row_stride, params.d, dX, params.scale_softmax);
    } else {
        store_keys<Traits>(params, storage, tile, dX, dY);
    }
}

// Scales kDqRows rows of the sums of dQ by the softmax scale, rounds them and stores dQ.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    flash_bwd_postprocess_kernel_sm80(__grid_constant__ Flash_bwd_params const params) {
    using Element = typename Traits::Element;
    using TiledMma = typename Traits::TiledMmaDq;
    constexpr int kRows = Traits::kDqRows;
    int const thread = threadIdx.x;
    BlockOfDq<Traits::kConfig, kRows> const block(params, blockIdx.x);
    DqSums<Traits> const sums(params, block.workspace_row, thread);

    using Tile = Shape<Int<kRows>, Int<Traits::kHeadDim>>;
    Tensor tQrDq = partition_fragment_C(TiledMma{}, Tile{});  // (4, MMA_M, MMA_N)
    Tensor tQcDq = TiledMma{}.get_slice(thread).partition_C(
        make_identity_tensor(Tile{}));  // (4, MMA_M, MMA_N)
    CUTE_UNROLL
    for (int i = 0; i < size(tQrDq); i += 4) {
        float4 const four = sums.read(i);
        tQrDq(i) = four.x;
        tQrDq(i + 1) = four.y;
        tQrDq(i + 2) = four.z;
        tQrDq(i + 3) = four.w;
    }
    CUTE_UNROLL
    for (int i = 0; i < size(tQrDq); ++i) {
        bool const counts = block.in_sequence(get<0>(tQcDq(i)));
        tQrDq(i) = counts ? tQrDq(i) * params.scale_softmax : 0.f;
    }
    store_rows<Traits, TiledMma>(
        make_tensor(make_smem_ptr(&dynamic_smem<Element>()), typename Traits::SmemLayoutDq{}),
        tQrDq, params.d, [&](int r) -> GmemRow<Element> {
            return block.template row<Element>(params, Traits::gmem_row(thread, r));
        });
}

}  // namespace flash
