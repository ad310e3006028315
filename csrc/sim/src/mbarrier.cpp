// mbarriers: phases, arrivals, transaction bytes, and the happens-before edges that they create.
#include <cstring>

#include "block.h"
#include "sm90.h"
#include "tsan.h"

namespace sim {

namespace {

constexpr uint32_t kMaxArrivals = (1u << 20) - 1;         // PTX ISA: limit of arrivals and tx-count
constexpr uint64_t kBarrierMark = 0x7FBF'6D62'6172'7FBF;  // stored instead of the hardware's state

}  // namespace

void Sm90::start() {
    active_ = false;
    mbarriers_.clear();
    copies_.clear();
    arrivals_.clear();
    queues_.clear();
    warpgroups_.clear();
    polls_ = last_poll_step_ = 0;
}

void Sm90::activate() {
    if (active_) {
        return;
    }
    active_ = true;
    size_t const bytes = block_.launch_.smem_bytes;
    size_t const granules = bytes / kGranule + 1;
    barrier_at_.assign(bytes / 8 + 1, -1);
    writers_.assign(granules, {-1, 0, 0, false});
    readers_.assign(granules, {});
    loads_.assign(granules, {});
    async_view_.resize(bytes);
    for (size_t i = 0; i + 1 < bytes; i += sizeof kPoison) {
        std::memcpy(&async_view_[i], &kPoison, sizeof kPoison);
    }
    mbarriers_.reserve(kMbarriers);
    size_t const threads = block_.lanes_.size();
    warpgroups_.resize(threads / kWarpgroupSize);
    // Registers per thread at the launch: an equal share of the register file's 65536, rounded down
    // to a multiple of 8. But ptxas takes no more than the kernel's largest setmaxnreg, which is
    // 240 in the kernels whose share is larger.
    int const sharing = static_cast<int>(threads) * state().settings.min_ctas;
    int const registers = std::min(65536 / sharing / 8 * 8, 240);
    for (size_t i = 0; i < warpgroups_.size(); ++i) {
        warpgroups_[i].index = static_cast<int>(i);
        warpgroups_[i].registers = warpgroups_[i].wanted = registers;
    }
    free_registers_ = 0;
}

std::string Sm90::name_of(int barrier) const {
    return "mbarrier " + std::to_string(barrier) + " (at byte " +
           std::to_string(mbarriers_[barrier].offset) +
           (block_.cluster_.size() > 1 ? " of rank " + std::to_string(block_.rank_) : "") + ")";
}

BlockKnowledge &Sm90::known() { return Block::current().lane().knowledge.of(block_.rank_); }

Mbarrier &Sm90::find(void const *barrier, char const *what) {
    activate();
    uint64_t const offset = block_.smem_offset(barrier, 8, 8, what);
    int const index = barrier_at_[offset / 8];
    if (index < 0) {
        block_.fail(kLaunchFailure, std::string(what) + ": there is no mbarrier at byte " +
                                        std::to_string(offset) + " of shared memory");
    }
    if (std::memcmp(barrier, &kBarrierMark, sizeof kBarrierMark) != 0) {
        block_.fail(kLaunchFailure,
                    std::string(what) + ": " + name_of(index) + " has been overwritten");
    }
    if (known().phases[index] == 0) {
        block_.fail(kLaunchFailure, std::string(what) + ": the thread is not ordered after the " +
                                        "initialisation of " + name_of(index));
    }
    return mbarriers_[index];
}

void Sm90::mbarrier_init(void *barrier, uint32_t arrivals) {
    tsan::Unwatched const unwatched;
    activate();
    uint64_t const offset = block_.smem_offset(barrier, 8, 8, "mbarrier.init");
    if (arrivals == 0 || arrivals > kMaxArrivals) {
        block_.fail(kLaunchFailure, "mbarrier.init: " + std::to_string(arrivals) +
                                        " arrivals, the count is 1 to 2^20 - 1");
    }
    if (barrier_at_[offset / 8] >= 0) {
        block_.fail(kLaunchFailure,
                    "mbarrier.init: " + name_of(barrier_at_[offset / 8]) + " is there already");
    }
    if (mbarriers_.size() == kMbarriers) {
        block_.fail(kNotSupported, "not covered: more than 48 mbarriers in a block");
    }
    size_t const index = mbarriers_.size();
    barrier_at_[offset / 8] = static_cast<int16_t>(index);
    mbarriers_.push_back({.offset = offset,
                          .arrivals = static_cast<int>(arrivals),
                          .pending = static_cast<int>(arrivals),
                          .tx_count = 0,
                          .phase = 1,
                          .under_way = 0,
                          .creator = &block_.lane(),
                          .waiters = {},
                          .incoming = {},
                          .published = {},
                          .tags = {}});
    known().phases[index] = 1;
    std::memcpy(barrier, &kBarrierMark, sizeof kBarrierMark);
}

void Sm90::mbarrier_fence_init() {
    for (Mbarrier &barrier : mbarriers_) {
        if (barrier.creator == &block_.lane()) {
            barrier.creator = nullptr;
        }
    }
}

void Sm90::mbarrier_arrive(void *address, uint32_t bytes) {
    tsan::Unwatched const unwatched;
    Mbarrier &barrier = find(address, "mbarrier.arrive");
    tsan::release(&barrier.tags[barrier.phase & 1]);
    barrier.incoming.join(Block::current().lane().knowledge);
    arrive(barrier, bytes, "mbarrier.arrive");
}

void Sm90::arrive(Mbarrier &barrier, uint32_t bytes, char const *what) {
    auto const index = static_cast<int>(&barrier - &mbarriers_[0]);
    if (barrier.pending == 0) {
        block_.fail(kLaunchFailure, std::string(what) + ": one arrival more than the " +
                                        std::to_string(barrier.arrivals) + " of a phase of " +
                                        name_of(index));
    }
    barrier.tx_count += bytes;
    if (barrier.tx_count > kMaxArrivals) {
        block_.fail(kLaunchFailure,
                    "mbarrier.expect_tx: more than 2^20 - 1 bytes due at " + name_of(index));
    }
    --barrier.pending;
    ++block_.counters_.mbarrier_arrivals;
    complete(barrier);
}

void Sm90::complete(Mbarrier &barrier) {
    auto const index = static_cast<int>(&barrier - &mbarriers_[0]);
    // In a cluster, bytes from another block may complete before this block's expect_tx.
    bool const may_expect_more = barrier.pending > 0 && block_.cluster_.size() > 1;
    if (barrier.tx_count < 0 && !may_expect_more) {
        block_.fail(kLaunchFailure, "transaction bytes: copies bring " +
                                        std::to_string(-barrier.tx_count) +
                                        " bytes more than phase " + std::to_string(barrier.phase) +
                                        " of " + name_of(index) + " expects");
    }
    if (barrier.pending > 0 || barrier.tx_count > 0) {
        return;
    }
    if (barrier.under_way > 0) {
        block_.fail(kLaunchFailure, "transaction bytes: phase " + std::to_string(barrier.phase) +
                                        " of " + name_of(index) + " ends while " +
                                        std::to_string(barrier.under_way) +
                                        " bytes of its copies are under way");
    }
    ++barrier.phase;
    barrier.pending = barrier.arrivals;
    barrier.published.join(barrier.incoming);
    for (Lane *const waiter : barrier.waiters) {
        block_.wake(*waiter);
    }
    barrier.waiters.clear();
}

void Sm90::mbarrier_wait(void *address, uint32_t parity) {
    tsan::Unwatched const unwatched;
    Mbarrier &barrier = find(address, "mbarrier.try_wait");
    auto const index = static_cast<int>(&barrier - &mbarriers_[0]);
    Lane &self = block_.lane();
    block_.count_step();
    // The parity is tested again each time the thread is scheduled. A thread that is not scheduled
    // while two phases complete waits for a third, as on the chip.
    while (((barrier.phase - 1) & 1) == (parity & 1)) {
        barrier.waiters.push_back(&self);
        self.barrier = index;
        self.parity = static_cast<int>(parity & 1);
        block_.park(Waiting::mbarrier);
    }
    acquire_phase(barrier);
    block_.yield_at_random();
}

void Sm90::acquire_phase(Mbarrier &barrier) {
    tsan::acquire(&barrier.tags[(barrier.phase - 1) & 1]);
    block_.lane().knowledge.join(barrier.published);
    uint32_t &phase = known().phases[static_cast<size_t>(&barrier - &mbarriers_[0])];
    phase = std::max(phase, barrier.phase);
}

// While the phase is incomplete each test runs other lanes and, sometimes, lands a copy: a polling
// thread must not starve the copies and the other warps.
bool Sm90::mbarrier_test(void *address, uint32_t parity) {
    tsan::Unwatched const unwatched;
    Mbarrier &barrier = find(address, "mbarrier.test_wait");
    block_.count_step();
    polls_ = block_.steps_ == last_poll_step_ + 1 ? polls_ + 1 : 1;
    last_poll_step_ = block_.steps_;
    auto const waits = [&] { return ((barrier.phase - 1) & 1) == (parity & 1); };
    if (waits()) {  // draws any warp, so that one that has to arrive is scheduled
        block_.suspend(&block_.warps_[block_.random() % block_.warps_.size()]);
    }
    if (waits() && block_.random() % 64 == 0 && !block_.cluster_.land_one()) {
        block_.cluster_.end_dependency();
    }
    if (waits()) {
        // In a cluster the thread may wait for another block, whose steps are not in steps_.
        if (polls_ > kMaxPolls && copies_.empty() && arrivals_.empty() &&
            block_.cluster_.size() == 1) {
            block_.fail(kLaunchFailure, "deadlock: " + std::to_string(kMaxPolls) +
                                            " tests of mbarriers in a row without progress; " +
                                            block_.cluster_.describe());
        }
        return false;
    }
    acquire_phase(barrier);
    return true;
}

void Sm90::mbarrier_transaction(void *address, int64_t bytes) {
    tsan::Unwatched const unwatched;
    Mbarrier &barrier = find(address, bytes > 0 ? "mbarrier.expect_tx" : "mbarrier.complete_tx");
    barrier.tx_count += bytes;
    complete(barrier);
}

Knowledge Sm90::initialisations() {
    Knowledge released;
    BlockKnowledge &own = released.of(block_.rank_);
    own.runs = true;
    for (size_t i = 0; i < mbarriers_.size(); ++i) {
        if (mbarriers_[i].creator == nullptr) {
            own.phases[i] = std::min(known().phases[i], 1u);
        }
    }
    return released;
}

void Sm90::check_exit(Lane const &lane, bool last) {
    if (!active_) {
        return;
    }
    auto const group = static_cast<size_t>(lane.index) / kWarpgroupSize;
    if (group < warpgroups_.size() && warpgroups_[group].arrived > 0) {
        block_.fail(kLaunchFailure, "missing thread: it exited while " +
                                        std::to_string(warpgroups_[group].arrived) +
                                        " of warpgroup " + std::to_string(group) + " wait for it");
    }
    check_stores(lane);
    if (!last) {
        return;
    }
    if (!copies_.empty()) {
        block_.fail(kLaunchFailure,
                    "the block ends while copies are under way for " + name_of(copies_[0].barrier));
    }
    if (!arrivals_.empty()) {
        block_.fail(kLaunchFailure, "the block ends while cp.async.mbarrier.arrive is pending at " +
                                        name_of(arrivals_[0].barrier));
    }
    for (Warpgroup const &wg : warpgroups_) {
        if (!wg.multiplications.empty()) {
            block_.fail(kLaunchFailure, "the block ends while wgmmas of warpgroup " +
                                            std::to_string(wg.index) + " are in flight");
        }
    }
    finish();
}

std::string Sm90::describe() const {
    std::string text;
    for (size_t i = 0; i < mbarriers_.size(); ++i) {
        Mbarrier const &b = mbarriers_[i];
        text += "; " + name_of(static_cast<int>(i)) + ": in phase " + std::to_string(b.phase) +
                ", " + std::to_string(b.arrivals - b.pending) + " of " +
                std::to_string(b.arrivals) + " arrived, " + std::to_string(b.tx_count) +
                " bytes due, " + std::to_string(b.waiters.size()) + " threads wait";
    }
    for (Warpgroup const &wg : warpgroups_) {
        text += "; warpgroup " + std::to_string(wg.index) + ": " + std::to_string(wg.registers) +
                " registers" +
                (wg.wanted > wg.registers ? ", wants " + std::to_string(wg.wanted) : "") + ", " +
                std::to_string(wg.multiplications.size()) + " wgmmas in flight";
    }
    return text + (active_ ? "; " + std::to_string(free_registers_) + " registers free" : "");
}

}  // namespace sim
