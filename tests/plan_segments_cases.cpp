// The functions of plan_segments.h for ctypes.
#include "plan_segments.h"

using flash::Flash_fwd_params;

// kSlow and kOther, configurations, precede this text.
extern "C" {

int64_t num_tiles(Flash_fwd_params const *) { return 0; }

// slow: of tiles of 128 rows and 64 keys, else of 128 rows and keys. blocks: of all tiles of a grid
// head.
int part_blocks(Flash_fwd_params const *params, bool slow, int64_t blocks, int longest) {
    using Slow = flash::TileSplits<flash::PlanFwd<kSlow>>;
    using Other = flash::TileSplits<flash::PlanFwd<kOther>>;
    return slow ? Slow::part_blocks(*params, blocks, longest)
                : Other::part_blocks(*params, blocks, longest);
}
}
