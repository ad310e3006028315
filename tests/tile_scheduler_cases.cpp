// The tile scheduler's functions for ctypes. What runs on a GPU only, the dealer's atomics and
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
using flash::TileCoord;

// kPlain and kCausal, two configurations, precede this text.
using Plain = flash::TileScheduler<kPlain>;
using Causal = flash::TileScheduler<kCausal>;

extern "C" {

int64_t num_tiles(Flash_fwd_params const *params) { return Plain::num_tiles(*params); }

TileCoord coord(Flash_fwd_params const *params, bool causal, int tile) {
    return causal ? Causal::coord(*params, tile) : Plain::coord(*params, tile);
}

int heads_in_group(Flash_fwd_params const *params, int sms) {
    return Causal::heads_in_group(*params, sms);
}

TileCoord coord_in_group(Flash_fwd_params const *params, int group, int tile) {
    return Causal::coord_in_group(*params, group, tile);
}

// What CTA `tile` came from computes next, in a grid of `ctas`.
int next_tile(int tiles, unsigned *counter, int ctas, int tile) {
    gridDim.x = ctas;
    return flash::TileDealer{.tiles = tiles, .group = 1, .counter = counter}.next(tile);
}
}
