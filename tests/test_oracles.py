"""The oracles agree with the reference, accept a faithful kernel and reject planted faults."""

import math

import pytest
import torch

from flashcute.oracles import (
    Shape,
    embed_in_nan,
    make_sparse_integer_qkv,
    one_hot_oracle,
    ones_oracle,
    uniform_oracle,
)
from flashcute.reference import attention_ref
from flashcute.reference_tiled import flash_attention_2

HALVES = (torch.float16, torch.bfloat16)
ORACLES = (uniform_oracle, ones_oracle, one_hot_oracle)
SHAPES = (
    Shape(2, 129, 203, 4, 2, 64),
    Shape(1, 200, 70, 2, 2, 32),
    Shape(1, 64, 700, 3, 1, 128),
    Shape(2, 1, 1, 1, 1, 8),
    Shape(2, 5, 0, 2, 1, 8),
)


@pytest.mark.parametrize("make", ORACLES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_and_a_faithful_kernel_pass(make, shape, dtype, causal):
    oracle = make(shape, dtype, causal=causal)
    qkv = (oracle.q, oracle.k, oracle.v)
    exact = attention_ref(*qkv, upcast=torch.float64, **oracle.options)
    oracle.check(exact.out.to(dtype), exact.lse.float())
    options = {key: value for key, value in oracle.options.items() if key != "window_size"}
    for tile_n in (32, 64):
        oracle.check(*flash_attention_2(*qkv, tile_m=32, tile_n=tile_n, **options))


@pytest.mark.parametrize("make", ORACLES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("window", [(0, 0), (17, 3), (5, -1), (-1, 0)], ids=str)
def test_windows(make, dtype, window):
    oracle = make(Shape(1, 129, 203, 4, 2, 64), dtype, window_size=window)
    out, lse, _ = attention_ref(
        oracle.q, oracle.k, oracle.v, upcast=torch.float64, **oracle.options
    )
    oracle.check(out.to(dtype), lse.float())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("window", [(17, -1), (16, 0), (16, 1), (15, 0)], ids=str)
def test_uniform_rejects_a_mask_off_by_one(dtype, window):
    right = uniform_oracle(Shape(1, 129, 203, 2, 2, 64), dtype, window_size=(16, -1))
    wrong = uniform_oracle(Shape(1, 129, 203, 2, 2, 64), dtype, window_size=window)
    right.check(right.out.to(dtype), right.lse)
    with pytest.raises(AssertionError, match="elements of out are wrong, first out"):
        right.check(wrong.out.to(dtype), right.lse)
    with pytest.raises(AssertionError, match="elements of lse are wrong, first lse"):
        right.check(right.out.to(dtype), wrong.lse)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("key", [0, 63, 64, 202])
def test_uniform_rejects_a_dropped_or_doubled_key(dtype, key):
    oracle = uniform_oracle(Shape(1, 4, 203, 2, 2, 64), dtype)
    for keys in ([*range(key), *range(key + 1, 203)], [*range(203), key]):
        out = oracle.v.double()[:, keys].mean(1, keepdim=True).expand(1, 4, 2, 64)
        with pytest.raises(AssertionError, match="elements of out"):
            oracle.check(out.to(dtype), oracle.lse)


@pytest.mark.parametrize("dtype", HALVES)
def test_one_hot_rejects_a_wrong_row_head_or_batch_entry(dtype):
    oracle = one_hot_oracle(Shape(2, 129, 203, 4, 2, 64), dtype)
    right = oracle.out.to(dtype)
    for dim in range(4):
        with pytest.raises(AssertionError, match="elements of out"):
            oracle.check(right.roll(1, dim), oracle.lse)
    wrong = right.clone()
    wrong[1, 7, 2, 3] = torch.nextafter(wrong[1, 7, 2, 3], wrong.new_tensor(9.0))
    with pytest.raises(AssertionError, match=r"^1 of \d+ .* first out\[1, 7, 2, 3\]: expected"):
        oracle.check(wrong, oracle.lse)


@pytest.mark.parametrize("make", ORACLES)
@pytest.mark.parametrize("value", [math.nan, 1e-4])
def test_masked_rows_have_to_be_zero(make, value):
    oracle = make(Shape(1, 9, 3, 2, 1, 8), torch.bfloat16, causal=True)
    out = oracle.out.to(torch.bfloat16)
    oracle.check(out, oracle.lse)
    out[0, 5, 1, 2] = value
    with pytest.raises(AssertionError, match=r"first out\[0, 5, 1, 2\]: expected 0.0"):
        oracle.check(out, oracle.lse)


def test_one_hot_needs_enough_digits():
    one_hot_oracle(Shape(1, 2, 256, 1, 1, 8), torch.float16)
    with pytest.raises(ValueError, match=r"seqlen_k <= 2\*\*d = 256, got seqlen_k=257"):
        one_hot_oracle(Shape(1, 2, 257, 1, 1, 8), torch.float16)


def test_sparse_integers():
    q, k, v = make_sparse_integer_qkv(Shape(2, 100, 100, 2, 2, 64), torch.bfloat16)
    for x in (q, k, v):
        assert set(x.unique().tolist()) == {-2, -1, 0, 1, 2}
        assert 0.8 < (x == 0).double().mean() < 0.9


@pytest.mark.parametrize("order", ["bshd", "bhsd", "hsbd"])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_embed_in_nan(order, dtype):
    x = torch.randn(2, 5, 3, 16).to(dtype)
    view, buffer = embedded = embed_in_nan(x, order)
    assert torch.equal(view, x)
    assert buffer.isnan().sum() == buffer.numel() - x.numel()
    assert view.stride(3) == 1
    assert all(stride % 8 == 0 for stride in view.stride()[:3])
    by_stride = sorted("bsh", key=lambda letter: -view.stride("bsh".index(letter)))
    assert "".join(by_stride) + "d" == order
    assert view.storage_offset() * view.element_size() % 16 == 0
    assert embedded.untouched()
    view.fill_(math.nan)
    view.zero_()
    assert embedded.untouched()
    for place in (0, 511, 512 + 16, buffer.numel() - 1):
        before = buffer[place].clone()
        buffer[place] = 1
        assert not embedded.untouched()
        buffer[place] = before
    assert embedded.untouched()


@pytest.mark.parametrize("order", ["dbsh", "bsh", "bssd"])
def test_embed_in_nan_rejects_other_orders(order):
    with pytest.raises(ValueError, match=f'ends in "d", got order="{order}"'):
        embed_in_nan(torch.zeros(1, 1, 1, 8), order)
