// What Hopper adds to a block: mbarriers, bulk copies, warpgroups with their multiplications in
// flight and their share of the registers.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "runtime_sm90.h"

namespace sim {

class Block;
struct Lane;

inline constexpr int kWarpgroupSize = 128;
inline constexpr int kMbarriers = 48;  // that one block may initialise
inline constexpr int kWarps = 32;
// Granularity at which shared memory remembers who wrote and who reads it: a swizzled row.
inline constexpr uint64_t kGranule = 128;

// What a thread has been told, by barriers of any kind. Phases count from 1, which every thread
// knows once it knows that the mbarrier was initialised; `retired` counts the wgmmas that a warp
// has waited for; `dependency`: that the kernel before has ended.
struct Knowledge {
    std::array<uint32_t, kMbarriers> phases{};
    std::array<uint32_t, kWarps> retired{};
    bool dependency = false;

    void join(Knowledge const &other) {
        for (int i = 0; i < kMbarriers; ++i) {
            phases[i] = std::max(phases[i], other.phases[i]);
        }
        for (int i = 0; i < kWarps; ++i) {
            retired[i] = std::max(retired[i], other.retired[i]);
        }
        dependency |= other.dependency;
    }
    // Leaves what both know.
    void meet(Knowledge const &other) {
        for (int i = 0; i < kMbarriers; ++i) {
            phases[i] = std::min(phases[i], other.phases[i]);
        }
        for (int i = 0; i < kWarps; ++i) {
            retired[i] = std::min(retired[i], other.retired[i]);
        }
        dependency &= other.dependency;
    }
};

struct Mbarrier {
    uint64_t offset;
    int arrivals, pending;
    int64_t due;          // bytes promised and not landed
    uint32_t phase;       // the current one
    uint64_t under_way;   // bytes of copies of this phase that have been issued and not landed
    Lane const *creator;  // while the initialisation is not fenced
    std::vector<Lane *> waiters;
    Knowledge incoming, published;  // of the threads that arrived: so far, by the last phase's end
    std::array<char, 2> tags;       // for the race detector, by parity of the phase
};

// What encode_tensor_map() writes into the 128 bytes of a descriptor.
struct TensorMap {
    static constexpr int kMaxRank = 5;
    uint64_t mark;
    uint64_t address;
    uint64_t strides[kMaxRank - 1];
    uint64_t extents[kMaxRank];
    uint16_t box[kMaxRank];
    uint8_t rank, element_bytes, swizzle_span;
};
static_assert(sizeof(TensorMap) <= 128);

struct BulkCopy {
    TensorMap map;
    std::array<int64_t, TensorMap::kMaxRank> coordinates;
    int barrier;
    uint64_t offset, bytes;
};

// Registers that multiplications in flight own: poison for the program until the last is over.
template <class Register>
struct InFlight {
    std::array<Register *, kWarpgroupSize> registers{};
    int count;  // per thread
    int uses;   // multiplications not executed yet
};
struct Accumulator : InFlight<float> {
    std::vector<float> matrix;  // (64, 2 * count)
};
struct OperandA : InFlight<uint32_t> {
    std::array<std::array<uint32_t, 4>, kWarpgroupSize> values;
};

struct Multiplication {
    Wgmma instruction;
    int issued;       // threads that have
    Knowledge known;  // by all of these when they did
    Accumulator *acc;
    OperandA *a;                               // null: from shared memory
    std::vector<uint32_t> chunks_a, chunks_b;  // offsets of 16 bytes each: 8 elements
};

enum class Gathering : uint8_t { wgmma_wait, raise_registers, lower_registers };

struct Warpgroup {
    int index;
    std::deque<Multiplication> multiplications;  // issued by some thread and not retired
    uint64_t first;                              // number of the oldest of them
    uint64_t executed;                           // those below this number are
    std::deque<uint64_t> groups;                 // number of the first multiplication behind each
    uint64_t first_group;
    std::vector<std::unique_ptr<Accumulator>> accumulators;  // in flight
    std::vector<std::unique_ptr<OperandA>> operands;
    // An instruction that the whole warpgroup executes, while threads arrive at it.
    Gathering gathering;
    int argument;
    int arrived;
    int registers, wanted;  // per thread
};

class Sm90 {
  public:
    explicit Sm90(Block &block) : block_(block) {}
    void start();
    // Whether the block has used anything of this: until then nothing need be kept.
    bool active() const { return active_; }
    void activate();

    void mbarrier_init(void *barrier, uint32_t arrivals);
    void mbarrier_fence_init();
    void mbarrier_arrive(void *barrier, uint32_t bytes);
    void mbarrier_wait(void *barrier, uint32_t parity);

    void tma_load(void const *descriptor, void *barrier, void *smem, int const *coordinates,
                  int rank);
    void fence_async_proxy();
    // Lands a copy under way, any of them; false if there is none.
    bool land_one();
    void land_at_random();

    void wgmma(Wgmma const &instruction, float *acc, uint32_t *a);
    void wgmma_fence();
    void wgmma_commit();
    void wgmma_wait(int pending);
    void registers_change(int registers, bool raise);

    // Fails if a thread exits that its warpgroup waits for, or the last one leaves work behind.
    void check_exit(Lane const &lane, bool last);
    std::string describe() const;

  private:
    struct Writer {
        int16_t barrier;  // -1: no copy has
        uint16_t under_way;
        uint32_t phase;
    };

    Mbarrier &find(void const *barrier, char const *what);
    std::string name_of(int barrier) const;
    void complete(Mbarrier &barrier);

    void check_free(BulkCopy const &copy);
    void copy_rows(BulkCopy const &copy);
    void land(size_t index);

    Warpgroup &warpgroup();
    void create(Warpgroup &wg, Wgmma const &instruction, float *acc, uint32_t *a);
    template <class Held>
    Held *held(std::vector<std::unique_ptr<Held>> &all, decltype(Held::registers)::value_type first,
               int count, char const *what);
    std::vector<uint32_t> chunks(uint64_t descriptor, int extent, bool transposed);
    void check_operand(Warpgroup const &wg, Multiplication const &m,
                       std::vector<uint32_t> const &chunks);
    void execute_until(Warpgroup &wg, uint64_t number);
    void execute(Warpgroup &wg, Multiplication &m);
    template <class Held>
    void give_back(Warpgroup const &wg, std::vector<std::unique_ptr<Held>> &all, Held *held);
    template <class Action>
    void gather(Gathering what, int argument, Action const &action);
    void grant_registers();

    Block &block_;
    bool active_ = false;
    std::vector<Mbarrier> mbarriers_;  // never moves: room for all is reserved
    std::vector<int16_t> barrier_at_;  // by offset / 8; -1: none
    std::vector<BulkCopy> copies_;     // under way
    std::vector<Writer> writers_;      // by granule
    std::vector<std::array<uint32_t, kWarps / 4>> readers_;  // by granule and warpgroup, the last
    // What the asynchronous proxy sees of shared memory: ordinary stores enter it with a fence.
    std::vector<std::byte> async_view_;
    std::deque<Warpgroup> warpgroups_;
    int64_t free_registers_ = 0;
};

// Where bytes of a row swizzled over `span` bytes lie: 16-byte pieces change places by address.
inline uint64_t swizzled(uint64_t offset, int span) {
    uint64_t const rows = span == 0 ? 0 : static_cast<uint64_t>(span / 16 - 1);
    return offset ^ (offset >> 7 & rows) << 4;
}

}  // namespace sim
