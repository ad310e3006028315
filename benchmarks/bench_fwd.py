"""Forward pass against PyTorch's flash backend (FA2), cuDNN and FlashAttention-3.

    python benchmarks/bench_fwd.py --out benchmarks/results/fwd.json

Every point first compares each contender's output with FA2's, then times all of them taking turns
(flashcute/benchmarking.py says how). Needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import statistics
import sys
import time

import peers
import torch

from flashcute import benchmarking as bm

HEAD_DIMS = (64, 96, 128, 192, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HOST_SHAPE = bm.Shape(b=1, seqlen_q=64, seqlen_k=64, h=4, h_k=4, d=64, causal=False)
# Two 16-bit kernels differ by roundings of P and O; a wrong mask or tile differs by 0.1 and more.
AGREEMENT = {"bf16": 4e-2, "fp16": 1e-2}


def measure(shape: bm.Shape, dtype: str, names: tuple[str, ...], args) -> dict:
    """One row of the sweep: median times, TFLOP/s and difference from FA2 of each contender."""
    q, k, v = bm.make_qkv(shape, DTYPES[dtype], "cuda")
    calls, missing = peers.make(q, k, v, shape.causal, names)
    reference = calls["fa2"]().float() if "fa2" in calls else None
    difference = {}
    for name, call in calls.items():
        if reference is not None:
            difference[name] = (call().float() - reference).abs().max().item()
    times = bm.time_interleaved(calls, repeats=args.repeats, warmup=args.warmup)
    us = {name: round(statistics.median(values), 2) for name, values in times.items()}
    row = {
        "dtype": dtype,
        **dataclasses.asdict(shape),
        "us": us,
        "us_min": {name: round(min(values), 2) for name, values in times.items()},
        "us_max": {name: round(max(values), 2) for name, values in times.items()},
        "tflops": {name: round(shape.flops / t / 1e6, 1) for name, t in us.items()},
        "difference": difference,
        "missing": missing,
    }
    if args.sustained:
        sustained = {name: bm.time_sustained(call) for name, call in calls.items()}
        row["us_sustained"] = {name: round(t, 2) for name, t in sustained.items()}
    return row


def measure_host(names: tuple[str, ...]) -> dict[str, float]:
    """Host microseconds of one call of each contender on the smallest useful shape."""
    q, k, v = bm.make_qkv(HOST_SHAPE, torch.bfloat16, "cuda")
    calls, _ = peers.make(q, k, v, HOST_SHAPE.causal, names)
    return {name: round(bm.host_time(call), 1) for name, call in calls.items()}


def disagreements(rows: list[dict]) -> list[str]:
    """Points where an output is not FA2's: a time of a wrong result is worth nothing."""
    return [
        f"{name} differs from FA2 by {value} at d={row['d']} s={row['seqlen_q']} {row['dtype']} "
        f"causal={row['causal']}"
        for row in rows
        for name, value in row["difference"].items()
        if not value <= AGREEMENT[row["dtype"]]  # NaN too
    ]


def summary(result: dict) -> str:
    """Short tables: TFLOP/s per point, then ratios to each peer and the host time."""
    rows, names = result["rows"], result["contenders"]
    table = [
        [
            row["dtype"],
            row["d"],
            "causal" if row["causal"] else "full",
            row["seqlen_q"],
            *(row["tflops"].get(name, "-") for name in names),
            f"{row['us']['fa2'] / row['us']['flashcute']:.3f}" if "fa2" in row["us"] else "-",
        ]
        for row in rows
    ]
    parts = [bm.format_table(["dtype", "d", "mask", "s", *names, "x fa2"], table)]
    ratios = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        part = [row for row in rows if row["dtype"] == dtype]
        for peer in names[1:]:
            found = bm.Ratios.of(part, names[0], peer)
            if found is not None:
                worst = found.worst_row
                mask = "causal" if worst["causal"] else "full"
                where = f"d={worst['d']} s={worst['seqlen_q']} {mask}"
                figures = [f"{found.geomean:.3f}", f"{found.worst:.3f}"]
                ratios.append([dtype, peer, found.count, *figures, where])
    parts.append(
        bm.format_table(["dtype", "speed over", "points", "geomean", "worst", "where"], ratios)
    )
    host = "  ".join(f"{name} {us} us" for name, us in result["host_us"].items())
    parts.append(f"host time per call: {host}")
    parts += [f"{name}: {values}" for name, values in result["gpu_samples"].items()]
    if result["stopped_early"]:
        parts.append("STOPPED EARLY: the time limit was reached, points are missing")
    return "\n\n".join(parts)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--seqlens", type=int, nargs="+", default=SEQLENS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument(
        "--masks", nargs="+", choices=["full", "causal"], default=["full", "causal"]
    )
    parser.add_argument("--peers", nargs="*", choices=peers.NAMES[1:], default=peers.NAMES[1:])
    parser.add_argument("--repeats", type=int, default=bm.REPEATS)
    parser.add_argument("--warmup", type=int, default=bm.WARMUP)
    parser.add_argument(
        "--sustained", action="store_true", help="also one second back to back each"
    )
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds for the sweep")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if not torch.cuda.is_available():
        print("bench_fwd: expected an NVIDIA GPU, found none", file=sys.stderr)
        return 1
    names = ("flashcute", *args.peers)
    begin = time.monotonic()
    rows: list[dict] = []
    points = [
        (dtype, bm.sweep_shape(d, seqlen, mask == "causal"))
        for dtype in args.dtypes
        for d in args.head_dims
        for mask in args.masks
        for seqlen in args.seqlens
    ]
    with torch.no_grad(), bm.gpu_sampler() as samples:
        host_us = measure_host(names)
        with contextlib.suppress(KeyboardInterrupt):  # what is measured so far is worth keeping
            for dtype, shape in points:
                if time.monotonic() - begin > args.time_limit:
                    break
                rows.append(measure(shape, dtype, names, args))
    result = {
        "machine": bm.machine_info(),
        "protocol": {"repeats": args.repeats, "warmup": args.warmup, "flush": bm.FLUSH_BYTES},
        "contenders": names,
        "stopped_early": len(rows) < len(points),
        "gpu_samples": bm.summarise_samples(samples),
        "host_us": host_us,
        "rows": rows,
    }
    if args.out:
        bm.write_json(args.out, result)
    print(summary(result))
    wrong = disagreements(rows)
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong or result["stopped_early"] else 0


if __name__ == "__main__":
    sys.exit(main())
