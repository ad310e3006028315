// The binding as the CPU has it: what is a tensor of CUDA to it is one of the CPU here, and a
// kernel computes nothing and keeps its parameters. So its checks, and what it hands to a kernel,
// need no GPU.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace torch::stable::accelerator {
struct HostGuard {
    explicit HostGuard(int32_t) {}
};
}  // namespace torch::stable::accelerator

#define DeviceGuard HostGuard
#define CUDA CPU
#define is_cuda is_cpu
#define aoti_torch_device_type_cuda aoti_torch_device_type_cpu

#include "flash_api.cpp"

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void **stream) {
    *stream = nullptr;
    return AOTI_TORCH_SUCCESS;
}

namespace flash {
namespace {

Flash_fwd_params last{};
Flash_bwd_params last_bwd{};
int32_t result = 0;
int32_t plans = 0;
int32_t appends = 0;  // without a plan

int32_t count_plan(const Flash_fwd_params *params, void *) {
    ++(params->plan_ptr != nullptr ? plans : appends);
    return 0;
}
int32_t keep(const Flash_fwd_params *params, void *) {
    last = *params;
    return result;
}

int32_t keep_bwd(const Flash_bwd_params *params, void *) {
    last_bwd = *params;
    return result;
}
const char *error_string(int32_t) { return "an error"; }

const Flash_bwd_kernel bwd_kernel{.abi_version = kAbiVersion,
                                  .params_size = sizeof(Flash_bwd_params),
                                  .name = "bwd_on_host",
                                  .threads = 128,
                                  .launch = keep_bwd,
                                  .error_string = error_string};

const Flash_kernel kernel{.abi_version = kAbiVersion,
                          .params_size = sizeof(Flash_fwd_params),
                          .name = "on_host",
                          .threads = 128,
                          .tile_m = 64,
                          .launch = keep,
                          .plan = count_plan,
                          .error_string = error_string};

}  // namespace
}  // namespace flash

EXPORTED const void *host_kernel() { return &flash::kernel; }
EXPORTED const void *host_params() { return &flash::last; }
EXPORTED const void *host_bwd_kernel() { return &flash::bwd_kernel; }
EXPORTED const void *host_bwd_params() { return &flash::last_bwd; }
EXPORTED int32_t host_plans() { return flash::plans; }
EXPORTED int32_t host_appends() { return flash::appends; }
EXPORTED void host_fail(int32_t result) { flash::result = result; }
