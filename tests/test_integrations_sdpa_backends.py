"""Calls that PyTorch gives to other backends of SDPA while flashcute is enabled.

A warning says the reason once, and results and gradients stay the same.
"""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

from flashcute.integrations import sdpa


def inputs():
    """Returns q, k and v, (b, h, s, d), which require gradients."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn((2, 4, 16, 32), generator=generator).requires_grad_() for _ in range(3)
    )


EFFICIENT, CUDNN_OPERATOR, VARLEN_OPERATOR, MATH_OPERATOR = sdpa._OTHERS
BACKENDS = {
    EFFICIENT: lambda q, k, v, mask, causal: (q, k, v, mask, True, 1.0, causal),
    CUDNN_OPERATOR: lambda q, k, v, mask, causal: (q, k, v, mask, True, 1.0, causal, False),
    MATH_OPERATOR: lambda q, k, v, mask, causal: (q, k, v, mask, 0.0, causal),
}


@pytest.fixture
def other_backends():
    """Registers stand-ins for the backends that CPU tensors lack; returns a list of their calls.

    The math backend stays PyTorch's own.
    """
    calls = []
    library = torch.library.Library("aten", "IMPL")

    def stand_in(name):
        def run(*args, **kwargs):
            calls.append((name, args, kwargs))
            q = args[0]
            seed = torch.zeros(2, dtype=torch.uint64)
            if name == EFFICIENT:
                return q + 7, q.new_zeros(q.shape[:3]), seed, seed
            return q + 7, q.new_zeros(q.shape[:3]), seed, seed, 1, 1, seed, seed, q.new_empty(0)

        return run

    for name in (EFFICIENT, CUDNN_OPERATOR, VARLEN_OPERATOR):
        library.impl(name, stand_in(name), "CPU")
    yield calls
    library._destroy()


def reasons(said):
    return [f"{x.message}".partition("own kernel: ")[2] for x in said]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_goes_to_another_backend_is_said_once_for_each_reason(other_backends, backend):
    operator = getattr(torch.ops.aten, backend)

    def attend(dtype=torch.bfloat16, s=16, mask=None, causal=False, d=32, d_v=None):
        q, k = (torch.randn(2, 4, n, d).to(dtype) for n in (16, s))
        v = torch.randn(2, 4, s, d_v or d).to(dtype)
        args = BACKENDS[backend](q, k, v, mask, causal)
        return args, operator(*args, scale=0.25)

    cases = (
        ({"mask": torch.zeros(16, 16, dtype=torch.bfloat16)}, "attn_mask=None, got a mask"),
        ({"dtype": torch.float32}, "float16 or bfloat16, got torch.float32; cast"),
        ({"dtype": torch.float64}, "float16 or bfloat16, got torch.float64; cast"),
        ({"d": 264}, "a head dimension up to 256, got 264"),
        ({"d": 64, "d_v": 32}, "value of query's head dimension, 64, got 32"),
        ({"causal": True, "s": 20}, "as many queries as keys with is_causal=True"),
        ({"s": 20}, "shapes, strides or the GPU of the call"),
    )
    expected = [attend(**case)[1] for case, _ in cases[:1]]
    handle = sdpa._Handle("CPU")
    try:
        for case, reason in cases:
            with pytest.warns(UserWarning) as said:
                args, results = attend(**case)
                attend(**case)
            assert len(said) == 1 and reason in reasons(said)[0]
            if backend != MATH_OPERATOR:
                name, given, kwargs = other_backends[-2]
                assert name == backend and kwargs == {"scale": 0.25}
                assert all(x is y or x == y for x, y in zip(args, given, strict=False))
                assert torch.equal(results[0], args[0] + 7)
            assert len(results) == len(expected[0])
    finally:
        handle.remove()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "choice",
    [
        {"backends": [SDPBackend.MATH]},
        {"backends": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]},
        {"backends": [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], "set_priority": True},
    ],
    ids=["math", "not flash", "flash last"],
)
def test_nothing_is_said_of_a_backend_that_was_chosen(other_backends, backend, choice):
    q, k, v = plain(inputs())
    args = BACKENDS[backend](q, k, v, None, False)
    handle = sdpa._Handle("CPU")
    try:
        with warnings.catch_warnings(), attention.sdpa_kernel(**choice):
            warnings.simplefilter("error")
            getattr(torch.ops.aten, backend)(*args)
        # A later call for which the backend was not chosen must still warn.
        flash_too = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        with attention.sdpa_kernel(flash_too), pytest.warns(UserWarning, match=r"torch\.float32"):
            getattr(torch.ops.aten, backend)(*args)
    finally:
        handle.remove()


def test_varlen_attn_on_cudnn_is_said_once(other_backends):
    """torch 2.15 calls cuDNN for varlen_attn without a look at the order of backends."""
    q = torch.randn(20, 4, 32).bfloat16()
    ends = torch.tensor([0, 8, 20], dtype=torch.int32)

    def attend(cu=ends):
        operator = getattr(torch.ops.aten, VARLEN_OPERATOR)
        return operator(q, q, q, None, cu, cu, 12, 12, True, 0.0, True, False, scale=0.25)

    handle = sdpa._Handle("CPU")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            attend(cu=None)  # SDPA's backend calls it so, and has warned itself
            with attention.sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                attend()
        with pytest.warns(UserWarning) as said:
            results = [attend(), attend()]
        message = r"varlen_attn runs on PyTorch's own kernel: it prefers cuDNN .*sdpa_kernel\("
        assert len(said) == 1 and re.search(message, f"{said[0].message}")
        assert all(torch.equal(out[0], q + 7) for out in results)
        name, args, kwargs = other_backends[-1]
        assert name == VARLEN_OPERATOR and args[4] is ends and kwargs == {"scale": 0.25}
    finally:
        handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend()


def by_math(q, k, v, mask):
    return torch.ops.aten._scaled_dot_product_attention_math(q * 1.5, k, v, mask)[0].sin()


def _gradients(function, *tensors):
    out = function(*tensors)
    wanted = [x for x in tensors if x.requires_grad]
    return out, *torch.autograd.grad(out.square().sum(), wanted, create_graph=True)


def _second_gradients(*tensors):
    _, *grads = _gradients(by_math, *tensors)
    return torch.autograd.grad(sum(x.square().sum() for x in grads), tensors[:3])


class Math(torch.nn.Module):
    def forward(self, *tensors):
        return by_math(*tensors)


def plain(tensors):
    return tuple(x.detach() for x in tensors)


USES = {
    "gradients": lambda *x: _gradients(by_math, *x),
    "second gradients": _second_gradients,
    "compiled": lambda *x: _gradients(
        torch.compile(by_math, backend="aot_eager", fullgraph=True), *x
    ),
    "checkpointed": lambda *x: _gradients(
        lambda *x: checkpoint(by_math, *x, use_reentrant=False), *x
    ),
    "exported": lambda *x: torch.export.export(Math(), plain(x)).module()(*plain(x)),
    "exported and decomposed": lambda *x: (
        torch.export.export(Math(), plain(x)).run_decompositions().module()(*plain(x))
    ),
    "vmap": lambda *x: torch.vmap(by_math, in_dims=(0, 0, 0, None))(*plain(x)),
    "vmap of gradients": lambda *x: torch.vmap(
        torch.func.grad(lambda *x: by_math(*x).sum(), argnums=(0, 1, 2)), in_dims=(0, 0, 0, None)
    )(*plain(x)),
    "forward mode": lambda *x: torch.func.jvp(by_math, plain(x), plain(x)),
    "autocast": torch.autocast("cpu", torch.bfloat16)(by_math),
    "inference mode": lambda *x: torch.inference_mode()(by_math)(*plain(x)),
    "no gradients": torch.no_grad()(by_math),
    "traced": lambda *x: torch.jit.trace(by_math, plain(x))(*plain(x)),
}


@pytest.mark.filterwarnings("ignore:flashcute.enable", "ignore::DeprecationWarning")
@pytest.mark.parametrize("use", USES)
def test_the_math_backend_does_what_it_did(use):
    """The math operator is composed of others, so a kernel for it may hinder tracers of these."""
    tensors = *inputs(), torch.randn(16, 16)
    before = USES[use](*tensors)
    torch.compiler.reset()
    # Clears the cache, as in a program that enables flashcute before it compiles.
    getattr(torch.ops.aten, MATH_OPERATOR).default._dispatch_cache.clear()
    handle = sdpa._Handle("CPU")
    try:
        during = USES[use](*tensors)
    finally:
        handle.remove()
    torch.compiler.reset()
    torch.testing.assert_close(during, before, rtol=0, atol=0)
    torch.testing.assert_close(USES[use](*tensors), before, rtol=0, atol=0)


@pytest.mark.filterwarnings("error:flashcute.enable", "ignore::DeprecationWarning")
@pytest.mark.parametrize("use", USES)
def test_a_kernel_that_another_library_has_of_the_math_backend_stays(use):
    """Under a dispatch mode, as in export, two kernels in Python would call each other."""
    calls = []
    own = torch.library.get_kernel(f"aten::{MATH_OPERATOR}", "AutogradCPU")

    def run(keyset, *args, **kwargs):
        calls.append(MATH_OPERATOR)
        return own.call_boxed(keyset, *args, **kwargs)

    library = torch.library.Library("aten", "IMPL")
    library.impl(MATH_OPERATOR, run, "AutogradCPU", with_keyset=True, allow_override=True)
    tensors = *inputs(), torch.randn(16, 16)
    try:
        before, counts = USES[use](*tensors), [len(calls)]
        torch.compiler.reset()
        handle = sdpa._Handle("CPU")
        try:
            during = USES[use](*tensors)
        finally:
            handle.remove()
        counts.append(len(calls) - counts[0])
    finally:
        library._destroy()
        getattr(torch.ops.aten, MATH_OPERATOR).default._dispatch_cache.clear()
        torch.compiler.reset()
    assert counts[0] == counts[1]
    torch.testing.assert_close(during, before, rtol=0, atol=0)
