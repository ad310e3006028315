// Vector clocks: which events happen before the next instruction of a CUDA thread. Arrivals and
// waits at barriers of any kind join them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sim {

inline constexpr int kMbarriers = 48;  // per block
inline constexpr int kWarps = 32;
inline constexpr int kStoreQueues = 16;  // threads of a block that may issue TMA stores

// `theirs` is a copy, because the compiler vectorises only arrays that cannot overlap.
template <size_t kCount, class Choice>
void choose(std::array<uint32_t, kCount> &mine, std::array<uint32_t, kCount> theirs,
            Choice const &choice) {
    for (size_t i = 0; i < kCount; ++i) {
        mine[i] = choice(mine[i], theirs[i]);
    }
}

// The clock of events in one block, each a count from 0:
// - phases: the current phase of each mbarrier. Phase 1 begins with the initialisation.
// - fenced: the same as it was at the last fence.proxy.async.
// - retired: the wgmmas that each warp has waited for.
// - stores: the TMA stores of each queue that have read their boxes.
struct BlockKnowledge {
    std::array<uint32_t, kMbarriers> phases{}, fenced{};
    std::array<uint32_t, kWarps> retired{};
    std::array<uint32_t, kStoreQueues> stores{};
    bool runs = false;  // the block has started; checked for the other blocks of a cluster

    void join(BlockKnowledge const &other) {
        combine(other, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
        runs |= other.runs;
    }
    // The minimum: the events known to both.
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
// For each lane of a warp, the number of its fence.proxy.async that follow a load.
using LaneFences = std::array<uint32_t, 32>;

// A thread's clock: the events in the blocks of its cluster, and the end of the previous kernel.
// The vectors grow on demand; a missing element is 0.
struct Knowledge {
    BlockKnowledge first;                // rank 0
    std::vector<BlockKnowledge> others;  // rank 1, 2, ...
    std::vector<Accesses> accesses;      // by rank
    std::vector<LaneFences> fences;      // by rank and warp
    bool dependency = false;             // the previous kernel has ended

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
    LaneFences &fences_of(int rank, int warp) {
        auto const at = static_cast<size_t>(rank) * kWarps + static_cast<size_t>(warp);
        if (fences.size() <= at) {
            fences.resize(at + 1);
        }
        return fences[at];
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
        if (fences.size() < other.fences.size()) {
            fences.resize(other.fences.size());
        }
        for (size_t i = 0; i < other.fences.size(); ++i) {
            choose(fences[i], other.fences[i],
                   [](uint32_t a, uint32_t b) { return a > b ? a : b; });
        }
        dependency |= other.dependency;
    }
};

}  // namespace sim
