"""The gradient of the operators of CUDA tensors: one function that autograd knows.

It is the autograd kernel of the operators, so that whoever calls or traces one gets the gradient:
torch.compile and make_fx record the operators ``fwd`` or ``attend`` and ``bwd``, and torch.func's
transforms pass through. Eager calls go to the function directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from . import loading, resolver_errors
from .checks import check_no_tangent
from .config import NAMESPACE
from .cpu_operator import autograd_kernel, below_autograd

_FN = f"{NAMESPACE}::bwd"


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


@functools.cache
def _op(name: str) -> Callable:
    return getattr(getattr(torch.ops, NAMESPACE), name).default


# Of `deterministic`, `rng_state` and `dropout_p`.
_DEFAULTS = (False, None, 0.0)


class Attend(torch.autograd.Function):
    """``attend``, or ``fwd`` where it does the same."""

    @staticmethod
    def forward(
        q, k, v, softmax_scale, causal, window_left, window_right, sinks, deterministic=False,
        rng_state=None, dropout_p=0.0,
    ):  # fmt: skip
        if sinks is None and window_left == window_right == -1 and dropout_p == 0.0:
            return below_autograd(_op("fwd"), (q, k, v, softmax_scale, causal))
        window = window_left, window_right
        args = q, k, v, softmax_scale, causal, *window, sinks, 0.0, None, deterministic
        return below_autograd(_op("attend"), (*args, rng_state, dropout_p))

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, scale, causal, window_left, window_right, sinks, *rest = inputs
        # The dispatcher leaves out last arguments that are the default.
        deterministic, rng_state, dropout_p = (*rest, *_DEFAULTS[len(rest) :])
        out, lse = output
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, sinks, rng_state)
        ctx.options = scale, causal, window_left, window_right, deterministic, dropout_p

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 11
        check_no_tangent(_FN, ("dout", "dlse"), dout, dlse)
        q, k, v, out, lse, sinks, rng_state = ctx.saved_tensors
        scale, causal, window_left, window_right, deterministic, dropout_p = ctx.options
        dout = torch.zeros_like(out) if dout is None else loading.loadable(_FN, "dout", dout)
        if dlse is not None:
            dlse = dlse.contiguous()  # often a number that is expanded
        needs = ctx.needs_input_grad
        needs_q, needs_k, needs_v, needs_sinks = needs[0], needs[1], needs[2], needs[7]
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        wanted = needs_q | needs_k << 1 | needs_v << 2 | needs_sinks << 3 | deterministic << 4
        args = (
            dout, q, k, v, out, lse, dlse, scale, causal, window_left, window_right, sinks, wanted,
            rng_state, dropout_p,
        )  # fmt: skip
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            dq, dk, dv, dsinks = resolver_errors.call(_op("bwd"), *args)
        else:  # without the autograd kernel of `bwd`, which is in Python
            with torch._C._AutoDispatchBelowAutograd():
                dq, dk, dv, dsinks = resolver_errors.call(_op("bwd"), *args)
        dq, dk, dv = dq if needs_q else None, dk if needs_k else None, dv if needs_v else None
        dsinks = dsinks if needs_sinks else None
        return dq, dk, dv, None, None, None, None, dsinks, None, None, None


class Backward(torch.autograd.Function):
    """``bwd``, which has no gradient of its own."""

    @staticmethod
    def forward(*args):
        return below_autograd(_op("bwd"), args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            f"{_FN}: expected first derivatives of attention on CUDA, got a derivative of its "
            "gradient (create_graph=True and another backward); CPU tensors support it"
        )


# ``Attend.apply`` outside of torch.func's transforms, without the Python around it, which takes
# longer than all of the rest.
attend_eagerly = super(torch.autograd.Function, Attend).apply
attend = autograd_kernel(Attend)
backward = autograd_kernel(Backward)
