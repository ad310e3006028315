"""Faults planted into the code for ragged batches, in the form of :mod:`mutants`."""

from __future__ import annotations

from mutants import Mutant
from mutants_sm90 import ASKING, STRIDING

_MAINLOOP = "mainloop_fwd_sm90.h"
_SEGMENTS = "plan_segments.h"
_OUTSIDE = "outside (every tensor|of )"

MUTANTS = (
    Mutant(
        "keys do not end where a sequence does",
        _MAINLOOP,
        "tile.seqlen_k - row, tile.head_k, tile.batch_k",
        "kTileN, tile.head_k, tile.batch_k",
        "numerics",
        "",
        ASKING,
    ),
    Mutant(
        "keys end a row later",
        _MAINLOOP,
        "tile.seqlen_k - row, tile.head_k, tile.batch_k",
        "tile.seqlen_k + 1 - row, tile.head_k, tile.batch_k",
        "numerics",
        "",
        STRIDING,
    ),
    Mutant(
        "queries end a row earlier",
        _MAINLOOP,
        "tile.seqlen_q - position, tile.head",
        "tile.seqlen_q - 1 - position, tile.head",
        "numerics",
        "",
        ASKING,
    ),
    Mutant(
        "a tensor's rows begin a row later",
        "tensor_maps_sm90.h",
        "{kRaggedRows - rows,",
        "{kRaggedRows - rows + 1,",
        "numerics",
        "",
        ASKING,
    ),
    Mutant(
        "keys of the next sequence",
        _SEGMENTS,
        "read(keys(), i, tile.row_k",
        "read(keys(), cute::min(i + 1, params.b - 1), tile.row_k",
        "numerics",
    ),
    Mutant(
        "tile beyond the count computed",
        "flash_fwd_kernel_sm80.h",
        "index >= planned_tiles(params, own)",
        "index > planned_tiles(params, own)",
        "simulator",
        _OUTSIDE,
    ),
    Mutant(
        "tile beyond the count computed, persistent CTAs",
        _MAINLOOP,
        "queue.tiles = planned_tiles(params, plan());",
        "queue.tiles = planned_tiles(params, plan()) + 1;",
        "simulator",
        _OUTSIDE,
        ASKING,
    ),
    Mutant(
        "queries' offset for the keys",
        "mainloop_fwd_sm80.h",
        "int const row = C.paged ? 0 : tile.row_k;",
        "int const row = C.paged ? 0 : tile.row_q;",
        "numerics",
    ),
    Mutant(
        "keys' offset for the output",
        "epilogue_fwd.h",
        "tile.row_q * params.o_row_stride",
        "tile.row_k * params.o_row_stride",
        "simulator",
        _OUTSIDE,
    ),
    Mutant(
        "queries' offset for the keys, TMA",
        _MAINLOOP,
        "kTileN, tile.row_k + row,",
        "kTileN, tile.row_q + row,",
        "numerics",
        "",
        ASKING,
    ),
    Mutant(
        "keys up to the end of the last sequence",
        _SEGMENTS,
        "int const end = first_row(rows, i + 1);",
        "int const end = rows.total;",
        "numerics",
    ),
)
