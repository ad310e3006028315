// What the programs of small kernels share. `program case seed` prints `code`, `error` and all
// counters; a wrong result is printed as `wrong`, and is the exit status.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace {

alignas(1024) thread_local char smem[sim::kMaxSmemBytes];
int failures = 0;

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
    return cudaLaunchKernelEx(&config, kernel, args...);
}

template <class Kernel, class... Args>
cudaError_t launch(Kernel *kernel, dim3 grid, dim3 block, size_t smem_bytes, Args... args) {
    return launch_with({}, kernel, grid, block, smem_bytes, args...);
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

extern "C" void *sim_dynamic_smem() { return smem; }
