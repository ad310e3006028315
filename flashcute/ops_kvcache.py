"""The operators of a cache: ``flashcute::attend_kvcache``, and one that appends to the cache first.

Tracers see one opaque node, and which tensors it writes to: ``attend_kvcache`` reads the cache,
``append_attend_kvcache`` declares that it changes k_cache and v_cache. They are defined here, in
Python, with an implementation for CPU tensors and fakes for all devices, which need no binding; the
binding implements them for CUDA. They are registered when this module is imported.

:mod:`flashcute.reference_kvcache` defines the results. Values of lengths and pages that do not fit
the cache raise an error on the CPU, where they can be read. On other devices nothing waits for them
and an implementation ensures, for any values: nothing outside the tensors is read or written; new
tokens beyond a sequence's pages, or in a page outside the cache, are dropped; keys beyond a
sequence's pages are not seen, those in a page outside the cache count as zeros; queries and keys at
positions beyond the rotary tables are not rotated; and other sequences' results do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from . import checks, cpu_kvcache, loading, ops, resolver_errors
from .checks_kvcache import Tensors, apart, check_cache, check_no_gradient, check_splits
from .config import NAMESPACE
from .cpu_kvcache import Options
from .cpu_operator import is_seen
from .features import VECTOR

_CACHE = "Tensor k_cache, Tensor v_cache"
_CHANGED_CACHE = "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v"
_ROTARY = "Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved"
_PLACES = "Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? block_table"
_OPTIONS = (
    "float softmax_scale, bool causal, int window_left, int window_right, Tensor? sinks, "
    "float softcap, Tensor? alibi_slopes, int num_splits"
)
_RESULTS = "(Tensor out, Tensor softmax_lse)"

SCHEMAS = {
    "attend_kvcache": (
        f"(Tensor q, {_CACHE}, Tensor? cache_seqlens, {_PLACES}, {_OPTIONS}) -> {_RESULTS}"
    ),
    "append_attend_kvcache": (
        f"(Tensor q, {_CHANGED_CACHE}, {_ROTARY}, Tensor cache_seqlens, {_PLACES}, {_OPTIONS})"
        f" -> {_RESULTS}"
    ),
}

_SMALL = (
    *("rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad"),
    *("block_table", "alibi_slopes"),
)

# A window of this size is unlimited in effect. Cutting longer ones to it keeps the operators' int
# arguments within 64 bits.
_MAX_WINDOW = 2**62

# Bound here as every call asks them.
_is_tracing = torch._C._is_tracing
_is_grad_enabled = torch.is_grad_enabled
_in_inference_mode = torch.is_inference_mode_enabled
# Called for a cache that is appended to, so that autograd notices if it saved the cache before.
increment_version = torch.autograd.graph.increment_version

# How the binding's own errors begin.
_OF_A_KERNEL = f"{NAMESPACE}::attend_kvcache: ", f"{NAMESPACE}::attend_varlen: "


def bounded(o: Options) -> Options:
    """Returns ``o`` with a window whose sides fit the operators' int arguments."""
    return o._replace(
        window_left=min(int(o.window_left), _MAX_WINDOW),
        window_right=min(int(o.window_right), _MAX_WINDOW),
    )


def attend(t: Tensors, o: Options) -> tuple[Tensor, Tensor]:
    """Calls the operator for these arguments: the one that appends, if there are new tokens."""
    o = bounded(o)
    options = *o[:4], t.sinks, o.softcap, t.alibi_slopes, o.num_splits
    lengths = t.cache_seqlens, t.cache_batch_idx, t.cache_leftpad, t.block_table
    ops = getattr(torch.ops, NAMESPACE)
    if t.k is None:
        return ops.attend_kvcache.default(*t[:3], *lengths, *options)
    rotary = t.rotary_cos, t.rotary_sin, o.rotary_interleaved
    return ops.append_attend_kvcache.default(*t[:5], *rotary, *lengths, *options)


@functools.cache
def _no_grad() -> tuple[Callable, Callable]:
    """Returns what overloads of ``read_kvcache_no_grad`` and ``attend_kvcache_no_grad`` call."""
    ops = getattr(torch.ops, NAMESPACE)
    return ops.read_kvcache_no_grad.default._op, ops.attend_kvcache_no_grad.default._op


@functools.cache
def _varlen() -> Callable:
    return getattr(torch.ops, NAMESPACE).attend_varlen_no_grad.default._op


@functools.cache
def planned() -> tuple[Callable, Callable, Callable]:
    """Returns ``plan_kvcache``, ``run_plan`` and ``append_run_plan``."""
    ops = getattr(torch.ops, NAMESPACE)
    names = "plan_kvcache", "run_plan", "append_run_plan"
    return tuple(getattr(ops, name).default._op for name in names)


def call_binding(op: Callable, *args):
    """Returns the results of an operator, which are None for arguments that it refuses; also None
    where the dispatcher refuses arguments, as those that are no dense tensors."""
    try:
        return op(*args)
    except (RuntimeError, TypeError) as error:
        resolver_errors.raise_cause(error)
        if str(error).startswith(_OF_A_KERNEL):
            raise
        return None


def is_eager(q, k, v, tensors: tuple) -> bool:
    """Returns whether nothing records, overrides or differentiates a call of q, k and v.

    Args:
        tensors: All that may have a gradient, of any types.
    """
    if not (type(q) is type(k) is type(v) is Tensor) or is_seen() or _is_tracing():
        return False
    return not (_is_grad_enabled() and any(getattr(x, "requires_grad", 0) for x in tensors))


def may_write(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Returns whether both caches can be appended to here: outside of inference mode, only those
    that were not made in it."""
    return _in_inference_mode() or not (k_cache.is_inference() or v_cache.is_inference())


def launch_unchecked(t: tuple, o: tuple, returns_lse: bool) -> tuple[Tensor, Tensor | None] | None:
    """Returns the results of an eager call of unchecked CUDA tensors, if kernels can take all
    arguments as they are.

    The binding's checks decide that, as checks in Python take longer than the rest of a call.

    Args:
        t: The fields of :class:`Tensors`, of any types; cache_seqlens may be an int.
        o: The fields of :class:`Options`, checked; softmax_scale may be None, the default.
        returns_lse: Whether the log-sum-exp is wanted.

    Returns:
        out and the log-sum-exp; None where an argument is refused or a tensor has to be copied.
        Nothing has been written then.
    """
    q, k_cache, v_cache, k, v, cos, sin, lengths, entries, leftpad, table, sinks, slopes = t
    if ops._fwd is None or not is_eager(q, k_cache, v_cache, t):
        return None
    if k is not None and not may_write(k_cache, v_cache):
        return None
    scale, causal, left, right, softcap, interleaved, num_splits = o
    in_cache = None
    if type(lengths) is int:
        in_cache, lengths = lengths, None
    args = q, k_cache, v_cache, lengths, in_cache, table, scale, causal
    is_plain = num_splits == 0 and left < 0 and right < 0 and softcap == 0.0
    is_plain = is_plain and sinks is slopes is entries is leftpad is None
    read, attend = _no_grad()
    if is_plain and k is v is cos is sin is None and not returns_lse:
        out = call_binding(read, *args)
        return None if out is None else (out, None)
    args += returns_lse, k, v, cos, sin, interleaved
    if not is_plain:
        if type(sinks) is Tensor and sinks.dtype is q.dtype:
            sinks = sinks.float()
        args += num_splits, min(left, _MAX_WINDOW), min(right, _MAX_WINDOW), softcap
        args += sinks, slopes, entries, leftpad
    results = call_binding(attend, *args)
    if results is None or results[0] is None:
        return None
    if k is not None:
        increment_version((k_cache, v_cache))
    return results


def launch_varlen_unchecked(
    t: tuple, lengths: tuple, o: tuple, returns_lse: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Does what :func:`launch_unchecked` does for a ragged batch, keys packed or in pages.

    Args:
        t: q, k, v, sinks, alibi_slopes and block_table, of any types.
        lengths: cu_seqlens_q and cu_seqlens_k, seqused_q and seqused_k, max_seqlen_q and
            max_seqlen_k, of any types.
        o: As in :func:`launch_unchecked`.
        returns_lse: As in :func:`launch_unchecked`.
    """
    q, k, v, sinks, slopes, table = t
    cu_q, cu_k, used_q, used_k, max_q, max_k = lengths
    # An operator would accept a tensor as an int, and wait for the device to read it.
    if ops._fwd is None or not (is_eager(q, k, v, t) and type(max_q) is type(max_k) is int):
        return None
    scale, causal, left, right, softcap, _, num_splits = o
    args = q, k, v, cu_q, cu_k, used_k, table, max_q, max_k, scale, causal, returns_lse
    is_short = left < 0 and right < 0 and softcap == 0.0 and sinks is slopes is used_q is None
    if num_splits != 0 or not is_short:
        args += (num_splits,)
    if not is_short:
        if type(sinks) is Tensor and sinks.dtype is q.dtype:
            sinks = sinks.float()
        args += min(left, _MAX_WINDOW), min(right, _MAX_WINDOW), softcap, sinks, slopes, used_q
    results = call_binding(_varlen(), *args)
    return None if results is None or results[0] is None else results


def launch(fn: str, t: Tensors, o: Options) -> tuple[Tensor, Tensor]:
    """Computes :func:`attend` of CUDA tensors by the kernels, eager or traced."""
    d = t.q.shape[3]
    ready = {}
    for name in ("q", "k", "v", "k_cache", "v_cache"):
        x = getattr(t, name)
        if x is None or (d % VECTOR == 0 and loading.regular(x) and loading.aligned(x)):
            continue
        if t.k is not None and name in ("k_cache", "v_cache"):
            _refuse_to_write(fn, name, x)
        ready[name] = (loading.padded if d % VECTOR else loading.loadable)(fn, name, x)
    for name in _SMALL:
        x = getattr(t, name)
        if x is not None and not x.is_contiguous():
            ready[name] = x.contiguous()
    if t.sinks is not None:
        ready["sinks"] = t.sinks.float().contiguous()
    if ready:
        t = t._replace(**ready)
    ops.ensure_loaded(t.q)
    if torch.compiler.is_compiling() or is_seen():
        out, lse = attend(t, o)
    else:
        if t.k is not None:
            t = apart(fn, t)
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = resolver_errors.call(attend, t, o)
        if t.k is not None:
            increment_version((t.k_cache, t.v_cache))
    return (out[..., :d].contiguous() if d % VECTOR else out), lse


def _refuse_to_write(fn: str, name: str, cache: Tensor) -> None:
    if cache.shape[3] % VECTOR:
        raise NotImplementedError(
            f"{fn}: expected head_dim to be a multiple of {VECTOR} where k and v are appended on "
            f"CUDA, got {name}.shape={tuple(cache.shape)}; allocate the cache with more columns "
            "and pad q, k and v with zeros"
        )
    raise NotImplementedError(
        f"{fn}: expected strides of {name} that are multiples of {VECTOR} elements, its last "
        "dimension contiguous and its start at a multiple of 16 bytes where k and v are appended "
        f"on CUDA, got {name}.stride()={tuple(cache.stride())} and "
        f"{name}.storage_offset()={cache.storage_offset()}; allocate the cache that way"
    )


def _parts(arguments: tuple[str, ...], args: tuple) -> tuple[Tensors, Options]:
    """Returns the tensors and options among the arguments of an operator."""
    given = dict(zip(arguments, args, strict=False))  # torch leaves out trailing defaults
    tensors = {name: x for name, x in given.items() if name in Tensors._fields}
    options = {name: x for name, x in given.items() if name in Options._fields}
    return Tensors(**tensors), Options(**options)


def _checked(name: str, implementation: Callable) -> Callable:
    """Returns ``implementation`` behind the checks of what is known on every device."""
    fn, arguments = f"{NAMESPACE}::{name}", _arguments(name)

    def checked(*args):
        t, o = _parts(arguments, args)
        d = check_cache(fn, t)
        scale = checks.check_scale(fn, o.softmax_scale, d)
        checks.check_window(fn, (o.window_left, o.window_right))
        checks.check_softcap(fn, o.softcap)
        check_splits(fn, o.num_splits)
        if t.sinks is not None:
            checks.check_sinks(fn, t.sinks, t.q)
        if t.alibi_slopes is not None:
            checks.check_alibi(fn, t.alibi_slopes, t.q, t.q.shape[0])
        if t.q.is_cpu:
            checks.check_dtype(fn, "q.dtype", t.q.dtype, t.q.device)
        else:
            checks.check_for_kernels(fn, "q", t.q, d, scale)
        return implementation(fn, t, o)

    return checked


def _arguments(name: str) -> tuple[str, ...]:
    schema = getattr(getattr(torch.ops, NAMESPACE), name).default._schema
    return tuple(argument.name for argument in schema.arguments)


def _fake(fn: str, t: Tensors, o: Options) -> tuple[Tensor, Tensor]:
    b, seqlen_q, h, _ = t.q.shape
    lse = t.q.new_empty((b, h, seqlen_q) if t.q.is_cpu else (h, b, seqlen_q), dtype=torch.float32)
    return t.q.new_empty(t.q.shape), lse if t.q.is_cpu else lse.transpose(0, 1)


def _autograd(name: str) -> Callable:
    """Returns the operator's autograd kernel, which raises rather than lose a derivative."""
    op, arguments = getattr(getattr(torch.ops, NAMESPACE), name).default, _arguments(name)
    changed = [n for n, x in enumerate(op._schema.arguments) if x.alias_info is not None]

    def kernel(*args):
        pairs = zip(arguments, args, strict=False)
        names, tensors = zip(*(x for x in pairs if isinstance(x[1], Tensor)), strict=True)
        check_no_gradient(f"{NAMESPACE}::{name}", names, *tensors)
        with torch._C._AutoDispatchBelowAutograd():
            results = op(*args)
        if changed:
            # Autograd then notices if it saved one of these tensors before.
            torch.autograd.graph.increment_version([args[n] for n in changed])
        return results

    return kernel


def _register() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, _checked(name, cpu_kvcache.attend), "CPU")
        library.impl(name, _autograd(name), "Autograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _checked(name, _fake), lib=library)
    return library


_library = _register()  # registrations live as long as it does
