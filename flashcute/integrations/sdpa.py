"""PyTorch's own attention functions on flashcute's kernels.

>>> flashcute.enable()
>>> F.scaled_dot_product_attention(q, k, v, is_causal=True)

``F.scaled_dot_product_attention`` and ``torch.nn.attention.varlen.varlen_attn`` end in operators of
``aten``. PyTorch lets a provider register kernels of these operators under a name
(``torch.nn.attention.register_flash_attention_impl``) and activate them. The operators keep their
autograd, autocast and meta kernels, so autograd, torch.compile, AMP and checkpointing do not notice
whose kernels run.

What the kernels do not compute raises an error where flashcute is called directly. Here that error
becomes a warning, once for each reason, and PyTorch's own kernel runs. A call that PyTorch gives to
another backend than FlashAttention never reaches these kernels, so the operators of the other
backends are wrapped here, too, to warn about it.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import warnings
from collections.abc import Callable, Iterator

import torch
from torch.nn import attention

from .. import jit, ops
from ..config import MAX_HEAD_DIM, NAMESPACE
from ..features import VECTOR
from . import raw

_NAME = "flashcute"
_LAST_TESTED = 2, 15  # its tests ran on each torch from 2.11 to this; on a GPU on 2.11 only
_NEEDED = (
    "register_flash_attention_impl",
    "activate_flash_attention_impl",
    "restore_flash_attention_impl",
    "current_flash_attention_impl",
)

_replaced: list[str | None] = []  # the implementation that was active before, if enabled
_lock = threading.RLock()  # torch's registry has none
# An entry for each enabled() block of any thread: whether it was on before.
_blocks: list[bool] = []


def enable() -> None:
    """Make PyTorch's own attention functions run on flashcute's kernels, in the whole process.

    These are ``F.scaled_dot_product_attention`` of CUDA tensors, where PyTorch would choose its
    FlashAttention or cuDNN backend, and ``torch.nn.attention.varlen.varlen_attn``: forward and
    backward, under autograd, torch.compile, AMP and checkpointing. CPU tensors stay as they were.

    Whatever else runs on PyTorch's own kernels, with one warning for each reason: dropout, whose
    mask PyTorch draws by its own rule; a paged cache; and what PyTorch does not give to its
    FlashAttention backend, as an ``attn_mask``, other dtypes than float16 and bfloat16, head
    dimensions above 256, a causal mask over more or fewer keys than queries. The host takes some
    microseconds more for such a call. There is no warning where ``sdpa_kernel`` leaves
    FlashAttention out or puts another backend before it, nor of PyTorch's math backend in a
    compiled function, under ``torch.inference_mode``, and where somebody else had replaced its
    kernel before.

    On GPUs for which PyTorch prefers its cuDNN backend, FlashAttention is put before it in the
    order of backends, as ``sdpa_kernel(..., set_priority=True)`` does. From torch 2.15 on,
    ``varlen_attn`` prefers cuDNN whatever that order is, and a warning says so once; choose with
    ``torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)``.

    Enabling twice is enabling once. :func:`disable` restores what was there before. A torch later
    than 2.15, the last one that this was tested on, gets a warning. On a GPU it was tested on torch
    2.11, on 2.12 to 2.15 with CPU tensors.

    Raises:
        RuntimeError: this torch is older than 2.11, whose registry cannot restore its own kernels,
            or is a build for ROCm.
    """
    _require_registry()
    with _lock:
        if attention.current_flash_attention_impl() == _NAME:
            return
        major, minor = _LAST_TESTED
        if tuple(map(int, torch.__version__.split(".")[:2])) > _LAST_TESTED:
            warnings.warn(
                f"flashcute.enable: torch {torch.__version__} was not tested, the last was "
                f"{major}.{minor}; compare a result with flashcute.flash_attn_func's",
                stacklevel=2,
            )
        _replaced[:] = [attention.current_flash_attention_impl()]
        attention.register_flash_attention_impl(_NAME, register_fn=lambda: _Handle("CUDA"))
        attention.activate_flash_attention_impl(_NAME)


def disable() -> None:
    """Undo :func:`enable`: the kernels and the order of backends are those before it.

    Nothing happens where flashcute is not enabled, which includes that another implementation
    was activated since.
    """
    with _lock:
        if not is_enabled():
            return
        attention.restore_flash_attention_impl()
        for name in _replaced:
            if name is not None:
                attention.activate_flash_attention_impl(name)
        _replaced.clear()


def is_enabled() -> bool:
    """Returns whether :func:`enable` is in effect."""
    current = getattr(attention, "current_flash_attention_impl", None)
    return current is not None and current() == _NAME


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """:func:`enable` for the length of a ``with`` block, in all threads.

    A block inside of another one, beside one of another thread that has not ended, or after
    :func:`enable`, leaves the kernels enabled at its end.

    Raises:
        RuntimeError: as :func:`enable`.
    """
    with _lock:
        was_enabled = is_enabled()
        enable()
        _blocks.append(was_enabled)
    try:
        yield
    finally:
        with _lock:
            # The last block to end restores the state before the first one began.
            was_enabled = _blocks[0]
            _blocks.pop()
            if not (_blocks or was_enabled):
                disable()


def _require_registry() -> None:
    missing = [name for name in _NEEDED if not hasattr(attention, name)]
    if not hasattr(torch.library, "get_kernel"):
        missing.append("torch.library.get_kernel")
    if missing:
        raise RuntimeError(
            f"enable: expected torch 2.11 or later, got torch {torch.__version__}, which has no "
            f"{missing[0]}; install a newer torch, or call flashcute.flash_attn_func"
        )
    if torch.version.hip is not None:
        raise RuntimeError(
            f"enable: expected a torch for CUDA, got torch {torch.__version__} for ROCm "
            f"{torch.version.hip}; the kernels need an NVIDIA GPU"
        )


class _Handle:
    """The registered kernels until :meth:`remove`; PyTorch's registry keeps this object.

    Args:
        key: Dispatch key whose kernels are replaced: CUDA, in tests CPU.
    """

    def __init__(self, key: str):
        self._said: set[str] = set()
        self._order: tuple[list[int], list[int]] | None = None  # of backends, before and after
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        self._kernels: dict[str, Callable] = {}
        self._undo = contextlib.ExitStack()
        with warnings.catch_warnings():
            # torch warns of any override, which is what was asked for.
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for name, compute in _KERNELS.items():
                if not hasattr(torch.ops.aten, name):
                    continue  # not yet in this torch
                kernel = self._with_fallback(name, compute, _own_kernel(name, key))
                self._kernels[name] = kernel
                # allow_override is the default in torch 2.13; before, replacing another library's
                # kernel fails.
                self._library.impl(name, kernel, key, with_keyset=True, allow_override=True)
            for name, (functionality, what, why) in _OTHERS.items():
                own = _own_kernel(name, functionality + key)
                if own is None or (functionality and _is_replaced(name, functionality + key)):
                    continue
                self._library.impl(
                    name,
                    self._with_warning(own, what, why),
                    functionality + key,
                    with_keyset=True,
                    allow_override=True,
                )
        if key == "CUDA" and torch.version.cuda is not None:
            torch.cuda._lazy_call(self._with_cuda)  # at once, or when CUDA is first used

    def remove(self) -> None:
        """Restores PyTorch's kernels and its order of backends, if nobody has changed it since."""
        if self._library is None:
            return
        self._undo.close()
        self._library._destroy()
        self._library = None
        for name in _OTHERS:
            # This cache says which keys have kernels; torch.compile would look for those that are
            # gone, and find none with a gradient.
            getattr(torch.ops.aten, name).default._dispatch_cache.clear()
        if self._order is not None and torch._C._get_sdp_priority_order() == self._order[1]:
            torch._C._set_sdp_priority_order(self._order[0])

    def _with_cuda(self) -> None:
        if self._library is None:
            return
        with contextlib.suppress(jit.BuildError):  # calls raise this error, too
            self._bypass_python("CUDA")
        self._prefer_flash()

    def _bypass_python(self, key: str) -> None:
        """Puts the binding's kernels of SDPA above these, which get what the others lack.

        Entering Python costs as much as all else of a short call.
        """
        ops.load()
        binding = ctypes.CDLL(str(jit.load_binding()))
        binding.flashcute_register_sdpa.argtypes = (ctypes.c_char_p, _AsksTorch)
        binding.flashcute_register_sdpa.restype = ctypes.c_void_p
        binding.flashcute_unregister.argtypes = (ctypes.c_void_p,)
        if any(str(getattr(torch.ops.aten, n).default._schema) != x for n, x in _SCHEMAS.items()):
            return  # another torch has other schemas, which the Python kernels can take

        def explained(name):
            kernel = self._kernels[name]

            def explain(*args, **kwargs):
                try:
                    results = kernel(*args, **kwargs)
                    # The forward's results without cum_seq_q, cum_seq_k and the two lengths.
                    return results if name == _BACKWARD else (*results[:2], *results[6:])
                except BaseException as error:
                    text = f"{type(error).__name__}: {error}".replace("\0", "")
                    binding.flashcute_explain(text.encode(errors="replace"))
                    raise

            return explain

        library = torch.library.Library(NAMESPACE, "IMPL")
        self._undo.callback(library._destroy)
        for op, name in (("sdpa_fallback", _FORWARD), ("sdpa_backward_fallback", _BACKWARD)):
            library.impl(op, explained(name), key, with_keyset=True, allow_override=True)
        handle = binding.flashcute_register_sdpa(key.encode(), _is_deterministic)
        if handle is not None:
            self._undo.callback(binding.flashcute_unregister, handle)

    def _prefer_flash(self) -> None:
        # torch sets its order for this GPU at its first choice, and would overwrite ours later.
        x = torch.empty((1, 1, VECTOR, VECTOR), dtype=torch.float16, device="cuda")
        torch._fused_sdp_choice(x, x, x)
        before = list(torch._C._get_sdp_priority_order())
        flash = int(attention.SDPBackend.FLASH_ATTENTION)
        after = [flash, *(backend for backend in before if backend != flash)]
        torch._C._set_sdp_priority_order(after)
        self._order = before, after

    def _with_fallback(self, name: str, compute: Callable, own: Callable | None) -> Callable:
        def kernel(keyset, *args, **kwargs):
            try:
                # torch's autograd runs above this kernel.
                with torch.no_grad():
                    return compute(*args, **kwargs)
            except (NotImplementedError, TypeError, ValueError) as error:
                reason = f"{error}"
            if own is None:
                raise NotImplementedError(f"aten::{name}: PyTorch has no kernel, and {reason}")
            if reason not in self._said:
                self._said.add(reason)
                warnings.warn(
                    f"flashcute.enable: aten::{name} runs on PyTorch's own kernel: {reason}",
                    stacklevel=2,
                )
            return own.call_boxed(keyset, *args, **kwargs)

        return kernel

    def _with_warning(self, own: Callable, what: str, why: Callable) -> Callable:
        """Wraps another backend's operator, which warns if flashcute was to be preferred.

        The warning says why ``what`` chose the other backend.
        """

        def kernel(keyset, *args, **kwargs):
            reason = why(*args)
            if reason is not None and reason not in self._said and _prefers_flash():
                self._said.add(reason)
                warnings.warn(
                    f"flashcute.enable: {what} runs on PyTorch's own kernel: {reason}", stacklevel=2
                )
            return own.call_boxed(keyset, *args, **kwargs)

        return kernel


def _prefers_flash() -> bool:
    """Returns whether nobody chose other backends, by sdpa_kernel or torch.backends.cuda."""
    first = torch._C._get_sdp_priority_order()[0]
    return torch._C._get_flash_sdp_enabled() and first == int(attention.SDPBackend.FLASH_ATTENTION)


def _why_not_flash(query, key, value, mask=None, *behind) -> str:
    """Says what keeps PyTorch from its FlashAttention backend, by the rules of sdp_utils.cpp.

    ``behind`` holds the arguments after the mask: compute_log_sumexp (which the math backend
    lacks), dropout_p and is_causal.
    """
    is_causal = any(x is True for x in behind[1:])
    if mask is not None:
        return (
            "expected attn_mask=None, got a mask; pass is_causal=True where it says the same, or "
            "call flashcute.flash_attn_varlen_func for padding"
        )
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"expected float16 or bfloat16, got {query.dtype}; cast, or use torch.autocast"
    if query.dim() != 4:
        return f"expected (batch, heads, length, head_dim), got {query.dim()} dimensions"
    d, d_v = query.shape[-1], value.shape[-1]
    if d > MAX_HEAD_DIM:
        return f"expected a head dimension up to {MAX_HEAD_DIM}, got {d}"
    if d != d_v:
        return f"expected value of query's head dimension, {d}, got {d_v}; pad value with zeros"
    if is_causal and query.shape[-2] != key.shape[-2]:
        return "expected as many queries as keys with is_causal=True, got other lengths"
    return "its FlashAttention does not take shapes, strides or the GPU of the call"


def _why_cudnn(query, key, value, mask, cum_seq_q, *behind) -> str | None:
    """Says why sequences of different lengths go to cuDNN; None for a dense call, as SDPA makes."""
    if cum_seq_q is None:
        return None
    return (
        "it prefers cuDNN from torch 2.15 on; choose the kernels with "
        "torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)"
    )


def _own_kernel(name: str, key: str):
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"aten::{name}", key):
        return None  # a torch without CUDA
    return torch.library.get_kernel(f"aten::{name}", key)


def _is_replaced(name: str, key: str) -> bool:
    """Returns whether somebody has registered a kernel of a composite operator.

    The operator has none of its own. Of two such kernels in Python, one that calls the other is
    called again under a dispatch mode.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def _refuse(dropout_p: float, return_debug_mask: bool) -> None:
    if dropout_p != 0.0:
        # PyTorch's backward repeats the draw of PyTorch's kernels, which is not flashcute's.
        raise NotImplementedError(
            "dropout: expected no dropout, whose mask PyTorch's backward draws again by its own "
            f"rule, got dropout_p={dropout_p}; call flashcute.flash_attn_func for dropout"
        )
    if return_debug_mask:
        raise NotImplementedError("expected return_debug_mask=False, got True")


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, -1 if right is None else right


def _unused(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns placeholders for the state of dropout and the debug mask, which nobody reads."""
    seed = query.new_empty((2,), dtype=torch.uint64)
    return seed, query.new_empty((), dtype=torch.uint64), query.new_empty((0,))


def _laid_out_as(reference: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Returns ``result`` with the strides of ``empty_like(reference)``.

    torch's meta kernels promise these strides to compiled code.
    """
    if result.stride() == reference.stride():  # holds for nearly all tensors
        return result
    promised = torch.empty_like(reference)
    return result if result.stride() == promised.stride() else promised.copy_(result)


def _sdpa(
    query,
    key,
    value,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
):
    _refuse(dropout_p, return_debug_mask)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = raw.forward(q, k, v, is_causal, scale)
    lengths = query.shape[2], key.shape[2]
    out = _laid_out_as(query, out.transpose(1, 2))
    return out, lse, None, None, *lengths, *_unused(query)


def _sdpa_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    philox_seed,
    philox_offset,
    *,
    scale=None,
):
    _refuse(dropout_p, False)
    tensors = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    grads = raw.backward(*tensors, logsumexp, is_causal, scale)
    pairs = zip((query, key, value), grads, strict=True)
    return tuple(_laid_out_as(x, grad.transpose(1, 2)) for x, grad in pairs)


def _forward(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,  # of the keys; the kernels do not split them
):
    _refuse(dropout_p, return_debug_mask)
    window = _window(window_size_left, window_size_right)
    if cum_seq_q is None and cum_seq_k is None and seqused_k is None and block_table is None:
        out, lse = raw.forward(query, key, value, is_causal, scale, window, alibi_slopes)
    else:
        if cum_seq_k is None or block_table is not None:
            raise NotImplementedError("expected block_table=None, got the pages of a cache")
        lengths = cum_seq_q, cum_seq_k, max_q, max_k
        out, lse = raw.forward_varlen(
            query, key, value, lengths, is_causal, scale, window, alibi_slopes, seqused_k=seqused_k
        )
    return _laid_out_as(query, out), lse, *_unused(query)


def _forward_into(out, *args, **kwargs):
    result, lse, *_ = _forward(*args, **kwargs)
    out.copy_(result)
    return lse


def _backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    _refuse(dropout_p, False)
    window = _window(window_size_left, window_size_right)
    tensors = grad_out, query, key, value, out, logsumexp
    if cum_seq_q is None and cum_seq_k is None:
        grads = raw.backward(*tensors, is_causal, scale, window)
    else:
        lengths = cum_seq_q, cum_seq_k, max_q, max_k
        grads = raw.backward_varlen(*tensors, lengths, is_causal, scale, window)
    return tuple(map(_laid_out_as, (query, key, value), grads))


_FORWARD = "_scaled_dot_product_flash_attention"
_BACKWARD = f"{_FORWARD}_backward"
# The schemas of these operators that the binding's kernels implement.
_SCHEMAS = {
    _FORWARD: (
        f"aten::{_FORWARD}(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool "
        "is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, "
        "Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
        "Tensor rng_state, Tensor unused, Tensor debug_attn_mask)"
    ),
    _BACKWARD: (
        f"aten::{_BACKWARD}(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
        "Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
        "float dropout_p, bool is_causal, Tensor philox_seed, Tensor philox_offset, *, "
        "float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
}
# Operators of other backends, each with: what precedes the device in its dispatch key (a kernel of
# a composite operator below autograd would leave it without gradients), what calls it, and the
# function that says why.
_SDPA = "F.scaled_dot_product_attention"
_OTHERS = {
    "_scaled_dot_product_efficient_attention": ("", _SDPA, _why_not_flash),
    "_scaled_dot_product_cudnn_attention": ("", _SDPA, _why_not_flash),
    "_cudnn_attention_forward": ("", "varlen_attn", _why_cudnn),
    "_scaled_dot_product_attention_math": ("Autograd", _SDPA, _why_not_flash),
}
_AsksTorch = ctypes.CFUNCTYPE(ctypes.c_int32)
_is_deterministic = _AsksTorch(torch.are_deterministic_algorithms_enabled)
_KERNELS = {
    _FORWARD: _sdpa,
    _BACKWARD: _sdpa_backward,
    "_flash_attention_forward": _forward,
    "_flash_attention_forward_no_dropout_inplace": _forward_into,
    "_flash_attention_backward": _backward,
}
