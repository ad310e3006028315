"""The gradient under torch's features: CUDA graphs, streams, AMP, checkpoints, compile,
torch.func."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashcute
from flashcute import ops, testing

pytestmark = pytest.mark.usefixtures("backward_kernels")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def _random(*shape: int, seed: int = 0, device: str = "cuda", dtype=torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device, dtype=dtype)


def _inputs(seed: int = 0, device: str = "cuda", d: int = 64) -> list[torch.Tensor]:
    """Returns q, k, v and sinks, which require gradients. At most two tiles of keys add to dQ, so
    that the sum does not depend on their order."""
    shapes = (2, 200, 4, d), (2, 250, 2, d), (2, 250, 2, d)
    inputs = [_random(*shape, seed=4 * seed + i, device=device) for i, shape in enumerate(shapes)]
    inputs.append(_random(4, seed=4 * seed + 3, device=device, dtype=torch.float32))
    return [x.requires_grad_() for x in inputs]


def _loss(q, k, v, sinks) -> torch.Tensor:
    out, lse, _ = flashcute.flash_attn_func(
        q, k, v, causal=True, return_attn_probs=True, sinks=sinks
    )
    return out.float().square().sum() + lse.sin().sum()


def _gradients(inputs, loss=_loss) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss(*inputs), inputs)


def _assert_equal(got, expected) -> None:
    for g, e in zip(got, expected, strict=True):
        assert (g.dtype, g.shape) == (e.dtype, e.shape) and torch.equal(g, e)


def test_a_training_step_is_captured_and_replays_with_changed_inputs() -> None:
    static = _inputs()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _gradients(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _gradients(static)
    for seed in (1, 2):
        fresh = _inputs(seed)
        for old, new in zip(static, fresh, strict=True):
            old.detach().copy_(new.detach())
        for output in captured:
            output.fill_(torch.nan)
        graph.replay()
        _assert_equal(captured, _gradients(fresh))


def test_runs_on_the_stream_of_the_forward() -> None:
    inputs = _inputs()
    expected = _gradients(inputs)
    late = [torch.full_like(x, torch.nan).requires_grad_() for x in inputs]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        _gradients(inputs)  # leaves this stream memory to reuse: cudaMalloc would wait for the GPU
        torch.cuda._sleep(100_000_000)
        for old, new in zip(late, inputs, strict=True):
            old.detach().copy_(new.detach())
        loss = _loss(*late)
    got = torch.autograd.grad(loss, late)
    side.synchronize()
    _assert_equal(got, expected)


def test_no_synchronisation() -> None:
    inputs = _inputs()
    _gradients(inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _gradients(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@two_gpus
def test_second_device() -> None:
    expected = _gradients(_inputs())
    inputs = [x.detach().to("cuda:1").requires_grad_() for x in _inputs()]
    got = _gradients(inputs)
    assert torch.cuda.current_device() == 0
    assert all(g.device == torch.device("cuda:1") for g in got)
    _assert_equal([g.to("cuda:0") for g in got], expected)


def test_accumulation_and_retained_graphs() -> None:
    inputs = _inputs()
    expected = _gradients(inputs)
    loss = _loss(*inputs)
    loss.backward(retain_graph=True)
    _assert_equal([x.grad for x in inputs], expected)
    loss.backward()
    _assert_equal([x.grad for x in inputs], [2 * x for x in expected])


@pytest.mark.parametrize("d", [20, 64, 100])
def test_packed_functions(d: int) -> None:
    """The gradient of a packed tensor is that of its parts."""
    qkv = _random(2, 130, 3, 4, d).requires_grad_()
    dout = _random(2, 130, 4, d, seed=1)
    parts = [x.detach().requires_grad_() for x in qkv.unbind(2)]
    out = flashcute.flash_attn_func(*parts, causal=True)
    expected = torch.autograd.grad(out, parts, dout)
    testing.check_backward(
        dict(zip(("dq", "dk", "dv"), expected, strict=True)),
        *(x.detach() for x in parts),
        dout,
        causal=True,
    )
    out = flashcute.flash_attn_qkvpacked_func(qkv, causal=True)
    _assert_equal(torch.autograd.grad(out, qkv, dout)[0].unbind(2), expected)
    kv = qkv.detach()[:, :, 1:].clone().requires_grad_()
    out = flashcute.flash_attn_kvpacked_func(parts[0], kv, causal=True)
    dq, dkv = torch.autograd.grad(out, (parts[0], kv), dout)
    _assert_equal((dq, *dkv.unbind(2)), expected)


def test_any_layout_of_the_gradient_of_the_output() -> None:
    inputs = _inputs()[:3]
    out = flashcute.flash_attn_func(*inputs, causal=True)
    dout = _random(*out.shape, seed=9)
    expected = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    storage = dout.new_zeros(dout.numel() + 1)
    for same in (
        dout.transpose(1, 2).contiguous().transpose(1, 2),
        torch.cat((dout, dout), -1)[..., :64],
        torch.cat((dout, dout), -1)[..., :68].contiguous()[..., :64],
        dout.repeat_interleave(2, -1)[..., ::2],
        storage[1:].view_as(dout).copy_(dout),
    ):
        _assert_equal(torch.autograd.grad(out, inputs, same, retain_graph=True), expected)
    ones = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    _assert_equal(torch.autograd.grad(out, inputs, torch.ones_like(out)), ones)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_amp(dtype: torch.dtype) -> None:
    """Weights are float32, attention runs in half precision, and gradients have the dtype of their
    tensor."""
    layer = torch.nn.Linear(64, 3 * 64, device="cuda")
    x = _random(2, 100, 64, dtype=torch.float32)
    sinks = _random(4, dtype=torch.float32).to(dtype).requires_grad_()
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype):
        qkv = layer(x).view(2, 100, 3, 4, 16)
        out = flashcute.flash_attn_qkvpacked_func(qkv, causal=True, sinks=sinks)
        loss = out.float().square().mean()
    assert qkv.dtype == out.dtype == dtype
    scaler.scale(loss).backward()
    assert layer.weight.grad.dtype == torch.float32 and sinks.grad.dtype == dtype
    assert layer.weight.grad.isfinite().all() and layer.weight.grad.any() and sinks.grad.any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    inputs = _inputs()
    expected = _gradients(inputs)
    checkpoint(_loss, *inputs, use_reentrant=reentrant).backward()
    _assert_equal([x.grad for x in inputs], expected)


def test_saved_tensors_may_be_kept_elsewhere() -> None:
    inputs = _inputs()
    with torch.autograd.graph.save_on_cpu():
        loss = _loss(*inputs)
    _assert_equal(torch.autograd.grad(loss, inputs), _gradients(inputs))


@pytest.mark.parametrize("d", [64, 20])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph_forward_and_backward(backend: str, d: int) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_loss, backend=backend, fullgraph=True, dynamic=True)
    for seed, seqlen in ((0, 200), (1, 77)):
        inputs = _inputs(seed, d=d)
        inputs[0] = _random(2, seqlen, 4, d, seed=seed).requires_grad_()
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            got = _gradients(inputs, compiled)
        for g, e in zip(got, _gradients(inputs), strict=True):
            assert g.dtype == e.dtype
            torch.testing.assert_close(g, e, rtol=2e-2, atol=2e-2)  # the loss rounds differently


def test_torch_func() -> None:
    inputs = _inputs()
    plain = [x.detach() for x in inputs]
    expected = _gradients(inputs)
    _assert_equal(torch.func.grad(_loss, argnums=(0, 1, 2, 3))(*plain), expected)
    _, pull = torch.func.vjp(_loss, *plain)
    _assert_equal(pull(torch.ones((), device="cuda")), expected)


def test_opcheck() -> None:
    q, k, v, sinks = _inputs()
    ops.load()
    namespace = torch.ops.flashcute
    out, lse = (x.detach() for x in namespace.fwd(q, k, v, 0.125, True))
    plain = [x.detach() for x in (q, k, v)]
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    for op, args in (
        (namespace.fwd.default, (q, k, v, 0.125, True)),
        (namespace.attend.default, (q, k, v, 0.125, False, 30, 40, sinks)),
        (namespace.bwd.default, (dout, *plain, out, lse, dlse, 0.125, True, -1, -1, None, 7)),
        (namespace.bwd.default, (dout, *plain, out, lse, None, 0.125, True, -1, -1, None, 2)),
    ):
        results = torch.library.opcheck(op, args)
        assert set(results.values()) == {"SUCCESS"} and len(results) >= 4


def test_derivatives_that_are_not_there_are_errors() -> None:
    q, k, v, sinks = _inputs()
    (dq,) = torch.autograd.grad(_loss(q, k, v, sinks), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^flashcute::bwd: expected first derivatives"):
        dq.sum().backward()
    q = q.detach()
    with pytest.raises(NotImplementedError, match=r"^flash_attn_func: .* got q with a tangent"):
        torch.func.jvp(lambda q: flashcute.flash_attn_func(q, k, v), (q,), (q,))
    slopes = torch.rand(q.shape[2], device="cuda", requires_grad=True)
    with pytest.raises(NotImplementedError, match="no gradient of ALiBi slopes on CUDA"):
        flashcute.flash_attn_func(q, k, v, alibi_slopes=slopes)


def test_a_step_of_training_lowers_the_loss() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 3 * 64, device="cuda", dtype=torch.bfloat16)
    x, wanted = _random(4, 128, 64), _random(4, 128, 64, seed=1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    losses = []
    for _ in range(10):
        out = flashcute.flash_attn_qkvpacked_func(layer(x).view(4, 128, 3, 4, 16), causal=True)
        loss = (out.flatten(2).float() - wanted.float()).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
