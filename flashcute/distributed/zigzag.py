"""Which tokens of a sequence lie on which rank, and the pairs of them that attend to each other.

A sequence of s tokens on n ranks is split in one of two orders:

* contiguous: rank r holds tokens r s/n to (r + 1) s/n;
* zigzag: of 2 n chunks rank r holds chunks r and 2 n - 1 - r. Under a causal mask, chunk c attends
  to c whole chunks and half of itself, so all ranks have the same work: 2 n - 1 chunks, two halves.

All here is arithmetic on Python numbers, the same on all ranks: each knows what the others send.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_int, check_kind, check_length

ORDERS = ("zigzag", "contiguous")


class Segment(NamedTuple):
    """Tokens of one sequence that follow each other in the sequence and in memory.

    Attributes:
        sequence: Index of the sequence in a packed batch.
        start: Position of the first token in its sequence.
        length: Number of tokens.
        row: Index of the first token in the tensors of its rank.
    """

    sequence: int
    start: int
    length: int
    row: int

    @property
    def rows(self) -> slice:
        """Its rows in the tensors of its rank."""
        return slice(self.row, self.row + self.length)


class Piece(NamedTuple):
    """One call of attention, in which the rows see exactly those of the keys that the mask shows.

    Attributes:
        rows: Slice of the queries.
        keys: Slice of the keys.
        causal: Whether there is a causal mask, aligned to the bottom-right corner of rows and keys.
        window: (left, right), aligned like the mask; -1 for unlimited.
    """

    rows: slice
    keys: slice
    causal: bool
    window: tuple[int, int]

    @property
    def full(self) -> bool:
        """Whether every row sees every key."""
        return not self.causal and self.window == (-1, -1)


@functools.lru_cache(maxsize=4096)
def segments(lengths: tuple[int, ...], order: str, rank: int, world: int) -> tuple[Segment, ...]:
    """Returns the segments that rank ``rank`` of ``world`` holds.

    Args:
        lengths: Tokens of each sequence on one rank, the same number on all; even in zigzag order.
        order: One of :data:`ORDERS`.
    """
    found = []
    row = 0
    for sequence, length in enumerate(lengths):
        chunk = length // 2 if order == "zigzag" else length
        chunks = (rank, 2 * world - 1 - rank) if order == "zigzag" else (rank,)
        for number in chunks:
            found.append(Segment(sequence, number * chunk, chunk, row))
            row += chunk
    return tuple(found)


def piece(
    rows: tuple[int, int, int], keys: tuple[int, int, int], window: tuple[int, int]
) -> Piece | None:
    """Returns the call for some queries and some keys of one sequence; None if it would be empty.

    It is empty if no query sees any key. Rows that see no key and keys that no row sees are cut
    off. What is left has a window that is aligned to its bottom-right corner and not negative, so
    the kernels can take it.

    Args:
        rows: Position of the first query in the sequence, number of queries, index of the first
            query in its tensor.
        keys: The same three numbers for the keys.
        window: (left, right) of positions, -1 for unlimited; causal is a right of 0.
    """
    (q_start, n_q, row), (k_start, n_k, key) = rows, keys
    left, right = window
    shift = q_start - k_start  # query i sees keys i + shift - left ... i + shift + right
    first, last = 0, n_q
    if right >= 0:
        first = max(first, -(shift + right))
    if left >= 0:
        last = min(last, n_k - shift + left)
    if first >= last or n_k == 0:
        return None
    begin = max(0, first + shift - left) if left >= 0 else 0
    end = min(n_k, last + shift + right) if right >= 0 else n_k
    # Relative to the diagonal that ends in the corner of the last row and the last key.
    corner = end - last
    new_left = -1 if left < 0 else corner - shift + left
    new_right = -1 if right < 0 else shift + right - corner
    if new_left >= end - begin - 1:
        new_left = -1
    if right >= 0 and first + shift + right >= end - 1:
        new_right = -1
    causal = (new_left, new_right) == (-1, 0)
    cut = slice(row + first, row + last), slice(key + begin, key + end)
    return Piece(*cut, causal, (-1, -1) if causal else (new_left, new_right))


def _merged(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Joins neighbouring pieces that are full: fewer calls, fewer merges.

    These are neighbouring rows that see all of the same keys, and neighbouring keys of the same
    rows.
    """
    found: list[Piece] = []
    for new in pieces:
        last = found[-1] if found and found[-1].full and new.full else None
        if last and last.keys == new.keys and last.rows.stop == new.rows.start:
            found[-1] = last._replace(rows=slice(last.rows.start, new.rows.stop))
        elif last and last.rows == new.rows and last.keys.stop == new.keys.start:
            found[-1] = last._replace(keys=slice(last.keys.start, new.keys.stop))
        else:
            found.append(new)
    return tuple(found)


class Layout(NamedTuple):
    """How sequences are split, and what a query sees; hashable, so that its pieces can be cached.

    Attributes:
        lengths: Tokens of each sequence on one rank.
        order: One of :data:`ORDERS`.
        world: Number of ranks.
        window: (left, right) of positions in the whole sequence, -1 for unlimited.
    """

    lengths: tuple[int, ...]
    order: str
    world: int
    window: tuple[int, int]

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """Returns the segments that a rank holds."""
        return segments(self.lengths, self.order, rank, self.world)

    def rows(self, number: int) -> slice:
        """Returns the rows of a segment, which are the same in the tensors of all ranks."""
        return self.segments(0)[number].rows

    def own(self, rank: int) -> tuple[Piece, ...]:
        """Returns calls for a rank's queries and its own keys, as rows of its tensors."""
        return _own(self, rank)

    def foreign(self, rank: int, other: int) -> tuple[Piece, ...]:
        """Returns calls for a rank's queries and another rank's keys, as rows of their tensors.

        They read nothing of a segment that :meth:`needs` denies.
        """
        return _foreign(self, rank, other)

    def place(self, x: Segment) -> slice:
        """Returns where a segment's tokens are among those of all ranks, in sequence order."""
        start = sum(self.lengths[: x.sequence]) * self.world + x.start
        return slice(start, start + x.length)

    def gathered(self, rank: int) -> tuple[Piece, ...]:
        """Returns calls for a rank's queries and all keys in the order of the sequences."""
        return _gathered(self, rank)

    def needs(self, rank: int, other: int, number: int) -> bool:
        """Returns whether a rank sees anything of a segment of another rank's keys."""
        return _needs(self, rank, other, number)


@functools.lru_cache(maxsize=4096)
def _own(layout: Layout, rank: int) -> tuple[Piece, ...]:
    left, right = layout.window
    mine = layout.segments(rank)
    if left < 0 and right <= 0:
        # A rank's rows of a sequence are ordered by position, so one mask fits all of them.
        starts: dict[int, int] = {}
        for x in mine:
            starts.setdefault(x.sequence, x.row)
        rows = [
            slice(start, start + layout.lengths[sequence]) for sequence, start in starts.items()
        ]
        return tuple(Piece(x, x, right == 0, (-1, -1)) for x in rows if x.stop > x.start)
    found = [
        piece((q.start, q.length, q.row), (k.start, k.length, k.row), layout.window)
        for k in mine
        for q in mine
        if q.sequence == k.sequence
    ]
    return _merged([x for x in found if x is not None])


def _pairs(layout: Layout, rank: int, k: Segment) -> list[Piece]:
    """Returns calls for a rank's queries and one segment of another rank's keys."""
    chunks = 2 if layout.order == "zigzag" else 1
    queries = layout.segments(rank)[k.sequence * chunks : (k.sequence + 1) * chunks]
    keys = k.start, k.length, k.row
    found = [piece((q.start, q.length, q.row), keys, layout.window) for q in queries]
    return [x for x in found if x is not None]


@functools.lru_cache(maxsize=4096)
def _foreign(layout: Layout, rank: int, other: int) -> tuple[Piece, ...]:
    return _merged([x for k in layout.segments(other) for x in _pairs(layout, rank, k)])


@functools.lru_cache(maxsize=65536)
def _needs(layout: Layout, rank: int, other: int, number: int) -> bool:
    return bool(_pairs(layout, rank, layout.segments(other)[number]))


@functools.lru_cache(maxsize=4096)
def _gathered(layout: Layout, rank: int) -> tuple[Piece, ...]:
    found = []
    for q in layout.segments(rank):
        first = layout.place(q).start - q.start  # first token of the sequence
        keys = 0, layout.lengths[q.sequence] * layout.world, first
        found.append(piece((q.start, q.length, q.row), keys, layout.window))
    return _merged([x for x in found if x is not None])


def zigzag_positions(seqlen: int, rank: int, world_size: int, *, device=None) -> Tensor:
    """Returns positions of a rank's tokens in the sequence, e.g. for rotary embeddings.

    Args:
        seqlen: Tokens of the whole sequence, a multiple of ``2 * world_size``.
        rank: 0 to ``world_size - 1``, in the process group.
        world_size: Ranks in the process group.
        device: Device of the result.

    Returns:
        int64 (seqlen / world_size,).

    Raises:
        TypeError: for an argument that is no int.
        ValueError: for a rank that is not in the group, or a length that cannot be split.
    """
    fn = "zigzag_positions"
    chunk = _chunk(fn, check_length(fn, "seqlen", seqlen), rank, world_size)
    found = [
        torch.arange(number * chunk, (number + 1) * chunk, device=device)
        for number in (rank, 2 * world_size - 1 - rank)
    ]
    return torch.cat(found)


def zigzag_split(
    x: Tensor,
    rank: int,
    world_size: int,
    *,
    dim: int = 1,
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Returns a rank's tokens of whole sequences, in zigzag order.

    Differentiable; does not communicate.

    Args:
        x: Any tensor whose dimension ``dim`` is that of the tokens.
        rank: 0 to ``world_size - 1``, in the process group.
        world_size: Ranks in the process group.
        dim: Which dimension is split.
        cu_seqlens: (b + 1,), of packed sequences: where each starts in ``x``, and where the last
            one ends. None for one sequence, or a batch of one length.

    Returns:
        Like ``x``, contiguous, with 1 / ``world_size`` of its tokens.

    Raises:
        TypeError: for an argument that is no dense tensor, or no int.
        ValueError: for a rank that is not in the group, or a length that is no multiple of
            ``2 * world_size``.
    """
    fn = "zigzag_split"
    check_kind(fn, "x", x)
    _check_dim(fn, "x", x, dim)
    found = []
    for start, length in _sequences(fn, x.shape[dim], cu_seqlens):
        chunk = _chunk(fn, length, rank, world_size)
        for number in (rank, 2 * world_size - 1 - rank):
            found.append(x.narrow(dim, start + number * chunk, chunk))
    return torch.cat(found, dim)


def zigzag_merge(
    parts: Sequence[Tensor],
    *,
    dim: int = 1,
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Merges what all ranks hold into whole sequences: the inverse of :func:`zigzag_split`.

    Args:
        parts: One tensor of each rank, in the order of the ranks, all of one shape.
        dim: Which dimension is that of the tokens.
        cu_seqlens: As in :func:`zigzag_split`, of whole sequences.

    Returns:
        Like one part, contiguous, with the tokens of all.

    Raises:
        TypeError: for an argument that is no dense tensor, or no int, and parts of several dtypes.
        ValueError: for parts that are not of one shape, or a length that cannot be split.
    """
    fn = "zigzag_merge"
    if not isinstance(parts, (Sequence, Tensor)):
        raise TypeError(
            f"{fn}: expected parts to be a sequence of tensors, got parts of type "
            f"{type(parts).__name__}; pass one tensor of each rank"
        )
    for n, x in enumerate(parts):
        check_kind(fn, f"parts[{n}]", x)
    shapes = {tuple(x.shape) for x in parts}
    if len(shapes) != 1:
        raise ValueError(
            f"{fn}: expected parts of one shape, got shapes {sorted(shapes)}; pass one tensor of "
            "each rank"
        )
    if len({x.dtype for x in parts}) != 1:
        raise TypeError(
            f"{fn}: expected parts of one dtype, got {[x.dtype for x in parts]}; cast them"
        )
    _check_dim(fn, "parts", parts[0], dim)
    world_size = len(parts)
    found = []
    for start, length in _sequences(fn, parts[0].shape[dim] * world_size, cu_seqlens):
        chunk = _chunk(fn, length, 0, world_size)
        for number in range(2 * world_size):
            second = number >= world_size
            rank = 2 * world_size - 1 - number if second else number
            found.append(parts[rank].narrow(dim, start // world_size + second * chunk, chunk))
    return torch.cat(found, dim)


def _check_dim(fn: str, name: str, x: Tensor, dim) -> None:
    """Raises an error unless ``dim`` is a dimension of x; a negative one counts from the end."""
    if x.dim() < 1:
        raise ValueError(
            f"{fn}: expected {name} with a dimension, got {name}.shape=(); give it one for tokens"
        )
    if not -x.dim() <= check_int(fn, "dim", dim) < x.dim():
        raise ValueError(
            f"{fn}: expected a dim of {name}, from {-x.dim()} to {x.dim() - 1}, got dim={dim}; "
            "pass that of the tokens"
        )


def read_ends(fn: str, cu_seqlens) -> list[int]:
    """Returns cu_seqlens as Python numbers, of any values from 0 on."""
    if isinstance(cu_seqlens, Tensor):
        check_kind(fn, "cu_seqlens", cu_seqlens)
    try:
        ends = list(cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)
    except (TypeError, NotImplementedError):  # a meta tensor raises the latter
        raise TypeError(
            f"{fn}: expected cu_seqlens to be a sequence of ints or a tensor (b + 1,) with values, "
            f"got cu_seqlens of type {type(cu_seqlens).__name__}; pass [0, len_0, len_0 + len_1]"
        ) from None
    return [check_length(fn, f"cu_seqlens[{n}]", end) for n, end in enumerate(ends)]


def _sequences(fn: str, total: int, cu_seqlens) -> list[tuple[int, int]]:
    """Returns (start, length) of each sequence."""
    if cu_seqlens is None:
        return [(0, total)]
    ends = read_ends(fn, cu_seqlens)
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != total or ends != sorted(ends):
        raise ValueError(
            f"{fn}: expected cu_seqlens to rise from 0 to the number of tokens, {total}, got "
            f"cu_seqlens={ends}; pass the running sum of the lengths of whole sequences"
        )
    return [(a, b - a) for a, b in itertools.pairwise(ends)]


def _chunk(fn: str, length: int, rank: int, world_size: int) -> int:
    if not 0 <= check_int(fn, "rank", rank) < check_int(fn, "world_size", world_size):
        raise ValueError(
            f"{fn}: expected 0 <= rank < world_size, got rank={rank} and world_size={world_size}; "
            "pass torch.distributed.get_rank(group) and get_world_size(group)"
        )
    if length % (2 * world_size):
        raise ValueError(
            f"{fn}: expected a length that is a multiple of 2 * world_size = {2 * world_size}, got "
            f"{length}; pad the sequence"
        )
    return length // (2 * world_size)
