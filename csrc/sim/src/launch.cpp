// Kernel launches: the checks of the CUDA runtime, then the grid over the worker threads.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "block.h"
#include "cluster.h"
#include "dependency.h"
#include "turns.h"

namespace sim {

namespace {

constexpr size_t kSmemWithoutOptIn = 48 * 1024;

std::mutex mutex;  // guards what follows
std::unordered_map<void const *, size_t> max_dynamic_smem;
std::unordered_set<void const *> large_clusters;
int sticky_error = kSuccess;

int reject(int code, std::string const &message) {
    state().error = message;
    sticky_error = code;
    return code;
}

// The merged results of a launch. A unit is one cluster.
struct Gathered {
    std::atomic<uint64_t> failed{UINT64_MAX};  // the lowest failing unit: a repeatable report
    std::mutex mutex;
    int code = kSuccess;
};

void note_failure(Block const &block, uint64_t unit, Gathered &all) {
    std::lock_guard const lock(all.mutex);
    // Only one block of a cluster fails. The others are aborted, without a message.
    if (unit < all.failed.load() && !block.error().empty()) {
        all.failed = unit;
        all.code = block.error_code();
        state().error = block.error();
    }
}

void gather(Block const &block, Gathered &all) {
    std::lock_guard const lock(all.mutex);
    state().counters += block.counters();
    state().trace.insert(state().trace.end(), block.trace().begin(), block.trace().end());
}

// The state of a launch in progress.
struct Run {
    Launch const &launch;
    std::function<void()> const &body;
    uint64_t units;
    Turns turns;
    Dependency dependency;
    Gathered all;
};

// The linear index of a block in the grid. x is fastest, in the grid and in the cluster.
uint64_t block_index(Launch const &launch, uint64_t unit, uint64_t rank) {
    Dim3 const &g = launch.grid, &c = launch.cluster;
    uint64_t const x = unit % (g.x / c.x) * c.x + rank % c.x;
    uint64_t const y = unit / (g.x / c.x) % (g.y / c.y) * c.y + rank / c.x % c.y;
    uint64_t const z = unit / (g.x / c.x) / (g.y / c.y) * c.z + rank / c.x / c.y;
    return x + g.x * (y + g.y * z);
}

// The blocks of one cluster, each on an OS thread of its own.
void run_together(Run &run, uint64_t unit) {
    Cluster cluster(run.launch, state().settings);
    cluster.start(unit);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < cluster.size(); ++rank) {
        threads.emplace_back([&, rank] {
            Block block(run.launch, run.body, state().settings, run.turns, run.dependency, cluster,
                        rank);
            if (!block.run(block_index(run.launch, unit, static_cast<uint64_t>(rank)))) {
                note_failure(block, unit, run.all);
            }
            gather(block, run.all);
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
}

// Runs every `workers`-th unit from `first` on.
void work(Run &run, uint64_t first, uint64_t workers) {
    Cluster alone(run.launch, state().settings);
    std::optional<Block> block;
    if (alone.size() == 1) {
        block.emplace(run.launch, run.body, state().settings, run.turns, run.dependency, alone, 0);
    }
    for (uint64_t unit = first; unit < run.units; unit += workers) {
        bool const skipped = unit > run.all.failed.load();
        if (!skipped && !block) {
            run_together(run, unit);
        } else if (!skipped) {
            alone.start(unit);
            if (!block->run(unit)) {
                note_failure(*block, unit, run.all);
            }
        }
        run.dependency.leave(unit);
    }
    run.turns.leave(first);
    if (block) {
        gather(*block, run.all);
    }
}

// An error in the launch's cluster shape, or empty.
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

void allow_large_clusters(void const *kernel, bool allowed) {
    std::lock_guard const lock(mutex);
    if (allowed) {
        large_clusters.insert(kernel);
    } else {
        large_clusters.erase(kernel);
    }
}

int launch(Launch const &launch, std::function<void()> const &body) {
    std::lock_guard const lock(mutex);
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
            .turns = {workers, settings.seed},
            .dependency = {launch.dependent, workers, settings.copy_mode},
            .all = {}};
    std::vector<std::thread> threads_of_host;
    for (uint64_t i = 0; i < workers; ++i) {
        threads_of_host.emplace_back(work, std::ref(run), i, workers);
    }
    for (std::thread &thread : threads_of_host) {
        thread.join();
    }
    if (run.all.code == kSuccess && launch.dependent && !run.dependency.awaited) {
        run.all.code = kLaunchFailure;
        state().error =
            "programmatic dependent launch: no thread executes griddepcontrol.wait, so the kernel "
            "is not ordered after the previous one";
    }
    if (run.all.code != kSuccess) {
        sticky_error = run.all.code;
    }
    return run.all.code;
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
