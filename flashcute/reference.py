"""THE reference: attention in plain PyTorch, every feature, any device, written to be read.

It materialises S = Q K^T, one block of rows at a time, and is differentiable by plain autograd.
What the kernels compute is defined here; they are tested against it.

Semantics, for the query at row ``i`` and the key at column ``j``:

* All positions are aligned to the bottom-right corner: the query's place among the keys is
  ``p = i + seqlen_k - seqlen_q``. ``causal`` shows it the keys ``j <= p``, and
  ``window_size = (left, right)`` the keys ``p - left <= j <= p + right``, where -1 is no bound.
  These inequalities are meant literally: a ``right >= seqlen_k`` still hides keys when
  ``seqlen_q > seqlen_k``, because then ``p`` starts below zero.
* Score: ``s = softmax_scale * q.k``, then softcap ``s = softcap * tanh(s / softcap)``, then ALiBi
  ``s -= slope * |p - j|`` and ``s += attn_bias``, then the mask.
* A sink is one more logit per query head that joins the denominator and has no value.
* A row that sees no key has output 0 and gradients 0. Its log-sum-exp is -inf (with a sink: the
  sink, which is then all of the denominator).
* What a row cannot see never reaches it, not even NaN or Inf in K or V, forward or backward;
  :func:`attention_ref` says what does while a CUDA graph is captured.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .checks import check_flag, check_kind, check_real, check_scale, check_softcap, check_window

# Scores held at a time: 128 MiB in float64, and a few temporaries of the same size.
_MAX_BLOCK_SCORES = 2**24

# (batch, rows) -> bool (b, h, rows, seqlen_k) of these batch entries and query rows, True keeps.
DropoutMask = Callable[[slice, slice], Tensor]

_NAME = "attention_ref"  # in messages

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class AttentionOutput(NamedTuple):
    """What :func:`attention_ref` returns.

    Attributes:
        out: (b, seqlen_q, h, d_v), in the dtype computed in.
        lse: (b, h, seqlen_q), natural logarithm of the softmax's denominator; float32, or float64
            where that was computed in.
        probs: (b, h, seqlen_q, seqlen_k), the softmax before dropout, or None if not asked for.
    """

    out: Tensor
    lse: Tensor
    probs: Tensor | None


@dataclasses.dataclass(frozen=True)
class _Options:
    """The arguments of :func:`attention_ref` after validation, as each block needs them."""

    scale: float
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None  # (h,) or (b, h)
    sinks: Tensor | None  # (h,)
    attn_bias: Tensor | None  # (b, h, seqlen_q, seqlen_k), expanded
    dropout_p: float
    dropout_mask: DropoutMask | None
    dtype: torch.dtype
    reorder_ops: bool
    return_probs: bool


def attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | DropoutMask | None = None,
    upcast: torch.dtype | None = None,
    reorder_ops: bool = False,
    return_probs: bool = False,
) -> AttentionOutput:
    """Computes attention as this package defines it; the module's docstring has the semantics.

    Args:
        q: (b, seqlen_q, h, d), float16, bfloat16, float32 or float64, any strides.
        k: (b, seqlen_k, h_k, d), same dtype and device. ``h`` is a multiple of ``h_k``; query head
            ``i`` reads key head ``i // (h // h_k)``.
        v: (b, seqlen_k, h_k, d_v), same dtype and device.
        softmax_scale: Factor on Q K^T; ``d ** -0.5`` when None.
        causal: Hide the future, aligned to the bottom-right corner. Sets ``window_size[1]`` to 0.
        window_size: Keys visible to the left and to the right, -1 for no bound.
        softcap: Bound on the magnitude of the scores; 0 for none.
        alibi_slopes: (h,) or (b, h), floating point.
        sinks: (h,), floating point, in units of the scaled scores.
        attn_bias: Floating point, broadcastable to (b, h, seqlen_q, seqlen_k). -inf hides a key
            just as a mask does.
        dropout_p: Probability of dropping, in [0, 1). The kept probabilities are scaled by
            ``1 / (1 - dropout_p)``.
        dropout_mask: bool, broadcastable to (b, h, seqlen_q, seqlen_k), True where a probability is
            kept. Needed if ``dropout_p > 0``: this function draws no random numbers. Or a function
            of two slices, of the batch and of the query rows, that returns that part of it; the
            backward asks for the same parts again.
        upcast: float32 or float64 to compute in; None computes in the inputs' dtype (the softmax's
            statistics never below float32). ``out`` stays in that dtype: cast it if need be.
        reorder_ops: Scale K instead of Q. Together with ``upcast=None`` this is the low precision
            baseline that errors of a kernel are compared with, as in FlashAttention-2's tests.
            Without effect where the scores themselves are scaled, in float64: with a scale above 1
            in magnitude, unless 16 bits are computed in.
        return_probs: Return the (b, h, seqlen_q, seqlen_k) probabilities as well.

    While a CUDA graph is captured no value can be read. A NaN or Inf in a masked value then reaches
    ``out``, and one in a masked key reaches the gradient of q; lse and probabilities stay right.

    Raises:
        TypeError: a dtype or type is not as above.
        ValueError: a shape or value is not as above.
    """
    _check_inputs(q, k, v)
    _check_options(q, alibi_slopes, sinks, upcast)
    d = q.shape[-1]
    options = _Options(
        scale=d**-0.5 if softmax_scale is None else check_scale(_NAME, softmax_scale, d),
        causal=check_flag(_NAME, "causal", causal),
        window_size=check_window(_NAME, window_size),
        softcap=check_softcap(_NAME, softcap),
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        attn_bias=_expand_bias(attn_bias, q, k),
        dropout_p=dropout_p,
        dropout_mask=_expand_dropout_mask(dropout_p, dropout_mask, q, k),
        dtype=q.dtype if upcast is None else upcast,
        reorder_ops=check_flag(_NAME, "reorder_ops", reorder_ops),
        return_probs=check_flag(_NAME, "return_probs", return_probs),
    )

    batches, rows = blocks(q.shape[0], q.shape[1], q.shape[2] * k.shape[1])
    # Autograd would keep every block's probabilities: where there are several, recompute them.
    recompute = torch.is_grad_enabled() and len(batches) * len(rows) > 1
    columns = []
    for batch in batches:
        parts = []
        for row in rows:
            args = (q, k, v, (batch, row), options)
            if recompute:
                block = checkpoint(
                    _attend_block, *args, use_reentrant=False, preserve_rng_state=False
                )
            else:
                block = _attend_block(*args)
            parts.append(block)
        outs, lses, probs = zip(*parts, strict=True)
        columns.append((_join(outs, 1), _join(lses, 2), _join(probs, 2)))
    out, lse, probs = (_join(parts, 0) for parts in zip(*columns, strict=True))
    return AttentionOutput(out, lse, probs)


def visible_keys(
    seqlen_q: int,
    seqlen_k: int,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    *,
    rows: slice = slice(None),
    device: torch.device | str | None = None,
) -> Tensor:
    """Returns which keys each query may see, bool (rows, seqlen_k), bottom-right aligned.

    ``rows`` selects query rows, all by default. Definitions are in the module's docstring.
    """
    left, right = window_bounds(seqlen_q, seqlen_k, causal, window_size)
    place = _places(seqlen_q, seqlen_k, rows, device)  # (rows, 1)
    key = torch.arange(seqlen_k, device=device)  # (seqlen_k)
    visible = torch.ones(place.shape[0], seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        visible &= key >= place - left
    if right >= 0:
        visible &= key <= place + right
    return visible


def window_bounds(
    seqlen_q: int, seqlen_k: int, causal: bool, window_size: tuple[int, int]
) -> tuple[int, int]:
    """Returns ``causal`` and ``window_size`` as one window ``(left, right)``, -1 for no bound.

    A bound that hides no key from any query becomes -1. The bounds that remain are less than the
    lengths, so that places plus or minus a bound stay within int64.
    """
    left, right = window_size[0], 0 if causal else window_size[1]
    return -1 if left >= seqlen_k - 1 else left, -1 if right >= max(seqlen_q - 1, 0) else right


def _places(seqlen_q: int, seqlen_k: int, rows: slice, device) -> Tensor:
    """Returns the places of the query rows among the keys, as a column: (rows, 1)."""
    return torch.arange(seqlen_q, device=device)[rows, None] + (seqlen_k - seqlen_q)


def blocks(b: int, seqlen_q: int, scores_per_row: int) -> tuple[list[slice], list[slice]]:
    """Cuts the batch and the query rows into blocks of at most ``_MAX_BLOCK_SCORES`` scores.

    There is always a block, which may be empty, so that empty tensors take the path of all others.
    """
    batch_step = min(max(_MAX_BLOCK_SCORES // max(seqlen_q * scores_per_row, 1), 1), max(b, 1))
    row_step = min(
        max(_MAX_BLOCK_SCORES // max(batch_step * scores_per_row, 1), 1), max(seqlen_q, 1)
    )
    batches = [slice(start, start + batch_step) for start in range(0, max(b, 1), batch_step)]
    rows = [slice(start, start + row_step) for start in range(0, max(seqlen_q, 1), row_step)]
    return batches, rows


def _join(parts: tuple[Tensor | None, ...], dim: int) -> Tensor | None:
    """Does ``torch.cat``, but returns a lone part as it is, and None for parts not asked for."""
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts, dim)


def _attend_block(
    q: Tensor, k: Tensor, v: Tensor, block: tuple[slice, slice], o: _Options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes all of attention for a block of (batch entries, query rows)."""
    batch, rows = block
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    q = q[batch, rows].to(o.dtype).transpose(1, 2)  # (b, h, rows, d)
    k = k[batch].to(o.dtype).transpose(1, 2)  # (b, h_k, seqlen_k, d)
    v = v[batch].to(o.dtype).transpose(1, 2)  # (b, h_k, seqlen_k, d_v)
    bias = None if o.attn_bias is None else o.attn_bias[batch, :, rows]

    visible = visible_keys(seqlen_q, seqlen_k, o.causal, o.window_size, rows=rows, device=q.device)[
        None, None
    ]
    if bias is not None:
        visible = visible & (bias.detach() != -torch.inf)  # (b, h, rows, seqlen_k)
    sees_a_key = visible.any(-1, keepdim=True)
    poisoned = _poisoned_keys(k, v)

    # A row that sees no key may hold NaN or Inf, which as a factor must not enter dK = dS^T Q.
    q = torch.where(sees_a_key, q, 0)
    # Scores multiplied by more than 1 may leave float32's range, where Inf - Inf would be NaN.
    in_double = abs(o.scale) > 1 and o.dtype.itemsize >= 4
    if in_double:
        scores = _scores(q, k, visible, poisoned).double() * o.scale
    elif o.reorder_ops:
        scores = _scores(q, k * o.scale, visible, poisoned)
    else:
        scores = _scores(q * o.scale, k, visible, poisoned)  # (b, h, rows, seqlen_k)
    if o.softcap > 0:
        scores = o.softcap * torch.tanh(scores / o.softcap)

    # The statistics of the softmax are never kept below float32, as in any kernel.
    statistics = torch.promote_types(o.dtype, torch.float32)
    scores = scores.to(torch.promote_types(scores.dtype, statistics))
    if o.alibi_slopes is not None:
        distance = _places(seqlen_q, seqlen_k, rows, q.device) - torch.arange(
            seqlen_k, device=q.device
        )
        slopes = o.alibi_slopes.to(scores.dtype)
        slopes = slopes[batch] if slopes.dim() == 2 else slopes[None]
        scores = scores - slopes[:, :, None, None] * distance.abs()
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    scores = torch.where(visible, scores, -torch.inf)

    probs, lse = _softmax(scores, o.sinks)
    lse = lse.to(statistics)
    # A row that sees a NaN has NaN probabilities for all keys: hidden keys must not get them in dV.
    probs = torch.where(visible, probs, 0).to(o.dtype)
    kept = probs
    if o.dropout_mask is not None:
        kept = torch.where(o.dropout_mask(batch, rows), probs / (1 - o.dropout_p), 0)
    out = _weighted_values(kept, v, visible, poisoned)
    out = torch.where(sees_a_key, out, 0)  # (b, h, rows, d_v)
    return out.transpose(1, 2).contiguous(), lse, probs if o.return_probs else None


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Computes softmax and log-sum-exp of the last dimension, whose rows may be all -inf.

    The result does not depend on the maximum that is subtracted, so its gradient need not either.
    """
    if scores.shape[-1] > 0:
        row_max = scores.detach().amax(-1, keepdim=True)  # (b, h, rows, 1)
    else:
        row_max = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    if sinks is not None:
        sinks = sinks.to(scores.dtype)[:, None, None]  # (h, 1, 1)
        row_max = torch.maximum(row_max, sinks.detach())
    row_max = torch.where(row_max == -torch.inf, 0, row_max)  # -inf - -inf would be NaN

    exp_scores = torch.exp(scores - row_max)
    row_sum = exp_scores.sum(-1, keepdim=True)
    if sinks is not None:
        row_sum = row_sum + torch.exp(sinks - row_max)
    empty = row_sum == 0
    row_sum = torch.where(empty, 1, row_sum)  # before log and division: their gradients stay finite
    lse = torch.where(empty, -torch.inf, row_max + torch.log(row_sum))
    return exp_scores / row_sum, lse.squeeze(-1)


# 0 * NaN is NaN, so masking S and zeroing P does not keep a hidden NaN in K or V out of a matrix
# product, nor out of its backward. The few keys that hold one are therefore taken out of the
# products, and their columns are computed one by one from what each row may see of them.


def _is_captured(x: Tensor) -> bool:
    """Returns whether work on ``x`` goes into a CUDA graph capture, so no value can be read."""
    return x.is_cuda and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _poisoned_keys(k: Tensor, v: Tensor) -> Tensor | None:
    """Returns the keys with a NaN or Inf in any head of K or V, (n,) int64; None for no such key,
    and while a graph is captured: probabilities never depend on a key that their row cannot see."""
    if _is_captured(k):
        return None
    finite = torch.isfinite(k.detach()).all(-1) & torch.isfinite(v.detach()).all(-1)
    poisoned = (~finite).flatten(0, 1).any(0).nonzero().squeeze(-1)
    return poisoned if poisoned.numel() > 0 else None


def _what_is_seen(x: Tensor, key: Tensor, visible: Tensor, h: int) -> Tensor:
    """Returns a key (or value) as each query head and row sees it, 0 if hidden: (b, h, rows, d)."""
    head = torch.arange(h, device=x.device) // (h // x.shape[1])
    return torch.where(visible[..., key, None], x[:, head, key][:, :, None], 0)


def _scores(q: Tensor, k: Tensor, visible: Tensor, poisoned: Tensor | None) -> Tensor:
    """Computes Q K^T: (b, h, rows, d) x (b, h_k, n, d) -> (b, h, rows, n)."""
    b, h, rows, d = q.shape
    h_k, n = k.shape[1:3]
    clean = k if poisoned is None else k.index_fill(2, poisoned, 0)
    # The query heads of a group are more rows for the same keys: K is never repeated.
    scores = _Product.apply(q.reshape(b, h_k, h // h_k * rows, d), clean.mT)
    scores = scores.reshape(b, h, rows, n)
    if poisoned is None:
        return scores
    columns = [(q * _what_is_seen(k, key, visible, h)).sum(-1) for key in poisoned]
    return scores.index_copy(-1, poisoned, torch.stack(columns, -1))


def _weighted_values(p: Tensor, v: Tensor, visible: Tensor, poisoned: Tensor | None) -> Tensor:
    """Computes P V: (b, h, rows, n) x (b, h_k, n, d) -> (b, h, rows, d)."""
    b, h, rows, n = p.shape
    h_k, d = v.shape[1], v.shape[3]
    clean = v if poisoned is None else v.index_fill(2, poisoned, 0)
    out = _Product.apply(p.reshape(b, h_k, h // h_k * rows, n), clean)
    out = out.reshape(b, h, rows, d)
    if poisoned is not None:
        for key in poisoned:
            out = out + p[..., key, None] * _what_is_seen(v, key, visible, h)
    return out


class _Product(torch.autograd.Function):
    """``a @ b`` of equal batch dimensions. Autocast computes neither it nor the products of its
    derivatives in 16 bits, even if only the derivatives run under autocast.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a, b):
        device = a.device.type
        known = torch.amp.is_autocast_available(device)  # meta tensors have no autocast
        with torch.autocast(device, enabled=False) if known else contextlib.nullcontext():
            # Few CPUs have fast products of 16 bits.
            if device == "cpu" and a.dtype == b.dtype and a.dtype.itemsize == 2:
                return (a.float() @ b.float()).to(a.dtype)
            return a @ b

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return (
            _Product.apply(grad, b.mT) if ctx.needs_input_grad[0] else None,
            _Product.apply(a.mT, grad) if ctx.needs_input_grad[1] else None,
        )

    @staticmethod
    def jvp(ctx, tangent_a, tangent_b):
        a, b = ctx.saved_tensors
        parts = []
        if tangent_a is not None:
            parts.append(_Product.apply(tangent_a, b))
        if tangent_b is not None:
            parts.append(_Product.apply(a, tangent_b))
        return sum(parts)


def _fail(error: type[Exception], expected: str, got: str, way_out: str) -> None:
    raise error(f"{_NAME}: expected {expected}, got {got}; {way_out}")


def _check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_kind(_NAME, name, x)
        if x.dtype not in _DTYPES:
            way_out = "use float16, bfloat16, float32 or float64"
            _fail(TypeError, f"{name} in floating point", f"{name}.dtype={x.dtype}", way_out)
        if x.dtype != q.dtype:
            got = f"{name}.dtype={x.dtype} beside q.dtype={q.dtype}"
            _fail(TypeError, "one dtype for q, k and v", got, f"cast {name} to {q.dtype}")
        if x.device != q.device:
            got = f"{name}.device={x.device} beside q.device={q.device}"
            _fail(ValueError, "q, k and v on one device", got, f"move {name} to {q.device}")
        if x.dim() != 4:
            got = f"{name}.shape={tuple(x.shape)}"
            _fail(ValueError, f"{name} of shape (b, seqlen, heads, d)", got, "reshape it")
    shapes = f"q={tuple(q.shape)}, k={tuple(k.shape)}, v={tuple(v.shape)}"
    if k.shape[:3] != v.shape[:3]:
        way_out = "give k and v the same batch, length and heads"
        _fail(ValueError, "k and v of one (b, seqlen_k, h_k)", shapes, way_out)
    if q.shape[0] != k.shape[0]:
        _fail(ValueError, "one batch size", shapes, "expand the smaller one")
    if q.shape[3] != k.shape[3] or q.shape[3] == 0:
        _fail(ValueError, "q and k of one head dimension >= 1", shapes, "pad with zeros")
    if k.shape[2] == 0 or q.shape[2] == 0 or q.shape[2] % k.shape[2] != 0:
        way_out = "use key heads that divide the query heads"
        _fail(ValueError, "h to be a positive multiple of h_k", shapes, way_out)


def _check_options(
    q: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    upcast: torch.dtype | None,
) -> None:
    b, h = q.shape[0], q.shape[2]
    if upcast not in (None, torch.float32, torch.float64):
        way_out = "use None to compute in the inputs' dtype"
        _fail(TypeError, "upcast in (None, float32, float64)", f"upcast={upcast}", way_out)
    for name, x, shapes in (
        ("alibi_slopes", alibi_slopes, ((h,), (b, h))),
        ("sinks", sinks, ((h,),)),
    ):
        if x is None:
            continue
        check_kind(_NAME, name, x)
        if x.dtype not in _DTYPES:
            _fail(TypeError, f"{name} in floating point", f"{name}.dtype={x.dtype}", "cast it")
        if tuple(x.shape) not in shapes:
            expected = f"{name} of shape " + " or ".join(str(shape) for shape in shapes)
            _fail(ValueError, expected, f"{name}.shape={tuple(x.shape)}", "one per query head")
        _check_device(name, x, q)


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        got = f"{name}.device={x.device} beside q.device={q.device}"
        _fail(ValueError, f"{name} on q's device", got, f"move {name} to {q.device}")


def _expand(name: str, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Returns ``x``, a tensor on q's device, as a view of shape (b, h, seqlen_q, seqlen_k)."""
    _check_device(name, x, q)
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    try:
        return x.expand(shape)
    except RuntimeError as error:
        got = f"{name}.shape={tuple(x.shape)}"
        message = f"{_NAME}: expected {name} broadcastable to {shape}, got {got}"
        raise ValueError(f"{message}; the order is (b, h, seqlen_q, seqlen_k)") from error


def _expand_bias(attn_bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    if attn_bias is None:
        return None
    check_kind(_NAME, "attn_bias", attn_bias)
    if attn_bias.dtype not in _DTYPES:
        way_out = "turn a bool mask into 0 and -inf"
        got = f"attn_bias.dtype={attn_bias.dtype}"
        _fail(TypeError, "attn_bias in floating point", got, way_out)
    return _expand("attn_bias", attn_bias, q, k)


def _expand_dropout_mask(
    dropout_p: float, dropout_mask: Tensor | DropoutMask | None, q: Tensor, k: Tensor
) -> DropoutMask | None:
    if not 0 <= check_real(_NAME, "dropout_p", dropout_p) < 1:
        _fail(ValueError, "dropout_p in [0, 1)", f"dropout_p={dropout_p}", "use 0 for none")
    if (dropout_p > 0) != (dropout_mask is not None):
        got = (
            f"dropout_p={dropout_p} with dropout_mask={'None' if dropout_mask is None else 'given'}"
        )
        way_out = "draw one, e.g. torch.rand(b, h, seqlen_q, seqlen_k) >= dropout_p"
        _fail(ValueError, "dropout_p > 0 and a dropout_mask together", got, way_out)
    if dropout_mask is None or (callable(dropout_mask) and not isinstance(dropout_mask, Tensor)):
        return dropout_mask
    check_kind(_NAME, "dropout_mask", dropout_mask)
    if dropout_mask.dtype != torch.bool:
        got = f"dropout_mask.dtype={dropout_mask.dtype}"
        _fail(TypeError, "dropout_mask to be bool, True where kept", got, "compare, do not cast")
    expanded = _expand("dropout_mask", dropout_mask, q, k)
    return lambda batch, rows: expanded[batch, :, rows]
