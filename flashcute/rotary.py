"""Rotary position embedding in plain PyTorch, with the arguments of flash_attn.layers.rotary.

It defines what :func:`flashcute.flash_attn_with_kvcache` does to queries and new keys. Elements are
taken in pairs: neighbours if interleaved (GPT-J's style), else element i and i + rotary_dim / 2
(GPT-NeoX's style). A pair (x, y) at a position becomes (x cos - y sin, y cos + x sin), with cos and
sin from that row of the tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_flag, check_kind, check_length, check_rank
from .checks_varlen import check_starts
from .cpu_operator import is_traced
from .features import CPU_DTYPES

_INDEX_DTYPES = (torch.int32, torch.int64)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    *,
    conjugate: bool = False,
) -> Tensor:
    """Returns x with its first rotary_dim elements rotated by position, and the others unchanged.

    Computed in float32, or in float64 for float64 inputs, and rounded once. Runs on every device
    and is differentiable, also with respect to the tables.

    Args:
        x: (b, seqlen, h, head_dim), or with cu_seqlens (total, h, head_dim); float16, bfloat16,
            float32 or float64.
        cos: (seqlen_ro, rotary_dim / 2), float32 or of x's dtype, on x's device; rotary_dim is at
            most head_dim.
        sin: As cos.
        interleaved: Whether pairs are neighbours.
        inplace: Write the result into x and return x.
        seqlen_offsets: The position of each sequence's first token, one for all or int32 or int64
            (b,).
        cu_seqlens: int32 or int64 (b + 1,): where sequences that are packed into x start and end,
            as in :func:`flashcute.flash_attn_varlen_func`. Tokens of no sequence stay as they are.
        max_seqlen: The longest sequence or more; it changes nothing here.
        conjugate: Rotate the other way, which undoes a rotation and is its gradient.

    Returns:
        A new tensor like x, contiguous; or x, if ``inplace``.

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape or device, for cu_seqlens that are out of order or range, and
            for positions beyond the tables. Where values cannot be read, on CUDA and in traced
            calls, tokens at such positions stay as they are.
    """
    fn = "apply_rotary_emb"
    interleaved = check_flag(fn, "interleaved", interleaved)
    inplace = check_flag(fn, "inplace", inplace)
    conjugate = check_flag(fn, "conjugate", conjugate)
    packed = cu_seqlens is not None
    check_kind(fn, "x", x)
    check_rank(
        fn, "x", x, "(total, heads, head_dim)" if packed else "(batch, seqlen, heads, head_dim)"
    )
    if x.dtype not in CPU_DTYPES:
        raise TypeError(
            f"{fn}: expected x.dtype {', '.join(map(str, CPU_DTYPES))}, got x.dtype={x.dtype}; "
            "cast it"
        )
    check_tables(fn, ("x", "cos", "sin"), x, cos, sin, (torch.float32, x.dtype))
    if max_seqlen is not None:
        check_length(fn, "max_seqlen", max_seqlen)
    if packed:
        _check_index(fn, "cu_seqlens", cu_seqlens, "(b + 1,)", None, x)
        if cu_seqlens.shape[0] < 1:
            raise ValueError(
                f"{fn}: expected cu_seqlens of shape (b + 1,), got cu_seqlens.shape=(0,); "
                "pass where each of b sequences starts, and the end"
            )
    b = cu_seqlens.shape[0] - 1 if packed else x.shape[0]
    if isinstance(seqlen_offsets, Tensor):
        _check_index(fn, "seqlen_offsets", seqlen_offsets, f"({b},)", b, x)
    else:
        seqlen_offsets = check_length(fn, "seqlen_offsets", seqlen_offsets)
    positions = _positions(x, b, seqlen_offsets, cu_seqlens)
    # Values are checked only where they can be read without waiting for a device.
    if x.is_cpu and not (is_traced(x) or torch._C._are_functorch_transforms_active()):
        if packed:
            check_starts(fn, "cu_seqlens", cu_seqlens.tolist(), x.shape[0], "x")
        _check_positions(fn, positions, seqlen_offsets, cos)
    out = rotated(x, *table_rows(cos, sin, positions), interleaved, conjugate)
    return x.copy_(out) if inplace else out


def rotated(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, conjugate: bool = False
) -> Tensor:
    """Rotates x (..., seqlen, heads, head_dim) by cos and sin (..., seqlen, rotary_dim / 2)."""
    n = cos.shape[-1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table.to(dtype).unsqueeze(-2) for table in (cos, -sin if conjugate else sin))
    turned = x[..., : 2 * n].to(dtype)
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned[..., :n], turned[..., n:]
    parts = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * n :]), -1)


def table_rows(cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both tables' rows at ``positions``; outside of the tables those of no rotation."""
    if cos.shape[0] == 0:  # an empty table has no row to which positions could be clamped
        cos, sin = (torch.nn.functional.pad(table, (0, 0, 0, 1)) for table in (cos, sin))
        positions = torch.full_like(positions, -1)
    rows = positions.clamp(0, cos.shape[0] - 1)
    inside = (positions == rows)[..., None]
    return torch.where(inside, cos[rows], 1), torch.where(inside, sin[rows], 0)


def check_tables(
    fn: str,
    names: tuple[str, str, str],
    x: Tensor,
    cos,
    sin,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Checks two tables (seqlen_ro, rotary_dim / 2) for x (..., head_dim); names of x, cos, sin."""
    x_name, *table_names = names
    d = x.shape[-1]
    for name, table in zip(table_names, (cos, sin), strict=True):
        check_kind(fn, name, table)
        check_rank(fn, name, table, "(seqlen_ro, rotary_dim / 2)")
        if not 1 <= table.shape[1] <= d // 2:
            raise ValueError(
                f"{fn}: expected {name} of shape (seqlen_ro, rotary_dim / 2) with 2 <= rotary_dim "
                f"<= {d}, the head_dim of {x_name}, got {name}.shape={tuple(table.shape)}; pass a "
                "column for each pair of elements"
            )
        if table.dtype not in dtypes:
            expected = " or ".join(dict.fromkeys(map(str, dtypes)))
            raise TypeError(
                f"{fn}: expected {name} of dtype {expected}, got {name}.dtype={table.dtype}; "
                f"cast it with .to({dtypes[-1]})"
            )
        if table.device != x.device:
            raise ValueError(
                f"{fn}: expected {name} on {x.device} as {x_name}, "
                f"got {name}.device={table.device}; move it with .to({str(x.device)!r})"
            )
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(
            f"{fn}: expected {names[2]} of {names[1]}'s shape {tuple(cos.shape)} and {cos.dtype}, "
            f"got {names[2]}.shape={tuple(sin.shape)} and {sin.dtype}; compute both for the same "
            "positions"
        )


def _check_index(fn: str, name: str, index, shape: str, n: int | None, x: Tensor) -> None:
    check_kind(fn, name, index)
    if index.dtype not in _INDEX_DTYPES:
        raise TypeError(
            f"{fn}: expected {name} of dtype torch.int32 or torch.int64, "
            f"got {name}.dtype={index.dtype}; cast it with .int()"
        )
    if index.dim() != 1 or (n is not None and index.shape[0] != n):
        raise ValueError(
            f"{fn}: expected {name} of shape {shape}, got {name}.shape={tuple(index.shape)}; "
            "pass one number per sequence"
        )
    if index.device != x.device:
        raise ValueError(
            f"{fn}: expected {name} on {x.device} as x, got {name}.device={index.device}; "
            f"move it with .to({str(x.device)!r})"
        )


def _check_positions(fn: str, positions: Tensor, offsets: int | Tensor, cos: Tensor) -> None:
    if isinstance(offsets, Tensor) and bool((offsets < 0).any()):
        raise ValueError(
            f"{fn}: expected seqlen_offsets from 0 on, got a least of {int(offsets.min())}; "
            "pass the number of tokens before each sequence's first"
        )
    last = int(positions.max()) if positions.numel() else -1
    if last >= cos.shape[0]:
        raise ValueError(
            f"{fn}: expected cos of at least {last + 1} rows, one for each position, "
            f"got cos.shape={tuple(cos.shape)}; compute the tables for more positions"
        )


def _positions(x: Tensor, b: int, offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns the position of each token, (b, seqlen) or (total,); -1 for one in no sequence."""
    token = torch.arange(x.shape[1 if cu_seqlens is None else 0], device=x.device)
    if not isinstance(offsets, Tensor):
        offsets = torch.full((b,), offsets, dtype=torch.int64, device=x.device)
    if cu_seqlens is None:
        return token + offsets[:, None]
    if b == 0:
        return torch.full_like(token, -1)
    after = torch.searchsorted(cu_seqlens[1:].contiguous(), token.to(cu_seqlens.dtype), right=True)
    sequence = after.clamp(max=b - 1)
    return torch.where(after < b, token - cu_seqlens[sequence] + offsets[sequence], -1)
