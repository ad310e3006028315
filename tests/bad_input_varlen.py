"""A table of odd calls of the varlen functions, each with the error that it must raise.

:mod:`bad_input` is the table of the dense functions. It has the checks of options, of which one
value each is repeated here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch._subclasses import FakeTensorMode

import flashcute

VARLEN, KV, QKV = (f"flash_attn_varlen_{n}func" for n in ("", "kvpacked_", "qkvpacked_"))

# The sequences have 4, 0 and 3 queries and 5, 2 and 0 keys. One query and one key belong to none.
CU_Q, CU_K = [0, 4, 4, 7], [0, 5, 7, 7]
TOTAL_Q, TOTAL_K = 8, 8

# The checks can read the values of lengths on the CPU only.
_READABLE = ("cpu",)
_ANY = ("cpu", "meta", "fake", "cuda")
_REAL = ("cpu", "cuda")
_KERNELS = ("meta", "cuda")
# Devices that take the path of CUDA tensors; meta and fake_cuda do without a GPU.
_CUDA = ("meta", "fake_cuda", "cuda")

_FORM = r"^flash_attn_varlen_\w*func: expected .*, got .*; .+"


@dataclasses.dataclass(frozen=True)
class Case:
    """A call that raises ``error`` with a message that ``pattern`` matches.

    Attributes:
        name: A unique name.
        error: The type of the error.
        pattern: What the message must match, besides '<function>: expected ..., got ...; ...'.
        change: From an argument's name to its value, or to a function of (value, device).
        function: The name of one of the three varlen functions.
        on: The devices where the case can be made: cpu, meta, cuda, fake (of the CPU), fake_cuda.
    """

    name: str
    error: type[Exception]
    pattern: str
    change: dict[str, object]
    function: str = VARLEN
    on: tuple[str, ...] = _ANY

    def failure(
        self, device: str, wrap: Callable[[Callable], Callable] = lambda f: f
    ) -> str | None:
        """Runs the call; returns what is wrong with how it fails, None if nothing is."""
        real = {"fake": "cpu", "fake_cuda": "cuda"}.get(device, device)
        with FakeTensorMode() if real != device else contextlib.nullcontext():
            given = arguments(self.function, real)
            for name, value in self.change.items():
                is_change = callable(value) and not isinstance(value, type)
                given[name] = value(given.get(name), real) if is_change else value
            try:
                result = wrap(getattr(flashcute, self.function))(**given)
            except Exception as exception:
                return self._wrong_error(exception)
        return f"{self.name}: expected {self.error.__name__}, got the result {type(result)}"

    def _wrong_error(self, exception: Exception) -> str | None:
        if type(exception) is not self.error:
            return f"{self.name}: expected {self.error.__name__}, got {exception!r}"
        for pattern in (self.pattern, rf"^{self.function}: ", _FORM):
            if not re.search(pattern, str(exception)):
                return f"{self.name}: expected a message like {pattern!r}, got {exception}"
        return None


def arguments(function: str, device: str, dtype: torch.dtype = torch.float16) -> dict[str, object]:
    """Returns the arguments of a call that is right on the CPU and on meta tensors."""

    def tensor(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in (CU_Q, CU_K))
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 4, "max_seqlen_k": 5}
    if function == QKV:
        return {"qkv": tensor(TOTAL_Q, 3, 4, 16), "cu_seqlens": cu_q, "max_seqlen": 4}
    q = tensor(TOTAL_Q, 4, 16)
    if function == KV:
        return {"q": q, "kv": tensor(TOTAL_K, 2, 2, 16), **lengths}
    return {"q": q, "k": tensor(TOTAL_K, 2, 16), "v": tensor(TOTAL_K, 2, 16), **lengths}


def _case(name: str, error: type[Exception], pattern: str, **kwargs) -> Case:
    fields = {n: kwargs.pop(n) for n in ("function", "on") if n in kwargs}
    return Case(name, error, pattern, kwargs, **fields)


def _lengths(values: list[int], dtype: torch.dtype = torch.int32) -> Callable:
    return lambda _, device: torch.tensor(values, dtype=dtype, device=device)


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Callable:
    return lambda _, device: torch.zeros(shape, dtype=dtype, device=device)


def _tensors() -> Iterator[Case]:
    for n in "qkv":
        for kind, value in {"NoneType": None, "ndarray": np.zeros((8, 2, 16)), "list": [1]}.items():
            way_out = "pass one" if value is None else "convert"
            pattern = rf"{n} to be a torch.Tensor, got {n} of type {kind}; {way_out}"
            yield _case(f"{n} of type {kind}", TypeError, pattern, **{n: value})
        pattern = rf"{n} of shape \(total, heads, head_dim\), got {n}.shape=\(1, 8,"
        yield _case(f"{n} of rank 4", ValueError, pattern, **{n: lambda x, _: x[None]})
        pattern = rf"{n} of shape \(total, heads, head_dim\), got {n}.shape=\(8, (32|64)\); reshape"
        yield _case(f"{n} of rank 2", ValueError, pattern, **{n: lambda x, _: x.flatten(1)})
        jagged = lambda x, _: torch.nested.nested_tensor_from_jagged(  # noqa: E731
            x, torch.tensor([0, 3, 8], device=x.device)
        )
        pattern = rf"{n} as a nested tensor; .*flash_attn_varlen_func with .values\(\)"
        yield _case(f"{n} is nested", TypeError, pattern, on=_REAL, **{n: jagged})
        sparse = f"got {n} as a tensor of layout torch.sparse_coo; "
        change = {n: lambda x, _: x.to_sparse()}
        yield _case(f"{n} is sparse", TypeError, sparse, on=_REAL, **change)
    pattern = r"k of q's head_dim 16, got k.shape=\(8, 2, 8\); pad .* pass softmax_scale"
    yield _case("k head_dim", ValueError, pattern, k=lambda x, _: x[..., :8])
    pattern = r"v of k's head_dim 16, got v.shape=\(8, 2, 8\); pad .* pass softmax_scale"
    yield _case("v head_dim", NotImplementedError, pattern, v=lambda x, _: x[..., :8])
    pattern = r"v of k's shape \(8, 2, 16\), got v.shape=\(7, 2, 16\); pass"
    yield _case("v total", ValueError, pattern, v=lambda x, _: x[:7])
    pattern = r"v of k's shape \(8, 2, 16\), got v.shape=\(8, 1, 16\); pass"
    yield _case("v heads", ValueError, pattern, v=lambda x, _: x[:, :1])
    pattern = r"positive multiple of those of k, got q.shape=\(8, 3, 16\) and k.shape="
    yield _case("q heads", ValueError, pattern, q=lambda x, _: x[:, :3])
    yield _case("q without heads", ValueError, "positive multiple", q=lambda x, _: x[:, :0])
    none = {n: lambda x, _: x[..., :0] for n in "qkv"}
    yield _case("head_dim 0", ValueError, r"head_dim >= 1, got q.shape=\(8, 4, 0\)", **none)
    for dtype in (torch.bfloat16, torch.float32):
        pattern = rf"v of q's dtype torch.float16, got v.dtype={dtype}; cast"
        yield _case(f"v {dtype}", TypeError, pattern, v=lambda x, _, dtype=dtype: x.to(dtype))
    ints = {n: lambda x, _: x.int() for n in "qkv"}
    yield _case("int", TypeError, "expected q.dtype .*got q.dtype=torch.int32; cast", **ints)
    doubles = {n: lambda x, _: x.double() for n in "qkv"}
    pattern = (
        "expected q.dtype torch.float16 or torch.bfloat16 on (meta|cuda:0), got .*float64; cast"
    )
    yield _case("float64 for kernels", TypeError, pattern, on=_KERNELS, **doubles)
    cpu = lambda x, _: torch.zeros(x.shape, dtype=x.dtype)  # noqa: E731
    pattern = r"k on (meta|cuda:0) as q, got k.device=cpu; move"
    yield _case("k on the cpu", ValueError, pattern, on=_KERNELS, k=cpu)
    learned = lambda _, device: torch.zeros(4, device=device, requires_grad=True)  # noqa: E731
    for function in (VARLEN, QKV):
        pattern = "expected no gradient of ALiBi slopes on CUDA, where it is not supported yet"
        yield _case(
            f"learned slopes of {function} on CUDA",
            *(NotImplementedError, pattern),
            function=function,
            on=_CUDA,
            alibi_slopes=learned,
        )
    pattern = (
        r"softmax_scale / softcap within float32's range.*, got softcap=1e\+38 with softmax_sc"
    )
    yield _case(
        "softcap of KV on CUDA", NotImplementedError, pattern, function=KV, on=_CUDA, softcap=1e38
    )
    for name, shape in ((KV, r"\(total, 2, heads, head_dim\)"), (QKV, r"\(total, 3, heads,")):
        n = "kv" if name == KV else "qkv"
        swapped = {n: lambda x, _: x.transpose(1, 2)}
        pattern = rf"{n} of shape {shape}.*, got {n}.shape=\(8, (2|4), (2|3), 16\); stack"
        if name == QKV:
            yield _case(f"{n} heads first", ValueError, pattern, function=name, **swapped)
        pattern = rf"{n} of shape {shape}.*, got {n}.shape=\(1, 8"
        unsqueezed = {n: lambda x, _: x[None]}
        yield _case(f"{n} of rank 5", ValueError, pattern, function=name, **unsqueezed)
        pattern = rf"{n} to be a torch.Tensor, got {n} of type tuple"
        yield _case(f"{n} a tuple", TypeError, pattern, function=name, **{n: (1, 2)})
    pattern = r"heads of q .* those of kv\[:, 0\], got"
    odd = lambda x, _: x[:, :, :1].expand(-1, -1, 3, -1)  # noqa: E731
    yield _case("kv heads", ValueError, pattern, function=KV, kv=odd)
    pattern = r"qkv\[:, 0\].dtype .*got qkv\[:, 0\].dtype=torch.int32"
    yield _case("qkv int", TypeError, pattern, function=QKV, qkv=lambda x, _: x.int())


def _shapes_of_lengths() -> Iterator[Case]:
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        for kind, value in {"list": CU_Q, "NoneType": None, "int": 4}.items():
            way_out = "pass one" if value is None else "convert"
            pattern = f"{name} to be a torch.Tensor, got {name} of type {kind}; {way_out}"
            yield _case(f"{name} of type {kind}", TypeError, pattern, **{name: value})
        for dtype in (torch.int16, torch.float32, torch.bool):
            pattern = f"{name} of dtype torch.int32 or torch.int64, got {name}.dtype={dtype}; cast"
            change = {name: _zeros(4, dtype=dtype)}
            yield _case(f"{name} {dtype}", TypeError, pattern, **change)
        for shape in ((), (0,), (1, 4)):
            pattern = rf"of shape \(b \+ 1,\), got {name}.shape={re.escape(str(shape))}; pass"
            change = {name: _zeros(*shape, dtype=torch.int32)}
            yield _case(f"{name} of shape {shape}", ValueError, pattern, **change)
        change = {name: lambda x, _: torch.zeros(x.shape, dtype=x.dtype)}
        pattern = f"{name} on (meta|cuda:0) as q, got {name}.device=cpu; move it with .to"
        yield _case(f"{name} on the cpu", ValueError, pattern, on=_KERNELS, **change)
    pattern = r"cu_seqlens_k of cu_seqlens_q's shape \(4,\), got cu_seqlens_k.shape=\(3,\)"
    yield _case("batch", ValueError, pattern, cu_seqlens_k=lambda x, _: x[:3])
    for name in ("seqused_q", "seqused_k"):
        pattern = f"{name} to be a torch.Tensor, got {name} of type list"
        yield _case(f"{name} of type list", TypeError, pattern, **{name: [1, 0, 1]})
        pattern = f"{name} of dtype torch.int32, got {name}.dtype=torch.int64; cast"
        change = {name: _zeros(3, dtype=torch.int64)}
        yield _case(f"{name} int64", TypeError, pattern, **change)
        for shape in ((4,), (), (3, 1)):
            pattern = rf"{name} of shape \(3,\), got {name}.shape={re.escape(str(shape))}; pass one"
            change = {name: _zeros(*shape, dtype=torch.int32)}
            yield _case(f"{name} of shape {shape}", ValueError, pattern, **change)
    change = {"seqused_k": lambda _, device: torch.zeros(3, dtype=torch.int32)}
    pattern = "seqused_k on (meta|cuda:0) as q, got seqused_k.device=cpu"
    yield _case("seqused_k on the cpu", ValueError, pattern, on=_KERNELS, **change)


def _values_of_lengths() -> Iterator[Case]:
    def values(name: str, what: str, pattern: str, **change) -> Case:
        fields = {"function": change.pop("function")} if "function" in change else {}
        return _case(f"{name} {what}", ValueError, pattern, on=_READABLE, **fields, **change)

    for name, token in (("cu_seqlens_q", "q"), ("cu_seqlens_k", "k")):
        for start in (1, -1):
            pattern = rf"{name} to start at 0, got {name}\[0\]={start}; pass cumulative"
            yield values(name, f"from {start}", pattern, **{name: _lengths([start, 1, 1, 2])})
        pattern = rf"{name} to be non-decreasing, got {name}\[1:3\]=\[4, 3\]; pass"
        yield values(name, "decreasing", pattern, **{name: _lengths([0, 4, 3, 7])})
        pattern = rf"{name} to be non-decreasing, got {name}\[0:2\]=\[0, -1\]; pass"
        yield values(name, "negative", pattern, **{name: _lengths([0, -1, 3, 7])})
        pattern = rf"{name}\[-1\] <= 8, the rows of {token}, got {name}\[-1\]=9; pass all"
        yield values(name, "beyond", pattern, **{name: _lengths([0, 4, 7, 9])})
        huge = _lengths([0, 4, 7, 2**40], torch.int64)
        yield values(name, "far beyond", rf"got {name}\[-1\]={2**40};", **{name: huge})
    for side, longest, i in (("q", 4, 0), ("k", 5, 0)):
        name = f"max_seqlen_{side}"
        for bound in (longest - 1, 0):
            pattern = rf"{name} >= {longest}, the length of sequence {i}, got {name}={bound}; pass"
            yield values(name, str(bound), pattern, **{name: bound})
        used = f"seqused_{side}"
        pattern = rf"0 <= {used}\[1\] <= {0 if side == 'q' else 2}, .*got {used}\[1\]=3; clamp"
        yield values(used, "too long", pattern, **{used: _lengths([1, 3, 0])})
        pattern = rf"0 <= {used}\[0\] <= {longest}, .*got {used}\[0\]=-1; clamp"
        yield values(used, "negative", pattern, **{used: _lengths([-1, 0, 0])})
    pattern = r"cu_seqlens\[-1\] <= 8, the rows of qkv\[:, 0\], got cu_seqlens\[-1\]=9"
    yield values("qkv", "beyond", pattern, function=QKV, cu_seqlens=_lengths([0, 4, 4, 9]))
    pattern = r"max_seqlen >= 4, .*got max_seqlen=3; pass cu_seqlens.diff"
    yield values("qkv", "max_seqlen", pattern, function=QKV, max_seqlen=3)
    pattern = r"cu_seqlens_k\[-1\] <= 8, the rows of kv\[:, 0\], got cu_seqlens_k\[-1\]=9"
    yield values("kv", "beyond", pattern, function=KV, cu_seqlens_k=_lengths([0, 4, 4, 9]))


def _bounds_and_options() -> Iterator[Case]:
    for name in ("max_seqlen_q", "max_seqlen_k"):
        for shown, value in {"4.0": 4.0, "None": None, "True": True, "'4'": "4"}.items():
            way_out = "pass one" if value is None else "pass int"
            pattern = f"{name} to be an int, got {name}={shown}; {way_out}"
            yield _case(f"{name}={shown}", TypeError, pattern, **{name: value})
        for kind, value in {
            "of a float": torch.tensor(4.0),
            "of two ints": torch.tensor([4, 4]),
            "without values": torch.tensor(4, device="meta"),
        }.items():
            pattern = rf"{name} to be an int, got {name}=tensor\(.*\); pass int\(\.\.\.\), which"
            on = "cpu", "meta", "cuda"
            yield _case(f"{name} a tensor {kind}", TypeError, pattern, on=on, **{name: value})
        for value in (-1, 2**63):
            pattern = rf"0 <= {name} < 2\*\*63, got {name}={value}; pass"
            yield _case(f"{name}={value}", ValueError, pattern, **{name: value})
    yield _case("max_seqlen=-2", ValueError, "got max_seqlen=-2", function=QKV, max_seqlen=-2)
    wrong = {
        "dropout_p": (ValueError, 1.0, "got dropout_p=1.0"),
        "softmax_scale": (ValueError, float("nan"), "got softmax_scale=nan"),
        "causal": (TypeError, 1, "got causal=1"),
        "window_size": (TypeError, 3, "got window_size=3"),
        "softcap": (ValueError, -1.0, "got softcap=-1.0"),
        "deterministic": (TypeError, None, "got deterministic=None"),
        "return_attn_probs": (TypeError, "yes", "got return_attn_probs='yes'"),
    }
    for function in (VARLEN, KV, QKV):
        for name, (error, value, pattern) in wrong.items():
            yield _case(f"{function} {name}", error, pattern, function=function, **{name: value})
    for shape in ((3,), (2, 4), (3, 2)):
        pattern = rf"\(4,\) or \(3, 4\), got alibi_slopes.shape={re.escape(str(shape))}"
        change = {"alibi_slopes": _zeros(*shape)}
        yield _case(f"alibi_slopes {shape}", ValueError, pattern, **change)
    change = {"alibi_slopes": _zeros(4, dtype=torch.float16)}
    yield _case("alibi_slopes half", TypeError, "got alibi_slopes.dtype=torch.float16", **change)
    for shape in ((3,), (3, 4), ()):
        pattern = rf"sinks of shape \(4,\), got sinks.shape={re.escape(str(shape))}; pass one"
        yield _case(f"sinks {shape}", ValueError, pattern, sinks=_zeros(*shape))
    pattern = "sinks of dtype torch.float32 or torch.float16, got sinks.dtype=torch.float64"
    yield _case("sinks float64", TypeError, pattern, sinks=_zeros(4, dtype=torch.float64))
    change = {"softmax_scale": -1.0, "on": _KERNELS}
    yield _case("scale for kernels", NotImplementedError, "softmax_scale > 0 .*got", **change)


CASES = (*_tensors(), *_shapes_of_lengths(), *_values_of_lengths(), *_bounds_and_options())
