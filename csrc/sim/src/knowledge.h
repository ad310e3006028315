// Vector clocks: which events happen before the next instruction of a CUDA thread. Arrivals and
// waits at barriers of any kind join the clocks of the threads.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace sim {

inline constexpr int kMbarriers = 48;  // per block
inline constexpr int kWarps = 32;
inline constexpr int kStoreQueues = 16;  // threads of a block that may issue TMA stores

// mine[i] = choice(mine[i], theirs[i]). The arrays must be distinct: without __restrict the
// compiler does not vectorise the loop.
template <size_t kCount, class Choice>
void choose(std::array<uint32_t, kCount> &mine, std::array<uint32_t, kCount> const &theirs,
            Choice const &choice) {
    uint32_t *__restrict const to = mine.data();
    uint32_t const *__restrict const from = theirs.data();
    for (size_t i = 0; i < kCount; ++i) {
        to[i] = choice(to[i], from[i]);
    }
}

// The clock of events in one block, each a count from 0:
// - phases: the current phase of each mbarrier. Phase 1 begins with the initialisation.
// - fenced: for each mbarrier, the phase that was current at the latest fence.proxy.async.
// - retired: for each warp, the wgmmas that it has waited for.
// - stores: for each queue, the TMA stores that have read their boxes.
struct BlockKnowledge {
    std::array<uint32_t, kMbarriers> phases{}, fenced{};
    std::array<uint32_t, kWarps> retired{};
    std::array<uint32_t, kStoreQueues> stores{};
    bool runs = false;  // the block has started; checked for the other blocks of a cluster

    void join(BlockKnowledge const &other) {
        combine(other, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
        runs |= other.runs;
    }
    // Takes the minimum, so that only the events known to both are left.
    void meet(BlockKnowledge const &other) {
        combine(other, [](uint32_t a, uint32_t b) { return a < b ? a : b; });
        runs &= other.runs;
    }

  private:
    template <class Choice>
    void combine(BlockKnowledge const &other, Choice const &choice) {
        choose(phases, other.phases, choice);
        choose(fenced, other.fenced, choice);
        choose(retired, other.retired, choice);
        choose(stores, other.stores, choice);
    }
};

// The number of accesses of each warp of a block to other blocks' shared memory.
using Accesses = std::array<uint32_t, kWarps>;
// For each lane of a warp, how many fence.proxy.async it has executed that followed a load.
using LaneFences = std::array<uint32_t, 32>;

// LaneFences by rank and warp; a missing element is 0. Threads share these vectors, which are never
// modified, so that a join that all threads of a warp repeat is computed once.
class Fences {
  public:
    uint32_t of(int rank, int warp, int lane) const {
        size_t const at = place(rank, warp);
        return all_ == nullptr || all_->size() <= at ? 0 : (*all_)[at][lane];
    }
    void add(int rank, int warp, int lane) {
        size_t const at = place(rank, warp);
        auto mine = all_ == nullptr ? std::make_shared<All>() : std::make_shared<All>(*all_);
        mine->resize(std::max(mine->size(), at + 1));
        ++(*mine)[at][lane];
        all_ = std::move(mine);
    }
    void join(Fences const &other) {
        if (other.all_ == nullptr || other.all_ == all_) {
            return;
        }
        if (all_ == nullptr) {
            all_ = other.all_;
            return;
        }
        static std::array<std::shared_ptr<All const>, 3> last;  // two, and the result of their join
        if (last[0] != all_ || last[1] != other.all_) {
            last = {all_, other.all_, joined(all_, other.all_)};
        }
        all_ = last[2];
    }

  private:
    using All = std::vector<LaneFences>;
    using Shared = std::shared_ptr<All const>;

    static size_t place(int rank, int warp) {
        return static_cast<size_t>(rank) * kWarps + static_cast<size_t>(warp);
    }
    static Shared joined(Shared const &a, Shared const &b) {
        auto both = std::make_shared<All>(*a);
        both->resize(std::max(a->size(), b->size()));
        for (size_t i = 0; i < b->size(); ++i) {
            choose((*both)[i], (*b)[i], [](uint32_t x, uint32_t y) { return x > y ? x : y; });
        }
        return *both == *b ? b : *both == *a ? a : both;
    }

    Shared all_;  // null: all 0
};

// A thread's clock: the events in the blocks of its cluster, and the end of the previous kernel.
// The vectors grow on demand; a missing element is 0.
struct Knowledge {
    BlockKnowledge first;                // rank 0
    std::vector<BlockKnowledge> others;  // rank 1, 2, ...
    std::vector<Accesses> accesses;      // by rank
    Fences fences;
    bool dependency = false;  // the previous kernel has ended

    BlockKnowledge &of(int rank) {
        if (rank == 0) {
            return first;
        }
        if (others.size() < static_cast<size_t>(rank)) {
            others.resize(rank);
        }
        return others[rank - 1];
    }
    Accesses &accesses_of(int rank) {
        if (accesses.size() <= static_cast<size_t>(rank)) {
            accesses.resize(rank + 1);
        }
        return accesses[rank];
    }
    void join(Knowledge const &other) {
        first.join(other.first);
        for (size_t i = 0; i < other.others.size(); ++i) {
            of(static_cast<int>(i) + 1).join(other.others[i]);
        }
        for (size_t i = 0; i < other.accesses.size(); ++i) {
            Accesses &mine = accesses_of(static_cast<int>(i));
            for (int w = 0; w < kWarps; ++w) {
                mine[w] = std::max(mine[w], other.accesses[i][w]);
            }
        }
        fences.join(other.fences);
        dependency |= other.dependency;
    }
};

}  // namespace sim
