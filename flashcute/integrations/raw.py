"""Forward and backward as two calls without autograd, for libraries that have an autograd of their
own around them: PyTorch's operators, and ring attention written for flash_attn."""

from __future__ import annotations

import torch

from .. import ops, resolver_errors
from ..checks import (
    UNLIMITED,
    bounded_window,
    check_flag,
    check_kind,
    check_rank,
    check_scale,
    check_softcap,
    check_window,
)
from ..config import NAMESPACE
from ..features import VECTOR
from ..flash_attn_interface import flash_attn_func
from ..flash_attn_varlen import flash_attn_varlen_func
from ..loading import loadable


def forward(q, k, v, causal, scale, window=UNLIMITED, alibi_slopes=None, softcap=0.0):
    """Returns out and log-sum-exp of :func:`flashcute.flash_attn_func` for these tensors."""
    with torch.no_grad():
        out, lse, _ = flash_attn_func(
            q, k, v, softmax_scale=scale, causal=causal, window_size=window, softcap=softcap,
            alibi_slopes=alibi_slopes, return_attn_probs=True,
        )  # fmt: skip
    return out, lse


def forward_varlen(
    q, k, v, lengths, causal, scale, window=UNLIMITED, alibi_slopes=None, softcap=0.0,
    seqused_k=None,
):  # fmt: skip
    """Returns out and log-sum-exp of :func:`flashcute.flash_attn_varlen_func` for these tensors.

    Args:
        lengths: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k.
    """
    with torch.no_grad():
        out, lse, _ = flash_attn_varlen_func(
            q, k, v, *lengths, softmax_scale=scale, causal=causal, window_size=window,
            softcap=softcap, alibi_slopes=alibi_slopes, seqused_k=seqused_k, return_attn_probs=True,
        )  # fmt: skip
    return out, lse


def backward(
    dout, q, k, v, out, lse, causal, scale, window=UNLIMITED, deterministic=False,
    alibi_slopes=None, softcap=0.0,
):  # fmt: skip
    """Returns dq, dk and dv for :func:`forward`'s out.

    As in ring attention, ``out`` and ``lse`` may be those of rows that also see other keys.

    Raises:
        TypeError, ValueError: for what the operator does not take.
        NotImplementedError: for a head_dim that is no multiple of 8.
    """
    options = causal, scale, window, deterministic, alibi_slopes, softcap
    return _backward("bwd", dout, q, k, v, out, lse, (), *options)


def backward_varlen(
    dout, q, k, v, out, lse, lengths, causal, scale, window=UNLIMITED, deterministic=False,
    alibi_slopes=None, softcap=0.0, seqused_k=None,
):  # fmt: skip
    """Returns dq, dk and dv for :func:`forward_varlen`'s out; errors as of :func:`backward`."""
    cu_seqlens_q, cu_seqlens_k, *bounds = lengths
    given = cu_seqlens_q, cu_seqlens_k, None, seqused_k
    lengths = *(x if x is None else x.int().contiguous() for x in given), *bounds
    options = causal, scale, window, deterministic, alibi_slopes, softcap
    return _backward("bwd_varlen", dout, q, k, v, out, lse, lengths, *options)


def _backward(
    name, dout, q, k, v, out, lse, lengths, causal, scale, window, deterministic, alibi_slopes,
    softcap,
):  # fmt: skip
    fn = f"{NAMESPACE}::{name}"
    named = {"dout": dout, "q": q, "k": k, "v": v, "out": out}
    for name_of, x in {**named, "softmax_lse": lse}.items():
        check_kind(fn, name_of, x)
    causal = check_flag(fn, "causal", causal)
    deterministic = check_flag(fn, "deterministic", deterministic)
    window = check_window(fn, window)
    softcap = check_softcap(fn, softcap)
    shape = "(total, heads, head_dim)" if lengths else "(batch, seqlen, heads, head_dim)"
    check_rank(fn, "q", q, shape)
    d = q.shape[-1]
    if d % VECTOR:
        raise NotImplementedError(
            f"{fn}: expected a head_dim that is a multiple of {VECTOR}, got {d}; pad it with zeros"
        )
    tensors = [loadable(fn, name_of, x) for name_of, x in named.items()]
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    wanted = 7 | deterministic << 4
    options = check_scale(fn, scale, d), causal, *bounded_window(window), None, wanted
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.contiguous()
    options += None, 0.0, softcap, alibi_slopes
    ops.load()
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    dlse = None
    with torch.no_grad():
        if q.is_cpu:
            tensors[0], dlse = _for_these_keys(
                tensors, lse, lengths, (causal, scale, window, alibi_slopes, softcap)
            )
        grads = resolver_errors.call(op, *tensors, lse.contiguous(), dlse, *lengths, *options)
    return grads[:3]  # the fourth is the gradient of sinks


def _for_these_keys(tensors, lse, lengths, options):
    """Returns dout and dlse for the CPU's operator, which recomputes out and lse of these keys.

    With w = exp(own_lse - lse), the weights of the whole rows are w times those of these keys
    alone. So P (dO V^T - D) of the whole rows equals that of these keys for w dO and a suitable
    dlse.
    """
    dout, q, k, v, out = tensors
    if lengths:
        cu_q, cu_k, _, used_k, *bounds = lengths
        own, own_lse = forward_varlen(q, k, v, (cu_q, cu_k, *bounds), *options, used_k)
    else:
        own, own_lse = forward(q, k, v, *options)
    w = torch.exp(own_lse - lse).nan_to_num_(0.0)  # (batch, heads, seqlen) or (heads, total)
    difference = dout.to(w.dtype) * (own.to(w.dtype) - out.to(w.dtype))
    dlse = w * difference.sum(-1).transpose(-1, -2)
    return (dout * w.transpose(-1, -2)[..., None]).to(dout.dtype), dlse.contiguous()
