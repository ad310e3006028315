// Types of rung 13: the library's types for Hopper, mbarriers of the K and V stages, TMA, the order
// of tiles.
#pragma once

#include <arch_sm90.h>

#include <algorithm>
#include <cute/tensor.hpp>

#include "block_info.h"
#include "epilogue_fwd.h"
#include "kernel_traits_sm90.h"
#include "ladder.h"
#include "mask.h"
#include "softmax.h"
#include "tensor_maps_sm90.h"
#include "tile_scheduler.h"
#include "utils.h"

namespace ladder {

using namespace cute;
using flash::TileQueue;
using flash::WorkTile;
namespace sm90 = flash::sm90;

// A buffer is full when its bytes have landed, and empty when all its readers have arrived. The two
// states alternate, and a barrier waits for one parity of its phase: use i is of buffer i % 2 in
// phase i / 2 % 2.
struct Use {
    uint32_t i = 0;
    CUTE_DEVICE int stage() const { return i % 2; }
    CUTE_DEVICE uint32_t parity() const { return i / 2 % 2; }
};

// Zero between launches, which must follow each other; the library has one for each stream.
__device__ unsigned tiles_taken;

template <class CudaElement, int kHeadDim, bool kCausal>
struct TmaTypes {
    // Under a causal mask a tile of 128 rows wastes less on the diagonal than one of 192.
    static constexpr flash::FwdConfig C{
        .arch = 90,
        .dtype = std::is_same_v<CudaElement, __half> ? flash::DType::fp16 : flash::DType::bf16,
        .head_dim = kHeadDim,
        .mask = kCausal ? flash::MaskKind::causal : flash::MaskKind::none,
        .tile_m = kCausal ? 128 : 192,
        .tile_n = kCausal || kHeadDim == 64 ? 128 : 80,
        .warps = kCausal ? 8 : 12,
        .stages = 2,
        .q_in_regs = 0,
        .min_ctas = 1,
        .ping_pong = true,
        .softcap = false,
        .alibi = false,
        .dropout = false,
        .paged = false,
    };
    using Traits = flash::KernelTraitsSm90<C>;
    using Element = typename Traits::Element;
    using SharedStorage = typename Traits::SharedStorage;
    // What the host prepares: descriptors and the queue of tiles. Where tiles differ in length,
    // under a causal mask, CTAs steal work.
    struct Maps {
        CUtensorMap q, k, v;
        TileQueue queue;
    };
    using Scheduler = flash::TileScheduler<C>;
    static constexpr int kThreads = Traits::kThreads;
    static constexpr int kMinCtas = 1;
    static constexpr int kTileM = Traits::kTileM;
    static constexpr int kTileN = Traits::kTileN;
    static constexpr int kWarpgroups = Traits::kMmaWarpgroups;
    // Their sums over the warpgroups are the launch's, 3 * 168 and 4 * 128.
    static constexpr int kLoadRegisters = kWarpgroups == 2 ? 40 : 32;
    static constexpr int kMmaRegisters = kWarpgroups == 2 ? 232 : 160;

    CUTE_DEVICE static void init_barriers(SharedStorage &storage) {
        constexpr int kReaders = 4 * kWarpgroups;  // one arrival a warp
        for (int i = 0; i < kWarpgroups; ++i) {
            sm90::barrier_init(&storage.q_full[i], 1);
            sm90::barrier_init(&storage.q_empty[i], 4);
        }
        for (int i = 0; i < 2; ++i) {
            sm90::barrier_init(&storage.k_full[i], 1);
            sm90::barrier_init(&storage.v_full[i], 1);
            sm90::barrier_init(&storage.k_empty[i], kReaders);
            sm90::barrier_init(&storage.v_empty[i], kReaders);
            sm90::barrier_init(&storage.tile_full[i], 1);
            sm90::barrier_init(&storage.tile_empty[i], kReaders);
        }
        sm90::fence_barrier_init();
    }

    // Under a causal mask the longest tiles of a few heads come first; none left: m_block < 0.
    CUTE_DEVICE static WorkTile get_tile(Flash_fwd_params const &params, TileQueue const &queue,
                                         int index) {
        if (index >= queue.tiles) {
            return {.m_block = -1};
        }
        return kCausal ? Scheduler::tile_in_group(params, queue.group, index)
                       : Scheduler::tile(params, index);
    }

    // Rows of one head, a box for each 64 columns, page_rows rows apart.
    CUTE_DEVICE static void load(CUtensorMap const &map, sm90::Barrier *full, int rows,
                                 Element *smem, int page_rows, int row, int head, int batch) {
        sm90::barrier_arrive_expect(full, rows * kHeadDim * sizeof(Element));
        for (int page = 0; page < kHeadDim / 64; ++page) {
            sm90::tma_load(&map, full, sm90::CacheHint::evict_last, smem + page * page_rows * 64,
                           page * 64, row, head, batch);
        }
    }

    static int sms() {
        int device = 0, count = 0;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
        return count;
    }

    // One CTA for each SM.
    static int64_t ctas(Flash_fwd_params const &params) {
        return std::min<int64_t>(Scheduler::num_tiles(params), sms());
    }

    // Describes Q, K or V as (d, rows, heads, b), in boxes of box_rows rows.
    static cudaError_t make_map(CUtensorMap &map, void const *ptr, Flash_fwd_params const &params,
                                int rows, int heads, int64_t row_stride, int64_t head_stride,
                                int64_t batch_stride, cuuint32_t box_rows) {
        return flash::make_tensor_map<4>(
            map, flash::box_format<Traits>(), ptr, {params.d, rows, heads, params.b},
            {row_stride, head_stride, batch_stride}, {64, box_rows, 1, 1});
    }

    static cudaError_t make_maps(Maps &maps, Flash_fwd_params const &params) {
        maps.queue = {static_cast<int>(Scheduler::num_tiles(params)),
                      Scheduler::heads_in_group(params, sms()), nullptr, nullptr};
        cudaError_t error =
            make_map(maps.q, params.q_ptr, params, params.seqlen_q, params.h, params.q_row_stride,
                     params.q_head_stride, params.q_batch_stride, 64);
        if (error == cudaSuccess) {
            error =
                make_map(maps.k, params.k_ptr, params, params.seqlen_k, params.h_k,
                         params.k_row_stride, params.k_head_stride, params.k_batch_stride, kTileN);
        }
        if (error == cudaSuccess) {
            error =
                make_map(maps.v, params.v_ptr, params, params.seqlen_k, params.h_k,
                         params.v_row_stride, params.v_head_stride, params.v_batch_stride, kTileN);
        }
        if (error == cudaSuccess && kCausal && maps.queue.tiles > ctas(params)) {
            void *counter = nullptr;
            error = cudaGetSymbolAddress(&counter, tiles_taken);
            maps.queue.counter = static_cast<unsigned *>(counter);
        }
        return error;
    }
};

}  // namespace ladder
