"""Runs the kernels of one backward in a separate process, one after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ..config import ROW_STATS_MULTIPLE, BwdConfig
from ..jit import abi
from . import COPY_MODES
from .run import SimResult, _check, _check_scores, _kernel, _runner, run_program


def run_bwd(
    config: BwdConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    *,
    dlse: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (0, 0),
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    head_parts: int = 1,
    seed: int = 0,
    copy_mode: str = "late",
    checker: str = "none",
    smem_limit: int = 227 * 1024,
    sms: int = 3,
    launches: int = 1,
    gradients: Mapping[str, torch.Tensor] | None = None,
    wanted: Sequence[str] = ("dq", "dk", "dv"),
    kernel: tuple[Path, str] | None = None,
    timeout: float = 300.0,
) -> SimResult:
    """Runs one configuration's backward kernels on the CPU, one after the other.

    Args:
        config: The kernels; their mask decides on causality.
        q, k, v: As in :func:`run_fwd`.
        out: (b, seqlen_q, h, d), what the forward returned; dtype and strides like q.
        lse: (b, h, seqlen_q), float32, what the forward returned.
        dout: (b, seqlen_q, h, d), gradient of out; dtype and strides like q.
        dlse: (b, h, seqlen_q), float32, gradient of lse; zeros by default.
        softmax_scale, window_size, sinks, softcap, alibi_slopes, rng_state, dropout_p: As in the
            forward.
        deterministic: Bitwise repeatable gradients.
        head_parts: Number of parts into which the query heads of a key head are divided.
        seed, copy_mode, checker, smem_limit, sms, launches, kernel, timeout: As in
            :func:`run_fwd`.
        gradients: Where the gradients go, by ``"dq"``, ``"dk"`` and ``"dv"``, with the shapes of q,
            k and v; new NaN-filled tensors by default.
        wanted: The gradients that are computed; dk and dv both or neither.

    Returns:
        A result whose outputs are the wanted gradients, with sinks also ``dsinks`` (h,) in float32,
        and the workspaces: ``row_stats``; with ``fused`` also ``dq_accum`` and ``dq_semaphore``,
        flat; in the sm90 class without a mask also ``dkv_partial``, NaN where none leaves sums to
        others; with several ``head_parts`` that is (2, b, seqlen_k, h_k * head_parts, d), sums of
        dk and dv. Its counters are those of all kernels together.

    Raises:
        ValueError, TypeError, BuildError: as :func:`run_fwd`.
    """
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    inputs = {"q": q, "k": k, "v": v, "o": out, "do": dout}
    outputs = _gradients(q, k, v, gradients)
    _check({**inputs, **outputs}, config, scale, copy_mode, checker)
    _check_shapes("run_bwd", q, out, dout, outputs["dq"])
    b, seqlen_q, h, _ = q.shape
    inputs |= _optional(lse, dlse, sinks, alibi_slopes, rng_state)
    _check_scores(config, inputs, (b, h), False, softcap, dropout_p)
    rounded = -(-seqlen_q // ROW_STATS_MULTIPLE) * ROW_STATS_MULTIPLE
    outputs = {name: x for name, x in outputs.items() if name in wanted}
    outputs["row_stats"] = q.new_full((b, h, rounded, 2), math.nan, dtype=torch.float32)
    if config.dq_accum:
        shape = (b, h, rounded, config.dq_accum)
        outputs["dq_accum"] = q.new_full(shape, math.nan, dtype=torch.float32)
        words = abi.semaphores(b * h, rounded)
        outputs["dq_semaphore"] = torch.full((words,), -1, dtype=torch.int32)
        if config.arch == 90 and config.mask == "none":
            shape = (sms, 2, config.dkv.rows, config.head_dim)
            outputs["dkv_partial"] = q.new_full(shape, math.nan, dtype=torch.float32)
    if head_parts > 1:
        outputs["dkv_partial"] = _sums_of_parts(k, head_parts)
    if sinks is not None:
        outputs["dsinks"] = q.new_full((h,), math.nan, dtype=torch.float32)
    path, function = kernel or _kernel(config, checker)
    settings = (seed, COPY_MODES.index(copy_mode), smem_limit, sms, launches, 0, 1 << 32, 0, 1)
    params = abi.bwd_params({**inputs, **outputs}, scale, window_size, softcap, dropout_p)
    params.deterministic, params.head_parts = deterministic, head_parts
    command = [str(_runner(checker)), str(path), function]
    return run_program(command, params, inputs, outputs, settings, timeout)


def run_varlen_bwd(
    config: BwdConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (0, 0),
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    head_parts: int = 1,
    seed: int = 0,
    copy_mode: str = "late",
    checker: str = "none",
    sms: int = 3,
    launches: int = 1,
    wanted: Sequence[str] = ("dq", "dk", "dv"),
    kernel: tuple[Path, str] | None = None,
    timeout: float = 300.0,
) -> SimResult:
    """Runs :func:`run_bwd` on a ragged batch, with the plan of each kernel before it.

    Args:
        config: The kernels, of ragged batches.
        q, out, dout: (total_q, h, d), as in :func:`run_bwd` but for the batch.
        k, v: (total_k, h_k, d).
        lse, dlse: (h, total_q), float32.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_q, seqused_k: As in :func:`run_varlen`.

    The other arguments, the result and the errors are those of :func:`run_bwd`.
    """
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    inputs = {"q": q, "k": k, "v": v, "o": out, "do": dout}
    outputs = _gradients(q, k, v, None)
    dense = {name: x[None] for name, x in {**inputs, **outputs}.items()}
    _check(dense, config, scale, copy_mode, checker)
    _check_shapes("run_varlen_bwd", q, out, dout, outputs["dq"])
    if not config.varlen:
        raise ValueError(
            "sim.run_varlen_bwd: expected kernels of ragged batches, got a configuration with "
            "varlen=False; pass flashcute.heuristics.bwd_with_options(config, varlen=True)"
        )
    total_q, h, _ = q.shape
    b = cu_seqlens_q.shape[0] - 1
    inputs |= _optional(lse, dlse, sinks, alibi_slopes, rng_state)
    inputs |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    used = {"seqused_q": seqused_q, "seqused_k": seqused_k}
    inputs |= {name: x for name, x in used.items() if x is not None}
    _check_scores(config, inputs, (b, h), False, softcap, dropout_p)
    outputs = {name: x for name, x in outputs.items() if name in wanted}
    rows = abi.row_stats_rows(total_q, b)
    outputs["row_stats"] = q.new_full((h, rows, 2), math.nan, dtype=torch.float32)
    if config.dq_accum:
        shape = (h, rows, config.dq_accum)
        outputs["dq_accum"] = q.new_full(shape, math.nan, dtype=torch.float32)
        words = abi.semaphores(h, rows)
        outputs["dq_semaphore"] = torch.full((words,), -1, dtype=torch.int32)
    if head_parts > 1:
        outputs["dkv_partial"] = _sums_of_parts(k, head_parts)
    words = abi.bwd_plan_words(total_q, k.shape[0], b)
    outputs["plan"] = torch.full((words,), -1, dtype=torch.int32)
    if sinks is not None:
        outputs["dsinks"] = q.new_full((h,), math.nan, dtype=torch.float32)
    path, function = kernel or _kernel(config, checker)
    settings = (seed, COPY_MODES.index(copy_mode), 227 * 1024, sms, launches, 0, 1 << 32, 0, 1)
    options = window_size, softcap, dropout_p
    params = abi.varlen_bwd_params({**inputs, **outputs}, scale, max_seqlen_q, *options)
    params.deterministic, params.head_parts = deterministic, head_parts
    command = [str(_runner(checker)), str(path), function]
    return run_program(command, params, inputs, outputs, settings, timeout)


def _gradients(q, k, v, given: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    new = {f"d{n}": x.new_full(x.shape, math.nan) for n, x in (("q", q), ("k", k), ("v", v))}
    return new | dict(given or {})


def _sums_of_parts(k: torch.Tensor, head_parts: int) -> torch.Tensor:
    *rows, h_k, d = k.shape
    return k.new_full((2, *rows, h_k * head_parts, d), math.nan, dtype=torch.float32)


def _optional(lse, dlse, sinks, alibi_slopes, rng_state) -> dict[str, torch.Tensor]:
    names = "softmax_lse", "dlse", "sinks", "alibi_slopes", "rng_state"
    given = zip(names, (lse, dlse, sinks, alibi_slopes, rng_state), strict=True)
    return {name: x for name, x in given if x is not None}


def _check_shapes(function: str, q, out, dout, dq) -> None:
    for name, x in (("out", out), ("dout", dout), ("dq", dq)):
        if x.shape != q.shape:
            raise ValueError(
                f"sim.{function}: expected {name} of the shape of q, {tuple(q.shape)}, got "
                f"{name}.shape={tuple(x.shape)}"
            )
