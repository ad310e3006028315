"""FlashAttention-1 and FlashAttention-2 in plain PyTorch: the tile loops that kernels run.

Read this between :mod:`flashcute.reference` (what is computed) and the kernels (how fast). Both
functions keep only one tile of S at a time. The identity they rest on: for a row that is split into
[x1 x2], with m = max(x) and l = sum(exp(x - m)),

    m = max(m1, m2)        l = exp(m1 - m) l1 + exp(m2 - m) l2

so that a softmax can be built up tile by tile: the results of earlier tiles are rescaled when the
maximum grows.

Numerics are those of a kernel on tensor cores: products of the inputs' dtype accumulated in
float32, softmax in float32, P rounded to the inputs' dtype before P V. (float64 inputs: float64
throughout.) Forward only. Unlike the reference, a tile is all or nothing: a NaN in V reaches every
row of a tile that is computed, as it does in matrix instructions, where 0 * NaN is NaN.

Sources: Algorithm 1 and 2 of arXiv 2205.14135 (FlashAttention), Algorithm 1 of arXiv 2307.08691
(FlashAttention-2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .reference import visible_keys


class FlashAttention1Output(NamedTuple):
    """What :func:`flash_attention_1` returns.

    Attributes:
        out: (b, seqlen_q, h, d_v), in the inputs' dtype.
        row_sum: (b, h, seqlen_q), l: sum over the visible keys of exp(s - m), 0 if there is none.
        row_max: (b, h, seqlen_q), m: maximum of the visible scores, -inf where there is none.
    """

    out: Tensor
    row_sum: Tensor
    row_max: Tensor


class FlashAttention2Output(NamedTuple):
    """What :func:`flash_attention_2` returns.

    Attributes:
        out: (b, seqlen_q, h, d_v), in the inputs' dtype.
        lse: (b, h, seqlen_q), L = m + log(l), natural logarithm, -inf where a row sees no key.
    """

    out: Tensor
    lse: Tensor


@torch.no_grad()
def flash_attention_1(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
    tile_m: int = 64,
    tile_n: int = 64,
) -> FlashAttention1Output:
    """Runs FlashAttention's loops: K/V tiles outside, Q tiles inside, O normalised in every step.

    O, l and m live in global memory and are read and written once per pair of tiles, which is what
    FlashAttention-2 does away with.

    Args:
        q: (b, seqlen_q, h, d).
        k: (b, seqlen_k, h_k, d), ``h`` a multiple of ``h_k``.
        v: (b, seqlen_k, h_k, d_v).
        softmax_scale: Factor on Q K^T; ``d ** -0.5`` when None.
        causal: Hide the future, aligned to the bottom-right corner.
        mask: bool, broadcastable to (b, h, seqlen_q, seqlen_k), True where a key is visible.
        dropout_p: Probability of dropping; what is kept is scaled by ``1 / (1 - dropout_p)``.
        dropout_mask: bool, broadcastable to (b, h, seqlen_q, seqlen_k), True where kept.
        tile_m: Query rows per tile.
        tile_n: Keys per tile.

    Raises:
        ValueError: a shape or value is not as above.
    """
    problem = _Problem(
        q, k, v, softmax_scale, causal=causal, mask=mask, dropout=(dropout_p, dropout_mask)
    )
    mO, row_sum, row_max = problem.accumulators(slice(0, problem.seqlen_q))
    for keys in _tiles(problem.seqlen_k, tile_n):
        for rows in _tiles(problem.seqlen_q, tile_m):
            s = problem.scores(rows, keys)  # (b, h, tile_m, tile_n)
            tile_max = s.amax(-1)  # (b, h, tile_m)
            p = _exp_difference(s, tile_max[..., None])
            tile_sum = p.sum(-1)

            new_max = torch.maximum(row_max[..., rows], tile_max)
            old_weight = _exp_difference(row_max[..., rows], new_max) * row_sum[..., rows]
            tile_weight = _exp_difference(tile_max, new_max)
            new_sum = old_weight + tile_weight * tile_sum

            o = old_weight[..., None] * mO[..., rows, :]
            o += tile_weight[..., None] * problem.weighted_values(p, rows, keys)
            mO[..., rows, :] = o / torch.where(new_sum == 0, 1, new_sum)[..., None]
            row_sum[..., rows] = new_sum
            row_max[..., rows] = new_max
    return FlashAttention1Output(mO.transpose(1, 2).to(q.dtype), row_sum, row_max)


@torch.no_grad()
def flash_attention_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
    tile_m: int = 64,
    tile_n: int = 64,
) -> FlashAttention2Output:
    """Runs FlashAttention-2's loops: Q tiles outside, K/V tiles inside, O divided once at the end.

    A Q tile keeps its O, l and m in registers and writes O and L once. Key tiles that lie wholly in
    the future are never visited. Arguments and errors as in :func:`flash_attention_1`.
    """
    problem = _Problem(
        q, k, v, softmax_scale, causal=causal, mask=mask, dropout=(dropout_p, dropout_mask)
    )
    mO, lse, _ = problem.accumulators(slice(0, problem.seqlen_q))
    for rows in _tiles(problem.seqlen_q, tile_m):
        acc_o, row_sum, row_max = problem.accumulators(rows)
        for keys in _tiles(problem.key_end(rows), tile_n):
            s = problem.scores(rows, keys)  # (b, h, tile_m, tile_n)
            new_max = torch.maximum(row_max, s.amax(-1))  # (b, h, tile_m)
            rescale = _exp_difference(row_max, new_max)
            row_max = new_max

            p = _exp_difference(s, row_max[..., None])
            row_sum = rescale * row_sum + p.sum(-1)
            acc_o = rescale[..., None] * acc_o + problem.weighted_values(p, rows, keys)
        mO[..., rows, :] = acc_o / torch.where(row_sum == 0, 1, row_sum)[..., None]
        lse[..., rows] = row_max + torch.log(row_sum)  # -inf + log(0) = -inf
    return FlashAttention2Output(mO.transpose(1, 2).to(q.dtype), lse)


class _Problem:
    """The inputs, heads first, and the two products of a tile."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        *,
        causal: bool,
        mask: Tensor | None,
        dropout: tuple[float, Tensor | None],
    ) -> None:
        if q.shape[2] % k.shape[2] != 0:
            shapes = f"q.shape={tuple(q.shape)}, k.shape={tuple(k.shape)}"
            message = f"flash_attention: expected h to be a multiple of h_k, got {shapes}"
            raise ValueError(f"{message}; use key heads that divide the query heads")
        self.dropout_p, dropout_mask = dropout
        if (self.dropout_p > 0) != (dropout_mask is not None):
            message = "flash_attention: expected dropout_p > 0 and a dropout_mask together"
            raise ValueError(f"{message}, got dropout_p={self.dropout_p}; give both or neither")
        b, self.seqlen_q, h, d = q.shape
        self.seqlen_k, h_k, self.d_v = v.shape[1:]
        self.dtype = q.dtype
        self.acc_dtype = torch.promote_types(q.dtype, torch.float32)
        self.scale = d**-0.5 if softmax_scale is None else softmax_scale
        self.causal = causal
        self.kv_head = torch.arange(h, device=q.device) // (h // h_k)  # key head of each query head
        self.q, self.k, self.v = (x.transpose(1, 2) for x in (q, k, v))
        full = (b, h, self.seqlen_q, self.seqlen_k)
        self.mask = None if mask is None else mask.expand(full)
        self.dropout_mask = None if dropout_mask is None else dropout_mask.expand(full)

    def accumulators(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Returns O = 0, l = 0 and m = -inf for some rows."""
        shape = (*self.q.shape[:2], rows.stop - rows.start)
        o = self.q.new_zeros((*shape, self.d_v), dtype=self.acc_dtype)
        row_sum = self.q.new_zeros(shape, dtype=self.acc_dtype)
        return o, row_sum, torch.full_like(row_sum, -torch.inf)

    def key_end(self, rows: slice) -> int:
        """Returns one past the last key that any of these rows can see."""
        if not self.causal:
            return self.seqlen_k
        return min(max(rows.stop + self.seqlen_k - self.seqlen_q, 0), self.seqlen_k)

    def scores(self, rows: slice, keys: slice) -> Tensor:
        """Computes S = scale * Q K^T of one tile, hidden keys at -inf."""
        q = self.q[:, :, rows].to(self.acc_dtype)
        k = self.k[:, self.kv_head, keys].to(self.acc_dtype)
        s = self.scale * (q @ k.mT)
        if self.causal:
            visible = visible_keys(
                self.seqlen_q, self.seqlen_k, causal=True, rows=rows, device=q.device
            )
            s = torch.where(visible[:, keys], s, -torch.inf)
        if self.mask is not None:
            s = torch.where(self.mask[:, :, rows, keys], s, -torch.inf)
        return s

    def weighted_values(self, p: Tensor, rows: slice, keys: slice) -> Tensor:
        """Computes P V of one tile. Only here dropout thins P: l also counts what was dropped."""
        if self.dropout_mask is not None:
            p = torch.where(self.dropout_mask[:, :, rows, keys], p / (1 - self.dropout_p), 0)
        v = self.v[:, self.kv_head, keys].to(self.acc_dtype)
        return p.to(self.dtype).to(self.acc_dtype) @ v


def _tiles(length: int, tile: int) -> list[slice]:
    """Returns slices of ``tile`` that cover ``length``; the last one may be shorter."""
    if tile < 1:
        raise ValueError(f"flash_attention: expected tiles >= 1, got {tile}; use e.g. 64")
    return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]


def _exp_difference(x: Tensor, maximum: Tensor) -> Tensor:
    """Computes exp(x - maximum) for x <= maximum; -inf - -inf (no key seen) counts as -inf."""
    return torch.exp(x - torch.where(maximum == -torch.inf, 0, maximum))
