"""One plan for the calls over a cache that the layers of a model make in a step.

All layers have the same lengths, pages and options. On CUDA the work that depends on these alone is
done once: arguments are checked, a kernel is chosen, and its tiles are laid out in memory that
keeps its address.
The results are those of :func:`flashcute.flash_attn_with_kvcache`, bit for bit.
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from . import ops, ops_kvcache
from .checks import UNLIMITED
from .flash_attn_kvcache import (
    attend_checked,
    checked,
    flash_attn_with_kvcache,
    options_of,
)
from .ops_kvcache import is_eager

_FN = "KVCachePlan"
_HAS_CUDA = torch.backends.cuda.is_built()  # else torch has no streams to ask
_NAMES = "q", "k_cache", "v_cache", "k", "v"


class KVCachePlan:
    """:func:`flash_attn_with_kvcache` with its options bound, for tensors of one shape.

    ::

        plan = KVCachePlan(cache_seqlens=lengths, block_table=table, causal=True)
        for token in range(n):
            for layer in layers:
                out = plan(q, layer.k_cache, layer.v_cache, k, v)
            lengths += 1
            plan.renew()

    The tensors that the plan is given are read on the device, in each call: fill them in place. A
    captured CUDA graph of a step then serves sequences that grow: its first call of the plan lays
    out the tiles, so each replay does, too, and all addresses stay. Keep the plan for as long as
    the graph. After a capture every call outside of a capture lays out its tiles, as it cannot know
    for which lengths a replay has done so. Calls of one plan run on one stream.
    """

    def __init__(
        self,
        *,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        rotary_interleaved: bool = True,
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
            cache_seqlens: int32 (b,): how many tokens each sequence has before a call appends to
                it; None, only if calls append nothing, for all of the cache.
            rotary_cos: For calls that append, as are rotary_sin and rotary_interleaved.
            sinks: If they are not contiguous and float32, the first call on CUDA outside
                of a capture copies them.

        The other arguments are those of :func:`flash_attn_with_kvcache`.

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
        self._rotary = rotary_cos, rotary_sin
        self._tensors = sinks, alibi_slopes
        self._options = (
            *(softmax_scale, causal, window_size, softcap, num_splits),
            rotary_interleaved,
        )
        self._first: tuple | None = None  # _kind() of the first call's tensors
        self._number = 0  # the binding's number of the plan; 0: it has none
        self._is_plannable = True
        self._renews = False
        self._capture = 0  # the capture in which tiles were last laid out; 0: none so far

    def renew(self) -> None:
        """Says that lengths or pages have changed; the next call lays out its tiles anew."""
        self._renews = True

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
    ) -> Tensor:
        """Computes attention of q to a cache, to which k and v are appended first.

        On CUDA the tiles are laid out once for all layers; before the attention of each layer a
        small kernel appends to its cache and rotates its queries.

        Args:
            q: (b, seqlen_q, h, head_dim).
            k_cache: As in :func:`flash_attn_with_kvcache`; v_cache has the same shape.
            k: (b, seqlen_new, h_k, head_dim), to be appended, and rotated if the plan has rotary
                tables; None to read the cache only.
            v: As k; both or neither.

        Returns:
            out: In q's shape and dtype, contiguous.

        Raises:
            ValueError: for tensors of another shape, dtype or device than in the first call.
            Exception: as :func:`flash_attn_with_kvcache`.
        """
        given = q, k_cache, v_cache, k, v
        if self._number and not torch.compiler.is_compiling():
            out = self._run(given)
            if out is not None:
                return out
        kinds = tuple(map(_kind, given))
        for name, first, kind in zip(_NAMES, self._first or kinds, kinds, strict=True):
            if kind != first:
                raise ValueError(
                    f"{_FN}: expected {name} as in the plan's first call, {_show(first)}, got "
                    f"{_show(kind)}; make a plan for each kind of layer"
                )
        out = self._make(given) if not self._number and self._is_plannable else None
        if out is None:
            out = self._call(given)
        self._first = kinds
        return out

    def __getstate__(self) -> dict:
        """Returns the state of a copy, without the binding's plan, as a copy has other tensors."""
        unplanned = {"_first": None, "_number": 0, "_is_plannable": True, "_kept": ()}
        return self.__dict__ | unplanned | {"_capture": 0}

    def _call(self, given: tuple) -> Tensor:
        """Computes the result without the binding's plan."""
        if not (isinstance(given[0], Tensor) and given[0].is_cuda):
            given = *given, *self._rotary, *self._places, *self._tensors
            return attend_checked(_FN, given, options_of(_FN, *self._options), False)
        scale, causal, window_size, softcap, num_splits, interleaved = self._options
        lengths, entries, leftpad, table = self._places
        sinks, slopes = self._tensors
        return flash_attn_with_kvcache(
            *given, *self._rotary, cache_seqlens=lengths, cache_batch_idx=entries,
            cache_leftpad=leftpad, block_table=table, softmax_scale=scale, causal=causal,
            window_size=window_size, softcap=softcap, rotary_interleaved=interleaved,
            alibi_slopes=slopes, num_splits=num_splits, sinks=sinks,
        )  # fmt: skip

    def _run(self, given: tuple) -> Tensor | None:
        """Computes the result by the binding's plan; None where the call needs other checks."""
        appends = given[3] is not None or given[4] is not None
        if not appends:
            given = given[:3]
        if not is_eager(*given[:3], (*given, *self._rotary, *self._tensors)):
            return None
        if appends and not ops_kvcache.may_write(*given[1:3]):
            return None
        # A captured kernel has not run, and may never run: other captures, and calls outside of
        # captures, must not rely on the tiles that it lays out.
        capture = _current_capture()
        renews = self._renews or capture != self._capture
        args = (*given, self._number) + ((True,) if renews else ())
        out = ops_kvcache.call_binding(ops_kvcache.planned()[1 + appends], *args)
        if out is not None:
            self._renews, self._capture = False, capture or self._capture
            if appends:
                ops_kvcache.increment_version(given[1:3])
        return out

    def _make(self, given: tuple) -> Tensor | None:
        """Makes the binding's plan; returns the first call's result, None if there is no plan."""
        q, k_cache, v_cache, k, _ = given
        own = *self._rotary, *self._places, *self._tensors
        if torch.compiler.is_compiling() or not is_eager(*given[:3], given + own) or not q.is_cuda:
            return None
        given += own
        t, o = checked(_FN, given, self._options)
        if k is not None and not ops_kvcache.may_write(k_cache, v_cache):
            return None
        if t.sinks is not None:
            sinks = t.sinks.float().contiguous()
            if sinks is not t.sinks and _current_capture():
                return None  # a copy in a capture has not run; a later call makes the plan
            t = t._replace(sinks=sinks)
        o = ops_kvcache.bounded(o)
        ops.ensure_loaded(q)
        args = *t[:3], *t[7:11], *o[:4], t.sinks, o.softcap, t.alibi_slopes, o.num_splits
        args += *t[3:7], o.rotary_interleaved
        made = ops_kvcache.call_binding(ops_kvcache.planned()[0], *args)
        if made is None or made[0] is None:
            self._is_plannable = False
            return None
        if k is not None:
            ops_kvcache.increment_version((k_cache, v_cache))
        out, self._number = made
        self._kept = t[5:]  # the plan has the addresses of these tensors
        self._renews, self._capture = False, _current_capture()
        weakref.finalize(self, ops.remove_plan, self._number).atexit = False
        return out


def _current_capture() -> int:
    """Returns the number, unique in the process, of the current stream's capture; 0: none."""
    if not (_HAS_CUDA and torch.cuda.is_current_stream_capturing()):
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    driver = ctypes.CDLL("libcuda.so.1")  # torch does not tell the capture's number
    error = driver.cuStreamGetCaptureInfo(stream, ctypes.byref(status), ctypes.byref(number))
    if error != 0:
        raise RuntimeError(f"{_FN}: cuStreamGetCaptureInfo() failed with CUDA error {error}")
    return number.value


def _kind(x) -> tuple:
    return (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else (None, type(x), None)


def _show(kind: tuple) -> str:
    shape, dtype, device = kind
    return f"{dtype} {tuple(shape)} on {device}" if shape is not None else f"a {dtype.__name__}"
