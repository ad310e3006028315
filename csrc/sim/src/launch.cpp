// Kernel launches: checks what the CUDA runtime checks, then runs the grid on the workers.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "block.h"
#include "cluster.h"
#include "dependency.h"
#include "workers.h"

namespace sim {

namespace {

constexpr size_t kSmemWithoutOptIn = 48 * 1024;

std::unordered_map<void const *, size_t> max_dynamic_smem;
std::unordered_set<void const *> large_clusters;
int sticky_error = kSuccess;

int reject(int code, std::string const &message) {
    state().error = message;
    sticky_error = code;
    return code;
}

// The state of a launch in progress. A unit is one cluster.
struct Run {
    Launch const &launch;
    std::function<void()> const &body;
    uint64_t units;
    Workers workers;
    Dependency dependency;
    uint64_t failed = UINT64_MAX;  // the lowest unit that failed, so that the report is repeatable
    int code = kSuccess;
};

// The code of one worker: runs units `worker`, `worker` + count, `worker` + 2 count, ..., and adds
// the counters and traces of its blocks to the state.
void work(Run &run, uint64_t worker) {
    Cluster cluster(run.launch, run.body, state().settings, run.workers, run.dependency);
    for (uint64_t unit = worker; unit < run.units; unit += run.workers.count()) {
        Block const *const failed = unit > run.failed ? nullptr : cluster.run(unit);
        if (failed != nullptr && unit < run.failed) {
            run.failed = unit;
            run.code = failed->error_code();
            state().error = failed->error();
        }
        run.dependency.leave(unit);
    }
    for (int rank = 0; rank < cluster.size(); ++rank) {
        Block const &block = cluster.block(rank);
        state().counters += block.counters();
        state().trace.insert(state().trace.end(), block.trace().begin(), block.trace().end());
    }
}

// Returns what is wrong with the launch's cluster shape, or an empty string.
std::string wrong_cluster(Launch const &launch, bool large) {
    Dim3 const &g = launch.grid, &c = launch.cluster;
    uint64_t const blocks = uint64_t(c.x) * c.y * c.z;
    int const most = large ? kMaxClusterBlocks : 8;
    if (blocks == 0 || blocks > static_cast<uint64_t>(most)) {
        return "a cluster has 1 to 8 blocks, or 16 with "
               "cudaFuncAttributeNonPortableClusterSizeAllowed";
    }
    bool const whole = g.x % c.x == 0 && g.y % c.y == 0 && g.z % c.z == 0;
    return whole ? "" : "the grid is no multiple of the cluster";
}

}  // namespace

State &state() {
    static State instance;
    return instance;
}

int set_max_dynamic_smem(void const *kernel, int bytes) {
    size_t const limit = std::min(state().settings.smem_limit, kMaxSmemBytes);
    if (bytes < 0 || static_cast<size_t>(bytes) > limit) {
        return reject(kInvalidValue, "the kernel asks for " + std::to_string(bytes) +
                                         " bytes of dynamic shared memory, the device grants " +
                                         std::to_string(limit));
    }
    max_dynamic_smem[kernel] = bytes;
    return kSuccess;
}

void allow_large_clusters(void const *kernel, bool allowed) {
    if (allowed) {
        large_clusters.insert(kernel);
    } else {
        large_clusters.erase(kernel);
    }
}

int launch(Launch const &launch, std::function<void()> const &body) {
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
    std::string const wrong = wrong_cluster(launch, large_clusters.contains(launch.kernel));
    if (!wrong.empty()) {
        return reject(kInvalidClusterSize, wrong);
    }
    uint64_t const size = uint64_t(launch.cluster.x) * launch.cluster.y * launch.cluster.z;
    uint64_t const units = uint64_t(g.x) * g.y * g.z / size;
    auto const &settings = state().settings;
    uint64_t const workers =
        std::clamp<uint64_t>(static_cast<uint64_t>(settings.resident_blocks()) / size, 1, units);
    Run run{.launch = launch,
            .body = body,
            .units = units,
            .workers = {workers, settings.seed, [&](uint64_t worker) { work(run, worker); }},
            .dependency = {launch.dependent, workers, settings.copy_mode}};
    run.workers.run();
    if (run.code == kSuccess && launch.dependent && !run.dependency.awaited) {
        run.code = kLaunchFailure;
        state().error =
            "programmatic dependent launch: no thread executes griddepcontrol.wait, so the kernel "
            "is not ordered after the previous one";
    }
    if (run.code != kSuccess) {
        sticky_error = run.code;
    }
    return run.code;
}

int sm_count() { return state().settings.sms; }

int last_error(bool clear) {
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
