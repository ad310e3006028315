"""Faults planted into the sm90 class's backward, as in ``mutants.py``."""

from __future__ import annotations

from backward import with_mask
from mutants import Mutant
from mutants_bwd_wide_sm90 import (
    ARRIVES_TWICE,
    DEADLOCK,
    IN_FLIGHT,
    NUMBERS,
    ORDER,
    OVERWRITTEN,
    UNAWAITED,
    UNWRITTEN,
    WIDEST,
)

from flashcute import heuristics

# dQ of a step by rows for each warpgroup, by columns, and by columns of which one has more.
ROWS = heuristics.sm90_bwd_config("bf16", 64, "causal")
COLUMNS = heuristics.sm90_bwd_config("fp16", 128, "causal")
UNEVEN = heuristics.sm90_bwd_config("bf16", 96, "causal")
_FULL = with_mask(ROWS, "none")

_MAINLOOP = "mainloop_bwd_sm90.h"
_PRODUCER = "producer_bwd_sm90.h"
_KERNEL = "flash_bwd_kernel_sm90.h"
_SUMS = "dq_sums_sm90.h"
_ORDER = "order_dq_sm90.h"
_TRAITS = "kernel_traits_bwd_sm90.h"
_PREPROCESS = "flash_bwd_preprocess_kernel.h"
_SCHEDULER = "tile_scheduler_bwd_sm90.h"

_EARLY = r"before griddepcontrol.wait"


def _simulator(name, file, old, new, report, config=ROWS) -> Mutant:
    return Mutant(name, file, old, new, "simulator", report, config)


def _numerics(name, file, old, new, config=ROWS, report="") -> Mutant:
    return Mutant(name, file, old, new, "numerics/late", report, config)


POLLS = "deadlock: a thread polls global memory"


MUTANTS = (
    *ORDER,
    Mutant(
        "one buffer of dS, which the first warpgroup still reads",
        _TRAITS,
        "static constexpr int kDsStages = 2;",
        "static constexpr int kDsStages = kWide ? 1 : 2;",
        "numerics/late",
        UNWRITTEN,
        WIDEST,
    ),
    *NUMBERS,
    _simulator(
        "K read without waiting for it",
        _MAINLOOP,
        "sm90::barrier_wait(&storage.k_full, own_parity);",
        "",
        UNAWAITED,
    ),
    _simulator(
        "V read without waiting for it",
        _MAINLOOP,
        "sm90::barrier_wait(&storage.v_full, own_parity);",
        "",
        UNAWAITED,
    ),
    _simulator(
        "Q read without waiting for it",
        _MAINLOOP,
        "sm90::barrier_wait(&storage.q_full[step.stage()], step.parity());",
        "",
        UNAWAITED,
    ),
    _simulator(
        "dO read without waiting for it",
        _MAINLOOP,
        "sm90::barrier_wait(&storage.dout_full[step.stage()], step.parity());",
        "",
        UNAWAITED,
    ),
    _simulator(
        "dS of the other warpgroup read without waiting for it",
        _MAINLOOP,
        "sm90::barrier_wait(&storage.ds_full[ds.stage()], ds.parity());",
        "",
        UNWRITTEN,
    ),
    _simulator(
        "dS without a fence",
        _MAINLOOP,
        "sm90::fence_async_proxy();\n            __syncwarp();\n            release(",
        "__syncwarp();\n            release(",
        UNWRITTEN,
    ),
    _simulator(
        "dQ without a fence",
        _MAINLOOP,
        "sm90::fence_async_proxy();\n                __syncwarp();\n                if (",
        "__syncwarp();\n                if (",
        r"a TMA store reads byte \d+, stored by .* without fence",
        COLUMNS,
    ),
    _simulator(
        "dQ written over that of the step before",
        _MAINLOOP,
        "sm90::bulk_wait_read();",
        "",
        r"overwritten too early: byte \d+, which a TMA store of warp \d+",
        COLUMNS,
    ),
    _simulator(
        "kernel ends before the sums of dQ are complete",
        _MAINLOOP,
        "if constexpr (Traits::kBulkDq) sm90::bulk_wait();\n        }\n",
        "}\n",
        r"exits (while a TMA store|before a bulk reduction)",
        COLUMNS,
    ),
    _numerics(
        "no zeros for the sums of an owned head",
        _MAINLOOP,
        "if (Traits::kMayOwnHeads && owns) begin_owned(params);",
        "",
    ),
    _numerics(
        "an owned head rounded after its first tile",
        _MAINLOOP,
        "tile().m_block == Scheduler::num_n_blocks(params) - 1",
        "tile().m_block == 0",
    ),
    _numerics(
        "an owned head rounded before its sums are complete",
        _MAINLOOP,
        "sm90::bulk_wait();\n                __syncwarp();\n                sm90::fence",
        "sm90::fence",
        COLUMNS,
    ),
    _numerics(
        "sums of an owned head's first query head alone",
        _MAINLOOP,
        "params.h_h_k_ratio + head - tile().head_q",
        "params.h_h_k_ratio",
    ),
    _numerics(
        "all CTAs add to the same sums of owned heads",
        _MAINLOOP,
        "? int64_t(blockIdx.x) * params",
        "? int64_t(0) * params",
    ),
    _numerics(
        "a CTA passes over a head of its own",
        _SCHEDULER,
        "index + (workers - 1) * n_blocks",
        "index + workers * n_blocks",
    ),
    _simulator(
        "no warpgroup has the first turn",
        _MAINLOOP,
        "if (warpgroup == 1) pass_turn();",
        "",
        "deadlock",
        COLUMNS,
    ),
    _simulator(
        "the turn of a tile's last step kept",
        _MAINLOOP,
        "pass_turn();\n                    ds.advance();",
        "ds.advance();",
        "deadlock",
        COLUMNS,
    ),
    _simulator(
        "turn passed to oneself",
        _MAINLOOP,
        "named_barrier_arrive(2 - warpgroup, 256)",
        "named_barrier_arrive(1 + warpgroup, 256)",
        "deadlock|barrier",
        COLUMNS,
    ),
    _simulator(
        "stages released before their products are complete",
        _MAINLOOP,
        "sm90::wgmma_wait<1>();\n                        release_step(used);",
        "release_step(used);\n                        sm90::wgmma_wait<1>();",
        OVERWRITTEN,
    ),
    _simulator(
        "K released before the last product",
        _MAINLOOP,
        "ds.advance();\n                    finish_dq(at);",
        "release(&storage.k_empty);\n                    ds.advance();\n"
        "                    finish_dq(at);",
        f"{OVERWRITTEN}|{ARRIVES_TWICE}",
    ),
    _simulator(
        "own buffers overwritten without waiting",
        _PRODUCER,
        "sm90::barrier_wait(empty, own_parity ^ 1);",
        "",
        OVERWRITTEN,
    ),
    _simulator(
        "stage of Q overwritten without waiting",
        _PRODUCER,
        "sm90::barrier_wait(&storage.q_empty[q.stage()], q.parity() ^ 1);",
        "",
        f"{OVERWRITTEN}|{ARRIVES_TWICE}",
    ),
    _simulator(
        "phase of K and V not flipped",
        _MAINLOOP,
        "own_parity ^= 1;\n\n",
        "\n",
        f"{UNAWAITED}|{DEADLOCK}|{OVERWRITTEN}",
    ),
    _simulator(
        "tile never released",
        _MAINLOOP,
        "release(&storage.tile_empty[tiles.stage()]);",
        "",
        DEADLOCK,
    ),
    _simulator(
        "dS computed before dP is complete",
        _MAINLOOP,
        "sm90::wgmma_wait<0>();\n                sm90::pin(rDp);",
        "sm90::pin(rDp);",
        IN_FLIGHT,
    ),
    _simulator(
        "loads before the kernel before has ended",
        _PRODUCER,
        "if constexpr (!kWaitsFirst) cudaGridDependencySynchronize();",
        "",
        _EARLY,
    ),
    _simulator(
        "rounding before the sums are complete",
        _KERNEL,
        "cudaGridDependencySynchronize();",
        "",
        "no thread executes griddepcontrol.wait",
    ),
    _simulator(
        "as many columns of dQ for both warpgroups",
        _TRAITS,
        "return warpgroup == 0 ? kDqColumns : kHeadDim - kDqColumns;",
        "return kDqColumns;",
        "cp.reduce.async.bulk outside every tensor|has been overwritten",
        UNEVEN,
    ),
    _simulator(
        "no zeros behind K",
        _PRODUCER,
        "load_keys<Traits::kColumnsK>",
        "load_keys<kHeadDim>",
        UNWRITTEN,
        UNEVEN,
    ),
    _numerics("sums of dQ begin anywhere", _PREPROCESS, "= make_float4(0.f, 0.f, 0.f, 0.f)", ""),
    _numerics(
        "mask forgotten", _MAINLOOP, "if (!tile().blocks.is_whole(visit)) apply", "if (0) apply"
    ),
    _numerics(
        "mask off by one",
        _MAINLOOP,
        "first_query + Traits::query_of(thread, i)",
        "first_query + 1 + Traits::query_of(thread, i)",
    ),
    _numerics(
        "dQ added before the first tile has stored its own",
        _ORDER,
        "if (!first) await(params.dq_semaphore_ptr + semaphore);",
        "",
    ),
    _numerics(
        "dQ added without waiting for its turn",
        _MAINLOOP,
        "sm90::barrier_wait(&storage.dq_turn[dq_turn.stage()], dq_turn.parity());",
        "",
        COLUMNS,
        report=DEADLOCK,
    ),
    _numerics(
        "semaphores of dQ not reset",
        _PREPROCESS,
        "params.dq_semaphore_ptr[first_row / kSemaphoreRows] = 0;",
        "",
        report=POLLS,
    ),
    _numerics(
        "semaphores of every second block of dQ not reset",
        _PREPROCESS,
        "first_row % kSemaphoreRows == 0",
        "first_row % (2 * kSemaphoreRows) == 0",
        COLUMNS,
        report=POLLS,
    ),
    _numerics(
        "first tiles add to what is there",
        _MAINLOOP,
        "store_first(params.dq_accum_ptr + row * kHeadDim + begin, rDq);\n"
        "                    return;",
        "release(&storage.dq_stored[dq_stored.stage()]), dq_stored.advance();",
    ),
    _numerics(
        "first tiles store although queries do not see them",
        _SCHEDULER,
        "params.dq_semaphore_ptr != nullptr && visits_all && ",
        "params.dq_semaphore_ptr != nullptr && ",
    ),
    _numerics(
        "whole blocks begin with the first one",
        "work_tile.h",
        "static_cast<unsigned>(i - left) <",
        "static_cast<unsigned>(i) <",
    ),
    _numerics("dP without D", _MAINLOOP, "(tSrDp(i, 0, j) - d)", "tSrDp(i, 0, j)"),
    _numerics(
        "head of the group not advanced",
        _SCHEDULER,
        "head += last ? 1 - ratio : 1;",
        "",
    ),
    _numerics(
        "dQ added to the next block",
        _MAINLOOP,
        "finish_dq(done);",
        "finish_dq({at.visit, done.head, done.behind});",
        COLUMNS,
    ),
    _numerics(
        "dQ added to the next head",
        _MAINLOOP,
        "finish_dq(done);",
        "finish_dq({done.visit, at.head, done.behind});",
    ),
    _numerics(
        "columns of dQ in one warpgroup's place",
        _SUMS,
        "Traits::kDqByRows ? 0 : thread / 128 * kColumns",
        "0",
        COLUMNS,
    ),
    _numerics("dQ not scaled", _SUMS, "four.z * params.scale_softmax", "four.z"),
    _numerics(
        "dK not scaled",
        _MAINLOOP,
        "params.d, params.scale_softmax, tKrDk",
        "params.d, 1.f, tKrDk",
    ),
    _numerics(
        "infinite P behind the last key",
        _SCHEDULER,
        "Info::mask_behind_keys(tile, kVarlen ? tile.seqlen_k : params.seqlen_k);",
        "",
        _FULL,
    ),
)
