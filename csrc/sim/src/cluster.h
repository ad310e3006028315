// The blocks of one cluster. Each has an OS thread, for the sake of its thread-local variables, but
// only one of them runs at a time: they hand on the turn, in an order drawn from the seed.
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
    // Before the blocks of the next unit run.
    void start(uint64_t unit);
    uint64_t unit() const { return unit_; }
    Block &block(int rank) const { return *blocks_[rank]; }
    bool ended(int rank) const { return ended_[rank]; }

    // By the OS thread of each block. The first returns once it is the block's turn, or false if
    // another one has failed; the second once all of them have left.
    bool enter(Block &block);
    void leave(Block &block, bool failed);

    // By the block whose turn it is: lets another one go on that can, and returns at the next turn.
    // False if there is none.
    bool pass_turn(Block &block);
    // Likewise, now and then.
    void pass_turn_at_random(Block &block);
    bool abandoned() const { return abandoned_; }
    // A copy under way to any of the blocks lands; false if there is none.
    bool land_one();
    // The kernel before ends, if any thread waits for that.
    bool end_dependency();

    void arrive(bool relaxed);
    void wait();
    void exited(Block &block, Lane &lane);
    // The running thread accesses the block's shared memory, at once.
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
    // Waited for and notified without the C library, whose synchronisation ThreadSanitizer would
    // take for the kernel's.
    std::atomic<int> entered_{0}, left_{0}, turn_{-1};
    std::atomic<bool> abandoned_{false};
    // barrier.cluster
    int alive_ = 0, arrived_ = 0;
    uint64_t phase_ = 0;
    std::vector<std::pair<Block *, Lane *>> waiters_;
    Knowledge incoming_, published_;
    std::array<char, 2> tags_{};
    // By rank: how often each warp has accessed other blocks, and what the block's threads knew of
    // that when they exited. By rank and rank of the accessing block: its last accesses.
    std::vector<Accesses> accesses_;
    std::vector<Knowledge> last_known_;
    std::vector<std::vector<Accesses>> last_access_;
};

}  // namespace sim
