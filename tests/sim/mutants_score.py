"""Faults planted into softcap and ALiBi, in the form of :mod:`mutants`."""

from __future__ import annotations

import dataclasses

from mutants import TWO_STAGES, Mutant
from mutants_sm90 import ASKING

BOTH = {"mask": "local", "softcap": True, "alibi": True}
SM80 = dataclasses.replace(TWO_STAGES, **BOTH)
SM90 = dataclasses.replace(ASKING, **BOTH)
# Softcap without ALiBi has a form of its own for small scores.
CAPPING = dataclasses.replace(ASKING, mask="local", softcap=True)

_SCORES = "score_mod.h"
_SM80 = "mainloop_fwd_sm80.h"
_SM90 = "mainloop_fwd_sm90.h"
_DISTANCE = "fabsf(first - static_cast<float>(key_at(j)))"
_MODIFY_SM80 = "                score_mod.apply(tSrS, thread, block(n));\n"
_MASK_SM80 = "                if (masked) mask.template apply<Traits>(tSrS, thread, block(n));\n"
_MODIFY_SM90 = "            score_mod.apply(tSrS, thread, block(), capped);\n"
_MASK_SM90 = (
    "            if (masked) Mask<C>{params, tile}.template apply<Traits>(tSrS, thread, block());\n"
)


def _numerics(name: str, file: str, old: str, new: str, config=SM80) -> Mutant:
    return Mutant(name, file, old, new, "numerics", "", config)


OF_SM80 = (
    _numerics("slope of the first packed head", _SCORES, "slopes[row.head]", "slopes[0]"),
    _numerics(
        "distance from the top-left corner",
        _SCORES,
        "row_position(params, row) + tile.seqlen_k - tile.seqlen_q",
        "row_position(params, row)",
    ),
    _numerics("distance with a sign", _SCORES, _DISTANCE, _DISTANCE.removeprefix("fabsf")),
    _numerics(
        "slopes of the first entry",
        _SCORES,
        "slopes += entry * params.alibi_slopes_batch_stride;",
        "",
    ),
    _numerics(
        "slopes of the sequence before",
        "work_tile.h",
        "[middle] <= tile.row_q",
        "[middle] < tile.row_q",
    ),
    _numerics("small scores lost in tanh", _SCORES, "fabsf(y) < 2.f ? small : large", "large"),
    _numerics("forms of tanh change at 1 where a warp has both", _SCORES, "y) < 2.f", "y) < 1.f"),
    _numerics("polynomial of tanh beyond 2", _SCORES, "(bits & kFromTwo) != 0", "false"),
    _numerics("only the last score tells the forms of tanh apart", _SCORES, "bits |=", "bits ="),
    _numerics(
        "masked before modified", _SM80, _MODIFY_SM80 + _MASK_SM80, _MASK_SM80 + _MODIFY_SM80
    ),
)
MUTANTS = (
    *OF_SM80,
    _numerics(
        "masked before modified, sm90",
        _SM90,
        _MODIFY_SM90 + _MASK_SM90,
        _MASK_SM90 + _MODIFY_SM90,
        SM90,
    ),
    _numerics(
        "first block not modified",
        _SM90,
        "finish_scores(params, tile, score_mod, tSrS, n, n >= unmasked);",
        "if (n >= unmasked) Mask<C>{params, tile}.template apply<Traits>(\n"
        "    tSrS, thread, tile.blocks.template block<C.mask>(n));",
        SM90,
    ),
    _numerics(
        "blocks without a maximum not modified",
        _SM90,
        "finish_scores(params, tile, score_mod, tSrS, n, false);",
        "",
        SM90,
    ),
    _numerics(
        "small scores not capped", _SCORES, "tSrS(i) *= fmaf(square,", "fmaf(square,", CAPPING
    ),
    _numerics("three terms of tanh beyond 0.28", _SCORES, "0.28f / scale", "1.5f / scale", CAPPING),
    _numerics("a lane's scores alone are small", _SCORES, "!(most < limit)", "false", CAPPING),
    _numerics(
        "cubic term of small scores without its scale",
        _SCORES,
        "f * scale * square;",
        "f * scale;",
        CAPPING,
    ),
    _numerics(
        "score capped twice",
        _SM90,
        "apply(tSrS, thread, block(), capped)",
        "apply(tSrS, thread, block(), false)",
        CAPPING,
    ),
    _numerics(
        "large scores of a tile change how the next one is capped",
        _SM90,
        "            small = kSmallCap;\n",
        "",
        CAPPING,
    ),
)
