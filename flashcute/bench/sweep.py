"""The sweep: every point checked, then timed in bursts and, if asked for, for a second on end.

``burst``: each call stands alone with cold caches, contenders taking turns
(:mod:`flashcute.benchmarking`). ``sustained``: one contender back to back for a second, its second
half evaluated, with the SM clock and power that the card settled at. The card is power capped, so
the two can disagree; both are figures of interest, and both have a ceiling measured the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from .. import benchmarking as bm
from . import peers

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HOST_SHAPE = bm.Shape(b=1, seqlen_q=64, seqlen_k=64, h=4, h_k=4, d=64, causal=False)
# Two 16-bit kernels differ by roundings of P and O; a wrong mask or tile differs by 0.1 and more.
AGREEMENT = {"bf16": 4e-2, "fp16": 1e-2}
CEILING_SIZE = 8192  # of the square matrices whose product is the ceiling
COPY_BYTES = 2 << 30
SAMPLE_MS = 50


@dataclasses.dataclass(frozen=True)
class Options:
    """How each point is measured.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        names: Contenders, flashcute first.
        repeats, warmup: Timed and untimed calls of each in a burst.
        sustained: Seconds back to back of each, 0 for none.
        flush_bytes: Cleared before each call of a burst.
        time_limit: Seconds after which no further point is begun.
    """

    device: str
    names: tuple[str, ...]
    repeats: int = bm.REPEATS
    warmup: int = bm.WARMUP
    sustained: float = 0.0
    flush_bytes: int = bm.FLUSH_BYTES
    time_limit: float = 540.0


def points(
    dtypes: Sequence[str],
    head_dims: Sequence[int],
    masks: Sequence[str],
    groups: Sequence[int],
    seqlens: Sequence[int],
    tokens: int = bm.TOTAL_TOKENS,
) -> list[tuple[str, bm.Shape]]:
    """Every (dtype, shape) of a sweep; ``groups``: query heads that share a key and value head."""
    found = []
    for dtype in dtypes:
        for d in head_dims:
            for mask in masks:
                for group in groups:
                    for seqlen in seqlens:
                        shape = bm.sweep_shape(d, seqlen, mask == "causal", tokens)
                        heads = max(group, shape.h - shape.h % group)
                        grouped = dataclasses.replace(shape, h=heads, h_k=heads // group)
                        found.append((dtype, grouped))
    return found


Samples = Mapping[str, Sequence[float]]


def _sustained(call: Callable[[], object], seconds: float, samples: Samples) -> dict[str, float]:
    """Microseconds per call, and the clock and power of the run's second half."""
    before = {name: len(values) for name, values in samples.items()}
    figures = {"us": round(bm.time_sustained(call, seconds), 2)}
    for name, values in samples.items():
        taken = values[before[name] :]
        if taken:
            figures[name] = statistics.median(taken[len(taken) // 2 :])
    return figures


def measure_ceiling(options: Options, samples: Samples) -> dict[str, float]:
    """What this card reaches in the same two protocols: a large matrix product, and a copy."""
    generator = torch.Generator(options.device).manual_seed(0)
    size = (CEILING_SIZE, CEILING_SIZE)
    a, b = (
        torch.randn(size, dtype=torch.bfloat16, device=options.device, generator=generator)
        for _ in range(2)
    )
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, b, out=out)

    flops = 2 * CEILING_SIZE**3
    times = bm.time_interleaved({"mm": product}, options.device, options.repeats, options.warmup)
    ceiling = {"tflops": round(flops / statistics.median(times["mm"]) / 1e6, 1)}
    if options.sustained:
        figures = _sustained(product, options.sustained, samples)
        ceiling["tflops_sustained"] = round(flops / figures.pop("us") / 1e6, 1)
        ceiling |= figures
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    copies = bm.time_interleaved({"copy": lambda: target.copy_(source)}, options.device, 5, 2)
    moved = 2 * COPY_BYTES  # read and written
    return ceiling | {"bytes_per_second": moved / statistics.median(copies["copy"]) * 1e6}


def _percent(tflops: Mapping[str, float], ceiling: float | None) -> dict[str, float]:
    return {name: round(100 * x / ceiling, 1) for name, x in tflops.items()} if ceiling else {}


def measure(
    shape: bm.Shape, dtype: str, options: Options, samples: Samples, ceiling: Mapping[str, float]
) -> dict:
    """One row: times, TFLOP/s, percent of the ceiling and difference of each contender."""
    q, k, v = bm.make_qkv(shape, DTYPES[dtype], options.device)
    calls, missing = peers.make(q, k, v, shape.causal, options.names)
    difference = {}
    trusted = peers.NAMES[options.device][1]
    if trusted in calls:
        reference = calls[trusted]().float()
        for name, call in calls.items():
            difference[name] = (call().float() - reference).abs().max().item()
    times = bm.time_interleaved(
        calls, options.device, options.repeats, options.warmup, options.flush_bytes
    )
    us = {name: round(statistics.median(values), 2) for name, values in times.items()}
    tflops = {name: _tflops(shape, t) for name, t in us.items()}
    row = {
        "dtype": dtype,
        **dataclasses.asdict(shape),
        "us": us,
        "us_min": {name: round(min(values), 2) for name, values in times.items()},
        "us_max": {name: round(max(values), 2) for name, values in times.items()},
        "tflops": tflops,
        "percent_of_ceiling": _percent(tflops, ceiling.get("tflops")),
        "difference": difference,
        "missing": missing,
    }
    if options.sustained:
        runs = {name: _sustained(call, options.sustained, samples) for name, call in calls.items()}
        row["us_sustained"] = {name: run.pop("us") for name, run in runs.items()}
        steady = {name: _tflops(shape, t) for name, t in row["us_sustained"].items()}
        row["tflops_sustained"] = steady
        row["percent_of_ceiling_sustained"] = _percent(steady, ceiling.get("tflops_sustained"))
        row["gpu_sustained"] = runs
    return row


def _tflops(shape: bm.Shape, us: float) -> float:
    # A digit after the point for a GPU, four for a CPU.
    value = shape.flops / us / 1e6
    return round(value, 1 if value >= 10 else 4)


def measure_host(options: Options) -> dict[str, float]:
    """Host microseconds of one call of each contender on the smallest useful shape."""
    q, k, v = bm.make_qkv(HOST_SHAPE, torch.bfloat16, options.device)
    calls, _ = peers.make(q, k, v, HOST_SHAPE.causal, options.names)
    return {name: round(bm.host_time(call), 1) for name, call in calls.items()}


def run(
    wanted: Sequence[tuple[str, bm.Shape]],
    options: Options,
    progress: Callable[[dict], None] = lambda row: None,
) -> dict:
    """Measures every point, as far as time allows, and returns the JSON-ready result.

    Interrupted from the keyboard, it returns what is measured so far.
    """
    begin = time.monotonic()
    on_gpu = options.device == "cuda"
    rows: list[dict] = []
    ceiling, host_us = {}, {}
    with (
        torch.no_grad(),
        bm.gpu_sampler(interval_ms=SAMPLE_MS) as samples,
        contextlib.suppress(KeyboardInterrupt),
    ):
        if on_gpu:
            host_us = measure_host(options)
            ceiling = measure_ceiling(options, samples)
        for dtype, shape in wanted:
            if time.monotonic() - begin > options.time_limit:
                break
            rows.append(measure(shape, dtype, options, samples, ceiling))
            progress(rows[-1])
    return {
        "machine": bm.machine_info(),
        "device": options.device,
        "protocol": {
            "repeats": options.repeats,
            "warmup": options.warmup,
            "flush": options.flush_bytes,
            "sustained_seconds": options.sustained,
        },
        "contenders": options.names,
        "ceiling": ceiling,
        "stopped_early": len(rows) < len(wanted),
        "gpu_samples": bm.summarise_samples(samples),
        "host_us": host_us,
        "rows": rows,
    }
