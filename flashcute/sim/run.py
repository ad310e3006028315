"""Runs one problem with one kernel in a separate process, and returns its result."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from ..config import BwdConfig, FwdConfig
from ..jit import abi
from . import COPY_MODES, build

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_ERROR_NOT_SUPPORTED = 801
_SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "TSAN_OPTIONS": "halt_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
_REPORT_CHARACTERS = 4000
# Names of tensors in messages, where they differ from those of the pointers.
_SHOWN_NAMES = {"o": "out", "do": "dout"}


@dataclasses.dataclass(frozen=True)
class SimResult:
    """The result of one run.

    Attributes:
        verdict: ``"pass"``: ran to its end and no checker reported an error; the numbers are not
            checked. ``"fail"``. ``"not covered"``: the kernel uses an instruction that the
            simulator does not model.
        message: Why it did not pass; names block, warp and lane where they are known, and the
            warpgroup and barrier that an instruction of Hopper concerns.
        outputs: What the kernel wrote, by the names of its pointers in ``flash.h`` without
            ``_ptr``; empty unless the verdict is ``"pass"``.
        counters: Exact counts, repeatable for the same problem; see ``csrc/sim/src/counters.h``.
        trace: (n, 3) int64, one row (block, tensor, byte offset) for each asynchronous copy of a
            lane and each row of a TMA box, tensor 0 to 2 for q, k, v; empty unless asked for.
        seconds: Wall time of the launch alone.
    """

    verdict: str
    message: str
    outputs: Mapping[str, torch.Tensor]
    counters: Mapping[str, int]
    trace: torch.Tensor
    seconds: float

    @property
    def out(self) -> torch.Tensor | None:
        """(b, seqlen_q, h, d), dtype of q; None unless the verdict is ``"pass"``."""
        return self.outputs.get("o")

    @property
    def lse(self) -> torch.Tensor | None:
        """(b, h, seqlen_q), fp32; None unless the verdict is ``"pass"``."""
        return self.outputs.get("softmax_lse")


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def raw(self, size: int) -> bytes:
        piece = self._data[self._at : self._at + size]
        if len(piece) != size:
            raise RuntimeError("flashcute sim: the runner left a result file that is too short")
        self._at += size
        return piece

    def word(self) -> int:
        return struct.unpack("<q", self.raw(8))[0]

    def text(self) -> str:
        return self.raw(self.word()).decode()


def _bytes(tensor: torch.Tensor) -> bytes:
    # Not through numpy, which torch runs without.
    whole = tensor.contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.numel() * whole.element_size())


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a vector of all elements from the tensor's first to its last, gaps included."""
    if tensor.numel() == 0:
        return tensor.new_empty(0)
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((size,), (1,), tensor.storage_offset())


def _check(
    tensors: Mapping[str, torch.Tensor],
    config: FwdConfig | BwdConfig,
    softmax_scale: float,
    copy_mode: str,
    checker: str,
) -> None:
    """Checks q, k, v and what else has their dtype and alignment, and the options of all runs."""
    function = f"sim.run_{config.kind}"

    def require(ok: bool, condition: str, got: str) -> None:
        if not ok:
            raise ValueError(f"{function}: expected {condition}, got {got}")

    for pointer, tensor in tensors.items():
        name = _SHOWN_NAMES.get(pointer, pointer)
        if tensor.dtype != _DTYPES[config.dtype]:
            raise TypeError(
                f"{function}: expected {name} of dtype {_DTYPES[config.dtype]}, which the "
                f"configuration computes, got {name}.dtype={tensor.dtype}"
            )
        require(tensor.device.type == "cpu", f"{name} on the CPU", f"{name}.device={tensor.device}")
        require(tensor.dim() == 4, f"{name} of 4 dimensions", f"{name}.shape={tuple(tensor.shape)}")
        strides = [tensor.stride(i) for i in (0, 1, 2) if tensor.shape[i] > 1]
        aligned = tensor.stride(3) == 1 and all(stride % 8 == 0 for stride in strides)
        require(
            aligned or tensor.numel() == 0,
            f"{name} with last stride 1 and the others multiples of 8 elements",
            f"{name}.stride()={tensor.stride()}",
        )
    q, k, v = (tensors[name] for name in "qkv")
    b, seqlen_q, h, d = q.shape
    require(b * seqlen_q * h > 0, "at least one query: a grid has at least one block", f"{q.shape}")
    require(k.shape == v.shape, "k and v of one shape", f"{tuple(k.shape)} and {tuple(v.shape)}")
    require(
        k.shape[0] == b and k.shape[3] == d and h % k.shape[2] == 0,
        "k with the batch and head dimension of q, and heads that divide those of q",
        f"q.shape={tuple(q.shape)}, k.shape={tuple(k.shape)}",
    )
    require(
        0 < d <= config.head_dim and d % 8 == 0,
        f"a head dimension that is a multiple of 8 up to {config.head_dim}",
        f"{d}",
    )
    require(copy_mode in COPY_MODES, f"copy_mode in {COPY_MODES}", repr(copy_mode))
    require(checker in build.CHECKERS, f"checker in {tuple(build.CHECKERS)}", repr(checker))
    require(0 < softmax_scale < math.inf, "a finite softmax_scale > 0", f"{softmax_scale}")


def _words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def _pack(
    params: ctypes.Structure,
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    settings: tuple[int, ...],
) -> list[bytes]:
    """Returns the problem file: settings, the struct, each tensor with the place of its pointer."""
    pieces = [_words(*settings, ctypes.sizeof(params)), bytes(params)]
    pieces.append(_words(len(inputs) + len(outputs)))
    for name, tensor in (*inputs.items(), *outputs.items()):
        shown = _SHOWN_NAMES.get(name, name).encode()
        offset = getattr(type(params), f"{name}_ptr").offset
        contents = _bytes(_span(tensor))
        place = _words(offset, name in outputs, len(contents))
        pieces += [_words(len(shown)), shown, place, contents]
    return pieces


def _unpack(data: bytes, outputs: Mapping[str, torch.Tensor]) -> SimResult:
    """Parses the result file; ``outputs`` receive what the kernel wrote, if it passed."""
    reader = _Reader(data)
    code, seconds = reader.word(), reader.word() * 1e-9
    error, damage = reader.text(), reader.text()
    counters = {reader.text(): reader.word() for _ in range(reader.word())}
    entries = reader.word()
    trace = torch.frombuffer(
        bytearray(reader.raw(24 * entries)) or bytearray(24), dtype=torch.int64
    )
    trace = trace.view(-1, 3)[:entries]
    if code != 0 or damage:
        verdict = "not covered" if code == _ERROR_NOT_SUPPORTED else "fail"
        return SimResult(verdict, error or damage, {}, counters, trace, seconds)
    for tensor in outputs.values():
        span = _span(tensor)
        raw = reader.raw(span.numel() * span.element_size())
        if raw:
            span.copy_(torch.frombuffer(bytearray(raw), dtype=tensor.dtype))
    return SimResult("pass", "", outputs, counters, trace, seconds)


def _execute(command: list[str], timeout: float) -> tuple[int, str]:
    """Runs a command; returns exit status and standard error. Stops a run that takes too long."""
    options = {
        name: f"{os.environ[name]}:{value}" if os.environ.get(name) else value
        for name, value in _SANITIZER_OPTIONS.items()
    }
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            env={**os.environ, **options},
        )
    except subprocess.TimeoutExpired:
        return -1, f"the kernel did not finish within {timeout:g} s"
    return done.returncode, done.stderr


# The cache on disk is searched once per process.
@functools.lru_cache
def _runner(checker: str) -> Path:
    (runner,) = build.build_runners([checker])
    return runner


@functools.lru_cache
def _kernel(config: FwdConfig | BwdConfig, checker: str) -> tuple[Path, str]:
    (path,) = build.build_kernels([(config, checker)])
    return path, config.full_name


def _check_scores(
    config: FwdConfig | BwdConfig,
    inputs: dict[str, torch.Tensor],
    shape: tuple[int, int],
    pack_heads: bool,
    softcap: float,
    dropout_p: float,
) -> None:
    """Checks the options of the scores, and gives the slopes in ``inputs`` the ``shape`` (b, h)."""
    slopes = inputs.get("alibi_slopes")
    shown = None if slopes is None else tuple(slopes.shape)
    asked = (softcap > 0, slopes is not None, dropout_p > 0)
    if (config.softcap, config.alibi, config.dropout) != asked:
        raise ValueError(
            f"sim.run_{config.kind}: expected softcap, alibi_slopes and dropout_p where the kernel "
            f"computes them, got softcap={softcap}, alibi_slopes of shape {shown} and "
            f"dropout_p={dropout_p} for a kernel with softcap={config.softcap}, "
            f"alibi={config.alibi}, dropout={config.dropout}; pass what it was compiled for"
        )
    if config.dropout and (pack_heads or "rng_state" not in inputs):
        raise ValueError(
            f"sim.run_{config.kind}: expected rng_state and pack_heads=False with dropout, got "
            f"rng_state={inputs.get('rng_state')} and pack_heads={pack_heads}; pass "
            "flashcute.dropout.draw_state('cpu')"
        )
    if slopes is None:
        return
    if shown not in (shape, shape[1:]) or slopes.dtype != torch.float32:
        raise ValueError(
            f"sim.run_{config.kind}: expected alibi_slopes of float32 and of shape {shape[1:]} or "
            f"{shape}, got {slopes.dtype} and shape {shown}; pass one slope per query head"
        )
    inputs["alibi_slopes"] = slopes.expand(shape)


def run_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    config: FwdConfig,
    *,
    softmax_scale: float | None = None,
    pack_heads: bool = False,
    window_size: tuple[int, int] = (0, 0),
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    copy_mode: str = "late",
    checker: str = "none",
    smem_limit: int = 227 * 1024,
    sms: int = 3,
    launches: int = 1,
    trace: bool = False,
    out: torch.Tensor | None = None,
    kernel: tuple[Path, str] | None = None,
    timeout: float = 300.0,
) -> SimResult:
    """Runs one configuration's kernel on the CPU.

    Args:
        q: (b, seqlen_q, h, d), fp16 or bf16 as the configuration says, on the CPU. Any strides
            that are multiples of 8 elements; gaps between rows are copied, too.
        k: (b, seqlen_k, h_k, d), dtype and strides as for q; h_k divides h.
        v: (b, seqlen_k, h_k, d), dtype and strides as for q.
        config: The kernel; its mask decides on causality.
        softmax_scale: Factor on the scores; 1 / sqrt(d) by default.
        pack_heads: Whether the query heads of a key head share tiles.
        window_size: (left, right), both >= 0, where the configuration's mask is ``"local"``.
        sinks: (h,) float32, logits of a further column of the softmax.
        softcap: > 0 where the configuration has one, else 0.
        alibi_slopes: (h,) or (b, h) float32, where the configuration has them; any batch stride.
        rng_state: (2,) int64, where the configuration has dropout.
        dropout_p: > 0 where the configuration has dropout, else 0; heads are not packed then.
        seed: Seed of the schedule of lanes and warps; same seed, same run.
        copy_mode: When asynchronous copies and wgmmas complete, one of
            :data:`COPY_MODES`: ``"late"``, as late as their wait allows; ``"random"``, in random
            order before it; ``"eager"``, at once.
        checker: One of :data:`~flashcute.sim.CHECKERS`.
        smem_limit: Dynamic shared memory in bytes that the device grants a CTA.
        sms: Multiprocessors of the device, each of which runs one block at a time. The sm90 class
            launches at most this many persistent blocks.
        launches: Number of launches, one after the other; the last one's results are returned.
        trace: Record each asynchronous copy's source.
        out: Where the output goes, (b, seqlen_q, h, d); a new NaN-filled tensor by default.
        kernel: Shared object built for ``checker``, and the function in it that describes the
            kernel; those of the project's own kernel by default.
        timeout: Seconds after which the run counts as hung.

    Raises:
        ValueError: for shapes, strides or options that no kernel accepts.
        TypeError: for a dtype other than the configuration's.
        BuildError: where the kernel does not compile.
    """
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    _check({"q": q, "k": k, "v": v}, config, scale, copy_mode, checker)
    optional = {"sinks": sinks, "alibi_slopes": alibi_slopes, "rng_state": rng_state}
    inputs = {"q": q, "k": k, "v": v}
    inputs |= {name: x for name, x in optional.items() if x is not None}
    _check_scores(config, inputs, (q.shape[0], q.shape[2]), pack_heads, softcap, dropout_p)
    path, function = kernel or _kernel(config, checker)
    settings = (seed, COPY_MODES.index(copy_mode), smem_limit, sms, launches)
    settings += (int(trace), 1 << 32, 0, config.min_ctas)
    command = [str(_runner(checker)), str(path), function]
    asked = pack_heads, window_size, softcap, dropout_p
    return run_fwd_program(command, inputs, scale, settings, timeout, out, *asked)


def run_fwd_program(
    program: list[str],
    inputs: Mapping[str, torch.Tensor],
    scale: float,
    settings: tuple[int, ...],
    timeout: float,
    out: torch.Tensor | None = None,
    pack_heads: bool = False,
    window_size: tuple[int, int] = (0, 0),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
) -> SimResult:
    """Calls :func:`run_program` with ``Flash_fwd_params``, filled from q, k, v of any dtype."""
    q = inputs["q"]
    b, seqlen_q, h, _ = q.shape
    outputs = {
        "o": q.new_full(q.shape, math.nan) if out is None else out,
        "softmax_lse": q.new_full((b, h, seqlen_q), math.nan, dtype=torch.float32),
    }
    asked = pack_heads, window_size, softcap, dropout_p
    params = abi.fwd_params({**inputs, **outputs}, scale, *asked)
    return run_program(program, params, inputs, outputs, settings, timeout)


def run_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    config: FwdConfig,
    *,
    max_seqlen_q: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    pack_heads: bool = False,
    window_size: tuple[int, int] = (0, 0),
    seed: int = 0,
    copy_mode: str = "late",
    checker: str = "none",
    sms: int = 3,
    launches: int = 1,
    kernel: tuple[Path, str] | None = None,
    timeout: float = 300.0,
) -> SimResult:
    """Runs :func:`run_fwd` on a ragged batch: its plan, then the kernel.

    Args:
        q: (total_q, h, d), on the CPU, as in :func:`run_fwd` but for the batch.
        k, v: (total_k, h_k, d).
        cu_seqlens_q: (b + 1,) int32: where sequences begin, and the last one's end; any values.
        cu_seqlens_k: (b + 1,) int32, where the keys of sequences begin, and the last one's end.
        config: The kernel.
        max_seqlen_q: Rows of a sequence from this index on count as rows of no sequence.
        seqused_q: (b,) int32: how many rows of each sequence count; all by default.
        seqused_k: (b,) int32: how many keys of each sequence count; all by default.

    The other arguments are those of :func:`run_fwd`. The log-sum-exp is (h, total_q).
    """
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    _check({"q": q[None], "k": k[None], "v": v[None]}, config, scale, copy_mode, checker)
    total_q, h, _ = q.shape
    b = cu_seqlens_q.shape[0] - 1
    shift = (h // k.shape[1] - 1).bit_length() if pack_heads else 0
    capacity = abi.plan_capacity(total_q << shift, b, config.tile_m)
    optional = {"seqused_q": seqused_q, "seqused_k": seqused_k}
    optional |= {"sinks": sinks, "alibi_slopes": alibi_slopes, "rng_state": rng_state}
    inputs = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    inputs |= {name: x for name, x in optional.items() if x is not None}
    _check_scores(config, inputs, (b, h), pack_heads, softcap, dropout_p)
    outputs = {
        "o": q.new_full(q.shape, math.nan),
        "softmax_lse": q.new_full((h, total_q), math.nan, dtype=torch.float32),
        "plan": torch.full((abi.plan_words(capacity, b),), -1, dtype=torch.int32),
    }
    asked = pack_heads, window_size, softcap, dropout_p
    params = abi.varlen_params({**inputs, **outputs}, scale, max_seqlen_q, capacity, *asked)
    path, function = kernel or _kernel(config, checker)
    settings = (seed, COPY_MODES.index(copy_mode), 227 * 1024, sms, launches, 0, 1 << 32, 1)
    settings += (config.min_ctas,)
    program = [str(_runner(checker)), str(path), function]
    return run_program(program, params, inputs, outputs, settings, timeout)


def run_program(
    program: list[str],
    params: ctypes.Structure,
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    settings: tuple[int, ...],
    timeout: float,
) -> SimResult:
    """Runs any kernel on any parameter struct; nothing is checked.

    Args:
        program: The runner, a shared object, the name of the kernel's function in it.
        params: What the kernel is launched with, but for the pointers to ``inputs`` and
            ``outputs``.
        inputs: Tensors on the CPU that the kernel reads, by the names of their pointers in
            ``params`` without ``_ptr``. What lies in gaps between rows is passed along. In the
            runner each begins at a multiple of 256 bytes, as memory from cudaMalloc does.
        outputs: Tensors on the CPU that the kernel writes, named like ``inputs``. Each launch finds
            the contents they have now; they receive the results of the last one if the verdict is
            ``"pass"``.
        settings: Seed, copy mode, shared memory limit, SMs, launches, trace, greatest number of
            steps, whether a plan is made before each launch, CTAs that share an SM's registers.
        timeout: Seconds after which the run counts as hung.
    """
    with tempfile.TemporaryDirectory(prefix="flashcute-sim-") as folder:
        problem, result = Path(folder) / "problem", Path(folder) / "result"
        pieces = _pack(params, inputs, outputs, settings)
        try:
            with open(problem, "wb") as file:
                file.writelines(pieces)
        except OSError as error:
            raise OSError(
                f"flashcute sim: expected space for {sum(map(len, pieces))} bytes of inputs in "
                f"{folder}, got: {error.strerror}; free some, or set TMPDIR to another folder"
            ) from error
        command = [*program, str(problem), str(result)]
        status, report = _execute(command, timeout)
        if "unexpected memory mapping" in report and (setarch := shutil.which("setarch")):
            # ThreadSanitizer of gcc 12 fails with more than 28 bits of address randomisation.
            status, report = _execute([setarch, "-R", *command], timeout)
        if status != 0:
            nothing = torch.empty(0, 3, dtype=torch.int64)
            # The simulator's lines follow the sanitizer's report; the message starts with them.
            ours = [line for line in report.splitlines() if line.startswith("block (")]
            message = "\n".join([*ours, report])[:_REPORT_CHARACTERS]
            message = message or f"the runner ended with status {status}"
            return SimResult("fail", message, {}, {}, nothing, 0.0)
        return _unpack(result.read_bytes(), outputs)
