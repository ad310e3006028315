"""Attention of CPU tensors to a cache of keys and values: a loop over :mod:`flashcute.cpu`.

Each sequence is a dense call of batch size 1, so that its result depends neither on its neighbours
nor on the pages its keys are in. :mod:`flashcute.reference_kvcache` defines what is computed. In
contrast to it, new keys and values are written into the cache here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import cpu
from .checks_kvcache import Tensors, apart, read_slots
from .reference_kvcache import new_rows, rotate, rows


class Options(NamedTuple):
    """The options that are no tensors; ``num_splits`` changes nothing on the CPU."""

    softmax_scale: float
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    rotary_interleaved: bool = True
    num_splits: int = 0

    @property
    def is_local(self) -> bool:
        """Whether each query is rotated by a position of its own."""
        return self.causal or self.window_left >= 0 or self.window_right >= 0


def attend(fn: str, t: Tensors, o: Options) -> tuple[Tensor, Tensor]:
    """Appends, rotates and attends, in float32, or in float64 for float64 inputs.

    Args:
        fn: For messages.
        t: Tensors, checked by the caller but for the values of lengths and pages.
        o: Options.

    Returns:
        out in q's shape and dtype, contiguous, and the log-sum-exp in float32 (b, h, seqlen_q).

    Raises:
        ValueError: for values that do not fit the cache, and for caches that cannot be written or
            are at one address; nothing has been written then.
    """
    slots = read_slots(fn, t, is_local=o.is_local)
    if t.k is not None:
        t = apart(fn, t)
    with torch.no_grad():
        q, k = rotate(t, slots.ends, is_local=o.is_local, interleaved=o.rotary_interleaved)
        if k is not None:
            where = new_rows(t, slots)
            t.k_cache[where] = k.flatten(0, 1)
            t.v_cache[where] = t.v.flatten(0, 1)
        b, seqlen_q, h, _ = q.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty((b, h, seqlen_q), dtype=torch.float32, device=q.device)
        for i, (start, end) in enumerate(zip(slots.starts, slots.ends, strict=True)):
            keys, values = (
                tokens(cache, slots.pages[i], start, end + t.n_new)[None]
                for cache in (t.k_cache, t.v_cache)
            )
            slopes = t.alibi_slopes
            if slopes is not None and slopes.dim() == 2:
                slopes = slopes[i]
            part = cpu.Tensors(q[i : i + 1], keys, values, slopes, t.sinks)
            out[i : i + 1], lse[i : i + 1], _ = cpu.attend(part, cpu.Options(*o[:5]))
    return out, lse


def tokens(cache: Tensor, pages: Tensor, start: int, end: int) -> Tensor:
    """Returns the tokens ``start`` to ``end`` of a sequence with these pages, (tokens, h_k, d)."""
    if pages.shape[0] == 1 and start < end:  # without tokens the page may be invalid
        return cache[int(pages[0]), start:end]
    return cache[rows(pages, cache.shape[1], start, end)]
