"""The torch operators: loading the binding, choosing kernels for it, CPU implementation and fakes.

The operator is defined and implemented for CUDA in ``csrc/flash_attn/flash_api.cpp``. For a problem
it has not met, the binding calls :func:`_resolve` here, which picks a configuration, has it built
if need be, and returns the kernel's address; after that the binding remembers.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from typing import TYPE_CHECKING, NamedTuple

import torch

from . import autograd, checks, cpu, cpu_ops, cpu_varlen, heuristics, jit, ops_bwd, resolver_errors
from .checks_kvcache import check_packed_queries, check_splits, check_table
from .checks_varlen import (
    Names,
    check_bounds,
    check_lengths,
    check_packed_tokens,
)
from .config import DTYPES, MASKS, NAMESPACE
from .cpu_operator import below_autograd, gives_shapes, is_seen
from .features import CAPABILITIES
from .ops_checks import check_for_device, check_options, rounded

if TYPE_CHECKING:
    from collections.abc import Callable


class _Problem(ctypes.Structure):
    """``flash::Problem`` of kernel_table.h."""

    _fields_ = (
        ("device", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("mask", ctypes.c_int32),
        ("b", ctypes.c_int32),
        ("seqlen_q", ctypes.c_int32),
        ("seqlen_k", ctypes.c_int32),
        ("h", ctypes.c_int32),
        ("h_k", ctypes.c_int32),
        ("d", ctypes.c_int32),
        ("window_left", ctypes.c_int32),
        ("window_right", ctypes.c_int32),
        ("softcap", ctypes.c_int32),
        ("alibi", ctypes.c_int32),
        ("dropout", ctypes.c_int32),
        ("cache", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("num_splits", ctypes.c_int32),
        ("backward", ctypes.c_int32),
        ("varlen", ctypes.c_int32),
    )


class _Choice(ctypes.Structure):
    """``flash::Choice`` of kernel_table.h."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("pack_heads", ctypes.c_int32),
        ("num_splits", ctypes.c_int32),
        ("split_blocks", ctypes.c_int32),
        ("split_ctas", ctypes.c_int32),
    )


_Resolver = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.POINTER(_Problem),
    ctypes.POINTER(_Choice),
    ctypes.c_void_p,
    ctypes.c_int32,
)

_load_lock = threading.Lock()
_fwd: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None  # the operator fwd_no_grad


def _renew_load_lock() -> None:
    global _load_lock  # noqa: PLW0603
    _load_lock = threading.Lock()


# The thread that holds the lock during a fork does not exist in the child.
os.register_at_fork(after_in_child=_renew_load_lock)
# Registrations live as long as these objects do.
_keep_alive: list[object] = []


def _choose(problem: _Problem) -> _Choice:
    properties = torch.cuda.get_device_properties(problem.device)
    capability = properties.major, properties.minor
    if capability not in CAPABILITIES:
        name = "bwd" if problem.backward else "fwd"
        raise NotImplementedError(
            f"{NAMESPACE}::{name}: expected a GPU of compute capability in {CAPABILITIES}, "
            f"got cuda:{problem.device} of {capability}; move the tensors to the CPU"
        )
    mask = MASKS[problem.mask]
    window = problem.window_left, problem.window_right
    call = heuristics.FwdProblem(
        dtype=DTYPES[problem.dtype],
        causal=mask == "causal",
        b=problem.b,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        h=problem.h,
        h_k=problem.h_k,
        d=problem.d,
        window=window if mask == "local" else None,
        softcap=bool(problem.softcap),
        alibi=bool(problem.alibi),
        dropout=bool(problem.dropout),
        cache=bool(problem.cache),
        page_size=problem.page_size,
        num_splits=problem.num_splits,
        varlen=bool(problem.varlen),
    )
    sms = properties.multi_processor_count
    if problem.backward:
        config = heuristics.choose_bwd(call, capability, sms, every=problem.backward == 1)
    else:
        config = heuristics.choose_fwd(call, capability, sms)
    kernel = jit.get_kernel(config, f"{capability[0]}{capability[1]}")
    if problem.backward:
        return _Choice(kernel.address)
    packs = heuristics.packs_heads(call, config, sms)
    return _Choice(kernel.address, packs, *heuristics.splits(call, config, sms))


@_Resolver
def _resolve(problem, choice, error, error_size):
    # Nothing may leave a ctypes callback, KeyboardInterrupt during a build included.
    try:
        choice[0] = _choose(problem.contents)
        return 0
    except BaseException as exception:
        text, _, _ = f"{type(exception).__name__}: {exception}".partition("\0")
        text = text.encode(errors="replace")[: error_size - 1].decode(errors="ignore").rstrip()
        resolver_errors.remember(exception, text)
        message = text.encode() + b"\0"
        ctypes.memmove(error, message, len(message))
        return 1


def _empty_outputs(q):
    b, seqlen_q, h, _ = q.shape
    return torch.empty_like(q), q.new_empty((b, h, seqlen_q), dtype=torch.float32)


class _Options(NamedTuple):
    """The arguments of ``attend`` after ``causal``; torch leaves out trailing defaults."""

    window_left: int = -1
    window_right: int = -1
    sinks: torch.Tensor | None = None
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    deterministic: bool = False
    rng_state: torch.Tensor | None = None
    dropout_p: float = 0.0


def _cpu(q, k, v, softmax_scale, causal, o: _Options):
    tensors = cpu.Tensors(q, k, v, o.alibi_slopes, o.sinks, None, o.rng_state)
    window = o.window_left, o.window_right
    options = cpu.Options(softmax_scale, causal, *window, o.softcap, o.dropout_p)
    with torch.no_grad():
        return cpu.attend(tensors, options)[:2]


def _fake(q, k, v, softmax_scale, causal, o: _Options):
    return _empty_outputs(q)


def _differentiable_on_cpu(q, k, v, softmax_scale, causal, o: _Options):
    return cpu_ops.attend(
        q, k, v, softmax_scale=softmax_scale, causal=causal,
        window_size=(o.window_left, o.window_right), softcap=o.softcap,
        alibi_slopes=o.alibi_slopes, sinks=o.sinks, dropout_p=o.dropout_p, rng_state=o.rng_state,
    )[:2]  # fmt: skip


class _VarlenOptions(NamedTuple):
    """The arguments of ``attend_varlen`` after ``causal``."""

    window_left: int = -1
    window_right: int = -1
    sinks: torch.Tensor | None = None
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    rng_state: torch.Tensor | None = None
    dropout_p: float = 0.0
    block_table: torch.Tensor | None = None
    num_splits: int = 0
    deterministic: bool = False


def _checked(name: str, implementation: Callable) -> Callable:
    """Returns ``implementation`` behind the checks that the binding makes for CUDA tensors.

    Arguments that ``fwd`` does not have follow ``causal``.
    """
    fn = f"{NAMESPACE}::{name}"

    def checked(q, k, v, softmax_scale, causal, *options):
        o = rounded(fn, _Options(*options))
        d = checks.check_tensors(fn, ("q", "k", "v"), q, k, v)
        softmax_scale = checks.check_scale(fn, softmax_scale, d)
        check_options(fn, q, q.shape[0], o)
        check_for_device(fn, q, d, softmax_scale, "flash_attn_func")
        return implementation(q, k, v, softmax_scale, causal, o)

    return checked


def _varlen_options(args: tuple) -> _VarlenOptions:
    return rounded(_VARLEN_NAMES.fn, _VarlenOptions(*args[11:]))


def _varlen_parts(args: tuple) -> tuple[cpu_varlen.Tensors, cpu_varlen.Options]:
    """Converts the arguments of ``attend_varlen``, in its schema's order, to those on the CPU."""
    q, k, v, *lengths, max_q, max_k, scale, causal = args[:11]
    o = _varlen_options(args)
    tensors = cpu_varlen.Tensors(
        q, k, v, o.alibi_slopes, o.sinks, *lengths, o.rng_state, o.block_table
    )
    window = o.window_left, o.window_right
    options = cpu_varlen.Options(max_q, max_k, scale, causal, *window, o.softcap, o.dropout_p)
    return tensors, options


def _varlen_on_cpu(*args):
    with torch.no_grad():
        return cpu_varlen.attend(*_varlen_parts(args), _VARLEN_NAMES)[:2]


def _varlen_fake(q, *args):
    total_q, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((h, total_q), dtype=torch.float32)


def _differentiable_varlen_on_cpu(*args):
    return cpu_varlen.attend_or_trace(_VARLEN_NAMES, *_varlen_parts(args))[:2]


_VARLEN_NAMES = Names(f"{NAMESPACE}::attend_varlen")


def _checked_varlen(name: str, implementation: Callable) -> Callable:
    """Does what :func:`_checked` does, for ``attend_varlen``."""

    def checked(*args):
        tensors, options = _varlen_parts(args)
        fn, q = _VARLEN_NAMES.fn, tensors.q
        o = _varlen_options(args)
        if o.block_table is None:
            d = check_packed_tokens(_VARLEN_NAMES, q, tensors.k, tensors.v)
        else:
            d = check_packed_queries(_VARLEN_NAMES, *tensors[:3])
        b = check_lengths(_VARLEN_NAMES, q, *tensors[5:9])
        check_table(fn, o.block_table, q, b)
        check_splits(fn, o.num_splits)
        check_bounds(_VARLEN_NAMES, *options[:2])
        scale = checks.check_scale(fn, options.softmax_scale, d)
        check_options(fn, q, b, o)
        check_for_device(fn, q, d, scale, "flash_attn_varlen_func")
        return implementation(*args)

    return checked


def _autograd(name: str, on_cpu: Callable, elsewhere: Callable) -> Callable:
    """Returns the operator's autograd kernel, which calls ``on_cpu`` or, for other tensors,
    ``elsewhere`` where a derivative is asked for.

    Without it torch would compute the output and lose the tangent, or the gradient with no more
    than a warning.
    """
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    arguments = [argument.name for argument in op._schema.arguments]
    function = "flash_attn_varlen_func" if "cu_seqlens_q" in arguments else "flash_attn_func"

    def kernel(*args):
        # args may lack trailing defaults, which are no tensors.
        given = zip(arguments, args, strict=False)
        names, tensors = zip(*(x for x in given if isinstance(x[1], torch.Tensor)), strict=True)
        wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if not tensors[0].is_cpu:
            checks.check_no_tangent(f"{NAMESPACE}::{name}", names, *tensors)
            if wants_gradient:
                return elsewhere(*args)
        elif checks.has_tangent(*tensors):
            if torch._C._are_functorch_transforms_active():
                raise NotImplementedError(
                    f"{NAMESPACE}::{name}: expected no derivative in forward mode of torch.func "
                    f"(jvp, jacfwd) of the operator, got one; call {function}, which has it on CPU"
                )
            return on_cpu(*args)
        elif wants_gradient:
            return on_cpu(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return kernel


def _attend_with_gradient(q, k, v, softmax_scale, causal, *options):
    o = _Options(*options)
    autograd.check_slopes(f"{NAMESPACE}::attend", o.alibi_slopes)
    return autograd.attend(q, k, v, softmax_scale, causal, *o[:3], *o[5:], *o[3:5])


def _attend_varlen_with_gradient(*args):
    o = _varlen_options(args)
    autograd.check_slopes(_VARLEN_NAMES.fn, o.alibi_slopes)
    autograd.check_pages(_VARLEN_NAMES.fn, o.block_table)
    return autograd.attend_varlen(*args)


def load() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Loads the binding once and returns the operator ``torch.ops.<NAMESPACE>.fwd.default``.

    Raises:
        RuntimeError: if the binding is neither shipped nor cached and cannot be built.
    """
    global _fwd  # noqa: PLW0603 - guarded by the lock
    with _load_lock:
        if _fwd is None:
            binding = ctypes.CDLL(str(jit.load_binding()))
            binding.flashcute_set_resolver.argtypes = (_Resolver,)
            binding.flashcute_set_resolver.restype = None
            binding.flashcute_set_resolver(_resolve)
            # A thread of C++ may still call the operator when the interpreter has ended.
            atexit.register(binding.flashcute_set_resolver, _Resolver())
            library = torch.library.Library(NAMESPACE, "IMPL")
            dense = _checked, _cpu, _fake, _differentiable_on_cpu
            ragged = _checked_varlen, _varlen_on_cpu, _varlen_fake, _differentiable_varlen_on_cpu
            kinds = {
                "fwd": (*dense, _attend_with_gradient),
                "fwd_no_grad": (*dense, None),
                "attend": (*dense, _attend_with_gradient),
                "attend_varlen": (*ragged, _attend_varlen_with_gradient),
                "bwd": (*ops_bwd.DENSE, autograd.backward, autograd.backward),
                "bwd_varlen": (*ops_bwd.RAGGED, *(autograd.backward_varlen,) * 2),
            }
            for name, (checked, on_cpu, fake, differentiable, elsewhere) in kinds.items():
                public = name.removesuffix("_no_grad")
                library.impl(name, checked(public, on_cpu), "CPU")
                shapes = checked(public, fake)
                torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=library)
                if name != "fwd_no_grad":
                    kernel = _autograd(name, checked(name, differentiable), elsewhere)
                    library.impl(name, kernel, "Autograd")
            _keep_alive.extend((binding, library))
            _fwd = getattr(torch.ops, NAMESPACE).fwd_no_grad.default
    return getattr(torch.ops, NAMESPACE).fwd.default


def remove_plan(plan: int) -> None:
    """Frees the memory of a plan; see :mod:`flashcute.kvcache_plan`."""
    _keep_alive[0].flashcute_remove_plan(ctypes.c_int64(plan))


def _load_while_tracing() -> bool:
    load()
    return True


# What torch.compiler.assume_constant_result does, without importing torch._dynamo, which takes
# longer than all of this package: dynamo calls the function instead of tracing it.
_load_while_tracing._dynamo_marked_constant = True


def ensure_loaded(q: torch.Tensor) -> bool:
    """Calls :func:`load`, in traced calls, too.

    Returns:
        False where it is not called because a call with ``q`` only gives shapes. The operators of
        CPU tensors, which need no compiler, give the same shapes.
    """
    if torch.compiler.is_compiling():
        return _load_while_tracing()
    if _fwd is None:
        if gives_shapes(q):
            return False
        load()
    return True


def fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention of q to k and v by the operator, which checks only for memory safety.

    Args:
        q: (b, seqlen_q, h, d), last dimension contiguous.
        k: (b, seqlen_k, h_k, d), last dimension contiguous; h is a multiple of h_k.
        v: As k.
        softmax_scale: Factor on the scores, > 0.
        causal: Mask out keys beyond the diagonal that ends in the bottom-right corner.

    Returns:
        out like q, and the natural log-sum-exp of the scores in float32, (b, h, seqlen_q).

    Raises:
        RuntimeError: for an input that the operator cannot take.
        Exception: whatever choosing or building the kernel raised.
    """
    if torch.compiler.is_compiling() and _load_while_tracing():
        return getattr(torch.ops, NAMESPACE).fwd.default(q, k, v, softmax_scale, causal)
    # Whatever records or transforms a call has to see the operator that has the gradient.
    if _fwd is None or is_seen():
        if not ensure_loaded(q):
            return cpu_ops.attend(q, k, v, softmax_scale=softmax_scale, causal=causal)[:2]
        return resolver_errors.call(load(), q, k, v, softmax_scale, causal)
    try:
        if autograd.wants_gradient(q, k, v):
            return autograd.attend_eagerly(q, k, v, softmax_scale, causal, -1, -1, None)
        return _fwd(q, k, v, softmax_scale, causal)
    except RuntimeError as error:
        resolver_errors.raise_cause(error)
        raise


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    sinks: torch.Tensor | None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    rng_state: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what :func:`fwd` does, with all options.

    Args:
        window_size: (left, right) of the diagonal that ends in the bottom-right corner; -1 for
            unlimited.
        sinks: (h,), contiguous, float32 on CUDA: a further logit for each query head.
        softcap: 0.0 for none.
        alibi_slopes: (h,) or (b, h), contiguous, float32.
        deterministic: Bitwise repeatable gradients.
        rng_state: (2,), int64, of :func:`flashcute.dropout.dropout_mask`; needed where dropout_p
            is not 0. The kernels read it on the device, when they run.
        dropout_p: 0.0 for none.
    """
    if not ensure_loaded(q):
        return cpu_ops.attend(
            q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
            softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p,
            rng_state=rng_state,
        )[:2]  # fmt: skip
    op = getattr(torch.ops, NAMESPACE).attend.default
    args = q, k, v, softmax_scale, causal, *window_size, sinks
    options = softcap, alibi_slopes, deterministic, rng_state, dropout_p
    if torch.compiler.is_compiling():
        return op(*args, *options)
    if not is_seen():
        if not autograd.wants_gradient(q, k, v, sinks, alibi_slopes):
            return resolver_errors.call(below_autograd, op, (*args, *options))
        autograd.check_slopes(f"{NAMESPACE}::attend", alibi_slopes)
        return resolver_errors.call(autograd.attend_eagerly, *args, *options[2:], *options[:2])
    return resolver_errors.call(op, *args, *options)


def attend_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[torch.Tensor | None, ...],
    max_seqlens: tuple[int, int],
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    sinks: torch.Tensor | None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    block_table: torch.Tensor | None = None,
    num_splits: int = 0,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what :func:`attend` does for a ragged batch; the host does not wait for the device.

    Args:
        q: (total_q, h, d), last dimension contiguous.
        k: (total_k, h_k, d), or with a block_table (num_pages, page_size, h_k, d); as v.
        lengths: cu_seqlens_q and cu_seqlens_k, (b + 1,), seqused_q and seqused_k, (b,) or None;
            contiguous and int32 on CUDA. Whatever they hold, nothing outside the tensors is read or
            written.
        max_seqlens: max_seqlen_q and max_seqlen_k.
        alibi_slopes: (h,) or (b, h) of b sequences, contiguous, float32.
        block_table: (b, max_pages), int32, its last dimension contiguous.
        num_splits: Into how many parts the keys of a sequence are split at most; 0 for a choice,
            which is 1 without a block_table.

    Returns:
        out (total_q, h, d), contiguous, and the log-sum-exp in float32, (h, total_q).
    """
    if not ensure_loaded(q):
        tensors = cpu_varlen.Tensors(q, k, v, alibi_slopes, sinks, *lengths, rng_state, block_table)
        given = *max_seqlens, softmax_scale, causal, *window_size, softcap, dropout_p
        return cpu_varlen.attend_or_trace(_VARLEN_NAMES, tensors, cpu_varlen.Options(*given))[:2]
    op = getattr(torch.ops, NAMESPACE).attend_varlen.default
    options = *window_size, sinks, softcap, alibi_slopes, rng_state, dropout_p
    options += block_table, num_splits, deterministic
    args = q, k, v, *lengths, *max_seqlens, softmax_scale, causal, *options
    if torch.compiler.is_compiling():
        return op(*args)
    if not is_seen():
        if not autograd.wants_gradient(q, k, v, sinks, alibi_slopes):
            return resolver_errors.call(below_autograd, op, args)
        autograd.check_slopes(_VARLEN_NAMES.fn, alibi_slopes)
        autograd.check_pages(_VARLEN_NAMES.fn, block_table)
        return resolver_errors.call(autograd.attend_varlen_eagerly, *args)
    return resolver_errors.call(op, *args)
