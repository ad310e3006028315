"""The checks of what only the varlen functions take: packed tokens, and the lengths in them.

Messages follow the rules of :mod:`flashcute.checks`. Shapes, dtypes and devices are checked on
every device; the values of lengths only on the CPU, where they can be read without waiting for a
device.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import (
    PAD_HEAD_DIM,
    at_most,
    check_kind,
    check_length,
    check_rank,
    raise_mismatch,
    raise_values,
)

INDEX_DTYPES = (torch.int32, torch.int64)


class Names(NamedTuple):
    """The function that was called, and what its arguments are called there."""

    fn: str
    q: str = "q"
    k: str = "k"
    v: str = "v"
    cu_seqlens_q: str = "cu_seqlens_q"
    cu_seqlens_k: str = "cu_seqlens_k"
    max_seqlen_q: str = "max_seqlen_q"
    max_seqlen_k: str = "max_seqlen_k"


class Lengths(NamedTuple):
    """Where the sequences are, read from the tensors: one number per sequence in each list.

    Attributes:
        start_q: First row of the sequence in q.
        used_q: Rows that are computed, from the first one on.
        start_k: First row in k and v.
        used_k: Keys that are seen at most.
    """

    start_q: list[int]
    used_q: list[int]
    start_k: list[int]
    used_k: list[int]


def check_packed_tokens(names: Names, q, k, v) -> int:
    """Checks what holds for q, k and v (total, heads, head_dim) on every device.

    Returns:
        The head dimension.
    """
    fn, shape = names.fn, "(total, heads, head_dim)"
    for name, tensor in ((names.q, q), (names.k, k), (names.v, v)):
        check_kind(fn, name, tensor)
        check_rank(fn, name, tensor, shape)
    _, h, d = q.shape
    _, h_k, d_k = k.shape
    if d_k != d:
        raise ValueError(
            f"{fn}: expected {names.k} of {names.q}'s head_dim {d}, "
            f"got {names.k}.shape={tuple(k.shape)}; {PAD_HEAD_DIM}"
        )
    if v.shape != k.shape:
        raise_values(fn, names.k, names.v, k, v)
    if h < 1 or h_k < 1 or h % h_k:
        raise ValueError(
            f"{fn}: expected the heads of {names.q} to be a positive multiple of those of "
            f"{names.k}, got {names.q}.shape={tuple(q.shape)} and {names.k}.shape={tuple(k.shape)}"
            "; repeat or drop heads"
        )
    if d < 1:
        raise ValueError(
            f"{fn}: expected head_dim >= 1, got {names.q}.shape={tuple(q.shape)}; "
            "a score needs at least one element"
        )
    if any(x.dtype != q.dtype or x.device != q.device for x in (k, v)):
        raise_mismatch(fn, (names.q, names.k, names.v), q, k, v)
    return d


def check_packed_together(fn: str, name: str, packed, count: int) -> None:
    """Checks for a dense tensor of shape (total, count, heads, head_dim)."""
    check_kind(fn, name, packed)
    if packed.dim() != 4 or packed.shape[1] != count:
        raise ValueError(
            f"{fn}: expected {name} of shape (total, {count}, heads, head_dim), "
            f"got {name}.shape={tuple(packed.shape)}; stack the tensors with torch.stack(dim=1)"
        )


def check_lengths(names: Names, q: Tensor, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k) -> int:
    """Checks kind, shape, dtype and device of the tensors of lengths, but not their values.

    Returns:
        The number of sequences.
    """
    fn = names.fn
    for name, cu_seqlens in (
        (names.cu_seqlens_q, cu_seqlens_q),
        (names.cu_seqlens_k, cu_seqlens_k),
    ):
        check_cu_seqlens(fn, name, cu_seqlens)
        _check_on(fn, name, cu_seqlens, names.q, q)
    b = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k.shape[0] - 1 != b:
        raise ValueError(
            f"{fn}: expected {names.cu_seqlens_k} of {names.cu_seqlens_q}'s shape ({b + 1},), "
            f"got {names.cu_seqlens_k}.shape={tuple(cu_seqlens_k.shape)}; "
            "give each sequence of queries its keys, if none"
        )
    for name, seqused in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if seqused is None:
            continue
        check_kind(fn, name, seqused)
        if seqused.dtype != torch.int32:
            raise TypeError(
                f"{fn}: expected {name} of dtype torch.int32, got {name}.dtype={seqused.dtype}; "
                "cast it with .int()"
            )
        if seqused.shape != (b,):
            raise ValueError(
                f"{fn}: expected {name} of shape ({b},), got {name}.shape={tuple(seqused.shape)}; "
                "pass one length per sequence"
            )
        _check_on(fn, name, seqused, names.q, q)
    return b


def check_cu_seqlens(fn: str, name: str, cu_seqlens) -> None:
    """Checks for a dense tensor of integers, (b + 1,)."""
    check_kind(fn, name, cu_seqlens)
    if cu_seqlens.dtype not in INDEX_DTYPES:
        raise TypeError(
            f"{fn}: expected {name} of dtype torch.int32 or torch.int64, "
            f"got {name}.dtype={cu_seqlens.dtype}; cast it with .int()"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(
            f"{fn}: expected {name} of shape (b + 1,), got {name}.shape="
            f"{tuple(cu_seqlens.shape)}; pass where each of b sequences starts, and the end"
        )


def _check_on(fn: str, name: str, tensor: Tensor, q_name: str, q: Tensor) -> None:
    if tensor.device != q.device:
        raise ValueError(
            f"{fn}: expected {name} on {q.device} as {q_name}, "
            f"got {name}.device={tensor.device}; move it with .to({str(q.device)!r})"
        )


def check_bounds(names: Names, max_seqlen_q, max_seqlen_k) -> tuple[int, int]:
    """Returns max_seqlen_q and max_seqlen_k as two ints from 0 on; tensors are read back."""
    # A traced call does not check the range, and operators take 64 bits.
    q, k = (
        at_most(check_length(names.fn, name, _read(value)), 2**63 - 1)
        for name, value in ((names.max_seqlen_q, max_seqlen_q), (names.max_seqlen_k, max_seqlen_k))
    )
    return q, k


def _read(value):
    """Returns a one-element integer tensor as an int: flash_attn takes it, as transformers passes
    it; returns any other value as it is."""
    is_number = isinstance(value, Tensor) and value.dtype in INDEX_DTYPES and value.numel() == 1
    return int(value) if is_number and not value.is_meta else value


def read_lengths(
    names: Names,
    totals: tuple[int, int],
    cu_seqlens: tuple[Tensor, Tensor],
    seqused: tuple[Tensor | None, Tensor | None],
    bounds: tuple[int, int],
) -> Lengths:
    """Returns the lengths of CPU tensors after checking that they describe sequences in the tokens.

    Args:
        names: For messages.
        totals: Rows of q and of k.
        cu_seqlens: cu_seqlens_q and cu_seqlens_k.
        seqused: seqused_q and seqused_k.
        bounds: max_seqlen_q and max_seqlen_k.

    Raises:
        ValueError: for lengths that are out of order or out of range.
    """
    sides = (
        (names.q, names.cu_seqlens_q, "seqused_q", names.max_seqlen_q),
        (names.k, names.cu_seqlens_k, "seqused_k", names.max_seqlen_k),
    )
    found = []
    for side, total, starts, used, bound in zip(
        sides, totals, cu_seqlens, seqused, bounds, strict=True
    ):
        used_list = None if used is None else used.tolist()
        found += _read_side(names.fn, side, total, starts.tolist(), used_list, bound)
    return Lengths(*found)


def read_lengths_in_pages(
    names: Names,
    total_q: int,
    cu_seqlens: tuple[Tensor, Tensor],
    seqused: tuple[Tensor | None, Tensor | None],
    bounds: tuple[int, int],
    capacity: int,
) -> Lengths:
    """Does :func:`read_lengths` for keys in pages, with room for ``capacity`` of each sequence.

    The numbers of keys are seqused_k, or without it the differences of cu_seqlens_k.
    """
    queries = _read_side(
        names.fn,
        (names.q, names.cu_seqlens_q, "seqused_q", names.max_seqlen_q),
        total_q,
        cu_seqlens[0].tolist(),
        None if seqused[0] is None else seqused[0].tolist(),
        bounds[0],
    )
    if seqused[1] is None:
        name, starts = names.cu_seqlens_k, cu_seqlens[1].tolist()
        check_starts(names.fn, name, starts)
        lengths = [end - start for start, end in itertools.pairwise(starts)]
    else:
        name, lengths = "seqused_k", seqused[1].tolist()
    for i, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise ValueError(
                f"{names.fn}: expected 0 to {capacity} keys of sequence {i}, which the pages of "
                f"its row of block_table have room for, got {length} by {name}; pass more pages"
            )
        if length > bounds[1]:
            raise ValueError(
                f"{names.fn}: expected {names.max_seqlen_k} >= {length}, the length of sequence "
                f"{i}, got {names.max_seqlen_k}={bounds[1]}; pass {name}'s longest or more"
            )
    return Lengths(*queries, [0] * len(lengths), lengths)


def check_starts(
    fn: str, name: str, starts: list[int], total: int | None = None, tokens: str = ""
) -> None:
    """Checks that cumulative lengths begin at 0, never decrease, and end within ``total`` rows."""
    if starts[0] != 0:
        raise ValueError(
            f"{fn}: expected {name} to start at 0, got {name}[0]={starts[0]}; "
            "pass cumulative lengths, [0, len_0, len_0 + len_1, ...]"
        )
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        if end < start:
            raise ValueError(
                f"{fn}: expected {name} to be non-decreasing, got {name}[{i}:{i + 2}]="
                f"{starts[i : i + 2]}; pass cumulative lengths, not the lengths themselves"
            )
    if total is not None and starts[-1] > total:
        raise ValueError(
            f"{fn}: expected {name}[-1] <= {total}, the rows of {tokens}, "
            f"got {name}[-1]={starts[-1]}; pass all tokens, or clamp it"
        )


def _read_side(
    fn: str, names: tuple[str, ...], total: int, starts: list[int], used: list[int] | None, bound
) -> tuple[list[int], list[int]]:
    token_name, name, used_name, bound_name = names
    check_starts(fn, name, starts, total, token_name)
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    computed = lengths if used is None else used
    for i, (length, count) in enumerate(zip(lengths, computed, strict=True)):
        if not 0 <= count <= length:
            raise ValueError(
                f"{fn}: expected 0 <= {used_name}[{i}] <= {length}, the length of that sequence, "
                f"got {used_name}[{i}]={count}; clamp it"
            )
        if count > bound:
            raise ValueError(
                f"{fn}: expected {bound_name} >= {count}, the length of sequence {i}, "
                f"got {bound_name}={bound}; pass {name}.diff().max().item() or more"
            )
    return starts[:-1], computed
