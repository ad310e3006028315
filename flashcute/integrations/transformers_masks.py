"""transformers' masks as what the kernels take: a window, packed tokens, fewer keys.

transformers describes a mask by a function of positions and a padding mask. :func:`recognise` reads
the functions that ``transformers.masking_utils`` builds, and :func:`plan` turns the mask of one
forward pass into a :class:`Plan`. What is not recognised stays a dense mask.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import masking_utils

_UNLIMITED = (-1, -1)


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Which keys a query sees, by their positions, and the sequences they are of.

    Attributes:
        causal: None after it.
        window: Keys to the left and to the right, -1 for unlimited, as flash_attn counts.
        packed: (batch, length), the number of each token's sequence in its row; None for one.
    """

    causal: bool = False
    window: tuple[int, int] = _UNLIMITED
    packed: Tensor | None = None

    def joined(self, other: Pattern) -> Pattern | None:
        """What both show; None where two windows or packings would have to be merged."""
        if self.window != _UNLIMITED != other.window or None not in (self.packed, other.packed):
            return None
        window = other.window if self.window == _UNLIMITED else self.window
        packed = other.packed if self.packed is None else self.packed
        return Pattern(self.causal or other.causal, window, packed)


def recognise(function: Callable) -> Pattern | None:
    """The pattern of a mask function of ``transformers.masking_utils``, or None."""
    if function is masking_utils.causal_mask_function:
        return Pattern(causal=True)
    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        return Pattern()
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    maker = function.__qualname__.partition(".")[0]
    held = inspect.getclosurevars(function).nonlocals
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
    if maker == "remap_positions_for_packed_sequence":
        return recognise(held["mask_function"])  # distances within a sequence are the same
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the kernels compute under a mask.

    Attributes:
        causal, window: Arguments of flash_attn's functions.
        keys: How many keys are taken, from the first one on.
        lengths: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k of packed tokens; None
            for a dense call.
        used: seqused_q and seqused_k of sequences that begin their rows and are not moved; None
            for all queries or keys.
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
    """The plan of a mask, or None where the kernels cannot express it.

    Reads the padding mask back from the device: on CUDA the host waits for it.

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
        ends = _ends_of_sequences(pattern.packed)
        longest = int(ends.diff().max())
        return Plan(causal, window, keys, (ends, ends, longest, longest))
    if padding is None or bool(padding[:, :keys].all()):
        return Plan(causal, window, keys)
    padding = padding[:, :keys]
    lengths = padding.sum(-1, dtype=torch.int32)
    places = torch.arange(keys, device=padding.device)
    if bool((padding == (places < lengths[:, None])).all()):  # padding behind the tokens alone
        rows = torch.arange(padding.shape[0] + 1, device=padding.device, dtype=torch.int32)
        used = (lengths - offset).clamp(min=0) if places_count else None
        ends = rows * q_length, rows * kv_length, q_length, kv_length
        return Plan(causal, window, kv_length, ends, (used, lengths))
    if window != _UNLIMITED and not _is_contiguous(padding):
        return None
    batch = padding.shape[0]
    ends_k, longest_k, key_rows = _packed(padding)
    if not places_count:
        # All queries: whether they are of the same sequence as the keys is not known here.
        ends_q = torch.arange(batch + 1, device=padding.device, dtype=torch.int32) * q_length
        ends = ends_q, ends_k, q_length, longest_k
        return Plan(causal, window, keys, ends, key_rows=key_rows)
    ends_q, longest_q, query_rows = _packed(padding[:, offset:])
    ends = ends_q, ends_k, longest_q, longest_k
    return Plan(causal, window, keys, ends, query_rows=query_rows, key_rows=key_rows)


def _packed(kept: Tensor) -> tuple[Tensor, int, Tensor]:
    """cu_seqlens, the longest sequence and the rows that are kept."""
    lengths = kept.sum(-1, dtype=torch.int32)
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return ends, int(lengths.max()), kept.flatten().nonzero().squeeze(-1)


def _is_contiguous(kept: Tensor) -> bool:
    """Whether padding is only before and after the tokens of each row."""
    starts = kept[:, 0].int() + (kept[:, 1:] & ~kept[:, :-1]).sum(-1)
    return bool((starts <= 1).all())


def _ends_of_sequences(packed: Tensor) -> Tensor:
    """cu_seqlens of rows of several sequences, one row after the other."""
    starts = torch.ones_like(packed, dtype=torch.bool)
    starts[:, 1:] = packed[:, 1:] != packed[:, :-1]
    places = starts.flatten().nonzero().squeeze(-1)
    return torch.nn.functional.pad(places, (0, 1), value=packed.numel()).int()


class KernelMask(Tensor):
    """A mask (batch, 1, q_length, kv_length) that the kernels express, without its memory.

    transformers and its models pass masks on, but now and then slice or join one. Any operation on
    this one happens to the dense mask, made then: it is never wrong. But it may be moved: a model
    over several GPUs moves the inputs of each layer.

    Attributes:
        plan: What the kernels do.
        dense: Makes the bool mask, True where attended.
    """

    plan: Plan
    dense: Callable[[], Tensor]

    @classmethod
    def make(cls, shape: tuple[int, ...], device, plan: Plan, dense: Callable[[], Tensor]):
        mask = torch.empty((1,), dtype=torch.bool, device=device).expand(shape).as_subclass(cls)
        mask.plan, mask.dense = plan, dense
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

        def densified(x: object) -> object:
            return x.dense() if isinstance(x, KernelMask) else x

        args, kwargs = tree_map(densified, (args, kwargs or {}))
        return function(*args, **kwargs)


_OF_SHAPE = {
    *("__get__", "size", "stride", "storage_offset", "dim", "ndimension", "numel", "__len__"),
    *("is_contiguous", "is_floating_point", "is_complex", "element_size", "get_device"),
}
