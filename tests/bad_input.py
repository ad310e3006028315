"""A table of odd calls, each with the error that it must raise or with its right result.

Tests run it on CPU, meta and fake tensors, on CUDA where there is a GPU, in a ``python -O``
process, which would strip asserts, through torch.compile, and through ``supports()``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import decimal
import fractions
import functools
import math
import re
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch._subclasses import FakeTensorMode

import flashcute
from flashcute.reference import attention_ref

# Warnings that torch gives for the kinds of tensors that the cases use.
WARNINGS = (
    "ignore:The PyTorch API of (nested tensors|MaskedTensors) is in prototype stage:UserWarning",
    "ignore:Sparse CSR tensor support is in beta state:UserWarning",
    "ignore:torch.quantize_per_tensor, .* are deprecated:UserWarning",
    "ignore:ComplexHalf support is experimental:UserWarning",
)

DEVICES = ("cpu", "meta", "fake", "cuda")
# A torch without CUDA can make FakeTensors on a cuda device, but cannot slice them.
_FAKE = "cuda" if torch.cuda.is_available() else "meta"
_KERNELS = ("meta", "fake", "cuda")
_REAL = ("cpu", "cuda")
_PER_HEAD = ("alibi_slopes", "sinks")  # cases give functions that make them on a device

_FORM = r"^flash_attn_\w*func: expected .*, got .*; .+"


@dataclasses.dataclass(frozen=True)
class Case:
    """A call that raises ``error`` with a message that ``pattern`` matches, or is right.

    Attributes:
        name: A unique name.
        error: The error of CUDA, meta and fake tensors; None for a right result.
        pattern: What the message must match, besides '<function>: expected ..., got ...; ...'.
        options: Keyword arguments of the call.
        sizes: Arguments of :func:`tensors`, which makes q, k and v.
        change: (index, function): the function replaces q, k or v, which index selects.
        call: (name of a function, function from device to arguments), where the call is not
            flash_attn_func(q, k, v).
        right_on_cpu: Whether CPU tensors give a right result where the kernels refuse the call.
        on: The devices where the case can be made.
    """

    name: str
    error: type[Exception] | None
    pattern: str = ""
    options: dict[str, object] = dataclasses.field(default_factory=dict)
    sizes: dict[str, object] = dataclasses.field(default_factory=dict)
    change: tuple[int, Callable[[torch.Tensor], object]] | None = None
    call: tuple[str, Callable[[str], tuple]] | None = None
    right_on_cpu: bool = False
    on: tuple[str, ...] = DEVICES

    def error_on(self, device: str) -> type[Exception] | None:
        return None if self.right_on_cpu and device == "cpu" else self.error

    def arguments(self, device: str) -> tuple[Callable, list[object], dict[str, object]]:
        """Returns the function to call, its positional and its keyword arguments."""
        function, args = "flash_attn_func", None
        if self.call is not None:
            function, args = self.call[0], list(self.call[1](device))
        else:
            args = list(tensors(device, **self.sizes))
        if self.change is not None:
            index, change = self.change
            args[index] = change(args[index])
        options = {
            name: value(device) if name in _PER_HEAD and callable(value) else value
            for name, value in self.options.items()
        }
        return getattr(flashcute, function), args, options

    def failure(
        self, device: str, wrap: Callable[[Callable], Callable] = lambda f: f
    ) -> str | None:
        """Runs the call; returns what is wrong with its error or result, None if nothing is."""
        with FakeTensorMode() if device == "fake" else contextlib.nullcontext():
            function, args, options = self.arguments(_FAKE if device == "fake" else device)
            error = self.error_on(device)
            try:
                result = wrap(function)(*args, **options)
            except Exception as exception:
                return self._wrong_error(device, exception)
            if error is not None:
                return f"{self.name}: expected {error.__name__}, got the result {type(result)}"
            return self._wrong_result(device, args, options, result)

    def _wrong_error(self, device: str, exception: Exception) -> str | None:
        error = self.error_on(device)
        if type(exception) is not error:
            return f"{self.name}: expected {error and error.__name__}, got {exception!r}"
        for pattern in (self.pattern, _FORM):
            if not re.search(pattern, str(exception)):
                return f"{self.name}: expected a message like {pattern!r}, got {exception}"
        return None

    def _wrong_result(self, device: str, args, options, result) -> str | None:
        q, k, v = args
        out = result[0] if isinstance(result, tuple) else result
        if (out.shape, out.dtype, out.device) != (q.shape, q.dtype, q.device):
            return f"{self.name}: expected out like q, got {out.shape}, {out.dtype}, {out.device}"
        if device != "cpu" and "cpu" in self.on:  # the same code must run on both
            strides = flashcute.flash_attn_func(*self.arguments("cpu")[1]).stride()
            if out.stride() != strides:
                return f"{self.name}: expected strides {strides} as on cpu, got {out.stride()}"
        if device not in _REAL or options.get("dropout_p"):
            return None
        known = ("softmax_scale", "causal", "window_size", "softcap", *_PER_HEAD)
        known = {name: _plain(value) for name, value in options.items() if name in known}
        q, k, v = (t.detach().double() for t in (q, k, v))
        expected = attention_ref(q, k, v, **known).out
        error = (out.detach().double() - expected).abs().max().item() if out.numel() else 0.0
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}.get(out.dtype, 1e-5)
        return None if error <= tolerance else f"{self.name}: the result is wrong by {error}"

    def asked_of_supports(self) -> dict[str, object] | None:
        """Returns the arguments of supports() for this call; None if only tensors express it."""
        if self.change or self.call or any(callable(self.options.get(name)) for name in _PER_HEAD):
            return None
        names = {"d": "head_dim", "h": "num_heads", "h_k": "num_heads_k", "dtype": "dtype"}
        if not set(self.sizes) <= set(names):
            return None
        sizes = {"h": 4, "h_k": 2, "d": 64, "dtype": torch.float16, **self.sizes}
        return {names[name]: size for name, size in sizes.items()} | self.options


def _plain(value: object) -> object:
    """Converts numpy's scalars to Python's, as the reference takes no others."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return value.tolist() if isinstance(value, np.generic) else value


def tensors(
    device: str,
    b: int = 2,
    seqlen_q: int = 9,
    seqlen_k: int = 11,
    h: int = 4,
    h_k: int = 2,
    d: int = 64,
    dtype: torch.dtype = torch.float16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q, k and v with numbers from -1 to 1."""

    def waves(start: int, *shape: int) -> torch.Tensor:
        count = math.prod(shape)
        angles = torch.arange(start, start + count, device=device, dtype=torch.float32)
        return (angles * 1.7).sin().view(shape).to(dtype)

    k_shape = (b, seqlen_k, h_k, d)
    return waves(0, b, seqlen_q, h, d), waves(100, *k_shape), waves(200, *k_shape)


def _changed(
    name: str, error: type[Exception] | None, pattern: str, change: Callable, which="qkv", **kwargs
) -> Iterator[Case]:
    """Yields a case for each tensor of ``which``; NAME in the pattern stands for its name."""
    for name_of in which:
        index = "qkv".index(name_of)
        text = pattern.replace("NAME", name_of)
        yield Case(f"{name_of}_{name}", error, text, change=(index, change), **kwargs)


def _option(
    argument: str, error: type[Exception] | None, values: dict[str, object], **kwargs
) -> Iterator[Case]:
    """Yields a case for each value of an option; the keys of ``values`` are what messages show."""
    for shown, value in values.items():
        pattern = rf"expected .*, got {argument}={re.escape(shown)}"
        name = f"{argument}={'right:' * (error is None)}{shown}"
        yield Case(name, error, pattern if error else "", options={argument: value}, **kwargs)


def _sizes(error: type[Exception] | None, pattern: str, *sizes: dict, **kwargs) -> Iterator[Case]:
    for size in sizes:
        name = ",".join(f"{key}={value}" for key, value in size.items())
        text = pattern
        for key, value in size.items():
            text = text.replace(f"<{key}>", re.escape(str(value)))
        yield Case(name, error, text, sizes=size, **kwargs)


def _packed(name: str, error, pattern: str, function: str, shape, *, change=None) -> Case:
    def args(device: str) -> tuple:
        packed = torch.zeros(shape, device=device, dtype=torch.float16)
        packed = packed if change is None else change(packed)
        return (tensors(device)[0], packed) if function == "kvpacked" else (packed,)

    full = f"flash_attn_{function}_func"
    return Case(name, error, f"^{full}: .*{pattern}", call=(full, args))


def _per_head(argument: str, name: str, error, pattern: str, make: Callable, **kwargs) -> Case:
    return Case(f"{argument}_{name}", error, pattern, options={argument: make}, **kwargs)


_slopes = functools.partial(_per_head, "alibi_slopes")
_sinks = functools.partial(_per_head, "sinks")


def _shifted(elements: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that copies a tensor so that it starts at this element of a storage."""

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.new_zeros(tensor.numel() + elements)
        return storage[elements:].view_as(tensor).copy_(tensor)

    return shifted


def _strided(*strides: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that views a tensor's memory with strides by which elements overlap."""

    def strided(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten().as_strided(tensor.shape, strides)

    return strided


def _gap(elements: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that copies a tensor to rows with so many elements between them."""
    return lambda t: torch.nn.functional.pad(t, (0, elements))[..., : t.shape[-1]]


def _masked(tensor: torch.Tensor) -> torch.Tensor:
    return torch.masked.masked_tensor(tensor, tensor > 0)


def _lazy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.UninitializedParameter(device=tensor.device, dtype=tensor.dtype)


def _cpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


_NAN = float("nan")
_INF = float("inf")
_SHAPE = r"NAME of shape \(batch, seqlen, heads, head_dim\), got NAME.shape="
_NO_FLOATS = {
    "'1'": "1",
    "b'1'": b"1",
    "True": True,
    "np.True_": np.True_,
    "tensor(": torch.tensor(1.0),
    "array(": np.array(0.5),
    "[0.5]": [0.5],
    "1j": 1j,
    "np.complex64": np.complex64(1),
    "Decimal": decimal.Decimal("0.5"),
    "Fraction": fractions.Fraction(1, 2),
    "<class 'float'>": float,
}
_NO_NONE = {"None of type NoneType; leave it out": None}
_NO_BOOLS = {
    "1": 1,
    "0.0": 0.0,
    "None": None,
    "'yes'": "yes",
    "[]": [],
    "tensor(True)": torch.tensor(True),
    "3": np.int64(3),
    "array(True)": np.array(True),
}
_DIGITS = {"1000000": 10**400, "<int with too many digits to print>": 10**5000}
_BEYOND = {"nan": _NAN, "inf": _INF, "-inf": -_INF, "1e+39": 1e39, "-1e+39": -1e39, **_DIGITS}


def _kinds() -> Iterator[Case]:
    kinds = {
        "NoneType": lambda t: None,
        "ndarray": lambda t: np.zeros(t.shape),
        "list": lambda t: [1],
        "str": lambda t: "tensor",
        "float": lambda t: 1.0,
        "tuple": lambda t: (t, t),
        "_TensorMeta|type": lambda t: torch.Tensor,
    }
    for kind, change in kinds.items():
        way_out = "pass one" if kind == "NoneType" else "convert"
        pattern = rf"NAME to be a torch.Tensor, got NAME of type ({kind}); {way_out}"
        yield from _changed(f"of type {kind}", TypeError, pattern, change)
    foreign = {
        "nested tensor; .*unbind": lambda t: torch.nested.nested_tensor(list(t)),
        "nested tensor; .*unbind() ": lambda t: torch.nested.nested_tensor(
            list(t), layout=torch.jagged
        ),
        "tensor of layout torch.sparse_coo; .*to_dense": torch.Tensor.to_sparse,
        "tensor of layout torch.sparse_csr; .*to_dense": lambda t: torch.ones_like(
            t
        ).to_sparse_csr(),
        "MaskedTensor; .*get_data": _masked,
        "UninitializedParameter; .*materialize": _lazy,
    }
    for kind, change in foreign.items():
        pattern = rf"NAME to be a dense torch.Tensor, got NAME as an? {kind.rstrip('() ')}"
        yield from _changed(f"is a {kind}", TypeError, pattern, change, on=_REAL)
    yield from _changed(
        "is a tensor of MKL-DNN",
        TypeError,
        r"got NAME as a tensor of layout torch._mkldnn; .*to_dense",
        lambda t: t.to_mkldnn(),
        sizes={"dtype": torch.float32},
        on=("cpu",),
    )
    for dtype in (torch.quint8, torch.qint8, torch.qint32):
        yield Case(
            f"all of {dtype}",
            TypeError,
            rf"expected q.dtype .*, got q.dtype={dtype}; call .dequantize",
            call=("flash_attn_func", lambda device, dtype=dtype: _quantized(dtype)),
            on=("cpu",),
        )
    # These are of other types than torch.Tensor, but compute as one.
    yield from _changed(
        "is a Parameter", None, "", lambda t: torch.nn.Parameter(t, requires_grad=False)
    )
    yield from _changed(
        "is of a subclass", None, "", lambda t: t.as_subclass(_Subclass), on=("cpu", "meta", "cuda")
    )


class _Subclass(torch.Tensor):
    pass


def _quantized(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x = [t.float() for t in tensors("cpu")]
    return tuple(torch.quantize_per_tensor(t, 0.1, 0, dtype) for t in x)


def _dtypes_and_devices() -> Iterator[Case]:
    dtypes = ("int8", "uint8", "int16", "int64", "bool", "float8_e4m3fn", "float8_e5m2")
    for name in dtypes:
        dtype = getattr(torch, name)
        pattern = r"expected q.dtype .*torch.bfloat16.*, got q.dtype=<dtype>; cast"
        yield from _sizes(TypeError, pattern, {"dtype": dtype})
    for dtype in (torch.complex32, torch.complex64, torch.complex128):
        yield from _sizes(TypeError, "got q.dtype=<dtype>; there is no complex", {"dtype": dtype})
    for dtype in (torch.float32, torch.float64):
        pattern = r"q.dtype torch.float16 or torch.bfloat16 .*got q.dtype=<dtype>; cast"
        yield from _sizes(TypeError, pattern, {"dtype": dtype}, right_on_cpu=True)
    yield from _sizes(None, "", {"dtype": torch.bfloat16})
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.complex64):
        pattern = rf"NAME of q's dtype torch.float16, got NAME.dtype={dtype}"
        change = lambda t, dtype=dtype: t.to(dtype)  # noqa: E731
        yield from _changed(f"of {dtype}", TypeError, pattern, change, "kv")
    pattern = r"NAME on \w+(:0)? as q, got NAME.device=cpu; move it with .to"
    yield from _changed("on cpu", ValueError, pattern, _cpu, "kv", on=_KERNELS)
    yield from _changed("on cpu", ValueError, "k on cpu as q, got k.dev", _cpu, "q", on=_KERNELS)


def _shapes() -> Iterator[Case]:
    ranks = {
        r"\(\)": lambda t: t[0, 0, 0, 0],
        r"\((4608|2816),\)": torch.flatten,
        r"\((9|11), (4|2), 64\)": lambda t: t[0],
        r"\(1, 2, (9|11), (4|2), 64\)": lambda t: t[None],
        r"\(2, (9|11), (4|2), 8, 2, 4\)": lambda t: t.unflatten(-1, (8, 2, 4)),
    }
    for shape, change in ranks.items():
        yield from _changed(f"of shape {shape}", ValueError, _SHAPE + shape, change)
    wrong = {
        ("k", "batch"): (r"k of q's batch size 2, got k.shape=\(1,", lambda t: t[:1]),
        ("k", "batch_0"): (r"k of q's batch size 2, got k.shape=\(0,", lambda t: t[:0]),
        ("k", "head_dim"): (
            r"head_dim 64, got k.shape=\(2, 11, 2, 32\); pad .* pass softmax_scale",
            lambda t: t[..., :32],
        ),
        ("k", "head_dim_0"): (r"head_dim 64, got k.shape=\(2, 11, 2, 0\)", lambda t: t[..., :0]),
        ("k", "seqlen"): (r"v of k's shape \(2, 10, .*\), got v.shape=", lambda t: t[:, :10]),
        ("q", "batch"): (r"k of q's batch size 1, got k.shape=\(2,", lambda t: t[:1]),
        ("q", "head_dim"): (r"k of q's head_dim 32, got k.shape=", lambda t: t[..., :32]),
        ("v", "batch"): (r"v of k's shape .*got v.shape=\(1,", lambda t: t[:1]),
        ("v", "seqlen"): (r"v of k's shape .*got v.shape=\(2, 10,", lambda t: t[:, :10]),
        ("v", "heads"): (r"v of k's shape .*got v.shape=\(2, 11, 1,", lambda t: t[:, :, :1]),
        ("v", "transposed"): (r"got v.shape=\(2, 2, 11, 64\)", lambda t: t.transpose(1, 2)),
    }
    for (name, what), (pattern, change) in wrong.items():
        yield from _changed(what, ValueError, pattern, change, name)
    pattern = r"v of k's head_dim 64, got v.shape=\(2, 11, 2, 32\); pad .* pass softmax_scale"
    yield from _changed("head_dim", NotImplementedError, pattern, lambda t: t[..., :32], "v")
    heads = r"positive multiple .*q.shape=\(2, 9, <h>, 64\)"
    yield from _sizes(ValueError, heads, {"h": 3}, {"h": 1}, {"h": 0}, {"h": 5})
    yield from _sizes(ValueError, r"multiple .*k.shape=\(2, 11, 0, 64\)", {"h_k": 0})
    yield from _sizes(ValueError, r"multiple .*k.shape=\(2, 11, 8, 64\)", {"h_k": 8})
    yield from _sizes(ValueError, r"head_dim >= 1, got q.shape=\(2, 9, 4, 0\)", {"d": 0})
    beyond = r"head_dim <= 256 on CUDA, got head_dim=<d>; CPU"
    sizes = ({"d": d} for d in (257, 264, 300, 512))
    yield from _sizes(NotImplementedError, beyond, *sizes, right_on_cpu=True)
    padded = (1, 2, 3, 5, 7, 9, 12, 20, 33, 63, 68, 100, 129, 250, 255)
    yield from _sizes(None, "", *({"d": d} for d in (8, 16, 40, 256, *padded)))
    empty = (
        {"b": 0},
        {"seqlen_q": 0},
        {"seqlen_k": 0},
        {"b": 0, "d": 20},
        {"seqlen_q": 0, "d": 20},
    )
    yield from _sizes(None, "", *empty, {"seqlen_k": 0, "d": 20}, {"seqlen_q": 1, "d": 20})


def _layouts() -> Iterator[Case]:
    """Yields odd memory layouts; every device must return the right result for each of them."""
    layouts = {
        "last dimension outermost": lambda t: t.movedim(3, 0).contiguous().movedim(0, 3),
        "rows and head_dim swapped": lambda t: t.mT.contiguous().mT,
        "every other element": lambda t: t.repeat_interleave(2, -1)[..., ::2],
        "one element for all": lambda t: t[..., :1].expand(t.shape),
        "channels_last": lambda t: t.clone(memory_format=torch.channels_last),
        "heads first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "heads first with a gap": lambda t: _gap(4)(t.transpose(1, 2)).transpose(1, 2),
        "a gap of 4": _gap(4),
        "a gap of 8": _gap(8),
        "starts 1 element in": _shifted(1),
        "starts 4 elements in": _shifted(4),
        "starts 8 elements in": _shifted(8),
        "starts 3 elements in, rows reversed": lambda t: _shifted(3)(t.flip(1)),
        "overlapping rows": _strided(7, 3, 11, 1),
        "overlapping elements": _strided(1, 1, 1, 1),
        "one head for all": lambda t: t[:, :, :1].expand(t.shape),
    }
    for name, change in layouts.items():
        yield from _changed(name, None, "", change)
    gradual = {"every other element": lambda t: t.repeat_interleave(2, -1)[..., ::2]}
    for name, change in {**gradual, "channels_last": layouts["channels_last"]}.items():
        yield from _changed(f"{name}, d=20", None, "", change, sizes={"d": 20})
    yield from _changed("starts 1 element in, d=20", None, "", _shifted(1), sizes={"d": 20})
    yield from _changed("a gap of 4, none of them", None, "", _gap(4), sizes={"seqlen_k": 0})


def _options() -> Iterator[Case]:
    yield from _option("softmax_scale", TypeError, _NO_FLOATS)
    yield from _option("softmax_scale", ValueError, {**_BEYOND, "2.4e+38": 2.4e38})
    small = {"0.0": 0.0, "-0.5": -0.5, "1e-40": 1e-40, "1e-45": 1e-45, "-1.0": np.int8(-1)}
    yield from _option("softmax_scale", NotImplementedError, small, right_on_cpu=True)
    right = {"None": None, "1": 1, "np16": np.float16(0.5), "np32": np.float32(0.5)}
    right |= {"np64": np.float64(0.5), "np128": np.longdouble(0.5), "npint": np.int64(1)}
    yield from _option("softmax_scale", None, right)

    yield from _option("dropout_p", TypeError, {**_NO_FLOATS, **_NO_NONE})
    yield from _option("dropout_p", ValueError, {"-0.1": -0.1, "1.0": 1.0, "2": 2, **_BEYOND})
    yield from _option("dropout_p", ValueError, {"0.99999": 0.99999})  # is rounded to 1
    right = {"0.1": 0.1, "0.5": np.float32(0.5), "1e-50": 1e-50, "1 - 2**-16": 1 - 2**-16}
    yield from _option("dropout_p", None, right)
    yield from _option("dropout_p", None, {"0": 0, "np.float32(0)": np.float32(0)})

    yield from _option("softcap", TypeError, {**_NO_FLOATS, **_NO_NONE})
    tiny = {"1e-50": 1e-50, "1e-40": 1e-40, "1e-45": np.float64(1e-45), "-1.0": -1.0}
    yield from _option("softcap", ValueError, {**_BEYOND, **tiny, "2.4e+38": 2.4e38})
    large = {"1e+38": 1e38}  # softmax_scale / softcap is 0 in float32
    yield from _option("softcap", NotImplementedError, large, right_on_cpu=True)
    right = {"30.0": 30.0, "2.5": np.float32(2.5), "1e-30": 1e-30, "1e+30": 1e30}
    right |= {"0": 0, "-0.0": -0.0, "np.int64(0)": np.int64(0)}
    yield from _option("softcap", None, right)

    for flag in ("causal", "deterministic", "return_attn_probs"):
        yield from _option(flag, TypeError, _NO_BOOLS)
        yield from _option(flag, None, {"np.True_": np.True_, "np.False_": np.False_})

    below = {"(-2, 0)": (-2, 0), "(0, -7)": [0, -7], "(-9, -1)": (np.int64(-9), -1)}
    yield from _option("window_size", ValueError, below)
    no_window = {
        "3": 3,
        "None": None,
        "(1, 2, 3)": (1, 2, 3),
        "()": (),
        "(1.0, 2)": (1.0, 2),
        "(True, 0)": (True, 0),
        "(np.True_, 0)": (np.True_, 0),
        "('1', '2')": ("1", "2"),
        "'12'": "12",
        "(None, None)": (None, None),
        "array(": np.array([1, 2]),
        "tensor(": torch.tensor([1, 2]),
        "(np.timedelta64": (np.timedelta64(1), 0),
        "{1, 2}": {1, 2},
    }
    yield from _option("window_size", TypeError, no_window)
    some = {"(4, 0)": (4, 0), "(2, 1)": (np.int64(2), np.uint8(1)), "(0, 0)": [0, 0]}
    yield from _option("window_size", None, some)
    unlimited = {"[-1, -1]": [-1, -1], "np": (np.int8(-1), np.int64(-1))}
    yield from _option("window_size", None, unlimited)


def _slopes_and_gradients() -> Iterator[Case]:
    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[str], torch.Tensor]:
        return lambda device: torch.zeros(shape, device=device, dtype=dtype)

    kind = "alibi_slopes to be a torch.Tensor, got alibi_slopes of type "
    yield _slopes("list", TypeError, kind + "list", [0.5] * 4)
    yield _slopes("float", TypeError, kind + "float", 0.5)
    yield _slopes("ndarray", TypeError, kind + "ndarray", np.zeros(4))
    for dtype in (torch.float16, torch.float64, torch.int32):
        pattern = rf"dtype torch.float32, got alibi_slopes.dtype={dtype}; cast"
        yield _slopes(str(dtype), TypeError, pattern, zeros(4, dtype=dtype))
    for shape in ((2,), (), (4, 2), (1, 4), (2, 4, 1)):
        pattern = rf"\(4,\) or \(2, 4\), got alibi_slopes.shape={re.escape(str(shape))}"
        yield _slopes(f"of shape {shape}", ValueError, pattern, zeros(*shape))
    sparse = "dense torch.Tensor, got alibi_slopes as a tensor of layout torch.sparse_coo"
    yield _slopes("sparse", TypeError, sparse, lambda d: zeros(4)(d).to_sparse(), on=_REAL)
    nested = lambda d: torch.nested.nested_tensor([zeros(4)(d)] * 2)  # noqa: E731
    yield _slopes("nested", TypeError, "got alibi_slopes as a nested tensor", nested, on=_REAL)
    cpu = lambda device: torch.zeros(4)  # noqa: E731
    pattern = r"alibi_slopes on \w+(:0)?, got alibi_slopes.device=cpu"
    yield _slopes("on cpu", ValueError, pattern, cpu, on=_KERNELS)
    for shape in ((4,), (2, 4)):
        yield _slopes(f"right of shape {shape}", None, "", zeros(*shape))
    strided = lambda device: torch.linspace(0, 1, 8, device=device).view(4, 2).mT  # noqa: E731
    yield _slopes("right, strided", None, "", strided)
    for name in ("softmax_scale", "softcap"):
        pattern = (
            rf"{name} from 2\*\*-64 to 2\*\*64 with alibi_slopes on CUDA, got {name}=1e-20; use"
        )
        case = _slopes(f"with {name}=1e-20", NotImplementedError, pattern, zeros(4))
        yield dataclasses.replace(case, options=case.options | {name: 1e-20}, right_on_cpu=True)

    kind, sparse = (text.replace("alibi_slopes", "sinks") for text in (kind, sparse))
    yield _sinks("list", TypeError, kind + "list", [0.5] * 4)
    yield _sinks("sparse", TypeError, sparse, lambda d: zeros(4)(d).to_sparse(), on=_REAL)
    for dtype in (torch.bfloat16, torch.float64, torch.int32):
        pattern = rf"sinks of dtype torch.float32 or torch.float16, got sinks.dtype={dtype}; cast"
        yield _sinks(str(dtype), TypeError, pattern, zeros(4, dtype=dtype))
    for shape in ((2,), (), (2, 4), (4, 1)):
        pattern = rf"sinks of shape \(4,\), got sinks.shape={re.escape(str(shape))}"
        yield _sinks(f"of shape {shape}", ValueError, pattern, zeros(*shape))
    pattern = r"sinks on \w+(:0)?, got sinks.device=cpu"
    yield _sinks("on cpu", ValueError, pattern, cpu, on=_KERNELS)
    for dtype in (torch.float32, torch.float16):
        yield _sinks(f"right {dtype}", None, "", zeros(4, dtype=dtype))


def _packed_inputs() -> Iterator[Case]:
    qkv, kv = "qkvpacked", "kvpacked"
    shape = r"qkv of shape \(batch, seqlen, 3, heads, head_dim\), got qkv.shape="
    yield _packed("qkv_4d", ValueError, shape + r"\(2, 3, 4, 64\)", qkv, (2, 3, 4, 64))
    yield _packed("qkv_2", ValueError, shape + r"\(2, 5, 2, 4, 64\)", qkv, (2, 5, 2, 4, 64))
    yield _packed("qkv_heads_3", ValueError, shape, qkv, (2, 5, 4, 3, 64))
    pattern = r"head_dim <= 256 .*got head_dim=260"
    yield dataclasses.replace(
        _packed("qkv_d=260", NotImplementedError, pattern, qkv, (2, 5, 3, 4, 260)), on=_KERNELS
    )
    pattern = r"head_dim >= 1, got qkv\[:, :, 0\].shape=\(2, 5, 4, 0\)"
    yield _packed("qkv_d=0", ValueError, pattern, qkv, (2, 5, 3, 4, 0))
    pattern = r"expected qkv\[:, :, 0\].dtype .*, got qkv\[:, :, 0\].dtype=torch.int32"
    change = lambda t: t.int()  # noqa: E731
    yield _packed("qkv_int", TypeError, pattern, qkv, (2, 5, 3, 4, 8), change=change)
    shape = r"kv of shape \(batch, seqlen, 2, heads, head_dim\), got kv.shape="
    yield _packed("kv_3", ValueError, shape + r"\(2, 5, 3, 4, 64\)", kv, (2, 5, 3, 4, 64))
    yield _packed("kv_4d", ValueError, shape + r"\(2, 5, 4, 64\)", kv, (2, 5, 4, 64))
    pattern = r"heads of q .* those of kv\[:, :, 0\], got"
    yield _packed("kv_heads", ValueError, pattern, kv, (2, 5, 2, 3, 64))
    pattern = r"kv\[:, :, 0\] of q's batch size 2, got kv\[:, :, 0\].shape=\(3, "
    yield _packed("kv_batch", ValueError, pattern, kv, (3, 5, 2, 2, 64))
    for name, function in (("qkv", qkv), ("kv", kv)):
        shape = (2, 5, 3 if name == "qkv" else 2, 4, 64)
        for kind, change in {"str": lambda t: "kv", "tuple": lambda t: (t, t)}.items():
            pattern = f"{name} to be a torch.Tensor, got {name} of type {kind}"
            yield _packed(f"{name}_{kind}", TypeError, pattern, function, shape, change=change)
        foreign = {
            "nested tensor": lambda t: torch.nested.nested_tensor(list(t)),
            "tensor of layout torch.sparse_coo": torch.Tensor.to_sparse,
        }
        for kind, change in foreign.items():
            pattern = f"{name} to be a dense torch.Tensor, got {name} as a {kind}"
            case = _packed(f"{name}_{kind}", TypeError, pattern, function, shape, change=change)
            yield dataclasses.replace(case, on=_REAL)


CASES = (
    *_kinds(),
    *_dtypes_and_devices(),
    *_shapes(),
    *_layouts(),
    *_options(),
    *_slopes_and_gradients(),
    *_packed_inputs(),
)
