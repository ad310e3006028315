"""Builds, checks and times every rung on a GPU: ``python -m examples.ladder --out FILE.json``.

Each rung is first compared with the reference (flashcute/testing.py) on small and odd problems,
then timed on GPT-3's shape and over the sequence length, beside the library's kernel and PyTorch's.
The result file is written after every step, so that an interrupted run keeps its results.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import shutil
import statistics
import sys
import time
from collections.abc import Callable

import torch

import flashcute
from flashcute import benchmarking as bm
from flashcute import testing

from . import counters, launch, rungs
from .rungs import Rung

ROOT = pathlib.Path(__file__).resolve().parents[2]
DTYPE = torch.bfloat16
BATCH, HEADS, HEAD_DIM = 4, 96, 128  # GPT-3 175B (arXiv 2005.14165, table 2.1)
GPT3_SEQLEN = 2048
SEQLENS = (256, 512, 1024, 2048, 4096, 8192)
SLOWEST_S = 4.0  # a point expected to take longer is left out of the sweep
COUNTERS_S = 0 if shutil.which("ncu") is None else 90  # reserved for the counters
POINT_S = 1.5  # time for the repeats of one point
# Largest difference from the library's output that roundings of P and O explain; a wrong mask or
# tile gives 0.1 and more.
AGREEMENT = 4e-2

CHECKED_LENGTHS = (
    (1, 1),
    (17, 130),
    (64, 64),
    (77, 100),
    (129, 63),
    (200, 333),
    (512, 512),
    (3, 0),
)


def check(rung: Rung) -> list[str]:
    """Returns the failures of a rung on small problems."""
    failures = []
    for seqlen_q, seqlen_k in CHECKED_LENGTHS:
        for d in rungs.HEAD_DIMS:
            for causal in (False, True):
                shape = bm.Shape(2, seqlen_q, seqlen_k, 4, 2, d, causal)
                for dtype in (torch.float16, torch.bfloat16):
                    q, k, v = bm.make_qkv(shape, dtype, "cuda")
                    out, lse = launch.attention(rung.name, q, k, v, causal=causal)
                    report = testing.compare_forward(out, lse, q, k, v, causal=causal)
                    if not report.ok:
                        failures.append(f"{rung.name} {shape} {dtype}\n{report}")
    return failures


def _peers(q, k, v, causal: bool) -> dict[str, Callable[[], object]]:
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        "flashcute": lambda: flashcute.flash_attn_func(q, k, v, causal=causal),
        "flashcute_sm80": launch.prepare_library_sm80(q, k, v, causal),
        "sdpa": lambda: sdpa(*heads_first, is_causal=causal),
    }


def _estimate(call: Callable[[], object]) -> float:
    """Returns the seconds of one call, after an uncounted first call that also loads the kernel."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(shape: bm.Shape, wanted: list[Rung], skip: set[str]) -> dict:
    """Measures a point: each contender's median microseconds and difference from the library."""
    q, k, v = bm.make_qkv(shape, DTYPE, "cuda")
    calls = _peers(q, k, v, shape.causal)
    expected = flashcute.flash_attn_func(q, k, v, causal=shape.causal).float()
    row: dict = {**dataclasses.asdict(shape), "us": {}, "difference": {}}
    quick = dict(calls)
    for rung in wanted:
        if rung.name in skip:
            continue
        # Slow rungs are timed one by one, so that only one of them holds its tensors in memory.
        call = launch.prepare(rung, q, k, v, shape.causal)
        seconds = _estimate(call)
        row["difference"][rung.name] = (call.out.float() - expected).abs().max().item()
        if seconds * (bm.REPEATS + bm.WARMUP) <= POINT_S:
            quick[rung.name] = call
        else:
            repeats = max(1, min(bm.REPEATS, int(POINT_S / seconds)))
            times = bm.time_interleaved({rung.name: call}, repeats=repeats, warmup=0)
            row["us"][rung.name] = round(statistics.median(times[rung.name]), 1)
        del call
    times = bm.time_interleaved(quick)
    row["us"] |= {name: round(statistics.median(values), 1) for name, values in times.items()}
    row["tflops"] = {name: round(shape.flops / us / 1e6, 2) for name, us in row["us"].items()}
    return row


def _shape(seqlen: int, causal: bool) -> bm.Shape:
    return bm.Shape(BATCH, seqlen, seqlen, HEADS, HEADS, HEAD_DIM, causal)


def launch_once(wanted: list[Rung]) -> None:
    """Launches each rung once on the counters' shape, for the profiler."""
    q, k, v = bm.make_qkv(counters.SHAPE, DTYPE, "cuda")
    for rung in wanted:
        launch.prepare(rung, q, k, v, counters.SHAPE.causal)()
    torch.cuda.synchronize()


def build(wanted: list[Rung], result: dict) -> list[Rung]:
    """Builds the rungs in parallel; returns those that could be built."""
    target = "".join(map(str, torch.cuda.get_device_capability()))
    for rung, outcome in launch.build_rungs(wanted, target).items():
        record = result["rungs"][rung.name]
        if outcome.artefact is None:
            record["errors"].append(outcome.error)
        else:
            meta = outcome.artefact.meta
            record |= {name: meta[name] for name in ("registers", "spill_bytes", "seconds")}
    return [rung for rung in wanted if not result["rungs"][rung.name]["errors"]]


def time_all(wanted: list[Rung], seqlens: list[int], end: float, save: Callable, result: dict):
    """Times the sweep, GPT-3's length first; skips rungs whose next point would take too long."""
    last: dict[str, float] = {}
    seqlens = sorted(seqlens, key=lambda s: (s != GPT3_SEQLEN, s))
    for seqlen in seqlens:
        for causal in (False, True):
            if time.monotonic() > end:
                result["stopped_early"] = True
                return
            ratio = (seqlen / GPT3_SEQLEN) ** 2
            skip = {name for name, us in last.items() if us * ratio > SLOWEST_S * 1e6}
            row = measure(_shape(seqlen, causal), wanted, skip)
            if seqlen == GPT3_SEQLEN and not causal:
                last = row["us"]
            result["rows"].append(row)
            save()
            print(f"s={seqlen} {'causal' if causal else 'full'}: {row['tflops']}", flush=True)


def wrong_points(result: dict) -> list[str]:
    """Lists the points whose output differs from the library's; their times are not valid."""
    return [
        f"{name} differs from the library by {value} at s={row['seqlen_q']} causal={row['causal']}"
        for row in result["rows"]
        for name, value in row["difference"].items()
        if not value <= AGREEMENT  # NaN too
    ]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ladder", description=__doc__.splitlines()[0])
    parser.add_argument("--rungs", nargs="+", type=rungs.find, default=list(rungs.RUNGS))
    parser.add_argument("--seqlens", nargs="*", type=int, default=list(SEQLENS))
    parser.add_argument("--time-limit", type=float, default=480.0, help="seconds for all of it")
    parser.add_argument("--no-counters", action="store_true", help="do not start Nsight Compute")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    launched = "launch each of these once, nothing else"
    parser.add_argument("--launch", nargs="+", type=rungs.find, help=launched)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if not torch.cuda.is_available():
        print("ladder: expected an NVIDIA GPU, found none", file=sys.stderr)
        return 1
    if args.launch:
        launch_once(args.launch)
        return 0
    end = time.monotonic() + args.time_limit
    major, minor = torch.cuda.get_device_capability()
    wanted = [rung for rung in args.rungs if rung.runs_on(10 * major + minor)]
    result: dict = {
        "machine": bm.machine_info(),
        "dtype": "bf16",
        "stopped_early": False,
        "rungs": {rung.name: {"errors": [], "counters": {}} for rung in args.rungs},
        "rows": [],
    }

    def save() -> None:
        if args.out:
            bm.write_json(args.out, result)

    for rung in set(args.rungs) - set(wanted):
        result["rungs"][rung.name]["errors"].append(f"does not run on sm_{major}{minor}")
    wanted = build(wanted, result)
    save()
    right = []
    with torch.no_grad():
        for rung in wanted:
            try:
                failures = check(rung)
            except (RuntimeError, TypeError, ValueError) as error:
                failures = [f"{type(error).__name__}: {error}"]
            result["rungs"][rung.name]["errors"] += failures[:3]
            right += [] if failures else [rung]
            print(f"{rung.name}: {'right' if not failures else 'WRONG'}", flush=True)
            save()
        time_all(right, args.seqlens, end - COUNTERS_S, save, result)
    left = end - time.monotonic()
    if right and left > 20 and not args.no_counters:
        values, why = counters.read([rung.name for rung in right], str(ROOT), left)
        for name, found in values.items():
            result["rungs"][name]["counters"] = found
        if why:
            print(f"no counters: {why}", flush=True)
    save()
    wrong = wrong_points(result)
    errors = [error for record in result["rungs"].values() for error in record["errors"]]
    print(*errors, *wrong, sep=f"{os.linesep}", file=sys.stderr)
    return 1 if errors or wrong or result["stopped_early"] else 0


if __name__ == "__main__":
    sys.exit(main())
