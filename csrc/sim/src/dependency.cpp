#include "dependency.h"

#include <algorithm>

#include "block.h"
#include "tsan.h"
#include "workers.h"

namespace sim {

namespace {

std::byte poison_at(size_t i) { return std::byte(i % 2 == 0 ? kPoison & 0xFF : kPoison >> 8); }

std::byte *bytes_of(Region const &region) { return const_cast<std::byte *>(region.first); }

}  // namespace

Dependency::Dependency(bool dependent, uint64_t wave, CopyMode mode) : dependent_(dependent) {
    if (!dependent || mode == CopyMode::eager) {
        return;
    }
    over_ = false;
    running_.assign(wave, true);
    count_running_ = wave;
    for (Region const &region : state().regions) {
        contents_.emplace_back(region.first, region.first + region.bytes);
        for (size_t i = 0; i < region.bytes; ++i) {
            bytes_of(region)[i] = poison_at(i);
        }
    }
}

Dependency::~Dependency() { end(); }

void Dependency::await(uint64_t unit, Workers &workers) {
    leave(unit);
    while (!over()) {
        workers.switch_to(static_cast<uint64_t>(std::find(running_.begin(), running_.end(), true) -
                                                running_.begin()));
    }
}

void Dependency::leave(uint64_t unit) {
    if (unit >= running_.size() || !running_[unit]) {
        return;
    }
    running_[unit] = false;
    if (--count_running_ == 0) {
        end();
    }
}

// Ends the previous kernel: checks the tensors for early writes, then restores their contents.
void Dependency::end() {
    if (over()) {
        return;
    }
    tsan::Unwatched const unwatched;
    for (size_t r = 0; r < contents_.size(); ++r) {
        Region const &region = state().regions[r];
        for (size_t i = 0; i < region.bytes && early_write_.empty(); ++i) {
            if (region.first[i] != poison_at(i)) {
                early_write_ =
                    "programmatic dependent launch: byte " + std::to_string(i) + " of " +
                    region.name +
                    " was written before griddepcontrol.wait, while the previous kernel may "
                    "use it";
            }
        }
        std::copy(contents_[r].begin(), contents_[r].end(), bytes_of(region));
    }
    over_ = true;
}

void Block::dependency_wait() {
    tsan::Unwatched const unwatched;
    if (!dependency_.dependent()) {
        return;
    }
    count_step();
    dependency_.awaited = true;
    while (!dependency_.over()) {
        park(Waiting::dependency);
    }
    lane_->knowledge.dependency = true;
}

void Block::check_dependency(char const *what, void const *address) {
    if (!dependency_.dependent() || lane_->knowledge.dependency) {
        return;
    }
    int const region = region_of(address, 1);
    fail(kLaunchFailure,
         std::string("programmatic dependent launch: ") + what + " of " +
             (region < 0 ? "global memory" : state().regions[region].name) +
             " before griddepcontrol.wait: the thread is not ordered after the end of the previous "
             "kernel");
}

bool Block::end_dependency() {
    auto const waits = [](Lane const &lane) { return lane.waiting == Waiting::dependency; };
    if (std::none_of(lanes_.begin(), lanes_.end(), waits)) {
        return false;
    }
    Block &running = current();
    Lane &self = *running.lane_;
    dependency_.await(cluster_.unit(), workers_);
    running.entered(self);
    if (!dependency_.early_write().empty()) {
        // Names no thread: the writing one is unknown, and is not the running one.
        give_up(kLaunchFailure, dependency_.early_write());
    }
    for (Lane &lane : lanes_) {
        if (waits(lane)) {
            wake(lane);
        }
    }
    return true;
}

}  // namespace sim
