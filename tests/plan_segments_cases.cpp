// The functions of plan_segments.h for ctypes.
#include "plan_segments.h"

using flash::Flash_fwd_params;

// kMergedByCtas, kSlow and kOther, configurations, precede this text.
extern "C" {

int64_t num_tiles(Flash_fwd_params const *) { return 0; }

// kind: 0 to 2, one of them. blocks: of all tiles of a grid head.
int part_blocks(Flash_fwd_params const *params, int kind, int64_t blocks, int longest) {
    using flash::PlanFwd;
    using flash::TileSplits;
    auto const of = kind == 0   ? TileSplits<PlanFwd<kMergedByCtas>>::part_blocks
                    : kind == 1 ? TileSplits<PlanFwd<kSlow>>::part_blocks
                                : TileSplits<PlanFwd<kOther>>::part_blocks;
    return of(*params, blocks, longest);
}
}
