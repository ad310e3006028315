"""Configurations of these tests that are compiled together, as they share a tile: alone, each
takes as long as all of them."""

from __future__ import annotations

import dataclasses

import backward
import mutants_bwd_dropout
import mutants_dropout
import mutants_score
from mutants import ONE_STAGE, TWO_STAGES
from mutants_bwd_sm90 import COLUMNS, ROWS
from mutants_sm90 import ASKING, DECODING, STRIDING

from flashcute import sim
from flashcute.config import MASKS

replace = dataclasses.replace


def _masks(config):
    return [replace(config, mask=mask) for mask in MASKS]


def _paged(config):
    return replace(config, paged=True)


for _group in (
    (
        *(*_masks(TWO_STAGES), _paged(TWO_STAGES), mutants_score.SM80),
        *(mutants_dropout.SM80, _paged(mutants_dropout.SM80)),
    ),
    (*_masks(ONE_STAGE), replace(ONE_STAGE, alibi=True), replace(ONE_STAGE, dropout=True)),
    (
        *(*_masks(ASKING), _paged(ASKING), replace(ASKING, alibi=True)),
        *(mutants_score.SM90, mutants_dropout.SM90),
    ),
    (DECODING, _paged(DECODING)),
    (*_masks(STRIDING), _paged(STRIDING), replace(STRIDING, softcap=True, alibi=True)),
    (*_masks(backward.TOGETHER), *_masks(mutants_bwd_dropout.TOGETHER)),
    (*_masks(backward.SPLIT), *_masks(mutants_bwd_dropout.SPLIT)),
    *(_masks(replace(config, varlen=True)) for config in (ROWS, COLUMNS)),
):
    sim.compile_together(_group)
# The checkers' instrumentation takes longer, and is asked for with windows and without.
for _config in (TWO_STAGES, ASKING):
    _checkers = [checker for checker in sim.CHECKERS if checker != "none"]
    _windowed = _config, replace(_config, mask="local")
    sim.compile_together(_windowed, _checkers)
    sim.compile_together((*_windowed, _paged(_config)), ["memcheck"])
