"""Implements ``python -m flashcute bench --pass ring``: sequence parallelism on all GPUs here.

Starts one process for each GPU, or two on the CPU, and times in turns, forward alone and with the
backward: both schemes of :mod:`flashcute.distributed`, the whole sequence on one GPU, and PyTorch's
``context_parallel`` on its FlashAttention backend. A time is that of the slowest rank, the median
over repeats. Each scheme is also timed without its transfers, on whatever is in the buffers: what
the transfers add is the communication that is not hidden.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import itertools
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from .. import benchmarking as bm
from .. import distributed as fd
from .. import flash_attn_func
from ..distributed.allgather import head_groups
from ..distributed.communication import Communicator
from ..distributed.zigzag import Layout
from ..heuristics import FwdProblem, choose_bwd, choose_fwd
from ..integrations import sdpa
from .sweep import AGREEMENT, DTYPES

# PyTorch's two ways to pass keys on, of which the second one is its default: first on PyTorch's
# kernels, then on flashcute's.
_TORCH = {"torch_ring": "alltoall", "torch_gather": "allgather"}
_TORCH_ON_OURS = {"torch_ring_ours": "alltoall", "torch_gather_ours": "allgather"}
NAMES = {
    "cuda": ("ring", "allgather", "one", *_TORCH, *_TORCH_ON_OURS),
    "cpu": ("ring", "allgather", "one"),
}
SEQLENS = (16384, 131072)
PASSES = ("fwd", "fwd+bwd")
_OURS = {"ring": fd.ring_flash_attn_func, "allgather": fd.allgather_flash_attn_func}

_CPU_SEQLENS = (256,)
_CPU_REPEATS = (3, 1)
_GPU_REPEATS = (7, 2)
_GPU_WIDTH, _CPU_WIDTH = 4096, 256  # heads x head_dim
_TIMEOUT = datetime.timedelta(seconds=300)


class Point(NamedTuple):
    """One problem to measure.

    Attributes:
        what: One of :data:`PASSES`.
        dtype: One of :data:`flashcute.config.DTYPES`.
        shape: Shape of the whole sequence.
    """

    what: str
    dtype: str
    shape: bm.Shape


class Setup(NamedTuple):
    """How points are measured.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        nproc: Number of processes.
        names: Contenders.
        repeats: Timed calls.
        warmup: Calls before those.
        time_limit: Seconds, after which no further point begins.
    """

    device: str
    nproc: int
    names: tuple[str, ...]
    repeats: int
    warmup: int
    time_limit: float


def points(args: argparse.Namespace, device: str) -> list[Point]:
    """Returns the points that the arguments ask for."""
    width = _GPU_WIDTH if device == "cuda" else _CPU_WIDTH
    seqlens = args.seqlens or (SEQLENS if device == "cuda" else _CPU_SEQLENS)
    found = []
    for dtype, d, mask, group, seqlen, what in itertools.product(
        args.dtypes, args.head_dims or [128], args.masks or ["causal"], args.groups or [4],
        seqlens, PASSES,
    ):  # fmt: skip
        h_k = max(width // d // group, 1)
        shape = bm.Shape(1, seqlen, seqlen, h_k * group, h_k, d, mask == "causal")
        found.append(Point(what, dtype, shape))
    return found


def setup(args: argparse.Namespace) -> Setup:
    """Returns the settings that the arguments give on this machine.

    Raises:
        ValueError: for arguments that do not go together, or too few GPUs.
    """
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    nproc = args.nproc or (gpus if device == "cuda" else 2)
    if nproc < 2 or (device == "cuda" and nproc > gpus):
        raise ValueError(
            f"flashcute bench: expected two processes or more for --pass ring, and a GPU for each, "
            f"got --nproc {nproc} with {gpus} GPUs; --device cpu measures processes without GPUs"
        )
    usual = {
        **{"peers": None, "sustained": 0.0, "tokens": None},
        **{"shapes": ["sweep"], "inputs": ["normal"]},
    }
    given = [f"--{name.replace('_', '-')}" for name in usual if getattr(args, name) != usual[name]]
    if given:
        raise ValueError(
            f"flashcute bench: expected --pass ring without {', '.join(given)}, which it does not "
            "have; leave it out"
        )
    for seqlen in args.seqlens or ():
        if seqlen % (2 * nproc):
            raise ValueError(
                f"flashcute bench: expected --seqlens of multiples of 2 x {nproc} processes, got "
                f"{seqlen}; round it up"
            )
    repeats, warmup = _GPU_REPEATS if device == "cuda" else _CPU_REPEATS
    return Setup(
        device,
        nproc,
        NAMES[device],
        args.repeats or repeats,
        args.warmup or warmup,
        args.time_limit,
    )


@contextlib.contextmanager
def without_transfers() -> Iterator[None]:
    """Makes :mod:`flashcute.distributed` skip transfers and compute with what its buffers hold."""
    exchange = Communicator.exchange
    Communicator.exchange = lambda self, messages: []
    try:
        yield
    finally:
        Communicator.exchange = exchange


def _step(function: Callable, q, k, v, dout, backward: bool) -> Callable[[], torch.Tensor]:
    """Makes a call that returns out and, if ``backward``, also computes the gradients."""
    if not backward:

        def forward():
            with torch.no_grad():
                return function(q, k, v)

        return forward
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))

    def both():
        out = function(q, k, v)
        torch.autograd.grad(out, (q, k, v), dout)
        return out.detach()

    return both


def _torch_function(shape: bm.Shape) -> Callable:
    """Returns PyTorch's attention for calls in ``context_parallel``, with (b, s, h, d) tensors."""

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        backend = torch.nn.attention.SDPBackend.FLASH_ATTENTION
        with torch.nn.attention.sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=shape.causal, enable_gqa=shape.h != shape.h_k
            )
        return out.transpose(1, 2)

    return attend


@contextlib.contextmanager
def context_parallel(name: str, mesh: dist.DeviceMesh, shape: bm.Shape) -> Iterator[None]:
    """Enters PyTorch's ``context_parallel`` in the form of the contender ``name``.

    With a causal mask its order of tokens is the zigzag order. It needs a buffer to split.
    """
    from torch.distributed.tensor.experimental import _attention as experimental

    experimental.set_rotate_method((_TORCH | _TORCH_ON_OURS)[name])
    experimental._cp_options.enable_load_balance = shape.causal
    buffers = [torch.zeros(1, 1, shape.seqlen_q, 1, device=mesh.device_type)]
    with contextlib.ExitStack() as stack:
        if name in _TORCH_ON_OURS:
            stack.enter_context(warnings.catch_warnings())
            # If a call falls back to PyTorch's own kernel, that is an error: it is another
            # contender.
            warnings.filterwarnings("error", "flashcute.enable")
            stack.enter_context(sdpa.enabled())
        stack.enter_context(
            experimental.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2])
        )
        yield


def _time(call: Callable[[], object], here: bool, device: torch.device) -> float:
    """Returns the seconds of the slowest rank; a rank that is not ``here`` only waits."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    if here:
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    taken = torch.tensor(time.perf_counter() - start, device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


class _Contender(NamedTuple):
    call: Callable[[], torch.Tensor]
    here: bool  # whether this rank runs it
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


def _contenders(point: Point, names, rank: int, world: int, device) -> dict[str, _Contender]:
    shape, backward = point.shape, point.what != "fwd"
    dtype = DTYPES[point.dtype]
    q, k, v = bm.make_qkv(shape, dtype, device)
    dout = torch.randn_like(q)
    parts = [fd.zigzag_split(x, rank, world) for x in (q, k, v, dout)]
    mesh = dist.device_mesh.init_device_mesh(device.type, (world,))
    found = {}
    for name in names:
        if name in _OURS:

            def function(*x, f=_OURS[name]):
                return f(*x, causal=shape.causal)

            call = _step(function, *parts, backward)
            found[name] = _Contender(call, True)
            found[f"{name} alone"] = _Contender(call, True, without_transfers)
        elif name == "one":

            def whole(*x):
                return flash_attn_func(*x, causal=shape.causal)

            found[name] = _Contender(_step(whole, q, k, v, dout, backward), rank == 0)
        else:
            call = _step(_torch_function(shape), *parts, backward)
            context = functools.partial(context_parallel, name, mesh, shape)
            found[name] = _Contender(call, True, context)
    return found


def measure(point: Point, options: Setup, rank: int, device: torch.device) -> dict:
    """Measures one row of the result; all ranks make the same call."""
    world = options.nproc
    contenders = _contenders(point, options.names, rank, world, device)
    outs, missing = {}, {}
    for name, x in list(contenders.items()):
        error = ""
        try:
            with x.context():
                for _ in range(options.warmup):
                    outs[name] = x.call() if x.here else None
        except (RuntimeError, TypeError, ValueError, AssertionError, UserWarning) as caught:
            if not name.startswith("torch"):
                raise
            error = f"{type(caught).__name__}: {str(caught).splitlines()[0]}"
        failed = torch.tensor(bool(error), dtype=torch.int32, device=device)
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        if failed:
            missing[name] = error or "failed on another rank"
            del contenders[name]
    difference = {}
    if rank == 0 and outs.get("one") is not None:
        expected = fd.zigzag_split(outs["one"], 0, world).float()
        for name in options.names:
            if name in contenders and name != "one":
                difference[name] = float((outs[name].float() - expected).abs().max())
    outs.clear()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(options.repeats):
        for name in bm.turn(contenders, number):
            x = contenders[name]
            with x.context():
                times[name].append(_time(x.call, x.here, device))
    seconds = {name: statistics.median(values) for name, values in times.items()}
    tokens = point.shape.b * point.shape.seqlen_q
    return {
        "pass": point.what,
        "dtype": point.dtype,
        **{name: getattr(point.shape, name) for name in ("b", "seqlen_q", "h", "h_k", "d")},
        "causal": point.shape.causal,
        "us": {name: 1e6 * x for name, x in seconds.items()},
        "tokens_per_second": {
            name: tokens / x for name, x in seconds.items() if not name.endswith(" alone")
        },
        "not_hidden": {
            name: max(0.0, 1 - seconds[f"{name} alone"] / seconds[name])
            for name in _OURS
            if name in seconds
        },
        "difference": difference,
        "missing": missing,
    }


def _worker(rank: int, options: Setup, wanted: Sequence[Point], store: str, pipe) -> None:
    device = torch.device(options.device, rank if options.device == "cuda" else 0)
    if options.device == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(torch.get_num_threads() // options.nproc, 1))
        device = torch.device("cpu")
    # Without a high priority, flashcute's kernels fill all SMs before a transfer that becomes
    # possible at the same time.
    nccl = dist.ProcessGroupNCCL.Options if options.device == "cuda" else None
    dist.init_process_group(
        "nccl" if nccl else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=options.nproc,
        timeout=_TIMEOUT,
        pg_options=nccl(is_high_priority_stream=True) if nccl else None,
    )
    start = time.monotonic()
    for point in wanted:
        late = torch.tensor(
            time.monotonic() - start > options.time_limit, dtype=torch.int32, device=device
        )
        dist.all_reduce(late, dist.ReduceOp.MAX)
        if late:
            break
        row = measure(point, options, rank, device)
        if rank == 0:
            pipe.send(row)
    if rank == 0:
        pipe.send(None)
        pipe.close()
    dist.destroy_process_group()


def problems(layout: Layout, like: FwdProblem) -> list[FwdProblem]:
    """Returns the calls of both schemes on all ranks, as the choice of their kernels sees them.

    Args:
        layout: How sequences are split.
        like: Gives their dtype, batch, heads and head dimension.
    """
    found: dict[FwdProblem, None] = {}
    size = 4 * like.b * sum(layout.lengths) * layout.world * like.h_k * like.d
    ((heads, key_heads), *_) = head_groups(like.h, like.h_k, size)
    for rank in range(layout.world):
        ring = [*layout.own(rank)]
        for other in range(layout.world):
            if other != rank:
                ring += layout.foreign(rank, other)
        calls = [(x, like.h, like.h_k) for x in ring]
        calls += [(x, heads.stop, key_heads.stop) for x in layout.gathered(rank)]
        for x, h, h_k in calls:
            n_q, n_k = x.rows.stop - x.rows.start, x.keys.stop - x.keys.start
            left, right = x.window
            window = left if left >= 0 else n_k, right if right >= 0 else n_q
            problem = dataclasses.replace(
                like,
                causal=x.causal,
                seqlen_q=n_q,
                seqlen_k=n_k,
                h=h,
                h_k=h_k,
                window=None if x.causal or x.full else window,
            )
            found[problem] = None
    return list(found)


def _build(wanted: Sequence[Point], options: Setup) -> None:
    """Builds the kernels for the whole sequence and for its pieces, in parallel."""
    from .command import build, configs_for

    found = []
    for point in wanted:
        x = point.shape
        whole = FwdProblem(point.dtype, x.causal, x.b, x.seqlen_q, x.seqlen_k, x.h, x.h_k, x.d)
        local, order = (x.seqlen_q // options.nproc,), "zigzag" if x.causal else "contiguous"
        layout = Layout(local, order, options.nproc, (-1, 0 if x.causal else -1))
        found += [whole, *problems(layout, whole)]
    build(configs_for(found, (choose_fwd, choose_bwd)))


def run(args: argparse.Namespace, show: Callable[[Mapping], None]) -> dict:
    """Measures what the arguments ask for.

    Args:
        args: Arguments of the command.
        show: Called with each row.

    Raises:
        RuntimeError: if a process ended before its work was done; it has printed its own message.
    """
    options = setup(args)
    wanted = points(args, options.device)
    if options.device == "cuda":
        _build(wanted, options)
    # Workers are forked from a process that has imported everything and has not used a GPU.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    rows: list[dict] = []
    finished = False
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.Pipe(duplex=False)
        processes = [
            context.Process(
                target=_worker,
                args=(rank, options, wanted, str(Path(folder) / "store"), theirs),
                daemon=True,
            )
            for rank in range(options.nproc)
        ]
        for process in processes:
            process.start()
        theirs.close()
        with contextlib.suppress(EOFError):
            while True:
                if not ours.poll(1.0):
                    if any(process.exitcode for process in processes):
                        break
                    continue
                row = ours.recv()
                if row is None:
                    finished = True
                    break
                rows.append(row)
                show(row)
        for process in processes:
            process.join(30 if finished else 1)
            if process.exitcode is None:
                process.kill()
                process.join()
        codes = [process.exitcode for process in processes]
    if not finished:
        raise RuntimeError(
            f"flashcute bench: expected {options.nproc} processes to measure, got exit codes "
            f"{codes}; the messages above say why"
        )
    return {
        "pass": "ring",
        "device": options.device,
        "nproc": options.nproc,
        "contenders": list(options.names),
        "machine": bm.machine_info(),
        "rows": rows,
        "stopped_early": len(rows) < len(wanted),
    }


def disagreements(result: Mapping) -> list[str]:
    """Lists the points where an output differs from that of one process."""
    return [
        f"{name} differs from one process by {value} at s={row['seqlen_q']} {row['dtype']}"
        for row in result["rows"]
        for name, value in row["difference"].items()
        if not value <= AGREEMENT[row["dtype"]]  # NaN too
    ]


def summary(result: Mapping) -> str:
    """Formats tokens a second, ratios of ours to the others, and transfers that are not hidden."""
    names = result["contenders"]
    rows = []
    for row in result["rows"]:
        speeds = row["tokens_per_second"]
        cells = [row["pass"], row["dtype"], row["d"], "causal" if row["causal"] else "full"]
        cells += [row["seqlen_q"], f"{row['h']}/{row['h_k']}"]
        cells += [f"{speeds[name] / 1e3:.1f}" if name in speeds else "-" for name in names]
        best = max(speeds[name] for name in _OURS)
        for others in (("one",), _TORCH):
            found = [speeds[name] for name in others if name in speeds]
            cells.append(f"{best / max(found):.3f}" if found else "-")
        cells += [f"{100 * row['not_hidden'][name]:.1f}" for name in _OURS]
        rows.append(cells)
    header = ["pass", "dtype", "d", "mask", "s", "h/h_k", *names, "x one", "x torch"]
    header += [f"{name} not hidden, %" for name in _OURS]
    title = f"Thousands of tokens a second, {result['nproc']} processes on {result['device']}"
    text = [title, bm.format_table(header, rows)]
    text += [
        f"{name} did not run: {why}"
        for name, why in {k: v for row in result["rows"] for k, v in row["missing"].items()}.items()
    ]
    if result["stopped_early"]:
        text.append("STOPPED EARLY: the time limit was reached, points are missing")
    return "\n\n".join(text)
