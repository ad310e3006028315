"""Checks that the operators share, of the arguments that follow their tensors."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from . import checks
from .features import VECTOR

T = TypeVar("T", bound=NamedTuple)


def rounded(fn: str, o: T) -> T:
    """Returns ``o`` with dropout_p rounded as masks use it, and rng_state only if it is not 0."""
    dropout_p = checks.check_dropout(fn, o.dropout_p)
    return o._replace(dropout_p=dropout_p, rng_state=o.rng_state if dropout_p else None)


def check_options(fn: str, q, b: int, o) -> None:
    """Checks the options that all operators take; ``b`` counts batch entries or sequences."""
    checks.check_window(fn, (o.window_left, o.window_right))
    checks.check_softcap(fn, o.softcap)
    if o.sinks is not None:
        checks.check_sinks(fn, o.sinks, q)
    if o.alibi_slopes is not None:
        checks.check_alibi(fn, o.alibi_slopes, q, b)
    checks.check_rng_state(fn, o.rng_state, q, o.dropout_p)


def check_for_device(fn: str, q, d: int, softmax_scale: float, padding: str) -> None:
    if q.is_cpu:
        checks.check_dtype(fn, "q.dtype", q.dtype, q.device)
        return
    checks.check_for_kernels(fn, "q", q, d, softmax_scale)
    if d % VECTOR:
        raise ValueError(
            f"{fn}: expected head_dim to be a multiple of {VECTOR}, got head_dim={d}; "
            f"call {padding}, which pads"
        )
