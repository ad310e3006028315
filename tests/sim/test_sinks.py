"""Attention sinks in both kernel classes: a column of the softmax that has no value."""

import math

import pytest
import torch
from mutants import ONE_STAGE, TWO_STAGES
from mutants_sm90 import ASKING, STRIDING

from flashcute import sim
from flashcute.testing import check_forward

CONFIGS = (TWO_STAGES, ONE_STAGE, ASKING, STRIDING)
COMPILED = [(config, "none") for config in CONFIGS]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# (b, seqlen_q, seqlen_k, h, h_k): several tiles; rows that see no key; no keys at all.
SHAPES = ((2, 150, 200, 2, 1), (1, 200, 63, 2, 2), (1, 40, 0, 2, 1))
# Sinks that are absent, ordinary, larger than any score, or so large that only the sink is left.
SINKS = ((-math.inf, 0.5), (3.0, -2.0), (80.0, 20.0), (1e30, -1e30))


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none"])
    return sim.build_kernels(COMPILED)


def make_qkv(config, shape, factor=1):
    b, seqlen_q, seqlen_k, h, h_k = shape
    generator = torch.Generator().manual_seed(0)
    d = config.head_dim - 8
    sizes = ((b, seqlen_q, h, d), (b, seqlen_k, h_k, d), (b, seqlen_k, h_k, d))
    q, k, v = (torch.randn(size, generator=generator) for size in sizes)
    return [x.to(DTYPES[config.dtype]) for x in (factor * q, k, v)]


@pytest.mark.parametrize("packed", [False, True], ids=("", "packed"))
@pytest.mark.parametrize("sinks", SINKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_results(config, shape, sinks, packed):
    sinks = torch.tensor(sinks)
    q, k, v = make_qkv(config, shape)
    result = sim.run_fwd(q, k, v, config, sinks=sinks, pack_heads=packed, sms=2)
    assert result.verdict == "pass", result.message
    causal = config.mask == "causal"
    check_forward(result.out, result.lse, q, k, v, causal=causal, sinks=sinks)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_beside_scores_that_raise_the_reference(config):
    """With queries times 30 references are raised from block to block, and sinks lie among them."""
    sinks = torch.tensor([25.0, 100.0])
    q, k, v = make_qkv(config, (1, 130, 300, 2, 1), 30)
    result = sim.run_fwd(q, k, v, config, sinks=sinks, sms=2)
    assert result.verdict == "pass", result.message
    check_forward(result.out, result.lse, q, k, v, causal=config.mask == "causal", sinks=sinks)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_sink_of_minus_infinity_equals_none(config):
    """Results are equal bit for bit, rows without a key included."""
    q, k, v = make_qkv(config, SHAPES[1])
    none = sim.run_fwd(q, k, v, config, sms=2)
    sinks = torch.full((2,), -math.inf)
    result = sim.run_fwd(q, k, v, config, sinks=sinks, sms=2)
    assert torch.equal(result.out, none.out) and torch.equal(result.lse, none.lse)
