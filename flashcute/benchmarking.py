"""How speed is measured here, so that every figure in the project means the same thing.

Each call is timed alone. A buffer larger than the L2 cache is cleared first, so that inputs come
from device memory and the host's launch time hides behind the clearing; the buffer is larger for
passes with gradients. Contenders take turns within each repeat, in another order each time, so that
drifting clocks and power, and the contender before, affect all alike; the figure is the median.
Compare ratios within one run, never absolute figures of different runs or cards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from .problem import FwdProblem

REPEATS = 15
WARMUP = 4
FLUSH_BYTES = 1 << 30
# Cleared before passes with gradients, which takes an H200 or H100 1 to 1.4 ms. A backward by
# autograd takes the host 0.1 to 0.3 ms, and longer after the host has waited.
FLUSH_BYTES_AUTOGRAD = 4 << 30
TOTAL_TOKENS = 16 * 1024
MODEL_WIDTH = 2048
# The launch queue holds about a thousand kernels, and a call launches a few at most: so many calls
# without waiting for the GPU never fill it, however long its kernels run.
HOST_CALLS = 50

Name = TypeVar("Name", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One forward problem: sizes as in ``flash_attn_func``, lengths in tokens."""

    b: int
    seqlen_q: int
    seqlen_k: int
    h: int
    h_k: int
    d: int
    causal: bool

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass: 4 d for each pair of query and key.

        A causal mask counts half of the square that the diagonal cuts, and nothing is counted for
        the row sums: the convention of the FlashAttention papers.
        """
        pairs = self.seqlen_q * self.seqlen_k
        if self.causal:  # aligned to the bottom-right corner: at most seqlen_k rows see anything
            diagonal = min(self.seqlen_q, self.seqlen_k)
            pairs = diagonal * self.seqlen_k - diagonal * diagonal // 2
        return 4 * self.b * self.h * pairs * self.d

    def bytes(self, itemsize: int = 2) -> int:
        """Returns the least memory traffic in bytes: Q, K, V read once, O and fp32 LSE written."""
        rows_q = self.b * self.seqlen_q * self.h
        rows_k = self.b * self.seqlen_k * self.h_k
        return itemsize * self.d * (2 * rows_q + 2 * rows_k) + 4 * rows_q

    def problem(self, dtype: str) -> FwdProblem:
        """Returns the call as the choice of a kernel sees it."""
        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(Shape)}
        return FwdProblem(dtype, **sizes)


def sweep_shape(d: int, seqlen: int, causal: bool, total_tokens: int = TOTAL_TOKENS) -> Shape:
    """Returns the sweep's shape: 16k tokens, heads x head_dim at most 2048 (d = 96: 21 heads)."""
    h = MODEL_WIDTH // d
    return Shape(max(1, total_tokens // seqlen), seqlen, seqlen, h, h, d, causal)


def make_qkv(
    shape: Shape, dtype: torch.dtype, device: str | torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns standard normal Q ``(b, seqlen_q, h, d)`` and K, V ``(b, seqlen_k, h_k, d)``.

    The data is random because zeros draw less power and run faster than real data.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    size_q = (shape.b, shape.seqlen_q, shape.h, shape.d)
    size_k = (shape.b, shape.seqlen_k, shape.h_k, shape.d)
    q, k, v = (
        torch.randn(size, dtype=dtype, device=device, generator=generator)
        for size in (size_q, size_k, size_k)
    )
    return q, k, v


def turn(contenders: Iterable[Name], number: int) -> list[Name]:
    """Returns the contenders in the order of turn ``number``: shuffled, the same in every run.

    In a fixed order, or one that only rotates, each contender would always follow the same other
    one, and run with the clock and power that the other one leaves.
    """
    order = list(contenders)
    random.Random(number).shuffle(order)
    return order


def time_interleaved(
    contenders: Mapping[Name, Callable[[], object]],
    device: str | torch.device = "cuda",
    repeats: int = REPEATS,
    warmup: int = WARMUP,
    flush_bytes: int = FLUSH_BYTES,
    around: Callable[[Name], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> dict[Name, list[float]]:
    """Times each contender ``repeats`` times, taking turns, caches cold.

    Args:
        contenders: Name to a call without arguments that enqueues the work.
        device: Where the work runs; on ``"cpu"`` the wall clock is read instead of events.
        repeats, warmup: Timed and untimed calls of each.
        flush_bytes: Size of the buffer that is cleared before each timed call.
        around: Name to the context manager in which the contender is called, e.g. a choice of
            backends. Its own time does not count.

    Returns:
        Name to ``repeats`` times in microseconds, in the order they were taken.

    Raises:
        ValueError: no contender, or ``repeats`` or ``flush_bytes`` is below 1.
    """
    if not contenders or repeats < 1 or flush_bytes < 1:
        raise ValueError(
            "time_interleaved: expected at least one contender, repeats >= 1 and flush_bytes >= 1, "
            f"got {len(contenders)} contenders, repeats={repeats}, flush_bytes={flush_bytes}"
        )
    device = torch.device(device)
    flush = torch.empty(flush_bytes, dtype=torch.uint8, device=device)
    for name, call in contenders.items():
        with around(name):
            for _ in range(warmup):
                call()
    once = _time_on_gpu if device.type == "cuda" else _time_on_cpu
    times: dict[Name, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats):
        for name in turn(contenders, repeat):
            with around(name):
                flush.zero_()
                times[name].append(once(contenders[name]))
    return times


def _time_on_gpu(call: Callable[[], object]) -> float:
    start = torch.cuda.Event(enable_timing=True)
    stop = torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def _time_on_cpu(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def time_sustained(call: Callable[[], object], seconds: float = 1.0) -> float:
    """Returns microseconds per call, run back to back on the GPU for ``seconds``: power is capped
    and the L2 cache is warm."""
    burst = 16
    times = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        times.append(_time_on_gpu(lambda: [call() for _ in range(burst)]) / burst)
    return statistics.median(times[len(times) // 2 :])  # the first half still runs at burst clocks


def host_time(call: Callable[[], object], batches: int = 40) -> float:
    """Returns microseconds of host time of a call that enqueues GPU work; the queue is never full.

    The host waits for the GPU between batches of calls, outside of the timed part, so that the
    figure is the same for kernels that run longer than the call that enqueues them.
    """
    times = []
    for _ in range(batches + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        times.append((time.perf_counter() - start) * 1e6 / HOST_CALLS)
        torch.cuda.synchronize()
    return statistics.median(times[1:])


def host_times(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Returns microseconds of host time of each of ``calls``, in order, as :func:`host_time` does.

    A call right after a wait for the GPU takes longer. After each wait the call before it is
    therefore repeated without being timed.
    """
    times = []
    for number, call in enumerate(calls):
        if number % HOST_CALLS == 0:
            torch.cuda.synchronize()
            if number > 0:
                calls[number - 1]()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return times


_SAMPLED = {
    "sm_mhz": "clocks.sm",
    # From Ampere on `power.draw` is the mean of a whole second, and so mostly of what ran before.
    "power_w": "power.draw.instant",
    "temperature_c": "temperature.gpu",
    "power_capped": "clocks_event_reasons.sw_power_cap",
}
_FLAGS = {"Active": 1.0, "Not Active": 0.0}


@contextlib.contextmanager
def gpu_sampler(device: int = 0, interval_ms: int = 100) -> Iterator[list[dict[str, float]]]:
    """Samples the state of torch's GPU number ``device`` with nvidia-smi while the body runs.

    Yields a list to which samples are added meanwhile. Each has ``sm_mhz``, ``power_w``,
    ``temperature_c``, ``power_capped`` (1 where the power limit holds the clock down, else 0), and
    ``at``, the ``time.perf_counter`` time of its arrival. Values that the board does not report are
    left out; the list stays empty where there is no nvidia-smi.
    """
    samples: list[dict[str, float]] = []
    program = shutil.which("nvidia-smi")
    if program is None:
        yield samples
        return
    query = f"--query-gpu={','.join(_SAMPLED.values())}"
    # nvidia-smi numbers GPUs in its own way, whatever CUDA_VISIBLE_DEVICES says.
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = [program, query, "--format=csv,noheader,nounits", f"--id={gpu}"]
    process = subprocess.Popen(
        [*command, f"--loop-ms={interval_ms}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def read() -> None:
        for line in process.stdout or ():
            sample = {"at": time.perf_counter()}
            for name, field in zip(_SAMPLED, line.split(","), strict=False):
                text = field.strip()
                with contextlib.suppress(ValueError):  # "[N/A]" where the board has no sensor
                    sample[name] = _FLAGS[text] if text in _FLAGS else float(text)
            samples.append(sample)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield samples
    finally:
        process.terminate()
        process.wait()
        reader.join()


def summarise_samples(samples: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Returns count, min, median, mean and max of each reading; the mean of ``power_capped`` is the
    share of samples in which the power limit held the clock down."""
    found = {name: [x[name] for x in samples if name in x] for name in _SAMPLED}
    return {
        name: {
            "count": len(values),
            "min": min(values),
            "median": statistics.median(values),
            "mean": round(statistics.fmean(values), 4),
            "max": max(values),
        }
        for name, values in found.items()
        if values
    }


def _from_root(argument: str) -> str:
    """Returns an argument without folders of the machine, which results must not reveal: a path in
    the project relative to its root, any other path as its name; also in ``--json=FILE``."""
    before, equals, after = argument.partition("=")
    if equals and after.startswith("/"):
        return f"{before}={_from_root(after)}"
    path = pathlib.Path(argument)
    if not path.is_absolute():
        return argument
    root = pathlib.Path(__file__).resolve().parents[1]
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name


def _git_commit() -> str | None:
    """Returns the commit of this file, with ``-dirty`` where tracked files differ from it; None if
    git does not know the file, as in a virtual environment inside of another project."""
    here = pathlib.Path(__file__).resolve()
    git = ["git", "-C", str(here.parent)]
    if _output([*git, "ls-files", "--error-unmatch", "--", here.name]) is None:
        return None
    commit = _output([*git, "rev-parse", "--quiet", "--verify", "HEAD"])
    changed = _output([*git, "status", "--porcelain", "--untracked-files=no", "--", ":/"])
    return commit if commit is None or changed is None else f"{commit}-dirty"


def machine_info() -> dict[str, object]:
    """Returns what a figure must be read with: machine, versions, commit, date (UTC), command.

    The environment variable GIT_COMMIT gives the commit where the code runs without its repository,
    as in a container.
    """
    # Of flashcute's environment variables this one decides which kernels are timed.
    arch = os.environ.get("FLASHCUTE_ARCH")
    variables = [f"FLASHCUTE_ARCH={arch}"] if arch else []
    arguments = [pathlib.Path(sys.executable).name, *map(_from_root, sys.argv)]
    info: dict[str, object] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([*variables, *arguments]),
        "commit": os.environ.get("GIT_COMMIT") or _git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_cores": len(os.sched_getaffinity(0)),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        info |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _output(query),
        }
    return info | _fa3_version()


def _fa3_version() -> dict[str, str]:
    """Returns the version of FlashAttention-3 if one of its distributions is installed."""
    for distribution in ("flash-attn-3", "fa3-fwd"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return {"fa3": f"{distribution} {importlib.metadata.version(distribution)}"}
    return {}


def _output(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def geomean(values: Sequence[float]) -> float:
    """Returns the geometric mean of positive numbers.

    Raises:
        ValueError: no values, or one that is not positive.
    """
    if not values or min(values) <= 0:
        raise ValueError(f"geomean: expected positive values, got values={list(values)!r}")
    return math.exp(math.fsum(math.log(x) for x in values) / len(values))


@dataclasses.dataclass(frozen=True)
class Ratios:
    """A summary of speed ratios over a peer across a sweep: above 1 is faster than the peer."""

    count: int
    geomean: float
    worst: float
    worst_row: Mapping[str, object]

    @classmethod
    def of(cls, found: Iterable[tuple[Mapping, float | None]]) -> Ratios | None:
        """Summarises pairs of a row and its ratio, which may be None; returns None if all are."""
        both = [(row, ratio) for row, ratio in found if ratio is not None]
        if not both:
            return None
        row, worst = min(both, key=lambda pair: pair[1])
        return cls(len(both), geomean([ratio for _, ratio in both]), worst, row)


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a GitHub-flavoured Markdown table that also reads well in a terminal."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def write_json(path: pathlib.Path, payload: Mapping[str, object]) -> None:
    """Writes a result file, creating its folder; keys keep their order.

    An existing file is replaced once the new one is complete.

    Raises:
        OSError: naming the file and the KiB that it takes.
    """
    text = json.dumps(payload, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replaced = path.resolve()
        if path.exists() and not path.is_file():  # a pipe, /dev/stdout
            path.write_text(text, encoding="utf-8")
            return
        try:
            with tempfile.TemporaryDirectory(prefix=".", dir=replaced.parent) as folder:
                new = pathlib.Path(folder) / replaced.name
                new.write_text(text, encoding="utf-8")
                new.replace(replaced)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            path.write_text(text, encoding="utf-8")  # the folder cannot be written to
    except OSError as error:
        size = -(-len(text) // 1024)
        raise OSError(error.errno, f"{error.strerror} (it takes {size} KiB)", str(path)) from error
