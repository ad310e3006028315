"""What the choice of a kernel depends on."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class FwdProblem:
    """One call, or its backward, as far as the choice of a kernel depends on it.

    Attributes:
        causal: A causal mask and no other window.
        window: (left, right) of any other window, with ``causal=False``; None without one.
        softcap: Whether the call has a softcap.
        alibi: Whether it has ALiBi slopes.
        dropout: Whether it has dropout.
        cache: Whether keys and values are a cache, of which ``seqlen_k`` is the room.
        page_size: Of one in pages; else 0.
        num_splits: Parts of a ragged batch's keys at most; 0: by shape, -1: they are not split.
        varlen: Whether it is of a ragged batch, on which the choice of a backward depends.
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
