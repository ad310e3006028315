"""What one rank computes of a message: attention of some queries and some keys, and its gradient.

Partial outputs are merged by their log-sum-exp in float32: with weights w = exp(lse_i - lse), out
is the sum of w out_i. The gradient of a piece needs no partial result: given the output and the
log-sum-exp of the whole rows, P = exp(S - lse) and D = rowsum(dO * O) are right for any keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops, resolver_errors
from ..config import NAMESPACE
from ..flash_attn_interface import flash_attn_func
from ..loading import loadable
from ..reference import visible_keys
from .zigzag import Piece

# Scores held at a time by the gradient of CPU tensors: 16 MiB, and a few temporaries of that size.
_MAX_SCORES = 2**22

_DQ_DK_DV, _REPEATABLE = 7, 16  # bits of the operator `bwd`


def accumulator_dtype(x: Tensor) -> torch.dtype:
    """Returns float32, or float64 for float64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)


class Result:
    """Output and log-sum-exp of all rows of a rank, from pieces in any order of keys.

    Attributes:
        out: (b, seqlen, h, d), float32; float64 for float64 inputs. It has the piece's own dtype
            while it is that of a single piece of all rows.
        lse: (b, h, seqlen), float32, as ``flash_attn_func`` returns it; so the weights are float32.
    """

    def __init__(self, q: Tensor):
        self._q = q
        self.out = self.lse = None

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merges the attention of these rows to keys that they have not seen yet.

        The tensors of the first piece may be kept and written to.
        """
        if self.out is None and out.shape == self._q.shape:
            self.out, self.lse = out, lse
            return
        self._start()
        old_out, old_lse = self.out[:, rows], self.lse[:, :, rows]
        # Where neither has seen a key both LSEs are -inf: the weight is 0 there.
        weight = torch.sigmoid(lse - old_lse).nan_to_num_(0.0)
        weight = weight.transpose(1, 2)[..., None].to(old_out.dtype)
        old_out.lerp_(out.to(old_out.dtype), weight)
        old_lse.copy_(torch.logaddexp(old_lse, lse))

    def _start(self) -> None:
        """Gives :attr:`out` the shape and dtype that pieces are merged into."""
        dtype = accumulator_dtype(self._q)
        if self.out is None:
            b, seqlen, h, _ = self._q.shape
            self.out = self._q.new_zeros(self._q.shape, dtype=dtype)
            self.lse = self._q.new_full((b, h, seqlen), -torch.inf, dtype=torch.float32)
        self.out = self.out.to(dtype)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Returns the output in q's dtype, and the log-sum-exp."""
        if self.out is None:
            self._start()
        return self.out.to(self._q.dtype), self.lse


class Sum:
    """The sum of parts, each of some rows, (b, rows, h, d)."""

    def __init__(self, like: Tensor, terms: int):
        """Takes the shape and dtype of the sum, and how many parts a row gets at most."""
        self._like, self._few, self._total = like, terms <= 2, None

    def add(self, rows: slice, part: Tensor) -> None:
        """Adds a part, in float32 if a row gets more than two parts.

        The sum of two parts is rounded only once in their own dtype, too. The first part may be
        kept and written to.
        """
        if self._total is None:
            dtype = part.dtype if self._few else accumulator_dtype(part)
            if part.shape == self._like.shape:
                self._total = part.to(dtype)
                return
            self._total = torch.zeros_like(self._like, dtype=dtype)
        self._total[:, rows] += part

    def finish(self) -> Tensor:
        """Returns the sum in the dtype asked for."""
        return torch.zeros_like(self._like) if self._total is None else self._total.to(self._like)


def attend(piece: Piece, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Computes output and log-sum-exp of a piece's rows to its keys, without a gradient.

    Args:
        q: (b, seqlen, h, d), all of the rank's queries.
        k, v: (b, tokens, h_k, d), the tokens that ``piece.keys`` counts.
    """
    with torch.no_grad():
        out, lse, _ = flash_attn_func(
            q[:, piece.rows],
            k[:, piece.keys],
            v[:, piece.keys],
            softmax_scale=scale,
            causal=piece.causal,
            window_size=piece.window,
            return_attn_probs=True,
        )
    return out, lse


class Gradient:
    """The gradients of pieces of a rank's rows."""

    def __init__(
        self,
        dout: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        scale: float,
        deterministic: bool,
    ):
        """Takes whole rows: q, out and dout (b, seqlen, h, d), lse and dlse (b, h, seqlen)."""
        self._rows = q, out, loadable("bwd", "dout", dout) if q.is_cuda else dout
        self._stats = lse, None if dlse is None else dlse.float().contiguous()
        self._scale = scale
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        self._wanted = _DQ_DK_DV | (_REPEATABLE if deterministic else 0)

    def of(self, piece: Piece, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dq of a piece's rows, and what these rows add to dk and dv of its keys."""
        q, out, dout = (x[:, piece.rows] for x in self._rows)
        lse, dlse = (None if x is None else x[:, :, piece.rows] for x in self._stats)
        k, v = k[:, piece.keys], v[:, piece.keys]
        args = piece, dout, q, k, v, out, lse, dlse, self._scale
        return backward_by_operator(*args, self._wanted) if q.is_cuda else backward_on_cpu(*args)


def backward_by_operator(
    piece: Piece,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    scale: float,
    wanted: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes :func:`backward_on_cpu` by the operator ``bwd``, in the dtype of the tensors.

    ``wanted`` holds the operator's bits. For CPU tensors the operator computes the forward again,
    so its result is right only for rows that see no keys outside of the piece.
    """
    ops.load()
    bwd = getattr(torch.ops, NAMESPACE).bwd.default
    args = dout, q, k, v, out, lse, dlse, scale, piece.causal, *piece.window, None, wanted
    with torch._C._AutoDispatchBelowAutograd():
        return resolver_errors.call(bwd, *args)[:3]


def backward_on_cpu(
    piece: Piece,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes what the operator ``bwd`` does, in plain PyTorch, some rows at a time.

    With P = exp(S - lse): dV = P^T dO, dS = P (dO V^T - rowsum(dO O) + dlse), dQ = scale dS K,
    dK = scale dS^T Q. If rows see keys outside of the piece, ``out`` and ``lse`` include those
    keys.

    Args:
        piece: Its mask; the tensors hold its rows and keys only.
        dout, q, out: (b, seqlen_q, h, d).
        k, v: (b, seqlen_k, h_k, d).
        lse, dlse: (b, h, seqlen_q).

    Returns:
        dq, dk and dv in float32, or float64 for float64 inputs.
    """
    dtype = accumulator_dtype(q)
    (b, n_q, h, _), (n_k, h_k) = q.shape, k.shape[1:3]

    def by_key_head(x: Tensor) -> Tensor:  # (b, h_k, h / h_k, n, d)
        return x.to(dtype).unflatten(2, (h_k, -1)).permute(0, 2, 3, 1, 4)

    q, dout, out, k, v = map(by_key_head, (q, dout, out, k, v))
    stats = [x.to(dtype).unflatten(1, (h_k, -1)) for x in (lse, dlse) if x is not None]
    offset = (dout * out).sum(-1)  # (b, h_k, h / h_k, n_q)
    if dlse is not None:
        offset = offset - stats[1]
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    step = max(_MAX_SCORES // max(b * h * n_k, 1), 1)
    for start in range(0, n_q, step):
        rows = slice(start, min(start + step, n_q))
        seen = visible_keys(n_q, n_k, piece.causal, piece.window, rows=rows, device=q.device)
        scores = q[..., rows, :] @ k.mT * scale
        p = torch.exp(scores - stats[0][..., rows, None]).masked_fill_(~seen, 0)
        ds = p * (dout[..., rows, :] @ v.mT - offset[..., rows, None]) * scale
        dq[..., rows, :] = ds @ k
        dk += (ds.mT @ q[..., rows, :]).sum(2, keepdim=True)
        dv += (p.mT @ dout[..., rows, :]).sum(2, keepdim=True)

    def back(x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2, 4).flatten(2, 3)

    return back(dq), back(dk), back(dv)
