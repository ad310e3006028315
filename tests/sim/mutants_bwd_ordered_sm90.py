"""Faults planted into the order in which tiles of the sm90 class add to dQ, as in ``mutants.py``.
They are found by gradients that differ between schedules or are wrong, or by a report."""

from __future__ import annotations

from backward import with_mask
from mutants import Mutant
from mutants_bwd_sm90 import COLUMNS, POLLS, ROWS
from mutants_bwd_wide_sm90 import DEADLOCK, OVERWRITTEN, WIDE

from flashcute.config import BwdConfig
from flashcute.heuristics import bwd_with_options

_WRITER = "writer_dq_sm90.h"
_ORDER = "order_dq_sm90.h"
_PRODUCER = "producer_bwd_sm90.h"
_SCHEDULER = "tile_scheduler_bwd_sm90.h"
_LAUNCH = "flash_bwd_launch_template_sm90.h"
_FULL = with_mask(COLUMNS, "none")
_LOCAL = with_mask(ROWS, "local")
_WIDE_LOCAL = with_mask(WIDE, "local")
_RAGGED_LOCAL = bwd_with_options(_LOCAL, varlen=True)
_RAGGED_FULL = bwd_with_options(_FULL, varlen=True)


def _mutant(
    name: str, file: str, old: str, new: str, config: BwdConfig = ROWS, report: str = ""
) -> Mutant:
    return Mutant(name, file, old, new, "numerics", report, config)


MUTANTS = (
    _mutant(
        "tiles wait for the first one alone",
        _SCHEDULER,
        "if (keeps_order(params)) return before;",
        "if (keeps_order(params)) return before > 0;",
        _FULL,
    ),
    _mutant(
        "tiles behind a window's first one do not wait",
        "block_info.h",
        "return visible_keys<kMask>(params, tile, m_block * kTileM).begin / kTileN;",
        "return visible_keys<kMask>(params, tile, m_block * kTileM).begin / kTileN + 1;",
        _LOCAL,
    ),
    _mutant(
        "first tiles alone store dQ under a window",
        _SCHEDULER,
        "tile.m_block == Info::first_visitor(params, tile, block);",
        "tile.m_block == 0;",
        _LOCAL,
    ),
    _mutant(
        "a window's tiles wait for those that do not visit a block",
        "block_info.h",
        "return visible_keys<kMask>(params, tile, m_block * kTileM).begin / kTileN;",
        "return 0;",
        _WIDE_LOCAL,
        POLLS,
    ),
    _mutant(
        "dQ counted before it is added",
        _WRITER,
        "sm90::bulk_wait();\n            sm90::fence_async_proxy_global();",
        "sm90::fence_async_proxy_global();",
        _LOCAL,
    ),
    _mutant(
        "dQ not counted",
        _WRITER,
        "if (Scheduler::counts(params, tile, block)) {",
        "if (stores) {",
        ROWS,
        POLLS,
    ),
    _mutant(
        "dQ released by one of two writers",
        "mainloop_bwd_sm90.h",
        "&storage.dq_empty, cute::max(writers, 1)",
        "&storage.dq_empty, 1",
        COLUMNS,
        f"{OVERWRITTEN}|{DEADLOCK}|{POLLS}",
    ),
    _mutant(
        "dQ added ahead of the tiles before",
        _WRITER,
        "if (before > 0 && writers == 2) await(semaphore, before);",
        "",
        _LOCAL,
    ),
    _mutant(
        "dQ of a wide head waits for one CTA of a cluster",
        _ORDER,
        "Scheduler::tiles_before(params, tile, block) * Traits::kCluster);",
        "Scheduler::tiles_before(params, tile, block));",
        _WIDE_LOCAL,
    ),
    _mutant(
        "dQ of a wide head counted before it is added",
        _ORDER,
        "sm90::barrier_wait(&storage.dq_stored[stored.stage()], stored.parity());",
        "",
        _WIDE_LOCAL,
        DEADLOCK,
    ),
    _mutant(
        "no thread keeps the order of dQ of a wide head that is added to zeros",
        _ORDER,
        "return Scheduler::keeps_order(params) ? 2 : Scheduler::may_store(params) ? 1 : 0;",
        "return 0;",
        _WIDE_LOCAL,
        DEADLOCK,
    ),
    _mutant(
        "the first tile of a worker not drawn",
        _PRODUCER,
        "if (Traits::kSteals && Scheduler::waits_turn(params)) index = next(params, queue, index);",
        "",
    ),
    _mutant(
        "tiles drawn before the counter is reset",
        _PRODUCER,
        "if (waits_first) cudaGridDependencySynchronize();",
        "if (Traits::kVarlen) cudaGridDependencySynchronize();",
        _LOCAL,
        "before griddepcontrol.wait",
    ),
    _mutant(
        "counter of tiles not reset",
        "flash_bwd_preprocess_kernel.h",
        "if (first_row == 0) *Stats::tile_counter(params) = 0;",
        "",
        ROWS,
        f"{POLLS}|outside every tensor",
    ),
    _mutant(
        "tiles of an owned head drawn",
        _LAUNCH,
        "if (owned) params.deterministic = 0;",
        "",
        ROWS,
        DEADLOCK,
    ),
    _mutant(
        "a plan has the longest tiles first",
        _LAUNCH,
        "params.plan_in_order = TileSchedulerBwdSm90<Traits>::has_sequences_in_order(params);",
        "",
        _RAGGED_LOCAL,
        POLLS,
    ),
    _mutant(
        "long sequences in no order",
        _SCHEDULER,
        "(keeps_order(params) || are_short(params) || of_window)",
        "(are_short(params) || of_window)",
        _RAGGED_FULL,
        POLLS,
    ),
    _mutant(
        "dQ of a wide head added without waiting for its turn",
        "mainloop_bwd_wide_sm90.h",
        "sm90::barrier_wait(&storage.dq_turn[dq_turn().stage()], dq_turn().parity());",
        "",
        _WIDE_LOCAL,
        DEADLOCK,
    ),
)
