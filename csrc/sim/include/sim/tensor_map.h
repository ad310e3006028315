// cuTensorMapEncodeTiled, which launch code looks up through the CUDA runtime: the driver's checks
// (documented in cuda.h) and a tensor map in the simulator's own format.
#pragma once

#include <cuda.h>

#include "runtime_sm90.h"

namespace sim {

inline int swizzle_span(CUtensorMapSwizzle swizzle) {
    switch (swizzle) {
        case CU_TENSOR_MAP_SWIZZLE_NONE:
            return 0;
        case CU_TENSOR_MAP_SWIZZLE_32B:
            return 32;
        case CU_TENSOR_MAP_SWIZZLE_64B:
            return 64;
        case CU_TENSOR_MAP_SWIZZLE_128B:
            return 128;
        default:
            return -1;
    }
}

inline CUresult CUDAAPI tensor_map_encode_tiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    cuuint64_t const *extents, cuuint64_t const *strides, cuuint32_t const *box,
    cuuint32_t const *element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    bool const half =
        type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    bool const single = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    bool const plain = interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
                       fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE && swizzle_span(swizzle) >= 0;
    if (!(half || single) || !plain) {
        return static_cast<CUresult>(
            refuse_tensor_map(CUDA_ERROR_NOT_SUPPORTED,
                              "not covered: elements, interleaving, fill or swizzle of this kind"));
    }
    static_assert(sizeof(cuuint64_t) == sizeof(uint64_t));
    return static_cast<CUresult>(
        encode_tensor_map(map, {.element_bytes = half ? 2 : 4,
                                .rank = rank,
                                .address = reinterpret_cast<uint64_t>(address),
                                .extents = reinterpret_cast<uint64_t const *>(extents),
                                .strides = reinterpret_cast<uint64_t const *>(strides),
                                .box = box,
                                .element_strides = element_strides,
                                .swizzle_span = swizzle_span(swizzle)}));
}

}  // namespace sim
