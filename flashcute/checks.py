"""The checks of arguments: one set for the functions users call, ``supports()`` and the operator.

A check takes the name of the function that was called, for its message, and raises TypeError,
ValueError or NotImplementedError; a message names function, argument, value, what is expected and a
way out. A check of an option returns its value as plain Python: a numpy scalar counts as the Python
number it holds.
"""

from __future__ import annotations

import math
import reprlib
import sys

import torch
from torch.autograd import forward_ad

from .config import MAX_HEAD_DIM
from .features import CPU_DTYPES, CUDA_DTYPES

UNLIMITED = (-1, -1)  # the default of window_size, which calls compare by identity

# Normal float32 range of x and x * log2(e), where x is softmax_scale or softcap. Beyond it scores
# become inf * 0 or 0 / 0, NaN, whatever q and k hold.
_MIN_FLOAT = 1.1754944e-38
_MAX_FLOAT = 2.3e38

# The kernels add ALiBi in the unit of the scores, which is the softmax_scale or the softcap. With a
# unit out of these bounds, slopes divided by it may leave float32's range.
_MIN_UNIT, _MAX_UNIT = 2.0**-64, 2.0**64

_MAX_DROPOUT = 1 - 2.0**-16

_MAX_INT64 = 2**63 - 1

PAD_HEAD_DIM = (  # the way out where head dimensions differ
    "pad the smaller one with zeros, and where that is q or k pass softmax_scale, whose default "
    "is 1/sqrt(head_dim)"
)

_KINDS = {"b": bool, "i": int, "u": int, "f": float}  # by the kind of a numpy dtype
_STRIDED = torch.strided
_below_autograd = torch._C._dispatch_tls_is_dispatch_key_excluded
_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
# Modules of tensor subclasses without a rule for this operator, which would fail inside torch.
_DISTRIBUTED = ("torch.distributed.tensor", "torch.distributed._shard")


def check_tensors(fn: str, names: tuple[str, str, str], q, k, v) -> int:
    """Checks what holds for q, k and v on every device: kind, rank, shape, one device, one dtype.

    The code is flat and reads each property once: it takes a fifth of a call's time on the host.

    Returns:
        The head dimension.
    """
    q_name, k_name, v_name = names
    if type(q) is not torch.Tensor:
        check_kind(fn, q_name, q)
    if type(k) is not torch.Tensor:
        check_kind(fn, k_name, k)
    if type(v) is not torch.Tensor:
        check_kind(fn, v_name, v)
    if q.layout is not _STRIDED or k.layout is not _STRIDED or v.layout is not _STRIDED:
        _check_kinds(fn, names, q, k, v)
    try:
        q_shape = q.shape
        k_shape = k.shape
        v_shape = v.shape
    except RuntimeError:  # a nested tensor raises it
        _check_kinds(fn, names, q, k, v)
        raise
    if len(q_shape) != 4 or len(k_shape) != 4:
        check_rank(fn, q_name, q, "(batch, seqlen, heads, head_dim)")
        check_rank(fn, k_name, k, "(batch, seqlen, heads, head_dim)")
    b, _, h, d = q_shape
    b_k, _, h_k, d_k = k_shape
    if b_k != b:
        raise ValueError(
            f"{fn}: expected {k_name} of {q_name}'s batch size {b}, "
            f"got {k_name}.shape={tuple(k_shape)}; expand it to the same batch"
        )
    if d_k != d:
        raise ValueError(
            f"{fn}: expected {k_name} of {q_name}'s head_dim {d}, "
            f"got {k_name}.shape={tuple(k_shape)}; {PAD_HEAD_DIM}"
        )
    if v_shape != k_shape:
        check_rank(fn, v_name, v, "(batch, seqlen, heads, head_dim)")
        raise_values(fn, k_name, v_name, k, v)
    if h < 1 or h_k < 1 or h % h_k:
        raise ValueError(
            f"{fn}: expected the heads of {q_name} to be a positive multiple of those of {k_name}, "
            f"got {q_name}.shape={tuple(q_shape)} and {k_name}.shape={tuple(k_shape)}; "
            "repeat or drop heads"
        )
    if d < 1:
        raise ValueError(
            f"{fn}: expected head_dim >= 1, got {q_name}.shape={tuple(q_shape)}; "
            "a score needs at least one element"
        )
    dtype = q.dtype
    device = q.device
    if k.dtype != dtype or v.dtype != dtype or k.device != device or v.device != device:
        raise_mismatch(fn, names, q, k, v)
    return d


def _check_kinds(fn: str, names: tuple[str, str, str], q, k, v) -> None:
    for name, tensor in zip(names, (q, k, v), strict=True):
        check_kind(fn, name, tensor)


def check_kind(fn: str, name: str, tensor) -> None:
    """Raises TypeError unless ``tensor`` is dense, with storage, strides and shape of its own."""
    if not isinstance(tensor, torch.Tensor):
        way_out = "pass one" if tensor is None else "convert it with torch.as_tensor"
        raise TypeError(
            f"{fn}: expected {name} to be a torch.Tensor, got {name} of type "
            f"{type(tensor).__name__}; {way_out}"
        )
    kind, way_out = _foreign_kind(tensor)
    if kind is not None:
        raise TypeError(
            f"{fn}: expected {name} to be a dense torch.Tensor, got {name} as {kind}; {way_out}"
        )


def _foreign_kind(tensor: torch.Tensor) -> tuple[str | None, str]:
    """Returns what ``tensor`` is if it is not dense, else None, and how to get a dense tensor."""
    cls = type(tensor)
    # The class is tested first, as torch.compile cannot trace __module__ of a Parameter's class.
    if cls is not torch.Tensor and cls is not torch.nn.Parameter:
        if cls.__module__.startswith(_DISTRIBUTED):
            return f"a {cls.__name__}", "call it on the local shards, e.g. those of .to_local()"
        if cls.__module__.startswith("torch.masked"):
            return f"a {cls.__name__}", "pass its .get_data() and leave masked keys out"
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            return f"an {cls.__name__}", "run the lazy module once, or call .materialize(shape)"
    if tensor.is_nested:
        return "a nested tensor", (
            "call it once for each sequence of .unbind(), or flash_attn_varlen_func with .values() "
            "and .offsets() of layout torch.jagged"
        )
    if tensor.layout is not _STRIDED:
        return f"a tensor of layout {tensor.layout}", "convert it with .to_dense()"
    return None, ""


def check_rank(fn: str, name: str, tensor: torch.Tensor, shape: str) -> None:
    """Checks for as many dimensions as ``shape`` names, e.g. ``"(batch, seqlen)"``."""
    rank = shape.count(",") + 1
    if tensor.dim() != rank:
        raise ValueError(
            f"{fn}: expected {name} of shape {shape}, got {name}.shape={tuple(tensor.shape)}; "
            f"reshape it to {rank} dimensions"
        )


def raise_values(fn: str, k_name: str, v_name: str, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises the error for a v whose shape (..., heads, head_dim) differs from k's."""
    if v.shape[:-1] == k.shape[:-1]:
        raise NotImplementedError(
            f"{fn}: expected {v_name} of {k_name}'s head_dim {k.shape[-1]}, "
            f"got {v_name}.shape={tuple(v.shape)}; {PAD_HEAD_DIM}"
        )
    raise ValueError(
        f"{fn}: expected {v_name} of {k_name}'s shape {tuple(k.shape)}, "
        f"got {v_name}.shape={tuple(v.shape)}; pass one value per key"
    )


def raise_mismatch(fn: str, names: tuple[str, str, str], q, k, v) -> None:
    """Raises the error for a k or v whose dtype or device differs from q's."""
    name, tensor = (names[1], k) if (k.dtype, k.device) != (q.dtype, q.device) else (names[2], v)
    if tensor.device != q.device:
        raise ValueError(
            f"{fn}: expected {name} on {q.device} as {names[0]}, "
            f"got {name}.device={tensor.device}; move it with .to({str(q.device)!r})"
        )
    raise TypeError(
        f"{fn}: expected {name} of {names[0]}'s dtype {q.dtype}, "
        f"got {name}.dtype={tensor.dtype}; cast one of them"
    )


def check_packed(fn: str, name: str, packed, count: int) -> None:
    """Checks for a dense tensor of shape (batch, seqlen, count, heads, head_dim)."""
    check_kind(fn, name, packed)
    if packed.dim() != 5 or packed.shape[2] != count:
        raise ValueError(
            f"{fn}: expected {name} of shape (batch, seqlen, {count}, heads, head_dim), "
            f"got {name}.shape={tuple(packed.shape)}; stack the tensors with torch.stack(dim=2)"
        )


def check_scale(fn: str, softmax_scale, head_dim: int) -> float:
    """Returns softmax_scale, or its default for None, after checking its range."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    if type(softmax_scale) is float and -_MAX_FLOAT <= softmax_scale <= _MAX_FLOAT:
        return softmax_scale  # the quick way through
    value = check_real(fn, "softmax_scale", softmax_scale)
    if not -_MAX_FLOAT <= value <= _MAX_FLOAT:
        raise ValueError(
            f"{fn}: expected a finite softmax_scale within float32's range, at most {_MAX_FLOAT} "
            f"in magnitude, got softmax_scale={_show(value)}; pass None for 1/sqrt(head_dim)"
        )
    return float(value)


def check_dropout(fn: str, dropout_p) -> float:
    """Returns dropout_p rounded to a multiple of 2**-16, as :mod:`flashcute.dropout` uses it."""
    value = check_real(fn, "dropout_p", dropout_p)
    if not 0.0 <= value <= _MAX_DROPOUT:
        raise ValueError(
            f"{fn}: expected 0 <= dropout_p <= 1 - 2**-16, got dropout_p={_show(value)}; pass 0.0 "
            "for none"
        )
    return round(float(value) * 2**16) / 2**16


def check_rng_state(fn: str, rng_state, q: torch.Tensor, dropout_p: float) -> None:
    """Checks the random state of an operator's dropout mask, needed where dropout_p is not 0."""
    if rng_state is None:
        if dropout_p != 0.0:
            raise ValueError(
                f"{fn}: expected rng_state with dropout_p > 0, got rng_state=None with "
                f"dropout_p={dropout_p}; pass flashcute.dropout.draw_state(q.device)"
            )
        return
    if rng_state.dtype != torch.int64:
        raise TypeError(
            f"{fn}: expected rng_state of dtype torch.int64, got rng_state.dtype="
            f"{rng_state.dtype}; pass flashcute.dropout.draw_state(q.device)"
        )
    if tuple(rng_state.shape) != (2,):
        raise ValueError(
            f"{fn}: expected rng_state of shape (2,), got rng_state.shape="
            f"{tuple(rng_state.shape)}; pass flashcute.dropout.draw_state(q.device)"
        )
    if rng_state.device != q.device:
        raise ValueError(
            f"{fn}: expected rng_state on {q.device} as q, got rng_state.device="
            f"{rng_state.device}; move it there"
        )


def check_softcap(fn: str, softcap) -> float:
    """Returns softcap, 0 for none, after checking that scores can be divided by it."""
    value = check_real(fn, "softcap", softcap)
    if not (value == 0.0 or _MIN_FLOAT <= value <= _MAX_FLOAT):
        raise ValueError(
            f"{fn}: expected a finite softcap >= 0 within float32's range, 0 or {_MIN_FLOAT} to "
            f"{_MAX_FLOAT}, got softcap={_show(value)}; pass 0.0 for none"
        )
    return float(value)


def check_window(fn: str, window_size) -> tuple[int, int]:
    """Returns window_size after checking that it is two ints from -1 on."""
    if type(window_size) is tuple and len(window_size) == 2:
        left, right = window_size
        if type(left) is int and type(right) is int and left >= -1 and right >= -1:
            return window_size  # the quick way through
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    sides = tuple(_plain(side) for side in window_size) if pair else ()
    if not pair or not all(_is_int(side) for side in sides):
        raise TypeError(
            f"{fn}: expected window_size to be two ints (left, right), "
            f"got window_size={_show(window_size)}; pass (128, 0) for a query's own key and 128 "
            "before it, (-1, -1) for no window"
        )
    if min(sides) < -1:
        raise ValueError(
            f"{fn}: expected window_size of two ints >= -1, "
            f"got window_size={_show(sides)}; -1 stands for unlimited"
        )
    return sides


def check_flag(fn: str, name: str, value) -> bool:
    """Returns a bool; raises TypeError for what merely counts as true or false."""
    value = _plain(value)
    if not isinstance(value, (bool, torch.SymBool)):
        raise TypeError(
            f"{fn}: expected {name} to be a bool, got {name}={_show(value)}; pass bool(...)"
        )
    return bool(value)


def check_slopes(fn: str, alibi_slopes, h: int, b: int | None = None) -> None:
    """Checks for a dense float32 tensor of slopes (h,), or (b, h) with any b where b is None."""
    name = "alibi_slopes"
    check_kind(fn, name, alibi_slopes)
    if alibi_slopes.dtype != torch.float32:
        raise TypeError(
            f"{fn}: expected {name} of dtype torch.float32, "
            f"got {name}.dtype={alibi_slopes.dtype}; cast it with .float()"
        )
    shape = alibi_slopes.shape
    batch = shape[0] if b is None and len(shape) == 2 else b
    # Not "in", which torch.compile misreads where sizes are symbolic.
    if (h,) != shape != (batch, h):
        raise ValueError(
            f"{fn}: expected {name} of shape ({h},) or ({'batch' if b is None else b}, {h}), "
            f"got {name}.shape={tuple(alibi_slopes.shape)}; pass one slope per query head"
        )


def check_alibi(fn: str, alibi_slopes, q: torch.Tensor, b: int) -> None:
    """Checks the slopes for q's query heads (..., h, head_dim) and b entries, on q's device."""
    name = "alibi_slopes"
    check_slopes(fn, alibi_slopes, q.shape[-2], b)
    if alibi_slopes.device != q.device:
        raise ValueError(
            f"{fn}: expected {name} on {q.device}, "
            f"got {name}.device={alibi_slopes.device}; move it there"
        )


def check_sinks(fn: str, sinks, q: torch.Tensor) -> None:
    """Checks for one logit per query head of q (..., h, head_dim), in float32 or q's dtype."""
    check_logits(fn, sinks, q.shape[-2], q.dtype)
    if sinks.device != q.device:
        raise ValueError(
            f"{fn}: expected sinks on {q.device}, got sinks.device={sinks.device}; move it there"
        )


def check_logits(fn: str, sinks, h: int, dtype: torch.dtype) -> None:
    """Checks for a dense tensor of one logit per query head, in float32 or ``dtype``."""
    check_kind(fn, "sinks", sinks)
    if sinks.dtype not in (torch.float32, dtype):
        dtypes = " or ".join(dict.fromkeys((str(torch.float32), str(dtype))))
        raise TypeError(
            f"{fn}: expected sinks of dtype {dtypes}, got sinks.dtype={sinks.dtype}; "
            "cast it with .float()"
        )
    if sinks.shape != (h,):
        raise ValueError(
            f"{fn}: expected sinks of shape ({h},), got sinks.shape={tuple(sinks.shape)}; "
            "pass one logit per query head"
        )


def check_gradient(fn: str, name: str, tensor, shape, dtype, device) -> None:
    """Checks a tensor of a backward against the properties that follow from the inputs."""
    check_kind(fn, name, tensor)
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"{fn}: expected {name} of shape {tuple(shape)} and {dtype} on {device}, got "
            f"{name}.shape={tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}; pass what the "
            "forward returned, and gradients of it"
        )


def check_dtype(fn: str, name: str, dtype, device) -> None:
    """Checks that ``device``, a torch.device, computes ``dtype``; ``name``: e.g. ``"q.dtype"``."""
    dtypes = CPU_DTYPES if device.type == "cpu" else CUDA_DTYPES
    if not isinstance(dtype, torch.dtype) or dtype not in dtypes:
        *most, last = map(str, dtypes)
        raise TypeError(
            f"{fn}: expected {name} {', '.join(most)} or {last} on {device}, "
            f"got {name}={_show(dtype)}; {_dtype_way_out(dtype)}"
        )


def _dtype_way_out(dtype) -> str:
    if not isinstance(dtype, torch.dtype):
        return "pass a torch.dtype, e.g. torch.bfloat16"
    if dtype.is_complex:
        return "there is no complex attention: pass real tensors, e.g. those of .real and .imag"
    if dtype in _QUANTIZED:
        return "call .dequantize() on the inputs"
    return "cast the inputs, e.g. with .to(torch.bfloat16)"


def bounded_window(window_size: tuple[int, int]) -> tuple[int, int]:
    """Returns the window cut to 2**31, as operators take 64 bits: no sequence is longer."""
    left, right = (min(int(side), 2**31) for side in window_size)
    return left, right


def check_for_kernels(fn: str, q_name: str, q: torch.Tensor, head_dim: int, scale: float) -> None:
    """Checks what kernels, but not the reference, require of q's device, dtype, shape and scale."""
    if not (q.is_cuda or q.is_meta):
        raise NotImplementedError(
            f"{fn}: expected {q_name} on cuda or cpu, got {q_name}.device={q.device}; "
            "move the tensors there"
        )
    if q.dtype not in CUDA_DTYPES:
        check_dtype(fn, f"{q_name}.dtype", q.dtype, q.device)
    if head_dim > MAX_HEAD_DIM:
        check_kernel_head_dim(fn, head_dim)
    if not _MIN_FLOAT <= scale <= _MAX_FLOAT:
        check_kernel_scale(fn, scale)


def check_no_tangent(fn: str, names: tuple[str, ...], *tensors: torch.Tensor | None) -> None:
    """Raises if a derivative in forward mode is asked for: torch would lose it without an error."""
    if forward_ad._current_level < 0:
        return
    for name, tensor in zip(names, tensors, strict=True):
        if has_tangent(tensor):
            raise NotImplementedError(
                f"{fn}: expected no derivative in forward mode (jvp, jacfwd, dual tensors) on "
                f"CUDA, where it is not supported yet, got {name} with a tangent; detach it, or "
                "use CPU tensors, which support it"
            )


def has_tangent(*tensors: torch.Tensor | None) -> bool:
    """Returns whether one of them is a dual tensor of forward-mode differentiation."""
    if forward_ad._current_level < 0:  # outside of any dual_level()
        return False
    if _below_autograd(torch._C.DispatchKey.AutogradFunctionality):
        return False  # inside an operator's implementation torch cannot unpack any tensor
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def check_kernel_head_dim(fn: str, head_dim: int) -> None:
    """Checks that the kernels compute a head dimension, once it is padded."""
    if head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"{fn}: expected head_dim <= {MAX_HEAD_DIM} on CUDA, got head_dim={head_dim}; "
            "CPU tensors support it"
        )


def check_kernel_scale(fn: str, scale: float) -> None:
    """Checks for a scale that kernels can use: they take maxima before they multiply by it."""
    if not _MIN_FLOAT <= scale <= _MAX_FLOAT:
        raise NotImplementedError(
            f"{fn}: expected softmax_scale > 0 within float32's range, {_MIN_FLOAT} to "
            f"{_MAX_FLOAT}, on CUDA, got softmax_scale={scale}; {_scale_way_out(scale)}, or use "
            "CPU tensors, which support it"
        )


def check_kernel_scores(fn: str, scale: float, softcap: float, alibi: bool) -> None:
    """Checks for a softcap, and a unit of ALiBi's slopes, that the kernels can use."""
    if softcap != 0.0 and not _MIN_FLOAT <= scale / softcap <= _MAX_FLOAT:
        raise NotImplementedError(
            f"{fn}: expected softmax_scale / softcap within float32's range, {_MIN_FLOAT} to "
            f"{_MAX_FLOAT}, on CUDA, got softcap={softcap} with softmax_scale={scale}; pass "
            "softcap=0.0 for none, or use CPU tensors, which support it"
        )
    unit = softcap or scale
    if alibi and not _MIN_UNIT <= unit <= _MAX_UNIT:
        name = "softcap" if softcap else "softmax_scale"
        raise NotImplementedError(
            f"{fn}: expected {name} from 2**-64 to 2**64 with alibi_slopes on CUDA, got "
            f"{name}={unit}; use CPU tensors, which support it"
        )


def _scale_way_out(scale: float) -> str:
    if scale == 0.0:
        return "pass torch.zeros_like(q) and softmax_scale=1.0"
    if scale <= -_MIN_FLOAT:
        return f"pass -q and softmax_scale={-scale}"
    return f"pass {scale} * q and softmax_scale=1.0"


def check_size(fn: str, name: str, value) -> int:
    """Returns a number of heads or elements after checking that it is a positive int."""
    size = _plain(value)
    if not _is_int(size):
        raise TypeError(
            f"{fn}: expected {name} to be an int, got {name}={_show(value)}; pass int(...)"
        )
    if not 1 <= size <= _MAX_INT64:
        raise ValueError(
            f"{fn}: expected 1 <= {name} < 2**63, got {name}={_show(size)}; pass a tensor's size"
        )
    return size


def check_real(fn: str, name: str, value):
    """Returns ``value`` after checking that it is a float or an int, finite or not."""
    number = _plain(value)
    if not isinstance(number, (float, torch.SymFloat)) and not _is_int(number):
        way_out = "leave it out" if value is None else "pass float(...), which reads a tensor back"
        raise TypeError(
            f"{fn}: expected {name} to be a float, got {name}={_show(value)} of type "
            f"{type(value).__name__}; {way_out}"
        )
    return number


def check_int(fn: str, name: str, value) -> int:
    """Returns ``value`` after checking that it is an int, of any size."""
    number = _plain(value)
    if not _is_int(number):
        way_out = "pass one" if value is None else "pass int(...), which reads a tensor back"
        raise TypeError(f"{fn}: expected {name} to be an int, got {name}={_show(value)}; {way_out}")
    return number


def check_length(fn: str, name: str, value) -> int:
    """Returns a number of tokens, an int from 0 on; in a traced call its value is not known here,
    and is checked when the call runs."""
    length = check_int(fn, name, value)
    traced = torch.compiler.is_compiling() or isinstance(length, torch.SymInt)
    if not traced and not 0 <= length <= _MAX_INT64:
        raise ValueError(
            f"{fn}: expected 0 <= {name} < 2**63, got {name}={_show(length)}; "
            "pass a number of tokens"
        )
    return length


def at_most(length: int, most: int) -> int:
    """Returns the smaller of the two, without a guard on a length that is traced."""
    # torch 2.11 cannot trace sym_min() of a constant.
    symbolic = isinstance(length, torch.SymInt)
    return torch.sym_min(length, most) if symbolic else min(length, most)


def check_device(fn: str, device) -> torch.device:
    """Returns the torch.device that ``device`` names, after checking that it is cuda or cpu."""
    try:
        found = torch.device(device)
    except (
        TypeError,
        RuntimeError,
        ValueError,
        OverflowError,
    ):  # torch raises one of these for a wrong value
        found = None
    if found is None or found.type not in ("cuda", "cpu"):
        shown = str(found) if found is not None else device
        raise ValueError(
            f"{fn}: expected device 'cuda' or 'cpu', got device={_show(shown)}; pass one of them"
        )
    return found


def check_capability(fn: str, capability, supported: tuple[tuple[int, int], ...] | None) -> None:
    """Checks that a compute capability is two ints, and among ``supported`` unless that is None."""
    pair = isinstance(capability, (tuple, list)) and len(capability) == 2
    if not pair or not all(_is_int(_plain(part)) for part in capability):
        raise TypeError(
            f"{fn}: expected capability to be two ints (major, minor), "
            f"got capability={_show(capability)}; pass torch.cuda.get_device_capability()"
        )
    if supported is not None and tuple(capability) not in supported:
        raise NotImplementedError(
            f"{fn}: expected capability in {supported}, got capability={_show(capability)}; "
            "use the CPU there"
        )


def _plain(value):
    """Returns ``value``, or the Python number that a numpy scalar holds."""
    numpy = sys.modules.get("numpy")  # if it was never imported, no value is of its types
    if numpy is None:
        return value
    if torch.compiler.is_compiling() and isinstance(value, numpy.ndarray):
        # Dynamo shows numpy scalars as arrays. A call that raises in tracing is run untraced.
        raise TypeError("flashcute: expected no numpy scalar in a traced call; pass float(...)")
    if not isinstance(value, numpy.generic):
        return value
    kind = _KINDS.get(value.dtype.kind)
    return value if kind is None else kind(value)


def _is_int(value) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _show(value) -> str:
    """Returns the text of ``value`` for a message: one short line, whatever it is."""
    try:
        text = reprlib.repr(value)
    except ValueError:  # Python does not convert ints of more than 4300 digits
        text = f"<{type(value).__name__} with too many digits to print>"
    return " ".join(text.split())
