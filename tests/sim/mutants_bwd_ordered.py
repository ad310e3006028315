"""Faults planted into the order in which tiles of the sm80 class add to dQ, as in ``mutants.py``.
They are found by gradients that differ between schedules or are wrong, or by a report."""

from __future__ import annotations

from backward import with_mask
from mutants import Mutant
from mutants_bwd_fused import FUSED
from mutants_bwd_sm90 import POLLS

from flashcute.config import BwdConfig
from flashcute.heuristics import bwd_with_options

_ORDER = "order_dq_sm80.h"
_FULL = with_mask(FUSED, "none")
_LOCAL = with_mask(FUSED, "local")
_RAGGED_LOCAL = bwd_with_options(_LOCAL, varlen=True)
_RAGGED_CAUSAL = bwd_with_options(with_mask(FUSED, "causal"), varlen=True)
_PLAN = "flash_plan_kernel.h"
# Reports where a place of the plan is not written, so that its tile lies anywhere or is missing.
_NO_TILE = f"outside every tensor|the runner ended with status|{POLLS}"
_WAIT = """\
        while (before > 0 && sm90::load_acquire(semaphore) < static_cast<uint32_t>(before)) {
        }
"""
_LAST = "if (thread == kCountingThread && count > 0) count_last(params, tile, head - 1);"


def _mutant(
    name: str, file: str, old: str, new: str, config: BwdConfig = _FULL, report: str = ""
) -> Mutant:
    return Mutant(name, file, old, new, "numerics", report, config)


MUTANTS = (
    _mutant("tiles wait for none", _ORDER, "while (before > 0 &&", "while (before < 0 &&"),
    _mutant(
        *("tiles wait for one alone", _ORDER),
        *("< static_cast<uint32_t>(before)", "< 1u"),
    ),
    _mutant(
        "a part is counted before it is added",
        _ORDER,
        _WAIT,
        f"{_WAIT}        count(params, block, row);\n",
    ),
    _mutant(
        "the last part is not counted",
        "mainloop_bwd_sm80.h",
        *(_LAST, ""),
        report=POLLS,
    ),
    _mutant(
        "the last part of a head is not counted",
        "mainloop_bwd_sm80.h",
        "kCountingThread && head > tile.head_q",
        "kCountingThread && head < tile.head_q",
        _LOCAL,
        POLLS,
    ),
    _mutant(
        "tiles wait for those that do not visit the block, too",
        _ORDER,
        "tile.m_block - Info::first_visitor(params, tile, block / kBlocks * kBlocks);",
        "tile.m_block;",
        _LOCAL,
        POLLS,
    ),
    _mutant(
        "each block is counted",
        _ORDER,
        "block % kBlocks == kBlocks - 1",
        "block >= 0",
    ),
    _mutant(
        "the last group has as many heads as the others",
        "work_plan.h",
        "cute::min(group, heads - before)",
        "group",
        report="outside every tensor",
    ),
    _mutant(
        "a plan has the longest tiles first",
        "flash_bwd_launch_template.h",
        "kOrdered ? Scheduler::sequences_in_turns(params, workers) : 0;",
        "0;",
        _RAGGED_LOCAL,
        POLLS,
    ),
    _mutant(
        "sequences in turns have the same place",
        _PLAN,
        "within + (r < rank ? 1 : 0)",
        "within",
        _RAGGED_CAUSAL,
        _NO_TILE,
    ),
    _mutant(
        "each group of sequences is the first one",
        _PLAN,
        "storage.bucket[kMostRanked + begin]",
        "storage.bucket[kMostRanked]",
        _RAGGED_CAUSAL,
        _NO_TILE,
    ),
    _mutant(
        "sequences as long as each other have the same rank",
        _PLAN,
        "(other == mine && j < i)",
        "(other == mine && j < 0)",
        _RAGGED_CAUSAL,
        _NO_TILE,
    ),
    _mutant(
        "more sequences take turns than have a rank",
        _PLAN,
        "bool const few = 2 * params.b + 1 <= kMostRanked;",
        "bool const few = params.b > 0;",
        _RAGGED_CAUSAL,
        _NO_TILE,
    ),
    _mutant(
        "a sequence that has ended still takes its turn",
        _PLAN,
        "place += cute::min(tiles, within",
        "place += cute::min(tiles + 1, within",
        _RAGGED_CAUSAL,
        _NO_TILE,
    ),
    _mutant(
        "the counter of tiles is not reset",
        "flash_bwd_preprocess_kernel.h",
        "if (first_row == 0) *Stats::tile_counter(params) = 0;",
        "",
        report="outside every tensor",
    ),
)
