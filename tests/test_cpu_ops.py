"""CPU attention under torch's tracers and transforms, with every option and with gradients."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import flashcute
from flashcute import cpu_ops
from flashcute.reference import attention_ref

ROOT = pathlib.Path(flashcute.__file__).parents[1]

OPTIONS = {
    "plain": {},
    "lse": {"return_attn_probs": True},
    "causal": {"causal": True, "softmax_scale": 0.3},
    "window": {"window_size": (4, 1)},
    "endless_window": {"window_size": (2**70, sys.maxsize)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": (4,)},  # stands for slopes of this shape
    "sinks": {"sinks": (4,), "causal": True},
    "dropout": {"dropout_p": 0.3},
    "all": {
        "dropout_p": 0.2,
        "causal": True,
        "window_size": (5, 0),
        "softcap": 1.5,
        "alibi_slopes": (2, 4),
        "sinks": (4,),
        "return_attn_probs": True,
    },
}
each_option = pytest.mark.parametrize("name", OPTIONS)


class Attention(torch.nn.Module):
    """Attention with an option behind a projection, so that a parameter requires a gradient."""

    def __init__(self, name: str):
        super().__init__()
        self.options = dict(OPTIONS[name])
        torch.manual_seed(0)
        self.projection = torch.nn.Linear(16, 16)
        for argument in ("alibi_slopes", "sinks"):
            shape = self.options.pop(argument, None)
            parameter = None if shape is None else torch.nn.Parameter(torch.rand(shape))
            self.register_parameter(argument, parameter)

    def forward(self, q, k, v):
        options = {**self.options, "alibi_slopes": self.alibi_slopes, "sinks": self.sinks}
        result = flashcute.flash_attn_func(self.projection(q), k, v, **options)
        if isinstance(result, torch.Tensor):
            return result
        return result[0] + result[1].transpose(1, 2)[..., None] + result[2].sum()


def inputs(seqlen_k: int = 11) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seqlen_k)
    shapes = ((2, 9, 4, 16), (2, seqlen_k, 2, 16), (2, seqlen_k, 2, 16))
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


def results(attend, module: Attention, seqlen_k: int, *, gradient: bool) -> list[torch.Tensor]:
    """Returns the output and, where asked for, the gradients of inputs and parameters."""
    tensors = inputs(seqlen_k)
    torch.manual_seed(5)
    with torch.set_grad_enabled(gradient):
        out = attend(*tensors)
        if not gradient:
            return [out]
        return [out, *torch.autograd.grad(out.square().sum(), [*tensors, *module.parameters()])]


def assert_same(got, expected) -> None:
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, atol=1e-4, rtol=1e-4)


@each_option
def test_compile_fullgraph_with_dynamic_lengths(name: str) -> None:
    torch._dynamo.reset()
    module = Attention(name)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for gradient in (False, True):
        for seqlen_k in (11, 14, 70):
            with torch._dynamo.config.patch(error_on_recompile=seqlen_k != 11):
                got = results(compiled, module, seqlen_k, gradient=gradient)
            assert_same(got, results(module, module, seqlen_k, gradient=gradient))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_compile_with_parameters_as_inputs(device: str) -> None:
    torch._dynamo.reset()
    q = torch.nn.Parameter(torch.randn(1, 3, 2, 8, device=device, dtype=torch.half))
    with torch.no_grad():
        attend = torch.compile(flashcute.flash_attn_func, backend="eager", fullgraph=True)
        assert attend(q, q, q).shape == q.shape


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
def test_compile_with_inductor() -> None:
    torch._dynamo.reset()
    module = Attention("all")
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    with torch._inductor.config.patch(fallback_random=True):  # random numbers as in eager code
        got = results(compiled, module, 11, gradient=True)
    assert_same(got, results(module, module, 11, gradient=True))


def test_compile_needs_neither_a_compiler_nor_a_cache(tmp_path: pathlib.Path) -> None:
    script = (
        "import torch, flashcute\n"
        "attend = torch.compile(flashcute.flash_attn_func, backend='aot_eager', fullgraph=True)\n"
        "q = torch.randn(1, 3, 2, 8, requires_grad=True)\n"
        "out = attend(q, q, q, causal=True)\n"
        "out.sum().backward()\n"
        "assert torch.equal(out, flashcute.flash_attn_func(q, q, q, causal=True))\n"
    )
    (tmp_path / "file").touch()
    nothing = {
        "PATH": str(tmp_path),
        "CXX": str(tmp_path / "none"),
        "FLASHCUTE_CACHE_DIR": str(tmp_path / "file" / "cache"),
    }
    _run_python(script, nothing)


@each_option
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")  # torch's own use
@pytest.mark.parametrize("gradient", [False, True])
def test_export_and_train(name: str, gradient: bool, tmp_path: pathlib.Path) -> None:
    # The program has a gradient even if it was exported without one.
    module = Attention(name)
    seqlen = torch.export.Dim("seqlen", min=2, max=2**20)
    shapes = {"q": None, "k": {1: seqlen}, "v": {1: seqlen}}
    args = tuple(x.detach() for x in inputs())
    with torch.set_grad_enabled(gradient):
        program = torch.export.export(module, args, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "attention.pt2")
    for loaded in (torch.export.load(tmp_path / "attention.pt2"), program.run_decompositions()):
        exported = loaded.module()
        for seqlen_k in (11, 33):
            got = results(exported, exported, seqlen_k, gradient=True)
            assert_same(got, results(module, module, seqlen_k, gradient=True))


def test_strict_export() -> None:
    module = Attention("causal")
    program = torch.export.export(module, tuple(x.detach() for x in inputs()), strict=True)
    assert "flashcute.attend_cpu.default" in [str(node.target) for node in program.graph.nodes]
    exported = program.module()
    assert_same(
        results(exported, exported, 11, gradient=True),
        results(module, module, 11, gradient=True),
    )


def test_exported_program_loads_in_a_process_that_only_imports_the_function(
    tmp_path: pathlib.Path,
) -> None:
    program = torch.export.export(Attention("window"), tuple(x.detach() for x in inputs()))
    torch.export.save(program, tmp_path / "attention.pt2")
    _run_python(
        "import torch\n"
        "from flashcute import flash_attn_func\n"
        f"program = torch.export.load({str(tmp_path / 'attention.pt2')!r}).module()\n"
        "k = torch.randn(2, 11, 2, 16)\n"
        "assert program(torch.randn(2, 9, 4, 16), k, k).isfinite().all()\n"
    )


@each_option
def test_vmap(name: str) -> None:
    module = Attention(name)
    stacked = [torch.stack((x, x + 1, 2 * x)).detach().requires_grad_() for x in inputs()]
    # All samples have the same dropout mask, so that a loop gives the same results.
    batched = torch.vmap(module, randomness="same")
    torch.manual_seed(5)
    out = batched(*stacked)
    got = torch.autograd.grad(out.square().sum(), stacked)
    looped = []
    for sample in zip(*stacked, strict=True):
        torch.manual_seed(5)
        looped.append(module(*sample))
    expected = torch.stack(looped)
    assert_same([out], [expected])
    assert_same(got, torch.autograd.grad(expected.square().sum(), stacked))
    keys_shared = torch.vmap(module, in_dims=(0, None, None), randomness="different")
    assert keys_shared(stacked[0], *inputs()[1:]).shape == out.shape


@each_option
def test_gradients_of_each_sample(name: str) -> None:
    module = Attention(name)

    def loss(q, k, v):
        return module(q, k, v).square().sum()

    stacked = [torch.stack((x, x + 1)).detach() for x in inputs()]
    torch.manual_seed(5)
    got = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), randomness="same")(*stacked)
    for i, sample in enumerate(zip(*stacked, strict=True)):
        leaves = [x.clone().requires_grad_() for x in sample]
        torch.manual_seed(5)
        assert_same([g[i] for g in got], torch.autograd.grad(loss(*leaves), leaves))


def test_forward_mode_derivative() -> None:
    q, k, v = (x.detach().double() for x in inputs())
    _, got = torch.func.jvp(flashcute.flash_attn_func, (q, k, v), (k.new_ones(q.shape), k, v))
    _, expected = torch.func.jvp(
        lambda *x: attention_ref(*x).out, (q, k, v), (k.new_ones(q.shape), k, v)
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_forward_mode_derivative_of_one_option(name: str) -> None:
    q, k, v = (x.detach().double() for x in inputs())
    x = torch.rand(4)

    def attend(function, x):
        out = function(q, k, v, **{name: x})
        return out if isinstance(out, torch.Tensor) else out.out

    _, got = torch.func.jvp(lambda x: attend(flashcute.flash_attn_func, x), (x,), (x + 1,))
    _, expected = torch.func.jvp(lambda x: attend(attention_ref, x), (x,), (x + 1,))
    torch.testing.assert_close(got, expected)


def _loss(q, k, v):
    out, lse, _ = flashcute.flash_attn_func(
        q, k, v, causal=True, softcap=2.0, return_attn_probs=True
    )
    return out.square().sum() + lse.sum()


def _losses(q, k, v):
    return torch.vmap(_loss)(q, k, v)


# Different ways to compute the gradients of each of two samples, (2, ...).
TRANSFORMS = {
    "vmap_of_grad": torch.vmap(torch.func.grad(_loss, argnums=(0, 1, 2))),
    "grad_of_vmap": torch.func.grad(lambda *x: _losses(*x).sum(), argnums=(0, 1, 2)),
    "vjp": lambda *x: torch.func.vjp(_losses, *x)[1](torch.ones(2)),
    "jacrev": lambda *x: [
        torch.stack([jacobian[i, i] for i in range(2)])
        for jacobian in torch.func.jacrev(_losses, argnums=(0, 1, 2))(*x)
    ],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("compiled", [False, True])
def test_transforms_of_torch_func(transform: str, compiled: bool) -> None:
    torch._dynamo.reset()
    stacked = [torch.stack((x, x + 1)).detach() for x in inputs()]
    run = TRANSFORMS[transform]
    if compiled:
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    got = run(*stacked)
    for i, sample in enumerate(zip(*stacked, strict=True)):
        leaves = [x.clone().requires_grad_() for x in sample]
        assert_same([g[i] for g in got], torch.autograd.grad(_loss(*leaves), leaves))


def test_no_grad_inside_a_transform() -> None:
    q, k, v = (x.detach() for x in inputs())

    def loss(x):
        with torch.no_grad():
            out = flashcute.flash_attn_func(q, k, v)
        return (out * x).sum()

    torch.testing.assert_close(torch.func.grad(loss)(q), flashcute.flash_attn_func(q, k, v))


def _square(x):
    return flashcute.flash_attn_func(x, x, x).square().sum()


# If a level of torch.func did not record the gradient, second derivatives would be zeros.
@pytest.mark.parametrize(
    "derivative",
    [
        torch.func.jacrev(torch.func.jacrev(_square)),
        torch.func.grad(lambda x: torch.func.grad(_square)(x).square().sum()),
        lambda x: torch.vmap(torch.func.grad(lambda y: torch.func.grad(_square)(y).square().sum()))(
            x[None]
        ),
        lambda x: torch.func.grad(_square)(x.requires_grad_()).sum().backward(),
    ],
    ids=["jacrev_twice", "grad_twice", "vmap_of_grad_twice", "backward_of_grad"],
)
def test_second_derivative_of_a_traced_call_is_refused(derivative) -> None:
    x = torch.randn(1, 2, 1, 2)
    with pytest.raises(NotImplementedError, match=r"attend_cpu: expected one derivative"):
        derivative(x)


def test_forward_mode_derivative_that_is_not_there_is_refused() -> None:
    torch._dynamo.reset()
    x = torch.randn(1, 2, 1, 2)
    message = r"attend_cpu: expected derivatives in reverse mode \(grad, vjp, jacrev\), got one in"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.hessian(_square)(x)
    compiled = torch.compile(torch.func.jacfwd(_square), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=message):  # dynamo raises its own type
        compiled(x)
    with pytest.raises(NotImplementedError, match=message):
        torch.func.linearize(_square, x)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        torch.compile(_square, backend="aot_eager")(forward_ad.make_dual(x, x))


@each_option
def test_fake_tensors(name: str) -> None:
    module = Attention(name)
    real = results(module, module, 11, gradient=True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tensors = [*(mode.from_tensor(x) for x in inputs()), *module.parameters()]
        out = module(*tensors[:3])
        fake = [out, *torch.autograd.grad(out.square().sum(), tensors)]
        with torch.no_grad():
            assert module(*tensors[:3]).shape == out.shape
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.dtype, r.stride(), r.device) == (f.shape, f.dtype, f.stride(), f.device)


@each_option
def test_fake_tensors_outside_their_mode(name: str) -> None:
    mode = FakeTensorMode()
    with mode:
        module = Attention(name)
        tensors = inputs()
    out = module(*tensors)
    grads = torch.autograd.grad(out.square().sum(), tensors)
    assert [x.shape for x in (out, *grads)] == [x.shape for x in (tensors[0], *tensors)]


@each_option
def test_opcheck(name: str) -> None:
    options = dict(OPTIONS[name])
    extra = [options.get(name) for name in ("alibi_slopes", "sinks")]
    window = [min(side, 2**40) for side in options.get("window_size", (-1, -1))]
    dropout_p = options.get("dropout_p", 0.0)
    for seqlen_k in (11, 0):
        for differentiable in (False, True):
            tensors = [x.requires_grad_(differentiable) for x in inputs(seqlen_k)]
            args = (
                *tensors,
                *(None if shape is None else torch.rand(shape) for shape in extra),
                None,
                torch.tensor([7, 8]) if dropout_p else None,
                options.get("softmax_scale", 0.25),
                options.get("causal", False),
                *window,
                options.get("softcap", 0.0),
                dropout_p,
                options.get("return_attn_probs", False),
            )
            checks = torch.library.opcheck(cpu_ops._operator.op, args)
            assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_recorded_graph_holds_for_other_values(mode: str) -> None:
    # Eager code branches on whether values are NaN. A graph of one branch is wrong for others.
    q, k, v = (x.detach() for x in inputs())

    def attend(q, k, v):
        return flashcute.flash_attn_func(q, k, v, causal=True)

    graph = make_fx(attend, tracing_mode=mode)(q, k, v)
    with pytest.warns(torch.jit.TracerWarning):  # it fixes the shapes that were checked
        traced = torch.jit.trace(attend, (q, k, v), check_trace=False)
    v[:, -1] = torch.nan
    expected = attend(q, k, v)
    assert expected[:, :-1].isfinite().all()
    torch.testing.assert_close(graph(q, k, v), expected, equal_nan=True)
    torch.testing.assert_close(traced(q, k, v), expected, equal_nan=True)


def test_autocast_changes_no_gradient_of_a_compiled_call() -> None:
    torch._dynamo.reset()
    q, k, v = inputs()
    compiled = torch.compile(flashcute.flash_attn_func, backend="aot_eager")
    found = []
    for enabled in (False, True):
        out = compiled(q, k, v, softcap=1.0)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for outside, inside in zip(*found, strict=True):
        assert torch.equal(outside, inside)


def test_hidden_nan_stays_hidden_in_a_compiled_call() -> None:
    torch._dynamo.reset()
    q, k, v = inputs()
    with torch.no_grad():
        k[:, 0], v[:, 1] = torch.nan, torch.inf
    attend = torch.compile(flashcute.flash_attn_func, backend="aot_eager", fullgraph=True)
    out = attend(q, k, v, window_size=(0, -1))  # the first query is at key 2
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(x.isfinite().all() for x in (out, *grads))


@pytest.mark.parametrize("name", ["sinks", "attn_bias"])
def test_tensors_of_the_adapter_are_differentiable_when_compiled(name: str) -> None:
    torch._dynamo.reset()
    shape = {"sinks": (4,), "attn_bias": (1, 4, 1, 11)}[name]
    extra = torch.rand(shape, requires_grad=True)

    def attend(q, k, v, extra):
        return cpu_ops.attend(q, k, v, softmax_scale=0.25, **{name: extra})[0].square().sum()

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    args = (*inputs(), extra)
    results = []
    for function in (compiled, attend):
        loss = function(*args)
        results.append([loss, *torch.autograd.grad(loss, args)])
    assert_same(*results)


def test_eager_calls_do_not_go_through_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops._operator, "op", None)
    q, k, v = inputs()
    assert flashcute.flash_attn_func(q, k, v, softcap=1.0).requires_grad
    assert flashcute.flash_attn_func(q, k, v, dropout_p=0.5).requires_grad


def _run_python(script: str, environment: dict[str, str] | None = None) -> None:
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


@each_option
def test_forward_mode_of_a_gradient_is_refused(name):
    q, *others = (x.detach() for x in inputs())
    attention = Attention(name)
    gradient = torch.func.grad(lambda q: attention(q, *others).square().sum())
    for function, x in ((gradient, q), (torch.vmap(gradient, randomness="same"), q[None])):
        with pytest.raises(NotImplementedError, match=r"attend_cpu: .* in forward mode"):
            torch.func.jvp(function, (x,), (x,))
