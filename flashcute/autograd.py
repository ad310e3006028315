"""The gradients of the operators for CUDA tensors, as autograd functions.

They are the operators' autograd kernels, so that every call or trace of an operator gets the
gradient: torch.compile and make_fx record the operators ``fwd`` or ``attend`` and ``bwd``, and
torch.func's transforms pass through. Eager calls go to the functions directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from . import loading, resolver_errors
from .checks import check_no_tangent
from .config import NAMESPACE
from .cpu_operator import autograd_kernel, below_autograd
from .features import no_gradient

_FN = f"{NAMESPACE}::bwd"
_VARLEN_FN = f"{NAMESPACE}::bwd_varlen"


_is_grad_enabled = torch.is_grad_enabled  # bound here, as every call uses it


def wants_gradient(q, k, v, sinks=None, alibi_slopes=None) -> bool:
    """Returns whether a gradient of one of these tensors may be asked for."""
    return _is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sinks is not None and sinks.requires_grad)
        or (alibi_slopes is not None and alibi_slopes.requires_grad)
    )


def check_slopes(fn: str, alibi_slopes) -> None:
    """Raises NotImplementedError if a gradient of the slopes, which kernels lack, is asked for."""
    if alibi_slopes is not None and alibi_slopes.requires_grad and _is_grad_enabled():
        raise NotImplementedError(f"{fn}: {no_gradient('alibi_slopes')}")


def check_pages(fn: str, block_table) -> None:
    """Raises NotImplementedError if keys are in pages; for calls that want a gradient."""
    if block_table is not None:
        raise NotImplementedError(f"{fn}: {no_gradient('block_table')}")


@functools.cache
def _op(name: str) -> Callable:
    return getattr(getattr(torch.ops, NAMESPACE), name).default


# Defaults of the last arguments of ``attend`` in :class:`Attend`: `deterministic`, `rng_state`,
# `dropout_p`, `softcap` and `alibi_slopes`.
_DEFAULTS = (False, None, 0.0, 0.0, None)
# Defaults of the last arguments of ``attend_varlen``: `softcap`, `alibi_slopes`, `rng_state`,
# `dropout_p`, `block_table`, `num_splits` and `deterministic`.
_VARLEN_DEFAULTS = (0.0, None, None, 0.0, None, 0, False)


class Attend(torch.autograd.Function):
    """The operator ``attend``, or ``fwd`` where that computes the same, with its gradient."""

    @staticmethod
    def forward(
        q, k, v, softmax_scale, causal, window_left, window_right, sinks, deterministic=False,
        rng_state=None, dropout_p=0.0, softcap=0.0, alibi_slopes=None,
    ):  # fmt: skip
        plain = sinks is None and alibi_slopes is None and dropout_p == softcap == 0.0
        if plain and window_left == window_right == -1:
            return below_autograd(_op("fwd"), (q, k, v, softmax_scale, causal))
        window = window_left, window_right
        args = q, k, v, softmax_scale, causal, *window, sinks, softcap, alibi_slopes, deterministic
        return below_autograd(_op("attend"), (*args, rng_state, dropout_p))

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, scale, causal, window_left, window_right, sinks, *rest = inputs
        # The dispatcher leaves out trailing arguments that are equal to their defaults.
        deterministic, rng_state, dropout_p, softcap, alibi_slopes = (
            *rest,
            *_DEFAULTS[len(rest) :],
        )
        out, lse = output
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, sinks, rng_state, alibi_slopes)
        ctx.options = scale, causal, window_left, window_right
        ctx.others = deterministic, dropout_p, softcap

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 13
        q, k, v, out, lse, sinks, rng_state, alibi_slopes = ctx.saved_tensors
        deterministic, dropout_p, softcap = ctx.others
        dout, dlse = _loadable(_FN, out, dout, dlse)
        needs = ctx.needs_input_grad
        needs = needs[0], needs[1], needs[2], needs[7]
        wanted = _wanted(*needs, deterministic)
        args = (
            dout, q, k, v, out, lse, dlse, *ctx.options, sinks, wanted, rng_state, dropout_p,
            softcap, alibi_slopes,
        )  # fmt: skip
        dq, dk, dv, dsinks = _gradients("bwd", needs, args)
        return dq, dk, dv, None, None, None, None, dsinks, None, None, None, None, None


class AttendVarlen(torch.autograd.Function):
    """The operator ``attend_varlen`` with its gradient."""

    @staticmethod
    def forward(*args):
        return below_autograd(_op("attend_varlen"), args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, *lengths = inputs[:7]
        *ctx.options, sinks = inputs[7:14]
        rest = inputs[14:]
        softcap, alibi_slopes, rng_state, dropout_p, _, _, ctx.deterministic = (
            *rest,
            *_VARLEN_DEFAULTS[len(rest) :],
        )
        ctx.others = dropout_p, softcap
        ctx.n_inputs = len(inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *output, *lengths, sinks, rng_state, alibi_slopes)

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * ctx.n_inputs
        q, k, v, out, lse, *lengths, sinks, rng_state, alibi_slopes = ctx.saved_tensors
        dout, dlse = _loadable(_VARLEN_FN, out, dout, dlse)
        needs = ctx.needs_input_grad
        needs = needs[0], needs[1], needs[2], needs[13]
        wanted = _wanted(*needs, ctx.deterministic)
        args = (
            dout, q, k, v, out, lse, dlse, *lengths, *ctx.options, sinks, wanted, rng_state,
            *ctx.others, alibi_slopes,
        )  # fmt: skip
        dq, dk, dv, dsinks = _gradients("bwd_varlen", needs, args)
        return dq, dk, dv, *(None,) * 10, dsinks, *(None,) * (ctx.n_inputs - 14)


def _loadable(fn: str, out, dout, dlse):
    """Returns dout and dlse as the kernels can read them; a missing dout becomes zeros."""
    check_no_tangent(fn, ("dout", "dlse"), dout, dlse)
    dout = torch.zeros_like(out) if dout is None else loading.loadable(fn, "dout", dout)
    # dlse is often an expanded number, which is not contiguous.
    return dout, dlse if dlse is None else dlse.contiguous()


def _wanted(
    needs_q: bool, needs_k: bool, needs_v: bool, needs_sinks: bool, deterministic: bool = False
) -> int:
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    return needs_q | needs_k << 1 | needs_v << 2 | needs_sinks << 3 | deterministic << 4


def _gradients(name: str, needs: tuple[bool, bool, bool, bool], args: tuple):
    """Calls the operator of the gradients; returns those that are needed, and None for others."""
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        dq, dk, dv, dsinks = resolver_errors.call(_op(name), *args)
    else:  # this skips the operator's autograd kernel, which is in Python
        with torch._C._AutoDispatchBelowAutograd():
            dq, dk, dv, dsinks = resolver_errors.call(_op(name), *args)
    needs_q, needs_k, needs_v, needs_sinks = needs
    dq, dk, dv = dq if needs_q else None, dk if needs_k else None, dv if needs_v else None
    return dq, dk, dv, dsinks if needs_sinks else None


def _without_gradient(name: str) -> type:
    """Returns the autograd function of ``bwd`` or ``bwd_varlen``, which raises in its backward."""

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(*args):
            return below_autograd(_op(name), args)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, *grads):
            raise NotImplementedError(
                f"{NAMESPACE}::{name}: expected first derivatives of attention on CUDA, got a "
                "derivative of its gradient (create_graph=True and another backward); CPU tensors "
                "support it"
            )

    return Backward


# ``apply`` for calls outside of torch.func's transforms. It leaves out the Python code around it,
# which takes longer than all of the rest.
attend_eagerly = super(torch.autograd.Function, Attend).apply
attend_varlen_eagerly = super(torch.autograd.Function, AttendVarlen).apply
attend = autograd_kernel(Attend)
attend_varlen = autograd_kernel(AttendVarlen)
backward = autograd_kernel(_without_gradient("bwd"))
backward_varlen = autograd_kernel(_without_gradient("bwd_varlen"))
