// Warpgroups: wgmma, and setmaxnreg.
#include <array>
#include <cstring>

#include "asan.h"
#include "block.h"
#include "half.h"
#include "sm90.h"
#include "tsan.h"

namespace sim {

namespace {

constexpr int kRows = 64, kDepth = 16;
constexpr uint32_t kPoisonPair = uint32_t(kPoison) << 16 | kPoison;
using Vector = float __attribute__((vector_size(32)));
constexpr int kLanes = sizeof(Vector) / sizeof(float);

template <class Register>
void poison(Register *registers, int count) {
    for (int i = 0; i < count; ++i) {
        std::memcpy(&registers[i], &kPoisonPair, sizeof kPoisonPair);
    }
}

bool all_poison(std::byte const *chunk) {
    std::array<uint16_t, 8> poison;
    poison.fill(kPoison);
    return std::memcmp(chunk, poison.data(), sizeof poison) == 0;
}

// Row and column of accumulator register i of a thread (PTX ISA, wgmma.mma_async, matrix D).
int acc_row(int thread, int i) { return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8; }
int acc_column(int thread, int i) { return thread % 4 * 2 + i % 2 + i / 4 * 8; }

struct Operands {
    alignas(32) float a[kRows][kDepth];
    alignas(32) float b[kDepth][256];
};

// c (64, n) += a b. Products are exact and added in fp32, k ascending.
void multiply(Operands const &x, float *c, int n) {
    constexpr int kBlock = 4;  // register blocking: rows
    for (int m = 0; m < kRows; m += kBlock) {
        for (int j = 0; j < n; j += kLanes) {
            Vector sum[kBlock];
            for (int i = 0; i < kBlock; ++i) {
                std::memcpy(&sum[i], &c[(m + i) * n + j], sizeof(Vector));
            }
            for (int k = 0; k < kDepth; ++k) {
                Vector b;
                std::memcpy(&b, &x.b[k][j], sizeof(Vector));
                for (int i = 0; i < kBlock; ++i) {
                    sum[i] += x.a[m + i][k] * b;
                }
            }
            for (int i = 0; i < kBlock; ++i) {
                std::memcpy(&c[(m + i) * n + j], &sum[i], sizeof(Vector));
            }
        }
    }
}

template <float (*convert)(uint16_t)>
void load_chunk(std::byte const *from, float *to) {
    uint16_t bits[8];
    std::memcpy(bits, from, sizeof bits);
    for (int i = 0; i < 8; ++i) {
        to[i] = convert(bits[i]);
    }
}

template <float (*convert)(uint16_t)>
void load_operands(Multiplication const &m, std::byte const *smem, Operands &x) {
    for (size_t i = 0; i < m.chunks_a.size(); ++i) {
        load_chunk<convert>(smem + m.chunks_a[i], &x.a[i / 2][i % 2 * 8]);
    }
    if (m.a != nullptr) {
        // Register r holds row g + 8 (r % 2), columns t + 8 (r / 2) and the next, with g = lane / 4
        // and t = 2 (lane % 4), as in mma.m16n8k16.
        for (int thread = 0; thread < kWarpgroupSize; ++thread) {
            for (int r = 0; r < 4; ++r) {
                uint32_t const pair = m.a->values[thread][r];
                float *const to = &x.a[acc_row(thread, 2 * (r % 2))][thread % 4 * 2 + r / 2 * 8];
                to[0] = convert(static_cast<uint16_t>(pair));
                to[1] = convert(static_cast<uint16_t>(pair >> 16));
            }
        }
    }
    int const n = m.instruction.n;
    if (m.instruction.transposed_b) {
        for (size_t i = 0; i < m.chunks_b.size(); ++i) {
            load_chunk<convert>(smem + m.chunks_b[i], &x.b[i % kDepth][i / kDepth * 8]);
        }
        return;
    }
    for (int column = 0; column < n; ++column) {
        float values[kDepth];
        load_chunk<convert>(smem + m.chunks_b[2 * column], values);
        load_chunk<convert>(smem + m.chunks_b[2 * column + 1], values + 8);
        for (int k = 0; k < kDepth; ++k) {
            x.b[k][column] = values[k];
        }
    }
}

}  // namespace

Warpgroup &Sm90::warpgroup() {
    activate();
    auto const index = static_cast<size_t>(block_.lane().index) / kWarpgroupSize;
    if (index >= warpgroups_.size()) {
        block_.fail(kLaunchFailure, "the warpgroup has fewer than 128 threads");
    }
    return warpgroups_[index];
}

// Returns the offsets of the 16-byte pieces of the K16 slice that a matrix descriptor describes
// (PTX ISA, "matrix descriptor"; strides in units of 16 bytes). K-major: two pieces for each of
// `extent` rows. MN-major (`transposed`): 16 pieces, one per k, for each 8 of `extent`.
std::vector<uint32_t> Sm90::chunks(uint64_t descriptor, int extent, bool transposed) {
    uint64_t const start = (descriptor & 0x3FFF) << 4;
    uint64_t const leading = (descriptor >> 16 & 0x3FFF) << 4;
    uint64_t const stride = (descriptor >> 32 & 0x3FFF) << 4;
    if (descriptor >> 49 & 7) {
        block_.fail(kNotSupported, "not covered: a matrix descriptor with a base offset");
    }
    constexpr int kSpans[] = {0, 128, 64, 32};
    int const span = kSpans[descriptor >> 62];
    uint64_t const pitch = span == 0 ? 16 : static_cast<uint64_t>(span);
    std::vector<uint32_t> found;
    auto const add = [&](uint64_t offset) {
        uint64_t const at = swizzled(start + offset, span) - kReservedSmem;
        found.push_back(static_cast<uint32_t>(
            block_.smem_offset(block_.smem_ + static_cast<int64_t>(at), 16, 16, "wgmma")));
    };
    if (!transposed) {
        for (uint64_t row = 0; row < static_cast<uint64_t>(extent); ++row) {
            for (uint64_t half = 0; half < 2; ++half) {
                add(row % 8 * pitch + row / 8 * stride + half * (span == 0 ? leading : 16));
            }
        }
        return found;
    }
    uint64_t const across = pitch / 16;  // pieces of a row before the next step along MN
    for (uint64_t piece = 0; piece < static_cast<uint64_t>(extent) / 8; ++piece) {
        for (uint64_t k = 0; k < kDepth; ++k) {
            uint64_t const along = span == 0 ? stride : leading;
            uint64_t const down = span == 0 ? leading : stride;
            add(piece % across * 16 + piece / across * along + k % 8 * pitch + k / 8 * down);
        }
    }
    return found;
}

// Returns the entry of `all` whose registers of the running thread begin at `first`; adds an entry
// if there is none.
template <class Held>
Held *Sm90::find_or_add(std::vector<std::unique_ptr<Held>> &all,
                        decltype(Held::registers)::value_type first, int count, char const *what) {
    int const thread = block_.lane().index % kWarpgroupSize;
    for (auto const &h : all) {
        auto *const there = h->registers[thread];
        if (there == first && h->count == count) {
            return h.get();
        }
        if (there != nullptr && first < there + h->count && there < first + count) {
            block_.fail(kLaunchFailure, std::string("wgmma: ") + what +
                                            " overlap those of one of another shape in flight");
        }
    }
    all.push_back(std::make_unique<Held>());
    all.back()->count = count;
    return all.back().get();
}

void Sm90::create(Warpgroup &wg, Wgmma const &instruction, float *acc, uint32_t *a) {
    Multiplication m{.instruction = instruction,
                     .issued = 0,
                     .known = known(),
                     .acc = find_or_add(wg.accumulators, acc, instruction.n / 2, "accumulators"),
                     .a = nullptr,
                     .chunks_a = {},
                     .chunks_b = chunks(instruction.b, instruction.n, instruction.transposed_b)};
    m.acc->matrix.resize(static_cast<size_t>(kRows) * instruction.n);
    ++m.acc->uses;
    if (a == nullptr) {
        m.chunks_a = chunks(instruction.a, kRows, false);
    } else {
        m.a = find_or_add(wg.operands, a, 4, "fragments of A");
        ++m.a->uses;
    }
    auto const number = static_cast<uint32_t>(wg.first + wg.multiplications.size() + 1);
    for (auto const *chunks_of : {&m.chunks_a, &m.chunks_b}) {
        for (uint32_t const chunk : *chunks_of) {
            readers_[chunk / kGranule][wg.index] = number;
        }
    }
    wg.multiplications.push_back(std::move(m));
}

void Sm90::wgmma(Wgmma const &instruction, float *acc, uint32_t *a) {
    tsan::Unwatched const unwatched;
    Warpgroup &wg = warpgroup();
    Lane &self = block_.lane();
    auto const fail = [&](char const *what) {
        block_.fail(kLaunchFailure, "warpgroup " + std::to_string(wg.index) + what);
    };
    if (!self.wgmma_fenced) {
        fail(": a wgmma without wgmma.fence since the last wait");
    }
    uint64_t const number = self.wgmmas++;
    if (number == wg.first + wg.multiplications.size()) {
        create(wg, instruction, acc, a);
    }
    Multiplication &m = wg.multiplications[number - wg.first];
    if (!(m.instruction == instruction) || (m.a == nullptr) != (a == nullptr)) {
        fail(": its threads issue different wgmmas");
    }
    m.known.meet(known());
    int const thread = self.index % kWarpgroupSize;
    if (float *&registers = m.acc->registers[thread]; registers == nullptr) {
        registers = acc;
        for (int i = 0; i < m.acc->count; ++i) {
            m.acc->matrix[acc_row(thread, i) * instruction.n + acc_column(thread, i)] = acc[i];
        }
        poison(acc, m.acc->count);
        asan::forbid(acc, m.acc->count * sizeof *acc);
    } else if (registers != acc) {
        fail(": its threads accumulate in different registers");
    }
    if (a != nullptr && m.a->registers[thread] == nullptr) {
        m.a->registers[thread] = a;
        std::copy_n(a, 4, m.a->values[thread].begin());
        poison(a, 4);
        asan::forbid(a, 4 * sizeof *a);
    }
    if (++m.issued == kWarpgroupSize) {
        ++block_.counters_.wgmma;
        CopyMode const mode = block_.settings_.copy_mode;
        if (mode == CopyMode::eager || (mode == CopyMode::random && block_.random() % 2 == 0)) {
            execute_until(wg, number + 1);
        }
    }
}

void Sm90::wgmma_fence() { block_.lane().wgmma_fenced = true; }

void Sm90::wgmma_commit() {
    Warpgroup &wg = warpgroup();
    Lane &self = block_.lane();
    uint64_t const group = self.wgmma_groups++;
    if (group == wg.first_group + wg.groups.size()) {
        wg.groups.push_back(self.wgmmas);
    }
    if (wg.groups[group - wg.first_group] != self.wgmmas) {
        block_.fail(kLaunchFailure, "warpgroup " + std::to_string(wg.index) +
                                        ": its threads commit different wgmmas");
    }
}

void Sm90::check_operand(Warpgroup const &wg, Multiplication const &m,
                         std::vector<uint32_t> const &chunks_of) {
    uint64_t checked = UINT64_MAX;
    for (uint32_t const chunk : chunks_of) {
        auto const report = [&](std::string const &what) {
            block_.fail(kLaunchFailure, "warpgroup " + std::to_string(wg.index) +
                                            ": a wgmma reads byte " + std::to_string(chunk) + what);
        };
        if (std::memcmp(block_.smem_ + chunk, &async_view_[chunk], 16) != 0) {
            report(", stored by a thread without fence.proxy.async after it");
        }
        if (chunk / kGranule == checked) {
            continue;
        }
        checked = chunk / kGranule;
        Writer const &writer = writers_[checked];
        if (writer.barrier < 0 && all_poison(&async_view_[chunk])) {
            report(", which has not been written");
        }
        if (writer.barrier >= 0 && m.known.phases[writer.barrier] <= writer.phase) {
            report(" without having waited for phase " + std::to_string(writer.phase) + " of " +
                   name_of(writer.barrier) + ", whose copy writes it");
        }
        if (writer.generic && m.known.fenced[writer.barrier] <= writer.phase) {
            report(", written by cp.async, without fence.proxy.async after phase " +
                   std::to_string(writer.phase) + " of " + name_of(writer.barrier));
        }
    }
}

void Sm90::execute_until(Warpgroup &wg, uint64_t number) {
    for (; wg.executed < number; ++wg.executed) {
        execute(wg, wg.multiplications[wg.executed - wg.first]);
    }
}

void Sm90::execute(Warpgroup &wg, Multiplication &m) {
    check_operand(wg, m, m.chunks_a);
    check_operand(wg, m, m.chunks_b);
    Operands x;
    if (m.instruction.input == MmaInput::fp16) {
        load_operands<from_fp16>(m, async_view_.data(), x);
    } else {
        load_operands<from_bf16>(m, async_view_.data(), x);
    }
    if (!m.instruction.accumulate) {
        std::fill(m.acc->matrix.begin(), m.acc->matrix.end(), 0.f);
    }
    multiply(x, m.acc->matrix.data(), m.instruction.n);
    if (m.a != nullptr && --m.a->uses == 0) {
        write_back(wg, wg.operands, m.a);
    }
    if (--m.acc->uses == 0) {
        write_back(wg, wg.accumulators, m.acc);
    }
}

// Writes the values back to the registers. They must still hold poison: otherwise the program wrote
// them while the wgmma was in flight.
template <class Held>
void Sm90::write_back(Warpgroup const &wg, std::vector<std::unique_ptr<Held>> &all, Held *held) {
    for (int thread = 0; thread < kWarpgroupSize; ++thread) {
        auto *const registers = held->registers[thread];
        asan::allow(registers, held->count * sizeof *registers);
        for (int i = 0; i < held->count; ++i) {
            if (std::memcmp(&registers[i], &kPoisonPair, sizeof kPoisonPair) != 0) {
                block_.fail(kLaunchFailure, "warpgroup " + std::to_string(wg.index) + ", thread " +
                                                std::to_string(thread) +
                                                ": a register of a wgmma in flight was written");
            }
            if constexpr (std::is_same_v<Held, Accumulator>) {
                registers[i] =
                    held->matrix[acc_row(thread, i) * 2 * held->count + acc_column(thread, i)];
            } else {
                registers[i] = held->values[thread][i];
            }
        }
    }
    std::erase_if(all, [&](auto const &h) { return h.get() == held; });
}

std::string Sm90::owner_of_register(void const *address) const {
    auto const at = reinterpret_cast<uintptr_t>(address);
    auto const search = [&](Warpgroup const &wg, auto const &all) -> std::string {
        for (auto const &held : all) {
            for (int thread = 0; thread < kWarpgroupSize; ++thread) {
                auto const first = reinterpret_cast<uintptr_t>(held->registers[thread]);
                if (first != 0 && at >= first && at < first + 4 * held->count) {
                    return "warpgroup " + std::to_string(wg.index) + ", thread " +
                           std::to_string(thread);
                }
            }
        }
        return "";
    };
    for (Warpgroup const &wg : warpgroups_) {
        std::string const owner = search(wg, wg.accumulators) + search(wg, wg.operands);
        if (!owner.empty()) {
            return owner;
        }
    }
    return "";
}

// Collective over the warpgroup: the last thread to arrive executes `action`. Fails if threads
// arrive with another operation or argument.
template <class Action>
void Sm90::converge_warpgroup(WarpgroupOp op, int argument, Action const &action) {
    Warpgroup &wg = warpgroup();
    Lane &self = block_.lane();
    block_.count_step();
    if (wg.arrived == 0) {
        wg.op = op;
        wg.argument = argument;
    }
    if (wg.op != op || wg.argument != argument) {
        block_.fail(kLaunchFailure, "warpgroup " + std::to_string(wg.index) +
                                        " diverges: threads at different wgmma.wait_group or "
                                        "setmaxnreg");
    }
    size_t const first = static_cast<size_t>(wg.index) * kWarpgroupSize;
    for (size_t w = first / 32; w < first / 32 + 4; ++w) {
        if (block_.warps_[w].alive != block_.warps_[w].full) {
            block_.fail(kLaunchFailure, "missing threads: some of warpgroup " +
                                            std::to_string(wg.index) + " have exited");
        }
    }
    if (++wg.arrived < kWarpgroupSize) {
        block_.park(Waiting::warpgroup);
        return;
    }
    wg.arrived = 0;
    action(wg);
    for (size_t i = first; i < first + kWarpgroupSize; ++i) {
        if (&block_.lanes_[i] != &self) {
            block_.wake(block_.lanes_[i]);
        }
    }
    block_.yield_at_random();
}

void Sm90::wgmma_wait(int pending) {
    tsan::Unwatched const unwatched;
    converge_warpgroup(WarpgroupOp::wgmma_wait, pending, [&](Warpgroup &wg) {
        size_t const first = static_cast<size_t>(wg.index) * kWarpgroupSize;
        Lane const &leader = block_.lanes_[first];
        for (size_t i = first; i < first + kWarpgroupSize; ++i) {
            Lane const &lane = block_.lanes_[i];
            if (lane.wgmmas != leader.wgmmas || lane.wgmma_groups != leader.wgmma_groups) {
                block_.fail(kLaunchFailure, "warpgroup " + std::to_string(wg.index) +
                                                ": its threads issued different wgmmas");
            }
        }
        while (wg.groups.size() > static_cast<size_t>(pending)) {
            uint64_t const end = wg.groups.front();
            execute_until(wg, end);
            wg.multiplications.erase(
                wg.multiplications.begin(),
                wg.multiplications.begin() + static_cast<ptrdiff_t>(end - wg.first));
            wg.first = end;
            wg.groups.pop_front();
            ++wg.first_group;
        }
        for (size_t i = first; i < first + kWarpgroupSize; ++i) {
            Lane &lane = block_.lanes_[i];
            lane.knowledge.of(block_.rank_).retired[lane.warp] = static_cast<uint32_t>(wg.first);
            lane.wgmma_fenced = false;
        }
    });
}

// setmaxnreg.dec releases registers to the block's pool; .inc waits until the pool has enough.
void Sm90::registers_change(int registers, bool raise) {
    auto const op = raise ? WarpgroupOp::raise_registers : WarpgroupOp::lower_registers;
    converge_warpgroup(op, registers, [&](Warpgroup &wg) {
        if (raise ? registers < wg.registers : registers > wg.registers) {
            block_.fail(kLaunchFailure, std::string("setmaxnreg.") + (raise ? "inc" : "dec") +
                                            " to " + std::to_string(registers) + ": warpgroup " +
                                            std::to_string(wg.index) + " has " +
                                            std::to_string(wg.registers) + " registers a thread");
        }
        wg.wanted = registers;
        if (!raise) {
            free_registers_ += int64_t(wg.registers - registers) * kWarpgroupSize;
            wg.registers = registers;
        }
        grant_registers();
    });
    Warpgroup &wg = warpgroup();
    while (wg.registers != registers) {
        block_.park(Waiting::registers);
    }
}

void Sm90::grant_registers() {
    for (Warpgroup &wg : warpgroups_) {
        int64_t const missing = int64_t(wg.wanted - wg.registers) * kWarpgroupSize;
        if (missing == 0 || missing > free_registers_) {
            continue;
        }
        free_registers_ -= missing;
        wg.registers = wg.wanted;
        size_t const first = static_cast<size_t>(wg.index) * kWarpgroupSize;
        for (size_t i = first; i < first + kWarpgroupSize; ++i) {
            if (block_.lanes_[i].waiting == Waiting::registers) {
                block_.wake(block_.lanes_[i]);
            }
        }
    }
}

}  // namespace sim
