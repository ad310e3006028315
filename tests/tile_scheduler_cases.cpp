// The tile scheduler's functions for ctypes. What runs on a GPU only, the queue's atomics and
// grid, has stand-ins here.
#include <cstdint>
#include <cute/numeric/math.hpp>
#include <utility>

static struct {
    unsigned x;
} gridDim;
static unsigned atomicExch(unsigned *address, unsigned value) {
    return std::exchange(*address, value);
}
static unsigned atomicAdd(unsigned *address, unsigned value) {
    return atomicExch(address, *address + value);
}

#include "tile_scheduler.h"

using flash::Flash_fwd_params;
using flash::WorkTile;

// kPlain and kCausal, two configurations, precede this text.
using Plain = flash::TileScheduler<kPlain>;
using Causal = flash::TileScheduler<kCausal>;

extern "C" {

int64_t num_tiles(Flash_fwd_params const *params) { return Plain::num_tiles(*params); }

WorkTile tile(Flash_fwd_params const *params, bool causal, int index) {
    return causal ? Causal::tile(*params, index) : Plain::tile(*params, index);
}

int heads_in_group(Flash_fwd_params const *params, int sms) {
    return Causal::heads_in_group(*params, sms);
}

WorkTile tile_in_group(Flash_fwd_params const *params, int group, int index) {
    return Causal::tile_in_group(*params, group, index);
}

// The tile that follows `tile` on one CTA of a grid of `ctas`.
int next_tile(int tiles, unsigned *counter, int ctas, int tile) {
    gridDim.x = ctas;
    return flash::TileQueue{.tiles = tiles, .group = 1, .counter = counter}.next(tile);
}
}
