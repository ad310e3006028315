"""The contenders: flashcute and its peers, each as one call on the same tensors.

Peers are called through their ops, with views made beforehand, so their times include neither a
transpose nor a backend's context manager. All backwards run through autograd, also those of peers'
ops; autograd's host time is hidden behind the clearing of the caches.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType

import torch

from .. import flash_attn_func

aten = torch.ops.aten
# FlashAttention-3's own module, and that of the wheel fa3-fwd, which is bf16 only.
_FA3_MODULES = ("flash_attn_interface", "fa3_fwd_interface")
REPEATABLE = "repeatable"  # flashcute's gradients with deterministic=True


def _flashcute(q, k, v, causal):
    return lambda: flash_attn_func(q, k, v, causal=causal)


def _repeatable(q, k, v, causal):
    if not q.requires_grad:
        raise NotImplementedError("a forward always is")
    return lambda: flash_attn_func(q, k, v, causal=causal, deterministic=True)


def fa2(q, k, v, causal):
    """Makes a call of PyTorch's FlashAttention-2: SDPA's flash backend, on (b, h, s, d) views.

    Unlike SDPA itself, the op aligns its causal mask to the bottom-right corner, which
    torch.nn.attention.bias relies on.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    op = aten._scaled_dot_product_flash_attention.default
    return lambda: op(q, k, v, 0.0, causal)[0].transpose(1, 2)


def cudnn(q, k, v, causal):
    """Makes a call of PyTorch's cuDNN; as in SDPA, inference computes no log-sum-exp."""
    compute_log_sumexp = q.requires_grad
    if causal and q.shape[1] != k.shape[1]:
        raise NotImplementedError(
            "PyTorch's cuDNN op aligns the causal mask to the top-left corner: with seqlen_q != "
            "seqlen_k that is another problem"
        )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    op = aten._scaled_dot_product_cudnn_attention.default
    return lambda: op(q, k, v, None, compute_log_sumexp, 0.0, causal)[0].transpose(1, 2)


def fa3_module():
    """Returns FlashAttention-3's Python module.

    Raises:
        ImportError: if it is not installed.
    """
    for name in _FA3_MODULES:
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    raise ImportError(f"none of {', '.join(_FA3_MODULES)} is importable")


def _fa3(q, k, v, causal):
    function = fa3_module().flash_attn_func

    def call():
        out = function(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out  # some releases return the LSE, too

    return call


def _torch(q, k, v, causal):
    """Makes a call of PyTorch's SDPA with its own choice of backend: the peer on a CPU."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    sdpa, grouped = torch.nn.functional.scaled_dot_product_attention, q.shape[1] != k.shape[1]
    options = {"is_causal": causal, "enable_gqa": grouped}
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    if causal and seqlen_q != seqlen_k:  # is_causal means the top-left corner
        mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
        options |= {"is_causal": False, "attn_mask": mask.tril(seqlen_k - seqlen_q)}
    return lambda: sdpa(q, k, v, **options).transpose(1, 2)


_MAKERS = {"flashcute": _flashcute, "fa2": fa2, "cudnn": cudnn, "fa3": _fa3, "torch": _torch}
_MAKERS[REPEATABLE] = _repeatable
# The passes, and their FLOPs over those of the forward: a backward has five products for each pair
# of tiles, a forward two.
PASSES = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}
Result = torch.Tensor | tuple[torch.Tensor, ...]
# For each kind of device: flashcute, then the peer whose output the others are compared with.
NAMES = {"cuda": ("flashcute", "fa2", "cudnn", "fa3"), "cpu": ("flashcute", "torch")}


def _gradient(q: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of the output, which is the same for every contender."""
    generator = torch.Generator(q.device).manual_seed(2)
    return torch.randn(q.shape, dtype=q.dtype, device=q.device, generator=generator)


def _call(maker: Callable, q, k, v, causal: bool, what: str) -> Callable[[], Result]:
    """Makes the call of a contender's pass ``what``, one of :data:`PASSES`."""
    if what == "fwd":
        return maker(q, k, v, causal)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    return gradients(lambda: maker(*inputs, causal), inputs, what)


def gradients(
    make_forward: Callable[[], Callable[[], torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    what: str,
) -> Callable[[], Result]:
    """Makes a call for the gradients of q, k and v; for ``"fwd+bwd"`` it runs the forward, too.

    Args:
        make_forward: Returns a call for the output, which has the shape of q.
        inputs: q, k and v, leaves that require gradients.
    """
    dout = _gradient(inputs[0])
    with torch.enable_grad():
        forward = make_forward()
        out = forward()

    def both() -> Result:
        with torch.enable_grad():
            return torch.autograd.grad(forward(), inputs, dout)

    def backward() -> Result:
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    return backward if what == "bwd" else both


def load_module(name: str, path: Path) -> ModuleType:
    """Loads the contender ``name`` from a Python file.

    The file has one or more of the functions below. q, k, v, out and dout are ``(b, s, h, d)``,
    where k and v have ``h_k`` heads; lse is the natural log-sum-exp, ``(b, h, s)`` in float32. Each
    function returns a call without arguments, which enqueues on the current stream.

    - ``forward(q, k, v, causal)``: the call returns the output. Where it is differentiable it has
      every pass.
    - ``backward(q, k, v, out, dout, lse, causal)``: the call returns the gradients of q, k and v.
      It is then timed for ``bwd``, without autograd around it.
    - ``forward_local(q, k, v, left, right)``: as ``forward``, for shapes with a window and no other
      option; query i sees keys i - left to i + right, and -1 is no limit.

    Raises:
        ValueError: if the file cannot be imported, or has none of these functions.
    """
    spec = importlib.util.spec_from_file_location(f"flashcute_peer_{name}", path)
    try:
        if spec is None or spec.loader is None:
            raise ImportError("its name does not end in .py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a peer's code may raise anything
        raise ValueError(
            f"flashcute bench: expected a Python file that can be imported for --peer-module "
            f"{name}=FILE, got {path}: {error!r}"
        ) from error
    if not any(hasattr(module, x) for x in ("forward", "backward", "forward_local")):
        raise ValueError(
            "flashcute bench: expected forward(q, k, v, causal), backward(q, k, v, out, dout, lse, "
            "causal) or forward_local(q, k, v, left, right) in the file of --peer-module "
            f"{name}=FILE, got none of them in {path}; define one"
        )
    return module


def _of_module(module: ModuleType, q, k, v, causal: bool, what: str) -> Callable[[], Result]:
    """Makes the call of the pass ``what`` of a contender from a file."""
    if what == "bwd" and hasattr(module, "backward"):
        out, lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
        return module.backward(q, k, v, out, _gradient(q), lse, causal)
    if not hasattr(module, "forward"):
        raise NotImplementedError(f"its file has no forward, which the pass {what} needs")
    return _call(module.forward, q, k, v, causal, what)


def make(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    names: tuple[str, ...],
    what: str = "fwd",
    modules: Mapping[str, ModuleType] = MappingProxyType({}),
) -> tuple[dict[str, Callable[[], Result]], dict[str, str]]:
    """Makes calls that return ``(b, s, h, d)`` output, by name, and says why peers are missing.

    If ``what``, one of :data:`PASSES`, has a backward, the calls return the gradients of q, k and
    v. ``modules``: contenders from files, by name (:func:`load_module`).

    Each call is tried once. A peer that does not support the head dimension, dtype or GPU is left
    out, with its error message as the reason. An error of flashcute itself is raised.
    """
    makers = {name: partial(_call, maker, q, k, v, causal, what) for name, maker in _MAKERS.items()}
    makers |= {name: partial(_of_module, x, q, k, v, causal, what) for name, x in modules.items()}
    shapes = (q.shape,) if what == "fwd" else (q.shape, k.shape, v.shape)
    return attempt(makers, names, q.is_cuda, shapes)


def make_untried(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> Callable[[], Result]:
    """Makes the forward of a contender that :func:`make` knows, without trying it."""
    return _MAKERS[name](q, k, v, causal)


def _check_result(result: object, shapes: Sequence[torch.Size]) -> None:
    """Raises TypeError unless a contender returned an output, or gradients, of these shapes."""
    tensors = [result] if len(shapes) == 1 else result
    if not isinstance(tensors, (tuple, list)) or len(tensors) != len(shapes):
        raise TypeError(f"expected {len(shapes)} tensors, got {type(result).__name__}")
    for x, shape in zip(tensors, shapes, strict=True):
        is_tensor = isinstance(x, torch.Tensor)
        if not is_tensor or x.shape != shape:
            got = f"a tensor {tuple(x.shape)}" if is_tensor else type(x).__name__
            raise TypeError(f"expected a tensor {tuple(shape)}, got {got}")


def attempt(
    makers: Mapping[str, Callable[[], Callable[[], torch.Tensor]]],
    names: tuple[str, ...],
    on_gpu: bool,
    shapes: Sequence[torch.Size] | None = None,
) -> tuple[dict[str, Callable[[], torch.Tensor]], dict[str, str]]:
    """Returns the calls of ``makers`` that run, by name, and why the others do not.

    ``shapes``: those of the tensors that a call must return; None skips this check.
    """
    calls, missing = {}, {}
    for name in names:
        if name not in makers:
            missing[name] = "it is no contender on such shapes"
            continue
        try:
            call = makers[name]()
            result = call()
            if on_gpu:
                torch.cuda.synchronize()
            if shapes is not None:
                _check_result(result, shapes)
        # A peer's code may raise anything, also at its import.
        except (Exception, SystemExit) as error:
            if name == "flashcute":
                raise
            said = f"{error}" if isinstance(error, Exception) else ""
            missing[name] = (said or repr(error)).splitlines()[0]
            continue
        calls[name] = call
    return calls, missing
