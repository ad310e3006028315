#include "block.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "asan.h"
#include "tsan.h"
#include "workers.h"

constinit sim::Dim3 threadIdx{};
constinit sim::Dim3 blockIdx{};
constinit sim::Dim3 blockDim{};
constinit sim::Dim3 gridDim{};

namespace sim {

namespace {

constinit Block *current_block = nullptr;

char const *name_of(WarpInstruction instruction) {
    switch (instruction) {
        case WarpInstruction::ldmatrix:
            return "ldmatrix";
        case WarpInstruction::stmatrix:
            return "stmatrix";
        case WarpInstruction::mma:
            return "mma.sync";
        case WarpInstruction::shuffle:
            return "a shuffle";
        case WarpInstruction::ballot:
            return "a vote";
        case WarpInstruction::warp_sync:
            return "__syncwarp";
        case WarpInstruction::elect:
            return "elect.sync";
        case WarpInstruction::cluster_arrive:
            return "barrier.cluster.arrive";
        case WarpInstruction::cluster_wait:
            return "barrier.cluster.wait";
    }
    return "";
}

std::string hex(uint32_t mask) {
    char text[16];
    std::snprintf(text, sizeof text, "0x%08x", mask);
    return text;
}

}  // namespace

Block &Block::current() { return *current_block; }

void Block::explain_report(char const *) {
    std::string const owner = current_block == nullptr
                                  ? ""
                                  : current_block->sm90_.owner_of_register(asan::report_address());
    if (!owner.empty()) {
        std::fprintf(stderr, "%s: a register of a wgmma in flight was touched, that of %s\n",
                     current_block->where(*current_block->lane_).c_str(), owner.c_str());
    }
}

void lane_entry() {
    Block &block = *current_block;
    fiber_entered();
    block.entered(*block.lane_);
    block.body_();
    block.exit_lane();
}

Block::Block(Launch const &launch, std::function<void()> const &body, Settings const &settings,
             Workers &workers, Dependency &dependency, Cluster &cluster, int rank)
    : launch_(launch),
      body_(body),
      settings_(settings),
      workers_(workers),
      dependency_(dependency),
      cluster_(cluster),
      rank_(rank),
      smem_(static_cast<std::byte *>(std::aligned_alloc(1024, kMaxSmemBytes))),
      lanes_(size_t(launch.block.x) * launch.block.y * launch.block.z),
      stacks_(lanes_.size()) {
    if (smem_ == nullptr) {
        throw std::bad_alloc();
    }
    warps_.resize((lanes_.size() + kWarpSize - 1) / kWarpSize);
    for (size_t i = 0; i < lanes_.size(); ++i) {
        Lane &lane = lanes_[i];
        lane.index = static_cast<int>(i);
        lane.lane = lane.index % kWarpSize;
        lane.warp = lane.index / kWarpSize;
        lane.thread = {unsigned(i % launch.block.x), unsigned(i / launch.block.x % launch.block.y),
                       unsigned(i / launch.block.x / launch.block.y)};
        stacks_.give(i, lane.fiber);
        warps_[lane.warp].lanes[lane.lane] = &lane;
        warps_[lane.warp].full |= 1u << lane.lane;
    }
    asan::on_report(&Block::explain_report);
    asan::forbid(smem_ + launch_.smem_bytes, kMaxSmemBytes - launch_.smem_bytes);
}

Block::~Block() {
    asan::allow(smem_, kMaxSmemBytes);
    std::free(smem_);
}

uint64_t Block::random() {
    random_state_ ^= random_state_ << 13;
    random_state_ ^= random_state_ >> 7;
    random_state_ ^= random_state_ << 17;
    return random_state_;
}

void Block::start(uint64_t linear_index) {
    linear_index_ = linear_index;
    block_ = {unsigned(linear_index % launch_.grid.x),
              unsigned(linear_index / launch_.grid.x % launch_.grid.y),
              unsigned(linear_index / launch_.grid.x / launch_.grid.y)};
    blockDim = launch_.block;
    gridDim = launch_.grid;
    // splitmix64 of seed and block: neighbouring blocks must not share a schedule, and xorshift
    // must not start from 0.
    uint64_t z = settings_.seed * 0x9E3779B97F4A7C15u + linear_index + 0x632BE59BD9B4E019u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    random_state_ = (z ^ (z >> 31)) | 1;
    // pick() draws the warp anew with probability 1/2, 1/16 or 1/256, or only if none of its lanes
    // is ready.
    constexpr uint64_t kPreemptMasks[] = {1, 15, 255, ~uint64_t(0)};
    preempt_mask_ = kPreemptMasks[random() % 4];
    steps_ = 0;
    alive_ = static_cast<int>(lanes_.size());
    barriers_ = {};
    for (size_t i = 0; i + 1 < launch_.smem_bytes; i += 2) {
        std::memcpy(smem_ + i, &kPoison, sizeof kPoison);
    }
    for (Warp &warp : warps_) {
        warp.alive = warp.ready = warp.full;
        warp.groups.clear();
        warp.sync_phase = 0;
    }
    for (Lane &lane : lanes_) {
        lane.waiting = Waiting::nothing;
        lane.copies.clear();
        lane.copy_group = lane.copy_groups_done = lane.copies_issued = 0;
        lane.copied.clear();
        lane.knowledge = {};
        lane.wgmmas = lane.wgmma_groups = 0;
        lane.wgmma_fenced = lane.unfenced_loads = false;
        lane.cluster_arrived = false;
        lane.knowledge.of(rank_).runs = true;
        fiber_prepare(lane.fiber, &lane_entry);
    }
    sm90_.start();
    if (dependency_.dependent() || cluster_.size() > 1) {
        sm90_.activate();  // barriers join knowledge only in an active block
    }
    counters_.blocks += 1;
    lane_ = pick(&warps_[random() % warps_.size()]);
}

void Block::finish(bool failed) {
    current_block = nullptr;
    // Orders this block's accesses before those of the host and of the worker's next block.
    tsan::acquire(&block_end_tag_);
    // Unfinished fibres are not released: ThreadSanitizer reports fibres that end halfway.
    if (failed) {
        return;
    }
    for (Lane &lane : lanes_) {
        fiber_release(lane.fiber);
        tsan::destroy_agent(lane.copy_agent);
    }
}

Fiber &Block::resumed() {
    current_block = this;
    return lane_->fiber;
}

void Block::entered(Lane &lane) {
    current_block = this;
    lane_ = &lane;
    blockIdx = block_;
    threadIdx = lane.thread;
}

Lane *Block::pick(Warp *preferred) {
    Warp *warp = preferred;
    if (warp->ready == 0 || (random() & preempt_mask_) == 0) {
        size_t const offset = random() % warps_.size();
        warp = nullptr;
        for (size_t i = 0; i < warps_.size() && warp == nullptr; ++i) {
            Warp &candidate = warps_[(offset + i) % warps_.size()];
            if (candidate.ready != 0) {
                warp = &candidate;
            }
        }
        if (warp == nullptr) {
            return nullptr;
        }
    }
    int const turn = static_cast<int>(random() >> 32) & (kWarpSize - 1);
    return warp->lanes[(std::countr_zero(std::rotr(warp->ready, turn)) + turn) % kWarpSize];
}

Lane *Block::pick_or_land(Warp *preferred) {
    cluster_.pass_turn_at_random(*this);
    Lane *next = pick(preferred);
    while (next == nullptr &&
           (cluster_.pass_turn(*this) || cluster_.land_one() || cluster_.end_dependency())) {
        next = pick(preferred);
    }
    return next;
}

void Block::park(Waiting waiting) {
    lane_->waiting = waiting;
    warps_[lane_->warp].ready &= ~(1u << lane_->lane);
    suspend();
}

void Block::wake(Lane &lane) {
    lane.waiting = Waiting::nothing;
    warps_[lane.warp].ready |= 1u << lane.lane;
}

void Block::yield_at_random() {
    if ((random() & 7) == 0) {
        suspend();
    }
}

void Block::execute_atomic(void const *address, std::function<void()> const &atomic, bool last) {
    tsan::Unwatched const unwatched;
    check_dependency("atomic", address);
    ++counters_.atomics;
    Lane &self = *lane_;
    workers_.await_turn();
    entered(self);
    // For the race detector: what a thread did before an atomic is ordered before what threads do
    // after later atomics at the same address.
    void *const tag = const_cast<void *>(address);
    tsan::acquire(tag);
    atomic();
    tsan::release(tag);
    workers_.end_turn(last);
    entered(self);
}

// Each poll takes a turn in the order of atomics, then runs other lanes and sometimes lands a copy:
// a polling thread must not starve other blocks, the other warps and the copies.
uint32_t Block::load_acquire(uint32_t const *address) {
    constexpr uint64_t kPolls = 100000;
    polls_ = steps_ == last_poll_step_ ? polls_ + 1 : 1;
    last_poll_step_ = steps_;
    if (polls_ > kPolls) {
        fail(kLaunchTimeout, "deadlock: a thread polls global memory that no block changes");
    }
    uint32_t value = 0;
    execute_atomic(address, [&] { value = *address; });
    suspend(&warps_[random() % warps_.size()]);
    if (random() % 64 == 0) {
        cluster_.land_one();
    }
    return value;
}

void Block::check_sums(char const *what, float const *address, int bytes) {
    if (reinterpret_cast<uint64_t>(address) % static_cast<uint64_t>(bytes) != 0) {
        fail(kMisalignedAddress, std::string(what) + " of " + std::to_string(bytes) +
                                     " bytes at a global address that is no multiple of it");
    }
    if (!state().regions.empty() && region_of(address, bytes) < 0) {
        fail(kIllegalAddress, std::string(what) + " outside every tensor");
    }
}

void Block::store_in_turn(float *address, float const *values, int count) {
    check_sums("a store", address, count * static_cast<int>(sizeof *values));
    execute_atomic(address, [&] { std::copy(values, values + count, address); }, false);
}

void Block::reduce_add(float *address, float const *values, int count) {
    int const bytes = count * static_cast<int>(sizeof *values);
    check_sums("red", address, bytes);
    auto const add = [&] {
        for (int i = 0; i < count; ++i) {
            address[i] += values[i];
        }
    };
    execute_atomic(address, add, false);
    counters_.reduction_bytes += static_cast<uint64_t>(bytes);
}

void Block::count_step() {
    if (++steps_ > settings_.max_steps * kWarpSize) {
        fail(kLaunchTimeout, "the block exceeds its budget of warp-wide instructions");
    }
}

void Block::suspend(Warp *preferred) {
    if (settings_.copy_mode == CopyMode::random) {
        land_at_random();
        sm90_.land_at_random();
    }
    Lane &self = *lane_;
    Lane *const next = pick_or_land(preferred != nullptr ? preferred : &warps_[self.warp]);
    if (next == nullptr) {
        fail(kLaunchFailure, "deadlock: " + cluster_.describe());
    }
    if (next != &self) {
        lane_ = next;
        fiber_switch(next->fiber);
        entered(self);
    }
}

void Block::exit_lane() {
    Lane &self = *lane_;
    Fiber *next = nullptr;
    {
        tsan::Unwatched const unwatched;
        Warp &warp = warps_[self.warp];
        self.waiting = Waiting::exited;
        warp.alive &= ~(1u << self.lane);
        warp.ready &= ~(1u << self.lane);
        --alive_;
        check_not_awaited(self);
        cluster_.exited(*this, self);
        sm90_.check_exit(self, alive_ == 0);
        if (warp.alive == 0) {
            warp.log.flush(counters_);
        }
        if (alive_ > 0) {
            Lane *const other = pick_or_land(&warp);
            if (other == nullptr) {
                fail(kLaunchFailure, "deadlock: " + cluster_.describe());
            }
            lane_ = other;
            next = &lane_->fiber;
        } else {
            next = &cluster_.after(*this);
        }
    }
    tsan::release(&block_end_tag_);
    fiber_switch(*next);
    __builtin_unreachable();
}

void Block::check_not_awaited(Lane const &lane) {
    Warp const &warp = warps_[lane.warp];
    for (Group const &group : warp.groups) {
        if (group.mask >> lane.lane & 1) {
            fail(kLaunchFailure, "missing lane: the thread exited while lanes " +
                                     hex(group.arrived) + " of its warp wait for it at " +
                                     name_of(group.instruction));
        }
    }
    for (int id = 0; id < kBarriers; ++id) {
        // A barrier with arrivals but without waiters may stay incomplete.
        if (!barriers_[id].waiters.empty()) {
            check_can_complete(id);
        }
    }
}

void Block::check_can_complete(int id) {
    Barrier const &barrier = barriers_[id];
    // Threads that have arrived without waiting may arrive again, or exit.
    int const can_still_arrive = alive_ - static_cast<int>(barrier.waiters.size());
    if (can_still_arrive < barrier.expected - barrier.arrived) {
        fail(kLaunchFailure, "barrier divergence: barrier " + std::to_string(id) + " waits for " +
                                 std::to_string(barrier.expected) + " threads, " +
                                 std::to_string(barrier.arrived) + " have arrived and " +
                                 std::to_string(lanes_.size() - alive_) + " have exited");
    }
}

void Block::converge(WarpInstruction instruction, uint32_t mask, void *arguments, Execute execute) {
    tsan::Unwatched const unwatched;
    Lane &self = *lane_;
    Warp &warp = warps_[self.warp];
    uint32_t const bit = 1u << self.lane;
    if (!(mask & bit)) {
        fail(kLaunchFailure, std::string("the lane is not in its own mask ") + hex(mask) + " of " +
                                 name_of(instruction));
    }
    if (uint32_t const missing = mask & ~warp.alive; missing != 0) {
        fail(kLaunchFailure, std::string("missing lanes ") + hex(missing) + " at " +
                                 name_of(instruction) + ": they exited or do not exist");
    }
    count_step();
    auto group = std::find_if(warp.groups.begin(), warp.groups.end(), [&](Group const &g) {
        return g.instruction == instruction && g.mask == mask;
    });
    if (group == warp.groups.end()) {
        warp.groups.push_back({instruction, mask, 0});
        group = warp.groups.end() - 1;
    }
    group->arrived |= bit;
    self.arguments = arguments;
    if (group->arrived != mask) {
        self.instruction = instruction;
        park(Waiting::warp_instruction);
        return;
    }
    warp.groups.erase(group);
    if (mask == warp.full) {
        warp.log.flush(counters_);
    }
    execute(*this, warp, mask);
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
        wake(*warp.lanes[std::countr_zero(rest)]);
    }
    // So that the lane that completes the instruction is not always the first to continue.
    yield_at_random();
}

void Block::barrier_sync(int id, int threads, bool wait) {
    tsan::Unwatched const unwatched;
    Lane &self = *lane_;
    int const expected = threads == 0 ? static_cast<int>(lanes_.size()) : threads;
    std::string const name = "barrier " + std::to_string(id);
    if (id < 0 || id >= kBarriers || expected > static_cast<int>(lanes_.size()) ||
        (threads != 0 && threads % kWarpSize != 0)) {
        fail(kLaunchFailure,
             name + " with " + std::to_string(threads) +
                 " threads: ids are 0 to 15, counts multiples of 32 up to the block");
    }
    Barrier &barrier = barriers_[id];
    if (barrier.arrived > 0 && barrier.expected != expected) {
        fail(kLaunchFailure, name + " expects " + std::to_string(barrier.expected) +
                                 " threads, but one arrives that expects " +
                                 std::to_string(expected));
    }
    barrier.expected = expected;
    if (wait || !barrier.waiters.empty()) {
        check_can_complete(id);
    }
    char *const tag = &barrier.tags[barrier.phase & 1];
    tsan::release(tag);
    if (sm90_.active()) {
        barrier.knowledge.join(self.knowledge);
    }
    if (++barrier.arrived == expected) {
        ++(threads == 0 ? counters_.block_barriers : counters_.named_barriers);
        ++barrier.phase;
        barrier.arrived = 0;
        for (Lane *const waiter : barrier.waiters) {
            waiter->knowledge.join(barrier.knowledge);
            wake(*waiter);
        }
        barrier.waiters.clear();
        flush_logs();
        if (wait) {
            self.knowledge.join(barrier.knowledge);
        }
        barrier.knowledge = {};
        if (wait) {
            tsan::acquire(tag);
            suspend();
        }
    } else if (wait) {
        self.barrier = id;
        barrier.waiters.push_back(&self);
        park(Waiting::barrier);
        tsan::acquire(tag);
    }
}

void Block::warp_sync(uint32_t mask) {
    Warp &warp = warps_[lane_->warp];
    char *const tag = &warp.sync_tags[warp.sync_phase & 1];
    tsan::release(tag);
    converge(WarpInstruction::warp_sync, mask, nullptr, [](Block &block, Warp &w, uint32_t lanes) {
        ++w.sync_phase;
        ++block.counters_.warp_barriers;
        if (block.sm90_.active()) {
            Knowledge all;
            for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
                all.join(w.lanes[std::countr_zero(rest)]->knowledge);
            }
            for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
                w.lanes[std::countr_zero(rest)]->knowledge = all;
            }
        }
    });
    tsan::acquire(tag);
}

void Block::flush_logs() {
    for (Warp &warp : warps_) {
        warp.log.flush(counters_);
    }
}

std::string Block::where(Lane const &lane) const {
    return "block (" + std::to_string(block_.x) + ", " + std::to_string(block_.y) + ", " +
           std::to_string(block_.z) + "), warp " + std::to_string(lane.warp) + ", lane " +
           std::to_string(lane.lane);
}

std::string Block::state_of(Lane const &lane) const {
    switch (lane.waiting) {
        case Waiting::nothing:
            return "can go on";
        case Waiting::warp_instruction:
            return std::string("wait at ") + name_of(lane.instruction);
        case Waiting::barrier:
            return "wait at barrier " + std::to_string(lane.barrier);
        case Waiting::mbarrier:
            return "wait for parity " + std::to_string(lane.parity) + " of mbarrier " +
                   std::to_string(lane.barrier);
        case Waiting::warpgroup:
            return "wait for their warpgroup at wgmma.wait_group or setmaxnreg";
        case Waiting::registers:
            return "wait for registers at setmaxnreg.inc";
        case Waiting::cluster:
            return "wait at barrier.cluster";
        case Waiting::dependency:
            return "wait for the previous kernel at griddepcontrol.wait";
        case Waiting::exited:
            return "have exited";
    }
    return "";
}

std::string Block::describe_waiting() const {
    std::string text;
    for (size_t w = 0; w < warps_.size(); ++w) {
        std::vector<std::pair<std::string, uint32_t>> states;
        for (uint32_t rest = warps_[w].full; rest != 0; rest &= rest - 1) {
            Lane const &lane = *warps_[w].lanes[std::countr_zero(rest)];
            std::string const state = state_of(lane);
            auto const known = std::find_if(states.begin(), states.end(),
                                            [&](auto const &s) { return s.first == state; });
            if (known == states.end()) {
                states.emplace_back(state, 1u << lane.lane);
            } else {
                known->second |= 1u << lane.lane;
            }
        }
        for (auto const &[state, lanes] : states) {
            text += (text.empty() ? "warp " : "; warp ") + std::to_string(w) + " lanes " +
                    hex(lanes) + " " + state;
        }
    }
    for (int id = 0; id < kBarriers; ++id) {
        if (barriers_[id].arrived > 0) {
            text += "; barrier " + std::to_string(id) + ": " +
                    std::to_string(barriers_[id].arrived) + " of " +
                    std::to_string(barriers_[id].expected) + " arrived";
        }
    }
    return text + sm90_.describe();
}

void Block::fail(int code, std::string const &message) {
    Block &running = current();
    running.give_up(code, running.where(*running.lane_) + ": " + message);
}

void Block::give_up(int code, std::string const &message) {
    Block &running = current();
    running.error_code_ = code;
    running.error_ = message;
    running.cluster_.abandon(running);
}

bool Block::can_go_on() const {
    return std::any_of(warps_.begin(), warps_.end(), [](Warp const &w) { return w.ready != 0; });
}

}  // namespace sim
