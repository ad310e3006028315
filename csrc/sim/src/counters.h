// Exact counts of what a launch did, and the grouping of single lanes' accesses into warp requests.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace sim {

// X(name): one 64-bit counter each. Requests, instructions and wavefronts are per warp; bytes are
// what the lanes asked for. A conflict is a shared memory wavefront beyond the fewest possible. A
// sector is 32 bytes of global memory touched by a request.
#define SIM_COUNTERS(X)                                                                         \
    X(blocks)                                                                                   \
    X(mma)                                                                                      \
    X(ldmatrix)                                                                                 \
    X(ldmatrix_wavefronts)                                                                      \
    X(ldmatrix_conflicts) X(shared_load_requests) X(shared_load_bytes) X(shared_load_conflicts) \
        X(shared_store_requests) X(shared_store_bytes) X(shared_store_conflicts)                \
            X(cp_async_requests) X(cp_async_bytes) X(cp_async_zero_bytes) X(cp_async_sectors)   \
                X(cp_async_conflicts) X(global_load_requests) X(global_load_bytes)              \
                    X(global_load_sectors) X(global_store_requests) X(global_store_bytes)       \
                        X(global_store_sectors) X(block_barriers) X(named_barriers)             \
                            X(warp_barriers) X(shuffles) X(votes)

struct Counters {
#define SIM_DECLARE(name) uint64_t name = 0;
    SIM_COUNTERS(SIM_DECLARE)
#undef SIM_DECLARE

    Counters &operator+=(Counters const &other);
};

enum class AccessKind : uint8_t { shared_load, shared_store, global_load, global_store, cp_async };

// Wavefronts that the addresses of one shared memory request need beyond the fewest possible.
int bank_conflicts(uint64_t const *offsets, uint32_t lanes, int bytes);
// 32-byte sectors that one global memory request touches.
int sectors(uint64_t const *addresses, uint32_t lanes, int bytes);

// One warp's accesses since its lanes last met. An instruction is recognised by its return address;
// the n-th time a lane executes it joins the n-th request of that instruction.
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
    std::array<uint32_t, 32> cursor_{};
};

}  // namespace sim
