// One CUDA block: its threads as fibres, its warps, barriers, shared memory and copies in flight.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cluster.h"
#include "counters.h"
#include "dependency.h"
#include "fiber.h"
#include "runtime.h"
#include "simulator.h"
#include "sm90.h"

namespace sim {

inline constexpr int kWarpSize = 32;
inline constexpr int kBarriers = 16;  // hardware's named barriers per block
// Bytes that the system reserves at the start of each block's shared memory (compute capability 8.0
// and up).
inline constexpr uint64_t kReservedSmem = 1024;
// NaN in fp16, in bf16 and, as a pair, in fp32 (a signalling NaN).
inline constexpr uint16_t kPoison = 0x7FBF;

// cudaError_t values, repeated here so that the runtime builds without CUDA's headers.
inline constexpr int kSuccess = 0;
inline constexpr int kInvalidValue = 1;
inline constexpr int kInvalidConfiguration = 9;
inline constexpr int kIllegalAddress = 700;
inline constexpr int kLaunchTimeout = 702;
inline constexpr int kMisalignedAddress = 716;
inline constexpr int kLaunchFailure = 719;
inline constexpr int kNotSupported = 801;
inline constexpr int kInvalidClusterSize = 912;

enum class WarpInstruction : uint8_t {
    ldmatrix,
    stmatrix,
    mma,
    shuffle,
    ballot,
    warp_sync,
    elect,
    cluster_arrive,
    cluster_wait
};

struct AsyncCopy {
    std::byte *smem;
    std::byte const *gmem;
    int bytes;
    bool valid;       // false: reads nothing and writes zeros
    uint64_t group;   // number of its group, among the lane's
    uint64_t number;  // its own number, among the lane's copies
};

// What a suspended lane waits for; the deadlock report prints it.
enum class Waiting : uint8_t {
    nothing,
    warp_instruction,
    barrier,
    mbarrier,
    warpgroup,
    registers,
    cluster,
    dependency,
    exited
};

class Workers;

struct Lane {
    Fiber fiber;
    int index;  // within the block
    int lane;   // within the warp
    int warp;
    Dim3 thread;
    Waiting waiting;
    WarpInstruction instruction;
    int barrier;      // the barrier or mbarrier waited for
    int parity;       // of the mbarrier phase waited for
    void *arguments;  // of the warp-wide instruction it has arrived at
    std::vector<AsyncCopy> copies;
    uint64_t copy_group;        // the group that the next copy joins
    uint64_t copy_groups_done;  // groups below this have been waited for
    uint64_t copies_issued;
    std::vector<uint64_t> copied;  // granules of cp.asyncs since the last cp.async.mbarrier.arrive
    void *copy_agent;              // ThreadSanitizer's fibre for the copy engine's writes
    std::array<char, 64> issue_tags, done_tags;  // ThreadSanitizer's, by group modulo 64
    Knowledge knowledge;
    uint64_t wgmmas, wgmma_groups;  // numbers issued and committed
    bool wgmma_fenced;              // wgmma.fence executed since the last wgmma.wait_group
    bool unfenced_loads;            // shared memory read since the last fence.proxy.async
    bool cluster_arrived;           // has arrived at barrier.cluster and not waited there yet
    uint64_t cluster_phase;         // the phase in which it arrived
};

// Lanes that have arrived at one warp-wide instruction with one mask.
struct Group {
    WarpInstruction instruction;
    uint32_t mask, arrived;
};

struct Warp {
    std::array<Lane *, kWarpSize> lanes;
    uint32_t full;   // lanes that exist
    uint32_t alive;  // lanes that have not exited
    uint32_t ready;  // lanes that can run
    std::vector<Group> groups;
    AccessLog log;
    uint64_t sync_phase;
    std::array<char, 2> sync_tags;
};

struct Barrier {
    int expected;  // threads per phase, as the last arrival said; 0 before the first
    int arrived;
    uint64_t phase;
    std::vector<Lane *> waiters;
    // ThreadSanitizer's synchronisation objects, by parity of the phase. With one tag, an arrival
    // at the next phase would also order its writes before a thread that has yet to leave this
    // phase.
    std::array<char, 2> tags;
    Knowledge knowledge;  // joined over the threads that have arrived
};

// Runs blocks of one launch, one after another: a worker has one Block for each rank of a cluster,
// and reuses it for that rank of each of its clusters.
class Block {
  public:
    Block(Launch const &launch, std::function<void()> const &body, Settings const &settings,
          Workers &workers, Dependency &dependency, Cluster &cluster, int rank);
    ~Block();
    Block(Block const &) = delete;
    Block &operator=(Block const &) = delete;

    // Resets everything for block `linear_index` of the grid: all threads are ready to run, and the
    // lane that goes first is drawn.
    void start(uint64_t linear_index);
    // Makes this the running block, and returns the fibre to switch to.
    Fiber &resumed();
    // Called after a switch to the lane's fibre: makes it the running lane and sets threadIdx and
    // blockIdx.
    void entered(Lane &lane);
    // Called by Cluster::run() when all blocks of the cluster have ended, or one has failed.
    void finish(bool failed);
    std::string const &error() const { return error_; }
    int error_code() const { return error_code_; }
    Counters const &counters() const { return counters_; }
    std::vector<TraceEntry> const &trace() const { return trace_; }

    static Block &current();
    // Adds to a report of AddressSanitizer whose wgmma in flight uses the register accessed.
    static void explain_report(char const *report);
    Lane &lane() { return *lane_; }
    Warp &warp() { return warps_[lane_->warp]; }

    // Arrives at a warp-wide instruction. The last lane to arrive executes it for all. Returns
    // after that.
    using Execute = void (*)(Block &block, Warp &warp, uint32_t mask);
    void converge(WarpInstruction instruction, uint32_t mask, void *arguments, Execute execute);
    void barrier_sync(int id, int threads, bool wait);
    void warp_sync(uint32_t mask);

    void copy_issue(std::byte *smem, std::byte const *gmem, int bytes, bool valid,
                    void const *site);
    void copy_commit();
    // Completes all groups but the newest `pending`.
    void copy_wait_group(uint64_t pending);
    void copy_wait_all();

    // Checks and counts one ordinary access; ignores the fibres' own stacks.
    void note_access(void const *address, int bytes, bool write, void const *site);
    // The offset of a shared memory address, checked against the block's allocation.
    uint64_t smem_offset(void const *address, int bytes, int alignment, char const *what);

    // Calls atomic() when this block's worker has the turn in the launch's order of atomics, and
    // ends the turn if `last`.
    void execute_atomic(void const *address, std::function<void()> const &atomic, bool last = true);
    void reduce_add(float *address, float const *values, int count);
    void store_in_turn(float *address, float const *values, int count);
    uint32_t load_acquire(uint32_t const *address);
    // griddepcontrol.wait: returns once the previous kernel has ended.
    void dependency_wait();
    // In a dependent launch: fails unless the previous kernel's end happens before this access to
    // global memory.
    void check_dependency(char const *what, void const *address);
    // Suspends the running lane until wake().
    void park(Waiting waiting);
    void wake(Lane &lane);
    void yield_at_random();  // lets another lane run with probability 1/8
    // ---- the other blocks of the cluster
    int rank() const { return rank_; }
    Cluster &cluster() { return cluster_; }
    // Returns the block of that rank. Fails if the running thread may not access its shared memory:
    // the block has ended, or its start does not happen before.
    Block &peer(uint32_t rank, char const *what);
    // mapa: returns the address at the same offset of the shared memory of `other`.
    void *map_to(Block &other, void const *address);
    void *smem_at(uint32_t address) { return smem_ + (address - kReservedSmem); }
    // The block of the cluster whose shared memory holds the address; null if there is none.
    Block *owner_of(void const *address);
    void cluster_barrier(WarpInstruction instruction, bool relaxed);

    // Counts a step of the running thread: a warp-wide or warpgroup-wide instruction, a wait or
    // test of an mbarrier, or griddepcontrol.wait. Fails beyond the block's budget of steps.
    void count_step();
    int elected_lane(int warp) const {
        return static_cast<int>((settings_.seed * 7 + linear_index_ * 5 + warp) % kWarpSize);
    }

    // Reports an error of the running block, which may differ from *this, and ends its cluster. The
    // message names the running thread.
    [[noreturn]] void fail(int code, std::string const &message);
    // Like fail(), with a message that names no thread.
    [[noreturn]] void give_up(int code, std::string const &message);
    Counters counters_;
    Sm90 sm90_{*this};

  private:
    friend void lane_entry();
    friend class Sm90;
    friend class Cluster;
    void check_sums(char const *what, float const *address, int bytes);
    // Switches to the lane of pick_or_land(), with the running warp as the default for `preferred`.
    // Returns when the running lane is scheduled again. Fails in a deadlock.
    void suspend(Warp *preferred = nullptr);
    // Draws a ready lane, of warp `preferred` or, at random or if none is ready there, of any warp.
    // Null if no lane is ready.
    Lane *pick(Warp *preferred);
    // Like pick(), after another block of the cluster had its chance of a turn. While no lane is
    // ready, runs another block of the cluster, completes a copy in flight or ends the previous
    // kernel, and draws again. Null in a deadlock.
    Lane *pick_or_land(Warp *preferred);
    [[noreturn]] void exit_lane();
    bool can_go_on() const;
    // Ends the previous kernel and wakes the lanes that wait for it; false if no lane does.
    bool end_dependency();
    void check_not_awaited(Lane const &lane);
    void check_can_complete(int barrier);
    void copy_wait_below(uint64_t group);
    void land(Lane &lane, AsyncCopy const &copy);
    void land_at_random();
    void land_copies(Lane &lane, std::function<bool(AsyncCopy const &)> const &covered);
    void flush_logs();
    int region_of(void const *address, int bytes) const;
    std::string state_of(Lane const &lane) const;
    std::string describe_waiting() const;
    std::string where(Lane const &lane) const;

    Launch const &launch_;
    std::function<void()> const &body_;
    Settings const &settings_;
    Workers &workers_;
    Dependency &dependency_;
    Cluster &cluster_;
    int const rank_;
    std::byte *const smem_;
    std::vector<Lane> lanes_;
    Stacks const stacks_;
    std::vector<Warp> warps_;
    std::array<Barrier, kBarriers> barriers_;
    Lane *lane_ = nullptr;
    int alive_ = 0;
    uint64_t linear_index_ = 0;
    Dim3 block_{};
    uint64_t steps_ = 0;
    uint64_t polls_ = 0, last_poll_step_ = 0;  // polls of global memory since the last step
    uint64_t random_state_ = 0;
    uint64_t preempt_mask_ = 0;  // pick() leaves the warp if random() has none of these bits set
    std::vector<TraceEntry> trace_;
    std::string error_;
    int error_code_ = 0;
    char block_end_tag_ = 0;  // ThreadSanitizer's: orders the threads before finish()

    uint64_t random();
};

}  // namespace sim
