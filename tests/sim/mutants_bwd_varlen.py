"""Faults planted into the code for ragged batches, softcap and ALiBi in the sm80 class's backward,
in the form of :mod:`mutants`."""

from __future__ import annotations

from backward_options import EVERYTHING, TOGETHER, asking
from mutants import Mutant

CONFIG = asking(TOGETHER, "causal", *EVERYTHING)
_MAINLOOP = "mainloop_bwd_sm80.h"
_KERNEL = "flash_bwd_kernel_sm80.h"
_PREPROCESS = "flash_bwd_preprocess_kernel.h"
_SEGMENTS = "plan_segments.h"
_SCORES = "score_mod.h"
_MODIFY = "            if constexpr (kModifies) modify(params, tile, tSrS, tSrG, block(n), head);\n"
_MASK = "            if (is_cut(tile, n)) mask(params, tile, tSrS, block(n));\n"


def _mutant(name: str, file: str, old: str, new: str, report: str = "") -> Mutant:
    return Mutant(name, file, old, new, "simulator" if report else "numerics", report, CONFIG)


FIRST = (
    _mutant(
        "queries from the rows of the keys",
        _MAINLOOP,
        "tile.row_q * params.q_row_stride",
        "tile.row_k * params.q_row_stride",
        "outside every tensor",
    ),
    _mutant(
        "dK and dV at the rows of the queries",
        _KERNEL,
        "tile.row_q : tile.row_k) * row_stride",
        "tile.row_q : tile.row_q) * row_stride",
    ),
    _mutant(
        "statistics of sequences overlap",
        "flash.h",
        "(row_q / kRowStatsMultiple + i + 1)",
        "(row_q / kRowStatsMultiple + (i + 1) / 2)",
    ),
    _mutant("gradients of no sequence left alone", _SEGMENTS, "cute::max(end - row, 0)", "0"),
    _mutant(
        "tile beyond the count computed",
        _KERNEL,
        "index < plan(params).count",
        "index <= plan(params).count",
        "outside (every tensor|of )|status -8",  # SIGFPE: a division by zero
    ),
    _mutant("derivative of the softcap left out", _MAINLOOP, "ds(i, j) *= g(i, j)", ""),
    _mutant("slope of another head", _MAINLOOP, "tSrG, block(n), head)", "tSrG, block(n), 0)"),
    _mutant("masked before capped", _MAINLOOP, _MODIFY + _MASK, _MASK + _MODIFY),
)
MUTANTS = (
    *FIRST,
    _mutant(
        "statistics behind a sequence",
        _PREPROCESS,
        "position < segment.length",
        "segment.begin + position < segment.end",
    ),
    _mutant(
        "statistics of the first sequence", _MAINLOOP, "(tile.row_q, tile.batch) : 0", "(0, 0) : 0"
    ),
    _mutant(
        "derivative of tanh at its value", _SCORES, "fmaf(-capped, capped, 1.f)", "1.f - capped"
    ),
    _mutant(
        "slopes of the first sequence",
        _SCORES,
        "tile.batch * params.alibi_slopes_batch_stride",
        "0 * params.alibi_slopes_batch_stride",
    ),
    _mutant(
        "distance from the top-left corner",
        _SCORES,
        "position_at(i) + tile.seqlen_k - tile.seqlen_q",
        "position_at(i)",
    ),
    _mutant(
        "sinks of the first sequence",
        _PREPROCESS,
        "Stats::kVarlen ? params.seqlen_q_rounded",
        "Stats::kVarlen ? 128",
    ),
)
