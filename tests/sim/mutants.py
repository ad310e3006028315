"""Faults planted into the kernels' sources, each with the checker that has to find it.

A mutant replaces one piece of text, which must occur exactly once. A change of the kernel's text
therefore gives an error instead of a mutant without effect.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from flashcute.config import BwdConfig, FwdConfig

# Small tiles compile and run fast. The two kernels take different paths: TWO_STAGES keeps Q in
# registers, ONE_STAGE keeps it in shared memory.
TWO_STAGES = FwdConfig(80, "fp16", 32, "causal", 64, 32, 4, 2, 2, 1)
ONE_STAGE = FwdConfig(80, "bf16", 64, "causal", 64, 32, 4, 1, 0, 1)
WINDOW = dataclasses.replace(TWO_STAGES, mask="local")
# 64 KiB of shared memory: more than the default limit of a kernel.
LARGE = FwdConfig(80, "fp16", 128, "none", 64, 96, 4, 1, 0, 1)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One planted fault.

    Attributes:
        name: What is wrong.
        file: The header it is planted in.
        old: Text that occurs exactly once in the header.
        new: Text that replaces ``old``.
        finder: What must find it: ``"numerics"``, the comparison with the reference, in the copy
            mode named after a slash; ``"counters"``, an exact count; ``"simulator"``, an error that
            every run reports; or a checker's name.
        report: Regular expression that the report must match.
        config: Configuration of the kernel that is compiled with the fault.
    """

    name: str
    file: str
    old: str
    new: str
    finder: str
    report: str = ""
    config: FwdConfig | BwdConfig = TWO_STAGES


_MAINLOOP = "mainloop_fwd_sm80.h"
_EPILOGUE = "epilogue_fwd.h"
_COPY = "tile_copy_sm80.h"
_KERNEL = "flash_fwd_kernel_sm80.h"
_STEP = """\
            cp_async_wait<0>();
            __syncthreads();
            if constexpr (kStages == 2) {
"""
_Q_IN_REGS = """\
            cp_async_wait<0>();
            __syncthreads();
            copy(copy_q, """
_V_LANDED = """\
                cp_async_wait<0>();
                __syncthreads();
                if (n > 0) load_k("""
_WAIT = "cp_async_wait<0>();"
_BARRIER = "__syncthreads();"
_RACE = "data race"
_OUTSIDE = "outside (every tensor|of )|AddressSanitizer"

MUTANTS = (
    # A wait is removed or too weak, so that data in flight is read, which copy mode `late` makes
    # visible.
    Mutant("wait before the step", _MAINLOOP, _STEP, _STEP.replace(_WAIT, ""), "numerics/late"),
    Mutant(
        "wait that leaves one group in flight",
        _MAINLOOP,
        _STEP,
        _STEP.replace("<0>", "<1>"),
        "numerics/late",
    ),
    Mutant(
        "wait before Q is taken into registers",
        _MAINLOOP,
        _Q_IN_REGS,
        _Q_IN_REGS.replace(_WAIT, ""),
        "numerics/late",
    ),
    Mutant(
        "wait for V",
        _MAINLOOP,
        _V_LANDED,
        _V_LANDED.replace(_WAIT, ""),
        "numerics/late",
        "",
        ONE_STAGE,
    ),
    # A barrier is removed.
    Mutant(
        "barrier before the step, two stages",
        _MAINLOOP,
        _STEP,
        _STEP.replace(_BARRIER, ""),
        "racecheck",
        _RACE,
    ),
    Mutant(
        "barrier before the step, one stage",
        _MAINLOOP,
        _STEP,
        _STEP.replace(_BARRIER, ""),
        "racecheck",
        _RACE,
        ONE_STAGE,
    ),
    Mutant(
        "barrier before Q is taken into registers",
        _MAINLOOP,
        _Q_IN_REGS,
        _Q_IN_REGS.replace(_BARRIER, ""),
        "racecheck",
        _RACE,
    ),
    Mutant(
        "barrier before K is overwritten",
        _MAINLOOP,
        _V_LANDED,
        _V_LANDED.replace(_BARRIER, ""),
        "racecheck",
        _RACE,
        ONE_STAGE,
    ),
    Mutant(
        "barrier before O takes Q's bytes",
        _EPILOGUE,
        "__syncthreads();  // every warp has read Q",
        "// every warp has read Q",
        "racecheck",
        _RACE,
        ONE_STAGE,
    ),
    Mutant(
        "barrier between O's halves of the epilogue",
        _COPY,
        "tOsO);\n    __syncthreads();",
        "tOsO);",
        "racecheck",
        _RACE,
    ),
    # Barriers and warp-wide instructions that not all threads reach.
    Mutant(
        "barrier that half of the block skips",
        _MAINLOOP,
        _STEP,
        _STEP.replace(_BARRIER, "if (thread < 64) { __syncthreads(); }"),
        "simulator",
        r"block \(.*warp \d+, lane \d+.*barrier",
    ),
    Mutant(
        "shuffle that every fourth lane skips",
        "utils.h",
        "return op(x, __shfl_xor_sync(0xffffffffu, x, 1));",
        "return (threadIdx.x & 3) == 3 ? x : op(x, __shfl_xor_sync(0xffffffffu, x, 1));",
        "simulator",
        r"block \(.*warp \d+, lane \d+.*shuffle",
    ),
    Mutant(
        "thread that leaves early",
        _KERNEL,
        "    typename Mainloop::SoftmaxT softmax(",
        "    if (threadIdx.x == 37) { return; }\n    typename Mainloop::SoftmaxT softmax(",
        "simulator",
        r"block \(.*warp 1, lane 5.*(missing lane|exited)",
    ),
    # Predicates are dropped.
    Mutant(
        "row predicate of the loads",
        _COPY,
        "row < rows}",
        "true}",
        "simulator",
        "cp.async reads outside every tensor",
    ),
    Mutant(
        "column predicate of the loads",
        _COPY,
        " && col < cols",
        "",
        "simulator",
        "cp.async reads outside every tensor",
    ),
    Mutant(
        "row predicate of the output",
        _COPY,
        "exists && col < d)",
        "col < d)",
        "memcheck",
        _OUTSIDE,
    ),
    Mutant(
        "column predicate of the output",
        _COPY,
        "exists && col < d)",
        "exists)",
        "memcheck",
        _OUTSIDE,
    ),
    Mutant(
        "row predicate of the log-sum-exp",
        _EPILOGUE,
        "if (rows[i].exists) {\n                    begin[",
        "{\n                    begin[",
        "memcheck",
        "AddressSanitizer",
    ),
    # Masks and ranges.
    Mutant(
        "causal mask off by one",
        "mask.h",
        "row_position(params, row)",
        "row_position(params, row) + 1",
        "numerics/late",
    ),
    Mutant(
        "last key column off by one",
        "mask.h",
        "key >= visible.end - first_key",
        "key > visible.end - first_key",
        "numerics/late",
        "",
        dataclasses.replace(ONE_STAGE, mask="none"),
    ),
    Mutant(
        "first unmasked block off by one",
        "block_info.h",
        "cute::max(first.end, 0) / kTileN",
        "cute::max(first.end, 0) / kTileN + 1",
        "numerics/late",
    ),
    Mutant(
        "last block skipped",
        "block_info.h",
        "(cute::max(last.end, 0) + kTileN - 1) / kTileN",
        "cute::max(last.end, 0) / kTileN",
        "numerics/late",
    ),
    Mutant(
        "block visited in vain",
        "block_info.h",
        "int const end = (cute::max(last.end, 0) + kTileN",
        "int const end = (cute::max(cute::min(last.end + kTileN, tile.seqlen_k), 0) + kTileN",
        "counters",
    ),
    Mutant(
        "mask forgotten in the last block that needs it",
        _MAINLOOP,
        "bool const masked = n >= tile.blocks.unmasked;",
        "bool const masked = n > tile.blocks.unmasked;",
        "numerics/late",
    ),
    Mutant(
        "mask forgotten",
        _MAINLOOP,
        "if (masked) mask.template",
        "if (false) mask.template",
        "numerics/late",
        "",
        ONE_STAGE,
    ),
    Mutant("stage not switched", _MAINLOOP, "stage ^= 1;", ";", "numerics/late"),
    Mutant(
        "key heads not shared",
        "tile_scheduler.h",
        "tile.head / params.h_h_k_ratio",
        "tile.head",
        "simulator",
        "cp.async reads outside every tensor",
    ),
    # Softmax.
    Mutant(
        "output not rescaled",
        "softmax.h",
        "if (raise_ref(tSrS, factor, masked)) {",
        "if (raise_ref(tSrS, factor, masked) && false) {",
        "numerics/late",
    ),
    Mutant("row sums not rescaled", "softmax.h", "row_sum(i) *= factor(i);", "", "numerics/late"),
    Mutant(
        "probabilities larger than fp16 holds",
        "softmax.h",
        "kAbove = 15;",
        "kAbove = 30;",
        "numerics/late",
    ),
    Mutant(
        "block not computed again with its maximum",
        "softmax.h",
        "if (bounded || !exceeds_range(sum)) {",
        "if (true) {",
        "numerics/late",
    ),
    Mutant("reference not kept", "softmax.h", "set_ref(max);", "", "numerics/late"),
    Mutant(
        "product of a huge score fused with the subtraction",
        "softmax.h",
        "__fmul_rn(scores(i, j), c) - finite_ref(row_ref(i));",
        "scores(i, j) * c - finite_ref(row_ref(i));",
        "numerics/late",
    ),
    Mutant(
        "huge references not seen",
        "softmax.h",
        "seek = any_lane(huge) ? kAlways",
        "seek = false ? kAlways",
        "numerics/late",
    ),
    Mutant(
        "reference of a huge row subtracted twice",
        "softmax.h",
        "                offset(i) = kBelow;\n",
        "",
        "numerics/late",
    ),
    Mutant(
        "lanes of a warp disagree whether a block is computed again",
        "softmax.h",
        "return any_lane(exceeds);",
        "return exceeds;",
        "simulator",
        r"block \(.*warp \d+, lane \d+.*wait at a vote",
    ),
    Mutant(
        "minus infinity minus minus infinity",
        "softmax.h",
        "return ref == -INFINITY ? 0.f : ref;",
        "return ref;",
        "numerics/late",
    ),
    Mutant(
        "reduction over the wrong lanes",
        "utils.h",
        "__shfl_xor_sync(0xffffffffu, x, 1)",
        "__shfl_xor_sync(0xffffffffu, x, 4)",
        "numerics/late",
    ),
    # Uninitialised memory.
    Mutant(
        "padding of a tile not zeroed",
        _COPY,
        "gmem_copy.with(exists && col < cols).call(",
        "if (exists && col < cols) gmem_copy.with(true).call(",
        "numerics/eager",
    ),
    Mutant(
        "register read that nobody wrote",
        "softmax.h",
        "inv_sum(i) = empty ?",
        "if (i > 0) inv_sum(i) = empty ?",
        "numerics/late",
    ),
    Mutant(
        "Q's tile not loaded",
        _MAINLOOP,
        "params.q_head_stride), row.exists}",
        "params.q_head_stride), false}",
        "numerics/late",
    ),
    # Sinks.
    Mutant(
        "sink of the first of the packed heads",
        _EPILOGUE,
        "params.sinks_ptr[head_q + rows[i].head]",
        "params.sinks_ptr[head_q]",
        "numerics/late",
    ),
    Mutant(
        "sink beside scores in another unit",
        "softmax.h",
        "sink(i) * kLog2e - ref",
        "sink(i) - ref",
        "numerics/late",
    ),
    Mutant(
        "row without a key without its sink",
        "softmax.h",
        "only_sink ? sink(i)",
        "only_sink ? -INFINITY",
        "numerics/late",
    ),
    # Windows.
    Mutant(
        "window one key too wide on the left",
        "block_info.h",
        "diagonal - params.window_left, 0)",
        "diagonal - params.window_left - 1, 0)",
        "numerics/late",
        config=WINDOW,
    ),
    Mutant(
        "window one key too wide on the right",
        "block_info.h",
        "diagonal + params.window_right + 1,",
        "diagonal + params.window_right + 2,",
        "numerics/late",
        config=WINDOW,
    ),
    Mutant(
        "keys before the window not masked",
        "mask.h",
        "key < visible.begin - first_key",
        "false",
        "numerics/late",
        config=WINDOW,
    ),
    Mutant(
        "first block of the window skipped",
        "block_info.h",
        "first.begin / kTileN",
        "first.begin / kTileN + 1",
        "numerics/late",
        config=WINDOW,
    ),
    Mutant(
        "block cut on the left taken for a whole one",
        "block_info.h",
        "(last.begin + kTileN - 1) / kTileN",
        "last.begin / kTileN",
        "numerics/late",
        config=WINDOW,
    ),
    Mutant(
        "blocks cut on the left visited twice",
        "work_tile.h",
        "visit >= unmasked ? -unmasked : left",
        "visit >= unmasked ? -unmasked : 0",
        "numerics/late",
        config=WINDOW,
    ),
    # Packed heads.
    Mutant(
        "padding rows of packed heads stored",
        "work_tile.h",
        " && head < params.h_h_k_ratio",
        "",
        "numerics/late",
        "reads outside every tensor",
    ),
    Mutant(
        "mask of packed rows by row and not by position",
        "mask.h",
        "row_position(params, row)",
        "row",
        "numerics/late",
    ),
    Mutant(
        "key blocks of packed rows by row and not by position",
        "block_info.h",
        "row_position(params, first_row)",
        "first_row",
        "numerics/late",
    ),
    # Addresses and sizes.
    Mutant(
        "storage at an odd offset",
        _KERNEL,
        "= dynamic_smem<typename Traits::SharedStorage>()",
        "= *reinterpret_cast<typename Traits::SharedStorage *>(&dynamic_smem<char>() + 2)",
        "ubcheck",
        "misaligned address",
    ),
    Mutant(
        "launch with too little shared memory",
        "flash_fwd_launch_template.h",
        "config.dynamicSmemBytes = Traits::kSmemBytes;",
        "config.dynamicSmemBytes = Traits::kSmemBytes / 2;",
        "simulator",
        "outside the block's",
    ),
    Mutant(
        "shared memory not asked for",
        "kernel_description.h",
        "cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);",
        "cudaFuncAttributeMaxDynamicSharedMemorySize, 0 * smem_bytes);",
        "simulator",
        "the kernel may use 49152",
        LARGE,
    ),
    # Performance.
    Mutant(
        "shared memory not swizzled",
        "kernel_traits.h",
        "Swizzle<(kRow == 64 ? 3 : 2), 3, 3>",
        "Swizzle<0, 3, 3>",
        "counters",
    ),
)


def plant(mutant: Mutant, source: Path, target: Path) -> Path:
    """Copies the headers of ``source`` to ``target`` with the fault in them; returns ``target``."""
    target.mkdir(parents=True)
    for header in source.glob("*.h"):
        # Two copies of a header must differ, or `#pragma once` lets the compiler read one of them.
        (target / header.name).write_text(f"{header.read_text()}// {target.name}\n")
    path = target / mutant.file
    text = path.read_text()
    found = text.count(mutant.old)
    if found != 1:
        raise ValueError(f"mutant {mutant.name!r}: {mutant.file} holds its text {found} times")
    path.write_text(text.replace(mutant.old, mutant.new))
    return target
