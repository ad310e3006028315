// Launches: checks what the CUDA runtime checks, then spreads the grid over the worker threads.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "block.h"
#include "dependency.h"
#include "turns.h"

namespace sim {

namespace {

constexpr size_t kSmemWithoutOptIn = 48 * 1024;

std::mutex mutex;  // guards what follows
std::unordered_map<void const *, size_t> max_dynamic_smem;
int sticky_error = kSuccess;

int reject(int code, std::string const &message) {
    state().error = message;
    sticky_error = code;
    return code;
}

// What the blocks of one launch leave behind, gathered from the workers.
struct Gathered {
    std::atomic<uint64_t> next{0};
    std::atomic<uint64_t> failed{
        UINT64_MAX};  // lowest failing block, so that the report is repeatable
    std::mutex mutex;
    int code = kSuccess;
};

void work(Launch const &launch, std::function<void()> const &body, uint64_t blocks, Turns &turns,
          Dependency &dependency, Gathered &all) {
    Block block(launch, body, state().settings, turns, dependency);
    while (true) {
        uint64_t const index = all.next.fetch_add(1);
        if (index >= blocks) {
            break;
        }
        bool const skipped = index > all.failed.load();
        bool const failed = !skipped && !block.run(index);
        turns.leave(index);
        dependency.leave(index);
        if (failed) {
            std::lock_guard const lock(all.mutex);
            if (index < all.failed.load()) {
                all.failed = index;
                all.code = block.error_code();
                state().error = block.error();
            }
        }
    }
    std::lock_guard const lock(all.mutex);
    state().counters += block.counters();
    state().trace.insert(state().trace.end(), block.trace().begin(), block.trace().end());
}

}  // namespace

State &state() {
    static State instance;
    return instance;
}

int set_max_dynamic_smem(void const *kernel, int bytes) {
    std::lock_guard const lock(mutex);
    size_t const limit = std::min(state().settings.smem_limit, kMaxSmemBytes);
    if (bytes < 0 || static_cast<size_t>(bytes) > limit) {
        return reject(kInvalidValue, "the kernel asks for " + std::to_string(bytes) +
                                         " bytes of dynamic shared memory, the device grants " +
                                         std::to_string(limit));
    }
    max_dynamic_smem[kernel] = bytes;
    return kSuccess;
}

int launch(Launch const &launch, std::function<void()> const &body) {
    std::lock_guard const lock(mutex);
    state().counters = {};
    state().trace.clear();
    state().error.clear();
    Dim3 const &g = launch.grid;
    Dim3 const &b = launch.block;
    uint64_t const threads = uint64_t(b.x) * b.y * b.z;
    if (threads == 0 || threads > 1024 || b.x > 1024 || b.y > 1024 || b.z > 64) {
        return reject(kInvalidConfiguration, "a block has 1 to 1024 threads");
    }
    if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535) {
        return reject(kInvalidConfiguration, "a grid has 1 to 2^31 - 1 by 65535 by 65535 blocks");
    }
    auto const opted_in = max_dynamic_smem.find(launch.kernel);
    size_t const granted = std::max(
        kSmemWithoutOptIn, opted_in == max_dynamic_smem.end() ? size_t(0) : opted_in->second);
    if (launch.smem_bytes > granted) {
        return reject(kInvalidValue, "the launch asks for " + std::to_string(launch.smem_bytes) +
                                         " bytes of dynamic shared memory, the kernel may use " +
                                         std::to_string(granted));
    }
    uint64_t const blocks = uint64_t(g.x) * g.y * g.z;
    uint64_t const sms = std::clamp<uint64_t>(state().settings.sms, 1, blocks);
    Turns turns(blocks, state().settings.seed);
    Dependency dependency(launch.dependent, sms, state().settings.copy_mode);
    Gathered all;
    std::vector<std::thread> threads_of_host;
    for (uint64_t i = 0; i < sms; ++i) {
        threads_of_host.emplace_back(work, std::cref(launch), std::cref(body), blocks,
                                     std::ref(turns), std::ref(dependency), std::ref(all));
    }
    for (std::thread &thread : threads_of_host) {
        thread.join();
    }
    if (all.code == kSuccess && launch.dependent && !dependency.awaited) {
        all.code = kLaunchFailure;
        state().error =
            "programmatic dependent launch: no thread executes griddepcontrol.wait, so nothing "
            "orders the kernel behind the one before";
    }
    if (all.code != kSuccess) {
        sticky_error = all.code;
    }
    return all.code;
}

int sm_count() { return state().settings.sms; }

int last_error(bool clear) {
    std::lock_guard const lock(mutex);
    int const error = sticky_error;
    if (clear) {
        sticky_error = kSuccess;
    }
    return error;
}

char const *error_text(int error) {
    if (error == kSuccess) {
        return "no error";
    }
    return state().error.empty() ? "unknown error" : state().error.c_str();
}

}  // namespace sim
