"""The reference for sequences of different lengths: a loop over :func:`attention_ref`.

Tokens of all sequences stand one after the other, without padding: q is (total_q, h, d), k and v
are (total_k, h_k, d). Sequence ``i`` has the queries ``q[cu_seqlens_q[i]:cu_seqlens_q[i + 1]]`` and
the keys ``k[cu_seqlens_k[i]:cu_seqlens_k[i + 1]]``; where seqused_q and seqused_k are given, only
the first ``seqused_q[i]`` and ``seqused_k[i]`` of them. Attention of each sequence is computed
alone, as :mod:`flashcute.reference` defines it: masks, windows and ALiBi are aligned to its own
bottom-right corner. Rows that are in no sequence, or not used, have output 0 and log-sum-exp -inf,
with sinks too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_kind, check_rank
from .checks_varlen import INDEX_DTYPES, check_cu_seqlens
from .reference import attention_ref

_NAME = "attention_varlen_ref"


class VarlenOutput(NamedTuple):
    """What :func:`attention_varlen_ref` returns.

    Attributes:
        out: (total_q, h, d_v), in the dtype computed in.
        lse: (h, total_q), natural logarithm of the softmax's denominator.
        probs: For each sequence (h, rows, keys), the softmax before dropout; or None.
    """

    out: Tensor
    lse: Tensor
    probs: tuple[Tensor, ...] | None


def attention_varlen_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_mask: Sequence[Tensor] | None = None,
    upcast: torch.dtype | None = None,
    return_probs: bool = False,
    **options: object,
) -> VarlenOutput:
    """Computes attention of sequences of different lengths, by definition; differentiable.

    Args:
        q: (total_q, h, d), as :func:`attention_ref` takes it but for the batch.
        k: (total_k, h_k, d).
        v: (total_k, h_k, d_v).
        cu_seqlens_q: (b + 1,), int: where each sequence of queries starts, and the last one's end.
        cu_seqlens_k: (b + 1,), int: as cu_seqlens_q, for the keys.
        seqused_q: (b,), int: rows of each sequence that are computed; None for all.
        seqused_k: (b,), int: keys of each sequence that can be seen; None for all.
        alibi_slopes: (h,) or (b, h).
        dropout_mask: For each sequence bool (h, rows, keys), True where a probability is kept.
        upcast: float32 or float64 to compute in; None computes in the inputs' dtype.
        return_probs: Return the probabilities as well.
        options: Other arguments of :func:`attention_ref`.

    Raises:
        TypeError, ValueError: as :func:`attention_ref`, and for lengths that do not fit the tokens.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_kind(_NAME, name, x)
        check_rank(_NAME, name, x, "(total, heads, head_dim)")
    starts_q, used_q = _sequences("q", q, cu_seqlens_q, seqused_q)
    starts_k, used_k = _sequences("k", k, cu_seqlens_k, seqused_k)
    if len(starts_q) != len(starts_k):
        raise ValueError(
            f"{_NAME}: expected cu_seqlens_q and cu_seqlens_k of one length, got "
            f"{len(starts_q) + 1} and {len(starts_k) + 1}; give each sequence of queries its keys"
        )
    dtype = q.dtype if upcast is None else upcast
    out = q.new_zeros((*q.shape[:2], v.shape[2]), dtype=dtype)
    statistics = torch.promote_types(dtype, torch.float32)
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=statistics)
    per_sequence = alibi_slopes is not None and alibi_slopes.dim() == 2
    probs = []
    for i, (start_q, n_q, start_k, n_k) in enumerate(
        zip(starts_q, used_q, starts_k, used_k, strict=True)
    ):
        rows, keys = slice(start_q, start_q + n_q), slice(start_k, start_k + n_k)
        part = attention_ref(
            q[None, rows],
            k[None, keys],
            v[None, keys],
            alibi_slopes=alibi_slopes[i] if per_sequence else alibi_slopes,
            dropout_mask=None if dropout_mask is None else dropout_mask[i],
            upcast=upcast,
            return_probs=return_probs,
            **options,
        )
        out[rows], lse[:, rows] = part.out[0], part.lse[0]
        probs += [part.probs[0]] if return_probs else []
    return VarlenOutput(out, lse, tuple(probs) if return_probs else None)


def _sequences(
    side: str, x: Tensor, cu_seqlens: Tensor, seqused: Tensor | None
) -> tuple[list[int], list[int]]:
    """Returns the first row and the number of rows of each sequence."""
    check_cu_seqlens(_NAME, f"cu_seqlens_{side}", cu_seqlens)
    if seqused is not None:
        name = f"seqused_{side}"
        check_kind(_NAME, name, seqused)
        if seqused.dim() != 1:
            raise ValueError(
                f"{_NAME}: expected {name} of shape (b,), got {name}.shape={tuple(seqused.shape)}; "
                "pass one length per sequence"
            )
        if seqused.dtype not in INDEX_DTYPES:
            raise TypeError(
                f"{_NAME}: expected {name} of dtype torch.int32 or torch.int64, got "
                f"{name}.dtype={seqused.dtype}; cast it with .int()"
            )
    ends = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    used = lengths if seqused is None else seqused.tolist()
    fits = ends[:1] == [0] and ends[-1] <= x.shape[0] and len(used) == len(lengths)
    if not fits or any(not 0 <= n <= m for n, m in zip(used, lengths, strict=True)):
        raise ValueError(
            f"{_NAME}: expected cu_seqlens_{side} from 0 up to at most {x.shape[0]} "
            f"and seqused_{side} within, got {ends} and {used}; pass cumulative lengths"
        )
    return ends[:-1], used
