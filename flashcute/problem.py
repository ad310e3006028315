"""What the choice of a kernel depends on, with lengths rounded."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class FwdProblem:
    """One call, or its backward, as far as the choice of a kernel depends on it.

    Attributes:
        causal: A causal mask and no other window.
        window: (left, right) of any other window, with ``causal=False``; None without one.
        softcap: Whether the call has a softcap.
        alibi: Whether it has ALiBi slopes.
        dropout: Whether it has dropout.
        cache: Whether keys and values are a cache; ``seqlen_k`` is then a sequence's room in it.
        page_size: Tokens of a page, for a cache in pages; else 0.
        num_splits: The most parts of a sequence's keys, in a ragged batch or over a cache; 0: by
            shape, -1: keys are not split.
        varlen: Whether the batch is ragged: its sequences have any number of queries.
    """

    dtype: str
    causal: bool
    b: int
    seqlen_q: int
    seqlen_k: int
    h: int
    h_k: int
    d: int
    window: tuple[int, int] | None = None
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    cache: bool = False
    page_size: int = 0
    num_splits: int = -1
    varlen: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether keys are contiguous, and there is no window, softcap, ALiBi or dropout."""
        changed = self.window is not None or self.softcap or self.alibi or self.dropout
        return not (self.page_size or changed)


def rounded_length(length: int) -> int:
    """Rounds ``length`` up: exact up to 16, then in steps of 16, from 256 on 16 steps an octave."""
    if length <= 16:
        return length
    step = max(16, 1 << (length - 1).bit_length() >> 5)
    return -(-length // step) * step


def typical_length(total: int, b: int, longest: int) -> int:
    """Returns the length, from the mean to the longest, that a ragged forward is chosen for.

    The binding computes the same (``typical_length()`` of kernel_table.h), but with the number of
    sequences rounded up by :func:`rounded_length`.

    Args:
        total: Tokens of all sequences.
        b: Sequences.
        longest: ``max_seqlen_q`` or ``max_seqlen_k`` of the call.
    """
    most = min(longest, total)
    mean = min(total / max(b, 1), most)
    # At least 2 if the longest sequence has 2 rows: only a single row needs no mask.
    return max(int(math.sqrt(mean * most)), min(most, 2), 1)


def rounded(problem: FwdProblem) -> FwdProblem:
    """Returns ``problem`` with rounded lengths, for which its kernel is chosen.

    The binding remembers choices by rounded lengths (``rounded()`` of kernel_table.h, which rounds
    as this function does), so a call with another length rarely enters Python.
    """
    window = problem.window
    if window is not None:
        left, right = window
        left, right = min(left, problem.seqlen_k), min(right, problem.seqlen_q)
        window = rounded_length(left), rounded_length(right)
    return dataclasses.replace(
        problem,
        seqlen_q=rounded_length(problem.seqlen_q),
        seqlen_k=rounded_length(problem.seqlen_k),
        window=window,
    )
