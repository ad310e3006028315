// The TMA descriptors of one launch, built on the host.
#pragma once

#include <arch_sm90.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <cutlass/fast_math.h>

#include <cstdint>
#include <numeric>

#include "cta_plan.h"
#include "flash.h"
#include "kernel_traits_sm90.h"
#include "work_tile.h"

namespace flash {

struct TensorMapsSm90 {
    CUtensorMap q, k, v;
    int box_rows;              // of k and v: a box lies within one page and one key block
    cutlass::FastDivmod page;  // divides a row's number by the rows of a page
    sm90::CacheHint kv_hint;   // of k and v in kernels of caches; other kernels evict them last

    // Boxes of fewer rows take too long to issue, as a warp issues its lanes' boxes one after the
    // other. Pages of one token, in boxes of 128 bytes by one warp, reached 0.204 of the speed of a
    // contiguous cache. With one query and 32/8 heads of 128, four warps that copy by cp.async
    // reach 0.88 to 0.94 of it, boxes of 16 rows 0.96 to 1.00 (docs/facts.md).
    static constexpr int kLeastBoxRows = 16;
    // Whether keys and values are loaded by cp.async instead of TMA.
    CUTE_HOST_DEVICE bool copies() const { return box_rows < kLeastBoxRows; }
};

// Returns the driver's cuTensorMapEncodeTiled, looked up once; null where the driver has none.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
    static auto const encoder = [] {
        void *function = nullptr;
        cudaDriverEntryPointQueryResult found{};
        cudaError_t const error = cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
        bool const ok = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(ok ? function : nullptr);
    }();
    return encoder;
}

// How a tensor's elements are stored, and how boxes of them lie in shared memory.
struct BoxFormat {
    CUtensorMapDataType type;
    int bytes;  // of an element
    CUtensorMapSwizzle swizzle;
    // With 256 bytes half of what L2 fetches belongs to another box, and may be evicted unread.
    CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
};

// Describes a tensor of kRank dimensions, innermost first, to be loaded in boxes. The innermost
// dimension is contiguous, the strides of the others count elements; where one has size 1 its
// stride is never used and may be 0.
template <size_t kRank>
cudaError_t make_tensor_map(CUtensorMap &map, BoxFormat format, void const *ptr,
                            int64_t const (&sizes)[kRank], int64_t const (&strides)[kRank - 1],
                            cuuint32_t const (&box)[kRank]) {
    auto const encode = tensor_map_encoder();
    if (encode == nullptr) {
        return cudaErrorCallRequiresNewerDriver;
    }
    cuuint64_t extents[kRank], bytes[kRank - 1];
    cuuint32_t element_strides[kRank];
    for (size_t i = 0; i < kRank; ++i) {
        // No extent may be 0; no box of an empty tensor is ever loaded.
        extents[i] = static_cast<cuuint64_t>(sizes[i] > 0 ? sizes[i] : 1);
        element_strides[i] = 1;
        if (i > 0) {
            int64_t const size = format.bytes * strides[i - 1];
            bytes[i - 1] = sizes[i] > 1 ? static_cast<cuuint64_t>(size) : 16;
        }
    }
    CUresult const result =
        encode(&map, format.type, kRank, const_cast<void *>(ptr), extents, bytes, box,
               element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, format.swizzle, format.promotion,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The format of Q, K, V and dO, whose boxes are pages of kSmemRow columns.
template <class Traits>
constexpr BoxFormat box_format() {
    return {Traits::kConfig.dtype == DType::fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            sizeof(typename Traits::Element),
            Traits::kSmemRow == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B};
}

// How many rows a batch entry has in a TMA descriptor, and how many entries there are. All queries
// of a ragged batch are one entry, and so are its keys unless they lie in a cache.
struct MapSizes {
    int64_t rows, batch;
};
inline MapSizes q_sizes(Flash_fwd_params const &params) {
    bool const ragged = params.plan_ptr != nullptr;
    return ragged ? MapSizes{params.total_q, 1} : MapSizes{params.seqlen_q, params.b};
}
template <class Traits>
MapSizes kv_sizes(Flash_fwd_params const &params) {
    if (params.plan_ptr == nullptr) {
        return {params.seqlen_k, params.b};
    }
    if (params.is_cache == 0) {
        return {params.total_k, 1};
    }
    return {Traits::kConfig.paged ? params.page_size : params.seqlen_k, params.num_pages};
}

// Describes Q as (d, packed heads, seqlen_q, grid heads, b), in boxes of a warpgroup's 64 rows.
// Packed heads vary first, as in the numbering of a tile's rows; those up to the next power of two
// are padding, outside the tensor.
template <class Traits>
cudaError_t make_tensor_map_q(CUtensorMap &map, Flash_fwd_params const &params) {
    int64_t const packed = params.pack_shift > 0 ? params.h_h_k_ratio : 1;
    cuuint32_t const heads = params.pack_shift < 6 ? 1u << params.pack_shift : 64;
    MapSizes const sizes = q_sizes(params);
    return make_tensor_map<5>(map, box_format<Traits>(), params.q_ptr,
                              {params.d, packed, sizes.rows, num_grid_heads(params), sizes.batch},
                              {params.q_head_stride, params.q_row_stride,
                               packed * params.q_head_stride, params.q_batch_stride},
                              {Traits::kSmemRow, heads, 64 / heads, 1, 1});
}

// Describes K or V as (d, seqlen_k, h_k, b), in boxes of `rows` rows.
template <class Traits>
cudaError_t make_tensor_map_kv(CUtensorMap &map, Flash_fwd_params const &params, void const *ptr,
                               int64_t batch_stride, int64_t row_stride, int64_t head_stride,
                               int rows) {
    MapSizes const sizes = kv_sizes<Traits>(params);
    return make_tensor_map<4>(map, box_format<Traits>(), ptr,
                              {params.d, sizes.rows, params.h_k, sizes.batch},
                              {row_stride, head_stride, batch_stride},
                              {Traits::kSmemRow, static_cast<cuuint32_t>(rows), 1, 1});
}

// Returns the priority in L2 of keys and values. Keys of a small cache, each read by one tile,
// replace each other, so that lines that earlier kernels have written are not written back
// meanwhile: with such lines in L2 64 MiB take 28.0 us on an H200 instead of 29.9. A large cache
// would then have too little of L2: 512 MiB take 143 us instead of 134 (docs/facts.md). The bytes
// are those that the call may read, where pages that sequences share count for each of them.
template <class Traits>
sm90::CacheHint kv_hint(Flash_fwd_params const &params) {
    constexpr int64_t kLargeBytes = int64_t(1) << 28;
    int64_t const keys = int64_t(params.b) * params.seqlen_k;
    int64_t const bytes = 2 * keys * params.h_k * params.d * sizeof(typename Traits::Element);
    bool const first = reads_keys_once<Traits::kConfig>(params) && bytes < kLargeBytes;
    return first ? sm90::CacheHint::evict_first : sm90::CacheHint::evict_last;
}

template <class Traits>
cudaError_t make_tensor_maps(TensorMapsSm90 &maps, Flash_fwd_params const &params) {
    maps.box_rows = Traits::kTileN;
    maps.kv_hint = kv_hint<Traits>(params);
    if constexpr (Traits::kConfig.paged) {
        if (params.page_size < 1) {
            return cudaErrorInvalidValue;
        }
        maps.box_rows = std::gcd(params.page_size, Traits::kTileN);
        maps.page = cutlass::FastDivmod(params.page_size);
        // TMA writes each box to a multiple of 128 bytes.
        static_assert(TensorMapsSm90::kLeastBoxRows * Traits::kSmemRow >= 64);
    }
    cudaError_t error = make_tensor_map_q<Traits>(maps.q, params);
    bool const copies = Traits::kConfig.paged && maps.copies();
    if (error == cudaSuccess && !copies) {
        error =
            make_tensor_map_kv<Traits>(maps.k, params, params.k_ptr, params.k_batch_stride,
                                       params.k_row_stride, params.k_head_stride, maps.box_rows);
    }
    if (error == cudaSuccess && !copies) {
        error =
            make_tensor_map_kv<Traits>(maps.v, params, params.v_ptr, params.v_batch_stride,
                                       params.v_row_stride, params.v_head_stride, maps.box_rows);
    }
    return error;
}

}  // namespace flash
