"""Faults planted into the sm80 class's backward of one fused kernel, as in ``mutants.py``."""

from __future__ import annotations

import dataclasses

from mutants import Mutant

from flashcute.config import BwdConfig, BwdTile

_KEYS, _BOTH = BwdTile(64, 32, 4, 2, 1), BwdTile(64, 64, 4, 1, 1, 2)
# Warps divide keys, and P stays in registers. FUSED has two stages, ONE_STAGE one.
FUSED = BwdConfig(80, "fp16", 32, "causal", _KEYS, _KEYS, fused=True)
_ONE = dataclasses.replace(_KEYS, stages=1)
ONE_STAGE = dataclasses.replace(FUSED, dq=_ONE, dkv=_ONE)
# Warps divide keys and queries, and P goes through shared memory.
DIVIDED = BwdConfig(80, "bf16", 64, "causal", _BOTH, _BOTH, fused=True)

_MAINLOOP = "mainloop_bwd_sm80.h"
_KERNEL = "flash_bwd_kernel_sm80.h"
_SUMS = "dq_sums.h"
_TRAITS = "kernel_traits.h"
_RACE = "data race"
_OF_BLOCK = "sums(params, block.workspace_row, thread)"


def _mutant(name, file, old, new, finder="numerics/late", report="", config=FUSED) -> Mutant:
    return Mutant(name, file, old, new, finder, report, config)


def _without_barrier(name: str, old: str, config: BwdConfig) -> Mutant:
    new = old.replace("__syncthreads();", ";")
    return _mutant(name, _MAINLOOP, old, new, "racecheck", _RACE, config)


MUTANTS = (
    _without_barrier("barrier before dS is read", "__syncthreads();  // dS is complete", FUSED),
    _without_barrier(
        *("barrier before dS and P are read", "__syncthreads();  // dS is complete", DIVIDED),
    ),
    _without_barrier(
        "barrier before a step that warps share is overwritten",
        "if (kStages == 1) __syncthreads();",
        DIVIDED,
    ),
    _mutant(
        "barrier before a single stage is overwritten, with dS before it",
        _MAINLOOP,
        "                if constexpr (Traits::kSumsDq) share(rDs, storage.ds);\n"
        "                if constexpr (!Traits::kSharesP) accumulate(dX, rDs, step_x);\n"
        "            }\n"
        "            if constexpr (Traits::kSumsDq) {\n"
        "                __syncthreads();",
        "                if constexpr (Traits::kSumsDq) share(rDs, storage.ds);\n"
        "                __syncthreads();\n"
        "                if constexpr (!Traits::kSharesP) accumulate(dX, rDs, step_x);\n"
        "            }\n"
        "            if constexpr (Traits::kSumsDq) {\n",
        *("racecheck", _RACE, ONE_STAGE),
    ),
    _mutant(
        "sums read in another order",
        _SUMS,
        "float const *const sums = begin + i * 32;",
        "float const *const sums = begin + (i ^ 4) * 32;",
    ),
    _mutant(
        "warps' columns of dQ exchanged",
        _KERNEL,
        _OF_BLOCK,
        _OF_BLOCK.replace("thread", "thread ^ 64"),
    ),
    _mutant(
        "warps' rows of dQ exchanged",
        _KERNEL,
        _OF_BLOCK,
        _OF_BLOCK.replace("thread", "thread ^ 32"),
    ),
    _mutant(
        "sums not zeroed",
        "flash_bwd_preprocess_kernel.h",
        "kZerosDq = C.fused",
        "kZerosDq = false",
    ),
    _mutant("dQ not scaled", _KERNEL, "tQrDq(i) * params.scale_softmax", "tQrDq(i)"),
    _mutant(
        "dQ stored, not added",
        _SUMS,
        "sm90::reduce_add(sums, a, b, c, d);",
        "*reinterpret_cast<float4 *>(sums) = make_float4(a, b, c, d);",
    ),
    _mutant(
        "dQ of the first head of the group",
        _MAINLOOP,
        "= workspace_row(params, tile, head, n);",
        "= workspace_row(params, tile, tile.head_q, n);",
    ),
    _mutant(
        "dQ of another block",
        _MAINLOOP,
        "add_dq(params, storage, tile, head, block(n))",
        "add_dq(params, storage, tile, head, n)",
    ),
    _mutant(
        "infinite P behind the last key",
        _KERNEL,
        "if constexpr (Traits::kSumsDq) Info::mask_behind_keys(tile, tile.seqlen_k);",
        "",
    ),
    _mutant(
        "dV of dS",
        _MAINLOOP,
        "accumulate_shared(dY, storage.p, step_y)",
        "accumulate_shared(dY, storage.ds, step_y)",
        config=DIVIDED,
    ),
    _mutant(
        "mask of another warp's queries",
        _TRAITS,
        "thread / (32 * kWarpsM) * 16 + thread % 4",
        "thread % 4",
        config=DIVIDED,
    ),
    _mutant(
        "mask of another warp's keys",
        _TRAITS,
        "thread / 32 % kWarpsM * 16",
        "thread / 64 % kWarpsM * 16",
        config=DIVIDED,
    ),
)
