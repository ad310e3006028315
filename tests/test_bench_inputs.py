"""Every distribution of inputs has the scores that its docstring states."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from flashcute import benchmarking as bm
from flashcute.bench import cli, inputs

DTYPES = (torch.bfloat16, torch.float16)
SHAPE = bm.Shape(2, 256, 1024, 4, 2, 64, causal=False)
KEYS = inputs.BLOCK


def scores(name, shape=SHAPE, dtype=torch.bfloat16):
    """Returns scores in nats, ``(b, h, seqlen_q, seqlen_k)`` in float64, -inf where masked."""
    q, k, _ = inputs.make(name, shape, dtype, "cpu")
    q, k = (x.double().transpose(1, 2) for x in (q, k))
    k = k.repeat_interleave(shape.h // shape.h_k, dim=1)
    s = q @ k.transpose(2, 3) / math.sqrt(shape.d)
    if shape.causal:
        seen = torch.ones(s.shape[2:], dtype=torch.bool).tril(shape.seqlen_k - shape.seqlen_q)
        s = s.masked_fill(~seen, -math.inf)
    return s


def block_maxima(s):
    return s.unflatten(3, (-1, KEYS)).amax(dim=4)


def test_the_command_line_offers_every_distribution():
    assert tuple(inputs.DISTRIBUTIONS) == cli.INPUTS
    assert all(function.__doc__ for function in inputs.DISTRIBUTIONS.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", inputs.DISTRIBUTIONS)
def test_tensors_are_finite_repeatable_and_of_the_shape(name, dtype):
    shape = bm.Shape(1, 64, 2048, 4, 2, 72, causal=True)
    first, second = (inputs.make(name, shape, dtype, "cpu") for _ in range(2))
    normal = bm.make_qkv(shape, dtype, "cpu")
    for x, again, like in zip(first, second, normal, strict=True):
        assert (x.shape, x.dtype, x.is_contiguous()) == (like.shape, dtype, True)
        assert torch.equal(x, again)
        assert x.isfinite().all()
    assert torch.equal(first[2], normal[2])  # V does not matter to speed
    other = inputs.make(name, shape, dtype, "cpu", seed=1)
    assert name == "constant" or not torch.equal(first[0], other[0])


def test_no_distribution_is_another():
    made = [inputs.make(name, SHAPE, torch.bfloat16, "cpu")[:2] for name in cli.INPUTS]
    for a, b in itertools.combinations(made, 2):
        assert not all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("name", "deviation", "limit"),
    [
        *(("normal", 1, 6), ("scaled4", 4, 24), ("scaled16", 16, 96), ("scaled64", 64, 384)),
        ("outliers", 160, 2000),
    ],
)
def test_scores_have_the_stated_deviation(name, deviation, limit):
    s = scores(name)
    assert s.mean().abs() < 0.1 * deviation
    assert s.std() == pytest.approx(deviation, rel=0.1)
    assert limit / 2 < s.abs().max() < limit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [40, 64, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "nats"), [("ramp", 3), ("steep_ramp", 60)])
def test_each_block_exceeds_those_visited_before_it(name, nats, causal, d, dtype):
    """Kernels visit blocks from the last key to the first; noise is the rest of N(0, 1)."""
    s = scores(name, bm.Shape(1, 256, 1024, 1, 1, d, causal), dtype)
    visited = block_maxima(s).flip(3)
    rises = visited.diff(dim=3)
    rises = rises[rises.isfinite()]  # the mask hides all scores of the blocks visited first
    assert rises.mean() == pytest.approx(nats, rel=0.1)
    # The maximum of 128 scores of N(0, 1) is between 1 and 5, so two maxima differ by less than 4.
    assert rises.min() > nats - 4
    assert (rises > 0).double().mean() > 0.99
    assert s[s.isfinite()].min() > -7
    assert s.max() < nats * 1024 / KEYS + 7


def test_a_ramp_of_the_longest_sequence_does_not_lose_its_steps_to_rounding():
    shape = bm.Shape(1, 1, 32768, 1, 1, 64, causal=False)
    rises = block_maxima(scores("steep_ramp", shape)).flip(3).diff(dim=3)
    assert rises.min() > 55 and rises.max() < 65


def test_a_ramp_up_has_its_greatest_block_first():
    visited = block_maxima(scores("ramp_up")).flip(3)
    assert visited.argmax(dim=3).eq(0).double().mean() > 0.99
    assert visited.diff(dim=3).mean() == pytest.approx(-3, rel=0.1)


def test_sinks_stand_out():
    s = scores("sink")
    sinks, rest = s[..., : inputs.SINKS], s[..., inputs.SINKS :]
    assert sinks.mean() == pytest.approx(15, abs=0.3)
    assert rest.mean() == pytest.approx(0, abs=0.1)
    assert sinks.std() == pytest.approx(1, rel=0.2) == rest.std()


@pytest.mark.parametrize("d", [64, 256])
def test_constant_scores_are_all_the_same(d):
    s = scores("constant", bm.Shape(1, 8, 16, 2, 1, d, causal=True))
    assert set(s.flatten().tolist()) == {-math.inf, math.sqrt(d)}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [64, 1024])
def test_each_query_has_one_key_that_it_sees(causal, seqlen_q):
    s = scores("peaked", bm.Shape(2, seqlen_q, 512, 4, 2, 64, causal))
    s = s[:, :, max(0, seqlen_q - 512) :] if causal else s  # earlier rows see no key
    best = s.max(dim=3)
    assert best.values.mean() == pytest.approx(20, rel=0.1)
    assert best.values.min() > 6 and best.values.max() < 36
    rest = s.masked_fill(torch.nn.functional.one_hot(best.indices, 512).bool(), -math.inf)
    assert rest[rest.isfinite()].std() == pytest.approx(20 / 8, rel=0.1)
    weights = s[:, :, 1:].softmax(dim=3).amax(dim=3)
    assert weights.median() > 0.99
    assert best.indices.unique().numel() > 100  # queries differ in their best key


def test_heavy_tails_are_heavy():
    q, k, _ = inputs.make("heavy_tailed", SHAPE, torch.float16, "cpu")
    x = torch.cat([q.flatten(), k.flatten()]).double()
    assert x.abs().max() > 30
    assert x.abs().max() <= 1024
    # Of Student's t with 3 degrees of freedom half is within 0.765 and 98 % within 4.541.
    assert x.abs().quantile(0.5) == pytest.approx(0.765, rel=0.02)
    assert x.abs().quantile(0.98) == pytest.approx(4.541, rel=0.05)
    s = scores("heavy_tailed").abs()
    assert s.median() < 10
    assert s.max() > 50


@pytest.mark.parametrize("d", [64, 256])
def test_positive_scores_lie_around_their_mean(d):
    s = scores("positive", bm.Shape(1, 256, 512, 4, 2, d, causal=False))
    assert (s - math.sqrt(d) / 4).abs().max() < 1.4
    assert s.mean() == pytest.approx(math.sqrt(d) / 4, rel=0.05)
