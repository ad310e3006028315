"""Attention of CPU tensors as tracers see it: ``flashcute::attend_cpu``, one opaque operator.

:mod:`flashcute.cpu` looks at values, for NaN and Inf in masked keys, and cuts its work by the
lengths, neither of which can be traced; :mod:`flashcute.cpu_operator` hides that. The operator is
defined in Python and needs no binding. It is registered when this module is imported.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import cpu
from .cpu_operator import Operator, draw_state

_N_TENSORS = len(cpu.Tensors._fields)

# A window of this size is unlimited in effect. Cutting longer ones to it keeps the operator's int
# arguments within 64 bits.
_MAX_WINDOW = 2**62


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    return_dmask: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes attention, eager or traced; shapes, dtypes and results are those of ``cpu.attend``.

    The arguments are those of :func:`flashcute.reference.attention_ref`, checked by the caller, but
    for dropout a random state takes the place of the mask; it is drawn here if none is given.
    """
    if dropout_p > 0.0 and rng_state is None:
        rng_state = draw_state(q)
    tensors = cpu.Tensors(q, k, v, alibi_slopes, sinks, attn_bias, rng_state)
    left, right = (min(int(side), _MAX_WINDOW) for side in window_size)
    options = cpu.Options(
        float(softmax_scale), causal, left, right, float(softcap), float(dropout_p), return_dmask
    )
    return _operator(lambda: cpu.attend(tensors, options), *tensors, *options)


def backward(dout, dlse, ddmask, wanted: int, tensors: cpu.Tensors, options: cpu.Options):
    """Returns the gradients of the first six of ``tensors``; bit n of ``wanted`` asks for that of
    tensor n, and a gradient that is not wanted has shape (0,)."""
    return _operator.backward_op(dout, dlse, ddmask, wanted, *tensors, *options)


def _attend(*args):
    return cpu.attend(cpu.Tensors(*args[:_N_TENSORS]), cpu.Options(*args[_N_TENSORS:]))


def _fake(*args):
    q, k, options = args[0], args[1], cpu.Options(*args[_N_TENSORS:])
    b, seqlen_q, h, _ = q.shape
    returns_dmask = options.return_dmask and options.dropout_p > 0.0
    dmask = q.new_empty((b, h, seqlen_q, k.shape[1]) if returns_dmask else 0)
    return torch.empty_like(q), q.new_empty((b, h, seqlen_q), dtype=torch.float32), dmask


_operator = Operator(
    "attend_cpu",
    (
        *("Tensor q", "Tensor k", "Tensor v", "Tensor? alibi_slopes", "Tensor? sinks"),
        *("Tensor? attn_bias", "Tensor? rng_state"),
    ),
    (
        *("float softmax_scale", "bool causal", "int window_left", "int window_right"),
        *("float softcap", "float dropout_p", "bool return_dmask"),
    ),
    6,
    _attend,
    _fake,
)
