// Exact counters of a launch, and the grouping of lanes' accesses into requests of their warp.
#pragma once

#include <array>
#include <cstdint>
#include <iterator>
#include <vector>

namespace sim {

// Requests, instructions and wavefronts are per warp. Bytes are those that the lanes access. A
// conflict is a shared memory wavefront beyond the fewest possible. A sector is 32 bytes of global
// memory touched by a request. wgmma counts once per warpgroup. tma_bytes counts whole boxes, and
// tma_zero_bytes their part outside the tensor, which is filled with zeros. tma_store_bytes counts
// whole stored boxes, and tma_store_outside_bytes their part outside the tensor, which is not
// written. A multicast box counts once in tma_bytes, and its copies for further blocks in
// tma_multicast_bytes. cluster_bytes counts loads and stores of another block's shared memory, and
// copies to it.
struct Counters {
    uint64_t blocks = 0;
    uint64_t mma = 0;
    uint64_t stmatrix = 0;
    uint64_t stmatrix_wavefronts = 0;
    uint64_t stmatrix_conflicts = 0;
    uint64_t ldmatrix = 0;
    uint64_t ldmatrix_wavefronts = 0;
    uint64_t ldmatrix_conflicts = 0;
    uint64_t shared_load_requests = 0;
    uint64_t shared_load_bytes = 0;
    uint64_t shared_load_conflicts = 0;
    uint64_t shared_store_requests = 0;
    uint64_t shared_store_bytes = 0;
    uint64_t shared_store_conflicts = 0;
    uint64_t cp_async_requests = 0;
    uint64_t cp_async_bytes = 0;
    uint64_t cp_async_zero_bytes = 0;
    uint64_t cp_async_sectors = 0;
    uint64_t cp_async_conflicts = 0;
    uint64_t global_load_requests = 0;
    uint64_t global_load_bytes = 0;
    uint64_t global_load_sectors = 0;
    uint64_t global_store_requests = 0;
    uint64_t global_store_bytes = 0;
    uint64_t global_store_sectors = 0;
    uint64_t block_barriers = 0;
    uint64_t named_barriers = 0;
    uint64_t warp_barriers = 0;
    uint64_t shuffles = 0;
    uint64_t votes = 0;
    uint64_t wgmma = 0;
    uint64_t tma_loads = 0;
    uint64_t tma_bytes = 0;
    uint64_t tma_zero_bytes = 0;
    uint64_t tma_stores = 0;
    uint64_t tma_store_bytes = 0;
    uint64_t tma_store_outside_bytes = 0;
    uint64_t tma_multicast_bytes = 0;
    uint64_t mbarrier_arrivals = 0;
    uint64_t cluster_barriers = 0;
    uint64_t cluster_bytes = 0;
    uint64_t atomics = 0;
    uint64_t reduction_bytes = 0;

    Counters &operator+=(Counters const &other);
};

struct CounterName {
    char const *name;
    uint64_t Counters::*value;
};
inline constexpr CounterName kCounterNames[] = {
    {"blocks", &Counters::blocks},
    {"mma", &Counters::mma},
    {"stmatrix", &Counters::stmatrix},
    {"stmatrix_wavefronts", &Counters::stmatrix_wavefronts},
    {"stmatrix_conflicts", &Counters::stmatrix_conflicts},
    {"ldmatrix", &Counters::ldmatrix},
    {"ldmatrix_wavefronts", &Counters::ldmatrix_wavefronts},
    {"ldmatrix_conflicts", &Counters::ldmatrix_conflicts},
    {"shared_load_requests", &Counters::shared_load_requests},
    {"shared_load_bytes", &Counters::shared_load_bytes},
    {"shared_load_conflicts", &Counters::shared_load_conflicts},
    {"shared_store_requests", &Counters::shared_store_requests},
    {"shared_store_bytes", &Counters::shared_store_bytes},
    {"shared_store_conflicts", &Counters::shared_store_conflicts},
    {"cp_async_requests", &Counters::cp_async_requests},
    {"cp_async_bytes", &Counters::cp_async_bytes},
    {"cp_async_zero_bytes", &Counters::cp_async_zero_bytes},
    {"cp_async_sectors", &Counters::cp_async_sectors},
    {"cp_async_conflicts", &Counters::cp_async_conflicts},
    {"global_load_requests", &Counters::global_load_requests},
    {"global_load_bytes", &Counters::global_load_bytes},
    {"global_load_sectors", &Counters::global_load_sectors},
    {"global_store_requests", &Counters::global_store_requests},
    {"global_store_bytes", &Counters::global_store_bytes},
    {"global_store_sectors", &Counters::global_store_sectors},
    {"block_barriers", &Counters::block_barriers},
    {"named_barriers", &Counters::named_barriers},
    {"warp_barriers", &Counters::warp_barriers},
    {"shuffles", &Counters::shuffles},
    {"votes", &Counters::votes},
    {"wgmma", &Counters::wgmma},
    {"tma_loads", &Counters::tma_loads},
    {"tma_bytes", &Counters::tma_bytes},
    {"tma_zero_bytes", &Counters::tma_zero_bytes},
    {"tma_stores", &Counters::tma_stores},
    {"tma_store_bytes", &Counters::tma_store_bytes},
    {"tma_store_outside_bytes", &Counters::tma_store_outside_bytes},
    {"tma_multicast_bytes", &Counters::tma_multicast_bytes},
    {"mbarrier_arrivals", &Counters::mbarrier_arrivals},
    {"cluster_barriers", &Counters::cluster_barriers},
    {"cluster_bytes", &Counters::cluster_bytes},
    {"atomics", &Counters::atomics},
    {"reduction_bytes", &Counters::reduction_bytes},
};
static_assert(sizeof(Counters) == sizeof(uint64_t) * std::size(kCounterNames), "a name for each");

enum class AccessKind : uint8_t { shared_load, shared_store, global_load, global_store, cp_async };

// Returns how many wavefronts a shared memory request needs beyond the fewest possible. `lanes` is
// the mask of its lanes, each of which accesses `bytes` bytes at its offset.
int bank_conflicts(uint64_t const *offsets, uint32_t lanes, int bytes);
// Returns how many 32-byte sectors a global memory request touches.
int sectors(uint64_t const *addresses, uint32_t lanes, int bytes);

// Groups one warp's accesses since its lanes last converged into requests. The return address
// (`site`) identifies an instruction, and a lane's n-th execution of an instruction belongs to the
// n-th request of that instruction.
class AccessLog {
  public:
    void note(AccessKind kind, void const *site, int lane, int bytes, uint64_t address,
              uint64_t global_address, bool reads_global);
    void flush(Counters &counters);

  private:
    struct Request {
        AccessKind kind;
        void const *site;
        int bytes;
        uint32_t lanes, global_lanes;
        std::array<uint64_t, 32> address, global_address;
    };
    static void tally(Request const &request, Counters &counters);

    std::vector<Request> requests_;
    std::array<uint32_t, 32> cursor_{};  // by lane: the request after the one that it last joined
};

}  // namespace sim
