"""The operators of the gradients: checks, CPU implementations and fakes.

They are defined, and implemented for CUDA, in ``csrc/flash_attn/flash_api.cpp``, and registered in
:mod:`flashcute.ops`. ``bwd_varlen`` is ``bwd`` of a ragged batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from . import checks, cpu, cpu_ops, cpu_varlen
from .checks_varlen import Names, check_bounds, check_lengths, check_packed_tokens
from .config import NAMESPACE
from .ops_checks import check_for_device, check_options, rounded


class Options(NamedTuple):
    """The arguments of both operators after the tensors and lengths; torch leaves out trailing
    defaults."""

    softmax_scale: float
    causal: bool
    window_left: int
    window_right: int
    sinks: torch.Tensor | None
    wanted: int
    rng_state: torch.Tensor | None = None
    dropout_p: float = 0.0
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None


def _bits(wanted: int) -> int:
    """Returns ``wanted`` for the CPU's operators, in which the sinks are the fifth tensor."""
    return wanted & 7 | (wanted & 8) << 1


def _on_cpu(dout, q, k, v, out, softmax_lse, dlse, *args):
    o = Options(*args)
    tensors = cpu.Tensors(q, k, v, o.alibi_slopes, o.sinks, None, o.rng_state)
    window = o.window_left, o.window_right
    options = cpu.Options(o.softmax_scale, o.causal, *window, o.softcap, o.dropout_p)
    found = cpu_ops.backward(dout, dlse, None, _bits(o.wanted), tensors, options)
    return *found[:3], found[4]


def _varlen_on_cpu(dout, q, k, v, out, softmax_lse, dlse, *args):
    lengths, bounds, o = args[:4], args[4:6], Options(*args[6:])
    tensors = cpu_varlen.Tensors(q, k, v, o.alibi_slopes, o.sinks, *lengths, o.rng_state)
    window = o.window_left, o.window_right
    options = cpu_varlen.Options(
        *bounds, o.softmax_scale, o.causal, *window, o.softcap, o.dropout_p
    )
    cpu_varlen.check_lengths(Names(f"{NAMESPACE}::bwd_varlen"), tensors, options)
    found = cpu_varlen.backward(dout, dlse, None, _bits(o.wanted), tensors, options)
    return *found[:3], found[4]


def _fake_gradients(q, k, v, o: Options):
    return tuple(
        torch.empty_like(x) if o.wanted >> bit & 1 else q.new_empty(0)
        for bit, x in enumerate((q, k, v, o.sinks))
    )


def _fake(dout, q, k, v, out, softmax_lse, dlse, *args):
    return _fake_gradients(q, k, v, Options(*args))


def _varlen_fake(dout, q, k, v, out, softmax_lse, dlse, *args):
    return _fake_gradients(q, k, v, Options(*args[6:]))


def _check(fn: str, tensors: tuple, lse_shape: tuple[int, ...], b: int, o: Options) -> None:
    """Checks what both operators have in common, for b entries or sequences.

    ``tensors`` are dout, q, out, softmax_lse and dlse.
    """
    dout, q, out, softmax_lse, dlse = tensors
    check_options(fn, q, b, o)
    checks.check_gradient(fn, "dout", dout, q.shape, q.dtype, q.device)
    checks.check_gradient(fn, "out", out, q.shape, q.dtype, q.device)
    for key, x in (("softmax_lse", softmax_lse), ("dlse", dlse)):
        if x is not None:
            checks.check_gradient(fn, key, x, lse_shape, torch.float32, q.device)
    if not 0 <= o.wanted < 32 or (o.sinks is None and o.wanted & 8):
        raise ValueError(
            f"{fn}: expected wanted in 0 ... 31, bit 3 only with sinks, got wanted={o.wanted}; "
            "its bits ask for dq, dk, dv and dsinks, the last one for bitwise repeatable ones"
        )


def _checked(name: str, implementation: Callable) -> Callable:
    """Returns ``implementation`` of ``bwd`` behind the binding's checks for CUDA tensors."""
    fn = f"{NAMESPACE}::{name}"

    def checked(dout, q, k, v, out, softmax_lse, dlse, *args):
        o = rounded(fn, Options(*args))
        d = checks.check_tensors(fn, ("q", "k", "v"), q, k, v)
        scale = checks.check_scale(fn, o.softmax_scale, d)
        b, seqlen_q, h, _ = q.shape
        _check(fn, (dout, q, out, softmax_lse, dlse), (b, h, seqlen_q), b, o)
        check_for_device(fn, q, d, scale, "flash_attn_func")
        return implementation(dout, q, k, v, out, softmax_lse, dlse, *o)

    return checked


def _checked_varlen(name: str, implementation: Callable) -> Callable:
    """Does what :func:`_checked` does, for ``bwd_varlen``."""
    fn = f"{NAMESPACE}::{name}"
    names = Names(fn)

    def checked(dout, q, k, v, out, softmax_lse, dlse, *args):
        lengths, bounds = args[:4], args[4:6]
        o = rounded(fn, Options(*args[6:]))
        d = check_packed_tokens(names, q, k, v)
        b = check_lengths(names, q, *lengths)
        check_bounds(names, *bounds)
        scale = checks.check_scale(fn, o.softmax_scale, d)
        total_q, h, _ = q.shape
        _check(fn, (dout, q, out, softmax_lse, dlse), (h, total_q), b, o)
        check_for_device(fn, q, d, scale, "flash_attn_varlen_func")
        return implementation(dout, q, k, v, out, softmax_lse, dlse, *lengths, *bounds, *o)

    return checked


# The function that adds checks, the implementation for CPU tensors, and that for fake tensors.
DENSE = _checked, _on_cpu, _fake
RAGGED = _checked_varlen, _varlen_on_cpu, _varlen_fake
