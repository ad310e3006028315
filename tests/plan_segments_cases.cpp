// The functions of plan_segments.h for ctypes.
#include "plan_segments.h"

using flash::Flash_fwd_params;

// kMergedByCtas, kMergedByCtasOfPages and kOfWindows, of 64 rows, kSlow, kSlowOfPages and kOther,
// of 128, configurations, precede this text.
template <flash::FwdConfig C>
int part_blocks_of(Flash_fwd_params const &params, int64_t blocks, int longest) {
    return flash::TileSplits<flash::PlanFwd<C>>::part_blocks(params, blocks, longest);
}

extern "C" {

int64_t num_tiles(Flash_fwd_params const *) { return 0; }

// kind: of the configurations in that order. blocks: of all tiles of a grid head.
int part_blocks(Flash_fwd_params const *params, int kind, int64_t blocks, int longest) {
    constexpr decltype(&part_blocks_of<kSlow>) kOf[] = {
        part_blocks_of<kMergedByCtas>, part_blocks_of<kMergedByCtasOfPages>,
        part_blocks_of<kOfWindows>,    part_blocks_of<kSlow>,
        part_blocks_of<kSlowOfPages>,  part_blocks_of<kOther>};
    return kOf[kind](*params, blocks, longest);
}
}
