// The functions of head_parts.h for ctypes.
#include "head_parts.h"

extern "C" {

int64_t num_tiles(flash::Flash_bwd_params const *) { return 0; }

// mask: 0 none, 1 causal, 2 local. Of kernels with tiles of 128 keys, of which a step visits 64
// queries, one CTA an SM. shared: as HeadPartsModel::shared.
int parts(flash::Flash_bwd_params const *params, int mask, bool ragged, int sms, bool sm90,
          int64_t shared) {
    constexpr flash::MaskKind kMasks[] = {flash::MaskKind::none, flash::MaskKind::causal,
                                          flash::MaskKind::local};
    flash::HeadPartsModel const model{.tile_keys = 128,
                                      .step_queries = 64,
                                      .workers = sms,
                                      .mask = kMasks[mask],
                                      .varlen = ragged,
                                      .shared = shared,
                                      .longest_first = mask == 1 && sm90};
    return model.parts(*params);
}
}
