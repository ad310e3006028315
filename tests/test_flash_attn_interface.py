"""The Python interface: what it rejects, and that what it accepts is the reference's attention."""

from __future__ import annotations

import inspect
import logging
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from bad_input import CASES, DEVICES, WARNINGS, Case, tensors
from torch.autograd import forward_ad

import flashcute
from flashcute import ops
from flashcute.reference import attention_ref


def _on(device: str) -> list[Case]:
    return [case for case in CASES if device in case.on]


@pytest.mark.filterwarnings(*WARNINGS)
@pytest.mark.parametrize(
    ("device", "case"),
    [(device, case) for device in ("cpu", "meta", "fake") for case in _on(device)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_odd_input_is_refused_or_right(device: str, case: Case) -> None:
    failure = case.failure(device)
    assert failure is None, failure


def test_odd_inputs_are_many_and_their_names_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) >= 200
    assert all(len(_on(device)) >= 200 for device in DEVICES)


# Cases with an int of 5001 digits are left out: dynamo prints the arguments of a call, and Python
# refuses to print such an int. A compilation takes half a second, so only a few cases are tried.
COMPILED = [case for case in _on("meta") if "digits" not in case.name][::8]


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_odd_input_to_a_compiled_function(case: Case) -> None:
    torch._dynamo.reset()
    failure = case.failure("meta", lambda function: torch.compile(function, backend="eager"))
    assert failure is None, failure


def test_odd_input_under_python_O() -> None:
    # -O strips assert statements, so validation that used them would vanish.
    script = (
        "import bad_input\n"
        "runs = [(c, d) for c in bad_input.CASES for d in ('cpu', 'meta')"
        " if d in c.on and c.error_on(d)]\n"
        "failures = [f for f in (c.failure(d) for c, d in runs) if f]\n"
        "print(*failures, sep='\\n')\n"
        "print(__debug__, len(runs), len(failures))\n"
    )
    run = subprocess.run(
        [sys.executable, "-O", "-c", script],
        cwd=pathlib.Path(__file__).parent,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    runs = sum(
        case.error_on(device) is not None for device in ("cpu", "meta") for case in _on(device)
    )
    assert run.stdout.splitlines()[-1] == f"False {runs} 0", run.stdout


def _environment() -> dict[str, str]:
    root = str(pathlib.Path(flashcute.__file__).parents[1])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}


@pytest.mark.parametrize(
    "call",
    [
        flashcute.flash_attn_func,
        lambda q, k, v: flashcute.flash_attn_func(q, k, v, 0, 1, True, [-1, -1], 0),
        lambda q, k, v: flashcute.flash_attn_func(q, k, v, deterministic=True),
        lambda q, k, v: flashcute.flash_attn_kvpacked_func(q, torch.stack((k, v), 2)),
        lambda q, k, v: flashcute.flash_attn_qkvpacked_func(torch.stack((q, q, q), 2)),
        # The strides of dimensions of size 1 are arbitrary.
        lambda q, k, v: flashcute.flash_attn_func(
            q[:, :1].as_strided((2, 1, 4, 64), (2304, 3331333, 64, 1)), k, v
        ),
        # Tensors whose strides are no multiple of 16 bytes are copied.
        lambda q, k, v: flashcute.flash_attn_func(
            q, *(t.new_empty(2, 11, 2, 68)[..., :64] for t in (k, v))
        ),
        lambda q, k, v: flashcute.flash_attn_func(q, k[:1].expand(2, -1, -1, -1), v),
        lambda q, k, v: flashcute.flash_attn_func(q[:, :0], k, v),
        lambda q, k, v: flashcute.flash_attn_func(q, k[:, :0], v[:, :0]),
        lambda q, k, v: flashcute.flash_attn_func(q[:0], k[:0], v[:0]),
    ],
)
def test_good_input_on_the_meta_device(call) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = tensors("meta", dtype=dtype)
        out = call(q, k, v)
        assert (out.device.type, out.dtype, out.dim(), out.shape[-1]) == ("meta", dtype, 4, 64)


_SHAPES_ALONE = """
import contextlib, torch
from flashcute import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, ops
from torch._subclasses import FakeTensorMode

def call(device, wants_gradient):
    q, k, v = (
        torch.empty(2, 9, 4, 64, device=device, dtype=torch.half, requires_grad=wants_gradient)
        for _ in range(3)
    )
    for options in ({}, {"softcap": 3.0}, {"window_size": (3, 1)}, {"dropout_p": 0.5}):
        out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **options)
        assert (out.shape, out.stride(), out.dtype) == (q.shape, q.stride(), q.dtype)
        assert (lse.shape, lse.dtype, lse.device) == ((2, 4, 9), torch.float32, q.device)
        if wants_gradient:
            assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape] * 3
    if not wants_gradient:
        lengths = torch.empty(3, device=device, dtype=torch.int32)
        x = torch.empty(18, 4, 64, device=device, dtype=torch.half)
        assert flash_attn_varlen_func(x, x, x, lengths, lengths, 9, 9).shape == x.shape
        assert flash_attn_with_kvcache(q, k, v, q, q, cache_seqlens=0).shape == q.shape

call("meta", False)
call("meta", True)
with FakeTensorMode():
    call("cuda", False)
assert ops._fwd is None
"""


def test_shapes_need_no_compiler(tmp_path: pathlib.Path) -> None:
    environment = {"FLASHCUTE_NO_BUILD": "1", "FLASHCUTE_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", _SHAPES_ALONE],
        env=_environment() | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_a_gradient_is_there_only_where_one_is_asked_for() -> None:
    q, k, v = tensors("meta")
    q.requires_grad_()
    with torch.no_grad():
        assert not flashcute.flash_attn_func(q, k, v).requires_grad
    with torch.inference_mode():
        assert not flashcute.flash_attn_func(q, k, v).requires_grad
    assert not flashcute.flash_attn_func(q.detach(), k, v).requires_grad
    assert flashcute.flash_attn_func(q, k, v).requires_grad


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("options", [{}, {"window_size": (3, 1)}], ids=str)
def test_a_tangent_is_refused_where_it_would_be_lost(options, which: int) -> None:
    given = [*tensors("meta"), torch.empty(4, device="meta")]

    def call(x):
        *qkv, sinks = *given[:which], x, *given[which + 1 :]
        return flashcute.flash_attn_func(*qkv, sinks=sinks, **options)

    x = given[which]
    name = ("q", "k", "v", "sinks")[which]
    message = f"flash_attn_func: expected no derivative in forward mode .* got {name} with a tang"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(call, (x,), (x,))
    with torch.no_grad(), forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match=message):
            call(forward_ad.make_dual(x, x))
        assert call(x).shape == given[0].shape


@pytest.mark.parametrize("d", range(1, 266))
def test_every_head_dim_is_padded_or_refused(d: int) -> None:
    args = tensors("meta", d=d)
    if d <= 256:
        out = flashcute.flash_attn_func(*args)
        assert (out.shape, out.stride()) == (args[0].shape, args[0].stride())
        assert flashcute.supports(head_dim=d)
    else:
        with pytest.raises(NotImplementedError, match=f"got head_dim={d};"):
            flashcute.flash_attn_func(*args)
        assert not flashcute.supports(head_dim=d)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Returns a list of the tensors and the scale of each call that reaches the operator.

    The operator computes nothing: its results are empty tensors.
    """
    calls = []

    def op(q, k, v, scale, causal):
        calls.append((q, k, v, scale))
        return ops._empty_outputs(q)

    monkeypatch.setattr(ops, "_fwd", op)
    return calls


def test_padding_is_zeros_and_keeps_the_scale(launched: list) -> None:
    q, k, v = tensors("meta", d=20)
    out, lse, _ = flashcute.flash_attn_func(q, k, v, return_attn_probs=True)
    assert out.is_contiguous() and out.shape == q.shape and lse.shape == (2, 4, 9)
    (*padded, scale) = launched[0]
    assert [t.shape[3] for t in padded] == [24, 24, 24]
    assert all(t.is_contiguous() for t in padded)
    assert scale == 20**-0.5
    flashcute.flash_attn_func(q, k, v, softmax_scale=0.3)
    assert launched[1][3] == 0.3


def test_what_the_kernels_can_load_is_passed_through(launched: list) -> None:
    # Identity, not equality: the plain case makes no copy and no view.
    for q, k, v in (tensors("meta"), [t[..., :64] for t in tensors("meta", d=72)]):
        flashcute.flash_attn_func(q, k, v)
        assert all(a is b for a, b in zip(launched.pop()[:3], (q, k, v), strict=True))


def test_a_debug_message_names_what_is_copied(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = tensors("meta")
    packed = torch.empty(2, 9, 3, 4, 20, device="meta", dtype=torch.float16)
    with caplog.at_level(logging.DEBUG, logger="flashcute"):
        flashcute.flash_attn_func(q, k, v)
        flashcute.flash_attn_func(q, k.mT.contiguous().mT, v)
        flashcute.flash_attn_func(q, k, v.new_empty(v.numel() + 1)[1:].view_as(v))
        flashcute.flash_attn_qkvpacked_func(packed)
    starts = [
        "flash_attn_func: copies k once: got k.stride()=(1408, 128, 1, 2), expected",
        "flash_attn_func: copies v once: got v.storage_offset()=1, expected",
        "flash_attn_qkvpacked_func: copies qkv[:, :, 0] once: got head_dim=20, expected",
        "flash_attn_qkvpacked_func: copies qkv[:, :, 1] once: got head_dim=20, expected",
        "flash_attn_qkvpacked_func: copies qkv[:, :, 2] once: got head_dim=20, expected",
    ]
    assert len(caplog.messages) == len(starts)
    assert all(map(str.startswith, caplog.messages, starts))


def test_a_compiled_function_copies_too() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(flashcute.flash_attn_func, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for d, gap in ((20, 0), (64, 4)):
            q, k, v = (t[..., :d] for t in tensors("meta", d=d + gap))
            out = compiled(q, k.mT.contiguous().mT, v)
            assert (out.shape, out.is_contiguous()) == (q.shape, True)


# Counts the bytecodes of one call on the host instead of timing it. With Python 3.11 they are 508
# on the meta device, whose path is that of CUDA tensors, and 743 on the CPU.
@pytest.mark.parametrize(("device", "most"), [("meta", 600), ("cpu", 900)])
def test_the_plain_case_takes_few_bytecodes(device: str, most: int) -> None:
    q, _, _ = tensors(device)
    k = v = q  # equal lengths, so that one call of PyTorch's kernel suffices
    result = (q, q)
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_fwd", lambda *args: result)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            flashcute.flash_attn_func(q, k, v, causal=True)
        finally:
            sys.settrace(before)
    assert 300 < count < most, count


def test_signatures_are_flash_attns() -> None:
    options = [
        ("dropout_p", 0.0),
        ("softmax_scale", None),
        ("causal", False),
        ("window_size", (-1, -1)),
        ("softcap", 0.0),
        ("alibi_slopes", None),
        ("deterministic", False),
        ("return_attn_probs", False),
    ]
    for name, inputs in (
        ("flash_attn_func", ("q", "k", "v")),
        ("flash_attn_kvpacked_func", ("q", "kv")),
        ("flash_attn_qkvpacked_func", ("qkv",)),
    ):
        parameters = inspect.signature(getattr(flashcute, name)).parameters.values()
        required = inspect.Parameter.empty
        assert [(p.name, p.default) for p in parameters] == [
            *((name, required) for name in inputs),
            *options,
            ("sinks", None),
        ]
        *flash_attns, own = (p.kind for p in parameters)
        assert set(flash_attns) == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
        assert own is inspect.Parameter.KEYWORD_ONLY


def _random(dtype: torch.dtype, h_k: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 9, 4, 20), (2, 11, h_k, 20), (2, 11, h_k, 20))
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"softmax_scale": -0.3},
        {"window_size": (3, 1)},
        {"softcap": 2.5, "causal": True},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0])},
        {"sinks": torch.tensor([0.5, -1.0, 3.0, -torch.inf]), "causal": True},
    ],
)
def test_cpu_tensors_go_to_the_reference(dtype: torch.dtype, options: dict) -> None:
    q, k, v = _random(dtype)
    out, lse, dmask = flashcute.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    expected = attention_ref(q, k, v, upcast=torch.float64, **options)
    assert (out.dtype, out.shape) == (dtype, q.shape)
    assert (lse.dtype, lse.shape) == (torch.float32, (2, 4, 9))
    assert (dmask.dtype, dmask.shape) == (dtype, (0,))
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}.get(dtype, 2e-6)
    torch.testing.assert_close(out.double(), expected.out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected.lse, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(flashcute.flash_attn_func(q, k, v, **options), out, rtol=0, atol=0)


def test_cpu_results_do_not_depend_on_autocast() -> None:
    q, k, v = _random(torch.float32)
    expected = flashcute.flash_attn_func(q, k, v), ops.fwd(q, k, v, 0.3, True)[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = flashcute.flash_attn_func(q, k, v), ops.fwd(q, k, v, 0.3, True)[0]
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("which", range(1, 8))
def test_cpu_gradients(which: int) -> None:
    # The bits of ``which`` say which of the three gradients are asked for.
    q, k, v = (t[:1, :4, :2, :4].contiguous() for t in _random(torch.float64))
    for bit, tensor in enumerate((q, k, v)):
        tensor.requires_grad_(bool(which >> bit & 1))

    def attend(q, k, v):
        return flashcute.flash_attn_func(q, k, v, causal=True)

    assert torch.autograd.gradcheck(attend, (q, k, v))


@pytest.mark.parametrize("of_out", [False, True])
def test_cpu_gradient_of_v_alone_where_the_log_sum_exp_is_used(of_out: bool) -> None:
    q, k, v = _random(torch.float32)
    v.requires_grad_()
    out, lse, _ = flashcute.flash_attn_func(q, k, v, return_attn_probs=True)
    (expected,) = torch.autograd.grad(out.sum(), v, retain_graph=True)
    loss = lse.sum() + (out.sum() if of_out else 0)
    found = torch.autograd.grad(loss, v, allow_unused=True, materialize_grads=True)[0]
    torch.testing.assert_close(found, expected if of_out else torch.zeros_like(v))


def test_cpu_dropout_pattern_is_the_one_used() -> None:
    q, k, v = _random(torch.float32, h_k=4)
    torch.manual_seed(1)
    out, _, dmask = flashcute.flash_attn_func(q, k, v, 0.375, return_attn_probs=True)
    kept = ~torch.signbit(dmask)
    weights = torch.where(kept, dmask, 0) / (1 - 0.375)
    torch.testing.assert_close(out, torch.einsum("bhij,bjhd->bihd", weights, v))
    torch.testing.assert_close(
        dmask.abs(), attention_ref(q, k, v, upcast=torch.float32, return_probs=True).probs
    )
    assert 0.5 < kept.double().mean() < 0.7
    torch.manual_seed(1)
    assert torch.equal(flashcute.flash_attn_func(q, k, v, 0.375), out)
    assert not torch.equal(flashcute.flash_attn_func(q, k, v, 0.375), out)


def test_packed_functions_read_in_place() -> None:
    q, k, v = _random(torch.float32, h_k=4)
    kv = torch.stack((k, v), 2)
    expected = flashcute.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flashcute.flash_attn_kvpacked_func(q, kv, causal=True), expected)
    q = torch.randn_like(k)
    expected = flashcute.flash_attn_func(q, k, v, softmax_scale=0.7)
    qkv = torch.stack((q, k, v), 2).requires_grad_()
    out = flashcute.flash_attn_qkvpacked_func(qkv, softmax_scale=0.7)
    assert torch.equal(out, expected)
    out.sum().backward()
    sinks = torch.zeros(4)
    got = flashcute.flash_attn_qkvpacked_func(qkv, softmax_scale=0.7, sinks=sinks)
    assert torch.equal(got, flashcute.flash_attn_func(q, k, v, softmax_scale=0.7, sinks=sinks))
    got = flashcute.flash_attn_kvpacked_func(q, qkv[:, :, 1:], softmax_scale=0.7, sinks=sinks)
    assert torch.equal(got, flashcute.flash_attn_func(q, k, v, softmax_scale=0.7, sinks=sinks))
    assert qkv.grad.shape == qkv.shape and qkv.grad.isfinite().all()


def test_import_is_lazy() -> None:
    # The command line imports the package, too, and needs no torch if it only builds.
    script = (
        "import sys, flashcute\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "flashcute.flash_attn_func\n"
        "assert 'torch._dynamo' not in sys.modules, 'torch._dynamo was imported'\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'flash_api' not in maps, 'the binding was loaded'\n"
        "assert set(flashcute.__all__) <= set(dir(flashcute))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
