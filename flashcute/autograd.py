"""The gradient of the operators of CUDA tensors: one function that autograd knows.

It is the autograd kernel of the operators, so that whoever calls or traces one gets the gradient:
torch.compile and make_fx record the operators ``fwd`` or ``attend`` and ``bwd``, and torch.func's
transforms pass through. Eager calls go to the function directly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import loading, resolver_errors
from .checks import check_no_tangent
from .config import NAMESPACE
from .cpu_operator import autograd_kernel, below_autograd
from .features import no_gradient

_FN = f"{NAMESPACE}::bwd"
_VARLEN_FN = f"{NAMESPACE}::bwd_varlen"


_is_grad_enabled = torch.is_grad_enabled  # bound here as every call asks it


def wants_gradient(q, k, v, sinks=None, alibi_slopes=None) -> bool:
    """Whether a gradient of one of these tensors may be asked for."""
    return _is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sinks is not None and sinks.requires_grad)
        or (alibi_slopes is not None and alibi_slopes.requires_grad)
    )


def check_slopes(fn: str, alibi_slopes) -> None:
    """Raises where a gradient of the slopes is asked for, which the kernels do not compute."""
    if alibi_slopes is not None and alibi_slopes.requires_grad and _is_grad_enabled():
        raise NotImplementedError(f"{fn}: {no_gradient('alibi_slopes')}")


def _op(name: str) -> Callable:
    return getattr(getattr(torch.ops, NAMESPACE), name).default


class Attend(torch.autograd.Function):
    """``attend``, or ``fwd`` where it does the same."""

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
        q, k, v, *ctx.options, sinks = inputs[:8]
        # The dispatcher leaves out last arguments that are the default.
        defaults = False, None, 0.0, 0.0, None
        ctx.deterministic, rng_state, ctx.dropout_p, ctx.softcap, alibi_slopes = (
            *inputs[8:],
            *defaults[len(inputs) - 8 :],
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *output, sinks, rng_state, alibi_slopes)

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 13
        q, k, v, out, lse, sinks, rng_state, alibi_slopes = ctx.saved_tensors
        dout, dlse = _loadable(_FN, out, dout, dlse)
        needs = *ctx.needs_input_grad[:3], ctx.needs_input_grad[7]
        wanted = _wanted(needs, ctx.deterministic)
        args = dout, q, k, v, out, lse, dlse, *ctx.options, sinks, wanted, rng_state, ctx.dropout_p
        dq, dk, dv, dsinks = _gradients("bwd", needs, *args, ctx.softcap, alibi_slopes)
        return dq, dk, dv, None, None, None, None, dsinks, *(None,) * 5


class AttendVarlen(torch.autograd.Function):
    """``attend_varlen``."""

    @staticmethod
    def forward(*args):
        return below_autograd(_op("attend_varlen"), args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, *lengths = inputs[:7]
        *ctx.options, sinks = inputs[7:14]
        # The dispatcher leaves out last arguments that are the default.
        defaults = 0.0, None, None, 0.0
        ctx.softcap, alibi_slopes, rng_state, ctx.dropout_p = (
            *inputs[14:],
            *defaults[len(inputs) - 14 :],
        )
        ctx.n_inputs = len(inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *output, *lengths, sinks, rng_state, alibi_slopes)

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * ctx.n_inputs
        q, k, v, out, lse, *lengths, sinks, rng_state, alibi_slopes = ctx.saved_tensors
        dout, dlse = _loadable(_VARLEN_FN, out, dout, dlse)
        needs = *ctx.needs_input_grad[:3], ctx.needs_input_grad[13]
        wanted = _wanted(needs)
        args = dout, q, k, v, out, lse, dlse, *lengths, *ctx.options, sinks, wanted, rng_state
        options = ctx.dropout_p, ctx.softcap, alibi_slopes
        dq, dk, dv, dsinks = _gradients("bwd_varlen", needs, *args, *options)
        return dq, dk, dv, *(None,) * 10, dsinks, *(None,) * (ctx.n_inputs - 14)


def _loadable(fn: str, out, dout, dlse):
    """dout and dlse as the kernels read them."""
    check_no_tangent(fn, ("dout", "dlse"), dout, dlse)
    dout = torch.zeros_like(out) if dout is None else loading.loadable(fn, "dout", dout)
    # Often a number that is expanded.
    return dout, dlse if dlse is None else dlse.contiguous()


def _wanted(needs: tuple[bool, ...], deterministic: bool = False) -> int:
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    return sum(bit << i for i, bit in enumerate((*needs, deterministic)))


def _gradients(name: str, needs: tuple[bool, ...], *args):
    """What the operator returns of what is needed, and None."""
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        found = resolver_errors.call(_op(name), *args)
    else:  # without the operator's autograd kernel, which is in Python
        with torch._C._AutoDispatchBelowAutograd():
            found = resolver_errors.call(_op(name), *args)
    return (x if need else None for x, need in zip(found, needs, strict=True))


def _without_gradient(name: str) -> type:
    """``bwd`` or ``bwd_varlen``, which have no gradient of their own."""

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


def attend_eagerly(*args):
    """``Attend.apply`` outside of torch.func's transforms, without the Python around it, which
    takes longer than all of the rest."""
    return super(torch.autograd.Function, Attend).apply(*args)


def attend_varlen_eagerly(*args):
    """Likewise, of :class:`AttendVarlen`."""
    return super(torch.autograd.Function, AttendVarlen).apply(*args)


attend = autograd_kernel(Attend)
attend_varlen = autograd_kernel(AttendVarlen)
backward = autograd_kernel(_without_gradient("bwd"))
backward_varlen = autograd_kernel(_without_gradient("bwd_varlen"))
