"""Faults planted where the query heads of a key head are divided into parts, as in
``mutants.py``."""

from __future__ import annotations

from mutants import Mutant
from mutants_bwd_fused import FUSED
from mutants_bwd_sm90 import COLUMNS

_PARTS = "head_parts.h"
_SUM = "flash_bwd_sum_parts.h"
_SCHEDULER = "tile_scheduler_bwd_sm90.h"


def _numerics(name, file, old, new, config=COLUMNS) -> Mutant:
    return Mutant(name, file, old, new, "numerics/late", "", config)


MUTANTS = (
    _numerics(
        "the keys of another head than the part's",
        *(_SCHEDULER, "tile.head_k = tile.head / params.head_parts;"),
        "tile.head_k = tile.head % (params.h_k / params.head_parts);",
    ),
    _numerics(
        "the keys of another head than the part's, sm80",
        *("flash_bwd_kernel_sm80.h", "if (kOfKeys) tile.head_k = tile.head / params.head_parts;"),
        "if (kOfKeys) tile.head_k = tile.head % (params.h_k / params.head_parts);",
        FUSED,
    ),
    _numerics(
        "sums of one part in those of another",
        *(_PARTS, "+ int64_t(tile.head) * params.d;", "+ int64_t(tile.head_k) * params.d;"),
        FUSED,
    ),
    _numerics(
        "sums of dV in the place of those of dK",
        *(_PARTS, "((is_dk ? 0 : num_rows(params)) + row)", "row"),
    ),
    _numerics(
        "sums of each entry of the batch in those of the first one",
        *(_PARTS, "int64_t(tile.batch) * params.seqlen_k", "0"),
        FUSED,
    ),
    Mutant(
        "sums of a row behind the last key",
        *(_PARTS, "key < tile.seqlen_k && ", "", "memcheck"),
        *("outside (every tensor|of )|AddressSanitizer", FUSED),
    ),
    _numerics("a part that is not added", _SUM, "part < parts;", "part < parts - 1;"),
    _numerics(
        "sums of the first head in all",
        *(_SUM, "int64_t(head) * parts * params.d + col", "col"),
        FUSED,
    ),
    _numerics(
        "rows of the first entry for all of them",
        *(_SUM, "C.varlen ? 0 : row / params.seqlen_k;", "0;"),
    ),
    _numerics(
        "dV times the softmax scale",
        _SUM,
        "is_dk ? params.scale_softmax",
        "true ? params.scale_softmax",
    ),
    _numerics(
        "rows behind the last ones of a CTA that are left out",
        *(_SUM, "(Sums::num_rows(params) + kRows - 1) / kRows", "Sums::num_rows(params) / kRows"),
    ),
    Mutant(
        "sums that are read before all are there",
        *(_SUM, "if constexpr (Sum::kDependent) cudaGridDependencySynchronize();", ""),
        *("simulator", "no thread executes griddepcontrol.wait", COLUMNS),
    ),
)
