"""Varlen attention under torch's tracers and transforms, and its operator."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import flashcute
from flashcute import cpu, cpu_varlen

ROOT = pathlib.Path(flashcute.__file__).parents[1]

# Tuples of alibi_slopes and sinks are the shapes of parameters.
OPTIONS = {
    "plain": {},
    "lse": {"return_attn_probs": True},
    "causal": {"causal": True, "softmax_scale": 0.3},
    "endless_window": {"window_size": (2**70, sys.maxsize)},
    "softcap": {"softcap": 2.0, "seqused_k": torch.tensor([1, 2, 3], dtype=torch.int32)},
    "alibi": {"alibi_slopes": (4,)},
    "sinks": {"sinks": (4,)},
    "all": {
        "dropout_p": 0.2,
        "causal": True,
        "window_size": (5, 0),
        "softcap": 1.5,
        "alibi_slopes": (3, 4),
        "sinks": (4,),
        "seqused_q": torch.tensor([2, 0, 1], dtype=torch.int32),
        "return_attn_probs": True,
    },
}
each_option = pytest.mark.parametrize("name", OPTIONS)

# Lengths of queries and keys: two batches with the same totals, and one with others.
LENGTHS = [
    ((4, 0, 5), (6, 2, 3)),
    ((2, 5, 2), (1, 2, 8)),
    ((3, 1, 9), (2, 7, 5)),
]


class Attention(torch.nn.Module):
    """Varlen attention with an option behind a projection."""

    def __init__(self, name: str):
        super().__init__()
        self.options = dict(OPTIONS[name])
        torch.manual_seed(0)
        self.projection = torch.nn.Linear(16, 16)
        for argument in ("alibi_slopes", "sinks"):
            shape = self.options.pop(argument, None)
            parameter = None if shape is None else torch.nn.Parameter(torch.rand(shape))
            self.register_parameter(argument, parameter)

    def forward(self, q, k, v, cu_seqlens_q, cu_seqlens_k):
        options = {**self.options, "alibi_slopes": self.alibi_slopes, "sinks": self.sinks}
        lengths = (cu_seqlens_q, cu_seqlens_k, 9, 9)
        result = flashcute.flash_attn_varlen_func(self.projection(q), k, v, *lengths, **options)
        if isinstance(result, torch.Tensor):
            return result
        out, lse, dmask = result
        return out + torch.where(lse.isfinite(), lse, 0).T[..., None] + dmask.sum()


def inputs(lengths=LENGTHS[0]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns q, k, v that require gradients, and cu_seqlens_q and cu_seqlens_k."""
    generator = torch.Generator().manual_seed(1)
    total_q, total_k = map(sum, lengths)
    shapes = ((total_q, 4, 16), (total_k, 2, 16), (total_k, 2, 16))
    tensors = [torch.randn(s, generator=generator).requires_grad_() for s in shapes]
    return tensors, [torch.tensor([0, *n]).cumsum(0).int() for n in lengths]


def results(attend, module, lengths=LENGTHS[0], *, gradient: bool = True) -> list[torch.Tensor]:
    """Returns the output and, where asked for, the gradients of inputs and parameters."""
    tensors, cu_seqlens = inputs(lengths)
    torch.manual_seed(5)
    with torch.set_grad_enabled(gradient):
        out = attend(*tensors, *cu_seqlens)
        if not gradient:
            return [out]
        return [out, *torch.autograd.grad(out.square().sum(), [*tensors, *module.parameters()])]


def assert_same(got, expected) -> None:
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, atol=1e-4, rtol=1e-4)


@each_option
def test_one_graph_for_all_lengths(name: str) -> None:
    torch._dynamo.reset()
    module = Attention(name)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for gradient in (False, True) if name in ("plain", "all") else (True,):
        for n, lengths in enumerate(LENGTHS):
            with torch._dynamo.config.patch(error_on_recompile=n > 0):
                got = results(compiled, module, lengths, gradient=gradient)
            assert_same(got, results(module, module, lengths, gradient=gradient))


def test_values_of_lengths_are_no_guards_of_a_static_graph() -> None:
    torch._dynamo.reset()
    module = Attention("causal")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=False)
    assert_same(results(compiled, module), results(module, module))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same(results(compiled, module, LENGTHS[1]), results(module, module, LENGTHS[1]))


def test_max_seqlen_read_back_within_a_graph() -> None:
    torch._dynamo.reset()

    def attend(q, k, v, cu_q, cu_k):
        longest = [cu.diff().max().item() for cu in (cu_q, cu_k)]
        return flashcute.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
        tensors, cu_seqlens = inputs()
        torch.testing.assert_close(compiled(*tensors, *cu_seqlens), attend(*tensors, *cu_seqlens))


def test_number_of_sequences_may_change() -> None:
    torch._dynamo.reset()
    module = Attention("sinks")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    # No two sizes are equal, as the first graph would take equal sizes for one symbol.
    for n, lengths in enumerate((((9, 5, 3, 1, 2), (6, 3, 1, 4, 9)), ((4, 5), (6, 3)))):
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            assert_same(results(compiled, module, lengths), results(module, module, lengths))


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")  # torch's own use
@pytest.mark.parametrize(
    ("name", "gradient"), [*((name, False) for name in OPTIONS), ("plain", True), ("all", True)]
)
def test_export_and_train(name: str, gradient: bool, tmp_path: pathlib.Path) -> None:
    module = Attention(name)
    total_q, total_k = (torch.export.Dim(n, min=2, max=2**20) for n in ("total_q", "total_k"))
    shapes = {"q": {0: total_q}, "k": {0: total_k}, "v": {0: total_k}}
    shapes |= {"cu_seqlens_q": None, "cu_seqlens_k": None}
    tensors, cu_seqlens = inputs()
    args = (*(x.detach() for x in tensors), *cu_seqlens)
    with torch.set_grad_enabled(gradient):
        program = torch.export.export(module, args, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "attention.pt2")
    for loaded in (torch.export.load(tmp_path / "attention.pt2"), program.run_decompositions()):
        exported = loaded.module()
        for lengths in LENGTHS[1:]:
            got = results(exported, exported, lengths)
            assert_same(got, results(module, module, lengths))


def test_exported_program_loads_in_a_process_that_only_imports_the_function(
    tmp_path: pathlib.Path,
) -> None:
    tensors, cu_seqlens = inputs()
    args = (*(x.detach() for x in tensors), *cu_seqlens)
    torch.export.save(torch.export.export(Attention("causal"), args), tmp_path / "attention.pt2")
    script = (
        "import torch\n"
        "from flashcute import flash_attn_func\n"
        f"program = torch.export.load({str(tmp_path / 'attention.pt2')!r}).module()\n"
        "q, k = torch.randn(9, 4, 16), torch.randn(11, 2, 16)\n"
        "lengths = torch.tensor([[0, 4, 4, 9], [0, 6, 8, 11]]).int()\n"
        "assert program(q, k, k, *lengths).isfinite().all()\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", ["causal", "all"])
@pytest.mark.parametrize("outer", ["vmap", "grad"])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_each_sample(name: str, outer: str, compiled: bool) -> None:
    torch._dynamo.reset()
    module = Attention(name).requires_grad_(False)
    tensors, cu_seqlens = inputs()

    def loss(q, k, v, *cu):
        return module(q, k, v, *cu).square().sum()

    stacked = [torch.stack((x, x + 1)).detach() for x in tensors]
    others = [torch.tensor([0, 2, 7, 9]).int(), torch.tensor([0, 1, 3, 11]).int()]
    lengths = [torch.stack(pair) for pair in zip(cu_seqlens, others, strict=True)]
    torch.manual_seed(5)
    if outer == "vmap":
        gradient = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), randomness="same")
    else:
        losses = torch.vmap(loss, randomness="same")
        gradient = torch.func.grad(lambda *args: losses(*args).sum(), argnums=(0, 1, 2))
    if compiled:
        gradient = torch.compile(gradient, backend="aot_eager", fullgraph=True)
    got = gradient(*stacked, *lengths)
    for i in range(2):
        leaves = [x[i].clone().requires_grad_() for x in stacked]
        torch.manual_seed(5)
        expected = torch.autograd.grad(loss(*leaves, *(x[i] for x in lengths)), leaves)
        assert_same([g[i] for g in got], expected)


def test_forward_mode_derivative() -> None:
    tensors, cu_seqlens = inputs()
    primals = [x.detach().double() for x in tensors]
    sinks = torch.zeros(4, dtype=torch.float64)

    def attend(q, k, v, sinks):
        return flashcute.flash_attn_varlen_func(q, k, v, *cu_seqlens, 9, 8, sinks=sinks)

    for tangents in ([*primals, sinks + 1], [*(x * 0 for x in primals), sinks + 1]):
        _, got = torch.func.jvp(attend, (*primals, sinks), tuple(tangents))
        step = 1e-6
        ends = [
            attend(*(x + sign * step * t for x, t in zip((*primals, sinks), tangents, strict=True)))
            for sign in (1, -1)
        ]
        torch.testing.assert_close(got, (ends[0] - ends[1]) / (2 * step), atol=1e-7, rtol=1e-5)
    _, alone = torch.func.jvp(lambda sinks: attend(*primals, sinks), (sinks,), (sinks + 1,))
    torch.testing.assert_close(alone, got)


def test_derivatives_that_are_not_there_are_refused() -> None:
    cu = torch.tensor([0, 2])
    q = torch.randn(2, 1, 2)

    def loss(q):
        return flashcute.flash_attn_varlen_func(q, q, q, cu, cu, 2, 2).square().sum()

    with pytest.raises(NotImplementedError, match=r"attend_varlen_cpu: expected one derivative"):
        torch.func.jacrev(torch.func.jacrev(loss))(q)
    with pytest.raises(NotImplementedError, match=r"attend_varlen_cpu: .* in forward mode"):
        torch.func.hessian(loss)(q)


@each_option
def test_fake_and_meta_tensors(name: str) -> None:
    module = Attention(name)
    real = results(module, module)
    tensors, cu_seqlens = inputs()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in (*tensors, *cu_seqlens)]
        leaves = [*fakes[:3], *module.parameters()]
        out = module(*fakes)
        fake = [out, *torch.autograd.grad(out.square().sum(), leaves)]
        with torch.no_grad():
            assert module(*fakes).shape == out.shape
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.dtype, r.stride(), r.device) == (f.shape, f.dtype, f.stride(), f.device)


@each_option
@pytest.mark.parametrize("gradient", [False, True])
def test_meta_tensors_are_refused_what_cuda_tensors_are(name: str, gradient: bool) -> None:
    module = Attention(name).half()
    for option in ("alibi_slopes", "sinks"):
        if getattr(module, option) is not None:
            setattr(module, option, torch.nn.Parameter(getattr(module, option).float()))
    tensors, cu_seqlens = inputs()
    leaves = [x.detach().half().to("meta") for x in tensors]
    module.options = {
        n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in module.options.items()
    }
    module.to("meta").requires_grad_(gradient)
    args = *leaves, *(x.to("meta") for x in cu_seqlens)
    if gradient and module.alibi_slopes is not None:  # the slopes have no gradient there
        with pytest.raises(NotImplementedError, match="on CUDA, where it is not supported yet"):
            module(*args)
        return
    out = module(*args)
    assert (out.shape, out.device.type) == (tensors[0].shape, "meta")


@each_option
def test_opcheck(name: str) -> None:
    options = {"softmax_scale": 0.25, **OPTIONS[name]}
    empty = (((0, 0, 0), (6, 2, 3)), ((4, 0, 5), (0, 0, 0))) if name == "all" else ()
    for lengths in (LENGTHS[0], *empty):
        fits = all(all(n) for n in lengths) or lengths is LENGTHS[0]
        for differentiable in (False, True):
            tensors, cu_seqlens = inputs(lengths)
            args = cpu_varlen.Tensors(
                *(x.detach().requires_grad_(differentiable) for x in tensors),
                *(
                    torch.rand(options[n]).requires_grad_(differentiable) if n in options else None
                    for n in ("alibi_slopes", "sinks")
                ),
                *cu_seqlens,
                *(options.get(n) if fits else None for n in ("seqused_q", "seqused_k")),
                torch.tensor([7, 8]) if options.get("dropout_p") else None,
            )
            window = [min(side, 2**40) for side in options.get("window_size", (-1, -1))]
            values = cpu_varlen.Options(
                9,
                8,
                options["softmax_scale"],
                options.get("causal", False),
                *window,
                options.get("softcap", 0.0),
                options.get("dropout_p", 0.0),
                options.get("return_attn_probs", False),
            )
            args = (*args[:-1], *values)  # without a block_table
            checks = torch.library.opcheck(cpu_varlen._operator.op, args)
            assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_recorded_graph_holds_for_other_values(mode: str) -> None:
    tensors, cu_seqlens = inputs()
    args = (*(x.detach() for x in tensors), *cu_seqlens)

    def attend(*args):
        return flashcute.flash_attn_varlen_func(*args, 9, 8, causal=True)

    graph = make_fx(attend, tracing_mode=mode)(*args)
    others = (*args[:3], *inputs(LENGTHS[1])[1])
    torch.testing.assert_close(graph(*others), attend(*others))


def test_eager_calls_do_not_go_through_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_varlen._operator, "op", None)
    tensors, cu_seqlens = inputs()
    assert flashcute.flash_attn_varlen_func(*tensors, *cu_seqlens, 9, 8).requires_grad


@pytest.mark.parametrize("total", [64, 512])
def test_backward_touches_each_token_once(total: int) -> None:
    # The gradient of a slice is a tensor as large as all tokens. With a slice for each sequence the
    # backward would take time quadratic in the number of sequences.
    lengths = [4] * (total // 4)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    q = torch.randn(total, 1, 4, requires_grad=True)
    out = flashcute.flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, 4, 4)
    with _Elements() as elements:
        out.sum().backward()
    assert elements.of_size(q.numel()) < 20


class _Elements(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the number of elements of each tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def of_size(self, numel: int) -> int:
        return self.sizes.count(numel)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.sizes.append(result.numel())
        return result


def test_default_device_and_autocast_change_nothing() -> None:
    tensors, cu_seqlens = inputs()

    def attend(**options):
        lengths = (*cu_seqlens, 9, 8)
        return flashcute.flash_attn_varlen_func(*tensors, *lengths, causal=True, **options)

    for options in ({}, {"softcap": 1.0}):
        expected = attend(**options)
        with torch.device("meta"):
            assert torch.equal(attend(**options), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(attend(**options), expected)
    with torch.device("meta"):
        assert attend(dropout_p=0.5, return_attn_probs=True)[2].is_cpu


def test_each_sequence_is_a_dense_call(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    dense = cpu.attend

    def attend(tensors, options, first_entry):
        assert first_entry == len(shapes)
        shapes.append((tensors.q.shape[:2], tensors.k.shape[:2]))
        return dense(tensors, options, first_entry)

    monkeypatch.setattr(cpu, "attend", attend)
    tensors, cu_seqlens = inputs()
    flashcute.flash_attn_varlen_func(*tensors, *cu_seqlens, 9, 8)
    assert shapes == [((1, 4), (1, 6)), ((1, 0), (1, 2)), ((1, 5), (1, 3))]
