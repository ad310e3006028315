// What a CUDA thread has been told, by barriers of any kind.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sim {

inline constexpr int kMbarriers = 48;  // that one block may initialise
inline constexpr int kWarps = 32;
inline constexpr int kStoreQueues = 16;  // threads of a block that may issue TMA stores

// A copy of the second, as the compiler vectorises only what cannot overlap.
template <size_t kCount, class Choice>
void choose(std::array<uint32_t, kCount> &mine, std::array<uint32_t, kCount> theirs,
            Choice const &choice) {
    for (size_t i = 0; i < kCount; ++i) {
        mine[i] = choice(mine[i], theirs[i]);
    }
}

// About one block. Phases count from 1, which every thread knows once it knows that the mbarrier
// was initialised; `retired` counts the wgmmas that a warp has waited for, `stores` the TMA stores
// of a queue that have read their boxes.
struct BlockKnowledge {
    std::array<uint32_t, kMbarriers> phases{};
    std::array<uint32_t, kWarps> retired{};
    std::array<uint32_t, kStoreQueues> stores{};
    bool runs = false;  // that it has begun; asked of the other blocks of a cluster

    void join(BlockKnowledge const &other) {
        combine(other, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
        runs |= other.runs;
    }
    // Leaves what both know.
    void meet(BlockKnowledge const &other) {
        combine(other, [](uint32_t a, uint32_t b) { return a < b ? a : b; });
        runs &= other.runs;
    }

  private:
    template <class Choice>
    void combine(BlockKnowledge const &other, Choice const &choice) {
        choose(phases, other.phases, choice);
        choose(retired, other.retired, choice);
        choose(stores, other.stores, choice);
    }
};

// How many accesses to other blocks' shared memory each warp of a block has made.
using Accesses = std::array<uint32_t, kWarps>;
// Of each lane of a warp, a number of fences for the asynchronous proxy; counted are those that
// stand behind a load.
using LaneFences = std::array<uint32_t, 32>;

// About the blocks of a cluster, and that the kernel before has ended.
struct Knowledge {
    BlockKnowledge first;
    std::vector<BlockKnowledge> others;  // of rank 1, 2, ..., as far as anything is known
    std::vector<Accesses> accesses;      // by rank, likewise
    std::vector<LaneFences> fences;      // by rank and warp, likewise
    bool dependency = false;

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
