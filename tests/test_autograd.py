"""The operators' gradients: their values with CPU tensors, the path of CUDA with meta tensors."""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import flashcute
from flashcute import autograd, ops
from flashcute.dropout import dropout_mask
from flashcute.reference import attention_ref

# (causal, (left, right), with sinks)
OPTIONS = ((False, (-1, -1), False), (True, (-1, -1), True), (False, (2, 4), True))
options = pytest.mark.parametrize(("causal", "window", "with_sinks"), OPTIONS)
Tensors = list[torch.Tensor]


@pytest.fixture(autouse=True)
def _loaded() -> None:
    ops.load()
    torch._dynamo.reset()


def _inputs(with_sinks: bool = True, seed: int = 0) -> Tensors:
    """Returns q, k, v and sinks, all of which require gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 9, 4, 16), (2, 11, 2, 16), (2, 11, 2, 16), (4,)][: 3 + with_sinks]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def _meta(d: int = 64, dtype: torch.dtype = torch.half) -> Tensors:
    shapes = (2, 9, 4, d), (2, 11, 2, d), (2, 11, 2, d), (4,)
    dtypes = dtype, dtype, dtype, torch.float32
    return [
        torch.empty(shape, device="meta", dtype=dtype, requires_grad=True)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


def _by_function(tensors: Tensors, causal: bool, window: tuple[int, int], eager: bool = False):
    q, k, v, *sinks = tensors
    attend = autograd.attend_eagerly if eager else autograd.attend
    return attend(q, k, v, 0.3, causal, *window, sinks[0] if sinks else None)


def _by_reference(tensors: Tensors, causal: bool, window: tuple[int, int]):
    q, k, v, *sinks = tensors
    given = {"softmax_scale": 0.3, "causal": causal, "window_size": window}
    return attention_ref(q, k, v, sinks=sinks[0] if sinks else None, **given)[:2]


def _losses(out: torch.Tensor, lse: torch.Tensor) -> dict[str, torch.Tensor]:
    losses = {"out": out.square().sum(), "lse": lse.sin().sum()}
    return losses | {"both": losses["out"] + losses["lse"]}


@options
@pytest.mark.parametrize("of", ["out", "lse", "both"])
@pytest.mark.parametrize("eager", [False, True])
def test_gradients(eager: bool, of: str, causal: bool, window, with_sinks: bool) -> None:
    tensors = _inputs(with_sinks)
    got = _losses(*_by_function(tensors, causal, window, eager))[of]
    expected = _losses(*_by_reference(tensors, causal, window))[of]
    torch.testing.assert_close(got, expected)
    found = torch.autograd.grad(got, tensors)
    wanted = torch.autograd.grad(expected, tensors, materialize_grads=True)
    for g, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(g, w)


def _wanted_by(monkeypatch: pytest.MonkeyPatch, call) -> list[int]:
    """Runs ``call``; returns the argument ``wanted`` of each call of ``bwd`` that it makes."""
    seen: list[int] = []
    original = autograd._op

    def op(name: str):
        found = original(name)
        if name != "bwd":
            return found
        return lambda *args: (seen.append(args[12]), found(*args))[1]

    monkeypatch.setattr(autograd, "_op", op)
    call()
    return seen


@pytest.mark.parametrize("which", range(1, 16))
def test_only_what_is_asked_for_is_computed(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = _inputs()
    expected = torch.autograd.grad(_losses(*_by_reference(tensors, True, (3, -1)))["both"], tensors)
    tensors = [x.detach().requires_grad_(bool(which >> i & 1)) for i, x in enumerate(tensors)]
    loss = _losses(*_by_function(tensors, True, (3, -1)))["both"]
    assert _wanted_by(monkeypatch, loss.backward) == [which]
    for i, (x, e) in enumerate(zip(tensors, expected, strict=True)):
        if which >> i & 1:
            torch.testing.assert_close(x.grad, e)
        else:
            assert x.grad is None


@pytest.mark.parametrize("how", ["argument", "torch"])
def test_repeatable_gradients_are_asked_for(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, sinks = _inputs()
    out, _ = autograd.attend(q, k, v, 0.3, True, -1, -1, sinks, how == "argument")
    torch.use_deterministic_algorithms(how == "torch")
    try:
        assert _wanted_by(monkeypatch, out.sum().backward) == [31]
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_is_passed_to_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(ops, "attend", lambda *args: (seen.append(args[9]), ops.fwd(*args[:5]))[1])
    q, k, v, _ = _meta()
    for deterministic in (False, True):
        flashcute.flash_attn_func(q, k, v, causal=True, deterministic=deterministic)
        flashcute.flash_attn_func(q, k, v, window_size=(3, 0), deterministic=deterministic)
    assert seen == [False, True, True]


@pytest.mark.parametrize("eager", [False, True])
def test_dropout_draws_the_same_mask_in_the_backward(eager: bool) -> None:
    tensors, state = _inputs(), torch.tensor([5, 7])
    attend = autograd.attend_eagerly if eager else autograd.attend
    options = 0.3, True, -1, -1, tensors[3], False, state, 0.25
    got = _losses(*attend(*tensors[:3], *options))["both"]
    given = {"dropout_p": 0.25, "dropout_mask": dropout_mask(state, 2, 4, 9, 11, 0.25)}
    given |= {"softmax_scale": 0.3, "causal": True, "sinks": tensors[3]}
    expected = _losses(*attention_ref(*tensors[:3], **given)[:2])["both"]
    torch.testing.assert_close(got, expected)
    found = torch.autograd.grad(got, tensors)
    for g, w in zip(found, torch.autograd.grad(expected, tensors), strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("eager", [False, True])
def test_softcap_and_slopes(eager: bool) -> None:
    tensors, scores = _inputs(), {"softcap": 1.5, "alibi_slopes": torch.rand(2, 4)}
    attend = autograd.attend_eagerly if eager else autograd.attend
    options = 0.3, True, -1, -1, tensors[3], False, None, 0.0
    got = _losses(*attend(*tensors[:3], *options, *scores.values()))["both"]
    given = {"softmax_scale": 0.3, "causal": True, "sinks": tensors[3], **scores}
    expected = _losses(*attention_ref(*tensors[:3], **given)[:2])["both"]
    torch.testing.assert_close(got, expected)
    found = torch.autograd.grad(got, tensors)
    for g, w in zip(found, torch.autograd.grad(expected, tensors), strict=True):
        torch.testing.assert_close(g, w)


def test_function_hands_softcap_and_slopes_to_forward_and_backward() -> None:
    q, k, v, _ = _meta()
    slopes = torch.empty(4, device="meta")
    options = {"softcap": 30.0, "alibi_slopes": slopes}
    for function in (
        flashcute.flash_attn_func,
        torch.compile(flashcute.flash_attn_func, backend="aot_eager", fullgraph=True),
    ):
        q.grad = None
        function(q, k, v, **options).sum().backward()
        assert q.grad.shape == q.shape
    learned = slopes.clone().requires_grad_()
    with pytest.raises(
        NotImplementedError, match=r"got alibi_slopes with requires_grad=True; call"
    ):
        flashcute.flash_attn_func(q, k, v, alibi_slopes=learned)
    with pytest.raises(NotImplementedError, match=r"flashcute::attend: .*alibi_slopes.detach"):
        ops.attend(q, k, v, 0.3, True, (-1, -1), None, 0.0, learned)


def test_function_hands_one_random_state_to_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, tuple] = {}
    original = autograd._op

    def op(name: str):
        found = original(name)
        return found if name != "bwd" else lambda *args: (given.update(bwd=args), found(*args))[1]

    monkeypatch.setattr(autograd, "_op", op)
    q, k, v, _ = _meta()
    flashcute.flash_attn_func(q, k, v, 0.25).sum().backward()
    assert q.grad.shape == q.shape and v.grad.shape == v.shape
    rng_state, dropout_p, softcap, slopes = given["bwd"][-4:]
    assert (rng_state.shape, dropout_p, softcap, slopes) == ((2,), 0.25, 0.0, None)


def test_compiled_dropout_has_a_gradient() -> None:
    q, k, v, _ = _meta()
    torch.compile(flashcute.flash_attn_func, backend="aot_eager", fullgraph=True)(
        q, k, v, 0.25
    ).sum().backward()
    assert q.grad.shape == q.shape


def test_nothing_runs_backward_where_no_output_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = _inputs()
    unused = autograd.Attend.backward
    ctx = type("Context", (), {"needs_input_grad": (True,) * 8})()
    assert _wanted_by(monkeypatch, lambda: unused(ctx, None, None)) == []
    out, _ = _by_function(tensors, True, (-1, -1))
    assert _wanted_by(monkeypatch, (out.sum() * 0).backward) == [15]


def test_second_derivatives_are_refused_when_they_are_asked_for() -> None:
    tensors = _inputs()
    out, _ = _by_function(tensors, False, (-1, -1))
    (dq,) = torch.autograd.grad(out.square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^flashcute::bwd: expected first derivatives"):
        torch.autograd.grad(dq.sum(), tensors[:1])


def test_forward_mode_is_refused() -> None:
    q, k, v, sinks = (x.detach() for x in _meta())

    def attend(q):
        return flashcute.flash_attn_func(q, k, v, sinks=sinks)

    refused = pytest.raises(NotImplementedError, match=r"^flash_attn_func: .* got q with a tangent")
    with refused:
        torch.func.jvp(attend, (q,), (q,))
    with forward_ad.dual_level():
        assert attend(q).shape == q.shape
        with refused:
            attend(forward_ad.make_dual(q, q))


@pytest.mark.parametrize("window_size", [(-1, -1), (3, 1)])
def test_forward_mode_of_a_gradient_is_refused(window_size) -> None:
    q, k, v = (x.detach() for x in _meta()[:3])

    def attend(q):
        return flashcute.flash_attn_func(q, k, v, window_size=window_size).sum()

    gradient = torch.func.grad(attend)
    expected = r"^flashcute::\w+: expected no derivative in forward mode .*, got \w+ with a tangent"
    for function, x in ((gradient, q), (torch.vmap(gradient), torch.stack((q, q)))):
        with pytest.raises(NotImplementedError, match=expected):
            torch.func.jvp(function, (x,), (x,))
    leaf = q.requires_grad_()
    with forward_ad.dual_level():
        dout = forward_ad.make_dual(leaf.new_ones(()), leaf.new_ones(()))
        for graph in (False, True):
            with pytest.raises(NotImplementedError, match=expected):
                torch.autograd.grad(attend(leaf), leaf, dout, create_graph=graph)


def _loss(q, k, v, sinks, causal: bool = True) -> torch.Tensor:
    out, lse, _ = flashcute.flash_attn_func(
        q, k, v, causal=causal, return_attn_probs=True, sinks=sinks
    )
    return out.float().square().sum() + lse.sin().sum()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [1, 20, 64, 256])
def test_gradients_have_the_dtypes_and_shapes_of_the_inputs(dtype: torch.dtype, d: int) -> None:
    tensors = _meta(d, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        loss = _loss(*tensors)
    loss.backward()
    for x in tensors:
        assert (x.grad.shape, x.grad.dtype, x.grad.device) == (x.shape, x.dtype, x.device)


def test_strided_inputs_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever strides a gradient of the output has, the kernels get one that they can read."""
    calls: list[tuple] = []
    original = autograd._op

    def op(name: str):
        found = original(name)
        return lambda *args: (calls.append((name, args)), found(*args))[1]

    monkeypatch.setattr(autograd, "_op", op)
    q, k, v, _ = _meta()
    out, lse, _ = flashcute.flash_attn_func(q, k, v, return_attn_probs=True)
    # The gradients of the output are an expanded number, a tensor with heads before rows, which is
    # read in place, and every second column of a tensor.
    torch.autograd.grad((out.sum() + lse.sum()), (q,), retain_graph=True)
    torch.autograd.grad(out.transpose(1, 2).contiguous().square().sum(), (q,), retain_graph=True)
    torch.autograd.grad(out, (q,), q.detach().repeat(1, 1, 1, 2)[..., ::2])
    (expanded, transposed, strided) = [args for name, args in calls if name == "bwd"]
    for args in (expanded, transposed, strided):
        assert args[0].stride()[3] == 1 and all(s % 8 == 0 for s in args[0].stride()[:3])
    assert expanded[6].is_contiguous() and transposed[6] is None
    assert not transposed[0].is_contiguous()


@pytest.mark.parametrize("packed", ["qkv", "kv"])
def test_packed_functions(packed: str) -> None:
    q, *_ = _meta()
    count = 3 if packed == "qkv" else 2
    x = torch.empty(2, 9, count, 4, 64, device="meta", dtype=torch.half, requires_grad=True)
    if packed == "qkv":
        flashcute.flash_attn_qkvpacked_func(x, causal=True).sum().backward()
    else:
        flashcute.flash_attn_kvpacked_func(q, x, window_size=(3, 3)).sum().backward()
        assert q.grad.shape == q.shape
    assert x.grad.shape == x.shape and x.grad.dtype == x.dtype


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    tensors = _meta()
    checkpoint(_loss, *tensors, use_reentrant=reentrant).backward()
    assert all(x.grad.shape == x.shape for x in tensors)


def test_torch_func() -> None:
    tensors = [x.detach() for x in _meta()]
    found = torch.func.grad(_loss, argnums=(0, 1, 2, 3))(*tensors)
    assert [x.shape for x in found] == [x.shape for x in tensors]
    _, pull = torch.func.vjp(_loss, *tensors)
    found = pull(torch.empty((), device="meta"))
    assert [x.dtype for x in found] == [x.dtype for x in tensors]


def test_torch_func_of_a_gradient_of_another_tensor() -> None:
    """An outer gradient reaches what an inner one does not use, and is refused where it does."""
    q, k, v, sinks = (x.detach() for x in _meta())

    def inner(q, scale):
        return torch.func.grad(lambda x: _loss(x, k, v, sinks))(q).float().sum() * scale

    assert torch.func.grad(inner, argnums=1)(q, torch.ones((), device="meta")).shape == ()
    with pytest.raises(NotImplementedError, match="first derivatives"):
        torch.func.grad(inner)(q, 1.0)


# Inductor cannot compile meta tensors with symbolic shapes.
@pytest.mark.parametrize(("backend", "dynamic"), [("aot_eager", True), ("inductor", False)])
def test_compile_fullgraph_forward_and_backward(backend: str, dynamic: bool) -> None:
    compiled = torch.compile(_loss, backend=backend, fullgraph=True, dynamic=dynamic)
    for seqlen in (9, 14) if dynamic else (9,):
        tensors = _meta()
        tensors[0] = torch.empty(
            2, seqlen, 4, 64, device="meta", dtype=torch.half, requires_grad=True
        )
        with torch._dynamo.config.patch(error_on_recompile=seqlen != 9):
            compiled(*tensors).backward()
        assert all(x.grad.shape == x.shape and x.grad.dtype == x.dtype for x in tensors)


def test_a_compiled_backward_has_the_values_of_an_eager_one() -> None:
    """CPU tensors take the path of CUDA tensors here, with operators that compute."""

    def loss(*tensors):
        return _losses(*autograd.attend(*tensors[:3], 0.3, True, -1, -1, tensors[3]))["both"]

    tensors = _inputs()
    expected = torch.autograd.grad(loss(*tensors), tensors)
    graph = make_fx(lambda *x: torch.autograd.grad(loss(*x), x))(*tensors)
    for name in ("attend", "bwd"):
        assert f"flashcute.{name}.default" in graph.code
    for g, e in zip(graph(*tensors), expected, strict=True):
        torch.testing.assert_close(g, e)


# Counts the bytecodes that Python executes in this package for a forward and backward, instead of
# timing them. With Python 3.11 they are 852.
def test_forward_and_backward_take_few_bytecodes(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = _meta()
    results = {
        "fwd": (torch.empty_like(q), q.new_empty((2, 4, 9), dtype=torch.float32)),
        "bwd": (*map(torch.empty_like, (q, k, v)), q.new_empty(0)),
    }
    monkeypatch.setattr(autograd, "_op", lambda name: lambda *args: results[name])
    dout, count = torch.empty_like(q), 0

    package = str(pathlib.Path(flashcute.__file__).parent)

    def trace(frame, event, argument):
        nonlocal count
        if not frame.f_code.co_filename.startswith(package):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    def call():
        torch.autograd.grad(flashcute.flash_attn_func(q, k, v, causal=True), (q, k, v), dout)

    call()  # does what only a first call does, which must not count
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    assert 600 < count < 950, count


def _called(call, name: str) -> int:
    """Returns how often ``call`` enters a function of this name in flashcute/ops.py."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        code = frame.f_code
        count += event == "call" and code.co_filename == ops.__file__ and code.co_name == name

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("option", ["window", "sinks", "softcap", "alibi", "varlen"])
def test_without_a_gradient_no_autograd_kernel_runs(option: str) -> None:
    """The autograd kernel is in Python and takes the host longer than the rest of the call."""
    q, k, v, sinks = (x.detach() for x in _meta())
    options = {
        "window": {"window_size": (3, 1)},
        "sinks": {"sinks": sinks},
        "softcap": {"softcap": 2.0},
        "alibi": {"alibi_slopes": sinks},
    }

    def call(q):
        if option == "varlen":
            lengths = torch.empty(2, device="meta", dtype=torch.int32)
            packed = q[0], k[0], v[0], (lengths, lengths, None, None), (9, 11)
            return ops.attend_varlen(*packed, 0.125, False, (-1, -1), None)[0]
        return flashcute.flash_attn_func(q, k, v, **options[option])

    assert _called(lambda: call(q), "kernel") == 0
    leaf = q.clone().requires_grad_()
    with torch.no_grad():
        assert _called(lambda: call(leaf), "kernel") == 0
    assert call(leaf).requires_grad
    assert "flashcute.attend" in make_fx(call)(q).code  # a tracer sees the operator


def test_recorded_graphs_hold_forward_and_backward() -> None:
    def gradient(q, k, v):
        out = flashcute.flash_attn_func(q, k, v)
        return torch.autograd.grad(out.sum(), (q, k, v))

    code = make_fx(gradient)(*_meta()[:3]).code
    assert "flashcute.fwd.default" in code and "flashcute.bwd.default" in code


def test_what_choosing_a_kernel_raised_arrives_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashcute import resolver_errors

    tensors = _inputs()
    out, _ = _by_function(tensors, True, (-1, -1))
    original = autograd._op

    def fail(*args):
        resolver_errors.remember(KeyError("no kernel"), "KeyError: 'no kernel'")
        raise RuntimeError("flashcute::bwd: KeyError: 'no kernel'")

    monkeypatch.setattr(autograd, "_op", lambda name: fail if name == "bwd" else original(name))
    with pytest.raises(KeyError, match="no kernel"):
        out.sum().backward()
