// Lengths of one batch entry, read once per tile. Every other header asks this one.
#pragma once

#include <cute/config.hpp>

#include "flash.h"

namespace flash {

struct SeqlenInfo {
    int seqlen_q;
    int seqlen_k;

    CUTE_HOST_DEVICE explicit SeqlenInfo(Flash_fwd_params const &params)
        : seqlen_q(params.seqlen_q), seqlen_k(params.seqlen_k) {}

    // Under the bottom-right aligned causal mask, query row i sees keys [0, i + 1 +
    // causal_shift()).
    CUTE_HOST_DEVICE int causal_shift() const { return seqlen_k - seqlen_q; }
};

}  // namespace flash
