"""Eager calls with CPU tensors: PyTorch's flash attention against the reference."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from flashcute import cpu, flash_attn_func, reference
from flashcute.loading import regular
from flashcute.reference import attention_ref
from flashcute.testing import check_forward

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TOLERANCES = dict(zip(DTYPES, (2e-3, 2e-2, 1e-5, 1e-12), strict=True))
WINDOWS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "left": {"window_size": (4, -1)},
    "right": {"window_size": (-1, 2)},
    "diagonal": {"window_size": (0, 0)},
    "causal_window": {"window_size": (5, 7), "causal": True},
    "scale": {"softmax_scale": -0.7},
    "sinks": {"sinks": torch.tensor([0.5, -3.0, 9.0, -math.inf])},
    "causal_sinks": {"sinks": torch.tensor([-0.5, 0.0, 2.0, 20.0]), "causal": True},
}
LENGTHS = [(9, 9), (9, 14), (14, 9), (1, 7), (7, 1)]


def make_qkv(sq, sk, *, h=4, h_k=2, d=8, dtype=torch.float32, b=2):
    generator = torch.Generator().manual_seed(sq + 100 * sk)
    shapes = ((b, sq, h, d), (b, sk, h_k, d), (b, sk, h_k, d))
    return [
        torch.randn(s, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
        for s in shapes
    ]


@pytest.fixture
def flash_only(monkeypatch):
    """Fails where the reference computes instead of PyTorch's kernel."""

    def fail(*args, **kwargs):
        raise AssertionError("went to the reference")

    monkeypatch.setattr(cpu, "attention_ref", fail)


@pytest.fixture
def reference_only(monkeypatch):
    monkeypatch.setattr(cpu, "_flash_forward", None)


def check_against_reference(q, k, v, **options):
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    if q.dtype != torch.float64:  # the rule itself takes float64 as the truth
        check_forward(out.detach(), lse.detach(), q, k, v, check_drift=False, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    exact, exact_lse, _ = attention_ref(q, k, v, upcast=torch.float64, **options)
    got = torch.autograd.grad(out, (q, k, v), grad)
    expected = torch.autograd.grad(exact, (q, k, v), grad.double())
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-6)
    tolerance = TOLERANCES[q.dtype]
    torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=tolerance)
    for g, e, x in zip(got, expected, (q, k, v), strict=True):
        assert (g.dtype, g.shape) == (x.dtype, x.shape)
        torch.testing.assert_close(g, e, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("flash_only")
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_flash_is_the_reference(window, dtype, lengths):
    check_against_reference(*make_qkv(*lengths, dtype=dtype), **WINDOWS[window])


@pytest.mark.usefixtures("flash_only")
@pytest.mark.parametrize("lengths", [(9, 9), (14, 9)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [-0.7, -0.0, 0.0, 1e-50, 1e-40])
def test_causal_with_a_scale_that_is_not_positive(scale, dtype, lengths):
    # PyTorch's kernel multiplies its causal mask, -inf, by the scale as a float32.
    check_against_reference(*make_qkv(*lengths, dtype=dtype), causal=True, softmax_scale=scale)


@pytest.mark.usefixtures("flash_only")
@pytest.mark.parametrize("lengths", [(700, 1300), (1300, 700), (1100, 1100)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window_size": (40, 0)},
        {"window_size": (-1, 600)},
        {"window_size": (0, -1)},
    ],
    ids=str,
)
def test_flash_in_pieces_is_the_reference(lengths, options):
    check_against_reference(*make_qkv(*lengths, h=2, h_k=1, b=1), **options)


@pytest.mark.usefixtures("flash_only")
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("d", [1, 3, 40, 257])
def test_flash_with_any_heads(heads, d):
    check_against_reference(*make_qkv(20, 33, h=heads[0], h_k=heads[1], d=d), causal=True)


@pytest.mark.usefixtures("flash_only")
@pytest.mark.parametrize("causal", [False, True])
def test_flash_with_any_strides(causal):
    q, k, v = (x.detach() for x in make_qkv(20, 20, h_k=4))
    packed = torch.stack((q, k, v), 2)
    for tensors in (
        packed.unbind(2),
        [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)],
        [x.mT.contiguous().mT for x in (q, k, v)],  # the last stride is not 1
        [x[:1, :, :1].expand(x.shape) for x in (q, k, v)],
        (q, *(x[:, :1].expand(x.shape) for x in (k, v))),
        [torch.nn.functional.pad(x, (0, 3))[..., :8] for x in (q, k, v)],
    ):
        leaves = [x.requires_grad_() for x in tensors]
        out = flash_attn_func(*leaves, causal=causal)
        if regular(tensors[0]):  # otherwise out is contiguous, as on CUDA
            assert out.stride() == torch.empty_like(tensors[0]).stride()
        else:
            assert out.is_contiguous()
        check_against_reference(*leaves, causal=causal)


@pytest.mark.parametrize("sizes", [(0, 9, 9), (2, 0, 9), (2, 9, 0), (2, 0, 0)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_empty_tensors(sizes, causal):
    # PyTorch's kernel divides by these lengths and ends the process.
    b, sq, sk = sizes
    q, k, v = make_qkv(sq, sk, b=b)
    out, lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((b, 4, sq), -math.inf))
    for x, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert torch.equal(grad, torch.zeros_like(x))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (2, 1)}], ids=str)
def test_hidden_nan_and_inf_reach_no_result(options, where, bad):
    q, k, v = make_qkv(40, 40)
    rows = slice(0, 20)  # none of these rows sees key 30
    clean = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    expected = torch.autograd.grad(clean[0][:, rows].sum(), (q, k, v))
    with torch.no_grad():
        (k if where == "k" else v)[:, 30, :, 3] = bad
    got = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    torch.testing.assert_close(got[0][:, rows], clean[0][:, rows])
    torch.testing.assert_close(got[1][..., rows], clean[1][..., rows])
    assert not got[0][:, 30].isfinite().all()
    if "causal" in options:
        return  # later rows see key 30 and all keys of these rows
    for g, e in zip(torch.autograd.grad(got[0][:, rows].sum(), (q, k, v)), expected, strict=True):
        torch.testing.assert_close(g[:, rows], e[:, rows])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sq", [20, 7])
def test_nan_and_inf_that_no_row_sees_reach_no_gradient(sq, bad):
    q, k, v = make_qkv(sq, 40)
    options = {"window_size": (3, 0)}  # no row sees keys before 40 - sq - 3
    expected = torch.autograd.grad(flash_attn_func(q, k, v, **options).sum(), (q, k, v))
    with torch.no_grad():
        k[:, 5], v[:, 7] = bad, bad
    got = torch.autograd.grad(flash_attn_func(q, k, v, **options).sum(), (q, k, v))
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_what_is_not_finite_means_what_the_reference_says(where, bad):
    # PyTorch's kernel turns some NaNs into numbers, in its exponential, and its sums overflow.
    tensors = [x.detach() for x in make_qkv(100, 100)]
    tensors[where][:, 7, :, 3] = bad
    out, lse, _ = flash_attn_func(*tensors, return_attn_probs=True)
    expected = attention_ref(*tensors, upcast=torch.float32)
    torch.testing.assert_close(out, expected.out, equal_nan=True)
    torch.testing.assert_close(lse, expected.lse, equal_nan=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (40, 9)}], ids=str)
@pytest.mark.parametrize("lengths", [(1, 600), (17, 530), (540, 540)], ids=str)
def test_values_of_weight_zero_mean_what_the_reference_says(lengths, options, bad):
    # Without a gradient only the output shows whether v is finite, so 0 * NaN must reach it.
    q, k, v = (x.detach() for x in make_qkv(*lengths, h=2, h_k=1, b=1))
    k[:, 3::7] = -1e4 * q.mean(1, keepdim=True)[:, :, ::2]  # most weights are 0
    for key in (3, lengths[1] // 2, lengths[1] - 1):  # first, middle and last block of keys
        poisoned = v.clone()
        poisoned[:, key, 0, 5] = bad
        out, lse, _ = flash_attn_func(q, k, poisoned, return_attn_probs=True, **options)
        expected = attention_ref(q, k, poisoned, upcast=torch.float32, **options)
        torch.testing.assert_close(out, expected.out, equal_nan=True, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse, expected.lse, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("gradient", [False, True])
def test_values_are_read_once_more_for_a_gradient_only(monkeypatch, gradient):
    # With few queries reading v once more takes as long as the kernel does.
    q, k, v = (x.requires_grad_(gradient) for x in make_qkv(1, 40))
    read, norm = [], cpu._norm
    monkeypatch.setattr(cpu, "_norm", lambda x: read.append(x.data_ptr()) or norm(x))
    flash_attn_func(q, k, v)
    assert (v.data_ptr() in read) == gradient and {q.data_ptr(), k.data_ptr()} < {*read, 0}


@pytest.mark.parametrize("threads", [1, 2])
def test_norm(monkeypatch, threads):
    monkeypatch.setattr(cpu, "_num_threads", lambda: threads)
    for bad, finite in ((1.0, True), (math.nan, False), (math.inf, False), (-1e30, False)):
        x = torch.ones(2, 3, 4, 8)
        x[1, 2, 3, 4] = bad
        for y in (x, x.transpose(1, 2)):
            assert math.isfinite(cpu._norm(y)) == finite
            assert not finite or cpu._norm(y) == pytest.approx(math.sqrt(192))


def test_scores_that_overflow_are_the_references():
    q = torch.full((1, 20, 1, 16), 1e20)
    k = q.clone()
    k[..., ::2] *= -1  # inf - inf inside a product
    for args in ((q, q, q), (q, k, q)):
        assert torch.equal(
            flash_attn_func(*args).isnan(), attention_ref(*args, upcast=torch.float32).out.isnan()
        )


@pytest.mark.parametrize("scale", [None, -0.7, 40.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_few_scores(monkeypatch, lengths, dtype, scale):
    monkeypatch.setattr(cpu, "attend_by_flash", None)
    tensors = [x.detach() for x in make_qkv(*lengths, h_k=4, b=1, dtype=dtype)]
    expected = attention_ref(*tensors, softmax_scale=scale, upcast=torch.float64).out
    for q, k, v in (tensors, [x.mT.contiguous().mT for x in tensors]):
        out = flash_attn_func(q, k, v, softmax_scale=scale)
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=0)
        assert (out.dtype, regular(q)) == (dtype, out.stride() == q.stride())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("scale", [0.5, -2.0, 0.0, 1e-50])
def test_few_scores_that_are_not_finite_mean_what_the_reference_says(where, bad, scale):
    tensors = [x.detach().abs() for x in make_qkv(9, 11, h_k=4, b=1)]
    for key in (7, slice(None)):  # where all scores are -inf, all keys are hidden
        tensors[where][:, key, :, 3] = bad
        out, expected = (f(*tensors, softmax_scale=scale) for f in (flash_attn_func, attention_ref))
        torch.testing.assert_close(out, expected.out, equal_nan=True)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"softcap": 2.0}, {"alibi_slopes": torch.rand(4)}, {"dropout_p": 0.3}],
    ids=["plain", "causal", "softcap", "alibi", "dropout"],
)
@pytest.mark.parametrize("limit", [2**24, 100])
def test_gradients_are_laid_out_as_inputs(monkeypatch, limit, options, dtype, heads):
    monkeypatch.setattr(reference, "_MAX_BLOCK_SCORES", limit)
    tensors = [x.detach() for x in make_qkv(9, 11, h=heads[0], h_k=heads[1], dtype=dtype)]
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    expanded = [x[:1].expand(x.shape) for x in tensors]
    plain = not options or "causal" in options  # PyTorch's kernel always returns contiguous ones
    for leaves in [tensors] if plain else (tensors, heads_first, expanded):
        for x in leaves:
            x.requires_grad_()
        out = flash_attn_func(*leaves, **options)
        found = torch.autograd.grad(out.square().sum(), leaves)
        strides = [torch.empty_like(x).stride() for x in leaves]
        assert [x.stride() for x in found] == strides


@pytest.mark.parametrize(
    ("size", "scale"), [(1, 1e38), (1, -2.3e38), (1, 3.0), (1e18, 100.0), (1e-30, 1e38)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (3, 1)}, {"softcap": 5.0}, {"alibi_slopes": (4,)}],
    ids=str,
)
def test_scores_that_only_their_scale_takes_beyond_float32(options, dtype, size, scale):
    q, k, v = make_qkv(9, 11, dtype=dtype)
    q, k = ((x.detach() * size).requires_grad_() for x in (q, k))
    if "alibi_slopes" in options:
        options = {"alibi_slopes": torch.rand(4, generator=torch.Generator().manual_seed(0))}
    out, lse, _ = flash_attn_func(q, k, v, softmax_scale=scale, return_attn_probs=True, **options)
    exact = attention_ref(q, k, v, softmax_scale=scale, upcast=torch.float64, **options)
    torch.testing.assert_close(lse, exact.lse.float(), rtol=1e-4, atol=1e-4)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(out.double(), exact.out, rtol=tolerance, atol=tolerance)
    got = torch.autograd.grad(out.sum(), (q, k, v))
    expected = torch.autograd.grad(exact.out.sum(), (q, k, v))
    for g, e in zip(got, expected, strict=True):
        largest = e.abs().nan_to_num(posinf=0).max().item()  # cancelling terms are as large
        torch.testing.assert_close(g, e, rtol=tolerance, atol=max(tolerance, 1e-6 * largest))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("lengths", [(3, 4), (4, 3)], ids=str)
def test_derivatives_of_any_order(options, lengths):
    q, k, v = make_qkv(*lengths, h=2, h_k=1, d=2, b=1, dtype=torch.float64)

    def attend(q, k, v):
        out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **options)
        return out, torch.where(lse.isfinite(), lse, 0)

    # lse is returned in float32, too coarse for differences; its gradient is compared below.
    assert torch.autograd.gradcheck(lambda *x: attend(*x)[0], (q, k, v), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda *x: attend(*x)[0], (q, k, v))
    _, lse = attend(q, k, v)
    exact = attention_ref(q, k, v, **options).lse
    got = torch.autograd.grad(lse.square().sum(), (q, k))
    expected = torch.autograd.grad(torch.where(exact.isfinite(), exact, 0).square().sum(), (q, k))
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_window_beyond_the_lengths_is_none(dtype):
    q, k, v = make_qkv(8, 5, dtype=dtype)
    for size in (8, sys.maxsize, 2**70):
        for options in ({}, {"softcap": 1.0}):
            got = flash_attn_func(q, k, v, window_size=(size, size), **options)
            assert torch.equal(got, flash_attn_func(q, k, v, **options))
            got = flash_attn_func(q, k, v, window_size=(size, 0), **options)
            assert torch.equal(got, flash_attn_func(q, k, v, causal=True, **options))


SINK_OPTIONS = (
    {},
    {"causal": True},
    {"window_size": (4, 1)},
    {"softcap": 1.5},
    {"alibi_slopes": torch.tensor([0.5, 0.25])},
)


@pytest.mark.parametrize("lengths", [(9, 9), (9, 14), (14, 9), (9, 0), (0, 9)], ids=str)
@pytest.mark.parametrize("options", SINK_OPTIONS, ids=str)
def test_a_sink_of_minus_infinity_is_none(options, lengths):
    for dtype in DTYPES:
        q, k, v = make_qkv(*lengths, h=2, h_k=1, dtype=dtype)
        sinks = torch.full((2,), -math.inf)
        got = flash_attn_func(q, k, v, return_attn_probs=True, sinks=sinks, **options)
        expected = flash_attn_func(q, k, v, return_attn_probs=True, **options)
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("options", SINK_OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", [(9, 14), (14, 9)], ids=str)
def test_a_sink_is_a_key_without_a_value(options, lengths):
    # P = exp(s - lse) with lse = logaddexp(lse of the scores, sink)
    q, k, v = make_qkv(*lengths, h=2, h_k=1, dtype=torch.float64)
    sinks = torch.tensor([0.5, 9.0], dtype=torch.float64)
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, sinks=sinks, **options)
    plain, scores_lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    scores_lse = scores_lse.double()
    expected = torch.logaddexp(scores_lse, sinks[:, None])
    torch.testing.assert_close(lse.double(), expected, atol=1e-5, rtol=1e-5)
    weight = torch.exp(scores_lse - expected).transpose(1, 2)[..., None]
    torch.testing.assert_close(out, plain * weight, atol=1e-5, rtol=1e-5)
    empty = scores_lse.isinf()
    masked = not {"causal", "window_size"}.isdisjoint(options)
    assert empty.any() == (lengths == (14, 9) and masked)
    assert torch.equal(lse[empty], sinks[None, :, None].expand(lse.shape)[empty].float())
    assert not out.transpose(1, 2)[empty].any()


@pytest.mark.parametrize("options", SINK_OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", [(3, 4), (4, 3)], ids=str)
def test_gradient_of_sinks(options, lengths):
    q, k, v = make_qkv(*lengths, h=2, h_k=1, d=2, b=1, dtype=torch.float64)
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)

    def attend(q, k, v, sinks):
        return flash_attn_func(q, k, v, sinks=sinks, **options)

    inputs = (q, k, v, sinks)
    assert torch.autograd.gradcheck(attend, inputs, check_forward_ad=True)
    alone = (q.detach(), k.detach(), v.detach(), sinks)
    assert torch.autograd.gradcheck(attend, alone)
    assert torch.autograd.gradgradcheck(attend, inputs)
    # lse comes in float32, too coarse for differences
    _, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, sinks=sinks, **options)
    exact = attention_ref(q, k, v, sinks=sinks, **options).lse
    got = torch.autograd.grad(lse.square().sum(), (q, k, sinks))
    expected = torch.autograd.grad(exact.square().sum(), (q, k, sinks))
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, atol=1e-5, rtol=1e-5)


def test_forward_mode_derivative_by_sinks_that_want_a_gradient():
    q, k, v = (x.detach() for x in make_qkv(3, 4, dtype=torch.float64))
    sinks = torch.rand(4, dtype=torch.float64, requires_grad=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(sinks, torch.ones_like(sinks))
        tangent = forward_ad.unpack_dual(flash_attn_func(q, k, v, sinks=dual)).tangent
    step = 1e-6
    ends = [flash_attn_func(q, k, v, sinks=sinks + sign * step) for sign in (1, -1)]
    torch.testing.assert_close(tangent, (ends[0] - ends[1]) / (2 * step), atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0}], ids=str)
def test_forward_mode_derivative_by_the_gradient_of_the_output(options):
    q, k, v = make_qkv(9, 9, dtype=torch.float64)
    out = flash_attn_func(q, k, v, **options)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones_like(out), out.detach())
        grads = torch.autograd.grad(out, (q, k, v), dual, retain_graph=True)
        got = [forward_ad.unpack_dual(x).tangent for x in grads]
    for g, e in zip(got, torch.autograd.grad(out, (q, k, v), out.detach()), strict=True):
        torch.testing.assert_close(g, e)


@pytest.mark.usefixtures("flash_only")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(600, 700), (30, 20)], ids=str)
def test_gradient_of_sinks_through_the_kernel(lengths, dtype):
    q, k, v = make_qkv(*lengths, dtype=dtype)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True)
    out = flash_attn_func(q, k, v, causal=True, sinks=sinks)
    exact, _, _ = attention_ref(q, k, v, causal=True, sinks=sinks, upcast=torch.float64)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = torch.autograd.grad(out, (q, k, v, sinks), grad)
    expected = torch.autograd.grad(exact, (q, k, v, sinks), grad.double())
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 2e-5)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_sinks_that_are_not_finite_mean_what_the_reference_says(bad):
    q, k, v = (x.detach() for x in make_qkv(9, 9))
    sinks = torch.tensor([0.5, bad, 2.0, 0.0])
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, sinks=sinks)
    expected = attention_ref(q, k, v, sinks=sinks)
    torch.testing.assert_close(out, expected.out, equal_nan=True)
    torch.testing.assert_close(lse, expected.lse, equal_nan=True)


class _LargestTensor(TorchDispatchMode):
    """Records the number of elements in the largest storage that any operation returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("backward", [False, True])
def test_dropout_holds_no_more_than_a_block_of_the_mask(monkeypatch, backward):
    monkeypatch.setattr(reference, "_MAX_BLOCK_SCORES", 2**12)
    q, k, v = make_qkv(128, 128, d=4)
    tensors = cpu.Tensors(q, k, v, rng_state=torch.tensor([3, 4]))
    options = cpu.Options(0.5, dropout_p=0.5)
    with _LargestTensor() as largest, torch.set_grad_enabled(backward):
        out, _, _ = cpu.attend(tensors, options)
        if backward:
            out.sum().backward()
    assert largest.numel < 2**14  # there are 2**17 scores


@pytest.mark.parametrize("seqlen", [16, 256])  # norms of torch, then of BLAS
def test_the_plain_case_calls_little_but_the_kernel(seqlen):
    # A call of torch costs a few microseconds, and the kernel of a short sequence less than 50.
    q, k, v = (x.detach() for x in make_qkv(seqlen, seqlen, h=8, h_k=8, d=64))
    calls = []

    def record(frame, event, argument):
        if event == "c_call" and type(argument.__self__).__module__ == "torch":
            calls.append(argument.__name__)  # a method of a tensor

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        flash_attn_func(q, k, v, causal=True)
    finally:
        sys.setprofile(before)
    unwanted = "aminmax", "contiguous", "copy_", "detach", "new_empty", "to"
    made = [name for name in calls if name in unwanted]
    assert made == []
    assert calls.count("transpose") == 4 and calls.count("item") == 3


@pytest.mark.parametrize("limit", [2**24, 300])
def test_dropout_mask_is_the_same_in_every_use(monkeypatch, limit):
    monkeypatch.setattr(reference, "_MAX_BLOCK_SCORES", limit)
    q, k, v = make_qkv(12, 10, h_k=4)
    torch.manual_seed(1)
    out, _, dmask = flash_attn_func(q, k, v, 0.375, return_attn_probs=True)
    weights = torch.where(torch.signbit(dmask), 0, dmask) / (1 - 0.375)
    expected = torch.einsum("bhij,bjhd->bihd", weights, v)
    torch.testing.assert_close(out, expected)
    got = torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True)
    for g, e in zip(got, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(g, e, atol=1e-5, rtol=1e-4)
    torch.manual_seed(1)
    assert torch.equal(flash_attn_func(q, k, v, 0.375), out)


def test_dropout_drops_as_often_as_asked():
    q, k, v = make_qkv(200, 200, h_k=4)
    for default in (torch.float32, torch.bfloat16):  # its rounding must not change the odds
        torch.set_default_dtype(default)
        try:
            dmask = flash_attn_func(q, k, v, 0.002, return_attn_probs=True)[2]
        finally:
            torch.set_default_dtype(torch.float32)
        dropped = torch.signbit(dmask).double().mean().item()
        sigma = math.sqrt(0.002 / dmask.numel())
        assert abs(dropped - 0.002) < 5 * sigma


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "window_size": (3, 0)},
        {"dropout_p": 0.5},
        {"softcap": 1.0, "alibi_slopes": torch.rand(4)},
    ],
    ids=["plain", "window", "dropout", "alibi"],
)
def test_default_device_is_not_asked(options):
    q, k, v = make_qkv(6, 7)
    with torch.device("meta"):
        out, lse, dmask = flash_attn_func(q, k, v, return_attn_probs=True, **options)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(x.is_cpu for x in (out, lse, dmask, *grads))


def test_autocast_changes_nothing():
    q, k, v = make_qkv(9, 9, h_k=4, b=1)
    for options, atol in (({"causal": True}, 0), ({"softcap": 1.0}, 0), ({}, 1e-6)):
        with torch.set_grad_enabled(atol == 0):  # without a gradient few scores are products
            expected = flash_attn_func(q, k, v, **options)
            with torch.autocast("cpu", torch.bfloat16):
                out = flash_attn_func(q, k, v, **options)
            torch.testing.assert_close(out, expected, rtol=0, atol=atol)


def _second_derivatives(out, leaves):
    (first,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    return torch.autograd.grad(first.square().sum(), leaves)


@pytest.mark.parametrize(
    "gradients",
    [
        lambda out, lse, leaves: torch.autograd.grad(out.square().sum(), leaves),
        lambda out, lse, leaves: torch.autograd.grad(lse.square().sum(), leaves[:2]),
        lambda out, lse, leaves: _second_derivatives(out, leaves),
    ],
    ids=["out", "lse", "twice"],
)
@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 1.0}, {"dropout_p": 0.4}])
def test_autocast_changes_no_gradient(options, gradients):
    leaves = make_qkv(9, 9)
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        out, lse, _ = flash_attn_func(*leaves, return_attn_probs=True, **options)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(gradients(out, lse, leaves))
    for outside, inside in zip(*found, strict=True):
        assert torch.equal(outside, inside)


@pytest.mark.usefixtures("reference_only")
@pytest.mark.parametrize(
    "options",
    [{"softcap": 1.0}, {"dropout_p": 0.1}, {"alibi_slopes": torch.rand(4)}],
    ids=["softcap", "dropout", "alibi"],
)
def test_other_options_go_to_the_reference(options):
    q, k, v = make_qkv(6, 7)
    assert flash_attn_func(q, k, v, **options).isfinite().all()
