"""Attention of CPU tensors, eagerly: PyTorch's flash attention for the CPU, or the reference.

The reference (:mod:`flashcute.reference`) defines the result and takes every option. PyTorch's
kernel takes a tenth of its time and no memory for scores. It serves the calls for which it computes
the same result: those with no more than a scale, a window (causal is one) and sinks, whose inputs
are finite and not huge. Checking that reads the inputs once more, which takes a sixth of a short
call's time and up to a third with few queries. Calls with few scores therefore use torch's products
and softmax instead, which propagate a NaN.
Everything here is differentiable to any order. Tracers call :mod:`flashcute.cpu_ops` instead, which
has one derivative.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import has_tangent
from .dropout import dropout_mask
from .reference import DropoutMask, attention_ref, blocks, visible_keys, window_bounds

# Query rows that share a mask. Only full attention and square causal attention need no mask.
_ROWS_PER_MASK = 512

# What no score or sum may reach, by the dtype of the computation.
_LIMITS = {dtype: torch.finfo(dtype).max / 4 for dtype in (torch.float32, torch.float64)}

# From this many elements on BLAS's dot product is used even if it runs in several threads: it takes
# half the time of torch's norm, but on a busy machine waiting for threads may take longer.
_MIN_FOR_BLAS = 2**18

_NO_WINDOW = (-1, -1)
_CAUSAL = (-1, 0)
# baddbmm() requires a tensor to add to the product; with beta=0 it ignores the tensor's values.
_IGNORED = {dtype: torch.empty((), dtype=dtype, device="cpu") for dtype in _LIMITS}

_MIN_SCALE = torch.finfo(torch.float32).tiny

# 256 kB of scores in float32: more would leave the L2 cache, in which the kernel's blocks stay.
_FEW_SCORES = 2**16

# Calling this binding and not torch.ops saves a tenth of a short call; the backward has no binding.
_forward_op = torch._scaled_dot_product_flash_attention_for_cpu
_num_threads = torch.get_num_threads
_is_autocast = torch.is_autocast_enabled
_has_transforms = torch._C._are_functorch_transforms_active
_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Options(NamedTuple):
    """The options of :func:`attend` that are no tensors, as in :func:`attention_ref`."""

    softmax_scale: float
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    return_dmask: bool = False


class Tensors(NamedTuple):
    """The tensors of :func:`attend`, checked by the caller.

    Attributes:
        q: (b, seqlen_q, h, d), float16, bfloat16, float32 or float64.
        k: (b, seqlen_k, h_k, d), as v.
        alibi_slopes: (h,) or (b, h).
        sinks: (h,).
        attn_bias: Broadcastable to (b, h, seqlen_q, seqlen_k).
        rng_state: int64 (2,), of the dropout mask; None without dropout.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    attn_bias: Tensor | None = None
    rng_state: Tensor | None = None


def attend(
    tensors: Tensors, options: Options, first_entry: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes attention in float32, or float64 for float64 inputs; with dropout also on CUDA.

    Args:
        first_entry: The number that the first batch entry has in the dropout mask.

    Returns:
        out like q, the log-sum-exp in float32 (b, h, seqlen_q), and dmask: the probabilities
        (b, h, seqlen_q, seqlen_k) in q's dtype with a minus sign where dropped, or, where
        ``return_dmask`` does not ask for them or nothing is dropped, a tensor of shape (0,).
    """
    q, k, v, slopes, sinks, *others = tensors
    if options.softcap == 0.0 and all(x is None for x in (slopes, *others)):
        flash = attend_by_flash(q, k, v, options.softmax_scale, options.causal, options[2:4], sinks)
        if flash is not None:
            out, lse = flash
            return out, lse.float().contiguous(), q.new_empty(0)
    dtype = torch.promote_types(q.dtype, torch.float32)
    keep = None
    if tensors.rng_state is not None:
        keep = _dropout_mask(tensors, options.dropout_p, first_entry)
    out, lse, probs = attention_ref(
        *map(_with_gradient_like_it, (q, k, v)),
        softmax_scale=options.softmax_scale,
        causal=options.causal,
        window_size=options[2:4],
        softcap=options.softcap,
        alibi_slopes=slopes,
        sinks=sinks,
        attn_bias=tensors.attn_bias,
        dropout_p=options.dropout_p,
        dropout_mask=keep,
        upcast=dtype,
        return_probs=options.return_dmask and keep is not None,
    )
    dmask = q.new_empty(0)
    if probs is not None:
        dmask = torch.where(_whole(keep, tensors), probs, -probs).to(q.dtype)
    return like(q, out), lse.float(), dmask


def like(x: Tensor, value: Tensor) -> Tensor:
    """Returns ``value``, which is dense, in dtype and strides of ``torch.empty_like(x)``."""
    if value.stride() == x.stride():  # then x is dense, too
        return value if value.dtype == x.dtype else value.to(x.dtype)
    if value.stride() == torch.empty_like(x, device="meta").stride():
        return value.to(x.dtype)
    return torch.empty_like(x).copy_(value)


def _with_gradient_like_it(x: Tensor) -> Tensor:
    """Returns ``x`` with a hook that gives its gradient the strides that fake tensors promise, not
    those of a product."""

    def lay_out(grad: Tensor | None) -> Tensor | None:
        # Under vmap the strides are those of a larger tensor.
        if grad is None or torch._C._are_functorch_transforms_active():
            return grad
        return like(x, grad)

    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    view = x.view_as(x)
    view.register_hook(lay_out)
    return view


def _dropout_mask(tensors: Tensors, dropout_p: float, first_entry: int) -> DropoutMask:
    """Returns the mask as a function of the block, so that only one block of it is ever held."""
    (b, seqlen_q, h, _), seqlen_k = tensors.q.shape, tensors.k.shape[1]

    def keep(batch: slice, rows: slice) -> Tensor:
        entries = range(first_entry, first_entry + b)[batch]
        return dropout_mask(
            *(tensors.rng_state, entries.stop, h, seqlen_q, seqlen_k, dropout_p),
            batch=slice(entries.start, entries.stop),
            rows=rows,
        )

    return keep


def _whole(keep: DropoutMask, tensors: Tensors) -> Tensor:
    """Returns all blocks of a dropout mask as one tensor, (b, h, seqlen_q, seqlen_k)."""
    (b, seqlen_q, h, _), seqlen_k = tensors.q.shape, tensors.k.shape[1]
    batches, rows = blocks(b, seqlen_q, h * seqlen_k)
    return torch.cat([torch.cat([keep(batch, row) for row in rows], 2) for batch in batches])


def attend_few_scores(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor | None:
    """Computes attention of one batch entry without options, by its definition; out is like q.

    Returns None where there are many scores, where a derivative is wanted, and where the output is
    not finite, as only the reference says what it is then.
    """
    b, seqlen_q, h, d = q.shape
    _, seqlen_k, h_k, _ = k.shape
    if b != 1 or h != h_k or not 0 < h * seqlen_q * seqlen_k <= _FEW_SCORES:
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    # Autocast would compute products in 16 bits; BLAS does not read factors if the scale is 0.
    if _is_autocast("cpu") or _has_transforms() or abs(scale) < _MIN_SCALE or has_tangent(q, k, v):
        return None
    x, y, z = (q, k, v) if q.dtype in _LIMITS else (q.float(), k.float(), v.float())
    _, row, head, element = x.stride()
    x = x.as_strided((h, seqlen_q, d), (head, row, element))
    _, row, head, element = y.stride()
    y = y.as_strided((h, d, seqlen_k), (head, element, row))
    _, row, head, element = z.stride()
    z = z.as_strided((h, seqlen_k, d), (head, row, element))
    scores = torch.baddbmm(_IGNORED[x.dtype], x, y, beta=0, alpha=scale)
    out = torch.bmm(torch.softmax(scores, -1), z)  # (h, seqlen_q, d)
    if not _is_finite(out):
        return None
    return torch.empty_like(q).copy_(out.transpose(0, 1))


# --- PyTorch's flash attention ---


def attend_by_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    window_size: tuple[int, int],
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Computes attention by PyTorch's kernel; None where its result is not the reference's.

    This is the shortest way from a call to the kernel. For short sequences the kernel itself takes
    less time than a dozen calls of torch, so each call that is saved counts.

    Returns:
        out like q, and the log-sum-exp (b, h, seqlen_q), in any strides, of the dtype of the
        computation.
    """
    _, seqlen_q, _, d = q.shape
    _, seqlen_k, _, d_v = v.shape
    if d_v != d or q.numel() == 0 or k.numel() == 0:
        return None
    # Forward-mode derivatives are left to the reference.
    if _has_transforms() or has_tangent(q, k, v, sinks):
        return None
    x = q
    if q.dtype not in _LIMITS:
        x, k, v = q.float(), k.float(), v.float()
    if sinks is not None:
        sinks = sinks.to(x.dtype)
        if not (sinks < torch.inf).all():
            return None
    window = window_bounds(seqlen_q, seqlen_k, causal, window_size)
    # Leading rows may see no key. They are cut off, as the kernel would set their log-sum-exp to 0.
    empty = max(seqlen_q - seqlen_k - window[1], 0) if window[1] >= 0 else 0
    if empty:
        x = x[:, empty:]
    wants_gradient = torch.is_grad_enabled() and (
        x.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sinks is not None and sinks.requires_grad)
    )
    attend = _with_gradient if wants_gradient else _flash_forward
    out, lse = attend(x, k, v, sinks, scale, window)
    if out is None:
        return None
    if empty:
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, empty, 0))
        nothing = lse.new_tensor(-torch.inf) if sinks is None else sinks[:, None]
        lse = torch.cat((nothing.expand(*lse.shape[:2], empty), lse), 2)
    return like(q, out), lse


def _heads_first(x: Tensor) -> Tensor:
    """Returns (b, heads, seqlen, d), d contiguous, as the kernel takes no stride for it."""
    return (x if x.stride(3) == 1 else x.contiguous()).transpose(1, 2)


def _scores_in_range(q: Tensor, k: Tensor, scale: float) -> bool:
    """Returns whether q and k are finite and no score or sum can overflow, by a bound of norms.

    The kernel hides a key by adding to its score, which a NaN or Inf survives, and its exponential
    turns some NaNs into numbers: neither the output nor the log-sum-exp would show them.
    """
    # A comparison with NaN is false. |q k| <= |q| |k| also holds for the sum of magnitudes.
    return _norm(q) * _norm(k) * max(abs(scale), 1.0) < _LIMITS[q.dtype]


def _is_finite(out: Tensor) -> bool:
    """Returns whether v was finite and no sum overflowed, given scores in range: a NaN or Inf in v
    reaches the output of all rows that multiply it, even by the 0 of a hidden key.
    """
    return math.isfinite(out.sum().item())


def _norm(x: Tensor) -> float:
    """Returns the Euclidean norm of all elements; Inf or NaN if one is so or squares overflow."""
    if (_num_threads() == 1 or x.numel() >= _MIN_FOR_BLAS) and x.is_contiguous():
        x = x.view(-1)
        return math.sqrt(torch.dot(x, x).item())
    return torch.linalg.vector_norm(x).item()


class _Piece(NamedTuple):
    """One call of the kernel: the rows see only these keys, and of these what ``mask`` shows."""

    rows: slice
    keys: slice
    mask: Tensor  # (rows, keys), 0 where seen, else -inf


def _is_one_call(q: Tensor, k: Tensor, scale: float, window: tuple[int, int]) -> bool:
    """Returns whether the kernel needs no mask tensor. Its own causal mask is aligned to the
    top-left corner, and its -inf, times a scale that is not positive in float32, is +inf or NaN.
    """
    if window == _CAUSAL and q.shape[1] == k.shape[1]:
        return scale >= _MIN_SCALE
    return window == _NO_WINDOW


def _pieces(q: Tensor, k: Tensor, window: tuple[int, int]) -> Iterator[_Piece]:
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    left, right = window
    for start in range(0, seqlen_q, _ROWS_PER_MASK):
        rows = slice(start, min(start + _ROWS_PER_MASK, seqlen_q))
        first, last = (row + seqlen_k - seqlen_q for row in (rows.start, rows.stop - 1))
        keys = slice(
            0 if left < 0 else max(first - left, 0),
            seqlen_k if right < 0 else min(last + right + 1, seqlen_k),
        )
        seen = visible_keys(seqlen_q, seqlen_k, window_size=window, rows=rows, device=q.device)
        mask = torch.zeros(seen[:, keys].shape, dtype=q.dtype, device=q.device)
        yield _Piece(rows, keys, mask.masked_fill_(~seen[:, keys], -torch.inf))


def _flash_forward(
    q, k, v, sinks, scale: float, window: tuple[int, int]
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Calls the kernel for q (b, seqlen_q, h, d), and k and v (b, seqlen_k, h_k, d).

    Returns out like q and lse (b, h, seqlen_q), or None for both where they would not be the
    reference's. The caller ensures that autograd does not record the inputs.
    """
    if not _scores_in_range(q, k, scale):
        return None, None
    one_call = _is_one_call(q, k, scale, window)
    pieces = () if one_call else _pieces(q, k, window)
    q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
    if one_call:
        out, lse = _forward_op(q, k, v, 0.0, window == _CAUSAL, scale=scale)
        out = out.transpose(1, 2)
    else:
        parts = [
            _forward_op(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], 0.0, False, attn_mask=mask, scale=scale
            )
            for rows, keys, mask in pieces
        ]
        out = torch.cat([part.transpose(1, 2) for part, _ in parts], 1)
        lse = torch.cat([part for _, part in parts], 2)
    if not _is_finite(out):
        return None, None
    if sinks is None:
        return out, lse
    # A sink only joins the denominator, which the log-sum-exp holds: out needs just a factor.
    sinks = sinks[:, None]
    seen = torch.sigmoid(lse - sinks).transpose(1, 2)[..., None]
    return out * seen, torch.logaddexp(lse, sinks)


def _flash_backward(grad, q, k, v, out, lse, scale: float, window: tuple[int, int]):
    """Returns the gradients of q, k and v, (b, seqlen, heads, d), given that of out."""
    one_call = _is_one_call(q, k, scale, window)
    pieces = () if one_call else _pieces(q, k, window)
    grad, q, k, v, out = map(_heads_first, (grad, q, k, v, out))
    if one_call:
        grads = _backward_op(grad, q, k, v, out, lse, 0.0, window == _CAUSAL, scale=scale)
        return [x.transpose(1, 2) for x in grads]
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys, mask in pieces:
        part_q, part_k, part_v = _backward_op(
            grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows],
            lse[:, :, rows], 0.0, False, attn_mask=mask, scale=scale,
        )  # fmt: skip
        grad_q[:, :, rows] = part_q
        grad_k[:, :, keys] += part_k
        grad_v[:, :, keys] += part_v
    return [x.transpose(1, 2) for x in (grad_q, grad_k, grad_v)]


class _Flash(torch.autograd.Function):
    """PyTorch's kernel with the derivatives that its own autograd lacks: those of the log-sum-exp
    and of the gradient, by the reference. The kernel's backward needs no sinks, as the output and
    the log-sum-exp that it reads include them."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, scale, window):
        # Gradients multiply v by numbers on which a finite output sets no bound.
        if not _norm(v) * k.shape[1] < _LIMITS[v.dtype]:
            return None, None
        out, lse = _flash_forward(q, k, v, sinks, scale, window)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.options = scale, window
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        if grad_out is None and grad_lse is None:
            return None, None, None, None, None, None
        q, k, v, sinks, out, lse = ctx.saved_tensors
        if grad_lse is None and not torch.is_grad_enabled() and not has_tangent(grad_out):
            grad_sinks = None
            if ctx.needs_input_grad[3]:
                weight = torch.exp(sinks[:, None] - lse)  # the sink's weight in each row
                dot = (grad_out * out).sum(-1).transpose(1, 2)
                grad_sinks = -(weight * dot).sum((0, 2))
            grads = _flash_backward(grad_out, q, k, v, out, lse, *ctx.options)
            return *grads, grad_sinks, None, None
        scale, window = ctx.options
        with torch.enable_grad():
            out, lse, _ = attention_ref(
                q, k, v, softmax_scale=scale, window_size=window, sinks=sinks
            )
            # The log-sum-exp does not depend on v: it has no gradient where only v wants one.
            pairs = [
                (x, g)
                for x, g in ((out, grad_out), (lse, grad_lse))
                if g is not None and x.requires_grad
            ]
        if not pairs:
            return None, None, None, None, None, None
        results, grads = zip(*pairs, strict=True)
        wanted = [n for n in range(4) if ctx.needs_input_grad[n]]
        found = torch.autograd.grad(
            results,
            [(q, k, v, sinks)[n] for n in wanted],
            grads,
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,  # the log-sum-exp does not depend on v
        )
        gradients = dict(zip(wanted, found, strict=True))
        return *(gradients.get(n) for n in range(4)), None, None


def _with_gradient(*args):
    """Calls ``_Flash.apply``, without the Python around it, outside of torch.func's transforms."""
    return super(torch.autograd.Function, _Flash).apply(*args)
