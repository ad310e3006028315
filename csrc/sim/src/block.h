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
// Of each block's shared memory, in front of what a kernel asks for (compute capability 8.0 and
// up).
inline constexpr uint64_t kReservedSmem = 1024;
// Reads as NaN in fp16, bf16 and, as a pair, in fp32 (where it is signalling).
inline constexpr uint16_t kPoison = 0x7FBF;

// cudaError_t values, spelled out so that the runtime builds without CUDA's headers.
inline constexpr int kSuccess = 0;
inline constexpr int kInvalidValue = 1;
inline constexpr int kInvalidConfiguration = 9;
inline constexpr int kIllegalAddress = 700;
inline constexpr int kLaunchTimeout = 702;
inline constexpr int kMisalignedAddress = 716;
inline constexpr int kLaunchFailure = 719;
inline constexpr int kNotSupported = 801;
inline constexpr int kInvalidClusterSize = 912;

enum class Meeting : uint8_t {
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
    bool valid;
    uint64_t group;
};

// What a suspended lane waits for; the deadlock report prints it.
enum class Waiting : uint8_t {
    nothing,
    meeting,
    barrier,
    mbarrier,
    warpgroup,
    registers,
    cluster,
    dependency,
    exited
};

class Turns;

struct Lane {
    Fiber fiber;
    int index;  // within the block
    int lane;   // within the warp
    int warp;
    Dim3 thread;
    Waiting waiting;
    Meeting meeting;
    int barrier;  // or mbarrier, and the parity waited for
    int parity;
    void *arguments;  // of the warp-wide instruction it has arrived at
    std::vector<AsyncCopy> copies;
    uint64_t copy_group;        // the group that the next copy joins
    uint64_t copy_groups_done;  // groups below this have been waited for
    void *copy_agent;           // ThreadSanitizer's fibre for the copy engine's writes
    std::array<char, 64> issue_tags, done_tags;  // addresses that carry happens-before, per group
    Knowledge knowledge;
    uint64_t wgmmas, wgmma_groups;  // issued, committed
    bool wgmma_fenced;              // since the last wait
    bool unfenced_loads;            // since the last fence for the asynchronous proxy
    bool cluster_arrived;           // and has not waited yet, in this phase of the barrier
    uint64_t cluster_phase;
};

// Lanes that have arrived at one warp-wide instruction with one mask.
struct Group {
    Meeting meeting;
    uint32_t mask, arrived;
};

struct Warp {
    std::array<Lane *, kWarpSize> lanes;
    uint32_t full;   // lanes that exist
    uint32_t alive;  // have not exited
    uint32_t ready;  // can run
    std::vector<Group> groups;
    AccessLog log;
    uint64_t sync_phase;
    std::array<char, 2> sync_tags;
};

struct Barrier {
    int expected;  // 0: idle
    int arrived;
    uint64_t phase;
    std::vector<Lane *> waiters;
    // Two, by parity of the phase: a thread that is already at the next phase must not hand its
    // later writes to one that has yet to leave this one.
    std::array<char, 2> tags;
    Knowledge knowledge;  // of those that have arrived
};

// Runs blocks of one launch, one after another, on the calling OS thread.
class Block {
  public:
    Block(Launch const &launch, std::function<void()> const &body, Settings const &settings,
          Turns &turns, Dependency &dependency, Cluster &cluster, int rank);
    ~Block();
    Block(Block const &) = delete;
    Block &operator=(Block const &) = delete;

    // False if the block failed; error() and error_code() then say why.
    bool run(uint64_t linear_index);
    std::string const &error() const { return error_; }
    // Empty of a block that was given up because another one of its cluster failed.
    int error_code() const { return error_code_; }
    Counters const &counters() const { return counters_; }
    std::vector<TraceEntry> const &trace() const { return trace_; }

    static Block &current();
    // Says of a report of AddressSanitizer's what it cannot know.
    static void explain_report(char const *report);
    Lane &lane() { return *lane_; }
    Warp &warp() { return warps_[lane_->warp]; }

    // Arrives at a warp-wide instruction; the last lane executes it for all. Returns once it is
    // done.
    using Execute = void (*)(Block &block, Warp &warp, uint32_t mask);
    void meet(Meeting meeting, uint32_t mask, void *arguments, Execute execute);
    void barrier_sync(int id, int threads, bool wait);
    void warp_sync(uint32_t mask);

    void copy_issue(std::byte *smem, std::byte const *gmem, int bytes, bool valid,
                    void const *site);
    void copy_commit();
    // Returns once all groups but the newest `pending` have landed.
    void copy_wait_group(uint64_t pending);
    void copy_wait_all();

    // Checks and counts one ordinary access; ignores the fibres' own stacks.
    void note_access(void const *address, int bytes, bool write, void const *site);
    // The offset of a shared memory address, checked against the block's allocation.
    uint64_t smem_offset(void const *address, int bytes, int alignment, char const *what);

    // Calls atomic() when it is this block's turn among all of the launch.
    void take_turn(void const *address, std::function<void()> const &atomic);
    // Returns once the kernel before has ended, if the launch did not wait for that.
    void dependency_wait();
    // Fails where an access to global memory is too early for that.
    void check_dependency(char const *what, void const *address);
    // The current lane sleeps until somebody wakes it.
    void park(Waiting waiting);
    void wake(Lane &lane);
    void yield_at_random();
    // ---- the other blocks of the cluster
    int rank() const { return rank_; }
    Cluster &cluster() { return cluster_; }
    // Fails unless there is such a block, whose shared memory the running thread may access.
    Block &peer(uint32_t rank, char const *what);
    // Where `other` has what lies at an address of this block's shared memory.
    void *map_to(Block &other, void const *address);
    void *smem_at(uint32_t address) { return smem_ + (address - kReservedSmem); }
    // The block whose shared memory the address belongs to; null if none of the cluster's.
    Block *owner_of(void const *address);
    void cluster_barrier(Meeting meeting, bool relaxed);

    // One more instruction at which threads wait for each other; fails beyond the budget.
    void count_step();
    int elected_lane(int warp) const {
        return static_cast<int>((settings_.seed * 7 + linear_index_ * 5 + warp) % kWarpSize);
    }

    // Ends the running block, which may be another than the one whose state is at fault.
    [[noreturn]] void fail(int code, std::string const &message);
    // Likewise, without naming the thread.
    [[noreturn]] void give_up(int code, std::string const &message);
    Counters counters_;
    Sm90 sm90_{*this};

  private:
    friend void lane_entry();
    friend class Sm90;
    friend class Cluster;
    void start(uint64_t linear_index);
    void finish();
    // Lets others run, of the warp `preferred` if there is one, else of the same.
    void suspend(Warp *preferred = nullptr);
    void switch_to(Fiber &from, Lane &next);
    void entered(Lane &lane);
    Lane *pick(Warp *preferred);
    // Likewise, and if none can go on, after other blocks of the cluster have run, a copy under way
    // has landed or the kernel before has ended; null in a deadlock.
    Lane *pick_or_land(Warp *preferred);
    [[noreturn]] void exit_lane();
    bool can_go_on() const;
    [[noreturn]] void abandon();
    // Wakes those who wait for the end of the kernel before; false if there are none.
    bool end_dependency();
    void check_nobody_waits_for(Lane const &lane);
    void check_can_complete(int barrier);
    void copy_wait_below(uint64_t group);
    void land(Lane &lane, AsyncCopy const &copy);
    void land_at_random();
    void flush_logs();
    int region_of(void const *address, int bytes) const;
    std::string state_of(Lane const &lane) const;
    std::string describe_waiting() const;
    std::string where(Lane const &lane) const;

    Launch const &launch_;
    std::function<void()> const &body_;
    Settings const &settings_;
    Turns &turns_;
    Dependency &dependency_;
    Cluster &cluster_;
    int const rank_;
    std::byte *smem_;
    std::byte *stacks_;
    size_t stack_span_;
    std::vector<Lane> lanes_;
    std::vector<Warp> warps_;
    std::array<Barrier, kBarriers> barriers_;
    Fiber main_;
    Lane *lane_ = nullptr;
    int alive_ = 0;
    uint64_t linear_index_ = 0;
    Dim3 block_{};
    uint64_t steps_ = 0;
    uint64_t random_state_ = 0;
    uint64_t preempt_mask_ = 0;
    std::vector<TraceEntry> trace_;
    std::string error_;
    int error_code_ = 0;
    char block_end_tag_ = 0;

    uint64_t random();
};

}  // namespace sim
