// What the kernels that round the sums of dQ have in common in both classes.
#pragma once

#include <cute/config.hpp>

#include "flash.h"
#include "flash_bwd_preprocess_kernel.h"
#include "utils.h"

namespace flash {

// The block of kRows queries whose sums of dQ a CTA rounds. In a ragged batch all sequences count
// as one batch entry, and rows of no sequence get zeros.
template <BwdConfig C, int kRows>
struct BlockOfDq {
    using Stats = RowStats<C>;

    int batch, head;
    int first_position;     // of the block's first row in its sequence
    int64_t workspace_row;  // of the block's first row
    typename Stats::Segment segment;

    CUTE_HOST_DEVICE static int blocks_of_head(Flash_bwd_params const &params) {
        int const rows = C.varlen ? params.seqlen_q_rounded : params.seqlen_q;
        return (rows + kRows - 1) / kRows;
    }
    CUTE_HOST_DEVICE static int64_t num_ctas(Flash_bwd_params const &params) {
        return int64_t(C.varlen ? 1 : params.b) * params.h * blocks_of_head(params);
    }

    CUTE_DEVICE BlockOfDq(Flash_bwd_params const &params, int index) {
        int const blocks = blocks_of_head(params);
        int const batch_head = index / blocks;
        int const first = (index - batch_head * blocks) * kRows;
        batch = batch_head / params.h;
        head = batch_head - batch * params.h;
        workspace_row = int64_t(batch_head) * params.seqlen_q_rounded + first;
        segment = Stats::segment_at(params, first);
        first_position = first - segment.stats_begin;
    }

    // Whether row i of the block has sums: in a ragged batch, whether it is a row of the sequence.
    CUTE_DEVICE bool in_sequence(int i) const {
        return !C.varlen || first_position + i < segment.length;
    }
    template <class Element>
    CUTE_DEVICE GmemRow<Element> row(Flash_bwd_params const &params, int i) const {
        int const row = segment.begin + first_position + i;
        Element *const dq = head_begin<Element>(params.dq_ptr, batch, params.dq_batch_stride, head,
                                                params.dq_head_stride);
        return {dq + row * params.dq_row_stride, row < segment.end};
    }
};

}  // namespace flash
