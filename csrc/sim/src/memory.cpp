// Shared memory, asynchronous copies and the checks of ordinary accesses.
#include <algorithm>
#include <cstring>

#include "block.h"
#include "tsan.h"

namespace sim {

uint64_t Block::smem_offset(void const *address, int bytes, int alignment, char const *what) {
    auto const *const first = static_cast<std::byte const *>(address);
    // As integers: the difference of pointers into different objects is undefined.
    uint64_t const offset = reinterpret_cast<uint64_t>(first) - reinterpret_cast<uint64_t>(smem_);
    if (offset > launch_.smem_bytes || launch_.smem_bytes - offset < static_cast<size_t>(bytes)) {
        fail(kIllegalAddress, std::string(what) + ": " + std::to_string(bytes) +
                                  " bytes at offset " + std::to_string(int64_t(offset)) +
                                  " lie outside the block's " + std::to_string(launch_.smem_bytes) +
                                  " bytes of dynamic shared memory");
    }
    if (offset % alignment != 0) {
        fail(kMisalignedAddress, std::string(what) + ": shared memory offset " +
                                     std::to_string(offset) + " is not a multiple of " +
                                     std::to_string(alignment));
    }
    return offset;
}

int Block::region_of(void const *address, int bytes) const {
    auto const &regions = state().regions;
    auto const at = reinterpret_cast<uint64_t>(address);
    for (size_t i = 0; i < regions.size(); ++i) {
        uint64_t const offset = at - reinterpret_cast<uint64_t>(regions[i].first);
        if (offset < regions[i].bytes && regions[i].bytes - offset >= size_t(bytes)) {
            return static_cast<int>(i);
        }
    }
    return -1;
}

void Block::note_access(void const *address, int bytes, bool write, void const *site) {
    tsan::Unwatched const unwatched;
    auto const at = reinterpret_cast<uint64_t>(address);
    if (stacks_.hold(address)) {
        return;
    }
    bool const shared = at - reinterpret_cast<uint64_t>(smem_) < kMaxSmemBytes;
    char const *const what = write ? "store" : "load";
    uint64_t offset = at;
    if (shared) {
        offset = smem_offset(address, bytes, bytes, what);
        sm90_.check_landed(offset, static_cast<uint64_t>(bytes), what);
        if (!write) {
            sm90_.note_load(offset, static_cast<uint64_t>(bytes), 1u << lane_->lane);
        }
    } else if (Block *const owner = cluster_.size() > 1 ? owner_of(address) : nullptr;
               owner != nullptr) {
        owner->smem_offset(address, bytes, bytes, what);
        cluster_.note_access(*owner);
        counters_.cluster_bytes += static_cast<uint64_t>(bytes);
        return;
    } else {
        if (at % bytes != 0) {
            fail(kMisalignedAddress, std::string(what) + " of " + std::to_string(bytes) +
                                         " bytes at a global address that is no multiple of it");
        }
        if (!state().regions.empty() && region_of(address, bytes) < 0) {
            fail(kIllegalAddress, std::string(what) + " of " + std::to_string(bytes) +
                                      " bytes outside every tensor");
        }
        check_dependency(what, address);
    }
    AccessKind const kind = shared ? (write ? AccessKind::shared_store : AccessKind::shared_load)
                                   : (write ? AccessKind::global_store : AccessKind::global_load);
    warp().log.note(kind, site, lane_->lane, bytes, offset, 0, false);
}

void Block::copy_issue(std::byte *smem, std::byte const *gmem, int bytes, bool valid,
                       void const *site) {
    tsan::Unwatched const unwatched;
    uint64_t const offset = smem_offset(smem, bytes, bytes, "cp.async");
    auto const source = reinterpret_cast<uint64_t>(gmem);
    if (valid) {
        if (source % bytes != 0) {
            fail(kMisalignedAddress, "cp.async of " + std::to_string(bytes) +
                                         " bytes from a global address that is no multiple of it");
        }
        int const region = region_of(gmem, bytes);
        if (region < 0 && !state().regions.empty()) {
            fail(kIllegalAddress, "cp.async reads outside every tensor");
        }
        check_dependency("cp.async", gmem);
        if (settings_.trace && region >= 0) {
            trace_.push_back({linear_index_, static_cast<uint64_t>(region),
                              source - reinterpret_cast<uint64_t>(state().regions[region].first)});
        }
    }
    sm90_.note_copy(offset, static_cast<uint64_t>(bytes));
    Lane &self = *lane_;
    warp().log.note(AccessKind::cp_async, site, self.lane, bytes, offset, source, valid);
    AsyncCopy const copy{smem, gmem, bytes, valid, self.copy_group, self.copies_issued++};
    tsan::release(&self.issue_tags[self.copy_group % self.issue_tags.size()]);
    if (settings_.copy_mode == CopyMode::eager) {
        land(self, copy);
        return;
    }
    // Until the copy has been waited for, the contents of its destination are undefined.
    for (int i = 0; i < bytes; i += 2) {
        std::memcpy(smem + i, &kPoison, sizeof kPoison);
    }
    self.copies.push_back(copy);
    if (settings_.copy_mode == CopyMode::random) {
        land_at_random();
    }
}

void Block::land(Lane &lane, AsyncCopy const &copy) {
    size_t const tag = copy.group % lane.issue_tags.size();
    tsan::as_agent(lane.copy_agent, [&] {
        tsan::acquire(&lane.issue_tags[tag]);
        if (copy.valid) {
            tsan::read(copy.gmem, copy.bytes);
        }
        tsan::write(copy.smem, copy.bytes);
        tsan::release(&lane.done_tags[tag]);
    });
    tsan::Unwatched const unwatched;
    if (copy.valid) {
        std::memcpy(copy.smem, copy.gmem, copy.bytes);
    } else {
        std::memset(copy.smem, 0, copy.bytes);
    }
}

void Block::land_at_random() {
    uint64_t const draw = random();
    Lane &lane = lanes_[draw % lanes_.size()];
    if (lane.copies.empty() || (draw >> 32) % 2 == 0) {
        return;
    }
    size_t const chosen = (draw >> 40) % lane.copies.size();
    land(lane, lane.copies[chosen]);
    lane.copies.erase(lane.copies.begin() + static_cast<ptrdiff_t>(chosen));
}

void Block::copy_commit() { ++lane_->copy_group; }

void Block::copy_wait_group(uint64_t pending) {
    uint64_t const committed = lane_->copy_group;
    copy_wait_below(committed > pending ? committed - pending : 0);
}

void Block::copy_wait_all() { copy_wait_below(lane_->copy_group + 1); }

void Block::land_copies(Lane &lane, std::function<bool(AsyncCopy const &)> const &covered) {
    auto const rest = std::stable_partition(lane.copies.begin(), lane.copies.end(), covered);
    if (settings_.copy_mode == CopyMode::random) {
        for (auto it = lane.copies.begin(); it < rest; ++it) {
            std::iter_swap(it, it + static_cast<ptrdiff_t>(random() % uint64_t(rest - it)));
        }
    }
    for (auto it = lane.copies.begin(); it < rest; ++it) {
        land(lane, *it);
    }
    lane.copies.erase(lane.copies.begin(), rest);
}

void Block::copy_wait_below(uint64_t group) {
    tsan::Unwatched const unwatched;
    Lane &self = *lane_;
    land_copies(self, [&](AsyncCopy const &copy) { return copy.group < group; });
    for (uint64_t g = self.copy_groups_done; g < group; ++g) {
        tsan::acquire(&self.done_tags[g % self.done_tags.size()]);
    }
    // The open group may get more copies, so it does not count as waited for.
    self.copy_groups_done = std::max(self.copy_groups_done, std::min(group, self.copy_group));
}

}  // namespace sim
