"""Sizes at which 32-bit arithmetic overflows, grids reach their limits, or loops are empty."""

from __future__ import annotations

import itertools

import pytest
import torch
from memory import needs_memory

import flashcute
from flashcute import ops, testing
from flashcute.reference import attention_ref


@pytest.fixture(autouse=True)
def _give_memory_back():
    yield
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def nan_buffer():
    """Returns 8 GiB of NaN, in which views with enormous strides lie."""
    needs_memory(12)
    buffer = torch.full((2**32 + 4096,), torch.nan, device="cuda", dtype=torch.float16)
    yield buffer
    del buffer
    torch.cuda.empty_cache()


@pytest.mark.parametrize("stride", [2**30 + 8, 2**31 + 8], ids=["past_2_31", "past_2_32"])
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "row", "head"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_offsets_past_32_bits(nan_buffer, which: int, dim: int, stride: int, count_cases) -> None:
    # The third entry along one dimension begins after 2 strides, 2^31 or 2^32 elements.
    generator = torch.Generator("cuda").manual_seed(which)
    tensors = [
        torch.randn(3, 3, 3, 64, generator=generator, device="cuda", dtype=torch.float16)
        for _ in range(3)
    ]
    strides = [192, 64, 1]
    strides.insert(dim, stride)
    far = nan_buffer.as_strided((3, 3, 3, 64), strides, 8)
    far.copy_(tensors[which])
    with torch.no_grad():
        expected = flashcute.flash_attn_func(*tensors, return_attn_probs=True)
        tensors[which] = far
        got = flashcute.flash_attn_func(*tensors, return_attn_probs=True)
    far.fill_(torch.nan)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    count_cases("sizes", 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("b", "h"), [(65535, 1), (65536, 1), (65537, 1), (1, 65537), (257, 300)])
def test_no_grid_limit_on_batch_or_heads(b, h, causal, poisoned_outputs, count_cases) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(b, 1, h, 8, generator=generator, device="cuda", dtype=torch.float16)
    k = torch.randn(b, 3, h, 8, generator=generator, device="cuda", dtype=torch.float16)
    v = torch.randn(b, 3, h, 8, generator=generator, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        out, lse, _ = flashcute.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    expected = attention_ref(q, k, v, causal=causal, upcast=torch.float32)
    torch.testing.assert_close(out.float(), expected.out, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, expected.lse, atol=1e-4, rtol=1e-5)
    count_cases("sizes", 1)


def test_long_grid(poisoned_outputs, count_cases) -> None:
    # 65537 x 17 tiles of two rows are more than 2^20 CTAs, each of which has another result.
    b, h = 65537, 17
    q = torch.zeros(1, 1, 1, 8, device="cuda", dtype=torch.float16).expand(b, 2, h, 8)
    k = torch.zeros(1, 1, 1, 8, device="cuda", dtype=torch.float16).expand(b, 2, h, 8)
    index = torch.arange(b * h, device="cuda").view(b, 1, h, 1) % 2048  # exact in float16
    v = index.half().expand(b, 2, h, 8).contiguous()
    with torch.no_grad():
        out = flashcute.flash_attn_func(q, k, v)
    assert torch.equal(out, v)
    count_cases("sizes", 1)


def test_output_past_2_31_elements(poisoned_outputs, count_cases) -> None:
    needs_memory(16)
    b, seqlen, h, d = 4097, 128, 16, 256
    assert b * seqlen * h * d > 2**31
    generator = torch.Generator("cuda").manual_seed(0)
    small = torch.randn(1, seqlen, h, d, generator=generator, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 16, h, d, generator=generator, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = flashcute.flash_attn_func(small, k, k)
        out = flashcute.flash_attn_func(*(t.expand(b, -1, -1, -1) for t in (small, k, k)))
    for part in out.split(512):
        assert torch.equal(part, expected.expand_as(part))
    count_cases("sizes", 1)


def test_lse_past_2_31_elements(poisoned_outputs, count_cases) -> None:
    needs_memory(60)
    b, seqlen = 2**21 + 1, 1024
    assert b * seqlen > 2**31
    generator = torch.Generator("cuda").manual_seed(0)
    small = torch.randn(1, seqlen, 1, 8, generator=generator, device="cuda", dtype=torch.float16)
    k = torch.randn(1, 8, 1, 8, generator=generator, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        expected = flashcute.flash_attn_func(small, k, k, return_attn_probs=True)
        got = flashcute.flash_attn_func(
            *(t.expand(b, -1, -1, -1) for t in (small, k, k)), return_attn_probs=True
        )
    for whole, one in zip(got[:2], expected[:2], strict=True):
        for part in whole.split(2**18):
            assert torch.equal(part, one.expand_as(part))
    count_cases("sizes", 1)


@pytest.mark.parametrize("causal", [False, True])
def test_empty_and_short(causal: bool, poisoned_outputs, count_cases) -> None:
    sizes = list(itertools.product((0, 1, 2), (0, 1, 2, 129), (0, 1, 2, 129), (8, 128)))
    for b, seqlen_q, seqlen_k, d in sizes:
        q = torch.randn(b, seqlen_q, 4, d, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(b, seqlen_k, 2, d, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            out, lse, _ = flashcute.flash_attn_func(q, k, k, causal=causal, return_attn_probs=True)
        expected = attention_ref(q, k, k, causal=causal, upcast=torch.float32)
        where = f"b={b} seqlen_q={seqlen_q} seqlen_k={seqlen_k} d={d}"
        assert (out.shape, lse.shape) == (q.shape, (b, 4, seqlen_q)), where
        torch.testing.assert_close(out.float(), expected.out, atol=2e-2, rtol=2e-2, msg=where)
        torch.testing.assert_close(lse, expected.lse, atol=1e-4, rtol=1e-5, msg=where)
        if seqlen_k == 0:
            assert not out.any() and (lse == -torch.inf).all(), where
    count_cases("sizes", len(sizes))


@pytest.mark.parametrize("d", [8, 64, 128])
@pytest.mark.parametrize(("h", "h_k"), [(4, 4), (6, 2), (32, 1), (400, 2), (1000, 1)])
def test_one_query_row(h, h_k, d, poisoned_outputs, count_cases) -> None:
    """The query heads of one key head are the rows of one tile or of several, whatever their
    strides."""
    b, seqlen_k = 3, 333
    wide = torch.randn(b, 2, h + 3, d + 8, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(b, seqlen_k, h_k, d, device="cuda").bfloat16() for _ in range(2))
    heads_first = torch.randn(b, h, 1, d, device="cuda").bfloat16().transpose(1, 2)
    one = torch.randn(b, 1, 1, d, device="cuda").bfloat16()
    queries = (wide[:, :1, 2 : 2 + h, :d], heads_first, one.expand(b, 1, h, d))
    for q, causal in itertools.product(queries, (False, True)):
        with torch.no_grad():
            out, lse, _ = flashcute.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
        testing.check_forward(out, lse, q, k, v, causal=causal)
        count_cases("sizes", 1)


def test_too_many_tiles_is_an_error() -> None:
    # The tensors are expanded from one element, as the call is refused before it allocates any of
    # that size.
    one = torch.zeros(1, 1, 1, 8, device="cuda", dtype=torch.float16)
    q = one.expand(2**16, 1, 2**16, 8)
    with pytest.raises(
        RuntimeError, match=r"batch size times heads <= 2147483647, got 65536 times"
    ):
        ops.fwd(q, q, q, 1.0, False)
    q = one.expand(2**15, 1024, 2**15, 8)
    with pytest.raises(RuntimeError, match=r"at most 2147482624 tiles of \d+ query rows"):
        ops.fwd(q, q, q, 1.0, False)
    q = one.expand(1, 2**31, 1, 8)
    with pytest.raises(RuntimeError, match=r"sequences of at most 2147482624 tokens"):
        ops.fwd(q, q, q, 1.0, False)
