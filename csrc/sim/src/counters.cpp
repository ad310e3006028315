#include "counters.h"

#include <algorithm>
#include <bit>

namespace sim {

Counters &Counters::operator+=(Counters const &other) {
    for (auto const &[name, value] : kCounterNames) {
        this->*value += other.*value;
    }
    return *this;
}

int bank_conflicts(uint64_t const *offsets, uint32_t lanes, int bytes) {
    // 32 banks of 4 bytes deliver 128 bytes per wavefront, so wide accesses are split into groups
    // of lanes.
    int const group = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
    int conflicts = 0;
    for (int first = 0; first < 32; first += group) {
        std::array<std::array<uint64_t, 32>, 32> words;  // per bank, the distinct words accessed
        std::array<int, 32> count{};
        int deepest = 0;
        for (int lane = first; lane < first + group; ++lane) {
            if (!(lanes >> lane & 1)) {
                continue;
            }
            for (uint64_t word = offsets[lane] / 4; word <= (offsets[lane] + bytes - 1) / 4;
                 ++word) {
                int const bank = word % 32;
                auto const end = words[bank].begin() + count[bank];
                if (std::find(words[bank].begin(), end, word) == end) {
                    words[bank][count[bank]++] = word;
                    deepest = std::max(deepest, count[bank]);
                }
            }
        }
        conflicts += std::max(deepest - 1, 0);
    }
    return conflicts;
}

int sectors(uint64_t const *addresses, uint32_t lanes, int bytes) {
    std::array<uint64_t, 64> touched;
    int count = 0;
    for (int lane = 0; lane < 32; ++lane) {
        if (!(lanes >> lane & 1)) {
            continue;
        }
        for (uint64_t s = addresses[lane] / 32; s <= (addresses[lane] + bytes - 1) / 32; ++s) {
            touched[count++] = s;
        }
    }
    std::sort(touched.begin(), touched.begin() + count);
    return static_cast<int>(std::unique(touched.begin(), touched.begin() + count) -
                            touched.begin());
}

void AccessLog::note(AccessKind kind, void const *site, int lane, int bytes, uint64_t address,
                     uint64_t global_address, bool reads_global) {
    auto const joins = [&](Request const &r) {
        return r.site == site && r.kind == kind && r.bytes == bytes && !(r.lanes >> lane & 1);
    };
    auto found = std::find_if(requests_.begin() + cursor_[lane], requests_.end(), joins);
    if (found == requests_.end()) {
        found = std::find_if(requests_.begin(), requests_.begin() + cursor_[lane], joins);
        if (found == requests_.begin() + cursor_[lane]) {
            requests_.push_back({.kind = kind,
                                 .site = site,
                                 .bytes = bytes,
                                 .lanes = 0,
                                 .global_lanes = 0,
                                 .address = {},
                                 .global_address = {}});
            found = requests_.end() - 1;
        }
    }
    found->lanes |= 1u << lane;
    found->address[lane] = address;
    if (reads_global) {
        found->global_lanes |= 1u << lane;
        found->global_address[lane] = global_address;
    }
    cursor_[lane] = static_cast<uint32_t>(found - requests_.begin()) + 1;
}

void AccessLog::flush(Counters &counters) {
    for (Request const &request : requests_) {
        tally(request, counters);
    }
    requests_.clear();
    cursor_.fill(0);
}

void AccessLog::tally(Request const &r, Counters &counters) {
    uint64_t const bytes = uint64_t(std::popcount(r.lanes)) * r.bytes;
    switch (r.kind) {
        case AccessKind::shared_load:
            counters.shared_load_requests += 1;
            counters.shared_load_bytes += bytes;
            counters.shared_load_conflicts += bank_conflicts(r.address.data(), r.lanes, r.bytes);
            break;
        case AccessKind::shared_store:
            counters.shared_store_requests += 1;
            counters.shared_store_bytes += bytes;
            counters.shared_store_conflicts += bank_conflicts(r.address.data(), r.lanes, r.bytes);
            break;
        case AccessKind::global_load:
            counters.global_load_requests += 1;
            counters.global_load_bytes += bytes;
            counters.global_load_sectors += sectors(r.address.data(), r.lanes, r.bytes);
            break;
        case AccessKind::global_store:
            counters.global_store_requests += 1;
            counters.global_store_bytes += bytes;
            counters.global_store_sectors += sectors(r.address.data(), r.lanes, r.bytes);
            break;
        case AccessKind::cp_async: {
            uint64_t const read = uint64_t(std::popcount(r.global_lanes)) * r.bytes;
            counters.cp_async_requests += 1;
            counters.cp_async_bytes += read;
            counters.cp_async_zero_bytes += bytes - read;
            counters.cp_async_sectors += sectors(r.global_address.data(), r.global_lanes, r.bytes);
            counters.cp_async_conflicts += bank_conflicts(r.address.data(), r.lanes, r.bytes);
            break;
        }
    }
}

}  // namespace sim
