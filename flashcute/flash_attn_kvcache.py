"""flash-attn 2's function for inference with a cache of keys and values, contiguous or in pages.

CUDA tensors go to the kernels, CPU tensors to :mod:`flashcute.cpu_kvcache`, traced calls and meta
tensors to the operators of :mod:`flashcute.ops_kvcache`.
"""

from __future__ import annotations

import torch

from . import ops_kvcache
from .checks import (
    UNLIMITED,
    check_alibi,
    check_dtype,
    check_flag,
    check_for_kernels,
    check_kernel_scores,
    check_scale,
    check_sinks,
    check_softcap,
    check_window,
)
from .checks_kvcache import (
    Tensors,
    check_cache,
    check_no_gradient,
    check_no_transform,
    check_room,
    check_splits,
    lengths_of,
)
from .cpu_kvcache import Options, attend
from .cpu_operator import is_traced


def options_of(
    fn, softmax_scale, causal, window_size, softcap, num_splits, rotary_interleaved=True
) -> tuple:
    """Returns the checked fields of Options; a softmax_scale of None stays None."""
    # The identity tests are a fast path for the values that nearly every call passes.
    if softmax_scale is not None:
        softmax_scale = check_scale(fn, softmax_scale, 1)
    if causal is not False and causal is not True:
        causal = check_flag(fn, "causal", causal)
    left, right = check_window(fn, window_size)  # torch 2.11 cannot trace identity of tuples
    if type(softcap) is not float or softcap != 0.0:
        softcap = check_softcap(fn, softcap)
    if rotary_interleaved is not True and rotary_interleaved is not False:
        rotary_interleaved = check_flag(fn, "rotary_interleaved", rotary_interleaved)
    if type(num_splits) is not int or num_splits != 0:
        num_splits = check_splits(fn, num_splits)
    return softmax_scale, causal, left, right, softcap, rotary_interleaved, num_splits


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes attention of new queries to a cache of keys and values, and can append to it first.

    Sequence i has ``cache_seqlens[i]`` tokens in the cache. If k and v are given, they are first
    written to the places that follow, and the queries see them. Masks, windows and ALiBi are
    aligned to the last key: with n keys, query i sees key j under a causal mask if
    j <= i + n - seqlen_q. Places of a cache that are not in use are never read, nor is the rest of
    a block_table.

    With rotary tables a new key is rotated by its place, ``cache_seqlens + j``, before it is
    written; query j by ``cache_seqlens + j`` where causal or window_size is given, and else by
    ``cache_seqlens``, for all queries.

    There are no gradients, on any device. ``torch.compile`` and ``torch.export`` see one operator,
    which declares that it changes the cache if k is given. The host does not read CUDA tensors:
    whatever lengths and pages they hold, nothing outside the tensors is read or written, and new
    tokens without a place are dropped. With k and v on CUDA, head_dim and the strides of a cache
    must be multiples of 8 elements, its last dimension contiguous and its start at a multiple of 16
    bytes. If new tokens of two sequences have the same place, as
    through equal pages in block_table or equal entries in cache_batch_idx, what is written there is
    not defined; pages that are only read may be shared.

    Args:
        q: (b, seqlen_q, h, head_dim). On CUDA it must not lie in a cache that is appended to.
        k_cache: (batch_cache, seqlen_cache, h_k, head_dim), or with a block_table
            (num_pages, page_size, h_k, head_dim), of any page_size from 1 on; of q's dtype and
            device; h is a multiple of h_k. Any strides.
        v_cache: As k_cache.
        k: (b, seqlen_new, h_k, head_dim), to be appended; at most what the cache has room for.
        v: As k; both or neither.
        rotary_cos: (seqlen_ro, rotary_dim / 2), of q's dtype; rotary_dim is even and at most
            head_dim, seqlen_ro at least the tokens of a sequence that the cache has room for. Only
            with k and v. See :func:`flashcute.rotary.apply_rotary_emb`.
        rotary_sin: As rotary_cos.
        cache_seqlens: How many tokens each sequence has before k is appended: an int for all or
            int32 (b,); None, without k, if all of the cache is in use.
        cache_batch_idx: int32 (b,): the entry of k_cache and v_cache of each sequence; None for
            0 to b - 1. Not with a block_table.
        cache_leftpad: int32 (b,): the first token of each sequence in its entry; those before it
            are padding, which cache_seqlens and rotary positions count. Not with a block_table.
        block_table: int32 (b, max_pages): the pages of each sequence, in order.
        softmax_scale: Factor on the scores; None for 1 / sqrt(head_dim).
        causal: Whether to mask keys after the query.
        window_size: (left, right), -1 for unlimited.
        softcap: 0.0 for none.
        rotary_interleaved: Whether elements 0 and 1 are a pair, 2 and 3, and so on; else element i
            and i + rotary_dim / 2.
        alibi_slopes: float32 (h,) or (b, h).
        num_splits: Into how many parts the keys of a sequence are split at most, to be computed at
            the same time; at most 128, and 0 for a choice by shape. With any other number a
            sequence's result is the same, bit for bit, in any batch. On the CPU keys are never
            split.
        return_softmax_lse: Also return the log-sum-exp.
        sinks: As in :func:`flash_attn_func`.

    Returns:
        out: In q's shape and dtype, contiguous. With ``return_softmax_lse`` also ``softmax_lse``,
        float32 (b, h, seqlen_q), of any strides. A row that sees no key has output 0 and
        log-sum-exp -inf, or sink.

    Raises:
        TypeError: for a wrong type or dtype, and for a tensor that is not dense.
        ValueError: for a wrong value, shape or device; for an int cache_seqlens, and for values of
            CPU tensors, that do not fit the cache: nothing has been written then. A compiled
            function raises it when it runs, but a RuntimeError for the int with CUDA tensors.
        NotImplementedError: for what is not supported on the tensors' device yet, and for
            gradients.
    """
    fn = "flash_attn_with_kvcache"
    o = options_of(fn, softmax_scale, causal, window_size, softcap, num_splits, rotary_interleaved)
    if return_softmax_lse is not False and return_softmax_lse is not True:
        return_softmax_lse = check_flag(fn, "return_softmax_lse", return_softmax_lse)
    t = (
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
        cache_leftpad, block_table, sinks, alibi_slopes,
    )  # fmt: skip
    if not torch.compiler.is_compiling() and type(q) is torch.Tensor and q.is_cuda:
        found = ops_kvcache.launch_unchecked(t, o, return_softmax_lse)
        if found is not None:
            return found if return_softmax_lse else found[0]
    return attend_checked(fn, t, o, return_softmax_lse)


def attend_checked(fn: str, given: tuple, options: tuple, returns_lse: bool):
    """Checks all arguments of a call, and computes it.

    Args:
        fn: For messages.
        given: The fields of Tensors; cache_seqlens may be an int.
        options: As options_of returns them.
        returns_lse: Whether the log-sum-exp is returned.
    """
    t, o = _checked(fn, given, options)
    q = t.q
    if not (q.is_cpu or q.is_meta):
        out, lse = ops_kvcache.launch(fn, t, o)
    elif is_traced(q) or q.is_meta:
        out, lse = ops_kvcache.attend(t, o)
    else:
        out, lse = attend(fn, t, o)
    return (out, lse) if returns_lse else out


def checked(fn: str, given: tuple, options: tuple) -> tuple[Tensors, Options]:
    """Returns a call's tensors and options after all checks. ``options`` are softmax_scale, causal,
    window_size, softcap, num_splits and rotary_interleaved."""
    return _checked(fn, given, options_of(fn, *options))


def _checked(fn: str, given: tuple, o: tuple) -> tuple[Tensors, Options]:
    t = Tensors(*given)
    q, cache_seqlens, sinks, alibi_slopes = t.q, t.cache_seqlens, t.sinks, t.alibi_slopes
    t = t._replace(cache_seqlens=lengths_of(fn, cache_seqlens, q))
    d = check_cache(fn, t)
    if not (cache_seqlens is None or isinstance(cache_seqlens, torch.Tensor)):
        check_room(fn, t, cache_seqlens)
    o = Options(check_scale(fn, o[0], d), *o[1:])
    if alibi_slopes is not None:
        check_alibi(fn, alibi_slopes, q, q.shape[0])
    if sinks is not None:
        check_sinks(fn, sinks, q)
    if q.is_cpu:
        check_dtype(fn, "q.dtype", q.dtype, q.device)
    else:
        check_for_kernels(fn, "q", q, d, o.softmax_scale)
    check_no_gradient(fn, Tensors._fields, *t)
    if not is_traced(q):
        check_no_transform(fn)
    if not (q.is_cpu or q.is_meta):
        check_kernel_scores(fn, o.softmax_scale, o.softcap, alibi_slopes is not None)
    return t, o
