// Tensor maps, TMA loads, and the asynchronous proxy's view of shared memory.
#include <bit>
#include <cstring>

#include "block.h"
#include "sm90.h"
#include "tsan.h"

namespace sim {

namespace {

constexpr uint64_t kMapMark = 0x7FBF'746D'6170'7FBF;

uint64_t box_bytes(TensorMap const &map) {
    uint64_t bytes = map.element_bytes;
    for (int i = 0; i < map.rank; ++i) {
        bytes *= map.box[i];
    }
    return bytes;
}

void const *as_pointer(uint64_t address) { return reinterpret_cast<void const *>(address); }

}  // namespace

int refuse_tensor_map(int result, char const *why) {
    state().error = std::string("cuTensorMapEncodeTiled: ") + why;
    return result;
}

// Checks the conditions documented in cuda.h at cuTensorMapEncodeTiled.
int encode_tensor_map(void *destination, TensorMapArguments const &x) {
    auto const refuse = [](char const *why) { return refuse_tensor_map(kInvalidValue, why); };
    if (reinterpret_cast<uint64_t>(destination) % 64 != 0) {
        return refuse("the descriptor is not at a multiple of 64 bytes");
    }
    if (x.rank < 1 || x.rank > TensorMap::kMaxRank) {
        return refuse("the rank is not 1 to 5");
    }
    if (x.address % 16 != 0) {
        return refuse("the tensor's address is no multiple of 16 bytes");
    }
    TensorMap map{};
    map.mark = kMapMark;
    map.address = x.address;
    map.rank = static_cast<uint8_t>(x.rank);
    map.element_bytes = static_cast<uint8_t>(x.element_bytes);
    map.swizzle_span = static_cast<uint8_t>(x.swizzle_span);
    for (uint32_t i = 0; i < x.rank; ++i) {
        if (x.extents[i] == 0 || x.extents[i] > uint64_t(1) << 32) {
            return refuse("an extent is not 1 to 2^32");
        }
        if (x.box[i] == 0 || x.box[i] > 256) {
            return refuse("an extent of the box is not 1 to 256");
        }
        if (x.element_strides[i] == 0 || x.element_strides[i] > 8) {
            return refuse("an element stride is not 1 to 8");
        }
        if (x.element_strides[i] != 1) {
            return refuse_tensor_map(kNotSupported, "not covered: element strides");
        }
        if (i > 0 && (x.strides[i - 1] % 16 != 0 || x.strides[i - 1] >= uint64_t(1) << 40)) {
            return refuse("a stride is no multiple of 16 bytes below 2^40");
        }
        map.extents[i] = x.extents[i];
        map.box[i] = static_cast<uint16_t>(x.box[i]);
        if (i > 0) {
            map.strides[i - 1] = x.strides[i - 1];
        }
    }
    uint64_t const row = uint64_t(map.box[0]) * map.element_bytes;
    if (row % 16 != 0) {
        return refuse("the box's rows are no multiple of 16 bytes");
    }
    if (x.swizzle_span != 0 && row > static_cast<uint64_t>(x.swizzle_span)) {
        return refuse("the box's rows are longer than the swizzle's span");
    }
    if (x.swizzle_span != 0 && row < static_cast<uint64_t>(x.swizzle_span)) {
        return refuse_tensor_map(kNotSupported,
                                 "not covered: rows shorter than the swizzle's span");
    }
    std::memcpy(destination, &map, sizeof map);
    return kSuccess;
}

Box Sm90::box(void const *descriptor, void const *smem, int const *coordinates, int rank) {
    Box box{};
    std::memcpy(&box.map, descriptor, sizeof box.map);
    if (box.map.mark != kMapMark || reinterpret_cast<uint64_t>(descriptor) % 64 != 0) {
        block_.fail(kLaunchFailure, "TMA: not a descriptor of cuTensorMapEncodeTiled");
    }
    if (box.map.rank != rank) {
        block_.fail(kLaunchFailure, "TMA: " + std::to_string(rank) + " coordinates for a tensor " +
                                        "of rank " + std::to_string(box.map.rank));
    }
    std::copy_n(coordinates, rank, box.coordinates.begin());
    box.bytes = box_bytes(box.map);
    box.offset = block_.smem_offset(smem, static_cast<int>(box.bytes), 128, "TMA");
    block_.check_dependency("TMA", as_pointer(box.map.address));
    return box;
}

void Sm90::tma_load(void const *descriptor, void *address, void *smem, int const *coordinates,
                    int rank) {
    tsan::Unwatched const unwatched;
    BulkCopy copy{};
    copy.box = box(descriptor, smem, coordinates, rank);
    ++block_.counters_.tma_loads;
    block_.counters_.tma_bytes += copy.box.bytes;
    issue(copy, address);
}

// Each block of the mask receives the box at the same offset and completes the bytes at its own
// mbarrier.
void Sm90::tma_load_multicast(void const *descriptor, void *address, void *smem,
                              int const *coordinates, int rank, uint16_t mask) {
    tsan::Unwatched const unwatched;
    BulkCopy copy{};
    copy.box = box(descriptor, smem, coordinates, rank);
    if (mask == 0) {
        block_.fail(kLaunchFailure, "TMA multicast: to no block");
    }
    ++block_.counters_.tma_loads;
    block_.counters_.tma_bytes += copy.box.bytes;
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
        Block &peer = block_.peer(static_cast<uint32_t>(std::countr_zero(rest)), "TMA multicast");
        peer.sm90_.issue(copy, block_.map_to(peer, address));
        block_.counters_.tma_multicast_bytes += copy.repeated ? copy.box.bytes : 0;
        copy.repeated = true;
    }
}

void Sm90::issue(BulkCopy copy, void const *address) {
    Mbarrier &barrier = find(address, "TMA");
    copy.barrier = static_cast<int>(&barrier - &mbarriers_[0]);
    if (barrier.creator != nullptr) {
        block_.fail(kLaunchFailure, "TMA: no fence.mbarrier_init after the initialisation of " +
                                        name_of(copy.barrier));
    }
    auto const [offset, bytes] = std::pair(copy.box.offset, copy.box.bytes);
    check_free(offset, bytes, "TMA for " + name_of(copy.barrier), true);
    for (uint64_t g = offset / kGranule; g * kGranule < offset + bytes; ++g) {
        writers_[g] = {static_cast<int16_t>(copy.barrier), 1, barrier.phase, false};
    }
    barrier.under_way += bytes;
    copies_.push_back(copy);
    if (block_.settings_.copy_mode == CopyMode::eager) {
        land(copies_.size() - 1);
        return;
    }
    for (uint64_t i = offset; i < offset + bytes; i += sizeof kPoison) {
        std::memcpy(block_.smem_ + i, &kPoison, sizeof kPoison);
        std::memcpy(&async_view_[i], &kPoison, sizeof kPoison);
    }
}

// All reads of the bytes that a copy overwrites must happen before its issue: those through the
// asynchronous proxy and, `after_loads`, loads through the generic one.
void Sm90::check_free(uint64_t offset, uint64_t bytes, std::string const &what, bool after_loads) {
    BlockKnowledge const &clock = known();
    Lane &thread = Block::current().lane();
    for (uint64_t g = offset / kGranule; g * kGranule < offset + bytes; ++g) {
        auto const report = [&](std::string const &reader, std::string const &missing) {
            block_.fail(kLaunchFailure, "overwritten too early: " + what + " writes byte " +
                                            std::to_string(g * kGranule) + ", which " + reader +
                                            " reads; " + missing);
        };
        if (writers_[g].under_way > 0) {
            block_.fail(kLaunchFailure, what + ": byte " + std::to_string(g * kGranule) +
                                            " is the destination of a copy under way for " +
                                            name_of(writers_[g].barrier));
        }
        for (size_t wg = 0; wg < warpgroups_.size(); ++wg) {
            for (size_t w = 4 * wg; w < 4 * wg + 4; ++w) {
                if (readers_[g][wg] > clock.retired[w]) {
                    report("a wgmma of warpgroup " + std::to_string(wg),
                           "its thread is not ordered after wgmma.wait_group of warp " +
                               std::to_string(w));
                }
            }
        }
        for (size_t i = 0; i < queues_.size(); ++i) {
            if (stored_[g][i] > clock.stores[i]) {
                report(name_of(queues_[i]),
                       "its thread is not ordered after that store's cp.async.bulk.wait_group");
            }
        }
        if (!after_loads) {
            continue;
        }
        for (WarpLoads const &loads : loads_[g]) {
            for (int l = 0; l < kWarpSize; ++l) {
                if (loads.fenced_by[l] > thread.knowledge.fences.of(block_.rank_, loads.warp, l)) {
                    Lane &reader = *block_.warps_[loads.warp].lanes[l];
                    report("a load of warpgroup " + std::to_string(loads.warp / 4) + ", warp " +
                               std::to_string(loads.warp) + ", lane " + std::to_string(l),
                           loads.fenced_by[l] > fences_of(reader)
                               ? "no fence.proxy.async follows it in that thread"
                               : "its thread is not ordered after the fence.proxy.async that "
                                 "follows the load");
                }
            }
        }
    }
}

// Copies the box row by row; elements outside the tensor are 0. Of a box that is outside the tensor
// as a whole a GPU reads the tensor's address (docs/facts.md), so that must not lead elsewhere.
void Sm90::copy_rows(BulkCopy const &copy) {
    TensorMap const &map = copy.box.map;
    uint64_t const row_bytes = uint64_t(map.box[0]) * map.element_bytes;
    bool is_outside = true;
    visit_rows(copy.box, [&](BoxRow const &from) {
        std::byte row[512] = {};
        auto const read = static_cast<uint64_t>((from.end - from.first) * map.element_bytes);
        if (read > 0) {
            is_outside = false;
            int const region = block_.region_of(from.gmem, static_cast<int>(read));
            // Coordinates can lead to any address, for example in a ragged batch.
            bool const in_tensor =
                region >= 0 && region == block_.region_of(as_pointer(map.address), 1);
            if (!in_tensor && !state().regions.empty()) {
                block_.fail(kIllegalAddress,
                            "TMA for " + name_of(copy.barrier) + " reads outside " +
                                (region < 0 ? "every tensor" : "the tensor of its descriptor"));
            }
            if (block_.settings_.trace && region >= 0 && !copy.repeated) {
                block_.trace_.push_back(
                    {block_.linear_index_, static_cast<uint64_t>(region),
                     static_cast<uint64_t>(from.gmem - state().regions[region].first)});
            }
            std::memcpy(row + from.first * map.element_bytes, from.gmem, read);
        }
        block_.counters_.tma_zero_bytes += copy.repeated ? 0 : row_bytes - read;
        for (uint64_t i = 0; i < row_bytes; i += 16) {
            uint64_t const at = swizzled(from.offset + i, map.swizzle_span);
            std::memcpy(block_.smem_ + at, row + i, 16);
            std::memcpy(&async_view_[at], row + i, 16);
        }
    });
    bool const known = state().regions.empty() || block_.region_of(as_pointer(map.address), 1) >= 0;
    if (is_outside && !known) {
        block_.fail(kIllegalAddress, "TMA for " + name_of(copy.barrier) +
                                         " reads its tensor's address, which is in no tensor");
    }
}

void Sm90::land(size_t index) {
    tsan::Unwatched const unwatched;
    BulkCopy const copy = copies_[index];
    auto const [offset, bytes] = std::pair(copy.box.offset, copy.box.bytes);
    copies_.erase(copies_.begin() + static_cast<ptrdiff_t>(index));
    if (copy.is_word) {
        std::memcpy(block_.smem_ + offset, &copy.word, sizeof copy.word);
        std::memcpy(&async_view_[offset], &copy.word, sizeof copy.word);
    } else {
        copy.sent.empty() ? copy_rows(copy) : copy_sent(copy);
        for (uint64_t g = offset / kGranule; g * kGranule < offset + bytes; ++g) {
            writers_[g].under_way = 0;
        }
    }
    Mbarrier &barrier = mbarriers_[copy.barrier];
    barrier.under_way -= bytes;
    barrier.tx_count -= static_cast<int64_t>(bytes);
    complete(barrier);
}

void Sm90::check_landed(uint64_t offset, uint64_t bytes, char const *what) {
    if (!active_) {
        return;
    }
    for (uint64_t g = offset / kGranule; g * kGranule < offset + bytes; ++g) {
        Writer const &writer = writers_[g];
        if (writer.barrier >= 0 && known().phases[writer.barrier] <= writer.phase) {
            block_.fail(kLaunchFailure, std::string(what) + " at byte " + std::to_string(offset) +
                                            " without having waited for phase " +
                                            std::to_string(writer.phase) + " of " +
                                            name_of(writer.barrier) + ", whose copy writes it");
        }
    }
}

void Sm90::store_async(uint64_t offset, uint32_t word, void *address) {
    tsan::Unwatched const unwatched;
    Mbarrier &barrier = find(address, "st.async");
    BulkCopy copy{};
    copy.is_word = true;
    copy.word = word;
    copy.barrier = static_cast<int>(&barrier - &mbarriers_[0]);
    copy.box.bytes = sizeof word;
    copy.box.offset = block_.smem_offset(block_.smem_ + offset, sizeof word, 4, "st.async");
    uint32_t const poison = uint32_t(kPoison) << 16 | kPoison;
    std::memcpy(block_.smem_ + offset, &poison, sizeof poison);
    barrier.under_way += sizeof word;
    Block::current().counters_.cluster_bytes += sizeof word;
    copies_.push_back(copy);
    if (block_.settings_.copy_mode == CopyMode::eager) {
        land(copies_.size() - 1);
    }
}

// cp.async.bulk from this block's shared memory to that of `peer`; completes the bytes at the
// peer's mbarrier. `to` and `barrier` are addresses in the peer's shared memory.
void Sm90::bulk_copy_to(Sm90 &peer, void const *to, void const *from, uint32_t bytes,
                        void *barrier) {
    tsan::Unwatched const unwatched;
    char const *const what = "cp.async.bulk";
    activate();
    peer.activate();
    uint64_t const offset = block_.smem_offset(from, static_cast<int>(bytes), 16, what);
    BulkCopy copy{};
    copy.box.offset = peer.block_.smem_offset(to, static_cast<int>(bytes), 16, what);
    copy.box.bytes = bytes;
    for (uint64_t i = 0; i < bytes; i += 16) {
        check_source({.at = offset + i, .skip = 0, .bytes = 16, .gmem = nullptr, .source = {}});
    }
    copy.source = block_.smem_ + offset;
    copy.sent.assign(&async_view_[offset], &async_view_[offset] + bytes);
    block_.counters_.cluster_bytes += bytes;
    peer.issue(std::move(copy), barrier);
}

// The copy may read its source at any time until it lands, so the bytes must not have changed.
void Sm90::copy_sent(BulkCopy const &copy) {
    if (std::memcmp(copy.source, copy.sent.data(), copy.sent.size()) != 0) {
        block_.fail(kLaunchFailure, "overwritten too early: the source of a copy for " +
                                        name_of(copy.barrier) + " has changed before it landed");
    }
    std::memcpy(block_.smem_ + copy.box.offset, copy.sent.data(), copy.sent.size());
    std::memcpy(&async_view_[copy.box.offset], copy.sent.data(), copy.sent.size());
}

bool Sm90::land_one() {
    size_t const pending = copies_.size() + arrivals_.size();
    if (pending == 0) {
        return false;
    }
    size_t const chosen = block_.random() % pending;
    chosen < copies_.size() ? land(chosen) : fire(chosen - copies_.size());
    return true;
}

void Sm90::land_at_random() {
    uint64_t const draw = block_.random();
    if (!copies_.empty() && draw % 4 == 0) {
        land((draw >> 32) % copies_.size());
    }
    if (!arrivals_.empty() && draw % 4 == 2) {
        fire((draw >> 32) % arrivals_.size());
    }
    if (!queues_.empty() && draw % 4 == 1) {
        StoreQueue &queue = queues_[(draw >> 32) % queues_.size()];
        if (!queue.stores.empty()) {
            write(queue.stores[(draw >> 40) % queue.stores.size()]);
        }
    }
}

uint32_t Sm90::fences_of(Lane const &lane) const {
    return lane.knowledge.fences.of(block_.rank_, lane.warp, lane.lane);
}

// A later write of the asynchronous proxy is ordered after a generic-proxy load only if the loading
// thread executes fence.proxy.async after the load, and that fence happens before the write.
void Sm90::note_load(uint64_t offset, uint64_t bytes, uint32_t lanes) {
    if (!active_) {
        return;
    }
    Warp &warp = block_.warp();
    int const index = block_.lane().warp;
    for (uint64_t g = offset / kGranule; g * kGranule < offset + bytes; ++g) {
        auto loads = std::find_if(loads_[g].begin(), loads_[g].end(),
                                  [&](WarpLoads const &of) { return of.warp == index; });
        if (loads == loads_[g].end()) {
            loads = loads_[g].insert(loads, {index, {}});
        }
        for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
            Lane &lane = *warp.lanes[std::countr_zero(rest)];
            loads->fenced_by[lane.lane] = fences_of(lane) + 1;
            lane.unfenced_loads = true;
        }
    }
}

// Each calling thread copies all of shared memory to the asynchronous view, which takes a tenth to
// a fifth of a run. One copy per warp would hide that some of its threads lack the fence.
void Sm90::fence_async_proxy() {
    tsan::Unwatched const unwatched;
    activate();
    std::copy_n(block_.smem_, async_view_.size(), async_view_.begin());
    Lane &self = block_.lane();
    known().fenced = known().phases;
    if (self.unfenced_loads) {
        self.knowledge.fences.add(block_.rank_, self.warp, self.lane);
        self.unfenced_loads = false;
    }
}

}  // namespace sim
