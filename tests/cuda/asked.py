"""Finds the problem for which the binding asks for a kernel, from a call's sizes and options alone,
without a GPU, so that the kernels of seeded cases can be built before the cases run.

It does what ``csrc/flash_attn/flash_api_varlen.h`` and ``flash_api_tensors.h`` do, and
``tests/host_fuzz.py`` compares the two.
"""

from __future__ import annotations

import dataclasses

import torch

from flashcute import heuristics
from flashcute.config import BwdConfig, FwdConfig
from flashcute.features import VECTOR
from flashcute.problem import rounded_length, typical_length

NAME_OF = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the choice of a kernel depends on; by default an H100 or H200."""

    capability: tuple[int, int] = (9, 0)
    sms: int = 132


@dataclasses.dataclass(frozen=True)
class Asked:
    """The part of a call on which the choice of its kernels depends.

    Attributes:
        b: Batch entries, or sequences of a ragged batch.
        seqlen_q: Queries of an entry, or of all sequences of a ragged batch together.
        seqlen_k: Keys of an entry, or of all sequences of a ragged batch together.
        bounds: ``max_seqlen_q`` and ``max_seqlen_k`` of a ragged batch; None for other calls.
        cache: Whether keys are in a KV cache; seqlen_k is then the room for each sequence.
        num_splits: As in :class:`flashcute.heuristics.FwdProblem`.
    """

    dtype: torch.dtype
    b: int
    seqlen_q: int
    seqlen_k: int
    h: int
    h_k: int
    d: int
    causal: bool
    window_size: tuple[int, int]
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    bounds: tuple[int, int] | None = None
    cache: bool = False
    page_size: int = 0
    num_splits: int = -1

    def forward(self, gpu: Gpu) -> set[FwdConfig]:
        """Returns the kernel of the forward; an empty set if there is nothing to compute."""
        # A ragged batch without sequences (b == 0) is launched, as it writes rows of no sequence.
        if self.seqlen_q == 0 or (self.b == 0 and self.bounds is None):
            return set()
        return {heuristics.choose_fwd(self._problem(backward=False), gpu.capability, gpu.sms)}

    def backward(self, gpu: Gpu) -> set[BwdConfig]:
        """Returns the kernels of the gradients; an empty set if there is nothing to compute."""
        if self.b == 0 or self.seqlen_q == 0:
            return set()
        return {heuristics.choose_bwd(self._problem(backward=True), gpu.capability, gpu.sms)}

    def _problem(self, *, backward: bool) -> heuristics.FwdProblem:
        b, seqlen_q, seqlen_k = self.b, self.seqlen_q, self.seqlen_k
        longest_q = seqlen_q if self.bounds is None else min(self.bounds[0], seqlen_q)
        left, right = self.window_size[0], 0 if self.causal else self.window_size[1]
        # With fixed splits neither b, seqlen_k nor the lengths of a ragged batch choose the kernel.
        fixed = self.num_splits > 0
        all_left = left < 0 or (not fixed and left >= seqlen_k - 1)
        all_right = right < 0 or (not fixed and right >= longest_q - 1)
        local = not (all_left and (all_right or right == 0))
        sides = [(left, seqlen_k), (right, longest_q)]
        if fixed:
            b, seqlen_q, seqlen_k = 1, longest_q if self.bounds is None else 128, 4096
            sides = [(left, seqlen_k), (right, seqlen_q)]
        elif self.bounds is not None:
            lengths = zip((seqlen_q, seqlen_k), self.bounds, strict=True)
            seqlen_q, seqlen_k = (self._typical(*x, backward=backward) for x in lengths)
        window = tuple(n if side < 0 or side >= n - 1 else side for side, n in sides)
        return heuristics.FwdProblem(
            dtype=NAME_OF[self.dtype],
            causal=not local and not all_right,
            b=b if fixed or (self.bounds is None and not self.cache)
            else rounded_length(b),
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            h=self.h,
            h_k=self.h_k,
            d=-(-self.d // VECTOR) * VECTOR,
            window=window if local else None,
            softcap=self.softcap,
            alibi=self.alibi,
            dropout=self.dropout,
            cache=self.cache,
            page_size=self.page_size,
            num_splits=-1 if backward else self.num_splits,
            varlen=self.bounds is not None,
        )  # fmt: skip

    def _typical(self, total: int, longest: int, *, backward: bool) -> int:
        if backward:
            longest = min(longest, max((total - 1) // self.b + 1, 2))
        return typical_length(total, self.b, longest)
