"""Both tile loops against the reference, with tiles of many sizes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashcute.reference import attention_ref
from flashcute.reference_tiled import flash_attention_1, flash_attention_2

F64 = torch.float64


def make_qkv(*, sq, sk, h=2, h_k=1, d=4, dtype=F64, seed=0):
    gen = torch.Generator().manual_seed(seed)
    shapes = ((2, sq, h, d), (2, sk, h_k, d), (2, sk, h_k, d))
    return [torch.randn(shape, dtype=F64, generator=gen).to(dtype) for shape in shapes]


def run(algorithm, *qkv, **options):
    """Returns (out, lse) of one of the two algorithms."""
    if algorithm == 1:
        out, row_sum, row_max = flash_attention_1(*qkv, **options)
        return out, row_max + row_sum.log()
    return flash_attention_2(*qkv, **options)


@pytest.mark.parametrize("algorithm", [1, 2])
@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    lengths=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    tiles=st.tuples(st.integers(1, 48), st.integers(1, 48)),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 1000),
)
def test_matches_the_reference(*, algorithm, lengths, tiles, heads, flags, seed):
    causal, masked, dropout = flags
    (sq, sk), (h, h_k) = lengths, heads
    q, k, v = make_qkv(sq=sq, sk=sk, h=h, h_k=h_k, seed=seed)
    gen = torch.Generator().manual_seed(seed)
    options, ref_options = {"causal": causal}, {"causal": causal}
    if masked:
        mask = torch.rand(2, 1, sq, sk, generator=gen) < 0.3
        options["mask"] = mask
        ref_options["attn_bias"] = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    if dropout:
        kept = torch.rand(2, h, sq, sk, generator=gen) >= 0.25
        options |= {"dropout_p": 0.25, "dropout_mask": kept}
        ref_options |= {"dropout_p": 0.25, "dropout_mask": kept}
    out, lse = run(algorithm, q, k, v, tile_m=tiles[0], tile_n=tiles[1], **options)
    expected = attention_ref(q, k, v, **ref_options)
    torch.testing.assert_close(out, expected.out, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, expected.lse, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("algorithm", [1, 2])
def test_padding_mask(algorithm):
    q, k, v = make_qkv(sq=20, sk=30)
    lengths = torch.tensor([30, 11])
    mask = (torch.arange(30) < lengths[:, None])[:, None, None]
    out, lse = run(algorithm, q, k, v, mask=mask, tile_m=8, tile_n=8)
    for n, length in enumerate(lengths):
        expected = attention_ref(q[n : n + 1], k[n : n + 1, :length], v[n : n + 1, :length])
        torch.testing.assert_close(out[n : n + 1], expected.out)
        torch.testing.assert_close(lse[n : n + 1], expected.lse)


@pytest.mark.parametrize("algorithm", [1, 2])
def test_large_scores_do_not_overflow(algorithm):
    q, k, v = make_qkv(sq=16, sk=40, dtype=torch.float32)
    q = q * 1000
    out, lse = run(algorithm, q, k, v, tile_m=8, tile_n=8)
    expected = attention_ref(q, k, v, upcast=F64)
    torch.testing.assert_close(out, expected.out.float(), atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(lse, expected.lse.float(), atol=1e-3, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("algorithm", [1, 2])
def test_low_precision_accumulates_in_float32(algorithm, dtype):
    q, k, v = make_qkv(sq=64, sk=256, d=32, dtype=dtype)
    out, lse = run(algorithm, q, k, v, causal=True)
    exact = attention_ref(q, k, v, causal=True, upcast=F64)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact.lse, atol=1e-5, rtol=1e-6)
    eps = torch.finfo(dtype).eps
    assert (out.double() - exact.out).abs().mean() < 0.2 * eps


def test_future_tiles_are_never_read():
    q, k, v = make_qkv(sq=32, sk=32)
    expected = flash_attention_2(q, k, v, causal=True, tile_m=8, tile_n=8)
    k[:, 16:], v[:, 16:] = math.nan, math.nan
    got = flash_attention_2(q, k, v, causal=True, tile_m=8, tile_n=8)
    assert torch.equal(got.out[:, :16], expected.out[:, :16])
    assert torch.equal(got.lse[..., :16], expected.lse[..., :16])
    assert got.out[:, 16:].isnan().all()


@pytest.mark.parametrize("function", [flash_attention_1, flash_attention_2])
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tile_m": 0}, "expected tiles >= 1, got 0"),
        ({"tile_n": -1}, "expected tiles >= 1, got -1"),
        ({"dropout_p": 0.5}, "dropout_mask together, got dropout_p=0.5"),
    ],
)
def test_rejects_with_a_message(function, options, match):
    with pytest.raises(ValueError, match=match):
        function(*make_qkv(sq=3, sk=3), **options)


@pytest.mark.parametrize("function", [flash_attention_1, flash_attention_2])
def test_rejects_heads_that_do_not_divide(function):
    with pytest.raises(ValueError, match="expected h to be a multiple of h_k"):
        function(*make_qkv(sq=3, sk=3, h=3, h_k=2))
