"""Shapes of serving: queries over a cache of keys and values, and what of it a call has to read.

``decode`` has one or a few queries per sequence, and a mixed batch: chunks of prompts and decodes
in one call. ``append`` has one token that the call first writes to the cache, with and without
rotary embedding, beside a call that does not append. Each point is timed on a contiguous cache and
on paged caches, in turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping

from ..benchmarking import Shape
from ..checks_kvcache import check_splits
from ..problem import FwdProblem, rounded_length, typical_length

PASSES = ("decode", "append")
PAGE_SIZES = (0, 1, 16, 64, 256)
APPENDS = ("", "tokens", "rotary")
# Cache lengths are multiples of the largest page, so that every page size divides them.
_LARGEST_PAGE = 256
# Limits of a shape made small for a CPU.
_SMALL_B, _SMALL_Q = 3, 16


@dataclasses.dataclass(frozen=True)
class Serving(Shape):
    """Queries over a cache of ``b`` sequences with ``seqlen_k`` keys each, all of them in use.

    Attributes:
        page_size: Tokens of a page; 0 for a contiguous cache.
        num_splits: As in ``flash_attn_with_kvcache``, for flashcute only.
        append: What the call does first, one of :data:`APPENDS`: nothing, or write the last
            ``seqlen_q`` keys of each sequence to the cache, as they are or rotated.
        decodes: In a mixed batch, the number of sequences with one query, which come last; the
            others have ``seqlen_q``. 0 where all have ``seqlen_q``.
    """

    page_size: int = 0
    num_splits: int = 0
    append: str = ""
    decodes: int = 0

    @property
    def tensors(self) -> Shape:
        """The sizes of the tensors."""
        return Shape(*(self.b, self.seqlen_q, self.seqlen_k, self.h, self.h_k, self.d, self.causal))

    @property
    def flops(self) -> int:
        """FLOPs as in :class:`Shape`; those of appending are not counted."""
        long = dataclasses.replace(self.tensors, b=self.b - self.decodes)
        return long.flops + 4 * self.decodes * self.h * self.seqlen_k * self.d

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values in use, with 16 bits per element."""
        return 2 * 2 * self.b * self.seqlen_k * self.h_k * self.d

    def problem(self, dtype: str) -> FwdProblem:
        """Returns the call as the choice of a kernel sees it."""
        sizes = dataclasses.asdict(self.tensors) | {"b": rounded_length(self.b)}
        page_size = self.page_size
        if self.decodes:
            page_size = page_size or self.seqlen_k  # counts as one page for each sequence
            total = (self.b - self.decodes) * self.seqlen_q + self.decodes
            sizes["seqlen_q"] = typical_length(total, self.b, self.seqlen_q)
        # A fixed number of splits makes the choice independent of the rest of the batch.
        if self.num_splits > 0:
            sizes |= {"b": 1, "seqlen_k": 4096} | ({"seqlen_q": 128} if self.decodes else {})
        return FwdProblem(
            dtype,
            **sizes,
            cache=True,
            page_size=page_size,
            num_splits=self.num_splits,
            varlen=self.decodes > 0,
        )


# Query heads, key heads and head dimension of: Llama 3 and others, gpt-oss, a model without groups,
# one with a single key head.
_HEADS = ((32, 8, 128), (64, 8, 64), (32, 32, 128), (128, 1, 128))
# (sequences, keys, queries)
_SIZES = (
    *((1, 8192, 1), (4, 4096, 1), (16, 8192, 1), (64, 4096, 1), (128, 2048, 1), (1, 131072, 1)),
    *((16, 4096, 4), (4, 8192, 16)),
)
POINTS: dict[str, dict[str, Serving]] = {
    "decode": {
        f"{b}x{keys}-q{q}-h{h}/{h_k}-d{d}": Serving(b, q, keys, h, h_k, d, causal=True)
        for h, h_k, d in _HEADS
        for b, keys, q in _SIZES
    }
    | {"mixed-8x512-and-56-over-8k": Serving(64, 512, 8192, 32, 8, 128, causal=True, decodes=56)},
    "append": {"append-16x8192": Serving(16, 1, 8192, 32, 8, 128, causal=True)},
}


def shrink(shape: Serving, tokens: int) -> Serving:
    """Returns the shape with few sequences of at most ``tokens`` keys, but a page of 256."""
    keys = max(min(shape.seqlen_k, tokens // _LARGEST_PAGE * _LARGEST_PAGE), _LARGEST_PAGE)
    b = min(shape.b, _SMALL_B)
    return dataclasses.replace(
        shape,
        b=b,
        seqlen_q=min(shape.seqlen_q, _SMALL_Q),
        seqlen_k=keys,
        decodes=min(shape.decodes, b - 1),
    )


def _check(args: argparse.Namespace) -> None:
    usual = {
        **{"head_dims": None, "seqlens": None, "masks": None, "groups": None},
        **{"sustained": 0.0, "inputs": ["normal"], "peer_module": []},
    }
    given = [f"--{name.replace('_', '-')}" for name in usual if getattr(args, name) != usual[name]]
    if given:
        raise ValueError(
            f"flashcute bench: expected --pass {args.what} without {', '.join(given)}, which it "
            "does not have; leave it out"
        )
    check_splits("flashcute bench", args.num_splits or 0)
    for size in args.page_sizes or ():
        if size and _LARGEST_PAGE % size:
            raise ValueError(
                f"flashcute bench: expected --page-sizes that divide {_LARGEST_PAGE}, or 0 for a "
                f"contiguous cache, got {size}; sequences of these shapes are whole pages"
            )


def points(args: argparse.Namespace, tokens: int | None = None) -> dict[str, list[Serving]]:
    """Returns the points that the arguments ask for.

    Each point is a list of variants by what is appended and by page size, which are timed in turns.

    Args:
        args: Arguments of the command.
        tokens: If given, the number of tokens that shapes are shrunk to.

    Raises:
        ValueError: for arguments that the pass does not have, or unknown names of points.
    """
    _check(args)
    every = POINTS[args.what]
    names = [name for name in args.shapes if name != "sweep"]
    for name in names:
        if not any(name in point for point in every):
            raise ValueError(
                f"flashcute bench: expected --shapes with part of the name of a point of --pass "
                f"{args.what}, got {name!r}; they are {', '.join(every)}"
            )
    found = {}
    for name, shape in every.items():
        if names and not any(wanted in name for wanted in names):
            continue
        small = shape if tokens is None else shrink(shape, tokens)
        found[name] = [
            dataclasses.replace(
                small, page_size=size, append=append, num_splits=args.num_splits or 0
            )
            for append in (APPENDS if args.what == "append" else ("",))
            for size in dict.fromkeys(PAGE_SIZES if args.page_sizes is None else args.page_sizes)
        ]
    return found


def figures(
    shape: Serving, us: Mapping[str, float], ceiling: Mapping[str, float]
) -> dict[str, object]:
    """Returns a row's figures beside its times: bytes of the cache, and the speed of reading them.

    ``beyond_read_us`` is the time beyond reading these bytes at the read ceiling.
    """
    size = shape.cache_bytes
    speeds = {name: _rounded(size / time / 1e6) for name, time in us.items()}
    found: dict[str, object] = {"cache_bytes": size, "tb_per_second": speeds}
    if "read_bytes_per_second" in ceiling:
        least = size / ceiling["read_bytes_per_second"] * 1e6
        found["percent_of_read"] = {n: round(100 * least / time, 1) for n, time in us.items()}
        found["beyond_read_us"] = {n: round(time - least, 2) for n, time in us.items()}
    return found


def _rounded(value: float) -> float:
    """Rounds to four significant digits, as a CPU's values may be small."""
    return round(value, 3 - math.floor(math.log10(value)))
