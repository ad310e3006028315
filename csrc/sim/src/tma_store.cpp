// TMA stores, which write boxes of shared memory to a tensor, and bulk stores and reductions, which
// store contiguous floats in global memory or add them there: in bulk groups of the issuing thread.
#include <cstring>

#include "block.h"
#include "sm90.h"
#include "tsan.h"

namespace sim {

StoreQueue *Sm90::own_queue() {
    for (StoreQueue &queue : queues_) {
        if (queue.owner == &block_.lane()) {
            return &queue;
        }
    }
    return nullptr;
}

StoreQueue &Sm90::create_queue() {
    if (queues_.empty()) {
        stored_.assign(writers_.size(), {});
        queues_.reserve(kStoreQueues);  // the addresses of the tags must stay valid
    }
    if (queues_.size() == kStoreQueues) {
        block_.fail(kNotSupported, "not covered: TMA stores by more than " +
                                       std::to_string(kStoreQueues) + " threads of a block");
    }
    return queues_.emplace_back(StoreQueue{.owner = &block_.lane(),
                                           .stores = {},
                                           .groups = 0,
                                           .issued = 0,
                                           .waited = 0,
                                           .agent = nullptr,
                                           .issue_tag = 0,
                                           .done_tag = 0});
}

std::string Sm90::name_of(StoreQueue const &queue) const {
    return "a TMA store of warp " + std::to_string(queue.owner->warp) + ", lane " +
           std::to_string(queue.owner->lane);
}

void Sm90::tma_store(void const *descriptor, void const *smem, int const *coordinates, int rank) {
    tsan::Unwatched const unwatched;
    activate();
    BulkStore store{};
    store.box = box(descriptor, smem, coordinates, rank);
    TensorMap const &map = store.box.map;
    uint64_t inside = 0;
    visit_rows(store.box, [&](BoxRow const &row) {
        auto const first = static_cast<uint64_t>(row.first * map.element_bytes);
        auto const end = static_cast<uint64_t>(row.end * map.element_bytes);
        if (end == first) {
            return;
        }
        if (!state().regions.empty() &&
            block_.region_of(row.gmem, static_cast<int>(end - first)) < 0) {
            block_.fail(kIllegalAddress, "a TMA store writes outside every tensor");
        }
        inside += end - first;
        for (uint64_t i = first / 16 * 16; i < end; i += 16) {
            uint64_t const begin = std::max(i, first);
            StorePiece piece{.at = swizzled(row.offset + i, map.swizzle_span),
                             .skip = begin - i,
                             .bytes = std::min(i + 16, end) - begin,
                             .gmem = row.gmem + (begin - first),
                             .source = {}};
            add_piece(store, piece);
        }
    });
    ++block_.counters_.tma_stores;
    block_.counters_.tma_store_bytes += store.box.bytes;
    block_.counters_.tma_store_outside_bytes += store.box.bytes - inside;
    enqueue(std::move(store));
}

void Sm90::bulk_write(float *gmem, void const *smem, uint32_t bytes, StoreKind kind) {
    tsan::Unwatched const unwatched;
    activate();
    char const *const what =
        kind == StoreKind::sums ? "cp.reduce.async.bulk" : "a store by cp.async.bulk";
    if (reinterpret_cast<uint64_t>(gmem) % 16 != 0 || bytes % 16 != 0) {
        block_.fail(kMisalignedAddress, std::string(what) + " of " + std::to_string(bytes) +
                                            " bytes: address and size must be multiples of 16");
    }
    if (!state().regions.empty() && block_.region_of(gmem, static_cast<int>(bytes)) < 0) {
        block_.fail(kIllegalAddress, std::string(what) + " outside every tensor");
    }
    block_.check_dependency(what, gmem);
    BulkStore store{};
    store.kind = kind;
    store.box.offset = block_.smem_offset(smem, static_cast<int>(bytes), 16, what);
    store.box.bytes = bytes;
    for (uint64_t i = 0; i < bytes; i += 16) {
        add_piece(store, {.at = store.box.offset + i,
                          .skip = 0,
                          .bytes = 16,
                          .gmem = reinterpret_cast<std::byte *>(gmem) + i,
                          .source = {}});
    }
    if (kind == StoreKind::sums) block_.counters_.reduction_bytes += bytes;
    enqueue(std::move(store));
}

void Sm90::add_piece(BulkStore &store, StorePiece piece) {
    check_source(piece);
    std::memcpy(piece.source.data(), &async_view_[piece.at], 16);
    store.pieces.push_back(piece);
}

void Sm90::enqueue(BulkStore store) {
    StoreQueue *const own = own_queue();
    StoreQueue &queue = own == nullptr ? create_queue() : *own;
    store.group = queue.groups;
    ++queue.issued;
    uint64_t const end = store.box.offset + store.box.bytes;
    for (uint64_t g = store.box.offset / kGranule; g * kGranule < end; ++g) {
        stored_[g][static_cast<size_t>(&queue - &queues_[0])] = queue.issued;
    }
    tsan::release(&queue.issue_tag);
    queue.stores.push_back(std::move(store));
    if (block_.settings_.copy_mode == CopyMode::eager) {
        write(queue.stores.back());
    }
}

// The bytes that the store reads must have been written and be visible to the asynchronous proxy.
void Sm90::check_source(StorePiece const &piece) {
    auto const report = [&](std::string const &what) {
        block_.fail(kLaunchFailure, "a TMA store reads byte " + std::to_string(piece.at) + what);
    };
    std::byte const *const seen = &async_view_[piece.at];
    if (std::memcmp(block_.smem_ + piece.at, seen, 16) != 0) {
        report(", stored by a thread without fence.proxy.async after it");
    }
    Writer const &writer = writers_[piece.at / kGranule];
    if (writer.barrier >= 0 && known().phases[writer.barrier] <= writer.phase) {
        report(" without having waited for phase " + std::to_string(writer.phase) + " of " +
               name_of(writer.barrier) + ", whose copy writes it");
    }
    for (uint64_t i = 0; i + 1 < piece.bytes; i += sizeof kPoison) {
        if (std::memcmp(seen + piece.skip + i, &kPoison, sizeof kPoison) != 0) {
            return;
        }
    }
    report(", which has not been written");
}

void Sm90::tma_store_commit() {
    if (StoreQueue *const queue = own_queue(); queue != nullptr) {
        ++queue->groups;
    }
}

void Sm90::tma_store_wait(uint64_t pending, bool read_only) {
    tsan::Unwatched const unwatched;
    StoreQueue *const queue = own_queue();
    if (queue == nullptr) {
        return;
    }
    uint64_t const end = queue->groups > pending ? queue->groups - pending : 0;
    for (BulkStore &store : queue->stores) {
        if (store.group >= end) {
            break;
        }
        if (!store.waited) {
            check_read(*queue, store);
            tsan::as_agent(queue->agent, [&] {
                tsan::acquire(&queue->issue_tag);
                tsan::read(block_.smem_ + store.box.offset, store.box.bytes);
                tsan::release(&queue->done_tag);
            });
            store.waited = true;
            ++queue->waited;
        }
        if (!read_only) {
            write(store);
        }
    }
    std::erase_if(queue->stores, [](BulkStore const &s) { return s.waited && s.written; });
    tsan::acquire(&queue->done_tag);
    known().stores[static_cast<size_t>(queue - &queues_[0])] = queue->waited;
}

// The store may read its box at any time between its issue and the wait, so the bytes must not have
// changed since the issue.
void Sm90::check_read(StoreQueue const &queue, BulkStore const &store) {
    for (StorePiece const &piece : store.pieces) {
        if (std::memcmp(block_.smem_ + piece.at, piece.source.data(), 16) != 0) {
            block_.fail(kLaunchFailure, "overwritten too early: byte " + std::to_string(piece.at) +
                                            ", which " + name_of(queue) +
                                            " reads, has changed before cp.async.bulk.wait_group");
        }
    }
}

void Sm90::write(BulkStore &store) {
    tsan::Unwatched const unwatched;
    if (store.written) {
        return;
    }
    store.written = true;
    if (store.kind != StoreKind::box) {
        block_.execute_atomic(store.pieces[0].gmem, [&] {
            for (StorePiece const &piece : store.pieces) {
                auto *const to = reinterpret_cast<float *>(piece.gmem);
                for (int i = 0; i < 4; ++i) {
                    float x;
                    std::memcpy(&x, &piece.source[sizeof x * i], sizeof x);
                    to[i] = store.kind == StoreKind::sums ? to[i] + x : x;
                }
            }
        });
        return;
    }
    for (StorePiece const &piece : store.pieces) {
        std::memcpy(piece.gmem, piece.source.data() + piece.skip, piece.bytes);
    }
}

void Sm90::check_stores(Lane const &lane) const {
    for (StoreQueue const &queue : queues_) {
        for (BulkStore const &store : queue.stores) {
            if (queue.owner == &lane && !store.waited) {
                block_.fail(kLaunchFailure,
                            std::string("the thread exits while a TMA store of its reads shared "
                                        "memory: ") +
                                (store.group < queue.groups ? "no cp.async.bulk.wait_group"
                                                            : "no cp.async.bulk.commit_group"));
            }
            if (queue.owner == &lane && store.kind != StoreKind::box && !store.written) {
                block_.fail(kLaunchFailure,
                            "the thread exits before a bulk store or reduction of its is complete: "
                            "only cp.async.bulk.wait_group.read");
            }
        }
    }
}

void Sm90::finish() {
    for (StoreQueue &queue : queues_) {
        for (BulkStore &store : queue.stores) {
            write(store);
        }
        tsan::destroy_agent(queue.agent);
    }
}

}  // namespace sim
