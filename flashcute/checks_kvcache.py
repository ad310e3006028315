"""The checks of a key and value cache: its tensors, its pages, and where the sequences are in it.

Messages follow the rules of :mod:`flashcute.checks`. Kinds, shapes, dtypes and devices are checked
on every device; the values of lengths and page numbers only on the CPU, where they can be read
without waiting for a device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .checks import (
    PAD_HEAD_DIM,
    at_most,
    check_int,
    check_kind,
    check_length,
    check_rank,
    has_tangent,
    raise_values,
)
from .checks_varlen import Names
from .rotary import check_tables

# The keys of one sequence can be split into at most this many parts.
MAX_SPLITS = 128

_PAGES = "(num_pages, page_size, heads, head_dim)"
_ENTRIES = "(batch_cache, seqlen_cache, heads, head_dim)"


class Tensors(NamedTuple):
    """The tensors of a call with a cache.

    Attributes:
        q: (b, seqlen_q, h, d).
        k_cache: (batch_cache, seqlen_cache, h_k, d), or with a block_table
            (num_pages, page_size, h_k, d); v_cache has the same shape.
        k: (b, seqlen_new, h_k, d), as v: what is appended; both or neither.
        rotary_cos: (seqlen_ro, rotary_dim / 2), as rotary_sin.
        cache_seqlens: (b,), int32; None if all of the cache is in use.
        cache_batch_idx: (b,), int32: the entry of the cache of each sequence.
        cache_leftpad: (b,), int32: the first token of each sequence in its entry.
        block_table: (b, max_pages), int32: the pages of each sequence.
        sinks: (h,).
        alibi_slopes: (h,) or (b, h).
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    cache_seqlens: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    block_table: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None

    @property
    def n_new(self) -> int:
        """Number of tokens that are appended to each sequence."""
        return 0 if self.k is None else self.k.shape[1]

    @property
    def capacity(self) -> int:
        """Number of tokens of a sequence that the cache has room for."""
        n_pages = 1 if self.block_table is None else self.block_table.shape[1]
        return n_pages * self.k_cache.shape[1]


class Slots(NamedTuple):
    """Where the sequences are in a cache; one without a block_table has a page for each entry.

    Attributes:
        pages: (b, max_pages), integers: the pages of each sequence; only those in use are valid.
        starts: The first token of each sequence.
        ends: One past the last token of each sequence, before anything is appended.
    """

    pages: Tensor
    starts: list[int]
    ends: list[int]


def check_cache(fn: str, t: Tensors) -> int:
    """Checks what holds on every device for all tensors but sinks and alibi_slopes.

    Returns:
        The head dimension.
    """
    q, k_cache, v_cache = t[:3]
    paged = t.block_table is not None
    check_kind(fn, "q", q)
    check_rank(fn, "q", q, "(batch, seqlen, heads, head_dim)")
    check_store(fn, ("k_cache", "v_cache"), q, k_cache, v_cache, paged=paged)
    b = q.shape[0]
    for name, shape in (
        ("cache_seqlens", (b,)),
        ("cache_batch_idx", (b,)),
        ("cache_leftpad", (b,)),
    ):
        check_index(fn, name, getattr(t, name), q, shape, "pass one number per sequence")
    check_table(fn, t.block_table, q, b)
    _check_contradictions(fn, t)
    _check_new(fn, t)
    _check_rotary(fn, t)
    if not paged and t.cache_batch_idx is None and k_cache.shape[0] < b:
        raise ValueError(
            f"{fn}: expected k_cache of at least q's batch size {b}, "
            f"got k_cache.shape={tuple(k_cache.shape)}; pass cache_batch_idx if sequences share "
            "entries"
        )
    return q.shape[3]


def check_packed_queries(names: Names, q, k, v) -> int:
    """Checks q (total, heads, head_dim), and k and v in pages.

    Returns:
        The head dimension.
    """
    check_kind(names.fn, names.q, q)
    check_rank(names.fn, names.q, q, "(total, heads, head_dim)")
    check_store(names.fn, (names.k, names.v), q, k, v, paged=True)
    return q.shape[2]


def check_store(
    fn: str, names: tuple[str, str], q: Tensor, keys: Tensor, values: Tensor, *, paged: bool
) -> None:
    """Checks keys and values of a cache, called ``names``, against q (..., heads, head_dim)."""
    k_name, v_name = names
    for name, x in ((k_name, keys), (v_name, values)):
        check_kind(fn, name, x)
        check_rank(fn, name, x, _PAGES if paged else _ENTRIES)
    h, d = q.shape[-2:]
    h_k, d_k = keys.shape[2:]
    if d_k != d:
        raise ValueError(
            f"{fn}: expected {k_name} of q's head_dim {d}, "
            f"got {k_name}.shape={tuple(keys.shape)}; {PAD_HEAD_DIM}"
        )
    if values.shape != keys.shape:
        raise_values(fn, k_name, v_name, keys, values)
    if h < 1 or h_k < 1 or h % h_k:
        raise ValueError(
            f"{fn}: expected the heads of q to be a positive multiple of those of {k_name}, got "
            f"q.shape={tuple(q.shape)} and {k_name}.shape={tuple(keys.shape)}; "
            "repeat or drop heads"
        )
    if d < 1:
        raise ValueError(
            f"{fn}: expected head_dim >= 1, got q.shape={tuple(q.shape)}; "
            "a score needs at least one element"
        )
    if paged and keys.shape[1] < 1:
        raise ValueError(
            f"{fn}: expected {k_name} of shape {_PAGES} with page_size >= 1, "
            f"got {k_name}.shape={tuple(keys.shape)}; a page holds at least one token"
        )
    _check_like_q(fn, q, ((k_name, keys), (v_name, values)))


def _check_like_q(fn: str, q: Tensor, named: tuple[tuple[str, Tensor], ...]) -> None:
    for name, tensor in named:
        if tensor.device != q.device:
            raise ValueError(
                f"{fn}: expected {name} on {q.device} as q, got {name}.device={tensor.device}; "
                f"move it with .to({str(q.device)!r})"
            )
        if tensor.dtype != q.dtype:
            raise TypeError(
                f"{fn}: expected {name} of q's dtype {q.dtype}, got {name}.dtype={tensor.dtype}; "
                "cast one of them"
            )


def _check_new(fn: str, t: Tensors) -> None:
    """Checks k and v, which are appended."""
    if t.k is None and t.v is None:
        return
    if t.k is None or t.v is None:
        here, missing = ("k", "v") if t.v is None else ("v", "k")
        raise ValueError(
            f"{fn}: expected k and v or neither, got {here} with {missing}=None; "
            "pass both, or write into the cache before the call"
        )
    if t.cache_seqlens is None:
        raise ValueError(
            f"{fn}: expected cache_seqlens with k and v, got cache_seqlens=None; "
            "pass how many tokens each sequence has before they are appended"
        )
    b, (h_k, d) = t.q.shape[0], t.k_cache.shape[2:]
    for name, x in (("k", t.k), ("v", t.v)):
        check_kind(fn, name, x)
        check_rank(fn, name, x, "(batch, seqlen_new, heads, head_dim)")
        if (x.shape[0], *x.shape[2:]) != (b, h_k, d):
            raise ValueError(
                f"{fn}: expected {name} of shape ({b}, seqlen_new, {h_k}, {d}), as q and k_cache "
                f"are, got {name}.shape={tuple(x.shape)}; pass new tokens for each sequence"
            )
    if t.v.shape[1] != t.k.shape[1]:
        raise ValueError(
            f"{fn}: expected v of k's shape {tuple(t.k.shape)}, got v.shape={tuple(t.v.shape)}; "
            "pass one value per key"
        )
    _check_like_q(fn, t.q, (("k", t.k), ("v", t.v)))
    if t.k.shape[1] > t.capacity:
        raise ValueError(
            f"{fn}: expected k of at most {t.capacity} tokens, which the cache has room for, "
            f"got k.shape={tuple(t.k.shape)}; pass a larger cache or fewer tokens"
        )
    for name, cache in (("k_cache", t.k_cache), ("v_cache", t.v_cache)):
        strides = cache.stride()
        if any(s == 0 and n > 1 for n, s in zip(cache.shape, strides, strict=True)):
            raise ValueError(
                f"{fn}: expected {name} with memory for each element, as k and v are written to "
                f"it, got {name}.stride()={tuple(strides)}; pass {name}.contiguous()"
            )


def _check_rotary(fn: str, t: Tensors) -> None:
    if t.rotary_cos is None and t.rotary_sin is None:
        return
    if t.rotary_cos is None or t.rotary_sin is None:
        here, missing = "rotary_cos", "rotary_sin"
        if t.rotary_cos is None:
            here, missing = missing, here
        raise ValueError(
            f"{fn}: expected rotary_cos and rotary_sin or neither, got {here} with {missing}=None; "
            "pass both"
        )
    if t.k is None:
        raise ValueError(
            f"{fn}: expected k and v with rotary_cos, got k=None; rotate q alone with "
            "flashcute.rotary.apply_rotary_emb"
        )
    names = ("q", "rotary_cos", "rotary_sin")
    check_tables(fn, names, t.q, t.rotary_cos, t.rotary_sin, (t.q.dtype,))
    if t.rotary_cos.shape[0] < t.capacity:
        raise ValueError(
            f"{fn}: expected rotary_cos of at least {t.capacity} rows, one for each token that the "
            f"cache has room for, got rotary_cos.shape={tuple(t.rotary_cos.shape)}; compute the "
            "tables for more positions"
        )


def check_index(fn: str, name: str, index, q: Tensor, shape: tuple[int, ...], way_out: str) -> None:
    """Checks for a dense int32 tensor of this shape on q's device, or None."""
    if index is None:
        return
    check_kind(fn, name, index)
    if index.dtype != torch.int32:
        raise TypeError(
            f"{fn}: expected {name} of dtype torch.int32, got {name}.dtype={index.dtype}; "
            "cast it with .int()"
        )
    if index.shape != shape:
        raise ValueError(
            f"{fn}: expected {name} of shape {shape}, got {name}.shape={tuple(index.shape)}; "
            f"{way_out}"
        )
    if index.device != q.device:
        raise ValueError(
            f"{fn}: expected {name} on {q.device} as q, got {name}.device={index.device}; "
            f"move it with .to({str(q.device)!r})"
        )


def check_table(fn: str, block_table, q: Tensor, b: int | str) -> None:
    """Checks the pages of b sequences, (b, max_pages), or None."""
    if block_table is None:
        return
    check_kind(fn, "block_table", block_table)
    if block_table.dim() != 2:
        raise ValueError(
            f"{fn}: expected block_table of shape ({b}, max_pages), "
            f"got block_table.shape={tuple(block_table.shape)}; pass a row of pages per sequence"
        )
    shape = (b, block_table.shape[1])
    check_index(fn, "block_table", block_table, q, shape, "pass a row of pages per sequence")


def _check_contradictions(fn: str, t: Tensors) -> None:
    if t.block_table is None:
        return
    if t.cache_batch_idx is not None:
        raise ValueError(
            f"{fn}: expected cache_batch_idx=None with a block_table, which says where each "
            "sequence is, got both; pass block_table[cache_batch_idx]"
        )
    if t.cache_leftpad is not None:
        raise NotImplementedError(
            f"{fn}: expected cache_leftpad=None with a block_table, got both; leave pages that "
            "hold nothing but padding out of the table, or pass a cache without pages"
        )


def lengths_of(fn: str, cache_seqlens, q) -> Tensor | None:
    """Returns cache_seqlens as a tensor, also where it is an int; None stays None."""
    if cache_seqlens is None or isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    try:
        length = check_length(fn, "cache_seqlens", cache_seqlens)
    except TypeError:
        raise TypeError(
            f"{fn}: expected cache_seqlens to be an int or a torch.Tensor, got cache_seqlens of "
            f"type {type(cache_seqlens).__name__}; pass one length of all sequences, or "
            "torch.as_tensor(..., dtype=torch.int32)"
        ) from None
    check_kind(fn, "q", q)
    check_rank(fn, "q", q, "(batch, seqlen, heads, head_dim)")
    # No cache has room for 2**31 - 1 tokens: a later check raises.
    length = at_most(length, 2**31 - 1)
    return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)


def check_room(fn: str, t: Tensors, cache_seqlens) -> None:
    """Checks that an int cache_seqlens and the new tokens fit, which is known on every device."""
    cache_seqlens = check_length(fn, "cache_seqlens", cache_seqlens)
    if torch.compiler.is_compiling() or isinstance(cache_seqlens, torch.SymInt):
        if not t.q.is_cpu:  # the CPU's operator checks values when it runs
            # The error shows these lines. torch.export takes no _check() that has a message.
            torch._check(cache_seqlens >= 0)
            torch._check(cache_seqlens + t.n_new <= t.capacity)
    elif cache_seqlens + t.n_new > t.capacity:
        raise ValueError(_no_room(fn, "cache_seqlens", cache_seqlens, t))


def check_splits(fn: str, num_splits) -> int:
    """Returns num_splits, 0 for a choice by shape, after checking its range."""
    value = check_int(fn, "num_splits", num_splits)
    if not 0 <= value <= MAX_SPLITS:
        raise ValueError(
            f"{fn}: expected 0 <= num_splits <= {MAX_SPLITS}, got num_splits={value}; "
            "pass 0 for a choice by shape"
        )
    return value


def apart(fn: str, t: Tensors) -> Tensors:
    """Returns ``t`` for an append, after checking that the caches can be written. New tokens whose
    memory is part of a cache are copied; on the CPU queries, too, as they are read after the new
    tokens are written. On CUDA queries that are part of a cache are not found."""
    for name in ("k_cache", "v_cache"):
        if getattr(t, name).is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"{fn}: expected {name} that can be written, got a tensor made in inference mode; "
                "call inside torch.inference_mode() or pass a clone"
            )
    starts = t.k_cache.data_ptr(), t.v_cache.data_ptr()
    if t.k.numel() and t.k_cache.numel() and starts[0] == starts[1]:
        raise ValueError(
            f"{fn}: expected k_cache and v_cache in places of their own, got both at one address; "
            "allocate one for each"
        )
    caches = {x.untyped_storage().data_ptr() for x in (t.k_cache, t.v_cache)}
    shared = {
        name: x.clone()
        for name, x in (("k", t.k), ("v", t.v), ("q", t.q))
        if (name != "q" or x.is_cpu) and x.untyped_storage().data_ptr() in caches
    }
    return t._replace(**shared) if shared else t


def check_no_gradient(fn: str, names: tuple[str, ...], *tensors: Tensor | None) -> None:
    """Raises if a derivative is asked for: torch would lose what goes through the cache."""
    grad = torch.is_grad_enabled()
    if not grad and forward_ad._current_level < 0:
        return
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is None:
            continue
        if grad and tensor.requires_grad:
            raise NotImplementedError(f"{fn}: {no_gradient(f'{name}.requires_grad=True')}")
        if has_tangent(tensor):
            raise NotImplementedError(f"{fn}: {no_gradient(f'{name} with a tangent')}")


def check_no_transform(fn: str) -> None:
    """Raises inside a transform of torch.func, which would map or differentiate what is written."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{fn}: expected no transform of torch.func (vmap, grad, jvp) of a call with a cache, "
            "got a call inside one; stack what vmap would map along the batch, with one cache_"
            "batch_idx or row of block_table for each, or train with flash_attn_func"
        )


def no_gradient(got: str) -> str:
    """Returns the reason and way out for a gradient through a cache."""
    return (
        f"expected no gradient through a cache, on any device, got {got}; call it under "
        "torch.no_grad() or detach the inputs, or train with flash_attn_func"
    )


def read_slots(fn: str, t: Tensors, *, is_local: bool) -> Slots:
    """Returns where the sequences of CPU tensors are, after checking that they fit the cache.

    Args:
        fn: For messages.
        t: After :func:`check_cache`.
        is_local: Whether each query has a position of its own, under a causal mask or a window.

    Raises:
        ValueError: for values that are out of range. Nothing has been written then.
    """
    b, n_pages = t.q.shape[0], t.k_cache.shape[0]
    ends = [t.capacity] * b if t.cache_seqlens is None else t.cache_seqlens.tolist()
    starts = [0] * b if t.cache_leftpad is None else t.cache_leftpad.tolist()
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if end < 0 or end + t.n_new > t.capacity:
            raise ValueError(_no_room(fn, f"cache_seqlens[{i}]", end, t))
        if not 0 <= start <= end:
            raise ValueError(
                f"{fn}: expected 0 <= cache_leftpad[{i}] <= {end}, the sequence's length in the "
                f"cache, got cache_leftpad[{i}]={start}; count the padding in cache_seqlens, too"
            )
    if t.block_table is not None:
        read_pages(fn, t.block_table, [end + t.n_new for end in ends], t.k_cache, "k_cache")
        pages = t.block_table
    elif t.cache_batch_idx is not None:
        pages = t.cache_batch_idx[:, None]
        for i, entry in enumerate(t.cache_batch_idx.tolist()):
            if not 0 <= entry < n_pages:
                raise ValueError(
                    f"{fn}: expected 0 <= cache_batch_idx[{i}] < {n_pages}, an entry of k_cache, "
                    f"got cache_batch_idx[{i}]={entry}; pass the entry of each sequence"
                )
    else:
        pages = torch.arange(b, device="cpu")[:, None]
    if t.rotary_cos is not None and b:
        rows = max(ends) + max(t.n_new, t.q.shape[1] if is_local else 1)
        if rows > t.rotary_cos.shape[0]:
            raise ValueError(
                f"{fn}: expected rotary_cos of at least {rows} rows, one for each position of q, "
                f"got rotary_cos.shape={tuple(t.rotary_cos.shape)}; compute the tables for more "
                "positions"
            )
    return Slots(pages, starts, ends)


def read_pages(fn: str, table: Tensor, lengths: list[int], cache: Tensor, name: str) -> None:
    """Checks that the pages which sequences of these lengths use are pages of ``cache``."""
    n_pages, page_size = cache.shape[:2]
    used = torch.tensor(lengths, dtype=torch.int64, device=table.device).add_(page_size - 1)
    in_use = torch.arange(table.shape[1], device=table.device) < used[:, None] // page_size
    wrong = (in_use & ((table < 0) | (table >= n_pages))).nonzero()
    if wrong.numel():
        i, j = wrong[0].tolist()
        raise ValueError(
            f"{fn}: expected 0 <= block_table[{i}, {j}] < {n_pages}, a page of {name}, got "
            f"block_table[{i}, {j}]={int(table[i, j])}; pass a page for each {page_size} of the "
            f"sequence's {lengths[i]} tokens"
        )


def _no_room(fn: str, name: str, length: int, t: Tensors) -> str:
    new = f" with {t.n_new} tokens to append" if t.n_new else ""
    if length < 0:
        way = "0 for a sequence without keys"
    else:
        way = "a larger cache" if t.block_table is None else "a block_table of more columns"
    return (
        f"{fn}: expected 0 <= cache_seqlens <= {t.capacity - t.n_new}, as the cache has room for "
        f"{t.capacity} tokens of a sequence, got {name}={length}{new}; pass {way}"
    )
