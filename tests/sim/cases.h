// The common part of the programs of small kernels. `program case seed` prints `code`, `error` and
// all counters. A wrong result is printed as `wrong` and gives a nonzero exit status.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>
#include <dynamic_smem.h>
#include <simulator.h>

#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace {

int failures = 0;

char *smem() { return &flash::dynamic_smem<char>(); }

void expect(bool ok, std::string const &what) {
    if (!ok) {
        std::printf("wrong %s\n", what.c_str()), ++failures;
    }
}

template <class Kernel, class... Args>
cudaError_t launch_with(std::vector<cudaLaunchAttribute> attributes, Kernel *kernel, dim3 grid,
                        dim3 block, size_t smem_bytes, Args... args) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = smem_bytes;
    config.attrs = attributes.data();
    config.numAttrs = static_cast<unsigned>(attributes.size());
    sim::state().counters = {};  // which add up over launches
    sim::state().trace.clear();
    return cudaLaunchKernelEx(&config, kernel, args...);
}

template <class Kernel, class... Args>
cudaError_t launch(Kernel *kernel, dim3 grid, dim3 block, size_t smem_bytes, Args... args) {
    return launch_with({}, kernel, grid, block, smem_bytes, args...);
}

// A descriptor of a (rows, columns) fp16 tensor of `pitch` columns, with whole boxes (M, N).
CUtensorMap encode(cutlass::half_t *data, uint64_t rows, uint64_t columns, uint64_t pitch,
                   uint32_t box_m, uint32_t box_n,
                   CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE) {
    alignas(64) CUtensorMap map;
    cuuint64_t const extents[] = {columns, rows, 1, 1};
    cuuint64_t const strides[] = {pitch * 2, 16, 16};
    cuuint32_t const box[] = {box_n, box_m, 1, 1};
    cuuint32_t const ones[] = {1, 1, 1, 1};
    auto const result = sim::tensor_map_encode_tiled(
        &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, data, extents, strides, box, ones,
        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    expect(result == CUDA_SUCCESS, "encoding");
    return map;
}

// Registers a tensor. From then on an access outside all registered tensors is an error.
template <class T>
void know(char const *name, std::vector<T> &tensor) {
    sim::state().regions.push_back(
        {name, reinterpret_cast<std::byte const *>(tensor.data()), tensor.size() * sizeof(T)});
}

using Cases = std::map<std::string, std::function<cudaError_t()>>;

int run_case(Cases const &cases, int argc, char **argv) {
    if (argc != 3 || !cases.contains(argv[1])) {
        return 2;
    }
    sim::state().settings.seed = std::stoull(argv[2]);
    cudaError_t const error = cases.at(argv[1])();
    std::printf("code %d\nerror %s\n", int(error), cudaGetErrorString(error));
    for (auto const &[name, value] : sim::kCounterNames) {
        std::printf("%s %llu\n", name,
                    static_cast<unsigned long long>(sim::state().counters.*value));
    }
    return failures != 0;
}

}  // namespace
