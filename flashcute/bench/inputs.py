"""Named distributions of Q and K, beside standard normal inputs.

A kernel's speed may depend on its scores: on their size, and on whether a block of keys exceeds the
running maximum, because O is rescaled then. Kernels visit key blocks from the last to the first. V
is standard normal in all of them: no kernel's speed depends on it, and one tolerance holds.

Scores are in nats: q . k / sqrt(d), the exponent of a weight before the maximum is subtracted.
``N(0, x)`` has standard deviation x.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .. import benchmarking as bm

BLOCK = 128  # keys per unit of a ramp's slope, about a kernel's key block
SINKS = 4
_CUT = 1024.0  # limit of heavy tails; products of such values fit every accumulator

Pair = tuple[torch.Tensor, torch.Tensor]


def _normal(q, k, shape, generator) -> Pair:
    """Scores N(0, 1): within about 6 of zero."""
    return q, k


def _scaled(factor: float):
    def scaled(q, k, shape, generator) -> Pair:
        return q.mul_(factor), k

    scaled.__doc__ = (
        f"Queries times {factor:g}: scores N(0, {factor:g}), up to about {6 * factor:g}."
    )
    return scaled


def _ramp(nats: float, towards_first: bool):
    """Returns a distribution with scores that rise by ``nats`` every BLOCK keys, beside N(0, 1)."""

    def ramp(q, k, shape, generator) -> Pair:
        position = torch.arange(shape.seqlen_k, device=k.device)
        if towards_first:
            position = position.flip(0)
        # Two channels of K hold the position as two digits, each exact in bf16 up to 32768 keys.
        q[..., :2] = nats * math.sqrt(shape.d)
        k[..., 0] = (position // BLOCK)[:, None]
        k[..., 1] = (position % BLOCK / BLOCK)[:, None]
        return q, k

    where = "first key, so that each block exceeds those visited before it"
    where = where if towards_first else "last key, so that the first block visited is the greatest"
    ramp.__doc__ = (
        f"Rises by {nats:g} per {BLOCK} keys towards the {where}; N(0, 1) beside it. Scores from "
        f"about -6 to {nats:g} * seqlen_k / {BLOCK} + 6: {nats * 32:g} at 4096 keys."
    )
    return ramp


def _sink(q, k, shape, generator) -> Pair:
    """Attention sinks: the first 4 keys are 15 above the rest, scores N(0, 1) and N(15, 1)."""
    q[..., 0] = 15 * math.sqrt(shape.d)
    k[..., 0] = 0
    k[:, :SINKS, :, 0] = 1
    return q, k


def _constant(q, k, shape, generator) -> Pair:
    """All elements 1: every score is sqrt(d), 8 to 16 for d 64 to 256, all weights the same."""
    return q.fill_(1), k.fill_(1)


def _outliers(q, k, shape, generator) -> Pair:
    """One channel in 32 times 30, as activations of language models have: scores N(0, 160).

    Up to about 2000, as few products make up a score; one key takes nearly all of a row's weight.
    """
    channels = max(1, shape.d // 32)
    for x in (q, k):
        x[..., :channels] *= 30
    return q, k


def _peaked(q, k, shape, generator) -> Pair:
    """Each query is a multiple of one random key that it sees: 20 there, N(0, 20 / sqrt(d)) else.

    The match is 20 times a mean of d squares, so within 20 +- 14 at d = 64.
    """
    rows = torch.arange(shape.seqlen_q, device=k.device)
    last = rows + shape.seqlen_k - shape.seqlen_q if shape.causal else rows + shape.seqlen_k
    visible = (last + 1).clamp(1, shape.seqlen_k)[:, None]  # a row without keys takes key 0
    size = (shape.b, shape.seqlen_q, shape.h)
    chosen = torch.rand(size, device=k.device, generator=generator) * visible
    batch = torch.arange(shape.b, device=k.device)[:, None, None]
    head_k = torch.arange(shape.h, device=k.device) // (shape.h // shape.h_k)
    return k[batch, chosen.long(), head_k] * (20 / math.sqrt(shape.d)), k


def _heavy_tailed(q, k, shape, generator) -> Pair:
    """Student's t of 3 degrees of freedom, cut at 1024: most scores within 10, some of hundreds."""

    def student(x: torch.Tensor) -> torch.Tensor:
        def squares() -> torch.Tensor:
            return torch.randn(x.shape, device=x.device, generator=generator).square_()

        chi = (squares() + squares() + squares()).div_(3).sqrt_()
        normal = torch.randn(x.shape, device=x.device, generator=generator)
        return (normal / chi).clamp_(-_CUT, _CUT).to(x.dtype)

    return student(q), student(k)


def _positive(q, k, shape, generator) -> Pair:
    """Uniform in [0, 1): scores within about 1.3 of sqrt(d) / 4, 2 to 4 for d 64 to 256."""
    return q.uniform_(generator=generator), k.uniform_(generator=generator)


DISTRIBUTIONS: dict[str, Callable[..., Pair]] = {
    "normal": _normal,
    "scaled4": _scaled(4),
    "scaled16": _scaled(16),
    "scaled64": _scaled(64),
    "ramp": _ramp(3, towards_first=True),
    "steep_ramp": _ramp(60, towards_first=True),
    "ramp_up": _ramp(3, towards_first=False),
    "sink": _sink,
    "constant": _constant,
    "outliers": _outliers,
    "peaked": _peaked,
    "heavy_tailed": _heavy_tailed,
    "positive": _positive,
}


def make(
    name: str, shape: bm.Shape, dtype: torch.dtype, device: str | torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns Q ``(b, seqlen_q, h, d)`` and K, V ``(b, seqlen_k, h_k, d)`` of a distribution.

    Equal arguments give equal tensors; ``normal`` is :func:`flashcute.benchmarking.make_qkv`.
    """
    q, k, v = bm.make_qkv(shape, dtype, device, seed)
    # Independent of the draws of Q and K.
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    return *DISTRIBUTIONS[name](q, k, shape, generator), v
