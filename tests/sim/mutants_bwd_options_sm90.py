"""Faults planted into softcap, ALiBi and dropout in the backward of the sm90 class, in the form of
:mod:`mutants`."""

from __future__ import annotations

from backward_options import asking
from mutants import Mutant
from mutants_bwd_sm90 import COLUMNS, IN_FLIGHT, ROWS
from mutants_bwd_wide_sm90 import ARRIVES_TWICE, DEADLOCK, UNWRITTEN_SUMS, WIDE, WIDEST

_WEIGHTS = "weights_bwd_sm90.h"
CAPPED = asking(COLUMNS, "causal", "softcap")
SLOPED = asking(ROWS, "causal", "alibi")
DROPPED = asking(COLUMNS, "causal", "dropout")
DROPPED_64 = asking(ROWS, "none", "dropout")
DROPPED_WIDE = asking(WIDE, "causal", "dropout")
CAPPED_WIDE = asking(WIDEST, "local", "softcap")
SLOPED_AND_CAPPED = asking(COLUMNS, "local", "softcap", "alibi")  # sees keys behind the diagonal
DROPPED_AND_CAPPED = asking(WIDE, "causal", "softcap", "dropout")


def _mutant(name: str, config, old: str, new: str, file: str = _WEIGHTS) -> Mutant:
    return Mutant(name, file, old, new, "numerics", "", config)


MUTANTS = (
    Mutant(
        *("dV before dO is there", "mainloop_bwd_64_sm90.h"),
        *("if constexpr (kLateDp) this->await_dout();", "", "simulator"),
        *("without having waited for phase", DROPPED_64),
    ),
    _mutant(
        "derivative of the softcap of a score that is masked",
        CAPPED,
        "derivative_of_capped(fmaxf(capped(i), -1.f))",
        "derivative_of_capped(capped(i))",
    ),
    _mutant(
        "derivative of the softcap of the weight",
        CAPPED_WIDE,
        "fmaxf(capped(i), -1.f)",
        "fmaxf(block(i), -1.f)",
    ),
    _mutant(
        "P rounded again once it is multiplied",
        CAPPED,
        "if constexpr (!Weights::kRoundsEarly) {",
        "if constexpr (true) {",
        "mainloop_bwd_sm90.h",
    ),
    _mutant(
        "P rounded again once it is multiplied, d > 128",
        CAPPED_WIDE,
        "if constexpr (!Weights::kRoundsEarly) Weights::round(tSrS, tKrP);",
        "Weights::round(tSrS, tKrP);",
        "mainloop_bwd_wide_sm90.h",
    ),
    Mutant(
        *("dS computed before dP is complete, behind dV", "mainloop_bwd_64_sm90.h"),
        *("sm90::wgmma_wait<!kLateDp>();", "sm90::wgmma_wait<1>();", "simulator"),
        *(IN_FLIGHT, DROPPED_64),
    ),
    _mutant("queries 8 apart exchanged", DROPPED, "dropped << 16 & kSign", "dropped & kSign"),
    _mutant("scores not capped", CAPPED, "cap_scores(params, tSrS);", ";", "mainloop_bwd_sm90.h"),
    _mutant("slope of the first head for all", SLOPED, "[entry + head]", "[entry + tile.head_q]"),
    _mutant(
        "slopes of the first entry for all",
        SLOPED,
        "int64_t const entry = tile.batch * params.alibi_slopes_batch_stride",
        "int64_t const entry = 0",
    ),
    _mutant(
        "distance with its sign",
        SLOPED_AND_CAPPED,
        "fabsf(first - static",
        "(first - static",
        "score_mod.h",
    ),
    _mutant(
        "keys 8 apart alike", SLOPED, "return Traits::key_of(0, j)", "return Traits::key_of(0, 0)"
    ),
    _mutant(
        "diagonal of as many keys as queries",
        SLOPED,
        "query + tile.seqlen_k - tile.seqlen_q",
        "query",
    ),
    _mutant("dV of all weights", DROPPED, "fmaxf(weights(i), 0.f)", "fabsf(weights(i))"),
    _mutant(
        "dV of the sm90 class not rescaled",
        DROPPED_WIDE,
        "Traits::kConfig.dropout ? params.dropout_scale : 1.f",
        "1.f",
        "mainloop_bwd_sm90.h",
    ),
    _mutant("dP of the sm90 class not rescaled", DROPPED, "dp * params.dropout_scale", "dp"),
    _mutant("dP of dropped weights", DROPPED_WIDE, "p < 0.f ? 0.f : dp", "dp"),
    _mutant("dropped weights not in dS", DROPPED, "p = fabsf(p)", "p = fmaxf(p, 0.f)"),
    _mutant(
        "calls of the generator not exchanged",
        DROPPED,
        "odd ? low : high, 4)",
        "odd ? low : high, 0)",
    ),
    _mutant(
        "both queries by the thread's own call", DROPPED, "i + 1, odd ? own", "i + 1, true ? own"
    ),
    _mutant("a call for an even query alone", DROPPED, "16 * k + odd)", "16 * k)"),
    _mutant("keys of a thread alike", DROPPED, "second = random[2 * i + 1]", "second = random[1]"),
    _mutant(
        "blocks of queries alike", DROPPED_WIDE, "first_query + 16 * k + odd", "first_query + odd"
    ),
    _mutant(
        "dropout of the first head for all",
        DROPPED,
        "* params.h + head;",
        "* params.h + tile.head_q;",
    ),
    _mutant(
        "dropout of the first entry for all",
        DROPPED,
        "static_cast<uint32_t>(tile.batch) * params.h + head",
        "head",
    ),
    _mutant(
        "distances of the first block of queries for all",
        SLOPED,
        "first_query + 16 * k + Traits",
        "first_query + Traits",
    ),
    _mutant(
        "derivative of the softcap of a score that ALiBi has lowered",
        SLOPED_AND_CAPPED,
        "copy(block, capped);\n                weights.lower(block, k);",
        "weights.lower(block, k);\n                copy(block, capped);",
        "mainloop_bwd_sm90.h",
    ),
    _mutant(
        "dropped weights that the derivative of the softcap makes kept ones",
        DROPPED_AND_CAPPED,
        "block(i) *= derivative_of_capped(",
        "block(i) = fabsf(block(i)) * derivative_of_capped(",
    ),
    Mutant(
        *("P overwritten before it is taken, several options", "mainloop_bwd_wide_sm90.h"),
        *("if constexpr (Traits::kSeveralOptions) await_room_for_p();", "", "simulator"),
        *(f"{ARRIVES_TWICE}|{DEADLOCK}", DROPPED_AND_CAPPED),
    ),
    Mutant(
        *("dQ never handed over, several options", "mainloop_bwd_sm90.h"),
        *("if constexpr (Traits::kSeveralOptions) finish_dq(done);", "", "simulator"),
        *(DEADLOCK, SLOPED_AND_CAPPED),
    ),
    Mutant(
        *("dQ handed over before it is complete, several options", "mainloop_bwd_sm90.h"),
        "if constexpr (Traits::kSeveralOptions) finish_dq(done);",
        "if constexpr (Traits::kSeveralOptions)\n"
        "                            add_dq(params, done.head, block(done.visit), rDq);",
        *("simulator", UNWRITTEN_SUMS, SLOPED_AND_CAPPED),
    ),
    Mutant(
        *("dQ handed over behind P, too, several options", "mainloop_bwd_sm90.h"),
        *("if constexpr (!Traits::kSeveralOptions) finish_dq(done);", "finish_dq(done);"),
        *("simulator", DEADLOCK, SLOPED_AND_CAPPED),
    ),
)
