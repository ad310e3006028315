"""transformers' masks as what the kernels take: a window, packed tokens, fewer keys.

transformers describes a mask by a function of positions and a padding mask. :func:`recognise` reads
the functions that ``transformers.masking_utils`` builds, and :func:`plan` turns the mask of one
forward pass into a :class:`Plan`. What is not recognised stays a dense mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import masking_utils

_UNLIMITED = (-1, -1)


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Which keys a query sees, by their positions and by the sequences that they belong to.

    Attributes:
        causal: Whether a query sees no key after it.
        window: Keys to the left and to the right, -1 for unlimited, as flash_attn counts.
        packed: (batch, length), the number of each token's sequence in its row; None for one
            sequence.
        chunk: Keys that are seen together, counted from the first one on; None for all. The
            kernels express keys that end in the first chunk.
    """

    causal: bool = False
    window: tuple[int, int] = _UNLIMITED
    packed: Tensor | None = None
    chunk: int | None = None

    def joined(self, other: Pattern) -> Pattern | None:
        """Returns what both show; None where two windows, packings or chunks would be merged."""
        if self.window != _UNLIMITED != other.window or None not in (self.packed, other.packed):
            return None
        if None not in (self.chunk, other.chunk):
            return None
        window = other.window if self.window == _UNLIMITED else self.window
        packed = other.packed if self.packed is None else self.packed
        chunk = other.chunk if self.chunk is None else self.chunk
        return Pattern(self.causal or other.causal, window, packed, chunk)


def recognise(function: Callable) -> Pattern | None:
    """Returns the pattern of a mask function of ``transformers.masking_utils``, or None."""
    if function is masking_utils.causal_mask_function:
        return Pattern(causal=True)
    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        return Pattern()
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    maker = function.__qualname__.partition(".")[0]
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    held = dict(zip(function.__code__.co_freevars, cells, strict=True))
    if maker == "and_masks":
        found: Pattern | None = Pattern()
        for part in held["mask_functions"]:
            pattern = recognise(part)
            found = None if found is None or pattern is None else found.joined(pattern)
        return found
    if maker == "sliding_window_overlay":
        return Pattern(window=(held["sliding_window"] - 1, -1))
    if maker == "sliding_window_bidirectional_overlay":
        return Pattern(window=(held["sliding_window"],) * 2)
    if maker == "packed_sequence_mask_function":
        return Pattern(packed=held["packed_sequence_mask"])
    if maker == "chunked_overlay":
        # Counted from behind padding, which plan() refuses with chunks.
        return Pattern(chunk=held["chunk_size"])
    if maker == "remap_positions_for_packed_sequence":
        found = recognise(held["mask_function"])  # distances within a sequence stay the same
        # Chunks begin at fixed positions, but the remapped ones may be any.
        return None if found is None or found.chunk is not None else found
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the kernels compute under a mask.

    Attributes:
        causal, window: Arguments of flash_attn's functions.
        keys: How many keys are taken, from the first one on.
        lengths: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k of packed tokens; None
            for a dense call.
        used: seqused_q and seqused_k of sequences that are read where they are, among their rows'
            padding; None for all queries or keys.
        query_rows, key_rows: int64, which of batch * q_length queries and batch * ``keys`` keys are
            packed; None for all. Other queries have output 0.
    """

    causal: bool
    window: tuple[int, int]
    keys: int
    lengths: tuple[Tensor, Tensor, int, int] | None = None
    used: tuple[Tensor | None, Tensor | None] = (None, None)
    query_rows: Tensor | None = None
    key_rows: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return self.lengths is None and self.window == _UNLIMITED

    @property
    def has_padding(self) -> bool:
        return any(x is not None for x in (*self.used, self.query_rows, self.key_rows))


def plan(
    pattern: Pattern, q_length: int, kv_length: int, offset: int, padding: Tensor | None
) -> Plan | None:
    """Returns the plan of a mask, or None where the kernels cannot express it.

    The padding mask, or the numbers of packed sequences, are read back from the device once: on
    CUDA the host waits for them. What follows from them is computed on the host, without a kernel.

    Args:
        pattern: What :func:`recognise` found.
        q_length, kv_length: Sizes of the mask.
        offset: Position of the first query, counted from the first key.
        padding: ``(batch, kv_length)`` bool, False at padding; None for none.
    """
    causal, window = pattern.causal, pattern.window
    end = offset + q_length  # the keys up to the last query
    places_count = causal or window != _UNLIMITED
    if places_count and (end > kv_length or offset < 0 or (end < kv_length and not causal)):
        return None
    keys = end if causal else kv_length
    left, right = (-1 if side >= max(q_length, keys) else side for side in window)
    window = left, right
    if pattern.packed is not None:
        if padding is not None or q_length != kv_length or offset:
            return None
        ends = _ends_of_sequences(pattern.packed.numpy(force=True))
        longest = int(np.diff(ends).max())
        ends = _on(pattern.packed.device, ends)
        return Plan(causal, window, keys, (ends, ends, longest, longest))
    if padding is None:
        return Plan(causal, window, keys)
    kept = padding.numpy(force=True)[:, :keys]  # (batch, keys)
    if kept.all():
        return Plan(causal, window, keys)
    if pattern.chunk is not None:
        return None
    tokens = kept.sum(1)  # (batch,)
    rises = kept[:, 1:] > kept[:, :-1]  # (batch, keys - 1), where padding ends
    first = kept.argmax(1) if rises.any() else None  # (batch,), 0 where there is no token
    runs = 0 if first is None else np.count_nonzero(rises) + np.count_nonzero(kept[:, 0])
    if first is None or runs == np.count_nonzero(tokens):  # no padding between a row's tokens
        queries = q_length, offset if places_count else None
        lengths, used = _in_place(first, tokens, queries, kv_length, padding.device)
        return Plan(causal, window, kv_length, lengths, used)
    if window != _UNLIMITED:
        return None
    device = padding.device
    ends_k, longest_k, key_rows = _packed(kept, device)
    if not places_count:
        # All queries stay: it is not known here whether they are of the same sequence as the keys.
        ends_q = np.arange(len(kept) + 1, dtype=np.int32) * np.int32(q_length)
        ends = _on(device, ends_q), ends_k, q_length, longest_k
        return Plan(causal, window, keys, ends, key_rows=key_rows)
    ends_q, longest_q, query_rows = _packed(kept[:, offset:], device)
    ends = ends_q, ends_k, longest_q, longest_k
    return Plan(causal, window, keys, ends, query_rows=query_rows, key_rows=key_rows)


def bounds_of_token(
    pattern: Pattern, batch: int, kv_length: int, offset: int, padding: Tensor | None, device
) -> Tensor | None:
    """Returns the keys that one token after a static cache sees; None if padding is between them.

    The result is a plain tensor, as generate() compiles the code that takes it, and has a shape and
    dtype that no model takes for a mask: int32 (batch, 1, 1, 2), the first key of each row and the
    one behind its last. The padding mask is read back once, as in :func:`plan`.

    Args:
        pattern, kv_length, offset, padding: As in :func:`plan`, of one query.
        batch: How many rows there are.
        device: Where the kernels read the result.
    """
    end = offset + 1
    if not pattern.causal or pattern.packed is not None or not 0 < end <= kv_length:
        return None
    start = max(end - 1 - pattern.window[0], 0) if pattern.window[0] >= 0 else 0
    bounds = np.full((batch, 2), (start, end), np.int32)
    if padding is not None:
        kept = padding.numpy(force=True)[:, start:end]  # (batch, end - start)
        tokens = kept.sum(1)  # (batch,)
        bounds[:, 0] += kept.argmax(1)
        behind = end - kept[:, ::-1].argmax(1)
        bounds[:, 1] = np.where(tokens, behind, bounds[:, 0])
        if (bounds[:, 1] - bounds[:, 0] != tokens).any():
            return None
        if pattern.chunk is not None and not kept.all():
            return None
    return _on(device, bounds)[:, None, None]


def mask_of_bounds(bounds: Tensor, kv_length: int) -> Tensor:
    """Returns bool (batch, 1, 1, kv_length), True where attended, from :func:`bounds_of_token`."""
    key = torch.arange(kv_length, device=bounds.device)
    first, end = bounds.unbind(-1)  # (batch, 1, 1)
    return (key >= first[..., None]) & (key < end[..., None])


def _in_place(
    first: np.ndarray | None,
    tokens: np.ndarray,
    queries: tuple[int, int | None],
    kv_length: int,
    device: torch.device,
) -> tuple[tuple, tuple]:
    """Returns ``lengths`` and ``used`` of a :class:`Plan` for rows whose tokens are not moved.

    Args:
        first: (batch,), the first token of each row; None where rows begin with them.
        tokens: (batch,), how many tokens each row has, without padding between them.
        queries: q_length, and the position of the first query; None where all are computed.
        kv_length: Length of the rows of keys.
        device: Where the kernels read the result.
    """
    q_length, offset = queries
    batch = len(tokens)
    # Sequences begin at row 0, so padding before the first token counts as a sequence without
    # tokens.
    lead = int(first is not None)
    first = 0 if first is None else first
    # One table makes one copy to the device: (4, sequences + 1) with cu_seqlens_q, cu_seqlens_k
    # and, without the last column, seqused_q and seqused_k.
    table = np.zeros((4, lead + batch + 1), np.int32)
    row = np.arange(batch + 1)
    table[0, lead:], table[1, lead:] = row * q_length, row * kv_length
    table[1, lead:-1] += first
    table[3, lead:-1] = tokens
    if offset is not None:
        first_q = np.maximum(first - offset, 0)
        table[0, lead:-1] += first_q
        table[2, lead:-1] = np.maximum(first + tokens - offset, 0) - first_q
    ends_q, ends_k, used_q, used_k = _on(device, table).unbind()
    used = None if offset is None else used_q[:-1], used_k[:-1]
    return (ends_q, ends_k, q_length, kv_length), used


def _on(device: torch.device, array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def _packed(kept: np.ndarray, device: torch.device) -> tuple[Tensor, int, Tensor]:
    """Returns cu_seqlens, the longest sequence and the rows that are kept."""
    tokens = kept.sum(1, dtype=np.int32)  # (batch,)
    ends = np.zeros(len(tokens) + 1, np.int32)
    tokens.cumsum(out=ends[1:])
    return _on(device, ends), int(tokens.max()), _on(device, np.flatnonzero(kept))


def _ends_of_sequences(packed: np.ndarray) -> np.ndarray:
    """Returns cu_seqlens of rows of several sequences, one row after the other."""
    starts = np.ones(packed.shape, bool)
    starts[:, 1:] = packed[:, 1:] != packed[:, :-1]
    return np.append(np.flatnonzero(starts), packed.size).astype(np.int32)


class KernelMask(Tensor):
    """A mask (batch, 1, q_length, kv_length) that the kernels express, without its memory.

    transformers and its models pass masks on, but now and then slice or join one. Any operation on
    this mask is done on the dense mask, which is made at that time, so it is never wrong. Moving
    alone keeps this class: a model over several GPUs moves the inputs of each layer.

    Attributes:
        plan: What the kernels do.
        sizes: q_length and kv_length; asking a tensor of a class of its own for its shape is slow.
        dense: Makes the bool mask, True where attended.
    """

    plan: Plan
    sizes: tuple[int, int]
    dense: Callable[[], Tensor]

    @classmethod
    def make(cls, shape: tuple[int, ...], device, plan: Plan, dense: Callable[[], Tensor]):
        mask = torch.empty((1,), dtype=torch.bool, device=device).expand(shape).as_subclass(cls)
        mask.plan, mask.dense, mask.sizes = plan, dense, tuple(shape[2:])
        return mask

    def _on(self, device: torch.device) -> KernelMask:
        if device == self.device:
            return self

        def moved(x: object) -> object:
            return x.to(device) if isinstance(x, Tensor) else x

        fields = (getattr(self.plan, field.name) for field in dataclasses.fields(Plan))
        dense = self.dense
        plan = Plan(*tree_map(moved, tuple(fields)))
        return KernelMask.make(self.shape, device, plan, lambda: dense().to(device))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ in _OF_SHAPE:
            return super().__torch_function__(function, types, args, kwargs)
        if function.__name__ in ("to", "cuda", "cpu") and isinstance(args[0], cls):
            asked = torch.empty(0, dtype=torch.bool, device=args[0].device)
            asked = function(asked, *args[1:], **(kwargs or {}))
            if asked.dtype == torch.bool:
                return args[0]._on(asked.device)

        if function.__name__ == "contiguous" and len(args) == 1 and not kwargs:
            return args[0]  # generate() asks for it where the cache is static

        def densified(x: object) -> object:
            return x.dense() if isinstance(x, KernelMask) else x

        args, kwargs = tree_map(densified, (args, kwargs or {}))
        return function(*args, **kwargs)


_OF_SHAPE = {
    *("__get__", "size", "stride", "storage_offset", "dim", "ndimension", "numel", "__len__"),
    *("is_contiguous", "is_floating_point", "is_complex", "element_size", "get_device"),
}
