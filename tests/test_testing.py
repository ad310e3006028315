"""The tolerance rule: correct results pass with room to spare, and each planted fault is caught."""

import functools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashcute import flash_attn_func, testing
from flashcute.oracles import Shape, make_qkv, make_sparse_integer_qkv
from flashcute.reference import attention_ref
from flashcute.reference_tiled import flash_attention_2
from flashcute.testing import (
    Bound,
    check_backward,
    check_forward,
    compare_backward,
    compare_forward,
    expect_gradients,
)

HALVES = (torch.float16, torch.bfloat16)
SHAPE = Shape(b=2, seqlen_q=129, seqlen_k=203, h=4, h_k=2, d=64)


def exact(q, k, v, **options):
    """Returns (out, lse) of the reference in float64, rounded once."""
    out, lse, _ = attention_ref(q, k, v, upcast=torch.float64, **options)
    return out.to(q.dtype), lse.float()


def truncate(x, dtype):
    """Rounds towards zero instead of to nearest."""
    dropped_bits = {torch.float16: 13, torch.bfloat16: 16}[dtype]
    bits = x.float().contiguous().view(torch.int32)
    return ((bits >> dropped_bits) << dropped_bits).view(torch.float32).to(dtype)


# --- what is right passes ---


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(HALVES),
    sizes=st.tuples(
        st.integers(1, 3),
        st.sampled_from([1, 2, 31, 64, 97, 129]),
        st.sampled_from([1, 2, 15, 65, 128, 203]),
    ),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    d=st.sampled_from([8, 40, 64, 72, 128]),
    causal=st.booleans(),
    gain=st.sampled_from([1, 4]),
    seed=st.integers(0, 10**6),
)
def test_a_faithful_kernel_passes_with_room(*, dtype, sizes, heads, d, causal, gain, seed):
    q, k, v = make_qkv(Shape(*sizes, *heads, d), dtype, seed=seed)
    q = q * gain
    out, lse = flash_attention_2(q, k, v, causal=causal)
    report = check_forward(out, lse, q, k, v, causal=causal)
    # Over 6400 random problems the largest ratios seen were 0.48 for max and 0.53 for mean.
    assert report.max.ratio < 0.7
    assert report.mean.ratio < 0.7
    assert report.lse.ratio < 0.5


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
def test_every_option_reaches_the_reference(dtype):
    q, k, v = make_qkv(SHAPE, dtype)
    gen = torch.Generator().manual_seed(1)
    options = {
        "softmax_scale": 0.1,
        "causal": True,
        "window_size": (50, -1),
        "softcap": 5.0,
        "alibi_slopes": torch.rand(2, 4, generator=gen),
        "sinks": torch.randn(4, generator=gen),
        "attn_bias": torch.randn(4, 129, 203, generator=gen),
        "dropout_p": 0.2,
        "dropout_mask": torch.rand(2, 4, 129, 203, generator=gen) >= 0.2,
    }
    out, lse, _ = attention_ref(q, k, v, upcast=torch.float64, **options)
    lse = lse if dtype == torch.float64 else lse.float()
    check_forward(out.to(dtype), lse, q, k, v, **options)
    for name in ("softmax_scale", "window_size", "softcap", "alibi_slopes", "sinks", "attn_bias"):
        fewer = {key: value for key, value in options.items() if key != name}
        with pytest.raises(AssertionError, match="FAILED"):
            check_forward(out.to(dtype), lse, q, k, v, **fewer)


@pytest.mark.parametrize("sizes", [(0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 1, 1), (1, 9, 3)], ids=str)
def test_empty_and_masked_problems(sizes):
    q, k, v = make_qkv(Shape(*sizes, h=2, h_k=1, d=8), torch.bfloat16)
    report = check_forward(*exact(q, k, v, causal=True), q, k, v, causal=True)
    assert report.ok


def test_visible_nan_and_inf_are_expected_where_the_truth_has_them():
    q, k, v = make_qkv(Shape(1, 8, 8, 2, 2, 8), torch.float16)
    v[0, 5, 1, 3] = math.inf
    k[0, 6, 0, 0] = math.nan
    out, lse = exact(q, k, v, causal=True)
    assert check_forward(out, lse, q, k, v, causal=True).misplaced == 0
    clean_out = torch.where(out.isfinite(), out, 0)
    assert compare_forward(clean_out, lse, q, k, v, causal=True).misplaced == 3 + 2 * 8
    assert compare_forward(out, lse.nan_to_num(), q, k, v, causal=True).lse_misplaced == 2


def test_scores_beyond_float16_do_not_break_the_baseline():
    q, k, v = make_qkv(Shape(1, 16, 32, 1, 1, 64), torch.float16)
    q, k = q * 200, k * 200
    assert not attention_ref(q, k, v, reorder_ops=True).out.isfinite().all()
    check_forward(*exact(q, k, v), q, k, v)


def test_expanded_heads_count_as_one():
    q, _, _ = make_qkv(Shape(1, 3, 65, 1, 1, 64), torch.bfloat16)
    assert testing._independent_rows(q) == 3
    assert testing._independent_rows(q.expand(1, 3, 64, 64)) == 3
    assert testing._independent_rows(q.repeat(1, 1, 64, 1)) == 192


# --- what is wrong does not ---


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("causal", [False, True])
def test_catches_a_dropped_column(dtype, causal):
    q, k, v = make_qkv(SHAPE, dtype)
    lse = exact(q, k, v, causal=causal)[1]
    # Key 7 has no weight, as if it were lost between two tiles. The lse does not show it.
    bias = torch.zeros(203).index_fill(0, torch.tensor(7), -math.inf)
    out, wrong_lse = exact(q, k, v, causal=causal, attn_bias=bias)
    report = compare_forward(out, lse, q, k, v, causal=causal)
    assert report.max.ratio > 2
    assert report.mean.ratio > 1.5
    right_out = exact(q, k, v, causal=causal)[0]
    assert compare_forward(right_out, wrong_lse, q, k, v, causal=causal).lse.ratio > 10


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shift", [-1, 1])
def test_catches_an_off_by_one_mask(dtype, shift):
    q, k, v = make_qkv(SHAPE, dtype)
    out, wrong_lse = exact(q, k, v, window_size=(40 + shift, 0))
    right_out, lse = exact(q, k, v, window_size=(40, 0))
    check_forward(right_out, lse, q, k, v, window_size=(40, 0))
    with pytest.raises(AssertionError, match=r"max error .*FAILED(.|\n)*mean error .*FAILED"):
        check_forward(out, lse, q, k, v, window_size=(40, 0))
    with pytest.raises(AssertionError, match=r"lse error .*FAILED"):
        check_forward(right_out, wrong_lse, q, k, v, window_size=(40, 0))


@pytest.mark.parametrize("dtype", HALVES)
def test_catches_a_causal_mask_aligned_to_the_top_left(dtype):
    q, k, v = make_qkv(SHAPE, dtype)
    out, lse = exact(q, k[:, :129], v[:, :129], causal=True)
    with pytest.raises(AssertionError, match="FAILED"):
        check_forward(out, lse, q, k, v, causal=True)


@pytest.mark.parametrize("dtype", HALVES)
def test_catches_a_wrong_scale(dtype):
    q, k, v = make_qkv(SHAPE, dtype)
    out, wrong_lse = exact(q, k, v, softmax_scale=1.01 / 8)
    right_out, lse = exact(q, k, v)
    assert not compare_forward(out, lse, q, k, v).mean.ok
    assert not compare_forward(right_out, wrong_lse, q, k, v).lse.ok


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("fill", [math.nan, math.inf, 0.0])
def test_catches_an_unwritten_row(dtype, fill):
    q, k, v = make_qkv(SHAPE, dtype)
    out, lse = exact(q, k, v)
    out[1, 128, 2] = fill
    with pytest.raises(AssertionError) as caught:
        check_forward(out, lse, q, k, v)
    assert "out[1, 128, 2, " in str(caught.value)
    if fill != 0:
        assert "misplaced   64 in out" in str(caught.value)


@pytest.mark.parametrize("fill", [math.nan, -math.inf, math.inf, 0.0])
def test_catches_an_unwritten_lse(fill):
    q, k, v = make_qkv(SHAPE, torch.bfloat16)
    out, lse = exact(q, k, v)
    lse[1, 2, 128] = fill
    report = compare_forward(out, lse, q, k, v)
    assert not report.ok
    assert report.lse_misplaced == (fill != 0)
    assert compare_forward(out, None, q, k, v).ok


@pytest.mark.parametrize("value", [1e-4, math.nan])
def test_catches_a_masked_row_that_is_not_zero(value):
    q, k, v = make_qkv(Shape(1, 9, 3, 2, 1, 8), torch.bfloat16)
    out, lse = exact(q, k, v, causal=True)
    out[0, 2, 1, 5] = value
    report = compare_forward(out, lse, q, k, v, causal=True)
    assert report.misplaced == 1
    assert report.worst == (0, 2, 1, 5)
    lse[0, 0, 0] = math.inf  # FlashAttention-2 has it for "no key"
    assert compare_forward(out, lse, q, k, v, causal=True).lse_misplaced == 1


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("where", ["out", "p", "both"])
def test_catches_rounding_to_one_side(dtype, where):
    q, k, v = make_qkv(SHAPE, dtype)
    _, lse, p = attention_ref(q, k, v, upcast=torch.float64, return_probs=True)
    row_max = p.amax(-1, keepdim=True)
    p = p / row_max  # a kernel rounds exp(s - m)
    if where != "out":
        p = truncate(p, dtype).double()
    out = (p @ v.double().transpose(1, 2).repeat_interleave(2, 1) * row_max).transpose(1, 2)
    out = out.to(dtype) if where == "p" else truncate(out, dtype)
    report = compare_forward(out, lse.float(), q, k, v)
    assert report.max.ok  # the maximum alone would pass
    assert report.drift.ratio > 1.5
    with pytest.raises(AssertionError, match=r"drift .*FAILED"):
        check_forward(out, lse.float(), q, k, v)
    assert compare_forward(out, lse.float(), q, k, v, check_drift=False).drift.ok


@pytest.mark.parametrize("dtype", HALVES)
def test_catches_output_that_passed_through_a_coarser_type(dtype):
    q, k, v = make_qkv(SHAPE, dtype)
    out, lse = exact(q, k, v)
    coarse = torch.bfloat16 if dtype == torch.float16 else torch.float8_e4m3fn
    report = compare_forward(out.to(coarse).to(dtype), lse, q, k, v)
    assert not report.mean.ok


def test_catches_a_swapped_head():
    q, k, v = make_qkv(SHAPE, torch.bfloat16)
    out, lse = exact(q, k[:, :, [1, 0]], v[:, :, [1, 0]])
    with pytest.raises(AssertionError, match="FAILED"):
        check_forward(out, lse, q, k, v)


def test_sparse_integers_show_small_faults():
    q, k, v = make_sparse_integer_qkv(SHAPE, torch.bfloat16)
    out, lse = flash_attention_2(q, k, v)
    check_forward(out, lse, q, k, v, check_drift=False)
    out, _ = flash_attention_2(q[:, :, :, 1:], k[:, :, :, 1:], v, softmax_scale=1 / 8)
    with pytest.raises(AssertionError, match="FAILED"):
        check_forward(out, lse, q, k, v, check_drift=False)


# --- the machinery ---


@pytest.mark.parametrize("limit", [1, 40_000, 90_000])
def test_pieces_change_nothing(monkeypatch, limit):
    q, k, v = make_qkv(SHAPE, torch.bfloat16)
    gen = torch.Generator().manual_seed(1)
    options = {
        "alibi_slopes": torch.rand(2, 4, generator=gen),
        "sinks": torch.randn(4, generator=gen),
        "attn_bias": torch.randn(4, 1, 203, generator=gen),
        "dropout_p": 0.2,
        "dropout_mask": torch.rand(2, 1, 129, 203, generator=gen) >= 0.2,
    }
    out, lse = exact(q, k, v, **options)
    out[1, 70, 3, 9] += 1
    whole = compare_forward(out, lse, q, k, v, **options)
    assert whole.worst == (1, 70, 3, 9)
    monkeypatch.setattr(testing, "_MAX_PIECE_ELEMENTS", limit)
    pieces = list(testing._pieces(q, k))
    assert len(pieces) > 1
    in_pieces = compare_forward(out, lse, q, k, v, **options)
    assert in_pieces.worst == whole.worst
    assert in_pieces.misplaced == whole.misplaced == 0
    for name in ("max", "mean", "drift", "lse"):
        a, b = getattr(in_pieces, name), getattr(whole, name)
        assert (a.error, a.allowed) == pytest.approx((b.error, b.allowed), rel=1e-9, abs=1e-15)


def test_bound():
    assert Bound(0.0, 0.0).ok
    assert Bound(0.5, 1.0).ratio == 0.5
    assert Bound(1.0, 1.0).ok
    assert not Bound(1.0, 0.0).ok
    assert not Bound(math.nan, 1.0).ok
    assert "FAILED" in str(Bound(2.0, 1.0))
    assert "FAILED" not in str(Bound(0.5, 1.0))


def test_a_report_says_what_misplaced_elements_are():
    q, k, v = make_qkv(Shape(1, 4, 4, 2, 1, 8), torch.float16)
    out, lse = exact(q, k, v)
    assert "NaN" not in str(compare_forward(out, lse, q, k, v))
    report = str(compare_forward(torch.full_like(out, math.nan), lse, q, k, v))
    explained = r"{} in out, 0 in lse: NaN or infinite where the reference is finite or the other"
    assert re.search(explained.format(out.numel()), report)
    zeros = {"dq": q * 0, "dk": k * 0, "dv": v * math.nan}
    reports = compare_backward(zeros, q, k, v, out)
    assert "misplaced 32: NaN or infinite where the reference is finite" in str(reports["dv"])
    assert "NaN" not in str(reports["dq"])


def test_the_message_names_problem_and_options():
    q, k, v = make_qkv(Shape(1, 4, 4, 2, 1, 8), torch.float16)
    out, lse = exact(q, k, v)
    with pytest.raises(AssertionError, match=r"q=\(1, 4, 2, 8\).*float16 causal=True sinks=\(2,\)"):
        check_forward(out + 1, lse, q, k, v, causal=True, sinks=torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_allowed_where_every_result_is_representable(dtype: torch.dtype) -> None:
    # All rows of V are equal, so the true output is that row, which the baseline nearly always
    # finds. A kernel that rounds P before it divides by the sum is one ulp off in places (on a GPU
    # for 1 element in 100).
    generator = torch.Generator().manual_seed(33)
    q, k = (torch.randn(1, 200, 3, 128, generator=generator).to(dtype) for _ in range(2))
    v = torch.randn(1, 1, 3, 128, generator=generator).to(dtype).expand(1, 200, 3, 128)
    _, lse, _ = attention_ref(q, k, v, softmax_scale=0.05, upcast=torch.float64)
    off = torch.rand(v.shape, generator=generator) < 0.01
    out = torch.where(off, torch.nextafter(v, torch.zeros_like(v)), v)
    check_forward(out, lse, q, k, v, softmax_scale=0.05, check_drift=False)
    everywhere = torch.nextafter(v, torch.zeros_like(v))
    with pytest.raises(AssertionError, match=r"mean error.*FAILED"):
        check_forward(everywhere, lse, q, k, v, softmax_scale=0.05, check_drift=False)


def test_one_ulp_is_allowed_where_the_baseline_is_exact() -> None:
    # One row of Q and of V is repeated, so there are 72 outputs, all representable, which the
    # baseline finds. On a GPU one of them was an ulp off.
    v = torch.full((1, 1, 1, 72), 2.5, dtype=torch.float16).expand(1, 96, 1, 72)
    q = torch.ones(1, 47, 1, 72, dtype=torch.float16)
    k = torch.linspace(-1, 1, 96).to(torch.float16)[None, :, None, None].expand(1, 96, 1, 72)
    ref, lse, _ = attention_ref(q, k, v, softmax_scale=0.5, upcast=torch.float64)
    out = ref.to(torch.float16)
    out[0, 0, 0, 25] = torch.nextafter(out[0, 0, 0, 25], torch.zeros_like(out[0, 0, 0, 25]))
    check_forward(out, lse, q, k, v, softmax_scale=0.5, check_drift=False)
    out[0, 0, 0, 25] -= 4 * 2.0**-9
    with pytest.raises(AssertionError, match=r"max error.*FAILED"):
        check_forward(out, lse, q, k, v, softmax_scale=0.5, check_drift=False)


# --- gradients ---


def backward_problem(dtype, **options):
    """Returns q, k, v, dout, options, and the exact gradients rounded once."""
    q, k, v = make_qkv(SHAPE, dtype)
    gen = torch.Generator().manual_seed(1)
    dout = torch.randn(SHAPE.q, generator=gen).to(dtype)
    dlse = torch.randn(SHAPE.b, SHAPE.h, SHAPE.seqlen_q, generator=gen)
    options = {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), **options}
    inputs = [x.double().requires_grad_() for x in (q, k, v, options["sinks"])]
    out, lse, _ = attention_ref(
        *inputs[:3], **{**options, "sinks": inputs[3]}, upcast=torch.float64
    )
    found = torch.autograd.grad([out, lse], inputs, [dout.double(), dlse.double()])
    gradients = {n: x.to(dtype) for n, x in zip(("dq", "dk", "dv"), found[:3], strict=True)}
    return (q, k, v, dout), {"dlse": dlse, **options}, {**gradients, "dsinks": found[3].float()}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (30, 5)}], ids=str)
def test_exact_gradients_pass_with_room(dtype, options):
    tensors, options, gradients = backward_problem(dtype, **options)
    for report in check_backward(gradients, *tensors, **options).values():
        assert report.max.ratio < 0.5 and report.mean.ratio < 0.5


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "dsinks"])
@pytest.mark.parametrize(
    "fault",
    [
        lambda x: x * 1.02,
        lambda x: x.roll(1, 0),
        lambda x: torch.where(x == x.flatten()[0], math.nan, x),
    ],
    ids=("grown", "shifted", "nan"),
)
def test_wrong_gradient_is_found_and_named(name, fault):
    tensors, options, gradients = backward_problem(torch.float16, causal=True)
    wrong = {**gradients, name: fault(gradients[name])}
    reports = compare_backward(wrong, *tensors, **options)
    assert [n for n, report in reports.items() if not report.ok] == [name]
    with pytest.raises(AssertionError, match=f"gradients are wrong for .*\n{name}: max error"):
        check_backward(wrong, *tensors, **options)


def test_what_is_expected_may_be_computed_once():
    (q, k, v, dout), options, gradients = backward_problem(torch.float16, causal=True)
    given = {name: x for name, x in options.items() if name != "dlse"}
    expected = expect_gradients((q, k, v), dout, options.get("dlse"), given)
    wrong = {**gradients, "dk": gradients["dk"] * 1.02}
    for found in (gradients, wrong):
        reports = compare_backward(found, q, k, v, dout, expected=expected, **options)
        assert reports == compare_backward(found, q, k, v, dout, **options)
    with pytest.raises(AssertionError) as raised:
        check_backward(wrong, q, k, v, dout, expected=expected, **options)
    assert "expected" not in str(raised.value)


def test_equal_rows_are_rounded_alike():
    """A backward that reads the rounded O must pass, here with a sink of 777 equal rows."""
    generator = torch.Generator().manual_seed(9)
    q, dout = (torch.randn(1, 1, 1, 128, generator=generator).half() for _ in range(2))
    q, dout = (x.expand(1, 777, 1, 128) for x in (q, dout))
    k, v = (torch.randn(1, 16, 1, 128, generator=generator).half() for _ in range(2))
    sinks = torch.tensor([1.0])
    inputs = [x.double().requires_grad_() for x in (q, k, v, sinks)]
    out, lse, _ = attention_ref(*inputs[:3], sinks=inputs[3], upcast=torch.float64)
    gradients = dict(
        zip(("dq", "dk", "dv"), torch.autograd.grad(out, inputs[:3], dout.double()), strict=True)
    )
    gradients = {name: x.half() for name, x in gradients.items()}
    share = torch.exp(sinks - lse.detach())  # (b, h, seqlen_q)

    def of_sinks(rounded):
        return -(share * (rounded * dout.double()).sum(-1).transpose(1, 2)).sum((0, 2))

    gradients["dsinks"] = of_sinks(out.detach().half().double()).float()
    check_backward(gradients, q, k, v, dout, sinks=sinks)
    # The weights of equal rows are rounded alike, too, and their errors reach O.
    scores = (q.double().transpose(1, 2) @ k.double().transpose(1, 2).mT) * 128**-0.5
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top).half().double() * torch.exp(top - lse.detach()[..., None])
    of_p = (weights @ v.double().transpose(1, 2)).transpose(1, 2).half().double()
    gradients["dsinks"] = of_sinks(of_p).float()
    check_backward(gradients, q, k, v, dout, sinks=sinks)
    gradients["dsinks"] = of_sinks(1.01 * out.detach()).float()
    with pytest.raises(AssertionError, match="dsinks: max error"):
        check_backward(gradients, q, k, v, dout, sinks=sinks)


def test_the_rounding_of_weights_reaches_the_sinks():
    """A backward of 64 sinks that reads the O of a forward with P in bf16 must pass.

    Of 1,667 draws this is the first that an allowance for the rounding of O alone did not pass.
    """
    generator = torch.Generator().manual_seed(1666)

    def make(n):
        return torch.randn(1, n, 64, 64, generator=generator).bfloat16()

    q, dout, k, v = (make(n) for n in (2, 2, 16, 16))
    sinks = torch.randn(64, generator=generator)
    inputs = [x.double().requires_grad_() for x in (q, k, v, sinks)]
    out, _, _ = attention_ref(*inputs[:3], sinks=inputs[3], upcast=torch.float64)
    *exact, of_sinks = torch.autograd.grad(out, inputs, dout.double())
    gradients = dict(zip(("dq", "dk", "dv"), (x.bfloat16() for x in exact), strict=True))

    tq, tk, tv, to = (x.double().transpose(1, 2) for x in (q, k, v, dout))
    scores = tq @ tk.mT / 8  # (1, h, 2, 16)
    top = scores.amax(-1, keepdim=True)
    of_sink = torch.exp(sinks[:, None, None] - top)
    total = torch.exp(scores - top).sum(-1, keepdim=True) + of_sink
    rounded = (torch.exp(scores - top).bfloat16().double() @ tv / total).bfloat16().double()
    found = -(of_sink / total * rounded * to).sum((0, 2, 3))
    check_backward({**gradients, "dsinks": found.float()}, q, k, v, dout, sinks=sinks)
    wrong = of_sinks + 2 * (found - of_sinks)
    with pytest.raises(AssertionError, match="dsinks: max error"):
        check_backward({**gradients, "dsinks": wrong.float()}, q, k, v, dout, sinks=sinks)


def test_the_gradient_of_sinks_is_summed_up_in_float32():
    """For rows that see no key it is the sum of dlse: 8,192 numbers that nearly cancel."""
    dlse = torch.randn(1, 4, 8192, generator=torch.Generator().manual_seed(1))
    q, dout = torch.zeros(2, 1, 8192, 4, 8, dtype=torch.bfloat16)
    k, v = q[:, :0], q[:, :0]
    gradients = {"dq": q, "dk": k, "dv": v}
    found = functools.reduce(torch.add, dlse.split(32, 2)).sum((0, 2))
    options = {"dlse": dlse, "sinks": torch.zeros(4)}
    check_backward({**gradients, "dsinks": found}, q, k, v, dout, **options)
    with pytest.raises(AssertionError, match="dsinks: max error"):
        check_backward({**gradients, "dsinks": found + 2e-4}, q, k, v, dout, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_key_leaves_the_float32_rounding_of_ds(dtype):
    """P = 1, so dS = dP - D is 0 except for the order of two float32 sums; D is not rounded."""
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(2, 300, 8, 128, generator=generator).to(dtype) for _ in range(2))
    k, v = (torch.randn(2, 1, 2, 128, generator=generator).to(dtype) for _ in range(2))
    scale = 128**-0.5
    heads = [x.float().repeat_interleave(4, 2) for x in (k, v)]
    product = dout.float() * heads[1]

    def gradients(d):
        ds = product.sum(-1) - d
        dq = ds[..., None] * heads[0] * scale
        dk = (ds[..., None] * q.float() * scale).sum(1, keepdim=True).unflatten(2, (2, 4)).sum(3)
        dv = dout.double().sum(1, keepdim=True).unflatten(2, (2, 4)).sum(3)
        return {"dq": dq.to(dtype), "dk": dk.to(dtype), "dv": dv.to(dtype)}

    reordered = product.flip(-1).unflatten(-1, (16, 8)).sum(-1).sum(-1)
    found = gradients(reordered)
    assert found["dq"].any() and found["dk"].any()
    check_backward(found, q, k, v, dout)
    reports = compare_backward(gradients(reordered.to(dtype).float()), q, k, v, dout)
    assert [name for name, report in reports.items() if report.ok] == ["dv"]


def test_gradients_of_what_is_hidden_are_exactly_zero():
    tensors, options, gradients = backward_problem(torch.bfloat16, window_size=(10, 0))
    assert not gradients["dk"][:, :60].any()  # 203 - 129 keys come before the first query
    for name in ("dk", "dv"):
        wrong = gradients[name].clone()
        wrong[0, 0, 0, 0] = 1e-30
        report = compare_backward({**gradients, name: wrong}, *tensors, **options)[name]
        assert report.misplaced == 1 and not report.ok


# --- 32 and 64 bits ---


def computed(dtype, shape, causal, seed, keys=None, **options):
    """Returns what the CPU computes of seeded q, k, v and dout, and these four tensors."""
    generator = torch.Generator().manual_seed(seed)
    *qkv, dout = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(4))
    if keys:
        b, _, h, d = shape
        qkv[1:] = (torch.randn(b, keys, h, d, generator=generator, dtype=dtype) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in qkv]
    out, lse, _ = flash_attn_func(*leaves, causal=causal, return_attn_probs=True, **options)
    gradients = torch.autograd.grad(out, leaves, dout)
    named = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return out.detach(), lse.detach(), named, (*qkv, dout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("shape", "seeds"),
    [
        *(((1, 2, 1, 8), 100), ((1, 4, 2, 8), 20), ((2, 16, 2, 16), 10)),
        *(((1, 64, 4, 32), 5), ((2, 128, 4, 64), 3)),
    ],
    ids=str,
)
def test_accumulated_rounding_is_allowed_in_32_and_64_bits(dtype, causal, shape, seeds):
    for seed in range(seeds):
        out, lse, gradients, (q, k, v, dout) = computed(dtype, shape, causal, seed)
        check_forward(out, lse, q, k, v, causal=causal)
        check_backward(gradients, q, k, v, dout, causal=causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("rows", "keys", "options"),
    [
        *((*sizes, {"window_size": (1, 0)}) for sizes in ((1, 2), (1, 64), (4, 4), (30, 100))),
        *((n, n, {"softmax_scale": -1.0}) for n in (1, 2, 3)),
    ],
    ids=str,
)
def test_few_keys_are_allowed_the_rounding_of_ds(dtype, rows, keys, options):
    for seed in range(40):
        *_, gradients, tensors = computed(dtype, (1, rows, 2, 8), True, seed, keys, **options)
        check_backward(gradients, *tensors, causal=True, **options)


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e4])
def test_keys_that_no_query_sees_allow_nothing(value):
    options = {"causal": True, "window_size": (1, 0)}
    *_, gradients, (q, k, v, dout) = computed(
        torch.float32, (1, 4, 2, 8), keys=16, seed=0, **options
    )
    k[:, :10], v[:, :10] = value, value
    check_backward(gradients, q, k, v, dout, **options)
    for name in ("dq", "dk"):
        wrong = {**gradients, name: 1.001 * gradients[name]}
        reports = compare_backward(wrong, q, k, v, dout, **options)
        assert [n for n, report in reports.items() if not report.max.ok] == [name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 4, 2, 8), (2, 128, 4, 64)], ids=str)
def test_one_element_that_is_off_by_more_is_found(dtype, shape):
    out, lse, gradients, (q, k, v, dout) = computed(dtype, shape, True, 0)
    for name, x in {"out": out, **gradients}.items():
        wrong = x.clone()
        wrong[0, 2, 1, 3] += 1000 * torch.finfo(dtype).eps * x.abs().max()
        if name == "out":
            assert not compare_forward(wrong, lse, q, k, v, causal=True).max.ok
            continue
        reports = compare_backward({**gradients, name: wrong}, q, k, v, dout, causal=True)
        assert [n for n, report in reports.items() if not report.max.ok] == [name]


@pytest.mark.parametrize("dtype", HALVES)
def test_16_bits_are_allowed_no_accumulated_rounding(dtype):
    q, k, _ = make_qkv(SHAPE, dtype)
    assert testing._accumulation_noise(q, k) == 0
    assert testing._accumulation_noise(q.float(), k.float()) > 0
