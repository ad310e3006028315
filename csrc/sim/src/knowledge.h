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
    // A copy of the second, as the compiler vectorises only what cannot overlap.
    template <size_t kCount, class Choice>
    static void choose(std::array<uint32_t, kCount> &mine, std::array<uint32_t, kCount> theirs,
                       Choice const &choice) {
        for (size_t i = 0; i < kCount; ++i) {
            mine[i] = choice(mine[i], theirs[i]);
        }
    }
};

// How many accesses to other blocks' shared memory each warp of a block has made.
using Accesses = std::array<uint32_t, kWarps>;

// About the blocks of a cluster, and that the kernel before has ended.
struct Knowledge {
    BlockKnowledge first;
    std::vector<BlockKnowledge> others;  // of rank 1, 2, ..., as far as anything is known
    std::vector<Accesses> accesses;      // by rank, likewise
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
        dependency |= other.dependency;
    }
};

}  // namespace sim
