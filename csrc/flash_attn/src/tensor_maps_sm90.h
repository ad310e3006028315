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

// Where a sequence may end within a box, the rows of a tensor are three dimensions to TMA, x, y and
// z. A step of x is a row, and kRaggedZ steps of z are kRaggedRows rows back, as TMA computes
// addresses modulo 2^64. At x = kRaggedRows - n, z = kRaggedZ and y of row r + n, a box begins with
// row r. x ends behind n rows, so the box's other rows arrive as zeros. The idea is that of
// Triton's ragged_tma. A map whose address is kRaggedRows rows lower would need no z, but TMA reads
// a map's address for a box that is outside the tensor as a whole (docs/facts.md), and no memory
// need be mapped there.
inline constexpr int kRaggedRows = 1 << 30;
inline constexpr int kRaggedZ = 1 << 30;
inline constexpr int64_t kRaggedSize = 0x7fff0000;  // of z, and the most of y, as Triton's

// The stride of z in bytes: kRaggedZ strides are 2^64 bytes less kRaggedRows rows of row_bytes.
inline constexpr int64_t ragged_z_bytes(int64_t row_bytes) {
    static_assert(kRaggedZ == kRaggedRows);
    return (int64_t(1) << 34) - row_bytes;
}
static_assert(uint64_t(kRaggedZ) * uint64_t(ragged_z_bytes(256)) + uint64_t(kRaggedRows) * 256 ==
              0);

// How many steps of y a row, a head and a batch entry are.
struct RaggedSteps {
    int row, head, batch;
};

// The strides and sizes of rows that are x, y and z, where y also counts heads and batch entries.
struct RaggedAxes {
    struct Axis {
        int64_t size, stride;  // in elements
    };
    int64_t x_stride, y_stride, z_stride, y_size;
    RaggedSteps steps;

    RaggedAxes(int element_bytes, Axis rows, Axis heads, Axis batch) {
        // A single row may come with any stride; 16 bytes then stand for it.
        x_stride = rows.size > 1 ? rows.stride : 16 / element_bytes;
        int64_t const head = heads.size > 1 ? heads.stride : 0;
        int64_t const entry = batch.size > 1 ? batch.stride : 0;
        y_stride = std::gcd(std::gcd(x_stride, head), entry);
        if (y_stride == 0) y_stride = 16 / element_bytes;
        z_stride = ragged_z_bytes(x_stride * element_bytes) / element_bytes;
        auto const step = [&](int64_t stride) { return static_cast<int>(stride / y_stride); };
        steps = {step(x_stride), step(head), step(entry)};
        int64_t const behind = rows.size * x_stride + (heads.size - 1) * head;
        y_size = 1 + (behind + (batch.size - 1) * entry) / y_stride;  // up to kRaggedSize
    }
};

// The coordinates of rows `first` to first + count - 1, of which a box holds the first ones; zeros
// follow. count may be 0 or negative.
struct RaggedRows {
    int x, y;
};
CUTE_HOST_DEVICE RaggedRows ragged_rows(RaggedSteps const &steps, int box, int first, int count,
                                        int head, int batch) {
    int const rows = cute::min(count, box);
    return {kRaggedRows - rows,
            (first + rows) * steps.row + head * steps.head + batch * steps.batch};
}

// Positions in a TMA box of Q, which has a warpgroup's 64 rows.
CUTE_HOST_DEVICE int q_box(Flash_fwd_params const &params) {
    return params.pack_shift < 6 ? 64 >> params.pack_shift : 1;
}

// Describes Q as (d, packed heads, x, y, z); y also counts grid heads and batch entries. Packed
// heads vary first, as in the numbering of a tile's rows; those up to the next power of two are
// padding, outside the tensor. All queries of a ragged batch are one entry.
template <class Traits>
cudaError_t make_tensor_map_q(CUtensorMap &q, RaggedSteps &steps, Flash_fwd_params const &params) {
    constexpr BoxFormat format = box_format<Traits>();
    bool const ragged = params.plan_ptr != nullptr;
    int64_t const packed = params.pack_shift > 0 ? params.h_h_k_ratio : 1;
    auto const positions = static_cast<cuuint32_t>(q_box(params));
    RaggedAxes const axes(format.bytes,
                          {ragged ? params.total_q : params.seqlen_q, params.q_row_stride},
                          {num_grid_heads(params), packed * params.q_head_stride},
                          {ragged ? 1 : params.b, params.q_batch_stride});
    if (axes.y_size > kRaggedSize) return cudaErrorInvalidValue;
    steps = axes.steps;
    return make_tensor_map<5>(q, format, params.q_ptr,
                              {params.d, packed, kRaggedRows, axes.y_size, kRaggedSize},
                              {params.q_head_stride, axes.x_stride, axes.y_stride, axes.z_stride},
                              {Traits::kSmemRow, 64 / positions, positions, 1, 1});
}

// Describes K or V as (d, x, y, z), in boxes of `rows` rows; y also counts heads and batch entries
// or pages. All keys of a ragged batch are one entry unless they lie in a cache.
template <class Traits>
cudaError_t make_tensor_map_kv(CUtensorMap &x, RaggedSteps &steps, Flash_fwd_params const &params,
                               void const *ptr, int64_t batch_stride, int64_t row_stride,
                               int64_t head_stride, int rows) {
    constexpr BoxFormat format = box_format<Traits>();
    bool const ragged = params.plan_ptr != nullptr, cache = params.is_cache != 0;
    int64_t const of_entry = ragged && !cache        ? params.total_k
                             : Traits::kConfig.paged ? params.page_size
                                                     : params.seqlen_k;
    int64_t const entries = !ragged ? params.b : cache ? params.num_pages : 1;
    RaggedAxes const axes(format.bytes, {of_entry, row_stride}, {params.h_k, head_stride},
                          {entries, batch_stride});
    if (axes.y_size > kRaggedSize) return cudaErrorInvalidValue;
    steps = axes.steps;
    // An empty cache has no address, but TMA reads one where a page does not exist.
    void const *const begin = ptr != nullptr ? ptr : params.q_ptr;
    return make_tensor_map<4>(x, format, begin, {params.d, kRaggedRows, axes.y_size, kRaggedSize},
                              {axes.x_stride, axes.y_stride, axes.z_stride},
                              {Traits::kSmemRow, static_cast<cuuint32_t>(rows), 1, 1});
}

struct TensorMapsSm90 {
    CUtensorMap q, k, v;
    RaggedSteps q_steps, k_steps, v_steps;
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
    cudaError_t error = make_tensor_map_q<Traits>(maps.q, maps.q_steps, params);
    bool const copies = Traits::kConfig.paged && maps.copies();
    if (error == cudaSuccess && !copies) {
        error = make_tensor_map_kv<Traits>(maps.k, maps.k_steps, params, params.k_ptr,
                                           params.k_batch_stride, params.k_row_stride,
                                           params.k_head_stride, maps.box_rows);
    }
    if (error == cudaSuccess && !copies) {
        error = make_tensor_map_kv<Traits>(maps.v, maps.v_steps, params, params.v_ptr,
                                           params.v_batch_stride, params.v_row_stride,
                                           params.v_head_stride, maps.box_rows);
    }
    return error;
}

}  // namespace flash
