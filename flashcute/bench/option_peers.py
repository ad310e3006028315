"""The contenders on shapes with options, each as one call on the same tensors.

Besides the peers there is ``plain``: flashcute without the option, on the same tensors. cuDNN is
missing: PyTorch's op for dense tensors takes no option. Gradients are those of q, k and v.

Dropout draws its mask from PyTorch's random state in each call. From the same state flashcute and
the trusted peer draw the same mask, so their results are compared; FlashAttention-2 draws another
one, so only its time counts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType, ModuleType
from typing import NamedTuple

import torch

from .. import benchmarking as bm
from .. import flash_attn_func, flash_attn_varlen_func
from ..dropout import draw_state, dropout_mask
from ..support import supports
from . import peers
from .options import Option

TRUSTED = "torch"  # its outputs are the reference; on a GPU it is not timed
# The reference of gradients on a GPU, where TRUSTED's would take memory for all scores.
_TRUSTED_GRADIENTS = "fa2"
PLAIN = "plain"
# Contenders that drop the same weights from the same random state.
_SAME_DROPOUT = ("flashcute", peers.REPEATABLE, TRUSTED)
# For each kind of device: flashcute, its peers, and flashcute without the option.
NAMES = {"cuda": ("flashcute", "fa2", "fa3", "flex", PLAIN), "cpu": ("flashcute", TRUSTED, PLAIN)}
_CHUNK = 1 << 26  # scores that the trusted peer computes at a time


class _Problem(NamedTuple):
    """Inputs of a call: q ``(b, s, h, d)`` or packed ``(tokens, h, d)``, k, v and the options'."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    shape: Option
    sinks: torch.Tensor | None
    slopes: torch.Tensor | None
    cu_seqlens: torch.Tensor | None


def trusted(shape: Option, what: str, device: str) -> str:
    """Returns the name of the peer that results of a pass are compared with."""
    usual = what == "fwd" or device == "cpu" or shape.dropout
    return TRUSTED if usual else _TRUSTED_GRADIENTS


def is_compared(name: str, shape: bm.Shape) -> bool:
    """Returns whether a contender's results are the trusted peer's, but for rounding.

    flashcute without the option has others, and so has a peer that drops other weights.
    """
    drops = isinstance(shape, Option) and shape.dropout > 0
    return name in _SAME_DROPOUT if drops else name != PLAIN


def _problem(q, k, v, shape: Option, what: str) -> _Problem:
    """Makes the inputs from tensors of the sizes ``shape.tensors``.

    They need gradients unless ``what`` is ``"fwd"``.
    """
    sinks = slopes = cu_seqlens = None
    like = {"dtype": torch.float32, "device": q.device}
    if shape.sinks:  # about as large as the log-sum-exp of a row, so that a wrong sink shows
        generator = torch.Generator(q.device).manual_seed(0)
        sinks = torch.randn(shape.h, generator=generator, **like) + math.log(shape.seqlen_k)
    if shape.alibi:  # from 2^-(8 / h) down to 2^-8, as in the ALiBi paper
        slopes = torch.exp2(-8 / shape.h * torch.arange(1, shape.h + 1, **like))
    if shape.lengths:
        ends = torch.tensor((0, *shape.lengths)).cumsum(0)
        cu_seqlens = ends.to(torch.int32).to(q.device)
        q, k, v = q[0], k[0], v[0]
    if what != "fwd":
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    return _Problem(q, k, v, shape, sinks, slopes, cu_seqlens)


def _flashcute(x: _Problem, **options):
    shape = x.shape
    options |= {
        "window_size": shape.window if shape.window != (-1, -1) else None,
        "softcap": shape.softcap or None,
        "alibi_slopes": x.slopes,
        "sinks": x.sinks,
        "dropout_p": shape.dropout or None,
    }
    options = {name: value for name, value in options.items() if value is not None}
    call = partial(flash_attn_func, x.q, x.k, x.v, causal=shape.causal, **options)
    if x.cu_seqlens is not None:
        lengths = (x.cu_seqlens, x.cu_seqlens, shape.seqlen_q, shape.seqlen_k)
        call = partial(
            flash_attn_varlen_func, x.q, x.k, x.v, *lengths, causal=shape.causal, **options
        )
    return call


def _repeatable(x: _Problem):
    if not x.q.requires_grad:
        raise NotImplementedError("a forward always is")
    return _flashcute(x, deterministic=True)


def without_options(shape: Option) -> bm.Shape:
    """Returns the dense call that the contender ``plain`` runs instead of ``shape``.

    Raises:
        NotImplementedError: where no dense call has the same work.
    """
    if shape.window != (-1, -1):
        raise NotImplementedError("without its window it is more work")
    if len(set(shape.lengths)) > 1:
        raise NotImplementedError("a dense batch has sequences of one length")
    fields = {field.name: getattr(shape, field.name) for field in dataclasses.fields(bm.Shape)}
    return bm.Shape(**fields)


def _plain(x: _Problem):
    """Makes a call of flashcute without the option; sequences of one length are a dense batch."""
    q, k, v, shape = *x[:3], x.shape
    without_options(shape)
    if shape.lengths:
        q, k, v = (y.unflatten(0, (shape.b, shape.seqlen_q)) for y in (q, k, v))
        return lambda: flash_attn_func(q, k, v, causal=shape.causal).flatten(0, 1)
    return partial(flash_attn_func, q, k, v, causal=shape.causal)


def _fa2(x: _Problem):
    """Makes a call of PyTorch's FlashAttention-2.

    With sinks, its output is scaled by the part of the softmax that they leave.
    """
    shape = x.shape
    if shape.softcap:
        raise NotImplementedError("PyTorch's op has no softcap")
    sides = zip(("window_size_left", "window_size_right"), shape.window, strict=True)
    options = dict(sides) if shape.window != (-1, -1) else {}
    options |= {} if x.slopes is None else {"alibi_slopes": x.slopes}
    lengths = (x.cu_seqlens, x.cu_seqlens, shape.seqlen_q, shape.seqlen_k)
    op = torch.ops.aten._flash_attention_forward.default
    forward = partial(op, x.q, x.k, x.v, *lengths, shape.dropout, shape.causal, False, **options)
    if x.sinks is None:
        return lambda: forward()[0]
    sinks = x.sinks[:, None]

    def call():
        out, lse = forward()[:2]  # (b, s, h, d), (b, h, s)
        return out.mul_((lse - sinks).sigmoid_().transpose(-2, -1).unsqueeze(-1))

    return call


def _fa3(x: _Problem):
    shape = x.shape
    given = {"sinks": x.sinks, "ALiBi": x.slopes, "dropout": shape.dropout or None}
    for option, value in given.items():
        if value is not None:
            raise NotImplementedError(f"FlashAttention-3 has no {option}")
    options = {"causal": shape.causal, "window_size": shape.window, "softcap": shape.softcap}
    module = peers.fa3_module()
    call = partial(module.flash_attn_func, x.q, x.k, x.v, **options)
    if x.cu_seqlens is not None:
        lengths = (x.cu_seqlens, x.cu_seqlens, shape.seqlen_q, shape.seqlen_k)
        call = partial(module.flash_attn_varlen_func, x.q, x.k, x.v, *lengths, **options)

    def first():
        out = call()
        return out[0] if isinstance(out, tuple) else out  # some releases return the LSE, too

    return first


def _flex(x: _Problem):
    """Compiles PyTorch's FlexAttention for this shape; its block mask is made beforehand."""
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape, softcap, slopes = x.shape, x.shape.softcap, x.slopes
    if x.sinks is not None or x.cu_seqlens is not None:
        what = "sinks" if x.cu_seqlens is None else "packed sequences"
        raise NotImplementedError(f"FlexAttention has no argument for {what}")
    if shape.dropout:
        raise NotImplementedError("FlexAttention has no dropout")
    left, right = shape.sides
    left = left if left >= 0 else shape.seqlen_k
    right = right if right >= 0 else shape.seqlen_q

    def visible(b, h, i, j):
        return (i - j <= left) & (j - i <= right)

    def score(value, b, h, i, j):
        if softcap:
            value = softcap * torch.tanh(value / softcap)
        return value if slopes is None else value - slopes[h] * (i - j).abs()

    # Each shape has a compiled function of its own: beyond the usual limit of 8 it would run
    # uncompiled.
    config.recompile_limit = 1024
    attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask = create_block_mask(visible, None, None, shape.seqlen_q, shape.seqlen_k, x.q.device)
    q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
    changed = score if softcap or slopes is not None else None
    grouped = shape.h != shape.h_k
    return lambda: attend(q, k, v, changed, mask, enable_gqa=grouped).transpose(1, 2)


def _cudnn(x: _Problem):
    raise NotImplementedError("PyTorch's cuDNN op for dense tensors takes no option")


def _torch(x: _Problem):
    """Makes a call of the definition in fp32, some rows at a time: the reference for outputs."""
    lengths = list(x.shape.lengths)

    def call():
        state = draw_state(x.q.device) if x.shape.dropout else None
        q, k, v = (y.split(lengths) if lengths else y.unbind() for y in x[:3])
        outs = [_attend(x, i, *one, state) for i, one in enumerate(zip(q, k, v, strict=True))]
        return torch.cat(outs) if lengths else torch.stack(outs)

    return call


def _attend(x: _Problem, i: int, q, k, v, state: torch.Tensor | None) -> torch.Tensor:
    """Returns the output (s, h, d) of sequence i, from q (s, h, d), and k and v (s, h_k, d).

    With dropout, its mask is that of the random state ``state``.
    """
    shape, (s, h, d) = x.shape, q.shape
    k, v = (y.float().repeat_interleave(h // shape.h_k, dim=1) for y in (k, v))
    keys = torch.arange(s, device=q.device)
    left, right = shape.sides
    rows, outs = max(1, _CHUNK // (h * s)), []
    for first in range(0, s, rows):
        part = slice(first, first + rows)
        scores = torch.einsum("qhd,khd->hqk", q[part].float(), k) / math.sqrt(d)
        if shape.softcap:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        back = keys[part, None] - keys
        if x.slopes is not None:
            scores -= x.slopes[:, None, None] * back.abs()
        if left >= 0:
            scores.masked_fill_(back > left, -math.inf)
        if right >= 0:
            scores.masked_fill_(-back > right, -math.inf)
        if x.sinks is not None:
            sinks = x.sinks[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)[..., :s]
        if state is not None:
            sizes, entry = (shape.b, h, s, s, shape.dropout), slice(i, i + 1)
            (kept,) = dropout_mask(state, *sizes, batch=entry, rows=part)
            weights = weights * kept / (1 - shape.dropout)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype))
    return torch.cat(outs)


def _of_module(module: ModuleType, x: _Problem):
    """Makes the call of a contender from a file, which has windows without other options."""
    others = (x.shape.softcap, x.shape.dropout, x.shape.lengths, x.shape.sinks, x.shape.alibi)
    if any(others) or x.shape.window == (-1, -1):
        raise NotImplementedError("of the options, a file of --peer-module has windows only")
    if not hasattr(module, "forward_local"):
        raise NotImplementedError("its file has no forward_local(q, k, v, left, right)")
    return module.forward_local(x.q, x.k, x.v, *x.shape.window)


_MAKERS: dict[str, Callable[[_Problem], Callable[[], torch.Tensor]]] = {
    **{"flashcute": _flashcute, PLAIN: _plain, "fa2": _fa2, "fa3": _fa3, "flex": _flex},
    **{"cudnn": _cudnn, "torch": _torch, peers.REPEATABLE: _repeatable},
}


def _call(maker: Callable, x: _Problem, what: str) -> Callable[[], peers.Result]:
    """Makes the call of a contender's pass ``what``, one of ``peers.PASSES``."""
    torch.manual_seed(0)  # the dropout of a backward is drawn here, by the forward before it
    return maker(x) if what == "fwd" else peers.gradients(lambda: maker(x), x[:3], what)


def make(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shape: Option,
    names: tuple[str, ...],
    what: str = "fwd",
    modules: Mapping[str, ModuleType] = MappingProxyType({}),
) -> tuple[dict[str, Callable[[], peers.Result]], dict[str, str]]:
    """Makes the calls of :func:`flashcute.bench.peers.make` for a shape with options.

    Tensors have the sizes ``shape.tensors``. flashcute, too, is missing where
    :func:`flashcute.supports` says no, with its reasons. Packed outputs are ``(tokens, h, d)``.
    ``modules``: contenders from files, by name, of which windows take ``forward_local``.
    """
    problem = _problem(q, k, v, shape, what)
    answer = supports(
        device=q.device,
        dtype=q.dtype,
        head_dim=shape.d,
        num_heads=shape.h,
        num_heads_k=shape.h_k,
        causal=shape.causal,
        window_size=shape.window,
        softcap=shape.softcap,
        alibi_slopes=problem.slopes,
        dropout_p=shape.dropout,
        sinks=problem.sinks,
        cu_seqlens=problem.cu_seqlens,
    )
    refused = {} if answer or "flashcute" not in names else {"flashcute": "; ".join(answer.reasons)}
    makers = _MAKERS | {name: partial(_of_module, module) for name, module in modules.items()}
    makers = {name: partial(_call, maker, problem, what) for name, maker in makers.items()}
    wanted = tuple(name for name in names if name not in refused)
    shapes = [x.shape for x in (problem[:1] if what == "fwd" else problem[:3])]
    calls, missing = peers.attempt(makers, wanted, q.is_cuda, shapes)
    return calls, refused | missing
