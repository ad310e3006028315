"""Inputs whose attention is known exactly, so that one wrong index or one lost key shows."""

from __future__ import annotations

import math

import pytest
import torch

import flashcute
from flashcute import oracles, testing
from flashcute.reference import visible_keys

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (8, 32, 40, 64, 96, 128, 192, 256)
SIZES = ((1, 1), (1, 129), (64, 64), (65, 63), (128, 257), (129, 128), (200, 17), (513, 512))
ORACLES = (oracles.uniform_oracle, oracles.ones_oracle, oracles.one_hot_oracle)


def _attend(q, k, v, **options) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return flashcute.flash_attn_func(q, k, v, return_attn_probs=True, **options)[:2]


@pytest.fixture(params=[(d, dtype) for d in HEAD_DIMS for dtype in DTYPES], ids=str)
def kind(request) -> tuple[int, torch.dtype]:
    return request.param


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle.__name__)
def test_oracle(oracle, causal: bool, kind, poisoned_outputs, count_cases) -> None:
    d, dtype = kind
    # The one-hot oracle tells at most 2^d keys apart.
    sizes = [(seqlen_q, seqlen_k) for seqlen_q, seqlen_k in SIZES if seqlen_k <= 2**d]
    for seqlen_q, seqlen_k in sizes:
        shape = oracles.Shape(2, seqlen_q, seqlen_k, 4, 2, d)
        known = oracle(shape, dtype, "cuda", causal=causal)
        known.check(*_attend(known.q, known.k, known.v, **known.options))
    count_cases("exact", len(sizes))


@pytest.mark.parametrize("causal", [False, True])
def test_residue_classes(causal: bool, kind, poisoned_outputs, count_cases) -> None:
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
        out, lse = _attend(q, k, v, causal=causal, softmax_scale=1.0)
        visible = visible_keys(seqlen_q, seqlen_k, causal, device="cuda")
        own = visible & (q_class[:, None] == k_class[None])
        # A query that sees no key of its own class scores -256 with every visible key.
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
    count_cases("exact", len(SIZES))


def test_sparse_integers(kind, poisoned_outputs, count_cases) -> None:
    d, dtype = kind
    for seqlen_q, seqlen_k in SIZES:
        shape = oracles.Shape(2, seqlen_q, seqlen_k, 4, 2, d)
        q, k, v = oracles.make_sparse_integer_qkv(shape, dtype, "cuda")
        out, lse = _attend(q, k, v, causal=True)
        testing.check_forward(out, lse, q, k, v, causal=True, check_drift=False)
    count_cases("exact", len(SIZES))


def test_scale_defaults_to_the_head_dims(count_cases) -> None:
    for d in HEAD_DIMS:
        q = torch.randn(1, 65, 2, d, device="cuda", dtype=torch.bfloat16)
        default = _attend(q, q, q)
        given = _attend(q, q, q, softmax_scale=1 / math.sqrt(d))
        assert all(torch.equal(a, b) for a, b in zip(default, given, strict=True))
    count_cases("exact", len(HEAD_DIMS))
