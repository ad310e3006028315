// cp.async into buffers that wgmma and TMA use, and cp.async.mbarrier.arrive.noinc.
#include <algorithm>

#include "block.h"
#include "sm90.h"
#include "tsan.h"

namespace sim {

void Sm90::note_copy(uint64_t offset, uint64_t bytes) {
    if (!active_) {
        return;
    }
    check_free(offset, bytes, "cp.async", false);
    block_.lane().copied.push_back(offset / kGranule);
}

// Whoever reads the copied bytes must wait for the phase in which this arrival counts: the current
// one, plus one for each of the lane's earlier arrivals at this mbarrier that are still pending.
void Sm90::mbarrier_arrive_copies(void *address) {
    tsan::Unwatched const unwatched;
    Mbarrier &barrier = find(address, "cp.async.mbarrier.arrive");
    auto const index = static_cast<int>(&barrier - &mbarriers_[0]);
    Lane &self = block_.lane();
    auto const to_come = std::count_if(arrivals_.begin(), arrivals_.end(), [&](auto const &other) {
        return other.lane == &self && other.barrier == index;
    });
    uint32_t const phase = barrier.phase + static_cast<uint32_t>(to_come);
    for (uint64_t const granule : self.copied) {
        writers_[granule] = {static_cast<int16_t>(index), 0, phase, true};
    }
    self.copied.clear();
    arrivals_.push_back({&self, self.copies_issued, index});
    if (block_.settings_.copy_mode == CopyMode::eager) {
        fire(arrivals_.size() - 1);
    }
}

// Lands the copies that the arrival covers, then arrives. That orders these copies before the
// threads that wait for the phase, and nothing else that the lane has done.
void Sm90::fire(size_t index) {
    CopyArrival const arrival = arrivals_[index];
    arrivals_.erase(arrivals_.begin() + static_cast<ptrdiff_t>(index));
    block_.land_copies(*arrival.lane,
                       [&](AsyncCopy const &copy) { return copy.number < arrival.copies; });
    tsan::Unwatched const unwatched;
    Mbarrier &barrier = mbarriers_[arrival.barrier];
    tsan::as_agent(arrival.lane->copy_agent,
                   [&] { tsan::release(&barrier.tags[barrier.phase & 1]); });
    arrive(barrier, 0, "cp.async.mbarrier.arrive");
}

}  // namespace sim
