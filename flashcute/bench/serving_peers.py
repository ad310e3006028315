"""The contenders over a cache, each as one call on the same tensors.

A call returns a tuple of outputs ``(b, seqlen_q, h, d)``: one, or for a mixed batch two, the
chunks' and the decodes'. Outputs are averages over thousands of keys, and so small; as a tuple they
are compared in units of the largest element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from .. import KVCachePlan, flash_attn_varlen_func, flash_attn_with_kvcache
from .. import benchmarking as bm
from ..rotary import apply_rotary_emb
from . import peers
from .option_peers import TRUSTED
from .serving import Serving

RAGGED = "fa3_ragged"  # a mixed batch in one call of FlashAttention-3; "fa3" makes two calls
NAMES = {"cuda": ("flashcute", "fa2", "cudnn", "fa3", RAGGED), "cpu": ("flashcute", TRUSTED)}

# Shape of the decode call for host time, with Llama 3's query and key heads.
HOST_SHAPE = bm.Shape(8, 1, 4096, 32, 8, 128, causal=True)
_HOST_LENGTHS = range(1024, 4096, 61)  # 51 lengths: more than the calls of a batch

Outputs = tuple[torch.Tensor, ...]


class _Problem(NamedTuple):
    """Inputs of a call: one batch of queries (b, seqlen_q, h, d), or two, and their cache.

    Attributes:
        queries: One batch, or two: chunks of prompts, and decodes.
        k, v: The cache, (b, seqlen_k, h_k, d) each.
        lengths: int32 (b,): tokens in the cache before anything is appended.
        table: int32 (b, pages), the block table of a paged cache.
        new: k and v (b, seqlen_q, h_k, d) to append.
        rotary: cos and sin (seqlen_k, d / 2).
    """

    shape: Serving
    queries: tuple[torch.Tensor, ...]
    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor | None
    new: tuple[torch.Tensor, torch.Tensor] | None
    rotary: tuple[torch.Tensor, torch.Tensor] | None

    @property
    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v as (pages, page_size, h_k, d); if contiguous, a page for each sequence."""
        size = self.shape.page_size or self.shape.seqlen_k
        k, v = (x.view(-1, size, *x.shape[2:]) for x in (self.k, self.v))
        return k, v


def _rotary(shape: Serving, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = torch.arange(0, shape.d, 2, device=like.device) / shape.d
    positions = torch.arange(shape.seqlen_k, device=like.device)
    angles = positions[:, None] * 10000.0**-pairs
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _problem(q, k, v, shape: Serving) -> _Problem:
    """Makes the inputs from tensors of the sizes ``shape.tensors``; pages are in random order."""
    generator = torch.Generator().manual_seed(3)
    table, new, rotary = None, None, None
    if shape.page_size:
        pages = shape.b * shape.seqlen_k // shape.page_size
        order = torch.randperm(pages, generator=generator).to(torch.int32)
        table = order.view(shape.b, -1).to(q.device)
    if shape.append:
        size = (shape.b, shape.seqlen_q, *k.shape[2:])
        new = tuple(torch.randn(size, generator=generator).to(q) for _ in range(2))
        rotary = _rotary(shape, q) if shape.append == "rotary" else None
    chunks = shape.b - shape.decodes
    queries = (q[:chunks], q[chunks:, :1].contiguous()) if shape.decodes else (q,)
    before = shape.seqlen_k - (shape.seqlen_q if shape.append else 0)
    lengths = torch.full((shape.b,), before, dtype=torch.int32, device=q.device)
    return _Problem(shape, queries, k, v, lengths, table, new, rotary)


def _appended(x: _Problem) -> dict[str, torch.Tensor | bool]:
    """Returns the arguments of an append, which flashcute and FlashAttention-3 name alike."""
    options = {}
    if x.new is not None:
        options |= dict(zip(("k", "v"), x.new, strict=True))
    if x.rotary is not None:
        options |= dict(zip(("rotary_cos", "rotary_sin"), x.rotary, strict=True))
        options["rotary_interleaved"] = False
    return options


def _packed(x: _Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the queries of a mixed batch as (tokens, h, d), and where each sequence starts."""
    shape = x.shape
    counts = torch.ones(shape.b + 1, dtype=torch.int32)
    counts[0], counts[1 : shape.b - shape.decodes + 1] = 0, shape.seqlen_q
    starts = counts.cumsum(0).to(torch.int32).to(x.k.device)
    return torch.cat([part.flatten(0, 1) for part in x.queries]), starts


def _unpacked(x: _Problem, out: torch.Tensor) -> Outputs:
    sizes = [part.shape[0] * part.shape[1] for part in x.queries]
    parts = zip(out.split(sizes), x.queries, strict=True)
    return tuple(part.view(like.shape) for part, like in parts)


def _flashcute(x: _Problem) -> Callable[[], Outputs]:
    shape, table = x.shape, x.table
    if shape.decodes:
        q, starts = _packed(x)
        if table is None:
            table = torch.arange(shape.b, dtype=torch.int32, device=q.device)[:, None]
        call = partial(
            flash_attn_varlen_func,
            *(q, *x.pages, starts, None, shape.seqlen_q, shape.seqlen_k),
            causal=shape.causal,
            block_table=table,
            seqused_k=x.lengths,
            num_splits=shape.num_splits,
        )
        return lambda: _unpacked(x, call())
    options = {"causal": shape.causal, "num_splits": shape.num_splits, **_appended(x)}
    cache = (x.k, x.v) if table is None else x.pages
    options |= {} if table is None else {"block_table": table}
    (q,) = x.queries
    return lambda: (flash_attn_with_kvcache(q, *cache, cache_seqlens=x.lengths, **options),)


def _fa3(x: _Problem) -> Callable[[], Outputs]:
    """Makes a call of FlashAttention-3 for each batch; builds without pages say so in it."""
    function = peers.fa3_module().flash_attn_with_kvcache
    options = {"causal": x.shape.causal, **_appended(x)}
    counts = [part.shape[0] for part in x.queries]
    if x.table is None:
        caches = list(zip(x.k.split(counts), x.v.split(counts), strict=True))
        tables = [{}] * len(counts)
    else:
        caches = [x.pages] * len(counts)
        tables = [{"page_table": table} for table in x.table.split(counts)]
    lengths = x.lengths.split(counts)
    calls = [
        partial(function, q, *cache, cache_seqlens=length, **table, **options)
        for q, cache, length, table in zip(x.queries, caches, lengths, tables, strict=True)
    ]
    return lambda: tuple(_first(call()) for call in calls)


def _fa3_ragged(x: _Problem) -> Callable[[], Outputs]:
    """Makes one call of FlashAttention-3 for a mixed batch."""
    function = peers.fa3_module().flash_attn_with_kvcache
    q, starts = _packed(x)
    cache = (x.k, x.v) if x.table is None else x.pages
    call = partial(
        function,
        *(q, *cache),
        cache_seqlens=x.lengths,
        **({} if x.table is None else {"page_table": x.table}),
        cu_seqlens_q=starts,
        max_seqlen_q=x.shape.seqlen_q,
        causal=x.shape.causal,
    )
    return lambda: _unpacked(x, _first(call()))


def _first(out) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out  # some releases return the LSE, too


def _dense(maker: Callable, x: _Problem) -> Callable[[], Outputs]:
    """Makes a call, per batch of queries, of a peer without cache support, on the keys in use."""
    if x.new is not None:
        raise NotImplementedError("it has no append to a cache")
    if x.table is not None:
        raise NotImplementedError("it has no cache in pages")
    counts = [part.shape[0] for part in x.queries]
    parts = zip(x.queries, x.k.split(counts), x.v.split(counts), strict=True)
    # A single query sees every key, so it needs no mask.
    calls = [maker(q, k, v, x.shape.causal and q.shape[1] > 1) for q, k, v in parts]
    return lambda: tuple(call() for call in calls)


def _torch(x: _Problem) -> Callable[[], Outputs]:
    """Makes a call of the definition in fp32, a sequence at a time: the reference for outputs."""

    def call() -> Outputs:
        outs = tuple(torch.empty_like(q) for q in x.queries)
        places = [(part, i) for part, q in enumerate(x.queries) for i in range(q.shape[0])]
        for sequence, (part, i) in enumerate(places):
            outs[part][i] = _attend(x, sequence, x.queries[part][i])
        return outs

    return call


def _attend(x: _Problem, sequence: int, q: torch.Tensor) -> torch.Tensor:
    """Returns the output (s, h, d) of one sequence."""
    keys, values = x.k[sequence], x.v[sequence]
    if x.table is not None:
        pages = x.table[sequence].long()
        keys, values = (cache[pages].flatten(0, 1) for cache in x.pages)
    if x.new is not None:
        before = x.shape.seqlen_k - x.shape.seqlen_q
        k, v = (new[sequence] for new in x.new)
        if x.rotary is not None:
            q, k = (apply_rotary_emb(y[None], *x.rotary, seqlen_offsets=before)[0] for y in (q, k))
        keys, values = torch.cat([keys[:before], k]), torch.cat([values[:before], v])
    (s, h, d), (n, h_k, _) = q.shape, keys.shape
    grouped = q.float().view(s, h_k, h // h_k, d)
    scores = torch.einsum("sgrd,ngd->gsrn", grouped, keys.float()) / math.sqrt(d)
    if x.shape.causal:
        positions = torch.arange(n, device=q.device)
        hidden = positions > positions[n - s :, None]
        scores.masked_fill_(hidden[:, None], -math.inf)
    return torch.einsum("gsrn,ngd->sgrd", scores.softmax(-1), values.float()).reshape(s, h, d)


_SDPA = {"fa2": peers.fa2, "cudnn": peers.cudnn}
_MAKERS: dict[str, Callable[[_Problem], Callable[[], Outputs]]] = {
    **{"flashcute": _flashcute, "fa3": _fa3, RAGGED: _fa3_ragged, TRUSTED: _torch},
    **{name: partial(_dense, maker) for name, maker in _SDPA.items()},
}


def make(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Serving, names: tuple[str, ...]
) -> tuple[dict[str, Callable[[], Outputs]], dict[str, str]]:
    """Makes the calls of :func:`flashcute.bench.peers.make` over a cache.

    Tensors have the sizes ``shape.tensors``. All contenders have the same cache, and append the
    same tokens at the same positions.
    """
    problem = _problem(q, k, v, shape)
    makers = {name: partial(maker, problem) for name, maker in _MAKERS.items()}
    wanted = tuple(name for name in names if name != RAGGED or shape.decodes)
    return peers.attempt(makers, wanted, q.is_cuda)


def measure_host(names: tuple[str, ...], device: str) -> dict[str, dict[str, float]]:
    """Returns host microseconds of one call of each contender, with another length each time.

    Lengths are on the device, as serving engines keep them, or ints. Contenders without a cache get
    a view of the keys in use. A plan of flashcute's, which is made beforehand, has the same lengths
    each time, as those of a model's layers in a step are.
    """
    shape = HOST_SHAPE
    q, k, v = bm.make_qkv(shape, torch.bfloat16, device)
    lengths = [torch.full((shape.b,), x, dtype=torch.int32, device=device) for x in _HOST_LENGTHS]
    with_cache = {
        "flashcute": lambda: flash_attn_with_kvcache,
        "fa3": lambda: peers.fa3_module().flash_attn_with_kvcache,
    }

    def over_cache(name: str, values: Sequence[torch.Tensor | int]) -> Callable[[], object]:
        function = partial(with_cache[name](), q, k, v, causal=True)
        return _in_turn([partial(function, cache_seqlens=x) for x in values])

    def over_views(name: str) -> Callable[[], object]:
        return _in_turn([_SDPA[name](q, k[:, :x], v[:, :x], False) for x in _HOST_LENGTHS])

    def planned() -> Callable[[], object]:
        return partial(KVCachePlan(cache_seqlens=lengths[-1], causal=True), q, k, v)

    fields: dict[str, dict[str, Callable[[], Callable[[], object]]]] = {}
    for field, values in {"host_us_decode": lengths, "host_us_decode_int": _HOST_LENGTHS}.items():
        fields[field] = {name: partial(over_cache, name, values) for name in with_cache}
        fields[field] |= {name: partial(over_views, name) for name in _SDPA}
    fields["host_us_decode_plan"] = {"flashcute": planned}
    found: dict[str, dict[str, float]] = {}
    for field, makers in fields.items():
        calls, _ = peers.attempt(makers, tuple(x for x in names if x in makers), q.is_cuda)
        found[field] = {name: round(bm.host_time(call), 1) for name, call in calls.items()}
    return found


def _in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Returns a function that makes the next of ``calls`` each time, over and over.

    Each is called once here, so that a peer that fails is left out.
    """
    for call in calls:
        call()
    following = itertools.cycle(calls)

    def next_call() -> object:
        return next(following)()

    return next_call
