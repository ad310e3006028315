"""A table of odd calls of the functions with a KV cache, each with the error that it must raise.

:mod:`bad_input_varlen` has the checks of lengths and options, of which one value each is repeated
here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch._subclasses import FakeTensorMode

import flashcute

CACHE, VARLEN = "flash_attn_with_kvcache", "flash_attn_varlen_func"
_FORM = r"^flash_attn_\w+: expected .*, got .*; .+"
# The checks can read the values of lengths and page numbers on the CPU only.
_READABLE = ("cpu",)
_ANY = ("cpu", "meta", "fake", "cuda")
_REAL = ("cpu", "cuda")
_KERNELS = ("meta", "cuda")


class Case(NamedTuple):
    """A call that fails, as in :mod:`bad_input_varlen`; ``paged`` calls have a block_table."""

    name: str
    error: type[Exception]
    pattern: str
    change: dict[str, object]
    function: str = CACHE
    paged: bool = False
    on: tuple[str, ...] = _ANY

    def failure(self, device: str, wrap: Callable = lambda function: function) -> str | None:
        """Runs the call; returns what is wrong with how it fails, None if nothing is."""
        real = {"fake": "cpu", "fake_cuda": "cuda"}.get(device, device)
        with FakeTensorMode() if real != device else contextlib.nullcontext():
            given = arguments(self.function, real, self.paged)
            for name, value in self.change.items():
                is_change = callable(value) and not isinstance(value, type)
                given[name] = value(given.get(name), real) if is_change else value
            try:
                result = wrap(getattr(flashcute, self.function))(**given)
            except Exception as exception:
                return self._wrong(exception)
        return f"{self.name}: expected {self.error.__name__}, got the result {type(result)}"

    def _wrong(self, exception: Exception) -> str | None:
        if type(exception) is not self.error:
            return f"{self.name}: expected {self.error.__name__}, got {exception!r}"
        for pattern in (self.pattern, rf"^{self.function}: ", _FORM):
            if not re.search(pattern, str(exception)):
                return f"{self.name}: expected a message like {pattern!r}, got {exception}"
        return None


def arguments(function: str, device: str, paged: bool = False) -> dict[str, object]:
    """Returns the arguments of a call that is right on the CPU and on meta tensors.

    The cache has room for 8 tokens of each of the 3 sequences.
    """

    def ones(*shape: int, dtype=torch.float16) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    def ints(values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    table = {"block_table": ints([[0, 5], [3, 1], [2, 9]])} if paged else {}
    shape = (6, 4, 2, 16) if paged else (3, 8, 2, 16)
    if function == VARLEN:
        lengths = {"cu_seqlens_q": ints([0, 2, 2, 5]), "cu_seqlens_k": ints([0, 7, 12, 13])}
        lengths |= {"max_seqlen_q": 3, "max_seqlen_k": 7}
        return {"q": ones(5, 4, 16), "k": ones(*shape), "v": ones(*shape), **lengths, **table}
    new = {"k": ones(3, 1, 2, 16), "v": ones(3, 1, 2, 16), "cache_seqlens": ints([7, 4, 0])}
    caches = {"k_cache": ones(*shape), "v_cache": ones(*shape)}
    return {"q": ones(3, 2, 4, 16), **caches, **new, **table}


def _case(name: str, error: type[Exception], pattern: str, **kwargs) -> Case:
    fields = {n: kwargs.pop(n) for n in ("function", "on", "paged") if n in kwargs}
    return Case(name, error, pattern, kwargs, **fields)


def _ints(values, dtype=torch.int32) -> Callable:
    return lambda _, device: torch.tensor(values, dtype=dtype, device=device)


def _ones(*shape: int, dtype=torch.float16) -> Callable:
    return lambda _, device: torch.ones(shape, dtype=dtype, device=device)


def _elsewhere(x, _):
    return torch.zeros(x.shape, dtype=x.dtype)


def _tensors() -> Iterator[Case]:
    for n in ("q", "k_cache", "v_cache", "k", "v"):
        for kind, value in {"ndarray": np.zeros((3, 8, 2, 16)), "list": [1]}.items():
            pattern = rf"{n} to be a torch.Tensor, got {n} of type {kind}; convert"
            yield _case(f"{n} of type {kind}", TypeError, pattern, **{n: value})
        tokens = {"q": "batch, seqlen", "k": "batch, seqlen_new", "v": "batch, seqlen_new"}
        shape = rf"\({tokens.get(n, 'batch_cache, seqlen_cache')}, heads"
        pattern = rf"{n} of shape {shape}, head_dim\), got {n}.shape=\(.*\); reshape"
        yield _case(f"{n} of rank 3", ValueError, pattern, **{n: lambda x, _: x[0]})
        pattern = rf"{n} on (meta|cuda:0) as q, got {n}.device=cpu; move"
        if n != "q":
            yield _case(f"{n} on the cpu", ValueError, pattern, on=_KERNELS, **{n: _elsewhere})
            pattern = rf"{n} of q's dtype torch.float16, got {n}.dtype=torch.float32; cast"
            yield _case(f"{n} float32", TypeError, pattern, **{n: lambda x, _: x.float()})
        sparse = {n: lambda x, _: x.to_sparse()}
        pattern = f"got {n} as a tensor of layout torch.sparse_coo; "
        yield _case(f"{n} sparse", TypeError, pattern, on=_REAL, **sparse)
        nested = {n: lambda x, _: torch.nested.nested_tensor([*x])}
        yield _case(f"{n} nested", TypeError, f"got {n} as a nested", on=_REAL, **nested)
    for n in ("q", "k_cache", "v_cache"):
        yield _case(f"{n} None", TypeError, f"got {n} of type NoneType; pass one", **{n: None})
    every = {n: lambda x, _: x.int() for n in ("q", "k_cache", "v_cache", "k", "v")}
    yield _case("int", TypeError, "expected q.dtype .*got q.dtype=torch.int32; cast", **every)
    every = {n: lambda x, _: x.double() for n in every}
    yield _case(
        "float64 for kernels", TypeError, "on (meta|cuda:0), got .*float64", on=_KERNELS, **every
    )
    every = {n: lambda x, _: x[..., :0] for n in every}
    yield _case("head_dim 0", ValueError, r"head_dim >= 1, got q.shape=\(3, 2, 4, 0\)", **every)
    pattern = r"k_cache of q's head_dim 16, got k_cache.shape=\(3, 8, 2, 8\); pad .*_scale"
    yield _case("k_cache head_dim", ValueError, pattern, k_cache=lambda x, _: x[..., :8])
    pattern = r"v_cache of k_cache's head_dim 16, got v_cache.shape=\(3, 8, 2, 8\); pad .*_scale"
    yield _case("v_cache head_dim", NotImplementedError, pattern, v_cache=lambda x, _: x[..., :8])
    yield _case("v_cache length", ValueError, r"\(3, 7, 2, 16\); pass", v_cache=_ones(3, 7, 2, 16))
    pattern = r"positive multiple of those of k_cache, got q.shape=\(3, 2, 3, 16\)"
    yield _case("heads of q", ValueError, pattern, q=_ones(3, 2, 3, 16))
    pattern = (
        r"k_cache of at least q's batch size 3, got k_cache.shape=\(2, 8, 2, 16\); pass cache_"
    )
    fewer = {n: _ones(2, 8, 2, 16) for n in ("k_cache", "v_cache")}
    yield _case("fewer entries", ValueError, pattern, **fewer)
    pattern = r"k_cache of shape \(num_pages, page_size, .* page_size >= 1, got .*\(6, 0, 2, 16\)"
    none = {n: lambda x, _: x[:, :0] for n in ("k_cache", "v_cache")} | {"k": None, "v": None}
    yield _case("page_size 0", ValueError, pattern, paged=True, **none)


def _new_tokens() -> Iterator[Case]:
    for here, missing in (("k", "v"), ("v", "k")):
        pattern = f"expected k and v or neither, got {here} with {missing}=None; pass both"
        yield _case(f"{missing} None", ValueError, pattern, **{missing: None})
    pattern = "cache_seqlens with k and v, got cache_seqlens=None; pass how many"
    yield _case("no lengths", ValueError, pattern, cache_seqlens=None)
    none = {n: lambda x, _: x[:, :0] for n in ("k", "v")} | {"cache_seqlens": None}
    yield _case("no lengths for no tokens", ValueError, pattern, **none)
    for shape in ((2, 1, 2, 16), (3, 1, 4, 16), (3, 1, 2, 8)):
        pattern = rf"k of shape \(3, seqlen_new, 2, 16\), .*got k.shape={re.escape(str(shape))}"
        yield _case(f"k {shape}", ValueError, pattern, k=_ones(*shape))
    pattern = r"v of k's shape \(3, 1, 2, 16\), got v.shape=\(3, 2, 2, 16\); pass one value"
    yield _case("v longer", ValueError, pattern, v=_ones(3, 2, 2, 16))
    long = {n: _ones(3, 9, 2, 16) for n in "kv"}
    pattern = r"k of at most 8 tokens, .*got k.shape=\(3, 9, 2, 16\); pass a larger cache"
    for paged in (False, True):
        yield _case(f"k too long, paged={paged}", ValueError, pattern, paged=paged, **long)
    for n in ("k_cache", "v_cache"):
        expanded = {n: lambda x, _: x[:1].expand(x.shape)}
        pattern = rf"{n} with memory for each element, .*got {n}.stride\(\)=\(0, .*contiguous"
        yield _case(f"{n} expanded", ValueError, pattern, **expanded)
    # These lengths are ints, which the checks know without reading a tensor.
    for value in (8, 100, 2**40):
        pattern = rf"0 <= cache_seqlens <= 7, .*room for 8 .*got cache_seqlens={value} with 1 tok"
        yield _case(f"cache_seqlens={value}", ValueError, pattern, cache_seqlens=value)
    read = {"k": None, "v": None, "cache_seqlens": 9}
    yield _case("cache_seqlens=9", ValueError, "<= 8, .*got cache_seqlens=9; pass a larger", **read)
    empty = read | {n: lambda x, _: x[:0] for n in ("k_cache", "v_cache")}
    pattern = "<= 8, .*got cache_seqlens=9; pass a block_table of more columns"
    yield _case("cache_seqlens=9 of no pages", ValueError, pattern, paged=True, **empty)
    pattern = "0 <= cache_seqlens < .*got cache_seqlens=-1; pass"
    yield _case("cache_seqlens=-1", ValueError, pattern, cache_seqlens=-1)
    for kind, value in {"float": 1.0, "list": [1, 2, 3], "bool": True, "str": "1"}.items():
        pattern = f"cache_seqlens to be an int or a torch.Tensor, got .* of type {kind}; pass one"
        yield _case(f"cache_seqlens of type {kind}", TypeError, pattern, cache_seqlens=value)


def _rotary() -> Iterator[Case]:
    both = {"rotary_cos": _ones(8, 4), "rotary_sin": _ones(8, 4)}
    for here, missing in (("rotary_cos", "rotary_sin"), ("rotary_sin", "rotary_cos")):
        pattern = f"rotary_cos and rotary_sin or neither, got {here} with {missing}=None; pass both"
        yield _case(f"no {missing}", ValueError, pattern, **{here: both[here]})
    pattern = "k and v with rotary_cos, got k=None; rotate q alone with flashcute.rotary.apply_ro"
    yield _case("rotary of q alone", ValueError, pattern, **both, k=None, v=None)
    pattern = r"2 <= rotary_dim <= 16, the head_dim of q, got rotary_cos.shape=\(8, 9\)"
    yield _case("rotary_dim", ValueError, pattern, **both | {"rotary_cos": _ones(8, 9)})
    pattern = r"rotary_sin of rotary_cos's shape \(8, 4\).*got rotary_sin.shape=\(8, 2\)"
    yield _case("rotary_sin", ValueError, pattern, **both | {"rotary_sin": _ones(8, 2)})
    pattern = r"rotary_cos of shape \(seqlen_ro, rotary_dim / 2\), got rotary_cos.shape=\(8,\)"
    yield _case("rotary_cos rank", ValueError, pattern, **both | {"rotary_cos": _ones(8)})
    pattern = "rotary_cos of dtype torch.float16, got rotary_cos.dtype=torch.float32; cast"
    wide = both | {"rotary_cos": _ones(8, 4, dtype=torch.float32)}
    yield _case("rotary_cos float32", TypeError, pattern, **wide)
    short = {n: _ones(7, 4) for n in both}
    pattern = r"rotary_cos of at least 8 rows, .*got rotary_cos.shape=\(7, 4\); compute"
    yield _case("rotary rows", ValueError, pattern, **short)
    pattern = r"at least 9 rows, one for each position of q, got rotary_cos.shape=\(8, 4\)"
    yield _case("rotary of q", ValueError, pattern, on=_READABLE, causal=True, **both)
    yield _case(
        "interleaved", TypeError, "got rotary_interleaved=1; ", rotary_interleaved=1, **both
    )


def _indices() -> Iterator[Case]:
    for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad"):
        for dtype in (torch.int64, torch.float32):
            pattern = f"{name} of dtype torch.int32, got {name}.dtype={dtype}; cast"
            yield _case(f"{name} {dtype}", TypeError, pattern, **{name: _ints([0, 1, 2], dtype)})
        for shape in ((2,), (), (3, 1)):
            pattern = rf"{name} of shape \(3,\), got {name}.shape={re.escape(str(shape))}; pass one"
            change = {name: _ones(*shape, dtype=torch.int32)}
            yield _case(f"{name} {shape}", ValueError, pattern, **change)
        change = {name: lambda _, device: torch.zeros(3, dtype=torch.int32)}
        pattern = f"{name} on (meta|cuda:0) as q, got {name}.device=cpu; move"
        yield _case(f"{name} on the cpu", ValueError, pattern, on=_KERNELS, **change)
    for function in (CACHE, VARLEN):
        of = {"function": function, "paged": True}
        name = f"block_table of {function}"
        pattern = "block_table to be a torch.Tensor, got block_table of type list"
        yield _case(f"{name} a list", TypeError, pattern, **of, block_table=[[0, 1]])
        pattern = "block_table of dtype torch.int32, got block_table.dtype=torch.int64; cast"
        change = {"block_table": lambda x, _: x.long()}
        yield _case(f"{name} int64", TypeError, pattern, **of, **change)
        pattern = r"block_table of shape \(3, max_pages\), got block_table.shape=\(2,\); pass a row"
        change = {"block_table": lambda x, _: x[0]}
        yield _case(f"{name} of rank 1", ValueError, pattern, **of, **change)
        pattern = r"block_table of shape \(3, 2\), got block_table.shape=\(2, 2\); pass a row"
        change = {"block_table": lambda x, _: x[:2]}
        yield _case(f"{name} of 2 rows", ValueError, pattern, **of, **change)
        for page in (-1, 6, 2**31 - 1, -(2**31)):
            pattern = rf"0 <= block_table\[1, 0\] < 6, a page of k(_cache)?, got .*={page}; pass a"
            wrong = _ints([[0, 5], [page, 1], [2, 9]])
            fields = {**of, "on": _READABLE, "block_table": wrong}
            yield _case(f"{name} page {page}", ValueError, pattern, **fields)
    pattern = "cache_batch_idx=None with a block_table, .*got both; pass block_table"
    yield _case("idx and table", ValueError, pattern, paged=True, cache_batch_idx=_ints([0, 1, 2]))
    pattern = "cache_leftpad=None with a block_table, got both; leave pages"
    change = {"cache_leftpad": _ints([0, 0, 0])}
    yield _case("leftpad and table", NotImplementedError, pattern, paged=True, **change)


def _values() -> Iterator[Case]:
    def value(name: str, pattern: str, **change) -> Case:
        return _case(name, ValueError, pattern, on=_READABLE, **change)

    for i, n in ((0, 8), (1, -1), (2, 2**31 - 1)):
        lengths = [7, 4, 0]
        lengths[i] = n
        pattern = rf"0 <= cache_seqlens <= 7, .*got cache_seqlens\[{i}\]={n} with 1 tokens to appe"
        yield value(f"length {n}", pattern, cache_seqlens=_ints(lengths))
        yield value(f"length {n} in pages", pattern, cache_seqlens=_ints(lengths), paged=True)
    for i, n in ((0, -1), (1, 5), (2, 1)):
        padding = [0, 0, 0]
        padding[i] = n
        pattern = rf"0 <= cache_leftpad\[{i}\] <= \d, .*got cache_leftpad\[{i}\]={n}; count"
        yield value(f"padding {n}", pattern, cache_leftpad=_ints(padding))
    for entry in (-1, 3, 2**31 - 1):
        pattern = rf"0 <= cache_batch_idx\[1\] < 3, .*got cache_batch_idx\[1\]={entry}; pass"
        yield value(f"entry {entry}", pattern, cache_batch_idx=_ints([0, entry, 1]))
    # Tokens to append need a valid page, too.
    table = _ints([[0, 9], [3, 1], [2, 9]])
    pattern = r"0 <= block_table\[0, 1\] < 6, .*got block_table\[0, 1\]=9; .*4 of .*5 tokens"
    change = {"cache_seqlens": _ints([4, 4, 0]), "block_table": table}
    yield value("page of new tokens", pattern, paged=True, **change)
    of = {"function": VARLEN, "paged": True}
    pattern = r"0 to 8 keys of sequence 1, .*got 9 by cu_seqlens_k; pass more pages"
    yield value("too many keys", pattern, **of, cu_seqlens_k=_ints([0, 7, 16, 17]))
    pattern = r"got (-1|9) by seqused_k; pass more pages"
    for n in (-1, 9):
        yield value(f"seqused_k {n}", pattern, **of, seqused_k=_ints([1, n, 1]))
    pattern = "max_seqlen_k >= 7, the length of sequence 0, got max_seqlen_k=6; pass"
    yield value("max_seqlen_k", pattern, **of, max_seqlen_k=6)
    pattern = r"cu_seqlens_k to be non-decreasing, got cu_seqlens_k\[1:3\]=\[7, 5\]"
    yield value("decreasing", pattern, **of, cu_seqlens_k=_ints([0, 7, 5, 6]))
    yield value("start", r"got cu_seqlens_k\[0\]=1", **of, cu_seqlens_k=_ints([1, 7, 7, 7]))
    yield value("rows of q", r"cu_seqlens_q\[-1\] <= 5", **of, cu_seqlens_q=_ints([0, 2, 2, 9]))


def _options() -> Iterator[Case]:
    wrong = {
        "softmax_scale": (ValueError, float("nan"), "got softmax_scale=nan"),
        "causal": (TypeError, 1, "got causal=1"),
        "window_size": (TypeError, 3, "got window_size=3"),
        "softcap": (ValueError, -1.0, "got softcap=-1.0"),
        "return_softmax_lse": (TypeError, "yes", "got return_softmax_lse='yes'"),
        "num_splits": (TypeError, 1.0, "num_splits to be an int, got num_splits=1.0"),
    }
    for name, (error, value, pattern) in wrong.items():
        yield _case(name, error, pattern, **{name: value})
    for value in (-1, 129):
        pattern = rf"0 <= num_splits <= 128, got num_splits={value}; pass 0"
        yield _case(f"num_splits={value}", ValueError, pattern, num_splits=value)
    pattern = r"sinks of shape \(4,\), got sinks.shape=\(2,\); pass one"
    yield _case("sinks", ValueError, pattern, sinks=_ones(2))
    pattern = r"\(4,\) or \(3, 4\), got alibi_slopes.shape=\(2, 4\)"
    yield _case("slopes", ValueError, pattern, alibi_slopes=_ones(2, 4, dtype=torch.float32))
    change = {"softmax_scale": -1.0, "on": _KERNELS}
    yield _case("scale for kernels", NotImplementedError, "softmax_scale > 0 .*got", **change)
    leaf = {"q": lambda x, _: x.requires_grad_()}
    pattern = r"no gradient through a cache, .*got q.requires_grad=True; call it under torch.no_"
    yield _case("gradient", NotImplementedError, pattern, on=(*_ANY, "fake_cuda"), **leaf)
    fields = {"on": ("fake_cuda", "cuda")}
    pattern = r"strides of k_cache that are multiples of 8 .*got k_cache.stride\(\)=\(.*; allocate"
    gaps = {"k_cache": lambda x, _: x.new_empty_strided(x.shape, (272, 34, 17, 1))}
    yield _case("appending to odd strides", NotImplementedError, pattern, **fields, **gaps)
    pattern = r"head_dim to be a multiple of 8 where k and v are appended .*; allocate the cache"
    narrow = {
        n: lambda x, _: x.new_empty(*x.shape[:3], 12) for n in ("q", "k", "v", "k_cache", "v_cache")
    }
    yield _case("appending odd heads", NotImplementedError, pattern, **fields, **narrow)
    pattern = "num_splits <= 1 with dropout, got num_splits=2 and dropout_p=0.1.*; leave"
    more = {"function": VARLEN, "paged": True, "dropout_p": 0.1, "num_splits": 2}
    yield _case("splits and dropout", NotImplementedError, pattern, **more)
    of = {"function": VARLEN, "paged": True}
    pattern = "seqused_k or cu_seqlens_k with a block_table, got neither; pass how many"
    yield _case("no lengths of keys", ValueError, pattern, **of, cu_seqlens_k=None)
    pattern = r"k of shape \(num_pages, page_size, heads, head_dim\), got k.shape=\(4, 2, 16\)"
    yield _case("packed keys in pages", ValueError, pattern, **of, k=lambda x, _: x[0])
    pattern = r"q of shape \(total, heads, head_dim\), got q.shape=\(1, 5, 4, 16\)"
    yield _case("q of a batch", ValueError, pattern, **of, q=lambda x, _: x[None])
    pattern = "cu_seqlens_k to be a torch.Tensor, got cu_seqlens_k of type NoneType"
    given = {"function": VARLEN, "k": _ones(5, 2, 16), "v": _ones(5, 2, 16)}
    yield _case("no table, no lengths", TypeError, pattern, **given, cu_seqlens_k=None)


CASES = (*_tensors(), *_new_tokens(), *_rotary(), *_indices(), *_values(), *_options())
