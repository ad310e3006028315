// The functions of the backward's tile scheduler (sm90 class) for ctypes.
#include <cstdint>
#include <cute/numeric/math.hpp>

static struct {
    unsigned x;
} gridDim;
static unsigned atomicExch(unsigned *, unsigned) { return 0; }
static unsigned atomicAdd(unsigned *, unsigned) { return 0; }

#include "tile_scheduler_bwd_sm90.h"

using flash::Flash_bwd_params;
using flash::WorkTile;

// kCausal, a configuration, precedes this text.
struct Traits {
    static constexpr flash::BwdConfig kConfig = kCausal;
    static constexpr flash::MaskKind kMask = kConfig.mask;
    static constexpr bool kVarlen = false, kMayOwnHeads = true;
    static constexpr int kTileM = kConfig.dkv.step, kTileN = kConfig.dkv.rows;
    static constexpr int kCluster = 1, kTileKeys = kTileN, kHeadDim = kConfig.head_dim;
};
using Scheduler = flash::TileSchedulerBwdSm90<Traits>;

extern "C" {

int64_t num_tiles(Flash_bwd_params const *params) { return Scheduler::num_tiles(*params); }

int heads_in_group(Flash_bwd_params const *params, int workers) {
    return Scheduler::heads_in_group(*params, workers);
}

bool owns_heads(Flash_bwd_params const *params, int sms) {
    return Scheduler::owns_heads(*params, sms);
}

int first_owned(Flash_bwd_params const *params, int worker) {
    return Scheduler::first_owned(*params, worker);
}

int next_owned(Flash_bwd_params const *params, int index, int workers) {
    return Scheduler::next_owned(*params, index, workers);
}

WorkTile get_tile(Flash_bwd_params const *params, int tiles, int group, int index) {
    return Scheduler::get_tile(*params, {tiles, group, nullptr, nullptr}, index);
}
}
