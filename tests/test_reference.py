"""The reference against explicit loops in float64, PyTorch's SDPA and its documented semantics."""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from flashcute import reference
from flashcute.reference import attention_ref, visible_keys

F64 = torch.float64


def make_qkv(*, b=2, sq=5, sk=7, h=4, h_k=2, d=3, d_v=None, dtype=F64, seed=0):
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(b, sq, h, d, dtype=F64, generator=gen)
    k = torch.randn(b, sk, h_k, d, dtype=F64, generator=gen)
    v = torch.randn(b, sk, h_k, d_v or d, dtype=F64, generator=gen)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def attention_by_loops(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    attn_bias=None,
    dropout_p=0.0,
    dropout_mask=None,
):
    """Computes attention with Python floats, key by key, without any code of the reference."""
    b, sq, h, d = q.shape
    sk, h_k, d_v = v.shape[1:]
    scale = 1 / math.sqrt(d) if softmax_scale is None else softmax_scale
    qs, ks, vs = q.tolist(), k.tolist(), v.tolist()
    out = torch.zeros(b, sq, h, d_v, dtype=F64)
    lse = torch.full((b, h, sq), -math.inf, dtype=F64)
    for n in range(b):
        for head in range(h):
            kv = head * h_k // h
            for i in range(sq):
                exps = {}  # from each visible key
                for j in range(sk):
                    ahead = j - (i + sk - sq)  # > 0 for future keys
                    if causal and ahead > 0:
                        continue
                    if window_size[0] != -1 and ahead < -window_size[0]:
                        continue
                    if window_size[1] != -1 and not causal and ahead > window_size[1]:
                        continue
                    s = scale * sum(
                        x * y for x, y in zip(qs[n][i][head], ks[n][j][kv], strict=True)
                    )
                    if softcap:
                        s = softcap * math.tanh(s / softcap)
                    if alibi_slopes is not None:
                        slope = alibi_slopes.expand(b, h)[n, head].item()
                        s -= slope * abs(ahead)
                    if attn_bias is not None:
                        s += attn_bias.expand(b, h, sq, sk)[n, head, i, j].item()
                    exps[j] = math.exp(s)
                total = sum(exps.values())
                if sinks is not None:
                    total += math.exp(sinks[head].item())
                if total == 0:
                    continue  # every visible key has a bias of -inf
                lse[n, head, i] = math.log(total)
                for j, exp in exps.items():
                    p = exp / total
                    if dropout_p:
                        keep = dropout_mask.expand(b, h, sq, sk)[n, head, i, j].item()
                        p = p / (1 - dropout_p) if keep else 0.0
                    for c in range(d_v):
                        out[n, i, head, c] += p * vs[n][j][kv][c]
    return out, lse


def check_against_loops(q, k, v, **options):
    expected_out, expected_lse = attention_by_loops(q, k, v, **options)
    out, lse, _ = attention_ref(q, k, v, **options)
    torch.testing.assert_close(out, expected_out, atol=1e-13, rtol=1e-12)
    torch.testing.assert_close(lse, expected_lse, atol=1e-13, rtol=1e-12)


FEATURES = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "window_left": {"window_size": (1, -1)},
    "window_right": {"window_size": (-1, 0)},
    "window_diagonal": {"window_size": (0, 0)},
    "window_causal": {"window_size": (2, 3), "causal": True},
    "window_right_ge_sk": {"window_size": (-1, 7)},
    "window_left_gt_sk": {"window_size": (8, 1)},
    "softcap": {"softcap": 0.7},
    "alibi_h": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 1.0])},
    "alibi_bh": {"alibi_slopes": torch.arange(8, dtype=torch.float32).reshape(2, 4) / 8},
    "sinks": {"sinks": torch.tensor([0.0, 1.5, -2.0, -math.inf])},
    "dropout": {"dropout_p": 0.3, "dropout_mask": None},
    "bias": {"attn_bias": None},
    "all": {
        "causal": True,
        "window_size": (3, -1),
        "softcap": 1.5,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 1.0]),
        "sinks": torch.tensor([0.0, 1.5, -2.0, 0.3]),
        "attn_bias": None,
        "dropout_p": 0.25,
        "dropout_mask": None,
    },
}


def draw_masks(options, b, h, sq, sk):
    """Returns a feature's options, with the tensors whose shapes depend on the lengths."""
    gen = torch.Generator().manual_seed(7)
    options = dict(options)
    if "dropout_mask" in options:
        options["dropout_mask"] = torch.rand(b, h, sq, sk, generator=gen) >= options["dropout_p"]
    if "attn_bias" in options:
        bias = torch.randn(1, h, sq, sk, dtype=F64, generator=gen)
        options["attn_bias"] = bias.masked_fill(bias > 1, -math.inf)
    return options


@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (1, 7), (7, 1), (6, 6)], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_feature_matches_loops(feature, lengths):
    sq, sk = lengths
    q, k, v = make_qkv(sq=sq, sk=sk, d_v=2)
    check_against_loops(q, k, v, **draw_masks(FEATURES[feature], 2, 4, sq, sk))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (6, 2)]),
    causal=st.booleans(),
    window=st.tuples(st.integers(-1, 11), st.integers(-1, 11)),
    softcap=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 1000),
)
def test_masks_match_loops(*, lengths, heads, causal, window, softcap, seed):
    q, k, v = make_qkv(b=1, sq=lengths[0], sk=lengths[1], h=heads[0], h_k=heads[1], d=2, seed=seed)
    check_against_loops(q, k, v, causal=causal, window_size=window, softcap=softcap)


@pytest.mark.parametrize("size", [2**31, sys.maxsize, 2**70])
@pytest.mark.parametrize("lengths", [(8, 8), (9, 3), (3, 9), (8, 0), (0, 8)], ids=str)
def test_a_window_beyond_the_lengths_is_none(lengths, size):
    # A position plus or minus such a bound does not fit into int64.
    everything = torch.ones(lengths, dtype=torch.bool)
    assert torch.equal(visible_keys(*lengths, window_size=(size, size)), everything)
    assert torch.equal(visible_keys(*lengths, window_size=(size, -1)), everything)
    assert torch.equal(visible_keys(*lengths, window_size=(-1, size)), everything)
    causal = visible_keys(*lengths, causal=True)
    assert torch.equal(visible_keys(*lengths, window_size=(size, 0)), causal)
    assert torch.equal(visible_keys(*lengths, causal=True, window_size=(size, size)), causal)


@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (1, 4), (4, 1), (0, 3), (3, 0)], ids=str)
def test_window_bounds_hide_what_the_window_hides(lengths):
    sq, sk = lengths
    for left in range(-1, 10):
        for right in range(-1, 10):
            for causal in (False, True):
                bounds = reference.window_bounds(sq, sk, causal, (left, right))
                assert max(bounds) < max(sq, sk, 1)
                expected = torch.tensor(
                    [
                        [
                            (left < 0 or j >= i + sk - sq - left)
                            and (right < 0 or j <= i + sk - sq + right or causal)
                            and (not causal or j <= i + sk - sq)
                            for j in range(sk)
                        ]
                        for i in range(sq)
                    ]
                ).reshape(sq, sk)
                assert torch.equal(visible_keys(sq, sk, window_size=bounds), expected.bool())


@pytest.mark.parametrize("limit", [reference._MAX_BLOCK_SCORES, 60])
def test_dropout_mask_may_be_a_function_of_the_block(monkeypatch, limit):
    monkeypatch.setattr(reference, "_MAX_BLOCK_SCORES", limit)
    q, k, v = (x.requires_grad_() for x in make_qkv())
    mask = torch.rand(2, 4, 5, 7, generator=torch.Generator().manual_seed(0)) >= 0.4
    asked = []

    def part(batch, rows):
        asked.append((batch, rows))
        return mask[batch, :, rows]

    out = attention_ref(q, k, v, dropout_p=0.4, dropout_mask=part).out
    expected = attention_ref(q, k, v, dropout_p=0.4, dropout_mask=mask).out
    assert torch.equal(out, expected)
    got = torch.autograd.grad(out.square().sum(), (q, k, v))
    for g, e in zip(got, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True):
        assert torch.equal(g, e)
    assert len(asked) == (1 if limit > 60 else 2 * len(set(map(str, asked))))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("lengths", [(33, 33), (1, 50), (20, 61)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_matches_sdpa(*, dtype, heads, lengths, causal):
    sq, sk = lengths
    q, k, v = make_qkv(sq=sq, sk=sk, h=heads[0], h_k=heads[1], d=16, dtype=dtype)
    # SDPA's own is_causal is aligned to the top-left corner, so the mask is passed in.
    mask = torch.ones(sq, sk, dtype=torch.bool).tril(sk - sq) if causal else None
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in leaves), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention_ref(*ours, causal=causal).out
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    for x, y in zip(
        torch.autograd.grad(out, ours, grad),
        torch.autograd.grad(expected, leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


def test_probs_are_the_softmax_before_dropout():
    q, k, v = make_qkv()
    options = draw_masks({"dropout_p": 0.5, "dropout_mask": None}, 2, 4, 5, 7)
    out, lse, probs = attention_ref(q, k, v, causal=True, return_probs=True, **options)
    assert attention_ref(q, k, v, causal=True, **options).probs is None
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, 4, 5, dtype=F64))
    k_all, v_all = (x.repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k_all) / math.sqrt(3)
    expected = (scores - lse[..., None]).exp() * visible_keys(5, 7, causal=True)
    torch.testing.assert_close(probs, expected)
    kept = probs * options["dropout_mask"] * 2
    torch.testing.assert_close(out, torch.einsum("bhij,bjhd->bihd", kept, v_all))


# --- rows that see nothing, empty tensors ---


@pytest.mark.parametrize("feature", FEATURES)
def test_fully_masked_rows_are_zero_forward_and_backward(feature):
    sq, sk = 9, 3  # bottom-right: the first six rows see nothing
    q, k, v = (x.requires_grad_() for x in make_qkv(sq=sq, sk=sk))
    options = {**draw_masks(FEATURES[feature], 2, 4, sq, sk), "causal": True}
    out, lse, _ = attention_ref(q, k, v, **options)
    assert torch.all(out[:, :6] == 0)
    if options.get("sinks") is None:
        assert torch.all(lse[..., :6] == -math.inf)
    else:
        sinks = options["sinks"].to(F64)[None, :, None].expand(2, 4, 6)
        torch.testing.assert_close(lse[..., :6], sinks)
    finite = torch.where(lse.isfinite(), lse, 0)
    grads = torch.autograd.grad(out.square().sum() + finite.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert torch.all(grads[0][:, :6] == 0)
    assert torch.any(grads[0][:, 6:] != 0)


def test_a_masked_row_stays_out_whatever_q_and_dout_hold():
    q, k, v = make_qkv(sq=9, sk=3)
    grad = torch.randn_like(q)
    clean = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(attention_ref(*clean, causal=True).out, clean, grad)
    q[:, :6] = math.nan
    grad[:, :6] = math.inf
    dirty = [x.clone().requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(attention_ref(*dirty, causal=True).out, dirty, grad)
    for x, y in zip(grads, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("b", [0, 2])
@pytest.mark.parametrize("sq", [0, 1, 4])
@pytest.mark.parametrize("sk", [0, 1, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sinks", [None, torch.zeros(4)])
def test_empty_tensors(*, b, sq, sk, causal, sinks):
    q, k, v = (x.requires_grad_() for x in make_qkv(b=b, sq=sq, sk=sk))
    out, lse, probs = attention_ref(q, k, v, causal=causal, sinks=sinks, return_probs=True)
    assert out.shape == (b, sq, 4, 3)
    assert lse.shape == (b, 4, sq)
    assert probs.shape == (b, 4, sq, sk)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    if sk == 0:
        assert torch.all(out == 0)
        assert torch.all(lse == (-math.inf if sinks is None else 0))


# --- NaN and Inf do not leak ---


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["k", "v", "kv"])
@pytest.mark.parametrize("feature", ["causal", "window_causal", "softcap", "all"])
def test_hidden_nan_and_inf_never_leak_forward(feature, where, bad):
    q, k, v = make_qkv(sq=6, sk=8)
    options = {**draw_masks(FEATURES[feature], 2, 4, 6, 8), "causal": True}
    expected = attention_ref(q, k, v, **options)
    k[:, 5:] = bad if "k" in where else k[:, 5:]  # rows 0, 1, 2 are at positions 2, 3, 4
    v[0, 5, 0, 1] = bad if "v" in where else v[0, 5, 0, 1]
    out, lse, _ = attention_ref(q, k, v, **options)
    torch.testing.assert_close(out[:, :3], expected.out[:, :3])
    torch.testing.assert_close(lse[..., :3], expected.lse[..., :3])


@pytest.mark.parametrize("feature", ["plain", "all"])
def test_in_a_graph_no_value_is_read(feature, monkeypatch):
    """Values of fake tensors cannot be read. Probabilities are those of a call outside a graph."""
    q, k, v = make_qkv(sq=6, sk=8)
    options = {**draw_masks(FEATURES[feature], 2, 4, 6, 8), "causal": True, "return_probs": True}
    k[:, 5:], v[0, 5, 0, 1] = math.nan, math.inf
    expected = attention_ref(q, k, v, **options)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        with pytest.raises(DynamicOutputShapeException):
            attention_ref(*fake, **options)
        monkeypatch.setattr(reference, "_is_captured", lambda x: True)
        assert attention_ref(*fake, **options).probs.shape == expected.probs.shape
    _, lse, probs = attention_ref(q, k, v, **options)
    seen = slice(0, 3)  # rows 0, 1, 2 are at positions 2, 3, 4
    torch.testing.assert_close(probs[..., seen, :], expected.probs[..., seen, :])
    torch.testing.assert_close(lse[..., seen], expected.lse[..., seen])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["k", "v", "kv"])
@pytest.mark.parametrize("feature", ["plain", "softcap", "alibi_bh", "all"])
def test_hidden_nan_and_inf_never_leak_backward(feature, where, bad):
    sq, sk = 4, 8
    q, k, v = make_qkv(sq=sq, sk=sk)
    # Positions are 4 to 7 and the window reaches 2 to the left, so no row sees keys 0 and 1.
    options = {**draw_masks(FEATURES[feature], 2, 4, sq, sk), "window_size": (2, 0)}
    grad = torch.randn_like(q)

    def run():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse, _ = attention_ref(*leaves, **options)
        return out, lse, *torch.autograd.grad((out, lse.sum()), leaves, (grad, lse.new_ones(())))

    expected = run()
    if "k" in where:
        k[:, :2] = bad
    if "v" in where:
        v[0, 1, 0, 1] = bad
    for x, y in zip(run(), expected, strict=True):
        assert y.isfinite().all()
        torch.testing.assert_close(x, y)


def test_visible_nan_reaches_exactly_the_rows_that_see_it():
    q, k, v = make_qkv(sq=8, sk=8, h=2, h_k=2)
    clean = attention_ref(q, k, v, causal=True)
    k[0, 4, 1, 0] = math.nan
    out, lse, _ = attention_ref(q, k, v, causal=True)
    poisoned = torch.zeros(2, 8, 2, dtype=torch.bool)
    poisoned[0, 4:, 1] = True
    assert torch.equal(out.isnan().all(-1), poisoned)
    assert torch.equal(lse.isnan(), poisoned.transpose(1, 2))
    torch.testing.assert_close(out[~poisoned], clean.out[~poisoned])


def test_visible_inf_keeps_its_meaning():
    q, k, v = make_qkv(b=1, sq=4, sk=4, h=1, h_k=1)
    without = attention_ref(q, k[:, 1:], v[:, 1:])
    v[0, 3, 0, 0] = math.inf  # P * inf is inf
    assert torch.all(attention_ref(q, k, v).out[..., 0] == math.inf)
    assert torch.all(attention_ref(q, k, v).out[..., 1:].isfinite())
    v[0, 3, 0, 0] = without.out.new_zeros(())
    q, k = q.abs(), k.clone()
    without = attention_ref(q, k[:, 1:], v[:, 1:])
    k[0, 0] = -math.inf  # a score of -inf has no weight
    out, lse, _ = attention_ref(q, k, v)
    torch.testing.assert_close(out, without.out)
    torch.testing.assert_close(lse, without.lse)


def test_bias_of_minus_inf_masks_even_nan():
    q, k, v = make_qkv(sq=5, sk=7)
    bias = torch.zeros(7, dtype=F64)
    bias[4:] = -math.inf
    expected = attention_ref(q, k[:, :4], v[:, :4])
    k[:, 4:], v[:, 4:] = math.nan, math.inf
    out, lse, _ = attention_ref(q, k, v, attn_bias=bias)
    torch.testing.assert_close(out, expected.out)
    torch.testing.assert_close(lse, expected.lse)


# --- gradients, blocks, dtypes, layouts ---


@pytest.mark.parametrize("feature", ["causal", "window", "softcap", "all"])
def test_gradcheck(feature):
    sq, sk = 4, 3  # with a fully masked row
    q, k, v = (x.requires_grad_() for x in make_qkv(b=1, sq=sq, sk=sk, h=2, h_k=1, d=2))
    options = draw_masks(FEATURES[feature], 1, 2, sq, sk)
    for name in ("alibi_slopes", "sinks"):
        if name in options:
            options[name] = options[name][:2].to(F64)

    def both(q, k, v):
        out, lse, _ = attention_ref(q, k, v, **options)
        return out, torch.where(lse.isfinite(), lse, 0)

    assert torch.autograd.gradcheck(both, (q, k, v))


def test_gradcheck_of_slopes_sinks_and_bias():
    q, k, v = make_qkv(b=1, sq=3, sk=4, h=2, h_k=1, d=2)
    slopes = torch.tensor([0.5, 0.1], dtype=F64, requires_grad=True)
    sinks = torch.tensor([0.5, -1.0], dtype=F64, requires_grad=True)
    bias = torch.randn(2, 1, 4, dtype=F64, requires_grad=True)

    def run(slopes, sinks, bias):
        return attention_ref(q, k, v, alibi_slopes=slopes, sinks=sinks, attn_bias=bias)[:2]

    assert torch.autograd.gradcheck(run, (slopes, sinks, bias))


@pytest.mark.parametrize("feature", ["plain", "all"])
@pytest.mark.parametrize("limit", [1, 60, 150, 400])
def test_blocks_change_nothing(monkeypatch, feature, limit):
    sq, sk = 6, 5
    options = draw_masks(FEATURES[feature], 2, 4, sq, sk)
    results = []
    for block in (reference._MAX_BLOCK_SCORES, limit):
        monkeypatch.setattr(reference, "_MAX_BLOCK_SCORES", block)
        leaves = [x.requires_grad_() for x in make_qkv(sq=sq, sk=sk)]
        result = attention_ref(*leaves, return_probs=True, **options)
        grads = torch.autograd.grad(result.out.square().sum() + result.lse.sum(), leaves)
        results.append((*result, *grads))
    for whole, blocked in zip(*results, strict=True):
        torch.testing.assert_close(blocked, whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("reorder_ops", [False, True])
def test_low_precision_is_close_and_upcast_is_exact(dtype, reorder_ops):
    q, k, v = make_qkv(sq=40, sk=50, d=32, dtype=dtype)
    exact = attention_ref(q.double(), k.double(), v.double(), causal=True)
    up = attention_ref(q, k, v, causal=True, upcast=F64, reorder_ops=reorder_ops)
    assert up.out.dtype == up.lse.dtype == F64
    torch.testing.assert_close(up.out, exact.out)
    low = attention_ref(q, k, v, causal=True, reorder_ops=reorder_ops)
    assert low.out.dtype == dtype
    assert low.lse.dtype == torch.float32
    error = (low.out.double() - exact.out).abs().max().item()
    eps = torch.finfo(dtype).eps
    assert 0.05 * eps < error < 8 * eps


def test_layout_does_not_matter():
    q, k, v = make_qkv(b=3, sq=5, sk=7, d=4)
    expected = attention_ref(q, k, v, causal=True)
    strided = [x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0) for x in (q, k, v)]
    assert not any(x.is_contiguous() for x in strided)
    got = attention_ref(*strided, causal=True)
    torch.testing.assert_close(got.out, expected.out)
    expanded = [x[:1, :, :1].expand(x.shape) for x in (q, k, v)]
    copies = [x.contiguous() for x in expanded]
    torch.testing.assert_close(attention_ref(*expanded).out, attention_ref(*copies).out)


def test_long_sequences_do_not_hold_all_scores():
    # 8192^2 float64 scores are 512 MiB, of which there would be several copies. A block of rows has
    # 128 MiB of them.
    _, rows = reference.blocks(1, 8192, 8192)
    assert len(rows) == 4
    batches, rows = reference.blocks(65537, 1, 1)
    assert (len(batches), len(rows)) == (1, 1)


# --- validation ---

QKV = make_qkv()


@pytest.mark.parametrize(
    ("qkv", "options", "error", "match"),
    [
        ((1, *QKV[1:]), {}, TypeError, r"q to be a torch.Tensor, got q of type int"),
        ((QKV[0].int(), *QKV[1:]), {}, TypeError, r"floating point, got q.dtype=torch.int32"),
        ((QKV[0].half(), *QKV[1:]), {}, TypeError, r"one dtype.*k.dtype=torch.float64"),
        (
            (QKV[0][0], *QKV[1:]),
            {},
            ValueError,
            r"\(b, seqlen, heads, d\), got q.shape=\(5, 4, 3\)",
        ),
        ((QKV[0].to("meta"), *QKV[1:]), {}, ValueError, r"one device, got k.device=cpu"),
        ((QKV[0], QKV[1], QKV[2][:, :3]), {}, ValueError, r"one \(b, seqlen_k, h_k\)"),
        ((QKV[0][:1], *QKV[1:]), {}, ValueError, r"one batch size"),
        ((QKV[0][..., :2], *QKV[1:]), {}, ValueError, r"head dimension >= 1"),
        ((QKV[0][:, :, :3], *QKV[1:]), {}, ValueError, r"multiple of h_k"),
        ((QKV[0][:, :, :0], *QKV[1:]), {}, ValueError, r"positive multiple of h_k"),
        (
            QKV,
            {"window_size": (-2, 0)},
            ValueError,
            r"window_size of two ints >= -1, got .*\(-2, 0\)",
        ),
        (QKV, {"window_size": (1,)}, TypeError, r"two ints"),
        (QKV, {"window_size": (1.0, 2)}, TypeError, r"two ints"),
        (QKV, {"softcap": -1.0}, ValueError, r"softcap >= 0 .*, got softcap=-1.0"),
        (QKV, {"softcap": math.nan}, ValueError, r"softcap >= 0"),
        (QKV, {"upcast": torch.float16}, TypeError, r"upcast in"),
        (QKV, {"alibi_slopes": torch.ones(3)}, ValueError, r"\(4,\) or \(2, 4\), got .*\(3,\)"),
        (QKV, {"alibi_slopes": torch.ones(4).int()}, TypeError, r"alibi_slopes in floating point"),
        (QKV, {"sinks": torch.ones(2, 4)}, ValueError, r"sinks of shape \(4,\)"),
        (QKV, {"attn_bias": torch.ones(5, 7).bool()}, TypeError, r"bool mask into 0 and -inf"),
        (QKV, {"attn_bias": torch.ones(7, 5)}, ValueError, r"broadcastable to \(2, 4, 5, 7\)"),
        (QKV, {"dropout_p": 1.0}, ValueError, r"dropout_p in \[0, 1\)"),
        (QKV, {"dropout_p": 0.5}, ValueError, r"dropout_mask together"),
        (QKV, {"dropout_mask": torch.ones(5, 7).bool()}, ValueError, r"dropout_mask together"),
        (QKV, {"dropout_p": 0.5, "dropout_mask": torch.ones(7)}, TypeError, r"to be bool"),
        ((QKV[0].to_sparse(), *QKV[1:]), {}, TypeError, r"dense .* layout torch.sparse_coo"),
        (QKV, {"softmax_scale": math.nan}, ValueError, r"finite softmax_scale .*=nan"),
        (QKV, {"softmax_scale": -math.inf}, ValueError, r"finite softmax_scale .*=-inf"),
        (QKV, {"softmax_scale": "x"}, TypeError, r"softmax_scale to be a float, got .*'x'"),
        (QKV, {"softcap": math.inf}, ValueError, r"finite softcap >= 0 .*=inf"),
        (QKV, {"softcap": None}, TypeError, r"softcap to be a float, got softcap=None"),
        (QKV, {"softcap": "x"}, TypeError, r"softcap to be a float, got softcap='x'"),
        (QKV, {"causal": "no"}, TypeError, r"causal to be a bool, got causal='no'"),
        (QKV, {"causal": 1}, TypeError, r"causal to be a bool, got causal=1"),
        (QKV, {"reorder_ops": 1}, TypeError, r"reorder_ops to be a bool, got reorder_ops=1"),
        (QKV, {"return_probs": None}, TypeError, r"return_probs to be a bool, got .*=None"),
        (QKV, {"window_size": (True, 0)}, TypeError, r"two ints .*, got .*\(True, 0\)"),
        (QKV, {"window_size": 3}, TypeError, r"two ints .*, got window_size=3"),
        (QKV, {"dropout_p": None}, TypeError, r"dropout_p to be a float, got dropout_p=None"),
        (QKV, {"sinks": [0, 0]}, TypeError, r"sinks to be a torch.Tensor, got .* type list"),
        (QKV, {"alibi_slopes": [1, 2]}, TypeError, r"alibi_slopes to be a torch.Tensor, got"),
        (QKV, {"attn_bias": [1]}, TypeError, r"attn_bias to be a torch.Tensor, got .* list"),
        (QKV, {"dropout_p": 0.5, "dropout_mask": "x"}, TypeError, r"dropout_mask to be .* str"),
        (QKV, {"sinks": torch.ones(4, device="meta")}, ValueError, r"sinks on q's device, got"),
        (QKV, {"attn_bias": torch.ones(7, device="meta")}, ValueError, r"attn_bias on q's device"),
        (
            QKV,
            {"alibi_slopes": torch.ones(4, device="meta")},
            ValueError,
            r"alibi_slopes on q's device, got alibi_slopes.device=meta beside q.device=cpu",
        ),
        (
            QKV,
            {"dropout_p": 0.5, "dropout_mask": torch.ones(7, device="meta").bool()},
            ValueError,
            r"dropout_mask on q's device, got dropout_mask.device=meta",
        ),
    ],
)
def test_rejects_with_a_message(qkv, options, error, match):
    with pytest.raises(error, match=match) as caught:
        attention_ref(*qkv, **options)
    assert str(caught.value).startswith("attention_ref: expected ")
    assert ", got " in str(caught.value)
    assert "; " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "given", "same"),
    [
        ("softmax_scale", np.float32(-0.5), -0.5),
        ("softmax_scale", 2, 2.0),
        ("causal", np.bool_(True), True),
        ("window_size", [np.int64(2), 1], (2, 1)),
        ("softcap", np.float64(3), 3.0),
    ],
)
def test_a_number_of_another_type_counts_as_what_it_holds(name, given, same):
    out = attention_ref(*QKV, **{name: given}).out
    assert torch.equal(out, attention_ref(*QKV, **{name: same}).out)
    assert not torch.equal(out, attention_ref(*QKV).out)


def test_a_probability_is_not_rounded_as_the_kernels_round_it():
    mask = torch.ones(5, 7, dtype=torch.bool)
    out = attention_ref(*QKV, dropout_p=1e-6, dropout_mask=mask).out
    torch.testing.assert_close(out, attention_ref(*QKV).out / (1 - 1e-6), atol=0, rtol=1e-12)
