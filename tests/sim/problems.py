"""The problems that every shipped kernel runs in the simulator."""

from __future__ import annotations

import torch

from flashcute.config import FwdConfig

# (b, seqlen_q, seqlen_k, h, h_k, how much smaller d is than the kernel's head dimension)
SHAPES = {
    "whole tiles": (1, 128, 128, 1, 1, 0),
    "one past the tile edges": (1, 129, 193, 2, 1, 8),
    "fewer queries than keys": (2, 17, 130, 4, 2, 16),
    "queries that see no key": (1, 200, 63, 1, 1, 0),
    "no keys": (1, 5, 0, 2, 2, 8),
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def problem(config: FwdConfig, shape: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    """Returns normally distributed q, k and v of a shape like those of :data:`SHAPES`."""
    b, seqlen_q, seqlen_k, h, h_k, less = shape
    generator = torch.Generator().manual_seed(seed)
    d = config.head_dim - less
    sizes = ((b, seqlen_q, h, d), (b, seqlen_k, h_k, d), (b, seqlen_k, h_k, d))
    return [torch.randn(size, generator=generator).to(DTYPES[config.dtype]) for size in sizes]


def outweigh(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, nats: float) -> None:
    """Changes q, k and v, (..., n, h, d), in place, so that the last key, whose value becomes 0,
    outweighs each other key by a factor of about exp(nats). The output is then the sum over the
    small weights."""
    q[..., 0] = 16
    k[..., 0] = 0
    k[..., -1, :, 0] = nats * q.shape[-1] ** 0.5 / 16
    v.abs_()
    v[..., -1, :, :] = 0
