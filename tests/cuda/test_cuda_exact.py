"""Inputs whose attention is known exactly, so that one wrong index or one lost key shows."""

from __future__ import annotations

import math

import pytest
import torch

import flashcute
from flashcute.reference import visible_keys

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (8, 32, 40, 64, 96, 128, 192, 256)
SIZES = ((1, 1), (1, 129), (64, 64), (65, 63), (128, 257), (129, 128), (200, 17), (513, 512))


def _attend(q, k, v, **options) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return flashcute.flash_attn_func(q, k, v, return_attn_probs=True, **options)[:2]


@pytest.fixture(params=[(d, dtype) for d in HEAD_DIMS for dtype in DTYPES], ids=str)
def kind(request) -> tuple[int, torch.dtype]:
    return request.param


def test_mean_of_positions(kind, poisoned_outputs, count_cases) -> None:
    # Q = 0 weighs visible keys alike, and V[j] = j makes the output their mean position.
    d, dtype = kind
    for seqlen_q, seqlen_k in SIZES:
        for causal in (False, True):
            q = torch.zeros(1, seqlen_q, 2, d, device="cuda", dtype=dtype)
            k = torch.randn(1, seqlen_k, 1, d, device="cuda", dtype=dtype)
            # Whole numbers up to 128 are exact in bfloat16.
            position = torch.arange(seqlen_k, device="cuda") % 128
            v = position.to(dtype)[None, :, None, None].expand(1, seqlen_k, 1, d).contiguous()
            out, lse = _attend(q, k, v, causal=causal)
            visible = visible_keys(seqlen_q, seqlen_k, causal, device="cuda").double()
            count = visible.sum(1)
            mean = torch.where(count > 0, visible @ position.double() / count.clamp(min=1), 0)
            where = f"{kind} {seqlen_q} {seqlen_k} {causal}"
            # P is 1 in every place, so sums are exact and only out's own rounding is left.
            expected = mean[None, :, None, None].expand_as(out).to(torch.float32).to(dtype)
            ulp = torch.finfo(dtype).eps * expected.double().abs()
            assert ((out.double() - expected.double()).abs() <= ulp).all(), where
            torch.testing.assert_close(
                lse, count.log().float().expand_as(lse), atol=1e-5, rtol=1e-6, msg=where
            )
    count_cases("exact", 2 * len(SIZES))


def test_constant_values(kind, poisoned_outputs, count_cases) -> None:
    # Weights sum to one, whatever they are. P is rounded to 16 bits after the sum has been taken.
    d, dtype = kind
    generator = torch.Generator("cuda").manual_seed(d)
    for seqlen_q, seqlen_k in SIZES:
        for causal in (False, True):
            shapes = ((2, seqlen_q, 4, d), (2, seqlen_k, 2, d))
            q, k = (torch.randn(s, generator=generator, device="cuda", dtype=dtype) for s in shapes)
            out, lse = _attend(q, k, torch.ones_like(k), causal=causal)
            sees = visible_keys(seqlen_q, seqlen_k, causal, device="cuda").any(1)
            expected = sees[None, :, None, None].expand_as(out).float()
            tolerance = 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=0)
            assert torch.equal(lse == -torch.inf, ~sees.expand_as(lse))
            assert not out[:, ~sees].any()
    count_cases("exact", 2 * len(SIZES))


def test_sparse_integers(kind, poisoned_outputs, count_cases) -> None:
    # Scores of 0 or -256: a query sees only the keys of its own residue class, all alike. Sums of
    # small integers are exact in float32, so any wrong element of Q K^T or P V shows.
    d, dtype = kind
    classes = 4
    for seqlen_q, seqlen_k in SIZES:
        row = torch.arange(seqlen_q, device="cuda")
        key = torch.arange(seqlen_k, device="cuda")
        q_class = row * 7 % classes
        k_class = key * 5 % classes
        q = torch.zeros(1, seqlen_q, 1, d, device="cuda", dtype=dtype)
        q[0, row, 0, q_class] = 1
        k = torch.full((1, seqlen_k, 1, d), -256.0, device="cuda", dtype=dtype)
        k[0, key, 0, k_class] = 0
        # A power of two in one column of each value: which keys were summed can be read off.
        v = torch.zeros(1, seqlen_k, 1, d, device="cuda", dtype=dtype)
        powers = torch.tensor([1, 2, 4, 8], device="cuda", dtype=dtype)
        v[0, key, 0, key % d] = powers[key % 4]
        for causal in (False, True):
            out, lse = _attend(q, k, v, causal=causal, softmax_scale=1.0)
            visible = visible_keys(seqlen_q, seqlen_k, causal, device="cuda")
            own = visible & (q_class[:, None] == k_class[None])
            # With none of its own class in sight every visible key scores -256 alike.
            weights = torch.where(own.any(1, keepdim=True), own, visible).double()
            count = weights.sum(1, keepdim=True)
            expected = weights @ v[0, :, 0].double() / count.clamp(min=1)
            ulp = torch.finfo(dtype).eps * expected.abs()
            where = f"{kind} {seqlen_q} {seqlen_k} {causal}"
            assert ((out[0, :, 0].double() - expected).abs() <= ulp).all(), where
            offset = torch.where(own.any(1), 0.0, -256.0)
            torch.testing.assert_close(
                lse[0, 0].double(), count[:, 0].log() + offset, atol=1e-4, rtol=1e-6, msg=where
            )
    count_cases("exact", 2 * len(SIZES))


def test_saturated_one_hot(kind, poisoned_outputs, count_cases) -> None:
    # Each query matches one key by so much, e^64, that the others round to nothing: out is that
    # key's value, bit for bit.
    d, dtype = kind
    bits = max(1, min(d, 12))
    for seqlen_q, seqlen_k in SIZES:
        # Keys are the binary digits, as +-1, of their position, which repeat after 2**bits.
        n = min(seqlen_k, 2**bits)
        position = torch.arange(seqlen_k, device="cuda") % n
        code = (position[:, None] >> torch.arange(bits, device="cuda") & 1) * 2 - 1
        k = torch.zeros(1, seqlen_k, 1, d, device="cuda", dtype=dtype)
        k[0, :, 0, :bits] = code.to(dtype)
        target = torch.arange(seqlen_q, device="cuda") * 31 % n
        q = torch.zeros(1, seqlen_q, 1, d, device="cuda", dtype=dtype)
        q[0, :, 0, :bits] = 8 * code[target].to(dtype)
        generator = torch.Generator("cuda").manual_seed(seqlen_k)
        v = torch.randn(n, d, generator=generator, device="cuda", dtype=dtype)
        v = v[position][None, :, None]
        out, lse = _attend(q, k, v.contiguous(), softmax_scale=4.0)
        assert torch.equal(out[0, :, 0], v[0, target, 0]), f"{kind} {seqlen_q} {seqlen_k}"
        copies = (position[None] == target[:, None]).sum(1)
        expected = 4.0 * 8 * bits + copies.double().log()
        torch.testing.assert_close(lse[0, 0].double(), expected, atol=1e-3, rtol=1e-6)
    count_cases("exact", len(SIZES))


def test_scale_defaults_to_the_head_dims(count_cases) -> None:
    for d in HEAD_DIMS:
        q = torch.randn(1, 65, 2, d, device="cuda", dtype=torch.bfloat16)
        default = _attend(q, q, q)
        given = _attend(q, q, q, softmax_scale=1 / math.sqrt(d))
        assert all(torch.equal(a, b) for a, b in zip(default, given, strict=True))
    count_cases("exact", len(HEAD_DIMS))
