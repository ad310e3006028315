"""Conversions between padded batches and packed tokens, with flash-attn 2.8's names and results.

A padded batch is (batch, seqlen, ...) with a mask (batch, seqlen); packed tokens are
(total, ...), as the varlen functions take them. Every function works on any device, is
differentiable, and leaves dimensions after the first ones as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_kind, check_length
from .cpu_operator import is_traced


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Returns ``input[indices]``, the rows that ``indices`` names.

    Args:
        input: (n, ...), any dtype.
        indices: (m,), int32 or int64, each in [0, n); it may repeat.

    Returns:
        (m, ...).

    Raises:
        TypeError: for an argument that is no dense tensor, and for indices of another dtype.
        ValueError: for a wrong shape or device, and for CPU indices that are out of range.
    """
    fn = "index_first_axis"
    _check_rows(fn, "input", input, indices)
    _check_places(fn, indices, input.shape[0], "the rows of input")
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Returns zeros with ``values`` in the rows of ``indices``: inverts :func:`index_first_axis`.

    Args:
        values: (m, ...), any dtype.
        indices: (m,), int32 or int64, each in [0, first_axis_dim), no two the same.
        first_axis_dim: Rows of the result.

    Returns:
        (first_axis_dim, ...).

    Raises:
        TypeError, ValueError: as :func:`index_first_axis`; also if there is not one row of values
            for each index.
    """
    fn = "index_put_first_axis"
    rows = check_length(fn, "first_axis_dim", first_axis_dim)
    return _put(fn, "values", values, indices, rows)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Returns the tokens that a mask selects, one sequence after the other.

    The longest length is read back from the device, for which the host waits on CUDA.

    Args:
        hidden_states: (batch, seqlen, ...), any dtype.
        attention_mask: (batch, seqlen), bool or int, 1 for a token and 0 for padding.
        unused_mask: (batch, seqlen), bool or int, 1 for a place that holds no token but is kept, at
            the end of its sequence; None for none.

    Returns:
        ``hidden_states`` (total, ...): tokens that either mask selects; ``indices`` (total,),
        int64: their places among the batch * seqlen; ``cu_seqlens`` (batch + 1,), int32: where
        each sequence starts; ``max_seqlen_in_batch``: an int; ``seqused`` (batch,), int32: the
        tokens of each sequence that ``attention_mask`` selects.

    Raises:
        TypeError: for an argument that is no dense tensor, and for masks of floating point.
        ValueError: for a wrong shape or device.
    """
    fn = "unpad_input"
    _check_mask(fn, "attention_mask", attention_mask, hidden_states)
    kept = attention_mask != 0
    seqused = kept.sum(-1, dtype=torch.int32)
    if unused_mask is not None:
        _check_mask(fn, "unused_mask", unused_mask, hidden_states)
        kept = kept | (unused_mask != 0)
    indices = kept.flatten().nonzero().squeeze(-1)
    cu_seqlens, longest = _packed_lengths(kept.sum(-1, dtype=torch.int32))
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, cu_seqlens, longest, seqused


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Does :func:`unpad_input` for rows that hold several sequences each, one after the other.

    Args:
        hidden_states: (batch, seqlen, ...), any dtype.
        attention_mask_in_length: (batch, seqlen), int: the lengths of a row's sequences, and zeros.
            ``[[2, 3, 0, 0, 0, 0]]`` is one row of 6 places: a sequence of 2 tokens, one of 3, and a
            place of padding.

    Returns:
        ``hidden_states`` (total, ...), ``indices`` (total,), int64, ``cu_seqlens``
        (sequences + 1,), int32, and ``max_seqlen_in_batch``, an int, as :func:`unpad_input`.

    Raises:
        TypeError: as :func:`unpad_input`, and for a mask of bool.
        ValueError: as :func:`unpad_input`, and for lengths of CPU tensors that are negative or
            add up to more than a row has places.
    """
    fn, name = "unpad_input_for_concatenated_sequences", "attention_mask_in_length"
    _check_mask(fn, name, attention_mask_in_length, hidden_states)
    if attention_mask_in_length.dtype == torch.bool:
        raise TypeError(
            f"{fn}: expected {name} of int, got {name}.dtype=torch.bool; pass the lengths of each "
            "row's sequences, or a mask to unpad_input"
        )
    tokens = attention_mask_in_length.sum(-1)  # tokens of each row
    _check_rows_of_lengths(fn, name, attention_mask_in_length, tokens)
    places = torch.arange(attention_mask_in_length.shape[1], device=tokens.device)
    indices = (places < tokens[:, None]).flatten().nonzero().squeeze(-1)
    lengths = attention_mask_in_length.flatten()
    cu_seqlens, longest = _packed_lengths(lengths[lengths != 0])
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Puts packed tokens back into a padded batch: the inverse of :func:`unpad_input`.

    Args:
        hidden_states: (total, ...), any dtype.
        indices: (total,), what :func:`unpad_input` returned.
        batch: Rows of the result.
        seqlen: Places of each row.

    Returns:
        (batch, seqlen, ...), zeros where there is no token.

    Raises:
        TypeError, ValueError: as :func:`index_put_first_axis`.
    """
    fn = "pad_input"
    batch, seqlen = check_length(fn, "batch", batch), check_length(fn, "seqlen", seqlen)
    if batch * seqlen >= 2**63:
        raise ValueError(
            f"{fn}: expected batch * seqlen < 2**63, got {batch * seqlen}; pass a tensor's sizes"
        )
    rows = _put(fn, "hidden_states", hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))


def _put(fn: str, name: str, values: Tensor, indices: Tensor, rows: int) -> Tensor:
    _check_rows(fn, name, values, indices)
    if values.shape[0] != indices.shape[0]:
        raise ValueError(
            f"{fn}: expected one row of {name} for each of the {indices.shape[0]} indices, "
            f"got {name}.shape={tuple(values.shape)}; pass the rows that belong to them"
        )
    _check_places(fn, indices, rows, "the rows of the result")
    return values.new_zeros((rows, *values.shape[1:])).index_copy(0, indices.long(), values)


def _packed_lengths(lengths: Tensor) -> tuple[Tensor, int]:
    """Returns the cumulative lengths from 0 on, int32, and the longest length."""
    ends = lengths.cumsum(0, dtype=torch.int32)
    longest = int(lengths.max()) if lengths.numel() else 0
    return torch.nn.functional.pad(ends, (1, 0)), longest


def _check_rows(fn: str, name: str, x: Tensor, indices: Tensor) -> None:
    check_kind(fn, name, x)
    check_kind(fn, "indices", indices)
    if x.dim() < 1:
        raise ValueError(
            f"{fn}: expected {name} of shape (rows, ...), got {name}.shape={tuple(x.shape)}; "
            "give it a first dimension"
        )
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{fn}: expected indices of dtype torch.int32 or torch.int64, "
            f"got indices.dtype={indices.dtype}; take those of a mask with .nonzero()"
        )
    if indices.dim() != 1:
        raise ValueError(
            f"{fn}: expected indices of shape (rows,), got indices.shape={tuple(indices.shape)}; "
            "flatten them"
        )
    if indices.device != x.device:
        raise ValueError(
            f"{fn}: expected indices on {x.device} as {name}, "
            f"got indices.device={indices.device}; move them there"
        )


def _can_be_read(x: Tensor) -> bool:
    """Returns whether values can be read: on the CPU, with nothing that traces or transforms."""
    return x.is_cpu and not (is_traced(x) or torch._C._are_functorch_transforms_active())


def _check_places(fn: str, indices: Tensor, rows: int, what: str) -> None:
    if not _can_be_read(indices) or not indices.numel():
        return
    least, most = (int(x) for x in indices.aminmax())
    if least < 0 or most >= rows:
        raise ValueError(
            f"{fn}: expected 0 <= indices < {rows}, {what}, got "
            f"{f'a least of {least}' if least < 0 else f'a largest of {most}'}; pass those of the "
            "same padded batch"
        )


def _check_rows_of_lengths(fn: str, name: str, lengths: Tensor, tokens: Tensor) -> None:
    if not _can_be_read(lengths) or not lengths.numel():
        return
    if int(lengths.min()) < 0:
        raise ValueError(
            f"{fn}: expected {name} of lengths from 0 on, got a least of {int(lengths.min())}; "
            "pass 0 where there is no sequence"
        )
    row = int(tokens.argmax())
    if int(tokens[row]) > lengths.shape[1]:
        raise ValueError(
            f"{fn}: expected at most {lengths.shape[1]} tokens in a row of {name}, got "
            f"{int(tokens[row])} in row {row}; pass the lengths of the sequences that are there"
        )


def _check_mask(fn: str, name: str, mask: Tensor, hidden_states: Tensor) -> None:
    check_kind(fn, "hidden_states", hidden_states)
    check_kind(fn, name, mask)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"{fn}: expected {name} of bool or int, got {name}.dtype={mask.dtype}; "
            "compare it with 0"
        )
    if hidden_states.dim() < 2 or mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"{fn}: expected {name} of shape (batch, seqlen) and hidden_states of (batch, seqlen, "
            f"...), got {name}.shape={tuple(mask.shape)} and "
            f"hidden_states.shape={tuple(hidden_states.shape)}; pass one number per token"
        )
    if mask.device != hidden_states.device:
        raise ValueError(
            f"{fn}: expected {name} on {hidden_states.device} as hidden_states, "
            f"got {name}.device={mask.device}; move it there"
        )
