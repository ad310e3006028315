// The TMA descriptors of one launch, built on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "flash.h"
#include "kernel_traits_sm90.h"

namespace flash {

struct TensorMapsSm90 {
    CUtensorMap q, k, v;
};

// cuTensorMapEncodeTiled of the driver, found once; null where the driver has none.
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

// Describes a (b, s, h, d) tensor to be loaded in boxes of `rows` rows and kSmemRow columns of one
// head. Strides count elements; where a dimension has size 1 its stride is never used and may be 0.
template <class Traits>
cudaError_t make_tensor_map(CUtensorMap &map, void const *ptr, int64_t b, int64_t s, int64_t h,
                            int64_t d, int64_t batch_stride, int64_t row_stride,
                            int64_t head_stride, uint32_t rows) {
    auto const encode = tensor_map_encoder();
    if (encode == nullptr) {
        return cudaErrorCallRequiresNewerDriver;
    }
    constexpr cuuint64_t kBytes = sizeof(typename Traits::Element);
    auto const stride = [](int64_t size, int64_t elements) {
        return size > 1 ? static_cast<cuuint64_t>(elements) * kBytes : 16;
    };
    // No extent may be 0; of an empty tensor no box is ever loaded.
    auto const extent = [](int64_t size) { return static_cast<cuuint64_t>(size > 0 ? size : 1); };
    cuuint64_t const extents[] = {extent(d), extent(s), extent(h), extent(b)};
    cuuint64_t const strides[] = {stride(s, row_stride), stride(h, head_stride),
                                  stride(b, batch_stride)};
    cuuint32_t const box[] = {Traits::kSmemRow, rows, 1, 1};
    cuuint32_t const element_strides[] = {1, 1, 1, 1};
    CUresult const result =
        encode(&map,
               Traits::kConfig.dtype == DType::fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                    : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
               4, const_cast<void *>(ptr), extents, strides, box, element_strides,
               CU_TENSOR_MAP_INTERLEAVE_NONE,
               Traits::kSmemRow == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <class Traits>
cudaError_t make_tensor_maps(TensorMapsSm90 &maps, Flash_fwd_params const &params) {
    cudaError_t error = make_tensor_map<Traits>(maps.q, params.q_ptr, params.b, params.seqlen_q,
                                                params.h, params.d, params.q_batch_stride,
                                                params.q_row_stride, params.q_head_stride, 64);
    if (error == cudaSuccess) {
        error = make_tensor_map<Traits>(maps.k, params.k_ptr, params.b, params.seqlen_k, params.h_k,
                                        params.d, params.k_batch_stride, params.k_row_stride,
                                        params.k_head_stride, Traits::kTileN);
    }
    if (error == cudaSuccess) {
        error = make_tensor_map<Traits>(maps.v, params.v_ptr, params.b, params.seqlen_k, params.h_k,
                                        params.d, params.v_batch_stride, params.v_row_stride,
                                        params.v_head_stride, Traits::kTileN);
    }
    return error;
}

}  // namespace flash
