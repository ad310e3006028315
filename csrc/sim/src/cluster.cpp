#include "cluster.h"

#include "block.h"
#include "tsan.h"

namespace sim {

namespace {

// The linear index of a block in the grid. x is fastest, in the grid and in the cluster.
uint64_t block_index(Launch const &launch, uint64_t unit, uint64_t rank) {
    Dim3 const &g = launch.grid, &c = launch.cluster;
    uint64_t const x = unit % (g.x / c.x) * c.x + rank % c.x;
    uint64_t const y = unit / (g.x / c.x) % (g.y / c.y) * c.y + rank / c.x % c.y;
    uint64_t const z = unit / (g.x / c.x) / (g.y / c.y) * c.z + rank / c.x / c.y;
    return x + g.x * (y + g.y * z);
}

}  // namespace

Cluster::Cluster(Launch const &launch, std::function<void()> const &body, Settings const &settings,
                 Workers &workers, Dependency &dependency)
    : launch_(launch),
      settings_(settings),
      blocks_(size_t(launch.cluster.x) * launch.cluster.y * launch.cluster.z),
      ended_(blocks_.size()) {
    for (int rank = 0; rank < size(); ++rank) {
        blocks_[rank] =
            std::make_unique<Block>(launch, body, settings, workers, dependency, *this, rank);
    }
}

Cluster::~Cluster() = default;

Block *Cluster::run(uint64_t unit) {
    start(unit);
    main_ = &running_fiber();
    for (int rank = 0; rank < size(); ++rank) {
        block(rank).start(block_index(launch_, unit, static_cast<uint64_t>(rank)));
    }
    fiber_switch(block(static_cast<int>(random() % size())).resumed());
    for (auto const &block : blocks_) {
        block->finish(failed_ != nullptr);
    }
    return failed_;
}

void Cluster::start(uint64_t unit) {
    unit_ = unit;
    random_state_ = (settings_.seed * 0x9E3779B97F4A7C15u + unit * 0xD1B54A32D192ED03u) | 1;
    std::fill(ended_.begin(), ended_.end(), false);
    alive_ = size() * static_cast<int>(block(0).lanes_.size());
    arrived_ = 0;
    phase_ = 0;
    waiters_.clear();
    incoming_ = published_ = {};
    if (size() > 1) {
        accesses_.assign(blocks_.size(), {});
        last_known_.assign(blocks_.size(), {});
        last_access_.assign(blocks_.size(), accesses_);
    }
}

uint64_t Cluster::random() {
    random_state_ ^= random_state_ << 13;
    random_state_ ^= random_state_ >> 7;
    random_state_ ^= random_state_ << 17;
    return random_state_ >> 16;
}

int Cluster::draw_ready(int except) {
    int const first = static_cast<int>(random() % size());
    for (int i = 0; i < size(); ++i) {
        int const rank = (first + i) % size();
        if (rank != except && !ended_[rank] && block(rank).can_go_on()) {
            return rank;
        }
    }
    return -1;
}

bool Cluster::pass_turn(Block &block) {
    int const next = size() == 1 ? -1 : draw_ready(block.rank());
    if (next < 0) {
        return false;
    }
    Lane &self = block.lane();
    fiber_switch(this->block(next).resumed());
    block.entered(self);
    return true;
}

Fiber &Cluster::after(Block &block) {
    ended_[block.rank()] = true;
    int next = size() == 1 ? -1 : draw_ready(block.rank());
    for (int rank = 0; rank < size() && next < 0; ++rank) {
        next = ended_[rank] ? -1 : rank;
    }
    return next < 0 ? *main_ : this->block(next).resumed();
}

void Cluster::abandon(Block &block) {
    failed_ = &block;
    fiber_switch(*main_);
    __builtin_unreachable();
}

void Cluster::pass_turn_at_random(Block &block) {
    if (size() > 1 && random() % 16 == 0) {
        pass_turn(block);
    }
}

bool Cluster::land_one() {
    int const first = size() == 1 ? 0 : static_cast<int>(random() % size());
    for (int i = 0; i < size(); ++i) {
        if (block((first + i) % size()).sm90_.land_one()) {
            return true;
        }
    }
    return false;
}

bool Cluster::end_dependency() {
    bool any = false;
    for (auto const &block : blocks_) {
        any = block->end_dependency() || any;
    }
    return any;
}

void Cluster::arrive(bool relaxed) {
    Block &block = Block::current();
    Lane &self = block.lane();
    if (self.cluster_arrived) {
        block.fail(kLaunchFailure, "barrier.cluster: the thread arrives twice without waiting");
    }
    self.cluster_arrived = true;
    self.cluster_phase = phase_;
    if (relaxed) {
        incoming_.join(block.sm90_.initialisations());
    } else {
        tsan::release(&tags_[phase_ & 1]);
        incoming_.join(self.knowledge);
    }
    ++arrived_;
    complete();
}

void Cluster::complete() {
    if (arrived_ == 0 || arrived_ < alive_) {
        return;
    }
    ++Block::current().counters_.cluster_barriers;
    ++phase_;
    arrived_ = 0;
    published_.join(incoming_);
    for (auto const &[block, lane] : waiters_) {
        block->wake(*lane);
    }
    waiters_.clear();
}

void Cluster::wait() {
    Block &block = Block::current();
    Lane &self = block.lane();
    if (!self.cluster_arrived) {
        block.fail(kLaunchFailure, "barrier.cluster: the thread waits without having arrived");
    }
    while (phase_ == self.cluster_phase) {
        waiters_.emplace_back(&block, &self);
        block.park(Waiting::cluster);
    }
    self.cluster_arrived = false;
    tsan::acquire(&tags_[self.cluster_phase & 1]);
    self.knowledge.join(published_);
}

void Cluster::note_access(Block &peer) {
    Block &block = Block::current();
    if (&peer == &block) {
        return;
    }
    Lane &lane = block.lane();
    uint32_t const number = ++accesses_[block.rank()][lane.warp];
    last_access_[peer.rank()][block.rank()][lane.warp] = number;
    lane.knowledge.accesses_of(block.rank())[lane.warp] = number;
}

// barrier.cluster does not wait for exited threads. When its last thread exits, a block's shared
// memory is gone, so all accesses of other blocks to it must happen before the exit of one of its
// threads.
void Cluster::exited(Block &block, Lane &lane) {
    if (size() > 1) {
        Knowledge &known = last_known_[block.rank()];
        known.join(lane.knowledge);
        for (int rank = 0; rank < size() && block.alive_ == 0; ++rank) {
            for (int warp = 0; warp < kWarps; ++warp) {
                if (last_access_[block.rank()][rank][warp] > known.accesses_of(rank)[warp]) {
                    block.fail(kLaunchFailure,
                               "the block ends, and its shared memory with it: its threads are not "
                               "ordered after the accesses to that memory by warp " +
                                   std::to_string(warp) + " of the block of rank " +
                                   std::to_string(rank));
                }
            }
        }
    }
    --alive_;
    if (lane.cluster_arrived && lane.cluster_phase == phase_) {
        --arrived_;
    }
    complete();
}

std::string Cluster::describe() const {
    if (size() == 1) {
        return block(0).describe_waiting();
    }
    std::string text;
    for (int rank = 0; rank < size(); ++rank) {
        text += (rank == 0 ? "rank " : ". Rank ") + std::to_string(rank) + ": " +
                (ended_[rank] ? "the block has ended" : block(rank).describe_waiting());
    }
    return text + ". The cluster's barrier: " + std::to_string(arrived_) + " of " +
           std::to_string(alive_) + " threads arrived";
}

// ---- access to the other blocks of the cluster

Block &Block::peer(uint32_t rank, char const *what) {
    if (rank >= static_cast<uint32_t>(cluster_.size())) {
        fail(kLaunchFailure, std::string(what) + ": there is no block of rank " +
                                 std::to_string(rank) + " in a cluster of " +
                                 std::to_string(cluster_.size()));
    }
    Block &other = cluster_.block(static_cast<int>(rank));
    if (cluster_.ended(other.rank())) {
        fail(kLaunchFailure, std::string(what) + ": the block of rank " + std::to_string(rank) +
                                 " has ended, and its shared memory with it");
    }
    if (!lane_->knowledge.of(other.rank()).runs) {
        fail(kLaunchFailure, std::string(what) +
                                 ": the thread is not ordered after the start of the block of "
                                 "rank " +
                                 std::to_string(rank));
    }
    return other;
}

void *Block::map_to(Block &other, void const *address) {
    return other.smem_ + smem_offset(address, 0, 1, "mapa");
}

Block *Block::owner_of(void const *address) {
    auto const at = reinterpret_cast<uint64_t>(address);
    for (int r = 0; r < cluster_.size(); ++r) {
        if (at - reinterpret_cast<uint64_t>(cluster_.block(r).smem_) < kMaxSmemBytes) {
            return &peer(static_cast<uint32_t>(r), "access");
        }
    }
    return nullptr;
}

void Block::cluster_barrier(WarpInstruction instruction, bool relaxed) {
    tsan::Unwatched const unwatched;
    converge(instruction, warp().alive, nullptr, [](Block &, Warp &, uint32_t) {});
    if (instruction == WarpInstruction::cluster_arrive) {
        cluster_.arrive(relaxed);
    } else {
        cluster_.wait();
    }
}

Dim3 cluster_shape() { return Block::current().cluster().shape(); }
void cluster_arrive(bool relaxed) {
    Block::current().cluster_barrier(WarpInstruction::cluster_arrive, relaxed);
}
void cluster_wait() { Block::current().cluster_barrier(WarpInstruction::cluster_wait, false); }

void *dynamic_smem() { return Block::current().smem_at(kReservedSmem); }
void *map_shared_rank(void const *address, uint32_t rank) {
    Block &block = Block::current();
    return block.map_to(block.peer(rank, "mapa"), address);
}
uint32_t map_smem_address(uint32_t address, uint32_t rank) {
    Block &block = Block::current();
    block.peer(rank, "mapa");
    // The rank is in bits 24 and up, beyond the addresses of a block's own shared memory.
    return (address & 0xFFFFFF) | (rank + 1) << 24;
}

}  // namespace sim
