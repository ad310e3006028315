"""The reference for a cache of keys and values: append, rotate, attend; in plain PyTorch.

A cache is a number of pages, each with room for ``page_size`` tokens. Token ``n`` of a sequence is
row ``n % page_size`` of the page ``n // page_size`` of the sequence's row of ``block_table``. A
cache without a table has one page for each entry of a batch, as long as the longest sequence.

Sequence ``i`` has ``cache_seqlens[i]`` tokens in its pages, of which the first ``cache_leftpad[i]``
are padding. New keys and values become the tokens that follow. Then its queries attend to all
tokens but the padding, as :mod:`flashcute.reference` defines it, with masks, windows and ALiBi
aligned to the end of the new tokens.

A new key is rotated by its place in the pages, ``cache_seqlens[i] + j``, padding included; it is
rounded to the cache's dtype there. Query ``j`` is rotated by ``cache_seqlens[i] + j`` where there
is a causal mask or a window, and else by ``cache_seqlens[i]``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks_kvcache import Slots, Tensors, check_cache, lengths_of, read_slots
from .reference import attention_ref
from .rotary import rotated, table_rows


class KVCacheOutput(NamedTuple):
    """What :func:`attention_kvcache_ref` returns.

    Attributes:
        out: (b, seqlen_q, h, d), in the dtype computed in.
        lse: (b, h, seqlen_q), natural logarithm of the softmax's denominator.
        k_cache: The keys with the new ones, a new tensor; k_cache itself if nothing is appended.
        v_cache: The values with the new ones, as k_cache.
    """

    out: Tensor
    lse: Tensor
    k_cache: Tensor
    v_cache: Tensor


def attention_kvcache_ref(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    rotary_interleaved: bool = True,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    upcast: torch.dtype | None = None,
    **options: object,
) -> KVCacheOutput:
    """Computes attention of CPU tensors to a cache, by definition; differentiable, not in place.

    Args:
        q: (b, seqlen_q, h, d), as :func:`flashcute.flash_attn_with_kvcache` takes it and the
            arguments that follow.
        k_cache: (batch_cache, seqlen_cache, h_k, d) or (num_pages, page_size, h_k, d).
        v_cache: As k_cache.
        k: (b, seqlen_new, h_k, d).
        v: As k.
        rotary_cos: (seqlen_ro, rotary_dim / 2).
        rotary_sin: As rotary_cos.
        cache_seqlens: int or int32 (b,).
        cache_batch_idx: int32 (b,).
        cache_leftpad: int32 (b,).
        block_table: int32 (b, max_pages).
        rotary_interleaved: Whether pairs are neighbours.
        causal: As in :func:`attention_ref`.
        window_size: As in :func:`attention_ref`.
        alibi_slopes: (h,) or (b, h).
        upcast: float32 or float64 to compute in; then the rotation is computed in it, too, and not
            rounded. None computes in the inputs' dtype.
        options: Other arguments of :func:`attention_ref`.

    Raises:
        TypeError, ValueError: as :func:`flashcute.flash_attn_with_kvcache`.
    """
    fn = "attention_kvcache_ref"
    lengths = lengths_of(fn, cache_seqlens, q)
    t = Tensors(
        *(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, lengths, cache_batch_idx),
        *(cache_leftpad, block_table),
    )
    check_cache(fn, t)
    is_local = causal or tuple(window_size) != (-1, -1)
    slots = read_slots(fn, t, is_local=is_local)
    dtype = q.dtype if upcast is None else upcast
    inputs = (None if x is None else x.to(dtype) for x in t[:5])
    t = t._replace(**dict(zip(t._fields, inputs, strict=False)))
    q, k = rotate(t, slots.ends, is_local=is_local, interleaved=rotary_interleaved)
    k_cache, v_cache = t.k_cache, t.v_cache
    if k is not None:
        where = new_rows(t, slots)
        k_cache = k_cache.index_put(where, k.flatten(0, 1))
        v_cache = v_cache.index_put(where, t.v.flatten(0, 1))
    statistics = torch.promote_types(dtype, torch.float32)
    out = [q.new_zeros((0, *q.shape[1:]))]
    lse = [q.new_zeros((0, q.shape[2], q.shape[1]), dtype=statistics)]
    per_sequence = alibi_slopes is not None and alibi_slopes.dim() == 2
    for i, (start, end) in enumerate(zip(slots.starts, slots.ends, strict=True)):
        seen = rows(slots.pages[i], k_cache.shape[1], start, end + t.n_new)
        part = attention_ref(
            q[i : i + 1],
            k_cache[seen][None],
            v_cache[seen][None],
            causal=causal,
            window_size=window_size,
            alibi_slopes=alibi_slopes[i] if per_sequence else alibi_slopes,
            **options,
        )
        out.append(part.out)
        lse.append(part.lse)
    return KVCacheOutput(torch.cat(out), torch.cat(lse), k_cache, v_cache)


def rows(pages: Tensor, page_size: int, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Returns page and row in the page of tokens ``start`` to ``end`` of a sequence with pages."""
    token = torch.arange(start, end, device=pages.device)
    page_size = max(page_size, 1)  # a cache without room holds no token
    return pages[token // page_size].long(), token % page_size


def new_rows(t: Tensors, slots: Slots) -> tuple[Tensor, Tensor]:
    """Returns page and row in the page of all new tokens, those of the first sequence first."""
    found = [
        rows(pages, t.k_cache.shape[1], end, end + t.n_new)
        for pages, end in zip(slots.pages, slots.ends, strict=True)
    ]
    none = torch.empty(0, dtype=torch.int64, device=slots.pages.device)
    pages, places = zip((none, none), *found, strict=True)
    return torch.cat(pages), torch.cat(places)


def rotate(
    t: Tensors, lengths: list[int], *, is_local: bool, interleaved: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns q and the new keys, rotated by their positions."""
    if t.rotary_cos is None:
        return t.q, t.k
    turned = []
    for x, step in ((t.q, int(is_local)), (t.k, 1)):
        first = torch.tensor(lengths, dtype=torch.int64, device=x.device)[:, None]
        positions = first + step * torch.arange(x.shape[1], device=x.device)
        tables = table_rows(t.rotary_cos, t.rotary_sin, positions)
        turned.append(rotated(x, *tables, interleaved))
    return turned[0], turned[1]
