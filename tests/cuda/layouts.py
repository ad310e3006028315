"""Tensors in every memory layout that the kernels must take, surrounded by NaN."""

from __future__ import annotations

import random

import torch

# Elements of NaN before and after each tensor.
MARGIN = 4096

# name: (order of the dimensions of (b, s, h, d) from the innermost on, gap behind each dimension)
_DENSE = (3, 2, 1, 0)
STYLES = {
    "contiguous": (_DENSE, (0, 0, 0, 0)),
    "heads_before_rows": ((3, 1, 2, 0), (0, 0, 0, 0)),
    "rows_before_batch": ((3, 2, 0, 1), (0, 0, 0, 0)),
    "heads_outermost": ((3, 1, 0, 2), (0, 0, 0, 0)),
    "gaps": (_DENSE, (1, 3, 2, 8)),
    "gaps_permuted": ((3, 1, 0, 2), (2, 5, 1, 24)),
    # a row holds three tensors of h heads each, and this is one of them
    "packed": (_DENSE, (0, 0, "2h", 0)),
    # strides are no multiples of 8 elements, so the interface copies the tensor
    "off_grid": (_DENSE, (0, 0, 0, 4)),
    # dimensions of size 1 get absurd strides, which must not matter
    "absurd_size_1": (_DENSE, (0, 0, 0, 0)),
    # one dimension has stride 0
    "expanded_batch": (_DENSE, (0, 0, 0, 0)),
    "expanded_rows": (_DENSE, (0, 0, 0, 0)),
    "expanded_heads": (_DENSE, (0, 0, 0, 0)),
}
_EXPANDED = {"expanded_batch": 0, "expanded_rows": 1, "expanded_heads": 2}
_ABSURD = (0, 3331333, 99990001)


def nan_surrounded(
    shape: tuple[int, int, int, int],
    style: str,
    dtype: torch.dtype,
    generator: torch.Generator,
    rng: random.Random,
) -> torch.Tensor:
    """Returns normal random numbers in a layout of :data:`STYLES`; margins and gaps are NaN."""
    order, gaps = STYLES[style]
    sizes = list(shape)
    if style in _EXPANDED:
        sizes[_EXPANDED[style]] = min(1, sizes[_EXPANDED[style]])
    strides = [0] * 4
    stride = 1
    for dim in order:
        strides[dim] = stride
        gap = 2 * sizes[dim] if gaps[dim] == "2h" else gaps[dim]
        stride *= sizes[dim] + gap
    device = generator.device
    storage = torch.full((2 * MARGIN + max(stride, 1),), torch.nan, dtype=dtype, device=device)
    values = torch.randn(sizes, generator=generator, dtype=dtype, device=device)
    view = storage.as_strided(sizes, strides, MARGIN).copy_(values)
    if style == "absurd_size_1":
        strides = [rng.choice(_ABSURD) if sizes[d] == 1 else strides[d] for d in range(3)]
        view = storage.as_strided(sizes, (*strides, 1), MARGIN)
    return view.expand(shape)
