"""PyTorch's attention functions on our kernels: forward, gradients, compile, AMP, checkpoints."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

import flashcute
from flashcute import testing
from flashcute.integrations import sdpa


def _inputs(b=2, h=4, h_k=4, s=200, s_k=None, d=64, dtype=torch.bfloat16):
    """Returns q, k and v, (b, h, s, d), which require gradients."""
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(b, heads, length, d, generator=generator, device="cuda", dtype=dtype)
        .requires_grad_()
        for heads, length in ((h, s), (h_k, s_k or s), (h_k, s_k or s))
    ]  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """Counts how often Python runs our forward, dense and varlen, and our backward. For dense
    tensors Python runs only what the binding's kernels leave to it."""
    counts = {"forward": 0, "forward_varlen": 0, "backward": 0}

    def counted(name):
        function = getattr(sdpa.raw, name)

        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            counts[name] += 1
            return result

        return call

    for name in counts:
        monkeypatch.setattr(sdpa.raw, name, counted(name))
    return counts


@pytest.fixture(autouse=True)
def _disabled_at_the_end():
    yield
    flashcute.disable()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("d, h_k", [(64, 4), (128, 2), (80, 1)])
def test_outputs_and_gradients_keep_the_tolerance_rule(calls, dtype, is_causal, d, h_k):
    qkv = _inputs(h_k=h_k, d=d, dtype=dtype)
    with warnings.catch_warnings(), flashcute.enabled():
        warnings.simplefilter("error")
        out = F.scaled_dot_product_attention(*qkv, is_causal=is_causal, enable_gqa=h_k != 4)
        dout = torch.randn_like(out)
        grads = torch.autograd.grad(out, qkv, dout)
    assert sum(calls.values()) == 0
    q, k, v = (x.detach().transpose(1, 2) for x in qkv)
    assert out.stride() == torch.empty_like(qkv[0]).stride()
    assert torch.equal(out.transpose(1, 2), flashcute.flash_attn_func(q, k, v, causal=is_causal))
    testing.check_forward(out.detach().transpose(1, 2), None, q, k, v, causal=is_causal)
    named = {f"d{x}": g.transpose(1, 2) for x, g in zip("qkv", grads, strict=True)}
    testing.check_backward(named, q, k, v, dout.transpose(1, 2), causal=is_causal)


def test_disable_gives_back_pytorchs_kernels_and_order(calls):
    q, k, v = _inputs()
    backend = torch._fused_sdp_choice(q, k, v)
    order = torch._C._get_sdp_priority_order()
    before = F.scaled_dot_product_attention(q, k, v)
    with flashcute.enabled():
        assert torch._fused_sdp_choice(q, k, v) == int(SDPBackend.FLASH_ATTENTION)
        ours = F.scaled_dot_product_attention(q, k, v)
    assert torch._fused_sdp_choice(q, k, v) == backend
    assert torch._C._get_sdp_priority_order() == order
    assert torch.equal(F.scaled_dot_product_attention(q, k, v), before)
    expected = flashcute.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)))
    assert calls["forward"] == 0 and torch.equal(ours.transpose(1, 2), expected)


@pytest.mark.parametrize("heads_inside", [False, True])
def test_tensors_of_models_are_read_and_written_in_place(calls, heads_inside):
    """Most models have (b, s, h, d) in memory, and transpose it."""
    qkv = torch.randn(2, 200, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    if not heads_inside:
        q, k, v = (x.contiguous() for x in (q, k, v))
    with warnings.catch_warnings(), flashcute.enabled():
        warnings.simplefilter("error")
        operator = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse = operator(q, k, v, 0.0, True)[:2]
        # F.scaled_dot_product_attention gives such strides to another backend.
        odd = operator(q.mT.contiguous().mT, k, v, 0.0, True)[0]
    expected, its_lse, _ = flashcute.flash_attn_func(
        *(x.transpose(1, 2) for x in (q, k, v)), causal=True, return_attn_probs=True
    )
    for found in (out, odd):
        assert torch.equal(found.transpose(1, 2), expected)
    assert torch.equal(lse, its_lse) and out.stride() == torch.empty_like(q).stride()
    assert calls == {"forward": 1, "forward_varlen": 0, "backward": 0}  # for the odd strides alone


def test_a_layer_compiles_and_trains(calls):
    q, k, v = _inputs()

    def model(q, k, v):
        out = F.scaled_dot_product_attention(q * 1.5, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(2).float().square().sum()

    with flashcute.enabled():
        expected = torch.autograd.grad(model(q, k, v), (q, k, v))
        for variant in (
            torch.compile(model, fullgraph=True),
            lambda *x: checkpoint(model, *x, use_reentrant=False),
        ):
            found = torch.autograd.grad(variant(q, k, v), (q, k, v))
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    assert sum(calls.values()) == 0


def test_amp_casts_what_we_get(calls):
    qkv = [x.detach().float().requires_grad_() for x in _inputs()]
    with flashcute.enabled(), torch.autocast("cuda", torch.bfloat16):
        out = F.scaled_dot_product_attention(*qkv)
        out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and qkv[0].grad.dtype == torch.float32
    assert sum(calls.values()) == 0


def test_a_gradient_without_memory_for_its_elements_is_copied_in_python(calls):
    qkv = _inputs()
    with flashcute.enabled():
        found = torch.autograd.grad(F.scaled_dot_product_attention(*qkv).sum(), qkv)
        assert calls == {"forward": 0, "forward_varlen": 0, "backward": 1}
        out = F.scaled_dot_product_attention(*qkv)
        expected = torch.autograd.grad(out, qkv, torch.ones_like(out))
    assert calls["backward"] == 1
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_deterministic_algorithms_are_asked_for_at_each_backward(calls):
    qkv = _inputs(s=2000)
    with flashcute.enabled():
        out = F.scaled_dot_product_attention(*qkv, is_causal=True)
        dout = torch.randn_like(out)
        torch.use_deterministic_algorithms(True)
        try:
            first, *others = (
                torch.autograd.grad(out, qkv, dout, retain_graph=True) for _ in range(4)
            )
        finally:
            torch.use_deterministic_algorithms(False)
    assert all(all(map(torch.equal, first, other)) for other in others)
    assert sum(calls.values()) == 0


NOT_FLASH = {
    # (options of _inputs and of SDPA, what the warning says)
    "mask": ({}, {"attn_mask": None}, "attn_mask=None, got a mask"),
    "mask and grouped heads": (
        {"h_k": 2}, {"attn_mask": None, "enable_gqa": True}, "attn_mask=None, got a mask",
    ),
    "float32": ({"dtype": torch.float32}, {}, "got torch.float32"),
    "float64": ({"dtype": torch.float64}, {"is_causal": True}, "got torch.float64"),
    "head dimension": ({"d": 264}, {}, "a head dimension up to 256, got 264"),
    "lengths": ({"s_k": 100}, {"is_causal": True}, "as many queries as keys"),
}  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", NOT_FLASH)
def test_what_flash_attention_does_not_take_stays_pytorchs(calls, name, compiled):
    """PyTorch computes it with its own gradients, and one warning says why."""
    shape, options, reason = NOT_FLASH[name]
    qkv = _inputs(**shape)
    if "attn_mask" in options:
        options = options | {"attn_mask": torch.rand(200, 200, device="cuda") < 0.5}

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **options)

    def run():
        torch.compiler.reset()
        function = torch.compile(attend, fullgraph=True) if compiled else attend
        out = function(*qkv)
        return out, *torch.autograd.grad(out.float().square().sum(), qkv)

    # The expected result comes from the order of backends that enable() makes, as it decides who
    # computes what FlashAttention does not take.
    torch._fused_sdp_choice(*qkv)
    flash = SDPBackend.FLASH_ATTENTION
    order = [SDPBackend(x) for x in torch._C._get_sdp_priority_order()]
    order = [flash, *(x for x in order if x != flash)]
    with sdpa_kernel(order, set_priority=True):
        expected = run()
    with flashcute.enabled():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = run()
            run()
        ours = [str(x.message) for x in said if "flashcute.enable" in str(x.message)]
        # There is no warning where PyTorch's math backend is compiled.
        assert len(ours) == 1 or (compiled and not ours)
        assert all(reason in text for text in ours)
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("error")
            attend(*qkv)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)
    after = run()
    for x, y in zip(after, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)
    assert sum(calls.values()) == 0


def test_dropout_falls_through_with_one_warning(calls):
    q, k, v = _inputs()
    with flashcute.enabled(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match="PyTorch's own kernel.*dropout") as said:
            ours = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
            grads = torch.autograd.grad(ours.sum(), (q, k, v))
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        assert len(said) == 1
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.manual_seed(0)
        theirs = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        assert torch.equal(ours, theirs)
        for x, y in zip(grads, torch.autograd.grad(theirs.sum(), (q, k, v)), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)
    assert sum(calls.values()) == 0


@pytest.mark.parametrize("causal", [False, True])
def test_varlen_attn_and_its_gradient(calls, causal):
    lengths = [50, 1, 200, 0, 70]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = [
        torch.randn(sum(lengths), 4, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
        .requires_grad_()
        for _ in range(3)
    ]  # fmt: skip

    def run():
        out = varlen_attn(*qkv, cu, cu, 200, 200, **_causal(causal))
        return out, torch.autograd.grad(out.float().square().sum(), qkv)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        expected, theirs = run()
        with flashcute.enabled(), warnings.catch_warnings():
            warnings.simplefilter("error")
            out, grads = run()
    assert calls["forward_varlen"] == 1
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    for x, y in zip(grads, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=5e-2, atol=5e-2)


def _causal(causal: bool) -> dict:
    """Returns ``varlen_attn``'s arguments for a causal mask: a window from about torch 2.11 on, a
    flag before."""
    if "window_size" in inspect.signature(varlen_attn).parameters:
        return {"window_size": (-1, 0) if causal else (-1, -1)}
    return {"is_causal": causal}


def test_a_cuda_graph_captures_what_is_enabled(calls):
    q, k, v = (x.detach() for x in _inputs())
    with flashcute.enabled():
        expected = F.scaled_dot_product_attention(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = F.scaled_dot_product_attention(q, k, v)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected) and calls["forward"] == 0
