// A cluster of blocks, of which one runs at a time; the seed determines the order. A block that is
// launched without a cluster is a cluster of size 1.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "knowledge.h"
#include "runtime.h"
#include "simulator.h"

namespace sim {

class Block;
class Dependency;
class Workers;
struct Fiber;
struct Lane;

inline constexpr int kMaxClusterBlocks = 16;

class Cluster {
  public:
    Cluster(Launch const &launch, std::function<void()> const &body, Settings const &settings,
            Workers &workers, Dependency &dependency);
    ~Cluster();
    Cluster(Cluster const &) = delete;
    Cluster &operator=(Cluster const &) = delete;

    int size() const { return static_cast<int>(blocks_.size()); }
    Dim3 shape() const { return launch_.cluster; }
    uint64_t unit() const { return unit_; }
    Block &block(int rank) const { return *blocks_[rank]; }
    bool ended(int rank) const { return ended_[rank]; }

    // Runs the blocks of the unit to their ends. Returns null, or the block that failed: the others
    // then stay as they are, and the cluster can't run another unit.
    Block *run(uint64_t unit);

    // Called by the running block: switches to another block with a ready lane, and returns when
    // `block` is scheduled again. False if no other block has a ready lane.
    bool pass_turn(Block &block);
    // Calls pass_turn() with probability 1/16.
    void pass_turn_at_random(Block &block);
    // Called when the block has ended: returns the fibre that goes on, of another block or of the
    // caller of run().
    Fiber &after(Block &block);
    // Called by the running block, which has failed: makes run() return it.
    [[noreturn]] void abandon(Block &block);
    // Completes one copy in flight, or copy arrival, of any of the blocks; false if there is none.
    bool land_one();
    // Ends the previous kernel; false if no thread of the cluster waits for its end.
    bool end_dependency();

    void arrive(bool relaxed);
    void wait();
    void exited(Block &block, Lane &lane);
    // Records an access of the running thread to the shared memory of `peer`.
    void note_access(Block &peer);
    std::string describe() const;

  private:
    uint64_t random();
    // Resets the cluster for the next unit.
    void start(uint64_t unit);
    int draw_ready(int except);
    void complete();

    Launch const &launch_;
    Settings const &settings_;
    std::vector<std::unique_ptr<Block>> blocks_;
    std::vector<bool> ended_;
    Fiber *main_ = nullptr;  // the fibre that called run()
    Block *failed_ = nullptr;
    uint64_t unit_ = 0;
    uint64_t random_state_ = 0;
    // barrier.cluster
    int alive_ = 0, arrived_ = 0;
    uint64_t phase_ = 0;
    std::vector<std::pair<Block *, Lane *>> waiters_;
    Knowledge incoming_, published_;
    std::array<char, 2> tags_{};
    // By rank: how many accesses to other blocks' shared memory each warp of the block has made.
    std::vector<Accesses> accesses_;
    // By rank: the knowledge of the block's threads, joined over those that have exited.
    std::vector<Knowledge> last_known_;
    // By rank of the accessed block, then of the accessing one: for each warp of the latter, the
    // number of its last access to the former (see accesses_).
    std::vector<std::vector<Accesses>> last_access_;
};

}  // namespace sim
