"""Faults planted into the sm90 class's backward above d = 128, as in ``mutants.py``."""

from __future__ import annotations

from mutants import Mutant

from flashcute import heuristics

# Head dimensions above 128 have a main loop of their own. Shared-memory pages have 32 columns in
# WIDE and 64 in WIDEST.
WIDE = heuristics.sm90_bwd_config("bf16", 192, "causal")
WIDEST = heuristics.sm90_bwd_config("fp16", 256, "causal")

_MAINLOOP = "mainloop_bwd_sm90.h"
_SCHEDULER = "tile_scheduler_bwd_sm90.h"
_PRODUCER = "producer_bwd_sm90.h"
_MMA = "mma_traits_sm90.h"
_WIDE = "mainloop_bwd_wide_sm90.h"
_KERNEL = "flash_bwd_kernel_sm90.h"
_TRAITS = "kernel_traits_bwd_sm90.h"
# Patterns of the simulator's reports, also for the faults of other head dimensions.
UNAWAITED = (
    r"(warpgroup \d: a wgmma reads|lane \d+: ldmatrix at) byte \d+ without having waited for phase "
    r"\d+ of mbarrier"
)
OVERWRITTEN = r"block \(.*overwritten too early: TMA for mbarrier .* of warpgroup \d"
UNWRITTEN = r"a wgmma reads byte \d+, (stored .* without fence|which has not been written)"
UNWRITTEN_SUMS = r"a TMA store reads byte \d+, which has not been written"
IN_FLIGHT = r"block \(.*warpgroup \d, thread \d+: a register of a wgmma in flight was written"
DEADLOCK = r"block \(.*deadlock: .*wait for parity \d of mbarrier"
ARRIVES_TWICE = r"block \(.*one arrival more than the \d+ of a phase of mbarrier \d+"


def _simulator(name, file, old, new, report, config=WIDE) -> Mutant:
    return Mutant(name, file, old, new, "simulator", report, config)


def _numerics(name, file, old, new, config=WIDE) -> Mutant:
    return Mutant(name, file, old, new, "numerics/late", "", config)


_GIVE_P = """\
            CUTE_UNROLL
            for (int j = 0; j < kTileM / 8; ++j) {
                own_p()[128 * j] =
                    make_float4(tSrP(0, 0, j), tSrP(1, 0, j), tSrP(2, 0, j), tSrP(3, 0, j));
            }
            __syncwarp();
            release(storage.p_full.data());
"""
_HAND_OVER = _GIVE_P.splitlines(keepends=True)[-1]
_WEIGH = "                this->weigh(params, tSrS, tKrP, at);\n"
_AWAIT_ROOM = "                if constexpr (!Traits::kSeveralOptions) await_room_for_p();\n"
_GIVE_S = "                give_p(tSrS);\n"
_LOOP_OF_KEYS = """\
                    for (; left > 1; --left) {
                        run_step(at, std::true_type{});
                        at.advance(ratio);
                    }
                    release(&storage.v_empty);
"""
_FIRST_OF_LOOP_OF_KEYS = _LOOP_OF_KEYS.splitlines(keepends=True)[0]
_RELEASE_V = _LOOP_OF_KEYS.splitlines(keepends=True)[-1]
_LAST_DQ_OF_VALUES = """\
                    issue_dq<Part>(rDq);
                    finish_dq<Part, false>(params, at, rDq);
"""


def _wide(name, old, new, report, config=WIDE) -> Mutant:
    return _simulator(name, _WIDE, old, new, report, config)


def _wide_numerics(name, old, new, config=WIDE, report="") -> Mutant:
    return Mutant(name, _WIDE, old, new, "numerics/late", report, config)


def _swapped(before: str, behind: str) -> tuple[str, str]:
    """Returns the text of two lines, and the text with the lines in the other order."""
    between = "\n" + 16 * " "
    return before + between + behind, behind + between + before


# Three rules have no fault here, as others imply them. The second warpgroup's wait for P implies
# its waits for Q and for K. That it keeps dO until dP is complete follows from its keeping Q
# longer, which the producer loads before dO.
ORDER = (
    _wide_numerics(
        "P taken without waiting for it",
        "sm90::barrier_wait(storage.p_full.data(), p().parity());",
        "",
        report=f"{ARRIVES_TWICE}|{DEADLOCK}|{OVERWRITTEN}",
    ),
    _wide_numerics(
        "P overwritten before it is taken",
        _AWAIT_ROOM,
        "",
        report=f"{ARRIVES_TWICE}|{DEADLOCK}",
    ),
    _wide_numerics(
        "P handed over before it is written",
        _GIVE_P,
        _HAND_OVER + _GIVE_P.replace(_HAND_OVER, ""),
    ),
    _wide("P never handed over", _HAND_OVER, "", DEADLOCK),
    _wide("P's buffer never released", "release(storage.p_empty.data());", "", DEADLOCK),
    _simulator(
        "P given by one warp for all",
        _MAINLOOP,
        "sm90::barrier_init(storage.p_full.data(), kWarps);",
        "sm90::barrier_init(storage.p_full.data(), 1);",
        f"{ARRIVES_TWICE}|{DEADLOCK}",
        WIDE,
    ),
    _wide(
        "Q and the statistics of a wide head read without waiting for them",
        "sm90::barrier_wait(&storage.q_full[step.stage()], step.parity());",
        "",
        UNAWAITED,
    ),
    _wide(
        "dO of a wide head read without waiting for it",
        "sm90::barrier_wait(&storage.dout_full[dout().stage()], dout().parity());",
        "",
        UNAWAITED,
    ),
    _wide(
        "K of a wide head read by the first warpgroup without waiting for it",
        "if (left > 0) {\n                    sm90::barrier_wait(&storage.k_full, own_parity);",
        "if (left > 0) {",
        UNAWAITED,
    ),
    _wide(
        "V of a wide head read without waiting for it",
        "sm90::barrier_wait(&storage.v_full, own_parity);",
        "",
        UNAWAITED,
    ),
    _simulator(
        "V in registers without a fence",
        _MMA,
        "fence_async_proxy();\n        __syncwarp();",
        "__syncwarp();",
        r"writes byte \d+, which a load .* fence.proxy.async",  # a load of a later step, at times
    ),
    _simulator(
        "V in registers released by a lane that knows of no other's fence",
        _MMA,
        "fence_async_proxy();\n        __syncwarp();",
        "fence_async_proxy();",
        r"writes byte \d+, which a load .* is not ordered after the fence.proxy.async",
    ),
    _wide(
        "phase of K not flipped",
        "own_parity ^= 1;\n                    if (left > 1) {",
        "if (left > 1) {",
        f"{UNAWAITED}|{DEADLOCK}|{OVERWRITTEN}",
    ),
    _wide(
        "phase of V not flipped",
        "own_parity ^= 1;\n                    Step at",
        "Step at",
        f"{UNAWAITED}|{DEADLOCK}|{OVERWRITTEN}",
    ),
    _wide(
        "dS sent before all warps have written it",
        "ds.stage();\n            sm90::barrier_wait(&storage.ds_full[stage], ds.parity());",
        "ds.stage();",
        r"which has not been written|stored .* without fence",
    ),
    _wide(
        "dS of the other CTA read without waiting for it",
        "sm90::barrier_wait(&other.ds_full[stage], ds.parity());",
        "",
        f"{UNAWAITED}|{UNWRITTEN}",
    ),
    _wide(
        "keys of the other CTA read without waiting for them",
        "sm90::barrier_wait(&storage.other.k_full, own_parity);\n"
        "                    own_parity ^= 1;\n                    Step at",
        "own_parity ^= 1;\n                    Step at",
        UNAWAITED,
    ),
    _wide(
        "dS sent before the other CTA has read the last one",
        "sm90::barrier_wait(&storage.other.ds_sent[ds.stage()], ds.parity() ^ 1);",
        "",
        f"overwritten too early|{ARRIVES_TWICE}|{DEADLOCK}",
    ),
    _wide(
        "dS of the other CTA never released",
        "sm90::barrier_arrive_at(1 - rank, &storage.other.ds_sent[ds.stage()], thread % 32 == 0);",
        "",
        DEADLOCK,
    ),
    _wide(
        "dS of the other CTA released while dQ is under way",
        "sm90::wgmma_wait<kNext>();\n            sm90::pin(rDq);\n"
        "            sm90::barrier_arrive_at(1 - rank, &storage.other.ds_sent[ds.stage()], "
        "thread % 32 == 0);",
        "sm90::barrier_arrive_at(1 - rank, &storage.other.ds_sent[ds.stage()], "
        "thread % 32 == 0);\n"
        "            sm90::wgmma_wait<kNext>();\n            sm90::pin(rDq);",
        "overwritten too early",
    ),
    _simulator(
        "next tile's number read without waiting for it",
        _PRODUCER,
        "sm90::barrier_wait(&other.next_full[slot], numbers.parity());",
        "",
        f"{DEADLOCK}|{ARRIVES_TWICE}",
    ),
    _simulator(
        "next tile's number awaited without its bytes",
        _PRODUCER,
        "sm90::barrier_arrive_expect(&other.next_full[slot], sizeof(uint32_t));",
        "sm90::barrier_arrive(&other.next_full[slot]);",
        f"{DEADLOCK}|bytes",
    ),
    _simulator(
        "next tile's number never released",
        _PRODUCER,
        "sm90::barrier_arrive_at(0, &other.next_empty[slot], true);",
        "",
        DEADLOCK,
    ),
    _simulator(
        "next tile's number sent to the first CTA",
        _PRODUCER,
        "sm90::store_async_at(1, &other",
        "sm90::store_async_at(0, &other",
        DEADLOCK,
    ),
    _simulator(
        "a CTA ends before the other one of its cluster",
        _KERNEL,
        "until its end\n        __syncwarp();\n        sm90::cluster_arrive();\n"
        "        sm90::cluster_wait();",
        "until its end",
        "the block ends, and its shared memory with it",
        WIDE,
    ),
    _simulator(
        "dS of one warpgroup awaited from both",
        _MAINLOOP,
        "init(&storage.ds_full[i], Traits::kWide ? kWarps : kReaders, nullptr);",
        "init(&storage.ds_full[i], kReaders, nullptr);",
        DEADLOCK,
        WIDE,
    ),
    _wide_numerics(
        "dS of the first step read in each by the first warpgroup",
        "ds.advance();",
        "if (this->warpgroup == 1) ds.advance();",
        config=WIDEST,
        report=f"{DEADLOCK}|{OVERWRITTEN}",
    ),
    _wide(
        "dO released before dV is complete",
        "sm90::wgmma_wait<1>();\n                release_dout();",
        "release_dout();\n                sm90::wgmma_wait<1>();",
        OVERWRITTEN,
        WIDEST,
    ),
    _wide(
        "dO of a tile's first step released before dV is complete",
        "issue_dv(at);\n                    sm90::wgmma_wait<0>();\n"
        "                    release_dout();",
        "issue_dv(at);\n                    release_dout();\n"
        "                    sm90::wgmma_wait<0>();",
        OVERWRITTEN,
    ),
    _wide(
        "Q released before dK is complete",
        *_swapped(
            "sm90::wgmma_wait<1>();",
            "release(&storage.q_empty[step.stage()]);",
        ),
        OVERWRITTEN,
    ),
    _wide(
        "V released before the last dP is complete",
        _LOOP_OF_KEYS,
        "                    if (left == 1) release(&storage.v_empty);\n"
        + _LOOP_OF_KEYS.replace(
            _FIRST_OF_LOOP_OF_KEYS,
            _FIRST_OF_LOOP_OF_KEYS
            + "                        if (left == 2) release(&storage.v_empty);\n",
        ).removesuffix(_RELEASE_V),
        OVERWRITTEN,
    ),
    _simulator(
        "V, which one warpgroup reads, awaited from both",
        _MAINLOOP,
        "sm90::barrier_init(&storage.v_empty, Traits::kWide ? kWarps : kReaders);",
        "sm90::barrier_init(&storage.v_empty, kReaders);",
        DEADLOCK,
        WIDE,
    ),
    _simulator(
        "K released by one warpgroup alone",
        _MAINLOOP,
        "init(&storage.k_full, 1, &storage.k_empty);",
        "init(&storage.k_full, 1, nullptr), sm90::barrier_init(&storage.k_empty, kWarps);",
        f"{OVERWRITTEN}|{ARRIVES_TWICE}",
        WIDE,
    ),
    _wide(
        "K released before the first warpgroup's last dQ",
        _LAST_DQ_OF_VALUES + "                    sm90::pin(rDv);\n"
        "                    release(&storage.k_empty);\n",
        "                    release(&storage.k_empty);\n"
        + _LAST_DQ_OF_VALUES
        + "                    sm90::pin(rDv);\n",
        OVERWRITTEN,
        WIDEST,
    ),
    _wide(
        "K released before the second warpgroup's last dQ",
        "run_step(at, std::false_type{});\n                    sm90::pin(rDk);\n"
        "                    release(&storage.k_empty);",
        "release(&storage.k_empty);\n                    run_step(at, std::false_type{});\n"
        "                    sm90::pin(rDk);",
        OVERWRITTEN,
    ),
    _wide(
        "P of a tile's second step computed while S is under way",
        "at.advance(ratio);\n                        sm90::wgmma_wait<0>();",
        "at.advance(ratio);",
        IN_FLIGHT,
    ),
    _wide(
        "P computed while S is under way",
        "h_h_k_ratio), rDq);\n                sm90::wgmma_wait<0>();",
        "h_h_k_ratio), rDq);",
        IN_FLIGHT,
    ),
    _wide(
        "dS computed while dP is under way",
        "(params, at, rDq);\n                sm90::wgmma_wait<0>();",
        "(params, at, rDq);",
        IN_FLIGHT,
    ),
    _wide_numerics(
        "dQ added to the sums while it is under way",
        "sm90::wgmma_wait<kNext>();",
        "sm90::wgmma_wait<kNext + 1>();",
        report=OVERWRITTEN,
    ),
)
NUMBERS = (
    _wide_numerics(
        "P of the next queries taken",
        "(storage.p.data()) + thread % 128",
        "(storage.p.data()) + thread",
    ),
    _wide_numerics(
        "S handed over for P",
        _WEIGH + _AWAIT_ROOM + _GIVE_S,
        _AWAIT_ROOM + _GIVE_S + _WEIGH,
    ),
    _numerics(
        "keys of a warp counted over both warpgroups",
        _TRAITS,
        "acc_row(kWide ? thread % 128 : thread, i)",
        "acc_row(thread, i)",
        WIDE,
    ),
    _wide_numerics(
        "dV of P and Q",
        "tKrP, storage.dout[dout().stage()],",
        "tKrP, storage.q[step.stage()],",
        report=OVERWRITTEN,
    ),
    _wide_numerics(
        "dV stored as dK", "this->store_dv(params, tKrDv);", "this->store_dk(params, tKrDv);"
    ),
    _numerics(
        "dK scaled by the warpgroup of dV, too",
        _MAINLOOP,
        "params.d, Traits::kConfig.dropout ? params.dropout_scale : 1.f, tKrDv",
        "params.d, params.scale_softmax, tKrDv",
        WIDE,
    ),
    _wide_numerics(
        "first warpgroup's dQ added to the step after",
        "at.before(params.h_h_k_ratio), rDq",
        "at, rDq",
        WIDEST,
    ),
    _wide_numerics(
        "second warpgroup's steps all of the first head",
        "run_step(at, std::true_type{});\n                        at.advance(ratio);\n"
        "                    }\n                    release",
        "run_step(at, std::true_type{});\n                        at.visit -= at.visit > 0;\n"
        "                    }\n                    release",
    ),
    Mutant(
        "step before of another head",
        "step_bwd_sm90.h",
        "first ? head + ratio - 1 : head - 1,",
        "first ? head + ratio - 1 : head,",
        "numerics/late",
        "",
        WIDEST,
    ),
    Mutant(
        "step before of the same block",
        "step_bwd_sm90.h",
        "return {first ? visit - way : visit,",
        "return {visit,",
        "numerics/late",
        "",
        WIDEST,
    ),
    _wide_numerics(
        "first warpgroup's dQ of the last step never added",
        _LAST_DQ_OF_VALUES,
        "                    ds.advance();\n",
        WIDEST,
        DEADLOCK,
    ),
    _wide_numerics(
        "dQ of both CTAs from the same columns of the own keys",
        "storage.k.data() + rank * kHalf + offset",
        "storage.k.data() + offset",
    ),
    _numerics(
        "dQ of both CTAs from the same columns of the other's keys",
        _PRODUCER,
        "rank * kColumns);",
        "0);",
        WIDE,
    ),
    Mutant(
        "each CTA draws a number of its own",
        _PRODUCER,
        "if (queue.counter == nullptr) return",
        "return",
        "numerics/late",
        f"{DEADLOCK}|outside",
        WIDE,
    ),
    Mutant(
        "next tile's number taken from the slot before",
        _PRODUCER,
        "index = other.next[slot];",
        "index = other.next[numbers.before().stage()];",
        "numerics/late",
        f"{DEADLOCK}|outside",
        WIDE,
    ),
    _numerics(
        "both CTAs take the keys of the first",
        _SCHEDULER,
        "kTileKeys + rank * Traits::kTileN",
        "kTileKeys",
        WIDE,
    ),
    _wide_numerics(
        "second part of dQ from the columns of the first",
        "int const offset = Part::kOffset +",
        "int const offset =",
        WIDEST,
    ),
    _numerics(
        "second part of dQ added in the place of the first",
        _WIDE,
        " + 16 * kFirstColumn",
        "",
        WIDEST,
    ),
    _numerics(
        "second half of dQ added in the place of the first",
        _WIDE,
        "Traits::dq_begin(rank * 4",
        "Traits::dq_begin(0 * 4",
        WIDEST,
    ),
    _wide_numerics(
        "second part of dQ never added",
        "add_dq<Part::kBegin>(params, of",
        "if constexpr (Part::kBegin == 0) add_dq<Part::kBegin>(params, of",
        WIDEST,
    ),
)
