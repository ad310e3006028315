"""Faults planted into the code for ragged batches in the sm90 class's backward, as in
:mod:`mutants`."""

from __future__ import annotations

import dataclasses

from mutants import Mutant
from mutants_bwd_sm90 import COLUMNS, POLLS, ROWS
from mutants_bwd_wide_sm90 import WIDE

_MAINLOOP = "mainloop_bwd_sm90.h"
_PRODUCER = "producer_bwd_sm90.h"
_ROUNDING = "flash_bwd_postprocess.h"
_PREPROCESS = "flash_bwd_preprocess_kernel.h"
_SCHEDULER = "tile_scheduler_bwd_sm90.h"
_OUTSIDE = "outside (every tensor|of |the tensor)"


def _mutant(name: str, file: str, old: str, new: str, report: str = "", config=ROWS) -> Mutant:
    config = dataclasses.replace(config, varlen=True)
    return Mutant(name, file, old, new, "simulator" if report else "numerics", report, config)


MUTANTS = (
    _mutant(
        "tensor map does not end where a sequence does",
        _PRODUCER,
        "kRaggedRows - length + row, head, begin + length,\n" + 41 * " " + "kRaggedZ",
        "row, head, begin, 0",
        f"^numerics$|{_OUTSIDE}",
    ),
    _mutant(
        "queries end a row later",
        _PRODUCER,
        "storage.q[q.stage()].data(), block * kTileM, tile.row_q, tile.seqlen_q,",
        "storage.q[q.stage()].data(), block * kTileM, tile.row_q, tile.seqlen_q + 1,",
    ),
    _mutant(
        "keys end a row later",
        _PRODUCER,
        "tile.row_k, tile.seqlen_k,\n",
        "tile.row_k, tile.seqlen_k + 1,\n",
    ),
    _mutant(
        "keys from the rows of the queries",
        _PRODUCER,
        "tile.row_k, tile.seqlen_k,\n",
        "tile.row_q, tile.seqlen_k,\n",
        f"^numerics$|{_OUTSIDE}",
    ),
    _mutant(
        "statistics of the first sequence",
        _PRODUCER,
        "Scheduler::stats_begin(tile) / kStatsRow + block",
        "block",
    ),
    _mutant(
        "sums of dQ in the region of the first sequence",
        "tile_scheduler_bwd_sm90.h",
        "* rows) + stats_begin(tile) + block",
        "* rows) + block",
        config=COLUMNS,
    ),
    _mutant(
        "dK and dV at the rows of the queries", _MAINLOOP, "tile().row_k : 0", "tile().row_q : 0"
    ),
    _mutant(
        "plan read as one of query heads",
        _SCHEDULER,
        "of_head.tiles[at.tile], params.head_parts",
        "of_head.tiles[at.tile], params.h_h_k_ratio",
    ),
    _mutant(
        "a sorted plan with tiles of a sequence ahead of its first one",
        "flash_plan_kernel.h",
        "blocks += blocks / 8 + 1;",
        ";",
        POLLS,
    ),
    _mutant(
        "sequences that overlap in a plan",
        "flash_plan_kernel.h",
        "static_cast<unsigned>(end - begin)",
        "1u",
    ),
    _mutant(
        "the tiles of a sequence in the reverse order",
        "flash_plan_kernel.h",
        "place = tile.partial_row + within;",
        "place = tile.partial_row - within - 1 +"
        " (low < 2 * params.b ? segments[low + 1].m_block : tiles) - segments[low].m_block;",
        POLLS,
        dataclasses.replace(ROWS, mask="local"),
    ),
    _mutant(
        "query head of the first group",
        _SCHEDULER,
        "tile.head_q = tile.head * params.h_h_k_ratio;\n            set_blocks",
        "tile.head_q = 0;\n            set_blocks",
    ),
    _mutant(
        "tiles beyond the count computed",
        _SCHEDULER,
        "return {of_a_head * params.h_k,",
        "return {(of_a_head + 1) * params.h_k,",
        f"^numerics$|{_OUTSIDE}|status -8",  # SIGFPE: a division by zero
    ),
    _mutant(
        "plan read before it is complete",
        _PRODUCER,
        "if (waits_first) cudaGridDependencySynchronize();",
        "",
        "before griddepcontrol.wait|no thread executes griddepcontrol.wait|^numerics$",
    ),
    # In tiles of keys that no query sees, the first CTA of a cluster can run ahead, as it needs
    # nothing from the other CTA.
    _mutant(
        "next tile's number sent before the other CTA has read an earlier one",
        _PRODUCER,
        "sm90::barrier_wait(&other.next_empty[slot], numbers.parity() ^ 1);",
        "",
        "transaction bytes: .* of mbarrier",
        WIDE,
    ),
    _mutant(
        "dQ from the first row on", _ROUNDING, "segment.begin + first_position", "first_position"
    ),
    _mutant("dQ beyond a sequence's rows", _ROUNDING, "row < segment.end", "row < params.total_q"),
    _mutant("gradients of rows of no sequence", _ROUNDING, "< segment.length", "< segment.end"),
    _mutant(
        "no room for the rows before the first sequence",
        "flash.h",
        "(row_q / kRowStatsMultiple + i + 1)",
        "(row_q / kRowStatsMultiple + (i < 0 ? 0 : i))",
    ),
    _mutant(
        "no zeros where all tiles of a sequence add to dQ",
        _PREPROCESS,
        "!Stats::are_stored(params, segment)",
        "params.stores_first == 0",
    ),
    _mutant(
        "statistics behind a sequence",
        _PREPROCESS,
        "position < segment.length",
        "segment.begin + position < segment.end",
    ),
)
