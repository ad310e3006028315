"""Why fp16 runs slower than bf16 on a card at its power limit: the bits that toggle.

    python tools/mantissa_power.py --out benchmarks/results/experiments/mantissa_power.json

fp16 has 10 bits of mantissa where bf16 has 7, and the same instructions; the three more toggle in
the multipliers and draw power, which lowers the clock. If so, the same fp16 kernel on inputs whose
low bits are zero wins its loss back, each bit a third of it, Q and K (of the product S) one half,
V (of O) the other: predicted below what is measured. P, which the kernel makes, keeps its bits.
cuDNN and cuBLAS have to lose, too. "power-capped": share of samples in which the limit held the
clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flashcute import benchmarking as bm
from flashcute.bench import command, peers, sweep, table

DEVICE = "cuda"
Call = Callable[[], object]
Point = tuple[int, int, bool]  # head dimension, length, causal
FP16_BITS, BF16_BITS = 10, 7
# Mantissa bits that are left of Q and K, and of V.
CUTS = {
    **{"fp16": (10, 10), "9 bits": (9, 9), "8 bits": (8, 8), "7 bits": (7, 7)},
    **{"Q, K 7": (7, 10), "V 7": (10, 7)},
}
OURS = [*(("flashcute", run) for run in CUTS), ("cudnn", "fp16")]
CUBLAS = [("cublas", "fp16"), ("cublas", "7 bits")]
BURSTS = (
    *((64, 1024, False), (128, 1024, False), (128, 4096, False)),
    *((192, 2048, False), (256, 4096, True), (128, 16384, False)),
)
LONG_RUNS = ((64, 4096, False), (128, 4096, False), (128, 16384, False))
MATMUL_SIZES = (2048, 3072, 4096, 6144, 8192)
REPEATS, SECONDS = 31, 1.0
ORDER = ("bf16", "fp16", "fp16", "bf16")  # a drift weighs on both alike
SAMPLE_MS = 20  # the shortest burst takes a fifth of a second


def cut_mantissa(x: torch.Tensor, bits: int) -> torch.Tensor:
    """fp16 ``x`` with the upper ``bits``, 1 to 10, of its 10 stored mantissa bits, then zeros.

    Signs, exponents, infinities and quiet NaNs stay. Raises TypeError for another dtype.
    """
    if x.dtype != torch.float16:
        raise TypeError(f"cut_mantissa: expected float16, got x.dtype={x.dtype}")
    return (x.view(torch.int16) & -(1 << (FP16_BITS - bits))).view(torch.float16)


def predicted(full: float, bits_qk: int, bits_v: int) -> float:
    """Speed over bf16 with so many bits left, of which all 10 have ``full``: linear in the bits."""
    more = bits_qk + bits_v - 2 * BF16_BITS
    return 1 - (1 - full) * more / (2 * (FP16_BITS - BF16_BITS))


def over_bf16(us: Mapping[str, float]) -> dict[str, float]:
    """Speed of each over bf16's, from microseconds; nothing where bf16 did not run."""
    others = {run: taken for run, taken in us.items() if run != "bf16"}
    return {run: round(us["bf16"] / taken, 4) for run, taken in others.items() if "bf16" in us}


def _in_turns(calls: Mapping[tuple[str, str], Call], samples: sweep.Samples) -> dict[str, dict]:
    """Of (contender, what it runs on): medians, speeds over its bf16; the GPU's state meanwhile."""
    us: dict[str, dict[str, float]] = {}
    begin = time.perf_counter()
    for (name, run), times in bm.time_interleaved(calls, DEVICE, REPEATS).items():
        us.setdefault(name, {})[run] = round(statistics.median(times), 2)
    state = bm.summarise_samples([sample for sample in samples if sample["at"] > begin])
    return {"us": us, "over_bf16": {n: over_bf16(x) for n, x in us.items()}, "gpu_samples": state}


def measure_burst(point: Point, samples: sweep.Samples) -> dict:
    """A row: flashcute on bf16 and each of :data:`CUTS`, cuDNN on bf16 and fp16, in turns."""
    shape = bm.sweep_shape(*point)
    inputs = {dtype: bm.make_qkv(shape, sweep.DTYPES[dtype], DEVICE) for dtype in ("bf16", "fp16")}
    q, k, v = inputs["fp16"]
    for run, (qk, pv) in CUTS.items():
        inputs[run] = (cut_mantissa(q, qk), cut_mantissa(k, qk), cut_mantissa(v, pv))
    calls, missing = {}, {}
    for run, tensors in inputs.items():
        names = ("flashcute", "cudnn") if run in sweep.DTYPES else ("flashcute",)
        found, without = peers.make(*tensors, shape.causal, names)
        calls |= {(name, run): call for name, call in found.items()}
        missing |= without
    return dataclasses.asdict(shape) | _in_turns(calls, samples) | {"missing": missing}


def measure_matmul(n: int, samples: sweep.Samples) -> dict:
    """A row: a product of random n x n matrices, where all that is multiplied can be cut."""
    pairs = {}
    for dtype in ("bf16", "fp16"):
        seeded = torch.Generator(DEVICE).manual_seed(0)
        like = {"dtype": sweep.DTYPES[dtype], "device": DEVICE}
        pairs[dtype] = torch.randn(2, n, n, generator=seeded, **like)
    pairs["7 bits"] = cut_mantissa(pairs["fp16"], BF16_BITS)
    calls = {("cublas", run): functools.partial(torch.matmul, *ab) for run, ab in pairs.items()}
    return {"n": n} | _in_turns(calls, samples)


def measure_long_run(point: Point, samples: sweep.Samples) -> dict:
    """A row: a second back to back in each of :data:`ORDER`, after one that warms the card."""
    shape, calls = bm.sweep_shape(*point), {}
    for dtype in ("bf16", "fp16"):
        tensors = bm.make_qkv(shape, sweep.DTYPES[dtype], DEVICE)
        calls[dtype] = peers.make(*tensors, shape.causal, ("flashcute",))[0]["flashcute"]
    sweep.measure_sustained(calls["bf16"], SECONDS, samples)
    runs = [{"dtype": x} | sweep.measure_sustained(calls[x], SECONDS, samples) for x in ORDER]
    us = {dtype: mean_of(runs, dtype, "us") for dtype in calls}
    return dataclasses.asdict(shape) | {"runs": runs, "over_bf16": over_bf16(us)}


def mean_of(runs: Sequence[Mapping], dtype: str, name: str) -> float | None:
    """The mean of a figure over a type's runs; None where one of them lacks it."""
    found = [run.get(name) for run in runs if run["dtype"] == dtype]
    return None if None in found else statistics.fmean(found)


def _cell(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def speeds_table(columns: Sequence[tuple[str, str]], rows: Sequence[Mapping]) -> str:
    """Speeds over bf16, and what is predicted from each contender's mean with all bits."""
    lines, found = [], []
    for row in rows:
        found.append([row["over_bf16"].get(name, {}).get(run) for name, run in columns])
        capped = row["gpu_samples"].get("power_capped", {}).get("mean")
        point = f"n={row['n']}" if "n" in row else table.describe(row)
        lines.append([point, *map(_cell, found[-1]), _cell(capped, 2)])
    by_column = zip(columns, zip(*found, strict=True), strict=True)
    means = {column: None if None in x else bm.geomean(x) for column, x in by_column}
    lines.append(["geometric mean", *map(_cell, means.values()), "-"])
    full = {(name, run): means[name, "fp16"] for name, run in columns}
    foreseen = [x and predicted(x, *CUTS[run]) for (_, run), x in full.items()]
    lines.append(["predicted", *map(_cell, foreseen), "-"])
    names = (run if name == "flashcute" else f"{name} {run}" for name, run in columns)
    return bm.format_table(["speed over bf16", *names, "power-capped"], lines)


def long_runs_table(rows: Sequence[Mapping]) -> str:
    """Means of the two runs of each type: time, clock, power, share of samples under the limit."""
    lines = []
    for row in rows:
        for dtype in ("bf16", "fp16"):
            means = [mean_of(row["runs"], dtype, x) for x in ("us", "sm_mhz", "power_w")]
            capped = _cell(mean_of(row["runs"], dtype, "power_capped"), 2)
            cells = [*(_cell(x, 1) for x in means), capped, _cell(row["over_bf16"].get(dtype))]
            lines.append([table.describe(row), dtype, *cells])
    header = ["a second on end", "dtype", "us", "MHz", "W", "power-capped", "speed over bf16"]
    return bm.format_table(header, lines)


def measure() -> dict[str, list[dict]]:
    """All rows, with a bar that says where it is."""
    todo = [("bursts", measure_burst, point) for point in BURSTS]
    todo += [("matmul", measure_matmul, n) for n in MATMUL_SIZES]
    todo += [("long_runs", measure_long_run, point) for point in LONG_RUNS]
    result: dict[str, list[dict]] = {}
    with torch.no_grad(), bm.gpu_sampler(interval_ms=SAMPLE_MS) as samples:
        for part, row_of, point in tqdm(todo, desc="mantissa_power", unit="row"):
            result.setdefault(part, []).append(row_of(point, samples))
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        wanted = "an NVIDIA GPU of compute capability 8.0 or later that torch can use"
        print(f"mantissa_power: expected {wanted}, found none; run it there", file=sys.stderr)
        return 1
    shapes = [bm.sweep_shape(*point) for point in {*BURSTS, *LONG_RUNS}]
    command.build([[(dtype, shape) for dtype in sweep.DTYPES] for shape in shapes])
    result = measure()
    if args.out is not None:
        protocol = {"repeats": REPEATS, "sustained_seconds": SECONDS, "cuts": CUTS}
        bm.write_json(args.out, {"machine": bm.machine_info(), "protocol": protocol, **result})
    tables = (speeds_table(OURS, result["bursts"]), speeds_table(CUBLAS, result["matmul"]))
    print(*tables, long_runs_table(result["long_runs"]), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
