// The blocks of one cluster. Each has an OS thread, because __shared__ variables are thread-local.
// Only one of them runs at a time; the seed determines the order.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "knowledge.h"
#include "runtime.h"
#include "simulator.h"

namespace sim {

class Block;
struct Lane;

inline constexpr int kMaxClusterBlocks = 16;

class Cluster {
  public:
    Cluster(Launch const &launch, Settings const &settings);

    int size() const { return static_cast<int>(blocks_.size()); }
    Dim3 shape() const { return shape_; }
    // Resets the cluster for the next unit, before its blocks run.
    void start(uint64_t unit);
    uint64_t unit() const { return unit_; }
    Block &block(int rank) const { return *blocks_[rank]; }
    bool ended(int rank) const { return ended_[rank]; }

    // Called by the OS thread of each block. enter() returns when the block is scheduled, false if
    // another block has failed. leave() returns when all blocks have called it.
    bool enter(Block &block);
    void leave(Block &block, bool failed);

    // Called by the running block: switches to another block with a ready lane, and returns when
    // `block` is scheduled again. False if no other block has a ready lane.
    bool pass_turn(Block &block);
    // The same with probability 1/16.
    void pass_turn_at_random(Block &block);
    bool abandoned() const { return abandoned_; }
    // Completes one copy in flight to any of the blocks; false if there is none.
    bool land_one();
    // Ends the previous kernel; false if no thread waits for that.
    bool end_dependency();

    void arrive(bool relaxed);
    void wait();
    void exited(Block &block, Lane &lane);
    // Records an access of the running thread to the shared memory of `peer`.
    void note_access(Block &peer);
    std::string describe() const;

  private:
    uint64_t random();
    void hand_to(int rank);
    void await_turn(int rank);
    int draw_ready(int except);
    void complete();

    Dim3 const shape_;
    Settings const &settings_;
    std::vector<Block *> blocks_;
    std::vector<bool> ended_;
    uint64_t unit_ = 0;
    uint64_t random_state_ = 0;
    // std::atomic's wait and notify: ThreadSanitizer intercepts the C library's synchronisation and
    // would take it for the kernel's.
    std::atomic<int> entered_{0}, left_{0}, turn_{-1};
    std::atomic<bool> abandoned_{false};
    // barrier.cluster
    int alive_ = 0, arrived_ = 0;
    uint64_t phase_ = 0;
    std::vector<std::pair<Block *, Lane *>> waiters_;
    Knowledge incoming_, published_;
    std::array<char, 2> tags_{};
    // By rank: the number of accesses of each warp to other blocks.
    std::vector<Accesses> accesses_;
    // By rank: the knowledge of the block's threads that have exited, joined.
    std::vector<Knowledge> last_known_;
    // By rank and rank of the accessing block: the number of each warp's last access.
    std::vector<std::vector<Accesses>> last_access_;
};

}  // namespace sim
