"""Faults planted into the dropout of the backward, in the form of :mod:`mutants`."""

from __future__ import annotations

import dataclasses

import backward
import mutants_bwd_fused
from mutants import Mutant

TOGETHER = dataclasses.replace(backward.TOGETHER, dropout=True)
# Its warps have 32 rows for dQ, so that a thread has rows of two 16 x 16 blocks.
SPLIT = dataclasses.replace(backward.SPLIT, dropout=True)
# Its warps divide not only the keys but also the visited queries.
DIVIDED = dataclasses.replace(mutants_bwd_fused.DIVIDED, dropout=True)

_DROPOUT = "dropout.h"


def _mutant(name: str, old: str, new: str, file: str = _DROPOUT, config=TOGETHER) -> Mutant:
    return Mutant(name, file, old, new, "numerics", "", config)


MUTANTS = (
    _mutant("drawn with another offset", "random[3] = offset", "random[3] = offset + 1"),
    _mutant(
        "dV not rescaled",
        "Traits::kConfig.dropout ? params.dropout_scale : 1.f",
        "1.f",
        "flash_bwd_kernel_sm80.h",
    ),
    _mutant("dP not rescaled", "dp * mask.params.dropout_scale", "dp"),
    _mutant("dropped weights have a dP", "p < 0.f ? 0.f : dp", "dp"),
    _mutant("dropped weights left out of dS", "p = fabsf(p)", "p = fmaxf(p, 0.f)"),
    _mutant("dV of all weights", "fmaxf(tSrP(i), 0.f)", "fabsf(tSrP(i))"),
    _mutant("heads of a group alike", "first_head + head_q", "first_head"),
    _mutant("entries of a backward alike", "static_cast<uint32_t>(tile.batch) * params.h", "0"),
    _mutant("visited block left out", "first_step + n * (", "first_step + 0 * ("),
    _mutant("both queries of a thread alike", "step + call", "step"),
    _mutant("all keys of a thread even", "i % 2 != 0 : key_is_odd", "i % 2 != 0 : false"),
    _mutant(
        "one row for both blocks of a warp",
        "first_own + m * (kWarps * kOwnOf16)",
        "first_own",
        config=SPLIT,
    ),
    _mutant(
        "warps of a step draw as one",
        "first + k * (Traits::kTile.warps_step * kStepOf16)",
        "first + k * kStepOf16",
        config=DIVIDED,
    ),
)
