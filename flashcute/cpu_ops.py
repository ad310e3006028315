"""Attention of CPU tensors as tracers see it: ``flashcute::attend_cpu``, one opaque operator.

:mod:`flashcute.cpu` looks at values, for NaN and Inf in masked keys, and cuts its work by the
lengths, neither of which can be traced. Behind an operator it may: torch.compile and torch.export
record a single node with any lengths, FakeTensorMode runs the fake, vmap the rule below. The
operator is defined in Python and needs no binding. It is registered when this module is imported.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._subclasses import FakeTensor

from . import cpu
from .config import NAMESPACE

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, Tensor? sinks, Tensor? attn_bias,"
    " Tensor? seed, float softmax_scale, bool causal, int window_left, int window_right,"
    " float softcap, float dropout_p, bool return_dmask"
)
_N_TENSORS = len(cpu.Tensors._fields)
_N_ARGUMENTS = _N_TENSORS + len(cpu.Options._fields)
_DIFFERENTIABLE = 6  # all tensors but the seed
_N_GRADS = 3  # of out, softmax_lse and dmask

# Longer windows than this are none; it keeps the operator's int arguments within 64 bits.
_MAX_WINDOW = 2**62

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define(f"attend_cpu({_ARGUMENTS}) -> (Tensor out, Tensor softmax_lse, Tensor dmask)")
_library.define(
    "attend_cpu_backward(Tensor? grad_out, Tensor? grad_lse, Tensor? grad_dmask, int wanted,"
    f" {_ARGUMENTS}) -> ({', '.join(['Tensor'] * _DIFFERENTIABLE)})"
)
_forward_op = getattr(torch.ops, NAMESPACE).attend_cpu.default
_backward_op = getattr(torch.ops, NAMESPACE).attend_cpu_backward.default


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    return_dmask: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of CPU tensors, eager or traced; shapes, dtypes and results as in ``cpu.attend``.

    The arguments are those of :func:`flashcute.reference.attention_ref`, and checked by the caller,
    but for dropout: the mask is drawn here, from torch's default generator.
    """
    seed = cpu.draw_seed() if dropout_p > 0.0 else None
    tensors = cpu.Tensors(q, k, v, alibi_slopes, sinks, attn_bias, seed)
    left, right = (min(int(side), _MAX_WINDOW) for side in window_size)
    options = cpu.Options(
        float(softmax_scale), causal, left, right, float(softcap), float(dropout_p), return_dmask
    )
    if is_traced(q) or (
        torch._C._are_functorch_transforms_active() and not cpu.has_tangent(q, k, v)
    ):
        return _forward_op(*tensors, *options)
    return cpu.attend(tensors, options)


def is_traced(q: Tensor) -> bool:
    return (
        torch.compiler.is_compiling()
        or isinstance(q, FakeTensor)
        or torch._C._len_torch_dispatch_stack() > 0  # make_fx, FakeTensorMode
        or torch._C._is_tracing()
    )


def _forward(*args):
    with torch.no_grad():
        return cpu.attend(cpu.Tensors(*args[:_N_TENSORS]), cpu.Options(*args[_N_TENSORS:]))


def _forward_fake(*args):
    q, k, options = args[0], args[1], cpu.Options(*args[_N_TENSORS:])
    b, seqlen_q, h, _ = q.shape
    returns_dmask = options.return_dmask and options.dropout_p > 0.0
    dmask = q.new_empty((b, h, seqlen_q, k.shape[1]) if returns_dmask else 0)
    return torch.empty_like(q), q.new_empty((b, h, seqlen_q), dtype=torch.float32), dmask


def _backward(*args):
    """The gradients, recomputing the forward; bit n of ``wanted`` asks for that of tensor n."""
    grads, wanted, inputs = args[:_N_GRADS], args[_N_GRADS], args[_N_GRADS + 1 :]
    tensors = [x if x is None else x.detach() for x in inputs[:_N_TENSORS]]
    leaves = [x.requires_grad_() for n, x in enumerate(tensors) if wanted >> n & 1]
    # An operator's implementation runs with autograd switched off.
    exclude = torch._C._SetExcludeDispatchKeyGuard
    with (
        exclude(torch._C.DispatchKey.AutogradFunctionality, False),
        exclude(torch._C.DispatchKey.ADInplaceOrView, False),
        torch.enable_grad(),
    ):
        results = cpu.attend(cpu.Tensors(*tensors), cpu.Options(*inputs[_N_TENSORS:]))
        pairs = [
            (x, g) for x, g in zip(results, grads, strict=True) if x.requires_grad and g is not None
        ]
        outputs, grad_outputs = zip(*pairs, strict=True) if pairs else ((), ())
        found = iter(torch.autograd.grad(outputs, leaves, grad_outputs, materialize_grads=True))
    return _gradients(tensors, wanted, lambda x: cpu.like(x, next(found)))


def _backward_fake(*args):
    return _gradients(args[_N_GRADS + 1 :], args[_N_GRADS], torch.empty_like)


def _gradients(tensors, wanted, gradient):
    """``gradient`` of each tensor, or where it is not wanted a tensor of shape (0,)."""
    return tuple(
        gradient(tensors[n]) if wanted >> n & 1 else tensors[0].new_empty(0)
        for n in range(_DIFFERENTIABLE)
    )


def _below_autograd(op, args):
    # A Function's forward runs without gradients, but an outer transform may want one of this call.
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def _refuse_forward_mode(ctx, *tangents):
    raise NotImplementedError(
        f"{NAMESPACE}::attend_cpu: expected derivatives in reverse mode (grad, vjp, jacrev), got "
        "one in forward mode (jvp, jacfwd) of a traced call or of a gradient; take it eagerly, of "
        "the output"
    )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(*args):
        return _below_autograd(_forward_op, args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:_N_TENSORS])
        ctx.options = inputs[_N_TENSORS:]

    @staticmethod
    def backward(ctx, *grads):
        needs = ctx.needs_input_grad[:_DIFFERENTIABLE]
        wanted = sum(need << n for n, need in enumerate(needs))
        found = _backward_op(*grads, wanted, *ctx.saved_tensors, *ctx.options)
        gradients = [grad if need else None for grad, need in zip(found, needs, strict=True)]
        return *gradients, *[None] * (_N_ARGUMENTS - _DIFFERENTIABLE)

    jvp = staticmethod(_refuse_forward_mode)


class _AttendBackward(torch.autograd.Function):
    @staticmethod
    def forward(*args):
        return _below_autograd(_backward_op, args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            f"{NAMESPACE}::attend_cpu: expected one derivative under torch.compile, torch.export "
            "and torch.func, got a derivative of its gradient; take it with torch.autograd, eagerly"
        )

    jvp = staticmethod(_refuse_forward_mode)


def _autograd(function):
    """The operator's kernel for autograd: ``function.apply``, also inside torch.func's transforms.

    There the dispatcher calls it for one transform at a time, innermost first, and the operator
    below it goes on to the next. ``function.apply`` would start again with all of them.
    """

    def kernel(*args):
        if not torch._C._are_functorch_transforms_active():
            return function.apply(*args)
        with enable_single_level_autograd_function():
            return super(torch.autograd.Function, function).apply(*args)

    return kernel


def _vmap_by_a_loop(op):
    def sample(i, pairs):
        return [x if dim is None else x.select(dim, i) for x, dim in pairs]

    def rule(info, in_dims, *args):
        pairs = list(zip(args, in_dims, strict=True))
        results = [op(*sample(i, pairs)) for i in range(info.batch_size)]
        stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    return rule


for _op, _implementation, _fake, _function in (
    (_forward_op, _forward, _forward_fake, _Attend),
    (_backward_op, _backward, _backward_fake, _AttendBackward),
):
    _name = _op._schema.name
    _library.impl(_name, _implementation, "CPU")
    _library.impl(_name, _autograd(_function), "Autograd")
    torch.library.register_fake(_name, _fake, lib=_library)
    torch.library.register_vmap(_name, _vmap_by_a_loop(_op), lib=_library)
