// The warp-wide instructions, executed once for all lanes, and the other functions of runtime.h.
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "block.h"
#include "half.h"
#include "tsan.h"

namespace sim {

namespace {

struct LdmatrixArguments {
    std::byte const *row;
    uint64_t offset;
    uint32_t *dst;
    int matrices;
    bool transposed;
};

struct StmatrixArguments {
    std::byte *row;
    uint64_t offset;
    uint32_t const *src;
    int matrices;
    bool transposed;
};

struct MmaArguments {
    MmaInput input;
    int b_registers;
    float *acc;
    uint32_t const *a, *b;
};

struct ShuffleArguments {
    Shuffle kind;
    uint32_t value, argument;
    int width;
    uint32_t result;
};

struct BallotArguments {
    bool predicate;
    uint32_t result;
};

template <class Arguments>
Arguments &arguments(Warp &warp, int lane) {
    return *static_cast<Arguments *>(warp.lanes[lane]->arguments);
}

// Lane 8 m + r gives the address of row r (16 bytes) of the 8x8 matrix m. Lane l receives of each
// matrix elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 or, if transposed, of column l / 4 (PTX
// ISA, ldmatrix).
void execute_ldmatrix(Block &block, Warp &warp, uint32_t) {
    auto const &first = arguments<LdmatrixArguments>(warp, 0);
    std::array<uint64_t, kWarpSize> offsets;
    for (int m = 0; m < first.matrices; ++m) {
        uint16_t elements[8][8];
        for (int r = 0; r < 8; ++r) {
            auto const &source = arguments<LdmatrixArguments>(warp, 8 * m + r);
            std::memcpy(elements[r], source.row, sizeof elements[r]);
            offsets[8 * m + r] = source.offset;
            block.sm90_.note_load(source.offset, sizeof elements[r], ~0u);
        }
        for (int lane = 0; lane < kWarpSize; ++lane) {
            int const i = lane / 4;
            int const j = 2 * (lane % 4);
            uint32_t const low = first.transposed ? elements[j][i] : elements[i][j];
            uint32_t const high = first.transposed ? elements[j + 1][i] : elements[i][j + 1];
            arguments<LdmatrixArguments>(warp, lane).dst[m] = low | high << 16;
        }
    }
    uint32_t const lanes = first.matrices == 4 ? ~0u : (1u << 8 * first.matrices) - 1;
    int const conflicts = bank_conflicts(offsets.data(), lanes, 16);
    block.counters_.ldmatrix += 1;
    block.counters_.ldmatrix_wavefronts += first.matrices + conflicts;
    block.counters_.ldmatrix_conflicts += conflicts;
}

// The inverse of execute_ldmatrix(): stores its fragments to the rows (PTX ISA, stmatrix).
void execute_stmatrix(Block &block, Warp &warp, uint32_t) {
    auto const &first = arguments<StmatrixArguments>(warp, 0);
    std::array<uint64_t, kWarpSize> offsets;
    for (int m = 0; m < first.matrices; ++m) {
        uint16_t elements[8][8];
        for (int lane = 0; lane < kWarpSize; ++lane) {
            int const i = lane / 4;
            int const j = 2 * (lane % 4);
            uint32_t const pair = arguments<StmatrixArguments>(warp, lane).src[m];
            (first.transposed ? elements[j][i] : elements[i][j]) = static_cast<uint16_t>(pair);
            (first.transposed ? elements[j + 1][i] : elements[i][j + 1]) =
                static_cast<uint16_t>(pair >> 16);
        }
        for (int r = 0; r < 8; ++r) {
            auto const &destination = arguments<StmatrixArguments>(warp, 8 * m + r);
            std::memcpy(destination.row, elements[r], sizeof elements[r]);
            offsets[8 * m + r] = destination.offset;
        }
    }
    uint32_t const lanes = first.matrices == 4 ? ~0u : (1u << 8 * first.matrices) - 1;
    int const conflicts = bank_conflicts(offsets.data(), lanes, 16);
    block.counters_.stmatrix += 1;
    block.counters_.stmatrix_wavefronts += first.matrices + conflicts;
    block.counters_.stmatrix_conflicts += conflicts;
}

template <float (*convert)(uint16_t), int kK>
void mma_tile(Warp &warp) {
    // Fragment layouts of mma.m16n8k16 (PTX ISA), with g = lane / 4 and t = 2 (lane % 4). Register
    // r of A holds row g + 8 (r % 2), columns t + 8 (r / 2) and the next. Register r of B holds
    // rows t + 8 r and the next, column g.
    uint16_t a16[kK][16], b16[kK][8];
    float c[16][8];
    for (int lane = 0; lane < kWarpSize; ++lane) {
        int const g = lane / 4;
        int const t = 2 * (lane % 4);
        auto const &x = arguments<MmaArguments>(warp, lane);
        for (int r = 0; r < kK / 4; ++r) {
            a16[t + 8 * (r / 2)][g + 8 * (r % 2)] = static_cast<uint16_t>(x.a[r]);
            a16[t + 8 * (r / 2) + 1][g + 8 * (r % 2)] = static_cast<uint16_t>(x.a[r] >> 16);
        }
        for (int r = 0; r < kK / 8; ++r) {
            b16[t + 8 * r][g] = static_cast<uint16_t>(x.b[r]);
            b16[t + 8 * r + 1][g] = static_cast<uint16_t>(x.b[r] >> 16);
        }
        for (int r = 0; r < 4; ++r) {
            c[g + 8 * (r / 2)][t + r % 2] = x.acc[r];
        }
    }
    float a[kK][16], b[kK][8];
    for (int i = 0; i < kK * 16; ++i) {
        (&a[0][0])[i] = convert((&a16[0][0])[i]);
    }
    for (int i = 0; i < kK * 8; ++i) {
        (&b[0][0])[i] = convert((&b16[0][0])[i]);
    }
    for (int k = 0; k < kK; ++k) {
        for (int m = 0; m < 16; ++m) {
            for (int n = 0; n < 8; ++n) {
                c[m][n] += a[k][m] * b[k][n];
            }
        }
    }
    for (int lane = 0; lane < kWarpSize; ++lane) {
        float *const acc = arguments<MmaArguments>(warp, lane).acc;
        int const g = lane / 4;
        int const t = 2 * (lane % 4);
        for (int r = 0; r < 4; ++r) {
            acc[r] = c[g + 8 * (r / 2)][t + r % 2];
        }
    }
}

void execute_mma(Block &block, Warp &warp, uint32_t) {
    auto const &first = arguments<MmaArguments>(warp, 0);
    bool const fp16 = first.input == MmaInput::fp16;
    if (first.b_registers == 2) {
        fp16 ? mma_tile<from_fp16, 16>(warp) : mma_tile<from_bf16, 16>(warp);
    } else {
        fp16 ? mma_tile<from_fp16, 8>(warp) : mma_tile<from_bf16, 8>(warp);
    }
    block.counters_.mma += 1;
}

int source_lane(ShuffleArguments const &x, int lane) {
    int const base = lane & ~(x.width - 1);
    int const within = lane - base;
    int const argument = static_cast<int>(x.argument);
    int source = within;
    switch (x.kind) {
        case Shuffle::index:
            source = argument & (x.width - 1);
            break;
        case Shuffle::up:
            source = within - argument;
            break;
        case Shuffle::down:
            source = within + argument;
            break;
        case Shuffle::exclusive_or:
            source = within ^ argument;
            break;
    }
    // If the source is outside the segment, the lane gets its own value (PTX ISA, shfl.sync).
    return source < 0 || source >= x.width ? lane : base + source;
}

void execute_shuffle(Block &block, Warp &warp, uint32_t mask) {
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
        int const lane = std::countr_zero(rest);
        auto &x = arguments<ShuffleArguments>(warp, lane);
        int const source = source_lane(x, lane);
        // What a lane outside the mask provides is undefined.
        x.result = mask >> source & 1 ? arguments<ShuffleArguments>(warp, source).value
                                      : uint32_t(kPoison) << 16 | kPoison;
    }
    block.counters_.shuffles += 1;
}

// elect.sync may elect any lane, but always elects the same one of a warp.
void execute_elect(Block &block, Warp &warp, uint32_t) {
    int const elected = block.elected_lane(warp.lanes[0]->warp);
    for (int lane = 0; lane < kWarpSize; ++lane) {
        arguments<bool>(warp, lane) = lane == elected;
    }
}

void execute_ballot(Block &block, Warp &warp, uint32_t mask) {
    uint32_t result = 0;
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
        int const lane = std::countr_zero(rest);
        result |= uint32_t(arguments<BallotArguments>(warp, lane).predicate) << lane;
    }
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
        arguments<BallotArguments>(warp, std::countr_zero(rest)).result = result;
    }
    block.counters_.votes += 1;
}

}  // namespace

void ldmatrix(void const *row, uint32_t *dst, int matrices, bool transposed) {
    Block &block = Block::current();
    LdmatrixArguments x{static_cast<std::byte const *>(row), 0, dst, matrices, transposed};
    if (block.lane().lane < 8 * matrices) {
        x.offset = block.smem_offset(row, 16, 16, "ldmatrix");
        block.sm90_.check_landed(x.offset, 16, "ldmatrix");
        tsan::read(row, 16);
    }
    block.converge(WarpInstruction::ldmatrix, ~0u, &x, &execute_ldmatrix);
}

void stmatrix(void *row, uint32_t const *src, int matrices, bool transposed) {
    Block &block = Block::current();
    StmatrixArguments x{static_cast<std::byte *>(row), 0, src, matrices, transposed};
    if (block.lane().lane < 8 * matrices) {
        x.offset = block.smem_offset(row, 16, 16, "stmatrix");
        block.sm90_.check_landed(x.offset, 16, "stmatrix");
        tsan::write(row, 16);
    }
    block.converge(WarpInstruction::stmatrix, ~0u, &x, &execute_stmatrix);
}

void mma_m16n8(MmaInput input, int b_registers, float *acc, uint32_t const *a, uint32_t const *b) {
    MmaArguments x{input, b_registers, acc, a, b};
    Block::current().converge(WarpInstruction::mma, ~0u, &x, &execute_mma);
}

uint32_t shuffle(Shuffle kind, uint32_t mask, uint32_t value, uint32_t argument, int width) {
    ShuffleArguments x{kind, value, argument, width, 0};
    Block::current().converge(WarpInstruction::shuffle, mask, &x, &execute_shuffle);
    return x.result;
}

uint32_t ballot(uint32_t mask, bool predicate) {
    BallotArguments x{predicate, 0};
    Block::current().converge(WarpInstruction::ballot, mask, &x, &execute_ballot);
    return x.result;
}

void warp_sync(uint32_t mask) { Block::current().warp_sync(mask); }
void barrier_sync(int id, int threads) { Block::current().barrier_sync(id, threads, true); }
void barrier_arrive(int id, int threads) { Block::current().barrier_sync(id, threads, false); }

void cp_async(void *smem, void const *gmem, int bytes, bool valid) {
    Block::current().copy_issue(static_cast<std::byte *>(smem),
                                static_cast<std::byte const *>(gmem), bytes, valid,
                                __builtin_return_address(0));
}
void cp_async_commit() { Block::current().copy_commit(); }
void cp_async_wait_group(int pending_groups) { Block::current().copy_wait_group(pending_groups); }
void cp_async_wait_all() { Block::current().copy_wait_all(); }

void note_access(void const *address, int bytes, bool write) {
    Block::current().note_access(address, bytes, write, __builtin_return_address(0));
}

uint32_t smem_address(void const *ptr) {
    return static_cast<uint32_t>(Block::current().smem_offset(ptr, 0, 1, "address") +
                                 kReservedSmem);
}
bool elect_one() {
    bool elected = false;
    Block::current().converge(WarpInstruction::elect, ~0u, &elected, &execute_elect);
    return elected;
}

void mbarrier_init(void *barrier, uint32_t arrivals) {
    Block::current().sm90_.mbarrier_init(barrier, arrivals);
}
void mbarrier_fence_init() { Block::current().sm90_.mbarrier_fence_init(); }
void mbarrier_arrive(void *barrier, uint32_t expected_bytes) {
    Block::current().sm90_.mbarrier_arrive(barrier, expected_bytes);
}
void mbarrier_arrive_copies(void *barrier) {
    Block::current().sm90_.mbarrier_arrive_copies(barrier);
}
void mbarrier_wait(void *barrier, uint32_t parity) {
    Block::current().sm90_.mbarrier_wait(barrier, parity);
}
bool mbarrier_test(void *barrier, uint32_t parity) {
    return Block::current().sm90_.mbarrier_test(barrier, parity);
}
void mbarrier_transaction(void *barrier, int64_t bytes, uint32_t rank) {
    Block &block = Block::current();
    Block &peer = block.peer(rank, "mbarrier");
    block.cluster().note_access(peer);
    peer.sm90_.mbarrier_transaction(block.map_to(peer, barrier), bytes);
}
void mbarrier_arrive_remote(void *barrier, uint32_t expected_bytes, uint32_t rank) {
    Block &block = Block::current();
    Block &peer = block.peer(rank, "mbarrier.arrive");
    block.cluster().note_access(peer);
    peer.sm90_.mbarrier_arrive(block.map_to(peer, barrier), expected_bytes);
}
void store_async(uint32_t value, uint32_t address, uint32_t barrier, uint32_t rank) {
    Block &peer = Block::current().peer(rank, "st.async");
    peer.sm90_.store_async(address - kReservedSmem, value, peer.smem_at(barrier));
}
void bulk_copy_to(void *to, void const *from, uint32_t bytes, void *barrier, uint32_t rank) {
    Block &block = Block::current();
    Block &peer = block.peer(rank, "cp.async.bulk");
    block.cluster().note_access(peer);
    block.sm90_.bulk_copy_to(peer.sm90_, block.map_to(peer, to), from, bytes,
                             block.map_to(peer, barrier));
}
void registers_change(int registers, bool raise) {
    Block::current().sm90_.registers_change(registers, raise);
}
void tma_load(void const *descriptor, void *barrier, void *smem, int const *coordinates, int rank) {
    Block::current().sm90_.tma_load(descriptor, barrier, smem, coordinates, rank);
}
void grid_dependency_wait() { Block::current().dependency_wait(); }
void tma_load_multicast(void const *descriptor, void *barrier, void *smem, int const *coordinates,
                        int rank, uint16_t mask) {
    Block::current().sm90_.tma_load_multicast(descriptor, barrier, smem, coordinates, rank, mask);
}
void tma_store(void const *descriptor, void const *smem, int const *coordinates, int rank) {
    Block::current().sm90_.tma_store(descriptor, smem, coordinates, rank);
}
void bulk_reduce_add(float *gmem, void const *smem, uint32_t bytes) {
    Block::current().sm90_.bulk_write(gmem, smem, bytes, StoreKind::sums);
}
void bulk_store(float *gmem, void const *smem, uint32_t bytes) {
    Block::current().sm90_.bulk_write(gmem, smem, bytes, StoreKind::floats);
}
void tma_store_commit() { Block::current().sm90_.tma_store_commit(); }
void tma_store_wait(int pending_groups, bool read_only) {
    Block::current().sm90_.tma_store_wait(static_cast<uint64_t>(pending_groups), read_only);
}
void fence_async_proxy() { Block::current().sm90_.fence_async_proxy(); }
void wgmma(Wgmma const &instruction, float *acc, uint32_t *a) {
    Block::current().sm90_.wgmma(instruction, acc, a);
}
void wgmma_fence() { Block::current().sm90_.wgmma_fence(); }
void wgmma_commit() { Block::current().sm90_.wgmma_commit(); }
void wgmma_wait(int pending_groups) { Block::current().sm90_.wgmma_wait(pending_groups); }

uint32_t atomic_add(uint32_t *address, uint32_t value) {
    uint32_t old = 0;
    Block::current().execute_atomic(address, [&] { old = *address, *address += value; });
    return old;
}
uint32_t load_acquire(uint32_t const *address) { return Block::current().load_acquire(address); }
uint32_t atomic_exchange(uint32_t *address, uint32_t value) {
    uint32_t old = 0;
    Block::current().execute_atomic(address, [&] { old = std::exchange(*address, value); });
    return old;
}
void store_in_turn(float *address, float const *values, int count) {
    Block::current().store_in_turn(address, values, count);
}
void reduce_add(float *address, float const *values, int count) {
    Block::current().reduce_add(address, values, count);
}

void not_covered(char const *what) {
    Block::current().fail(kNotSupported, std::string("not covered: ") + what);
}
void trap(char const *what) { Block::current().fail(kLaunchFailure, what); }

}  // namespace sim
