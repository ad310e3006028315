"""Options of the forward as named shapes, from windows to dropout.

FLOPs are those of the query-key pairs that the masks leave, counted one by one, whether dropout
drops them or not. All shapes are self-attention: each sequence has as many queries as keys.
"""

from __future__ import annotations

import dataclasses
import math
import random

from ..benchmarking import Shape

_SEED = 0
_SHRUNK = 8  # most packed sequences that a shrunk shape keeps


@dataclasses.dataclass(frozen=True)
class Option(Shape):
    """A forward problem with options.

    Attributes:
        window: (left, right) as in ``flash_attn_func``.
        sinks: Whether each head has a sink.
        softcap: 0.0 for none.
        alibi: Whether each head has an ALiBi slope.
        dropout: Probability with which a weight is dropped, 0.0 for none.
        lengths: Tokens of each packed sequence of a varlen call; then ``b`` is their number,
            ``seqlen_q`` and ``seqlen_k`` are the longest. Empty for a dense call.
    """

    window: tuple[int, int] = (-1, -1)
    sinks: bool = False
    softcap: float = 0.0
    alibi: bool = False
    dropout: float = 0.0
    lengths: tuple[int, ...] = ()

    @property
    def sides(self) -> tuple[int, int]:
        """The window combined with the causal mask."""
        return (self.window[0], 0) if self.causal else self.window

    @property
    def tensors(self) -> Shape:
        """The sizes of the tensors; packed sequences count as one sequence."""
        tokens = sum(self.lengths)
        sizes = (1, tokens, tokens) if tokens else (self.b, self.seqlen_q, self.seqlen_k)
        return Shape(*sizes, self.h, self.h_k, self.d, self.causal)

    @property
    def flops(self) -> int:
        """4 d for each pair of a query and a key that it sees, and each head."""
        lengths = self.lengths or (self.seqlen_q,) * self.b
        return 4 * self.d * self.h * sum(_pairs(length, *self.sides) for length in lengths)

    def bytes(self, itemsize: int = 2) -> int:
        """Returns the least device memory traffic in bytes."""
        return self.tensors.bytes(itemsize)


def _pairs(length: int, left: int, right: int) -> int:
    """Counts pairs of query i and key j with i - left <= j <= i + right; -1 is no limit."""
    first = length if left < 0 else left
    last = length if right < 0 else right
    return sum(min(length - 1, i + last) - max(0, i - first) + 1 for i in range(length))


def _dense(b: int, s: int, heads: tuple[int, int], d: int, causal: bool = True, **options):
    return Option(b, s, s, *heads, d, causal, **options)


def _window(left: int, right: int, d: int, s: int, b: int, *heads: int) -> Option:
    return _dense(b, s, heads, d, causal=False, window=(left, right))


def _lengths() -> dict[str, tuple[int, ...]]:
    """Returns named batches of sequence lengths, which are the same in every run."""
    draw = random.Random(_SEED)
    # Text documents: median 500 tokens, a few times that in the longest.
    documents = [max(16, round(draw.lognormvariate(math.log(500), 0.8))) for _ in range(64)]
    return {
        "64-documents": tuple(documents),
        "8-of-4k": tuple(round(draw.uniform(3584, 4608)) for _ in range(8)),
        "512-short": tuple(draw.randint(32, 256) for _ in range(512)),
        "16k-and-63-of-128": (16384, *[128] * 63),
        # Has a dense call on the same tensors to compare with.
        "16-of-1024": (1024,) * 16,
    }


def _ragged(lengths: tuple[int, ...], heads: tuple[int, int], d: int, causal: bool) -> Option:
    longest = max(lengths)
    return Option(len(lengths), longest, longest, *heads, d, causal, lengths=lengths)


# The part of a name before the first hyphen is its family.
OPTIONS: dict[str, Option] = {
    "window-1023-d128-8k": _window(1023, 0, 128, 8192, 2, 16, 4),
    "window-4095-d128-8k": _window(4095, 0, 128, 8192, 2, 16, 4),
    "window-4095-d128-32k": _window(4095, 0, 128, 32768, 1, 16, 4),
    "window-512-512-d128-8k": _window(512, 512, 128, 8192, 2, 16, 16),
    "window-4095-d256-8k": _window(4095, 0, 256, 8192, 2, 8, 4),
    "window-1023-d64-8k": _window(1023, 0, 64, 8192, 2, 32, 8),
    "window-127-d64-8k": _window(127, 0, 64, 8192, 1, 64, 8),  # the windows of gpt-oss
    "sinks-d64": _dense(4, 4096, (32, 32), 64, sinks=True),
    "sinks-d64-grouped": _dense(4, 4096, (64, 8), 64, sinks=True),  # heads of gpt-oss
    "sinks-d128": _dense(4, 4096, (16, 16), 128, sinks=True),
    **{
        f"ragged-{name}-{kind}": _ragged(lengths, heads, d, causal)
        for name, lengths in _lengths().items()
        for kind, heads, d, causal in (
            ("d64-full", (12, 12), 64, False),
            ("d128-causal", (16, 4), 128, True),
        )
    },
    "softcap-d128": _dense(4, 4096, (16, 8), 128, softcap=50.0),
    "softcap-d256": _dense(4, 4096, (8, 4), 256, softcap=50.0),  # Gemma 2
    "alibi-d128": _dense(4, 4096, (16, 16), 128, alibi=True),
    "dropout-d64": _dense(4, 4096, (32, 32), 64, dropout=0.1),
    "dropout-d128": _dense(4, 4096, (16, 16), 128, dropout=0.1),
}


def shrink(shape: Option, tokens: int) -> Option:
    """Returns the shape with at most ``tokens`` tokens in all, for a CPU.

    Windows shrink in proportion. Of packed sequences the first few stay, each at least one token
    long.
    """
    if shape.lengths:
        kept = shape.lengths[: min(_SHRUNK, tokens)]
        # Leaves a token of each sequence for rounding up.
        part = min(1.0, (tokens - len(kept)) / sum(kept))
        lengths = tuple(min(x, int(part * x) + 1) for x in kept)
        longest = max(lengths)
        return dataclasses.replace(
            shape, b=len(lengths), seqlen_q=longest, seqlen_k=longest, lengths=lengths
        )
    seqlen = min(shape.seqlen_q, tokens)
    left, right = (x if x <= 0 else max(1, x * seqlen // shape.seqlen_q) for x in shape.window)
    b = max(1, min(shape.b, tokens // seqlen))
    return dataclasses.replace(shape, b=b, seqlen_q=seqlen, seqlen_k=seqlen, window=(left, right))
