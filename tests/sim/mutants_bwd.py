"""Faults planted into the backward kernels, as in ``mutants.py``."""

from __future__ import annotations

from backward import SPLIT, TOGETHER, with_mask
from mutants import Mutant

_MAINLOOP = "mainloop_bwd_sm80.h"
_KERNEL = "flash_bwd_kernel_sm80.h"
_PREPROCESS = "flash_bwd_preprocess_kernel.h"
_BLOCKS = "block_info.h"
_STEP = """\
            cp_async_wait<0>();
            __syncthreads();
            if constexpr (kOrdered) take_turn(params, tile, head, n);
"""
_RACE = "data race"
_WINDOW = with_mask(TOGETHER, "local")


def _mutant(name, file, old, new, finder="numerics/late", report="", config=TOGETHER) -> Mutant:
    return Mutant(name, file, old, new, finder, report, config)


MUTANTS = (
    _mutant("wait before the step", _MAINLOOP, _STEP, _STEP.replace("cp_async_wait<0>();", "")),
    _mutant(
        *("barrier before the step", _MAINLOOP, _STEP, _STEP.replace("__syncthreads();", "")),
        *("racecheck", _RACE),
    ),
    _mutant(
        "barrier before a single stage is overwritten",
        _MAINLOOP,
        "__syncthreads();  // every warp has read",
        "// every warp has read",
        *("racecheck", _RACE),
    ),
    _mutant(
        "barrier before a gradient takes the bytes of an input",
        _KERNEL,
        "__syncthreads();  // every warp is done",
        "// every warp is done",
        *("racecheck", _RACE),
    ),
    _mutant("stage not switched", _MAINLOOP, "stage ^= 1;", ";"),
    _mutant("mask forgotten", _MAINLOOP, "if (is_cut(tile, n)) mask", "if (false) mask"),
    _mutant(
        "mask off by one",
        _MAINLOOP,
        "first_query + query_of(thread, i); }, first_key",
        "first_query + 1 + i; }, first_key",
    ),
    _mutant("head of the group not advanced", _MAINLOOP, "? head : head + 1", "? head : head"),
    _mutant(
        "statistics of the first head of the group",
        _MAINLOOP,
        "stats_of(params, tile, head, n)",
        "stats_of(params, tile, tile.head_q, n)",
    ),
    _mutant(
        "statistics of a head without their padding",
        _MAINLOOP,
        "* params.seqlen_q_rounded",
        "* params.seqlen_q",
    ),
    _mutant("D not subtracted", _MAINLOOP, "(ds(i, j) - d)", "ds(i, j)"),
    _mutant("D over half of the columns", _PREPROCESS, "Stats::kLanes / 2", "Stats::kLanes / 4"),
    _mutant(
        "minus infinity minus minus infinity",
        _PREPROCESS,
        "sees ? lse * Stats::kLog2e : INFINITY",
        "lse * Stats::kLog2e",
    ),
    _mutant("gradient of the LSE added", _PREPROCESS, "sum - d_lse", "sum + d_lse"),
    _mutant(
        *("sum of a thread's last row", _PREPROCESS, "if (lane == r) sum = part;", "sum = part;"),
        config=SPLIT,
    ),
    _mutant(
        "LSE of a thread's last row",
        _PREPROCESS,
        "row_of(cute::min(lane, Stats::kPerThread - 1))",
        "row_of(Stats::kPerThread - 1)",
        config=SPLIT,
    ),
    _mutant("gradient of a sink negated", _PREPROCESS, "sum -= Stats", "sum += Stats"),
    _mutant(
        "dK not scaled",
        _KERNEL,
        "params.dk_row_stride, params.d, dX, params.scale_softmax",
        "params.dk_row_stride, params.d, dX, 1.f",
    ),
    _mutant(
        "row predicate of a gradient",
        _KERNEL,
        "row < seqlen}",
        "true}",
        "simulator",
        "store of 16 bytes outside every tensor",
    ),
    _mutant(
        "first unmasked query block too early",
        _BLOCKS,
        "(last.begin + kTileM - 1) / kTileM",
        "last.begin / kTileM",
    ),
    _mutant(
        "first query block skipped", _BLOCKS, "first.begin / kTileM", "first.begin / kTileM + 1"
    ),
    _mutant(
        "last query of a window lost",
        _BLOCKS,
        "diagonal + params.window_left + 1, tile.seqlen_q",
        "diagonal + params.window_left - 31, tile.seqlen_q",
        config=_WINDOW,
    ),
    _mutant(
        "query block that sees no key of the tile",
        _BLOCKS,
        "(cute::max(last.end, 0) + kTileM - 1)",
        "(cute::max(last.end, 0) + 2 * kTileM - 1)",
        "counters",
        config=_WINDOW,
    ),
)
