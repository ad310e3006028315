"""Faults planted into dropout, in the form of :mod:`mutants`."""

from __future__ import annotations

import dataclasses

from mutants import TWO_STAGES, Mutant
from mutants_sm90 import ASKING

# Its warps have 32 rows, so that a thread has rows of two 16 x 16 blocks.
SM80 = dataclasses.replace(TWO_STAGES, mask="local", tile_m=128, dropout=True)
SM90 = dataclasses.replace(ASKING, mask="local", dropout=True)

_DROPOUT = "dropout.h"
_SM80 = "mainloop_fwd_sm80.h"
_SM90 = "mainloop_fwd_sm90.h"
_UPDATE = "            softmax.update(tSrS, rP, tOrO, bounded, masked);\n"
_DROP_SM90 = "dropout.apply(tOrP, tile.blocks.template block<C.mask>(n));"


def _numerics(name: str, file: str, old: str, new: str, config=SM80) -> Mutant:
    return Mutant(name, file, old, new, "numerics", "", config)


OF_SM80 = (
    _numerics("row of the tile", _DROPOUT, "tile.m_block * C.tile_m + Traits", "Traits"),
    _numerics("one row for both blocks", _DROPOUT, "first_row + m * (C.warps * 8)", "first_row"),
    _numerics("key of the block", _DROPOUT, "n_block * (C.tile_n / 4) + ", ""),
    _numerics("entries alike", _DROPOUT, "static_cast<uint32_t>(entry) * params.h + ", ""),
    _numerics("sequences alike", _DROPOUT, "? sequence_of(params, tile)", "? 0"),
    _numerics("halves exchanged", _DROPOUT, "? word >> 16 : word", "? word : word >> 16"),
    _numerics("flip left out", _DROPOUT, " != (params.dropout_flip != 0)", ""),
    _numerics("six rounds", _DROPOUT, "kRounds = 7", "kRounds = 6"),
    _numerics("offset left out", _DROPOUT, "random[3] = offset", "random[3] = 0"),
    _numerics("scale left out", "epilogue_fwd.h", "? params.dropout_scale : 1.f", "? 1.f : 1.f"),
    _numerics(
        "dropped before the sum",
        _SM80,
        _UPDATE,
        "            Tensor ones = make_tensor<Element>(tSrS.layout());\n"
        "            fill(ones, Element(1.f));\n"
        "            Tensor kept =\n"
        "                make_tensor(ones.data(), layout_acc_as_operand_a(ones.layout()));\n"
        "            dropout.apply(kept, block(n));\n"
        "            for (int i = 0; i < size(ones); ++i) {\n"
        "                if (float(ones(i)) == 0.f) tSrS(i) = -INFINITY;\n"
        "            }\n" + _UPDATE,
    ),
)
MUTANTS = (
    *OF_SM80,
    _numerics("flip of pairs left out", _DROPOUT, " ^ params.dropout_flip", "", SM90),
    _numerics(
        "first block not dropped",
        _SM90,
        f"softmax.start(tSrS, tOrP);\n                {_DROP_SM90}",
        "softmax.start(tSrS, tOrP);",
        SM90,
    ),
    _numerics(
        "bounded blocks not dropped",
        _SM90,
        f"raised, factor);\n                        {_DROP_SM90}",
        "raised, factor);",
        SM90,
    ),
    _numerics(
        "unbounded blocks not dropped",
        _SM90,
        f"update_unbounded(tSrS, tOrP, tOrO);\n                        {_DROP_SM90}",
        "update_unbounded(tSrS, tOrP, tOrO);",
        SM90,
    ),
)
