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

#include "knowledge.h"
#include "runtime_sm90.h"

namespace sim {

class Block;
struct Lane;

inline constexpr int kWarpgroupSize = 128;
// Granularity at which shared memory remembers who wrote and who reads it: a swizzled row.
inline constexpr uint64_t kGranule = 128;

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

// A box of a tensor at its coordinates, innermost first, and where it lies in shared memory.
struct Box {
    TensorMap map;
    std::array<int64_t, TensorMap::kMaxRank> coordinates;
    uint64_t offset, bytes;
};

// The elements [first, end) of a row of a box that lie in the tensor, the first of them at `gmem`.
struct BoxRow {
    uint64_t offset;  // of the row in shared memory, before swizzling
    int64_t first, end;
    std::byte *gmem;
};

struct BulkCopy {
    Box box;
    int barrier;
    bool repeated;  // the box also goes to a block of lower rank
    bool is_word;   // st.async: 4 bytes, not from a tensor
    uint32_t word;
};

// 16 bytes of a box, or what of them lies in the tensor.
struct StorePiece {
    uint64_t at;  // in shared memory
    uint64_t skip, bytes;
    std::byte *gmem;  // of the first byte not skipped
    std::array<std::byte, 16> source;
};

struct BulkStore {
    Box box;
    uint64_t group;
    std::vector<StorePiece> pieces;
    bool waited, written;
};

// The TMA stores of one thread, oldest first.
struct StoreQueue {
    Lane const *owner;
    std::deque<BulkStore> stores;  // until they are written
    uint64_t groups;               // committed
    uint32_t issued, waited;
    void *agent;  // ThreadSanitizer's fibre for the engine's reads
    char issue_tag, done_tag;
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
    int issued;            // threads that have
    BlockKnowledge known;  // by all of these when they did
    Accumulator *acc;
    OperandA *a;                               // null: from shared memory
    std::vector<uint32_t> chunks_a, chunks_b;  // offsets of 16 bytes each: 8 elements
};

// The loads of one warp from a granule: of each lane, the fence that is the first behind its last
// one; 0: it has not loaded.
struct WarpLoads {
    int warp;
    LaneFences fenced_by;
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
    // Fails if a copy has written these bytes and the running thread has not waited for it.
    void check_landed(uint64_t offset, uint64_t bytes, char const *what);
    // These lanes of the running warp load bytes in the generic proxy.
    void note_load(uint64_t offset, uint64_t bytes, uint32_t lanes);
    // The warpgroup whose multiplication in flight owns the register at `address`, and the thread
    // whose register it is; empty: none.
    std::string owner_of_register(void const *address) const;

    void mbarrier_init(void *barrier, uint32_t arrivals);
    void mbarrier_fence_init();
    void mbarrier_arrive(void *barrier, uint32_t bytes);
    void mbarrier_wait(void *barrier, uint32_t parity);
    // Whether the phase is over; lets others run if not.
    bool mbarrier_test(void *barrier, uint32_t parity);
    // Bytes promised or paid without an arrival.
    void mbarrier_transaction(void *barrier, int64_t bytes);
    // What the running thread may tell without releasing its other writes: of fenced mbarriers.
    Knowledge initialisations();
    void store_async(uint64_t offset, uint32_t word, void *barrier);

    void tma_load(void const *descriptor, void *barrier, void *smem, int const *coordinates,
                  int rank);
    void tma_load_multicast(void const *descriptor, void *barrier, void *smem,
                            int const *coordinates, int rank, uint16_t mask);
    void tma_store(void const *descriptor, void const *smem, int const *coordinates, int rank);
    void tma_store_commit();
    void tma_store_wait(uint64_t pending, bool read_only);
    void fence_async_proxy();
    void finish();
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

    // What the running thread, maybe one of another block, knows about this block.
    BlockKnowledge &known();
    Mbarrier &find(void const *barrier, char const *what);
    void passed(Mbarrier &barrier);
    std::string name_of(int barrier) const;
    void complete(Mbarrier &barrier);

    Box box(void const *descriptor, void const *smem, int const *coordinates, int rank);
    template <class Visit>
    void visit_rows(Box const &box, Visit const &visit);
    void issue(BulkCopy copy, void const *barrier);
    void check_free(BulkCopy const &copy);
    // How many of its fences behind loads the lane has executed.
    uint32_t &fences_of(Lane &lane);
    void copy_rows(BulkCopy const &copy);
    void land(size_t index);

    StoreQueue *own_queue();
    StoreQueue &create_queue();
    std::string name_of(StoreQueue const &queue) const;
    void check_source(StorePiece const &piece);
    void check_read(StoreQueue const &queue, BulkStore const &store);
    void write(BulkStore &store);
    void check_stores(Lane const &lane) const;

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
    std::vector<std::vector<WarpLoads>> loads_;              // by granule
    std::vector<StoreQueue> queues_;
    std::vector<std::array<uint32_t, kStoreQueues>> stored_;  // by granule, the last that read it
    // What the asynchronous proxy sees of shared memory: ordinary stores enter it with a fence.
    std::vector<std::byte> async_view_;
    std::deque<Warpgroup> warpgroups_;
    int64_t free_registers_ = 0;
    // mbarrier.try_wait in a row, with no step of another kind by any thread, and the last one's.
    static constexpr uint64_t kQuestions = 1 << 16;
    uint64_t questions_ = 0, last_question_ = 0;
};

// Where bytes of a row swizzled over `span` bytes lie: 16-byte pieces change places by address.
inline uint64_t swizzled(uint64_t offset, int span) {
    uint64_t const rows = span == 0 ? 0 : static_cast<uint64_t>(span / 16 - 1);
    return offset ^ (offset >> 7 & rows) << 4;
}

// Calls visit(BoxRow) for each row of the box, in the order in which they lie in shared memory.
template <class Visit>
void Sm90::visit_rows(Box const &box, Visit const &visit) {
    TensorMap const &map = box.map;
    uint64_t const row_bytes = uint64_t(map.box[0]) * map.element_bytes;
    int64_t const first = std::clamp<int64_t>(-box.coordinates[0], 0, map.box[0]);
    int64_t const end = std::clamp<int64_t>(
        static_cast<int64_t>(map.extents[0]) - box.coordinates[0], first, map.box[0]);
    for (uint64_t r = 0; r * row_bytes < box.bytes; ++r) {
        uint64_t rest = r;
        int64_t at = (box.coordinates[0] + first) * map.element_bytes;
        bool inside = end > first;
        for (int i = 1; i < map.rank; ++i) {
            int64_t const x = box.coordinates[i] + static_cast<int64_t>(rest % map.box[i]);
            rest /= map.box[i];
            inside = inside && x >= 0 && x < static_cast<int64_t>(map.extents[i]);
            at += x * static_cast<int64_t>(map.strides[i - 1]);
        }
        visit(BoxRow{box.offset + r * row_bytes, first, inside ? end : first,
                     reinterpret_cast<std::byte *>(map.address + at)});
    }
}

}  // namespace sim
