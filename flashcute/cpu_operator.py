"""Opaque operators of CPU tensors: what tracers, vmap and fake tensors call instead of a function.

Attention of CPU tensors looks at values and cuts its work by lengths, neither of which can be
traced. Behind an operator it may: torch.compile and torch.export record a single node,
FakeTensorMode runs the fake, vmap a loop. The gradient is a second operator, which computes the
forward again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

from . import cpu, dropout
from .checks import has_tangent
from .config import NAMESPACE

# Registrations live as long as these objects do.
_libraries: list[torch.library.Library] = []


class Operator:
    """An eager function as the operators ``flashcute::<name>`` and ``flashcute::<name>_backward``.

    Attributes:
        op: The operator, ``torch.ops.flashcute.<name>.default``.
        backward_op: The operator of its gradient.
    """

    def __init__(
        self,
        name: str,
        tensors: tuple[str, ...],
        options: tuple[str, ...],
        n_differentiable: int,
        function: Callable[..., tuple[Tensor, ...]],
        fake: Callable[..., tuple[Tensor, ...]],
    ):
        """Defines and registers both operators.

        Args:
            name: Name in flashcute's namespace.
            tensors: Schemas of the arguments that are tensors, differentiable ones first.
            options: Schemas of the other arguments, which follow.
            n_differentiable: How many tensors have a gradient.
            function: Takes all arguments, returns out, softmax_lse and dmask. Differentiable.
            fake: Does the same for fake tensors.
        """
        self._n_tensors, self._n_options = len(tensors), len(options)
        self._n_differentiable = n_differentiable
        self._function = function
        arguments = ", ".join((*tensors, *options))
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        library.define(f"{name}({arguments}) -> (Tensor out, Tensor softmax_lse, Tensor dmask)")
        library.define(
            f"{name}_backward(Tensor? grad_out, Tensor? grad_lse, Tensor? grad_dmask, int wanted,"
            f" {arguments}) -> ({', '.join(['Tensor'] * n_differentiable)})"
        )
        namespace = getattr(torch.ops, NAMESPACE)
        self.op = getattr(namespace, name).default
        self.backward_op = getattr(namespace, f"{name}_backward").default
        forward, backward = _functions(self, f"{NAMESPACE}::{name}")
        for op, implementation, op_fake, recorded in (
            (self.op, self._forward, fake, forward),
            (self.backward_op, self._backward, self._backward_fake, backward),
        ):
            op_name = op._schema.name
            for device in ("CPU", "CUDA"):  # on CUDA it computes dmask
                library.impl(op_name, implementation, device)
            library.impl(op_name, autograd_kernel(recorded), "Autograd")
            torch.library.register_fake(op_name, op_fake, lib=library)
            torch.library.register_vmap(op_name, _vmap_by_a_loop(op), lib=library)
        _libraries.append(library)

    def __call__(self, eager: Callable[[], tuple[Tensor, ...]], *args: object):
        """Returns the operator's outputs if the call is traced or transformed, else ``eager``'s."""
        tensors = args[: self._n_tensors]
        if (
            is_traced(tensors[0])
            or tensors[0].is_meta
            # The operator has no forward-mode derivatives; the eager function has.
            or (torch._C._are_functorch_transforms_active() and not has_tangent(*tensors))
        ):
            return self.op(*args)
        return eager()

    def _forward(self, *args):
        with torch.no_grad():
            return self._function(*args)

    def _backward(self, grad_out, grad_lse, grad_dmask, wanted, *args):
        """Computes the forward again and its gradients; bit n of ``wanted`` asks for tensor n's."""
        grads = (grad_out, grad_lse, grad_dmask)
        n = self._n_tensors
        tensors = [x if x is None else x.detach() for x in args[:n]]
        leaves = [x.requires_grad_() for i, x in enumerate(tensors) if wanted >> i & 1]
        # An operator's implementation runs with autograd switched off: this switches it on.
        exclude = torch._C._SetExcludeDispatchKeyGuard
        with (
            exclude(torch._C.DispatchKey.AutogradFunctionality, False),
            exclude(torch._C.DispatchKey.ADInplaceOrView, False),
            torch.enable_grad(),
        ):
            results = self._function(*tensors, *args[n:])
            pairs = [
                (x, g)
                for x, g in zip(results, grads, strict=True)
                if x.requires_grad and g is not None
            ]
            outputs, grad_outputs = zip(*pairs, strict=True) if pairs else ((), ())
            found = iter(
                torch.autograd.grad(outputs, leaves, grad_outputs, materialize_grads=True)
                if outputs
                else map(torch.zeros_like, leaves)
            )
        return self._gradients(tensors, wanted, lambda x: cpu.like(x, next(found)))

    def _backward_fake(self, grad_out, grad_lse, grad_dmask, wanted, *args):
        return self._gradients(args, wanted, torch.empty_like)

    def _gradients(self, tensors, wanted, gradient):
        """Returns ``gradient`` of each tensor, or a tensor of shape (0,) where it is not wanted."""
        return tuple(
            gradient(tensors[i]) if wanted >> i & 1 else tensors[0].new_empty(0)
            for i in range(self._n_differentiable)
        )


def draw_state(x: Tensor) -> Tensor:
    """Returns a random state, fake if x is: a fake tensor can be used outside of its mode, too."""
    if not torch.compiler.is_compiling() and isinstance(x, FakeTensor):
        with x.fake_mode:
            return dropout.draw_state(x.device)
    return dropout.draw_state(x.device)


def is_traced(x: Tensor) -> bool:
    """Returns whether a call with ``x`` is recorded or runs on fake tensors."""
    return (
        torch.compiler.is_compiling()
        or isinstance(x, FakeTensor)
        or torch._C._len_torch_dispatch_stack() > 0  # make_fx, FakeTensorMode
        or torch._C._is_tracing()
    )


def gives_shapes(x: Tensor) -> bool:
    """Returns whether an eager call with ``x`` gives only shapes, unrecorded and untransformed."""
    if torch._C._are_functorch_transforms_active() or torch._C._is_tracing():
        return False
    modes = map(torch._C._get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack()))
    is_fake = isinstance(x, FakeTensor) or x.is_meta
    return is_fake and all(isinstance(mode, FakeTensorMode) for mode in modes)


# Bound here as every call asks them.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_has_transforms = torch._C._are_functorch_transforms_active


def is_seen() -> bool:
    """Returns whether something records or transforms operators."""
    return _dispatch_modes() > 0 or _has_transforms() or forward_ad._current_level >= 0


def _functions(operator: Operator, name: str) -> tuple[type, type]:
    """Returns the autograd functions of both operators."""
    n_tensors, n_differentiable = operator._n_tensors, operator._n_differentiable
    n_others = n_tensors + operator._n_options - n_differentiable

    def refuse_forward_mode(ctx, *tangents):
        raise NotImplementedError(
            f"{name}: expected derivatives in reverse mode (grad, vjp, jacrev), got one in forward "
            "mode (jvp, jacfwd) of a traced call or of a gradient; take it eagerly, of the output"
        )

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(*args):
            return below_autograd(operator.op, args)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*inputs[:n_tensors])
            ctx.options = inputs[n_tensors:]

        @staticmethod
        def backward(ctx, *grads):
            needs = ctx.needs_input_grad[:n_differentiable]
            wanted = sum(need << i for i, need in enumerate(needs))
            found = operator.backward_op(*grads, wanted, *ctx.saved_tensors, *ctx.options)
            gradients = [grad if need else None for grad, need in zip(found, needs, strict=True)]
            return *gradients, *[None] * n_others

        jvp = staticmethod(refuse_forward_mode)

    class AttendBackward(torch.autograd.Function):
        @staticmethod
        def forward(*args):
            return below_autograd(operator.backward_op, args)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, *grads):
            raise NotImplementedError(
                f"{name}: expected one derivative under torch.compile, torch.export and "
                "torch.func, got a derivative of its gradient; take it with torch.autograd, "
                "eagerly, or detach() parameters that a compiled torch.func.grad is not asked for"
            )

        jvp = staticmethod(refuse_forward_mode)

    return Attend, AttendBackward


def below_autograd(op, args):
    """Calls the operator from an autograd.Function's forward and returns its results."""
    if not is_seen():
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)
    # A Function's forward runs with gradients of both modes switched off, but an outer transform
    # may want a gradient of this call.
    with (
        torch.enable_grad(),
        forward_ad._set_fwd_grad_enabled(True),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        return op(*args)


def autograd_kernel(function):
    """Returns the operator's autograd kernel: ``function.apply``, also in torch.func's transforms.

    Inside of transforms the dispatcher calls the kernel for one of them at a time, innermost first,
    and the operator that it calls goes on to the next. ``function.apply`` would start again with
    all of them.
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
