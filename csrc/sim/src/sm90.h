// A block's Hopper state: mbarriers, bulk copies, and warpgroups with their wgmmas in flight and
// their registers.
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
// Granularity in bytes at which writers and readers of shared memory are recorded: one row of the
// 128-byte swizzle.
inline constexpr uint64_t kGranule = 128;

struct Mbarrier {
    uint64_t offset;        // in shared memory
    int arrivals, pending;  // arrivals per phase, and those missing in the current one
    int64_t tx_count;       // pending transaction bytes: expected and not completed
    uint32_t phase;         // number of the current phase, from 1
    uint64_t under_way;     // bytes of this phase's copies that are in flight
    Lane const *creator;    // the initialising thread; null after its fence.mbarrier_init
    std::vector<Lane *> waiters;
    Knowledge incoming;        // joined over all arrivals
    Knowledge published;       // joined over the arrivals of completed phases
    std::array<char, 2> tags;  // for the race detector, by parity of the phase
};

// The contents of a CUtensorMap that encode_tensor_map() writes.
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

// A box of a tensor: its coordinates, innermost first, and its place in shared memory.
struct Box {
    TensorMap map;
    std::array<int64_t, TensorMap::kMaxRank> coordinates;
    uint64_t offset, bytes;
};

// A row of a box. Its elements [first, end) lie in the tensor, the first of them at `gmem`.
struct BoxRow {
    uint64_t offset;  // of the row in shared memory, before swizzling
    int64_t first, end;
    std::byte *gmem;
};

// A copy in flight to this block's shared memory: a TMA load, st.async, or cp.async.bulk from
// another block.
struct BulkCopy {
    Box box;
    int barrier;    // index of the mbarrier that gets the transaction bytes
    bool repeated;  // of a multicast, to another block than the first of its mask
    bool is_word;   // st.async of `word`
    uint32_t word;
    std::byte const *source;      // cp.async.bulk: in the issuing block's shared memory
    std::vector<std::byte> sent;  // cp.async.bulk: the bytes there at the issue; else empty
};

// A pending cp.async.mbarrier.arrive.noinc, which arrives once the lane's copies with numbers below
// `copies` have landed.
struct CopyArrival {
    Lane *lane;
    uint64_t copies;
    int barrier;
};

// 16 bytes of a stored box, of which `bytes` after the first `skip` are in the tensor. The floats
// of a bulk store or reduction are contiguous, and all in the tensor.
struct StorePiece {
    uint64_t at;  // offset in shared memory
    uint64_t skip, bytes;
    std::byte *gmem;                   // destination of the first byte after `skip`
    std::array<std::byte, 16> source;  // the 16 bytes at the issue
};

// What is written to global memory: a box of a tensor, contiguous floats, or sums to which
// contiguous floats are added.
enum class StoreKind { box, floats, sums };

struct BulkStore {
    Box box;
    uint64_t group;  // bulk group of the issuing thread
    std::vector<StorePiece> pieces;
    StoreKind kind;
    bool waited, written;  // its reads have been waited for; global memory has been written
};

// The TMA stores, bulk stores and bulk reductions of one thread, oldest first.
struct StoreQueue {
    Lane const *owner;
    std::deque<BulkStore> stores;  // those that are not both waited for and written
    uint64_t groups;               // number of committed bulk groups
    uint32_t issued, waited;       // numbers of stores
    void *agent;                   // ThreadSanitizer's fibre for the engine's reads
    char issue_tag, done_tag;
};

// Registers used by wgmmas in flight. They hold poison until the last of these wgmmas is complete.
template <class Register>
struct InFlight {
    std::array<Register *, kWarpgroupSize> registers{};
    int count;  // per thread
    int uses;   // wgmmas not executed yet
};
struct Accumulator : InFlight<float> {
    std::vector<float> matrix;  // (64, 2 * count)
};
struct OperandA : InFlight<uint32_t> {
    std::array<std::array<uint32_t, 4>, kWarpgroupSize> values;
};

// A wgmma that some thread has issued.
struct Multiplication {
    Wgmma instruction;
    int issued;            // number of threads that have issued it
    BlockKnowledge known;  // the events that happen before it in all of these threads
    Accumulator *acc;
    OperandA *a;                               // null: A is read from shared memory
    std::vector<uint32_t> chunks_a, chunks_b;  // offsets of 16-byte pieces (8 elements)
};

// The loads of one warp from a granule: for each lane the number of the first fence.proxy.async
// after its last load; 0 if it has not loaded.
struct WarpLoads {
    int warp;
    LaneFences fenced_by;
};

enum class WarpgroupOp : uint8_t { wgmma_wait, raise_registers, lower_registers };

struct Warpgroup {
    int index;
    std::deque<Multiplication> multiplications;  // issued and not waited for
    uint64_t first;                              // number of the oldest of them
    uint64_t executed;                           // all below this number have been executed
    std::deque<uint64_t> groups;                 // for each: number of the first wgmma after it
    uint64_t first_group;                        // number of the oldest group not waited for
    std::vector<std::unique_ptr<Accumulator>> accumulators;  // in flight
    std::vector<std::unique_ptr<OperandA>> operands;
    // The warpgroup-wide instruction at which threads are arriving.
    WarpgroupOp op;
    int argument;
    int arrived;
    int registers, wanted;  // per thread: held, and asked for by setmaxnreg
};

class Sm90 {
  public:
    explicit Sm90(Block &block) : block_(block) {}
    void start();
    // Whether Hopper state is recorded: from the block's first Hopper instruction on; from its
    // start in a cluster or a dependent launch.
    bool active() const { return active_; }
    void activate();
    // Fails if a copy writes these bytes and the running thread is not ordered after its
    // completion.
    void check_landed(uint64_t offset, uint64_t bytes, char const *what);
    // Records a cp.async of the running thread. Fails if reads of these bytes through the
    // asynchronous proxy are not ordered before it.
    void note_copy(uint64_t offset, uint64_t bytes);
    // Records a load of these lanes of the running warp through the generic proxy.
    void note_load(uint64_t offset, uint64_t bytes, uint32_t lanes);
    // Names the warpgroup and thread whose wgmma in flight uses the register at `address`; empty if
    // there is none.
    std::string owner_of_register(void const *address) const;

    void mbarrier_init(void *barrier, uint32_t arrivals);
    void mbarrier_fence_init();
    void mbarrier_arrive(void *barrier, uint32_t bytes);
    // cp.async.mbarrier.arrive.noinc
    void mbarrier_arrive_copies(void *barrier);
    void mbarrier_wait(void *barrier, uint32_t parity);
    // Returns whether the phase is complete. If it is not, runs other lanes and looks again.
    bool mbarrier_test(void *barrier, uint32_t parity);
    // expect_tx (bytes > 0) or complete_tx (bytes < 0), without an arrival.
    void mbarrier_transaction(void *barrier, int64_t bytes);
    // Returns what a relaxed arrival at barrier.cluster publishes: the initialisations of mbarriers
    // that fence.mbarrier_init follows, and that the block runs.
    Knowledge initialisations();
    void store_async(uint64_t offset, uint32_t word, void *barrier);
    void bulk_copy_to(Sm90 &peer, void const *to, void const *from, uint32_t bytes, void *barrier);

    void tma_load(void const *descriptor, void *barrier, void *smem, int const *coordinates,
                  int rank);
    void tma_load_multicast(void const *descriptor, void *barrier, void *smem,
                            int const *coordinates, int rank, uint16_t mask);
    void tma_store(void const *descriptor, void const *smem, int const *coordinates, int rank);
    // A bulk store or a bulk reduction.
    void bulk_write(float *gmem, void const *smem, uint32_t bytes, StoreKind kind);
    void tma_store_commit();
    void tma_store_wait(uint64_t pending, bool read_only);
    void fence_async_proxy();
    // Called when the block ends: writes the stores that have not been written.
    void finish();
    // Completes a random copy in flight or pending copy arrival; false if there is none.
    bool land_one();
    void land_at_random();

    void wgmma(Wgmma const &instruction, float *acc, uint32_t *a);
    void wgmma_fence();
    void wgmma_commit();
    void wgmma_wait(int pending);
    void registers_change(int registers, bool raise);

    // Fails if the exiting thread's warpgroup waits for it, if its TMA stores have not been waited
    // for, or if the `last` thread exits with work in flight.
    void check_exit(Lane const &lane, bool last);
    std::string describe() const;

  private:
    struct Writer {
        int16_t barrier;     // mbarrier of the last copy; -1 if there was none
        uint16_t under_way;  // 1 while a bulk copy is in flight
        uint32_t phase;      // the mbarrier's phase in which the copy completes
        bool generic;        // cp.async, which writes through the generic proxy
    };

    // The running thread's clock for this block. The thread may belong to another block.
    BlockKnowledge &known();
    Mbarrier &find(void const *barrier, char const *what);
    void acquire_phase(Mbarrier &barrier);
    std::string name_of(int barrier) const;
    void arrive(Mbarrier &barrier, uint32_t bytes, char const *what);
    void complete(Mbarrier &barrier);
    void fire(size_t index);

    Box box(void const *descriptor, void const *smem, int const *coordinates, int rank);
    template <class Visit>
    void visit_rows(Box const &box, Visit const &visit);
    void issue(BulkCopy copy, void const *barrier);
    void check_free(uint64_t offset, uint64_t bytes, std::string const &what, bool after_loads);
    // How many fence.proxy.async that followed a load the lane has executed.
    uint32_t fences_of(Lane const &lane) const;
    void copy_rows(BulkCopy const &copy);
    void copy_sent(BulkCopy const &copy);
    void land(size_t index);

    StoreQueue *own_queue();
    StoreQueue &create_queue();
    void add_piece(BulkStore &store, StorePiece piece);
    void enqueue(BulkStore store);
    std::string name_of(StoreQueue const &queue) const;
    void check_source(StorePiece const &piece);
    void check_read(StoreQueue const &queue, BulkStore const &store);
    void write(BulkStore &store);
    void check_stores(Lane const &lane) const;

    Warpgroup &warpgroup();
    void create(Warpgroup &wg, Wgmma const &instruction, float *acc, uint32_t *a);
    template <class Held>
    Held *find_or_add(std::vector<std::unique_ptr<Held>> &all,
                      decltype(Held::registers)::value_type first, int count, char const *what);
    std::vector<uint32_t> chunks(uint64_t descriptor, int extent, bool transposed);
    void check_operand(Warpgroup const &wg, Multiplication const &m,
                       std::vector<uint32_t> const &chunks);
    void execute_until(Warpgroup &wg, uint64_t number);
    void execute(Warpgroup &wg, Multiplication &m);
    template <class Held>
    void write_back(Warpgroup const &wg, std::vector<std::unique_ptr<Held>> &all, Held *held);
    template <class Action>
    void converge_warpgroup(WarpgroupOp op, int argument, Action const &action);
    void grant_registers();

    Block &block_;
    bool active_ = false;
    std::vector<Mbarrier> mbarriers_;  // with reserved capacity, so that addresses stay valid
    std::vector<int16_t> barrier_at_;  // index of the mbarrier, by offset / 8; -1: none
    std::vector<BulkCopy> copies_;     // in flight
    std::vector<CopyArrival> arrivals_;
    std::vector<Writer> writers_;  // by granule
    // By granule and warpgroup: the number of the last wgmma that reads it.
    std::vector<std::array<uint32_t, kWarps / 4>> readers_;
    std::vector<std::vector<WarpLoads>> loads_;  // by granule
    std::vector<StoreQueue> queues_;
    // By granule and queue: the number of the last TMA store that reads it.
    std::vector<std::array<uint32_t, kStoreQueues>> stored_;
    // Shared memory as the asynchronous proxy sees it. Ordinary stores become visible at a fence.
    std::vector<std::byte> async_view_;
    std::deque<Warpgroup> warpgroups_;
    int64_t free_registers_ = 0;  // the pool of setmaxnreg
    // The number of mbarrier tests in a row without any other step, and the step of the last one.
    static constexpr uint64_t kMaxPolls = 1 << 16;
    uint64_t polls_ = 0, last_poll_step_ = 0;
};

// Returns the offset after swizzling over `span` bytes (0: none), which permutes the 16-byte pieces
// by address bits.
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
        // Modulo 2^64, as TMA computes it.
        uint64_t at = static_cast<uint64_t>(box.coordinates[0] + first) * map.element_bytes;
        bool inside = end > first;
        for (int i = 1; i < map.rank; ++i) {
            int64_t const x = box.coordinates[i] + static_cast<int64_t>(rest % map.box[i]);
            rest /= map.box[i];
            inside = inside && x >= 0 && x < static_cast<int64_t>(map.extents[i]);
            at += static_cast<uint64_t>(x) * map.strides[i - 1];
        }
        visit(BoxRow{box.offset + r * row_bytes, first, inside ? end : first,
                     reinterpret_cast<std::byte *>(map.address + at)});
    }
}

}  // namespace sim
