"""Attention of CPU tensors, eagerly: PyTorch's flash attention for the CPU, or the reference.

The reference (:mod:`flashcute.reference`) defines the result and takes every option. PyTorch's
kernel takes a tenth of its time and no memory for scores, and serves the calls of which it computes
the same: a scale, a window (causal is one) and sinks, and inputs that are finite and not huge.
Everything here is differentiable to any order. What tracers call instead is in
:mod:`flashcute.cpu_ops`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .reference import DropoutMask, attention_ref, blocks, visible_keys, window_bounds

# Query rows that share a mask; rows of other windows than full and square causal need one.
_ROWS_PER_MASK = 512

_NO_WINDOW = (-1, -1)
_CAUSAL = (-1, 0)
_MIN_CAUSAL_SCALE = torch.finfo(torch.float32).tiny

_forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
        k: (b, seqlen_k, h_k, d), v likewise.
        alibi_slopes: (h,) or (b, h).
        sinks: (h,).
        attn_bias: Broadcastable to (b, h, seqlen_q, seqlen_k).
        seed: int64 scalar that the dropout mask is drawn from; None without dropout.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    attn_bias: Tensor | None = None
    seed: Tensor | None = None


def attend(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Attention in float32, or in float64 for float64 inputs.

    Returns:
        out like q, the log-sum-exp in float32 (b, h, seqlen_q), and dmask: the probabilities
        (b, h, seqlen_q, seqlen_k) in q's dtype with a minus sign where dropped, or, where
        ``return_dmask`` does not ask for them or nothing is dropped, a tensor of shape (0,).
    """
    q, k, v = tensors[:3]
    dtype = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast("cpu", enabled=False):  # which would take products back to 16 bits
        if _is_for_flash(tensors, options):
            window = window_bounds(q.shape[1], k.shape[1], options.causal, options[2:4])
            sinks = None if tensors.sinks is None else tensors.sinks.to(dtype)
            flash = _attend_by_flash(
                *(x.to(dtype) for x in (q, k, v)), sinks, options.softmax_scale, window
            )
            if flash is not None:
                out, lse = flash
                return like(q, out), lse.float(), q.new_empty(0)
        keep = None if tensors.seed is None else _dropout_mask(tensors, options.dropout_p)
        out, lse, probs = attention_ref(
            q,
            k,
            v,
            softmax_scale=options.softmax_scale,
            causal=options.causal,
            window_size=options[2:4],
            softcap=options.softcap,
            alibi_slopes=tensors.alibi_slopes,
            sinks=tensors.sinks,
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
    """``value`` in the dtype and with the strides of ``torch.empty_like(x)``."""
    model = torch.empty_like(x, device="meta")
    if value.dtype == model.dtype and value.stride() == model.stride():
        return value
    return torch.empty_like(x).copy_(value)


def draw_seed() -> Tensor:
    """A seed for a dropout mask, from torch's default generator."""
    # PyTorch's CPU generator uses 32 bits of a seed.
    return torch.randint(2**32, (), dtype=torch.int64, device="cpu")


def _dropout_mask(tensors: Tensors, dropout_p: float) -> DropoutMask:
    """The mask as a function of the block, so that no more than a block of it is ever held."""
    (b, seqlen_q, h, _), seqlen_k = tensors.q.shape, tensors.k.shape[1]
    seed = int(tensors.seed)

    def keep(batch: slice, rows: slice) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(seed + batch.start * seqlen_q + rows.start)
        n_batch, n_rows = len(range(b)[batch]), len(range(seqlen_q)[rows])
        mask = torch.empty(n_batch, h, n_rows, seqlen_k, dtype=torch.bool, device="cpu")
        return mask.bernoulli_(1 - dropout_p, generator=generator)

    return keep


def _whole(keep: DropoutMask, tensors: Tensors) -> Tensor:
    """All blocks of a dropout mask, (b, h, seqlen_q, seqlen_k)."""
    (b, seqlen_q, h, _), seqlen_k = tensors.q.shape, tensors.k.shape[1]
    batches, rows = blocks(b, seqlen_q, h * seqlen_k)
    return torch.cat([torch.cat([keep(batch, row) for row in rows], 2) for batch in batches])


# --- PyTorch's flash attention ---


def _is_for_flash(tensors: Tensors, options: Options) -> bool:
    """Whether the kernel knows these options and can be differentiated as is asked for."""
    q, k, v, slopes, sinks, *others = tensors
    if options.softcap != 0.0 or any(x is not None for x in (slopes, *others)):
        return False
    if v.shape[3] != q.shape[3] or q.numel() == 0 or k.numel() == 0:
        return False
    # Forward-mode derivatives are left to the reference.
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    return not (torch._C._are_functorch_transforms_active() or has_tangent(*inputs))


def has_tangent(*tensors: Tensor) -> bool:
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def _attend_by_flash(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: tuple[int, int]
) -> tuple[Tensor, Tensor] | None:
    """out (b, seqlen_q, h, d) and the log-sum-exp (b, h, seqlen_q); None if out of range."""
    if not _in_range(q, k, v, scale) or (sinks is not None and not (sinks < torch.inf).all()):
        return None
    # Leading rows that see no key, of which the kernel's log-sum-exp would be 0.
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    empty = max(seqlen_q - seqlen_k - window[1], 0) if window[1] >= 0 else 0
    # The kernel is told no stride of the last dimension.
    q, k, v = (
        x.transpose(1, 2) if x.stride(3) == 1 else x.contiguous().transpose(1, 2)
        for x in (q[:, empty:], k, v)
    )
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        out, lse = _Flash.apply(q, k, v, sinks, scale, window)
    else:
        out, lse = _join_sinks(*_flash_forward(q, k, v, scale, window), sinks)
    out = out.transpose(1, 2)
    if empty:
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, empty, 0))
        nothing = lse.new_tensor(-torch.inf) if sinks is None else sinks[:, None]
        lse = torch.cat((nothing.expand(*lse.shape[:2], empty), lse), 2)
    return out, lse


def _in_range(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Whether all is finite and no score or sum can overflow.

    The kernel hides a key by adding to its score, which a NaN or Inf survives, and 0 times a hidden
    NaN is NaN; and its exponential makes a number of some NaNs.
    """
    q_max, k_max, v_max = (_magnitude(x.detach()) for x in (q, k, v))
    limit = torch.finfo(q.dtype).max / 4
    score = q_max * k_max * q.shape[3] * max(abs(scale), 1)
    return score < limit and v_max * k.shape[1] < limit


def _magnitude(x: Tensor) -> float:
    low, high = torch.aminmax(x)  # both NaN if there is one, which compares as false
    return max(-low.item(), high.item())


class _Piece(NamedTuple):
    """One call of the kernel: these query rows see nothing but these keys, and of them ``mask``."""

    rows: slice
    keys: slice
    mask: Tensor  # (rows, keys), 0 where seen, else -inf


def _is_one_call(q: Tensor, k: Tensor, scale: float, window: tuple[int, int]) -> bool:
    """Whether the kernel needs no mask. Its own causal one is aligned to the top-left corner, and
    multiplied by the scale as a float32: -inf turns into +inf or NaN where that is not positive.
    """
    if window == _CAUSAL and q.shape[2] == k.shape[2]:
        return scale >= _MIN_CAUSAL_SCALE
    return window == _NO_WINDOW


def _pieces(q: Tensor, k: Tensor, window: tuple[int, int]) -> Iterator[_Piece]:
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
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


def _flash_forward(q, k, v, scale: float, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """q (b, h, seqlen_q, d), k and v (b, h_k, seqlen_k, d) -> out like q, lse (b, h, seqlen_q)."""
    if _is_one_call(q, k, scale, window):
        out, lse = _forward_op(q, k, v, 0.0, window == _CAUSAL, scale=scale)
        return out, lse.contiguous()
    outs, lses = [], []
    for rows, keys, mask in _pieces(q, k, window):
        out, lse = _forward_op(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], 0.0, False, attn_mask=mask, scale=scale
        )
        outs.append(out.transpose(1, 2))
        lses.append(lse)
    return torch.cat(outs, 1).transpose(1, 2), torch.cat(lses, 2).contiguous()


def _flash_backward(grad, q, k, v, out, lse, scale: float, window: tuple[int, int]):
    """The gradients of q, k and v, (b, heads, seqlen, d), given that of out."""
    if _is_one_call(q, k, scale, window):
        return _backward_op(grad, q, k, v, out, lse, 0.0, window == _CAUSAL, scale=scale)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys, mask in _pieces(q, k, window):
        part_q, part_k, part_v = _backward_op(
            grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows],
            lse[:, :, rows], 0.0, False, attn_mask=mask, scale=scale,
        )  # fmt: skip
        grad_q[:, :, rows] = part_q
        grad_k[:, :, keys] += part_k
        grad_v[:, :, keys] += part_v
    return grad_q, grad_k, grad_v


def _join_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """out (b, h, seqlen_q, d) and lse (b, h, seqlen_q) with sinks (h,) in the denominator."""
    if sinks is None:
        return out, lse
    sinks = sinks[:, None]
    return out * torch.sigmoid(lse - sinks)[..., None], torch.logaddexp(lse, sinks)


class _Flash(torch.autograd.Function):
    """PyTorch's kernel with the derivatives that its own autograd lacks: of the log-sum-exp, and
    of the gradient. The reference computes those. Sinks are joined behind the kernel; its backward
    needs no more than the joined output and log-sum-exp."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, scale, window):
        out, lse = _join_sinks(*_flash_forward(q, k, v, scale, window), sinks)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.options = scale, window
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        if grad_out is None and grad_lse is None:
            return None, None, None, None, None, None
        q, k, v, sinks, out, lse = ctx.saved_tensors
        if grad_lse is None and not torch.is_grad_enabled():
            if grad_out.stride(3) != 1:
                grad_out = grad_out.contiguous()
            grad_sinks = None
            if ctx.needs_input_grad[3]:
                weight = torch.exp(sinks[:, None] - lse)  # of the sink in each row
                grad_sinks = -(weight * (grad_out * out).sum(-1)).sum((0, 2))
            grads = _flash_backward(grad_out, q, k, v, out, lse, *ctx.options)
            return *grads, grad_sinks, None, None
        scale, window = ctx.options
        with torch.enable_grad():
            out, lse, _ = attention_ref(
                *(x.transpose(1, 2) for x in (q, k, v)),
                softmax_scale=scale,
                window_size=window,
                sinks=sinks,
            )
            pairs = [(out.transpose(1, 2), grad_out), (lse, grad_lse)]
            results, grads = zip(*(pair for pair in pairs if pair[1] is not None), strict=True)
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
