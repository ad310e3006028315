"""The sweep: checks every point, then times it in bursts and optionally for a second back to back.

A point is a head dim, a mask and a length, or a named shape. Its variants (dtype, distribution of
inputs, query heads per key head) are timed in turns in one loop, so that they can be compared, too.

``burst``: each call is timed alone with cold caches (:mod:`flashcute.benchmarking`). ``sustained``:
one contender runs back to back for a second; the second half is evaluated, with its SM clock and
power. The power limit lowers the clock of sustained runs, so the two can disagree. Both have a
ceiling measured in the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

import torch

from .. import benchmarking as bm
from . import inputs as distributions
from . import option_peers, peers, serving, serving_peers
from .options import Option
from .serving import Serving

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# The smallest useful shape, for which peers publish host times; and a shape with grouped heads and
# more tiles than SMs, which a causal kernel distributes by work stealing.
HOST_SHAPES = {
    "host_us": bm.Shape(1, 64, 64, 4, 4, 64, causal=False),
    "host_us_causal": bm.Shape(8, 1024, 1024, 16, 4, 128, causal=True),
}
# Lengths, of queries and of keys, of calls none of which has the length of an earlier call.
NEW_LENGTHS = range(101, 2101)
NEW_LENGTHS_SHAPE = bm.Shape(1, NEW_LENGTHS[-1], NEW_LENGTHS[-1], 16, 16, 64, causal=True)
# Has as many tiles at each length and so takes the same kernels: calling it first loads them.
SAME_KERNELS_SHAPE = dataclasses.replace(NEW_LENGTHS_SHAPE, b=2, h=8, h_k=8)
# Contenders on new lengths. cuDNN is left out: it builds a graph for each length, in milliseconds.
NEW_LENGTHS_OF = ("flashcute", "fa2", "fa3")
# Two 16-bit kernels differ by roundings of P and O; a wrong mask or tile gives 0.1 and more.
AGREEMENT = {"bf16": 4e-2, "fp16": 1e-2}
CEILING_SIZE = 8192  # rows and columns of the matrices whose product is the ceiling
COPY_BYTES = 2 << 30
READ_BYTES = 4 << 30
SAMPLE_MS = 50


@dataclasses.dataclass(frozen=True)
class Options:
    """How each point is measured.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        names: Contenders, flashcute first.
        repeats, warmup: Timed and untimed calls of each in a burst.
        sustained: Seconds for which each runs back to back, 0 for none.
        flush_bytes: Bytes cleared before each call of a burst.
        time_limit: Seconds after which no further point is begun.
        what: The pass, one of ``peers.PASSES`` or ``serving.PASSES``.
        modules: Contenders from files, by name (``peers.load_module``).
    """

    device: str
    names: tuple[str, ...]
    repeats: int = bm.REPEATS
    warmup: int = bm.WARMUP
    sustained: float = 0.0
    flush_bytes: int = bm.FLUSH_BYTES
    time_limit: float = 540.0
    what: str = "fwd"
    modules: Mapping[str, ModuleType] = dataclasses.field(default_factory=dict)


class Variant(NamedTuple):
    """The subject of one row of the result; ``model`` names a model's shape or an option's."""

    dtype: str
    shape: bm.Shape
    inputs: str = "normal"
    model: str | None = None


def points(
    dtypes: Sequence[str],
    head_dims: Sequence[int],
    masks: Sequence[str],
    groups: Sequence[int],
    seqlens: Sequence[int],
    tokens: int = bm.TOTAL_TOKENS,
    inputs: Sequence[str] = ("normal",),
) -> list[list[Variant]]:
    """Returns the points of a sweep, each as the list of its variants, which are measured in turns.

    ``groups``: query heads that share a key and value head. The number of query heads, and so of
    FLOPs, is the same for all groups: the largest common multiple within the sweep's width, or else
    the least common multiple.
    """
    common = math.lcm(*groups)
    found = []
    for d in head_dims:
        for mask in masks:
            for seqlen in seqlens:
                shape = bm.sweep_shape(d, seqlen, mask == "causal", tokens)
                h = max(common, shape.h - shape.h % common)
                shapes = [dataclasses.replace(shape, h=h, h_k=h // group) for group in groups]
                found.append(
                    [
                        Variant(dtype, grouped, name)
                        for dtype in dtypes
                        for grouped in shapes
                        for name in inputs
                    ]
                )
    return found


def model_points(
    models: Mapping[str, bm.Shape], dtypes: Sequence[str], inputs: Sequence[str] = ("normal",)
) -> list[list[Variant]]:
    """Returns a point for each named shape: its variants, which are measured in turns."""
    return [
        [Variant(dtype, shape, name, model) for dtype in dtypes for name in inputs]
        for model, shape in models.items()
    ]


Samples = Sequence[Mapping[str, float]]


def measure_sustained(
    call: Callable[[], object], seconds: float, samples: Samples
) -> dict[str, float]:
    """Measures microseconds per call, and the GPU's state in the second half of the run.

    The state is the medians of clock, power and temperature, the share of samples in which the
    power limit lowered the clock, and the number of samples.
    """
    begin = time.perf_counter()
    figures = {"us": round(bm.time_sustained(call, seconds), 2)}
    middle = (begin + time.perf_counter()) / 2
    taken = bm.summarise_samples([sample for sample in samples if sample["at"] > middle])
    figures |= {
        name: values["mean" if name == "power_capped" else "median"]
        for name, values in taken.items()
    }
    return figures | {"samples": max((values["count"] for values in taken.values()), default=0)}


def measure_ceiling(options: Options, samples: Samples) -> dict[str, float]:
    """Measures the ceilings of this GPU by both protocols: a large matrix product, and a copy.

    For calls over a cache it is :func:`measure_read` instead.
    """
    if options.what in serving.PASSES:
        return measure_read(options)
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
        figures = measure_sustained(product, options.sustained, samples)
        ceiling["tflops_sustained"] = round(flops / figures.pop("us") / 1e6, 1)
        ceiling |= figures
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    copies = bm.time_interleaved({"copy": lambda: target.copy_(source)}, options.device, 5, 2)
    moved = 2 * COPY_BYTES  # read and written
    return ceiling | {"bytes_per_second": moved / statistics.median(copies["copy"]) * 1e6}


def measure_read(options: Options) -> dict[str, float]:
    """Measures the read ceiling in bytes a second, on 4 GiB of bf16 noise.

    The ceiling is the fastest of PyTorch's sums, which are returned, too: of all elements as bf16,
    of all pairs of them as float32, and of rows of those pairs. Each is timed as the contenders
    are.
    """
    generator = torch.Generator(options.device).manual_seed(0)
    x = torch.empty(READ_BYTES // 2, dtype=torch.bfloat16, device=options.device)
    x.normal_(generator=generator)
    words = x.view(torch.float32)
    reads = {
        "sum_bf16_bytes_per_second": x.sum,
        "sum_float32_bytes_per_second": words.sum,
        "row_sums_float32_bytes_per_second": lambda: words.view(-1, 4096).sum(1),
    }
    times = bm.time_interleaved(
        reads, options.device, options.repeats, options.warmup, options.flush_bytes
    )
    found = {name: READ_BYTES / statistics.median(us) * 1e6 for name, us in times.items()}
    return {"read_bytes_per_second": max(found.values())} | found


def _figures(
    flops: float, us: Mapping[str, float], ceiling: Mapping[str, float], suffix: str = ""
) -> dict[str, dict[str, float]]:
    """Returns times, TFLOP/s and percent of the ceiling of each contender, as a row holds them."""
    tflops = {name: _tflops(flops, time) for name, time in us.items()}
    most = ceiling.get(f"tflops{suffix}")
    percent = {name: round(100 * x / most, 1) for name, x in tflops.items()} if most else {}
    return {
        f"us{suffix}": dict(us),
        f"tflops{suffix}": tflops,
        f"percent_of_ceiling{suffix}": percent,
    }


def _tflops(flops: float, us: float) -> float:
    # A GPU's values get one decimal, a CPU's four.
    value = flops / us / 1e6
    return round(value, 1 if value >= 10 else 4)


def _difference(result: peers.Result, reference: peers.Result) -> float:
    """Returns the largest difference; for gradients in units of their largest element.

    The largest element is that of all gradients together: where keys are equal, the gradient of q
    is nothing but rounding.
    """
    if isinstance(result, torch.Tensor):
        return (result.float() - reference.float()).abs().max().item()
    pairs = zip(result, reference, strict=True)
    found = torch.stack([(x.float() - y.float()).abs().max() for x, y in pairs])
    return (found.max() / max(y.abs().max().item() for y in reference)).item()


def _differences(
    calls: Mapping[str, Callable[[], peers.Result]],
    trusted: Callable[[], peers.Result] | None,
    shape: bm.Shape,
) -> dict[str, float] | None:
    """Returns the difference of each contender's result from the trusted peer's; None where that
    does not run.

    Contenders that have other results by their nature are left out.
    """
    if trusted is None:
        return None

    def result(call: Callable[[], peers.Result]) -> peers.Result:
        torch.manual_seed(0)  # dropout draws its mask from it
        return call()

    reference = result(trusted)
    compared = {x: call for x, call in calls.items() if option_peers.is_compared(x, shape)}
    return {name: _difference(result(call), reference) for name, call in compared.items()}


def _make(
    variant: Variant, options: Options
) -> tuple[dict[str, Callable[[], peers.Result]], dict[str, object]]:
    """Returns the calls of a variant, and of its row: why contenders are missing, with which peer
    results are compared, and differences from its."""
    shape, device = variant.shape, options.device
    of_pass = {"what": options.what, "modules": options.modules}
    if isinstance(shape, Option | Serving):
        trusted, sizes = option_peers.TRUSTED, shape.tensors
        make = functools.partial(serving_peers.make, shape=shape)
        if isinstance(shape, Option):
            trusted = option_peers.trusted(shape, options.what, device)
            make = functools.partial(option_peers.make, shape=shape, **of_pass)
    else:
        trusted, sizes = peers.NAMES[device][1], shape
        make = functools.partial(peers.make, causal=shape.causal, **of_pass)
    q, k, v = distributions.make(variant.inputs, sizes, DTYPES[variant.dtype], device)
    calls, missing = make(q, k, v, names=options.names)
    reference, name = calls.get(trusted), trusted
    in_file = trusted in options.modules and not isinstance(shape, Serving)
    if in_file or trusted not in options.names:  # only compared with, not timed
        own = {"modules": {}} if in_file else {}
        compared, why = make(q, k, v, names=(trusted,), **own)
        reference, missing = compared.get(trusted), missing | why
        name = f"the built-in {trusted}" if in_file else trusted
    difference = _differences(calls, reference, shape)
    return calls, {"trusted": name, "difference": difference, "missing": missing}


def measure(
    point: Sequence[Variant],
    number: int,
    options: Options,
    samples: Samples,
    ceiling: Mapping[str, float],
) -> list[dict]:
    """Measures each variant of a point; returns rows of times, TFLOP/s, differences by contender.

    ``number`` is the point's index in the sweep; the order of sustained runs depends on it.
    """
    rows: list[dict] = []
    contenders: dict[tuple[int, str], Callable[[], peers.Result]] = {}
    for index, variant in enumerate(point):
        calls, found = _make(variant, options)
        about = {"dtype": variant.dtype, **dataclasses.asdict(variant.shape)}
        about |= {"inputs": variant.inputs}
        about |= {"model": variant.model} if variant.model else {}
        rows.append(about | found)
        contenders |= {(index, name): call for name, call in calls.items()}
    times = bm.time_interleaved(
        contenders, options.device, options.repeats, options.warmup, options.flush_bytes
    )
    runs = {}
    if options.sustained:
        order = bm.turn(contenders, number)
        # The GPU cools during set-up, so an extra run comes first; its result is overwritten below.
        for key in [order[-1], *order]:
            runs[key] = measure_sustained(contenders[key], options.sustained, samples)
    for index, (row, variant) in enumerate(zip(rows, point, strict=True)):
        flops = variant.shape.flops * peers.PASSES.get(options.what, 1.0)
        taken = {name: values for (i, name), values in times.items() if i == index}
        us = {name: round(statistics.median(values), 2) for name, values in taken.items()}
        row.update(_figures(flops, us, ceiling))
        if isinstance(variant.shape, Serving):
            row.update(serving.figures(variant.shape, us, ceiling))
        row["us_min"] = {name: round(min(values), 2) for name, values in taken.items()}
        row["us_max"] = {name: round(max(values), 2) for name, values in taken.items()}
        if runs:
            states = {name: dict(runs[index, name]) for name in taken}
            us = {name: state.pop("us") for name, state in states.items()}
            row.update(_figures(flops, us, ceiling, "_sustained"), gpu_sustained=states)
    return rows


def measure_host(shape: bm.Shape, options: Options) -> dict[str, float]:
    """Returns host microseconds of one call of each contender."""
    q, k, v = bm.make_qkv(shape, torch.bfloat16, options.device)
    names, modules = options.names, options.modules
    calls, _ = peers.make(q, k, v, shape.causal, names, options.what, modules)
    return {name: round(bm.host_time(call), 1) for name, call in calls.items()}


def measure_new_lengths(names: Sequence[str], device: str) -> dict[str, dict[str, float]]:
    """Returns host microseconds of a forward with a length that no earlier call had.

    For each contender: the mean, and the 95th and 99th percentiles.
    """

    def calls(name: str, shape: bm.Shape) -> list[Callable[[], peers.Result]]:
        qkv = bm.make_qkv(shape, torch.bfloat16, device)
        return [
            peers.make_untried(name, *(x[:, :length] for x in qkv), shape.causal)
            for length in NEW_LENGTHS
        ]

    def load_kernels(name: str) -> Callable[[], object]:
        return lambda: bm.host_times(calls(name, SAME_KERNELS_SHAPE))

    makers = {name: functools.partial(load_kernels, name) for name in NEW_LENGTHS_OF}
    able = tuple(name for name in names if name in makers)
    found = {}
    for name in peers.attempt(makers, able, on_gpu=False)[0]:
        times = bm.host_times(calls(name, NEW_LENGTHS_SHAPE))
        percentiles = statistics.quantiles(times, n=100)
        found[name] = {
            "mean": round(statistics.mean(times), 1),
            "p95": round(percentiles[94], 1),
            "p99": round(percentiles[98], 1),
        }
    return found


def measure_host_of_add(device: str) -> float:
    """Returns host microseconds of ``torch.add``, an operator of one output and one kernel.

    Host times depend on the host; this one tells how fast it is.
    """
    x = torch.zeros(64, device=device)
    return round(bm.host_time(lambda: torch.add(x, x)), 1)


def _measure_hosts(options: Options) -> dict[str, dict]:
    """Measures host time on each shape and on new lengths; over a cache, that of decode calls."""
    found: dict[str, dict] = {"host_us_add": {"torch.add": measure_host_of_add(options.device)}}
    if options.what in serving.PASSES:
        return found | serving_peers.measure_host(options.names, options.device)
    found |= {name: measure_host(shape, options) for name, shape in HOST_SHAPES.items()}
    if options.what == "fwd":
        able = [name for name in options.names if name in found["host_us"]]
        found["host_us_new_lengths"] = measure_new_lengths(able, options.device)
    return found


def run(
    wanted: Sequence[Sequence[Variant]],
    options: Options,
    progress: Callable[[dict], None] = lambda row: None,
) -> dict:
    """Measures every point within the time limit and returns the JSON-ready result.

    After a keyboard interrupt it returns the rows measured so far.
    """
    begin = time.monotonic()
    on_gpu = options.device == "cuda"
    rows: list[dict] = []
    samples: list[dict[str, float]] = []
    ceiling, host = {}, {name: {} for name in HOST_SHAPES}
    with torch.no_grad(), contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        if on_gpu:  # before the sampler starts: its driver calls would add to host time
            host |= _measure_hosts(options)
        samples = stack.enter_context(bm.gpu_sampler(interval_ms=SAMPLE_MS))
        if on_gpu:
            ceiling = measure_ceiling(options, samples)
        for number, point in enumerate(wanted):
            if time.monotonic() - begin > options.time_limit:
                break
            for row in measure(point, number, options, samples, ceiling):
                rows.append(row)
                progress(row)
    return {
        "machine": bm.machine_info(),
        "device": options.device,
        "pass": options.what,
        "protocol": {
            "repeats": options.repeats,
            "warmup": options.warmup,
            "flush": options.flush_bytes,
            "sustained_seconds": options.sustained,
        },
        "contenders": options.names,
        "ceiling": ceiling,
        "stopped_early": len(rows) < sum(map(len, wanted)),
        "gpu_samples": bm.summarise_samples(samples),
        **host,
        "rows": rows,
    }
