"""Implements ``python -m flashcute bench --pass integrations``.

It times models that call attention through PyTorch's SDPA or transformers, with flashcute's kernels
and without.

``gpt``: forward and backward of a stack of GPT blocks; ``llama``: prefill of transformers' Llama.
Both call ``F.scaled_dot_product_attention``, in turns with :func:`flashcute.enable`, with PyTorch's
own choice of backend, and with only its FlashAttention or only its cuDNN backend. ``padded``: the
forward of transformers' BERT in MiniLM's shape on padded sequences, by the adapter and by SDPA with
a mask; ``padded-attention``: the attention of one of its layers. Weights are random, and a few
layers stand for all. ``host``: host time of one SDPA call.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import benchmarking as bm
from .. import flash_attn_func
from ..integrations import sdpa
from . import peers
from .options import Option
from .sweep import DTYPES, HOST_SHAPES, Variant

_CPU_REPEATS = (3, 1)
_CPU_FLUSH = 64 << 20
_CPU_TOKENS, _CPU_HEADS, _CPU_LAYERS = 64, 4, 1
_VOCABULARY = 1024
# Allowed relative difference by norm of all results of a contender: rounding grows over a few
# layers.
_AGREEMENT = 4e-2
_HOST_TURNS, _HOST_BATCHES = 5, 8

Result = Tensor | tuple[Tensor, ...]
Around = Callable[[str], contextlib.AbstractContextManager]


@dataclasses.dataclass(frozen=True)
class Point:
    """One model and its batch.

    Attributes:
        kind: ``gpt``, ``llama``, ``padded`` or ``padded-attention``.
        shape: Shape of its attention; for a padded batch with the lengths of the sequences.
        width: Size of the hidden states.
        inner: Size inside the multilayer perceptrons.
        layers: Number of layers.
    """

    kind: str
    shape: bm.Shape
    width: int
    inner: int
    layers: int = 4

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.shape.lengths if isinstance(self.shape, Option) else ()


def _causal(kind: str, seqlen: int, heads: tuple[int, int], d: int, width: int, inner: int):
    b = bm.TOTAL_TOKENS // seqlen
    return Point(kind, bm.Shape(b, seqlen, seqlen, *heads, d, causal=True), width, inner)


def _padded(kind: str, batch: int) -> Point:
    draw = random.Random(0)
    lengths = tuple(draw.randint(32, 512) for _ in range(batch))
    longest = max(lengths)
    shape = Option(batch, longest, longest, 12, 12, 32, False, lengths=lengths)
    return Point(kind, shape, 384, 1536, layers=6)


_SEQLENS = (2048, 8192)
POINTS: dict[str, Point] = {
    # GPT-2 medium, and its width in heads of 128.
    **{f"gpt-d64-s{s}": _causal("gpt", s, (16, 16), 64, 1024, 4096) for s in _SEQLENS},
    **{f"gpt-d128-s{s}": _causal("gpt", s, (8, 8), 128, 1024, 4096) for s in _SEQLENS},
    # Llama 3.2 1B and Llama 3 8B.
    **{f"llama-d64-s{s}": _causal("llama", s, (32, 8), 64, 2048, 8192) for s in _SEQLENS},
    **{f"llama-d128-s{s}": _causal("llama", s, (32, 8), 128, 4096, 14336) for s in _SEQLENS},
    **{
        f"{kind}-{batch}": _padded(kind, batch)
        for kind in ("padded", "padded-attention")
        for batch in (64, 256)
    },
}
HOST = "host"  # the point that measures SDPA's host time, without a model


def shrink(point: Point) -> Point:
    """Returns the point made small for a CPU: few tokens, heads and layers."""
    x = point.shape
    h, h_k = min(x.h, _CPU_HEADS), max(1, min(x.h, _CPU_HEADS) * x.h_k // x.h)
    s = min(x.seqlen_q, _CPU_TOKENS)
    shape = dataclasses.replace(x, b=2, seqlen_q=s, seqlen_k=s, h=h, h_k=h_k)
    if isinstance(shape, Option):
        shape = dataclasses.replace(shape, lengths=(s, max(1, s // 3)))
    return Point(point.kind, shape, h * x.d, 2 * h * x.d, _CPU_LAYERS)


class _Block(nn.Module):
    """A block of GPT-2's design: attention and a multilayer perceptron, without dropout."""

    def __init__(self, width: int, inner: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:  # (b, s, width)
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # (b, h, s, d)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def _gpt(point: Point, dtype: torch.dtype, device: str) -> dict[str, Callable[[], Result]]:
    x = point.shape
    torch.manual_seed(0)
    with torch.device(device):
        blocks = (_Block(point.width, point.inner, x.h) for _ in range(point.layers))
        model = nn.Sequential(*blocks).to(dtype)
        states = torch.randn(x.b, x.seqlen_q, point.width, dtype=dtype)
        gradient = torch.randn_like(states)
    wanted = [states.requires_grad_(), *model.parameters()]

    def step() -> Result:
        with torch.enable_grad():
            return torch.autograd.grad(model(states), wanted, gradient)

    return dict.fromkeys(_AROUND, step)


def _config(point: Point, of: type, **more):
    return of(
        vocab_size=_VOCABULARY,
        hidden_size=point.width,
        intermediate_size=point.inner,
        num_hidden_layers=point.layers,
        num_attention_heads=point.shape.h,
        **more,
    )


def _tokens(point: Point, device: str) -> Tensor:
    size = (point.shape.b, point.shape.seqlen_q)
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(_VOCABULARY, size, device=device, generator=generator)


def _llama(point: Point, dtype: torch.dtype, device: str) -> dict[str, Callable[[], Result]]:
    from transformers import LlamaConfig, LlamaModel

    x = point.shape
    more = {"num_key_value_heads": x.h_k, "head_dim": x.d, "attn_implementation": "sdpa"}
    more["max_position_embeddings"] = x.seqlen_q
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaModel(_config(point, LlamaConfig, **more)).to(dtype).eval()
    tokens = _tokens(point, device)
    return dict.fromkeys(_AROUND, lambda: model(tokens).last_hidden_state)  # also fills a KV cache


def _real(point: Point, device: str) -> Tensor:
    """Returns the padding mask, (b, s): 1 at tokens, 0 after them."""
    places = torch.arange(point.shape.seqlen_q, device=device)
    return (places < torch.tensor(point.lengths, device=device)[:, None]).long()


def _bert(point: Point, dtype: torch.dtype, device: str) -> dict[str, Callable[[], Result]]:
    from transformers import BertConfig, BertModel

    from ..integrations.transformers import register

    register()
    tokens, real = _tokens(point, device), _real(point, device)

    def forward(implementation: str) -> Callable[[], Result]:
        config = _config(point, BertConfig, attn_implementation=implementation)
        torch.manual_seed(0)
        with torch.device(device):
            model = BertModel(config, add_pooling_layer=False).to(dtype).eval()
        # Outputs at padding tokens are arbitrary, so they are zeroed before the comparison.
        return lambda: model(tokens, attention_mask=real).last_hidden_state * real[..., None]

    return {"flashcute": forward("cute_attn"), "default": forward("sdpa")}


def _attention(point: Point, dtype: torch.dtype, device: str) -> dict[str, Callable[[], Result]]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

    from ..integrations.transformers import attention_forward, attention_mask

    x, real = point.shape, _real(point, device).bool()
    qkv = [y.transpose(1, 2) for y in bm.make_qkv(x, dtype, device)]
    module = nn.Module()
    module.is_causal = False
    both = {"flashcute": (attention_mask, attention_forward)}
    both["default"] = (sdpa_mask, sdpa_attention_forward)
    sizes = {"batch_size": x.b, "q_length": x.seqlen_q, "kv_length": x.seqlen_k}
    calls: dict[str, Callable[[], Result]] = {}
    for name, (make, function) in both.items():
        mask = make(
            **sizes,
            mask_function=bidirectional_mask_function,
            attention_mask=real,
            allow_is_bidirectional_skip=True,
            device=torch.device(device),
        )
        call = functools.partial(function, module, *qkv, mask)
        calls[name] = lambda call=call: call()[0] * real[:, :, None, None]
    return calls


_MAKERS = {"gpt": _gpt, "llama": _llama, "padded": _bert, "padded-attention": _attention}


@contextlib.contextmanager
def _enabled() -> Iterator[None]:
    """Enables flashcute's kernels, and raises an error where PyTorch's own would run instead."""
    with warnings.catch_warnings(), sdpa.enabled():
        warnings.filterwarnings("error", "flashcute.enable")
        yield


_AROUND: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "flashcute": _enabled,
    "default": contextlib.nullcontext,
    "fa2": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "cudnn": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
}


def _around(name: str) -> contextlib.AbstractContextManager:
    return _AROUND[name]()


def _backend(point: Point, dtype: torch.dtype, device: str) -> str:
    """Returns the backend that SDPA chooses for the point's tensors in the current context."""
    x, options = point.shape, {"is_causal": point.shape.causal}
    tensors = bm.make_qkv(dataclasses.replace(x, b=1), dtype, device)
    q, k, v = (y.transpose(1, 2) for y in tensors)
    if point.lengths:
        options["attn_mask"] = q.new_ones(1, 1, x.seqlen_q, x.seqlen_k, dtype=torch.bool)
    elif x.h != x.h_k:
        options["enable_gqa"] = True
    q, k, v = (y.requires_grad_(point.kind == "gpt") for y in (q, k, v))
    with torch.enable_grad():
        return SDPBackend(torch._fused_sdp_choice(q, k, v, **options)).name


def _difference(found: Result, expected: Result) -> float:
    """Returns the norm of the difference over that of ``expected``, of all tensors together."""
    if isinstance(found, Tensor):
        found, expected = (found,), (expected,)
    pairs = list(zip(found, expected, strict=True))
    squares = [((x.float() - y.float()).square().sum(), y.float().square().sum()) for x, y in pairs]
    apart, size = (sum(column) for column in zip(*squares, strict=True))
    return math.sqrt(float(apart) / float(size))


@dataclasses.dataclass(frozen=True)
class Setup:
    """How points are measured; fields as in :class:`flashcute.bench.sweep.Options`."""

    device: str
    repeats: int
    warmup: int
    flush_bytes: int
    time_limit: float


def measure(name: str, point: Point, dtype: str, setup: Setup) -> dict:
    """Measures a row: each contender's times and its difference from PyTorch's own choice.

    The row also says which contenders are missing, and why.
    """
    made = _MAKERS[point.kind](point, DTYPES[dtype], setup.device)
    calls, missing, difference, backend = {}, {}, {}, {}
    expected = made["default"]()
    for x, call in made.items():
        maker = {x: lambda call=call: call}
        with _around(x):
            found, why = peers.attempt(maker, (x,), setup.device == "cuda")
            calls |= found
            missing |= why
            if x in found:
                difference[x] = _difference(call(), expected)
                backend[x] = _backend(point, DTYPES[dtype], setup.device)
    if point.lengths:
        backend["flashcute"] = "cute_attn"
    del expected
    times = bm.time_interleaved(
        calls, setup.device, setup.repeats, setup.warmup, setup.flush_bytes, _around
    )
    shape = dataclasses.asdict(point.shape)
    return {
        "point": name,
        "kind": point.kind,
        "dtype": dtype,
        **{x: shape[x] for x in ("b", "seqlen_q", "h", "h_k", "d", "causal")},
        "tokens": sum(point.lengths) or point.shape.b * point.shape.seqlen_q,
        "layers": point.layers,
        "us": {x: round(statistics.median(values), 2) for x, values in times.items()},
        "us_min": {x: round(min(values), 2) for x, values in times.items()},
        "us_max": {x: round(max(values), 2) for x, values in times.items()},
        "backend": backend,
        "difference": difference,
        "missing": missing,
    }


def measure_host(shape: bm.Shape, what: str) -> dict[str, float]:
    """Returns host microseconds of one SDPA call: ``fwd`` without gradients, or ``fwd+bwd``.

    Contenders take turns. ``direct`` is :func:`flashcute.flash_attn_func` called without PyTorch's
    function around it.
    """
    q, k, v = (x.requires_grad_(what != "fwd") for x in bm.make_qkv(shape, torch.bfloat16, "cuda"))
    views = [x.transpose(1, 2) for x in (q, k, v)]
    options = {"is_causal": shape.causal, "enable_gqa": shape.h != shape.h_k}
    gradient = torch.ones_like(q)

    def through() -> Tensor:
        return F.scaled_dot_product_attention(*views, **options).transpose(1, 2)

    def direct() -> Tensor:
        return flash_attn_func(q, k, v, causal=shape.causal)

    def timed(forward: Callable[[], Tensor]) -> Callable[[], object]:
        if what == "fwd":
            return forward
        return lambda: torch.autograd.grad(forward(), (q, k, v), gradient)

    calls = {x: timed(through) for x in _AROUND} | {"direct": timed(direct)}
    found: dict[str, list[float]] = {x: [] for x in calls}
    with torch.set_grad_enabled(what != "fwd"):
        for number in range(_HOST_TURNS):
            for x in bm.turn(calls, number):
                with _AROUND.get(x, contextlib.nullcontext)():
                    found[x].append(bm.host_time(calls[x], _HOST_BATCHES))
    return {x: round(statistics.median(times), 1) for x, times in found.items()}


def _measure_hosts() -> list[dict]:
    return [
        {
            "pass": what,
            **{x: getattr(shape, x) for x in ("b", "seqlen_q", "h", "h_k", "d", "causal")},
            "host_us": measure_host(shape, what),
        }
        for shape in HOST_SHAPES.values()
        for what in ("fwd", "fwd+bwd")
    ]


def _dense(x: bm.Shape) -> bm.Shape:
    return bm.Shape(x.b, x.seqlen_q, x.seqlen_k, x.h, x.h_k, x.d, x.causal)


def variants(names: Sequence[str], dtypes: Sequence[str]) -> dict[str, list[Variant]]:
    """Returns the calls whose kernels are built ahead, by pass."""
    found: dict[str, list[Variant]] = {"fwd": [], "fwd+bwd": []}
    for name in names:
        what = "fwd+bwd" if name == HOST or POINTS[name].kind == "gpt" else "fwd"
        # Right padding stays in place, so the kernel is that of a dense batch of the padded length.
        shapes = HOST_SHAPES.values() if name == HOST else (_dense(POINTS[name].shape),)
        of = ("bf16",) if name == HOST else dtypes
        found[what] += [Variant(dtype, shape) for dtype in of for shape in shapes]
    return found


def _names(args: argparse.Namespace, device: str) -> list[str]:
    usual = {
        **{"peers": None, "sustained": 0.0, "plots": None, "tokens": None, "plot_only": None},
        **{"head_dims": None, "seqlens": None, "masks": None, "groups": None},
        **{"inputs": ["normal"], "peer_module": []},
    }
    given = [f"--{name.replace('_', '-')}" for name in usual if getattr(args, name) != usual[name]]
    if given:
        raise ValueError(
            f"flashcute bench: expected --pass integrations without {', '.join(given)}, which it "
            "does not have; leave it out"
        )
    every = [HOST, *POINTS]
    wanted = [name for name in args.shapes if name != "sweep"]
    for name in wanted:
        if not any(name in point for point in every):
            raise ValueError(
                "flashcute bench: expected --shapes with part of the name of a point of --pass "
                f"integrations, got {name!r}; they are {', '.join(every)}"
            )
    found = [x for x in every if not wanted or any(name in x for name in wanted)]
    if device == "cpu" and HOST in found:
        found.remove(HOST)  # it times calls that only enqueue work on a GPU
    return found


def run(args: argparse.Namespace, show: Callable[[Mapping], None]) -> dict:
    """Measures what the arguments ask for; ``show`` is called with each row.

    Raises:
        ValueError: for arguments that the pass does not have, or unknown names of points.
        RuntimeError: if this torch is too old for :func:`flashcute.enable`.
        ImportError: if transformers is missing and a point needs it.
    """
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    names = _names(args, device)
    repeats, warmup = (bm.REPEATS, bm.WARMUP) if device == "cuda" else _CPU_REPEATS
    setup = Setup(
        device,
        args.repeats or repeats,
        args.warmup or warmup,
        bm.FLUSH_BYTES if device == "cuda" else _CPU_FLUSH,
        args.time_limit,
    )
    if device == "cuda":
        from .command import build, configs_of

        passes = variants(names, args.dtypes).items()
        build(dict.fromkeys(x for what, found in passes for x in configs_of([found], what)))
    begin = time.monotonic()
    hosts = _measure_hosts() if HOST in names else []
    points = {x: POINTS[x] if device == "cuda" else shrink(POINTS[x]) for x in names if x != HOST}
    wanted = [(*item, dtype) for item in points.items() for dtype in args.dtypes]
    rows: list[dict] = []
    with torch.no_grad():
        for name, point, dtype in wanted:
            if time.monotonic() - begin > setup.time_limit:
                break
            rows.append(measure(name, point, dtype, setup))
            show(rows[-1])
    return {
        "pass": "integrations",
        "device": device,
        "contenders": list(_AROUND),
        "machine": bm.machine_info(),
        "rows": rows,
        "host": hosts,
        "stopped_early": len(rows) < len(wanted),
    }


def disagreements(result: Mapping) -> list[str]:
    """Lists the contenders whose results differ from PyTorch's."""
    return [
        f"{name} differs from PyTorch's own choice by {value} at {row['point']} {row['dtype']}"
        for row in result["rows"]
        for name, value in row["difference"].items()
        if not value <= _AGREEMENT  # NaN too
    ]


def _cell(values: Mapping[str, float], name: str, digits: int, scale: float = 1.0) -> str:
    return f"{values[name] / scale:.{digits}f}" if name in values else "-"


def summary(result: Mapping) -> str:
    """Formats tables of times, speed over PyTorch's choice and the best other, and host times."""
    names, cells, text = result["contenders"], [], []
    for row in result["rows"]:
        us = row["us"]
        best = min(time for name, time in us.items() if name != "flashcute")
        mask = "causal" if row["causal"] else "padded"
        line = [row["point"], row["dtype"], row["b"], row["seqlen_q"]]
        line += [f"{row['h']}/{row['h_k']}", row["d"], mask]
        line += [_cell(us, name, 3, 1e3) for name in names]
        line += [f"{us['default'] / us['flashcute']:.3f}", f"{best / us['flashcute']:.3f}"]
        cells.append([*line, row["backend"]["default"].lower().replace("_attention", "")])
    if cells:
        header = ["point", "dtype", "b", "s", "h/h_k", "d", "mask", *names]
        table = bm.format_table([*header, "x default", "x best", "default is"], cells)
        text.append(f"Milliseconds, medians, on {result['device']}\n\n{table}")
    hosts = [
        [
            *(row["pass"], row["d"], row["seqlen_q"], f"{row['h']}/{row['h_k']}"),
            *(_cell(row["host_us"], name, 1) for name in (*names, "direct")),
            f"{row['host_us']['flashcute'] / row['host_us']['fa2']:.2f}",
        ]
        for row in result["host"]
    ]
    if hosts:
        header = ["pass", "d", "s", "h/h_k", *names, "direct", "over fa2"]
        text.append(f"Host microseconds of a call\n\n{bm.format_table(header, hosts)}")
    missing = {k: why for row in result["rows"] for k, why in row["missing"].items()}
    text += [f"{name} did not run: {why}" for name, why in missing.items()]
    if result["stopped_early"]:
        text.append("STOPPED EARLY: the time limit was reached, points are missing")
    return "\n\n".join(text)
