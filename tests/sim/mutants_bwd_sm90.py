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
    UNWRITTEN_SUMS,
    WIDE,
    WIDEST,
)

from flashcute import heuristics

# Warpgroups divide dQ of a step by rows, by columns, and unevenly by columns.
ROWS = heuristics.sm90_bwd_config("bf16", 64, "causal")
COLUMNS = heuristics.sm90_bwd_config("fp16", 128, "causal")
UNEVEN = heuristics.sm90_bwd_config("bf16", 96, "causal")
NARROWEST = heuristics.sm90_bwd_config("fp16", 32, "none")
_FULL = with_mask(ROWS, "none")
_WIDE_FULL = with_mask(WIDE, "none")  # a head's tiles follow one another

_MAINLOOP = "mainloop_bwd_sm90.h"
_OWN = "own_keys_sm90.h"
_WRITER = "writer_dq_sm90.h"
_WIDE = "mainloop_bwd_wide_sm90.h"
_PRODUCER = "producer_bwd_sm90.h"
_KERNEL = "flash_bwd_kernel_sm90.h"
_SUMS = "dq_sums_sm90.h"
_ORDER = "order_dq_sm90.h"
_TRAITS = "kernel_traits_bwd_sm90.h"
_PREPROCESS = "flash_bwd_preprocess_kernel.h"
_SCHEDULER = "tile_scheduler_bwd_sm90.h"
_STEP = "step_bwd_sm90.h"
_SHARED = "shared_sums_sm90.h"

_EARLY = r"before griddepcontrol.wait"


def _simulator(name, file, old, new, report, config=ROWS) -> Mutant:
    return Mutant(name, file, old, new, "simulator", report, config)


def _numerics(name, file, old, new, config=ROWS, report="") -> Mutant:
    return Mutant(name, file, old, new, "numerics/late", report, config)


def _of_64(name, old, new, report) -> Mutant:
    return _simulator(name, "mainloop_bwd_64_sm90.h", old, new, report)


# Faults in the main loop for d up to 64.
UP_TO_64 = (
    _of_64(
        "K read without waiting for it, d <= 64",
        "sm90::barrier_wait(&storage.k_full, own_parity);",
        "",
        UNAWAITED,
    ),
    _of_64(
        "V read without waiting for it, d <= 64",
        "sm90::barrier_wait(&storage.v_full, own_parity);",
        "",
        UNAWAITED,
    ),
    _of_64(
        "phase of K and V not flipped, d <= 64",
        "own_parity ^= 1;",
        "",
        f"{UNAWAITED}|{DEADLOCK}|{OVERWRITTEN}",
    ),
    _of_64(
        "dS computed before dP is complete, d <= 64",
        "sm90::wgmma_wait<!kLateDp>();\n                sm90::pin(rDp);",
        "sm90::pin(rDp);",
        IN_FLIGHT,
    ),
    _of_64("dS not written, d <= 64", "this->write_ds(tKrDs);", "", UNWRITTEN),
    _of_64(
        "stages released before their products are complete, d <= 64",
        "sm90::wgmma_wait<1>();\n                this->release_step(step);",
        "this->release_step(step);\n                sm90::wgmma_wait<1>();",
        OVERWRITTEN,
    ),
    _of_64(
        "dQ handed over before it is complete, d <= 64",
        *("sm90::wgmma_wait<has_next>();", "", UNWRITTEN_SUMS),
    ),
    _of_64(
        "P computed before S is complete, d <= 64",
        "at.advance(ratio);\n                        sm90::wgmma_wait<0>();",
        "at.advance(ratio);",
        IN_FLIGHT,
    ),
    _of_64(
        "K released before the last product, d <= 64",
        "run_step(at, std::false_type{});",
        "this->release(&storage.k_empty);\n                    run_step(at, std::false_type{});",
        f"{UNAWAITED}|{OVERWRITTEN}|{ARRIVES_TWICE}",
    ),
    Mutant(
        "no zeros for the sums of an owned head, d <= 64",
        "mainloop_bwd_64_sm90.h",
        "if (Traits::kMayOwnHeads && this->owns) this->begin_owned(params);",
        "",
        "numerics/late",
        "",
        ROWS,
    ),
    Mutant(
        "dQ added to the first of several owned heads, d <= 64",
        "mainloop_bwd_64_sm90.h",
        "this->add_dq(params, at.head,",
        "this->add_dq(params, this->tile().head_q,",
        "numerics/late",
        "",
        ROWS,
    ),
)

_EXITS = r"exits (while a TMA store|before a bulk store or reduction)"
POLLS = "deadlock: a thread polls global memory"


# Faults in the sums of tiles that CTAs share.
SHARED = tuple(
    _numerics(f"{name}, d = {config.head_dim}", _SHARED, old, new, config)
    for config in (_FULL, _WIDE_FULL)
    for name, old, new in (
        (
            "sums of a shared tile added before they are left",
            "while (sm90::load_acquire(params.dq_semaphore_ptr + cta) < kStores) {",
            "while (false) {",
        ),
        (
            "sums of a shared tile waited for by one lane alone",
            "if (i % 4 == 0) __syncwarp();",
            "if (i % 4 == 1) __syncwarp();",
        ),
        ("sums of the CTA before alone added", "int before = tile.part;", "int before = 1;"),
        ("dK of a shared tile left where its dV is", "* 2 + is_dk) * kFloats", "* 2) * kFloats"),
    )
)

MUTANTS = (
    *ORDER,
    *SHARED,
    _numerics(
        "dK of a shared tile not waited for",
        _SHARED,
        "(Traits::kWide ? 1 : 2) * Traits::kWarpgroups * 4",
        "Traits::kWarpgroups * 4",
        _FULL,
    ),
    _numerics(
        "sums of a CTA of the same cluster added",
        _SHARED,
        "before * Traits::kCluster",
        "before",
        _WIDE_FULL,
        report=POLLS,
    ),
    _numerics(
        "parts of a shared tile all begin with its first block",
        "shared_tiles_sm90.h",
        "tile.blocks.begin += piece.begin;",
        "",
        _FULL,
    ),
    _numerics(
        "counters of shared tiles not reset",
        _PREPROCESS,
        "params.dq_semaphore_ptr[first_row / kSemaphoreRows] = 0;",
        "",
        _FULL,
        report=POLLS,
    ),
    *UP_TO_64,
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
        COLUMNS,
    ),
    _simulator(
        "V read without waiting for it",
        _MAINLOOP,
        "sm90::barrier_wait(&storage.v_full, own_parity);",
        "",
        UNAWAITED,
        COLUMNS,
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
        "dQ of an owned head without a fence",
        _MAINLOOP,
        "sm90::fence_async_proxy();\n                __syncwarp();\n                if (",
        "__syncwarp();\n                if (",
        r"a TMA store reads byte \d+, stored by .* without fence",
        COLUMNS,
    ),
    _simulator(
        "dQ of an owned head written over that of the step before",
        _MAINLOOP,
        "sm90::bulk_wait_read();",
        "",
        r"overwritten too early: byte \d+, which a TMA store of warp \d+",
        COLUMNS,
    ),
    _simulator(
        "kernel ends before the sums of dQ are complete",
        _WRITER,
        "}\n        sm90::bulk_wait();",
        "}\n",
        _EXITS,
    ),
    _simulator(
        "dQ without a fence",
        _WRITER,
        "sm90::fence_async_proxy();",
        "",
        r"a TMA store reads byte \d+, stored by .* without fence",
    ),
    _simulator(
        "dQ's buffer empty before it is read",
        _WRITER,
        "sm90::bulk_wait_read();",
        "",
        r"overwritten too early: byte \d+, which a TMA store of warp \d+",
    ),
    Mutant(
        "dQ written over that of the step before",
        _MAINLOOP,
        "sm90::barrier_wait(&storage.dq_empty, dq.parity() ^ 1);",
        "",
        "simulator/random",
        f"stored by a thread without fence|overwritten too early|{ARRIVES_TWICE}",
        ROWS,
    ),
    _simulator(
        "dQ read without waiting for it",
        _WRITER,
        "sm90::barrier_wait(&storage.dq_full, dq.parity());\n        // Between",
        "// Between",
        f"a TMA store reads byte|{ARRIVES_TWICE}",
    ),
    _numerics("dQ of all steps added to the first", _WRITER, "step.advance(ratio);", ""),
    _numerics(
        "no zeros for the sums of an owned head",
        _MAINLOOP,
        "if (Traits::kMayOwnHeads && owns) begin_owned(params);",
        "",
        COLUMNS,
    ),
    _numerics(
        "an owned head rounded after its first tile",
        _MAINLOOP,
        "tile().m_block == Scheduler::num_n_blocks(params) - 1",
        "tile().m_block == 0",
        report=_EXITS,
    ),
    _numerics(
        "an owned head rounded before its sums are complete",
        _MAINLOOP,
        "sm90::bulk_wait();\n            __syncwarp();\n            sm90::fence",
        "sm90::fence",
        COLUMNS,
        report=_EXITS,
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
        "place = int64_t(blockIdx.x) * params",
        "place = int64_t(0) * params",
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
        COLUMNS,
    ),
    _simulator(
        "K released before the last product",
        _MAINLOOP,
        "ds.advance();\n                    finish_dq(at);",
        "release(&storage.k_empty);\n                    ds.advance();\n"
        "                    finish_dq(at);",
        f"{OVERWRITTEN}|{ARRIVES_TWICE}",
        COLUMNS,
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
        COLUMNS,
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
        COLUMNS,
    ),
    _simulator(
        "loads before the kernel before has ended",
        _PRODUCER,
        "if (!waits_first) cudaGridDependencySynchronize();",
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
        "K of the first warpgroup in the registers of both",
        _MAINLOOP,
        "return Traits::kWide ? thread % 128 : thread;",
        "return thread % 128;",
        UNEVEN,
    ),
    _numerics(
        "K in registers loaded for every second tile",
        _MAINLOOP,
        "{ own_k.load(",
        "{ if (own_parity == 0) own_k.load(",
        WIDE,
    ),
    _numerics(
        "V in registers loaded for every second tile",
        _MAINLOOP,
        "{ own_v.load(",
        "{ if (own_parity == 0) own_v.load(",
        UNEVEN,
    ),
    _numerics(
        "what is in registers of K dropped",
        _OWN,
        "kSteps, (kRegSteps > 0)>(",
        "kSteps, false>(",
    ),
    _numerics(
        *("V in registers never loaded", "mainloop_bwd_64_sm90.h", "this->load_v();", ""),
        NARROWEST,
    ),
    _numerics(
        "mask forgotten", _MAINLOOP, "if (!tile().blocks.is_whole(at.visit)) apply", "if (0) apply"
    ),
    _numerics(
        *("mask off by one", _MAINLOOP),
        *("cols_before(query - first_query", "cols_before(query + 1 - first_query"),
    ),
    _numerics(
        *("first eight queries of a mask's word for all", _TRAITS),
        *("inside / 8 * 2 + cute::min(inside % 8, 2)", "cute::min(inside % 8, 2)"),
    ),
    _numerics(
        *("queries behind a window not masked", "mask.h"),
        *("visible &= first_bits(queries_before(seeing.end));", "", with_mask(ROWS, "local")),
    ),
    _numerics(
        "dQ added before the first tile has stored its own",
        _WRITER,
        "if (before > 0 && writers == 1) await(semaphore, before);",
        "",
    ),
    _numerics(
        "a block of dQ counted before it is stored",
        _WRITER,
        "sm90::bulk_wait();\n            sm90::fence_async_proxy_global();",
        "sm90::fence_async_proxy_global();",
    ),
    _numerics("first tiles add to what is there", _WRITER, "bulk_store(", "bulk_reduce_add("),
    _numerics(
        "dQ of a wide head added before the first tile has stored its own",
        _ORDER,
        "while (ctas > 0 && ",
        "while (false && ",
        _WIDE_FULL,
    ),
    Mutant(
        "dQ of a wide head added without waiting for the one that is stored",
        _WIDE,
        "sm90::barrier_wait(&storage.dq_turn[dq_turn().stage()], dq_turn().parity());",
        "",
        "numerics/eager",
        DEADLOCK,
        _WIDE_FULL,
    ),
    _numerics(
        "a block of dQ of a wide head counted before it is stored",
        _ORDER,
        "sm90::barrier_wait(&storage.dq_stored[stored.stage()], stored.parity());",
        "",
        _WIDE_FULL,
        report=f"{ARRIVES_TWICE}|{DEADLOCK}",
    ),
    _numerics(
        "first tiles of a wide head add to what is there",
        _WIDE,
        "stores ? write(sm90::store_first) : write(sm90::reduce_add);",
        "write(sm90::reduce_add);",
        WIDE,
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
        "sums that no tile has stored are rounded",
        "flash_bwd_kernel_sm90.h",
        "|| sm90::load_acquire(semaphore) != 0;",
        "|| true;",
    ),
    _numerics(
        "whole blocks begin with the first one",
        "work_tile.h",
        "static_cast<unsigned>(i - left) <",
        "static_cast<unsigned>(i) <",
    ),
    _numerics("dP without D", "weights_bwd_sm90.h", "p * (dp - d)", "p * dp"),
    _numerics("head of the group not advanced", _STEP, "head += last ? 1 - ratio : 1;", ""),
    _numerics("tiles go down from the diagonal", _STEP, "last ? way : 0;", "last ? -1 : 0;"),
    _numerics(
        "dQ of an owned head added to the next block",
        _MAINLOOP,
        "kSeveralOptions) finish_dq(done);\n                    }",
        "kSeveralOptions) finish_dq({at.visit, done.head, done.behind});\n                    }",
        COLUMNS,
    ),
    _numerics(
        "dQ added to the next owned head",
        _MAINLOOP,
        "kSeveralOptions) finish_dq(done);\n                    }",
        "kSeveralOptions) finish_dq({done.visit, at.head, done.behind});\n                    }",
        COLUMNS,
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
