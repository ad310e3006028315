"""One plan for the calls over a cache that the layers of a model make in a step.

All layers have the same lengths, pages and options. On CUDA what follows from them is made once:
arguments are checked, a kernel is chosen, its tiles are laid out in memory that stays where it is.
The results are those of :func:`flashcute.flash_attn_with_kvcache`, bit for bit.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from . import ops, ops_kvcache
from .checks import UNLIMITED
from .flash_attn_kvcache import checked, flash_attn_with_kvcache
from .ops_kvcache import is_eager

_FN = "KVCachePlan"


class KVCachePlan:
    """:func:`flash_attn_with_kvcache` with its options bound, for tensors of one shape.

    ::

        plan = KVCachePlan(cache_seqlens=lengths, block_table=table, causal=True)
        for token in range(n):
            for layer in layers:
                out = plan(q, layer.k_cache, layer.v_cache)
            lengths += 1
            plan.renew()

    The tensors that the plan is given are read on the device, in each call: fill them in place. A
    captured CUDA graph of a step, :meth:`renew` included, then serves sequences that grow, as all
    addresses stay; keep the plan for as long as the graph. Calls of one plan run on one stream.
    """

    def __init__(
        self,
        *,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = UNLIMITED,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        num_splits: int = 0,
        sinks: Tensor | None = None,
    ):
        """Takes the options; the first call checks them, and lays out its tiles.

        Args:
            cache_seqlens: int32 (b,): how many tokens each sequence has; None for all of the cache.

        The others are those of :func:`flash_attn_with_kvcache`.

        Raises:
            TypeError: for a cache_seqlens that is neither a tensor nor None.
        """
        if cache_seqlens is not None and not isinstance(cache_seqlens, Tensor):
            raise TypeError(
                f"{_FN}: expected cache_seqlens to be a torch.Tensor or None, got cache_seqlens of "
                f"type {type(cache_seqlens).__name__}; pass a tensor, which may change between "
                "steps"
            )
        self._places = cache_seqlens, cache_batch_idx, cache_leftpad, block_table
        self._tensors = sinks, alibi_slopes
        self._options = softmax_scale, causal, window_size, softcap, num_splits
        self._first: tuple | None = None  # q, k_cache and v_cache of the first call, as _kind
        self._number = 0  # of the binding's plan; 0: none
        self._renews = False

    def renew(self) -> None:
        """Says that lengths or pages have changed; the next call lays out its tiles anew."""
        self._renews = True

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Attention of q to a cache, which is read.

        Args:
            q: (b, seqlen_q, h, head_dim).
            k_cache: As in :func:`flash_attn_with_kvcache`; v_cache likewise.

        Returns:
            out: In q's shape and dtype, contiguous.

        Raises:
            ValueError: for tensors of another shape, dtype or device than in the first call.
            Exception: as :func:`flash_attn_with_kvcache`.
        """
        given = q, k_cache, v_cache
        if self._number and not torch.compiler.is_compiling() and is_eager(*given, given):
            args = (*given, self._number) + ((True,) if self._renews else ())
            out = ops_kvcache.call_binding(ops_kvcache.planned()[1], *args)
            if out is not None:
                self._renews = False
                return out
        kinds = tuple(map(_kind, given))
        if self._first is None:
            out = self._make(q, k_cache, v_cache)
            self._first = kinds
            if out is not None:
                return out
        for name, first, kind in zip(("q", "k_cache", "v_cache"), self._first, kinds, strict=True):
            if kind != first:
                raise ValueError(
                    f"{_FN}: expected {name} as in the plan's first call, {_show(first)}, got "
                    f"{_show(kind)}; make a plan for each kind of layer"
                )
        scale, causal, window_size, softcap, num_splits = self._options
        lengths, entries, leftpad, table = self._places
        sinks, slopes = self._tensors
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, cache_batch_idx=entries,
            cache_leftpad=leftpad, block_table=table, softmax_scale=scale, causal=causal,
            window_size=window_size, softcap=softcap, alibi_slopes=slopes, num_splits=num_splits,
            sinks=sinks,
        )  # fmt: skip

    def _make(self, q, k_cache, v_cache) -> Tensor | None:
        """The first call's result; None where it cannot be planned."""
        given = q, k_cache, v_cache
        if torch.compiler.is_compiling() or not is_eager(*given, given) or not q.is_cuda:
            return None
        given += None, None, None, None, *self._places, *self._tensors
        t, o = checked(_FN, given, self._options)
        if t.sinks is not None:
            t = t._replace(sinks=t.sinks.float().contiguous())
        o = ops_kvcache.bounded(o)
        ops.ensure_loaded()
        args = *t[:3], *t[7:11], *o[:4], t.sinks, o.softcap, t.alibi_slopes, o.num_splits
        made = ops_kvcache.call_binding(ops_kvcache.planned()[0], *args)
        if made is None or made[0] is None:
            return None
        out, self._number = made
        self._kept = t  # whose addresses the plan has
        self._renews = False
        weakref.finalize(self, ops.remove_plan, self._number).atexit = False
        return out


def _kind(x) -> tuple:
    return (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else (None, type(x), None)


def _show(kind: tuple) -> str:
    shape, dtype, device = kind
    return f"{dtype} {tuple(shape)} on {device}" if shape is not None else f"a {dtype.__name__}"
