"""Edge cases of the online softmax: when a block's maximum is computed, and that this changes no
other rows.

A row's scores here are random, plus a level per key block, in powers of two. Key blocks are visited
from the last to the first.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from problems import outweigh

from flashcute import sim
from flashcute.config import FwdConfig
from flashcute.reference_tiled import flash_attention_2
from flashcute.testing import LSE_ATOL, LSE_RTOL, check_forward

# fp16, whose range limits how far scores may exceed the reference.
SM80 = FwdConfig(80, "fp16", 32, "causal", 64, 32, 4, 1, 0, 2)
SM90 = FwdConfig(90, "fp16", 32, "causal", 128, 32, 8, 2, 0, 1, True)
CONFIGS = (SM80, SM90)
BF16 = tuple(dataclasses.replace(config, dtype="bf16") for config in CONFIGS)
COMPILED = [(config, "none") for config in (*CONFIGS, *BF16)]
D, BLOCK = 32, 32
ROWS = slice(11, None, 16)  # one a warp, of its second half: the other rows keep their level


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Compiles them side by side."""
    sim.build_runners(["none"])
    return sim.build_kernels(COMPILED)


def problem(levels, seqlen_q, seqlen_k, *, scale=D**-0.5, rows=slice(None), spread=1.0):
    """Returns q, k and v. levels: added to the scores of each key block, in the order of visits,
    for ``rows`` only.

    The first component of q and k makes the level, the others make random scores.
    """
    generator = torch.Generator().manual_seed(5)
    sizes = ((1, seqlen_q, 2, D), (1, seqlen_k, 1, D), (1, seqlen_k, 1, D))
    q, k, v = (torch.randn(size, generator=generator) for size in sizes)
    q *= spread * D**-0.5 / scale
    q[..., 0] = 0
    q[:, rows, :, 0] = 64
    level = torch.tensor(levels)[-1 - torch.arange(seqlen_k) // BLOCK]
    k[..., 0] = (level / (64 * scale * math.log2(math.e)))[None, :, None]
    return q.half(), k.half(), v.half()


def run(config, q, k, v, softmax_scale=None, copy_mode="late"):
    result = sim.run_fwd(
        q, k, v, config, softmax_scale=softmax_scale, copy_mode=copy_mode, sms=2, seed=1
    )
    assert result.verdict == "pass", result.message
    return result.out, result.lse


def all_configs(test):
    return pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)(test)


# P in fp16 has fewer bits below 2^-14, 9.7 nats below 1, and becomes 0 at 2^-25, 17.3 nats below 1.
@pytest.mark.parametrize("nats", [9.0, 11.0, 12.0, 13.0, 14.0, 15.0])
@pytest.mark.parametrize("config", (*CONFIGS, *BF16), ids=lambda c: c.full_name)
def test_many_small_weights_beside_a_large_one(config, nats):
    """The small weights together make the output, as the key that outweighs each of them has the
    value 0. This key comes first, so that its score is the reference of all others."""
    q, k, v = problem([0.0] * 64, 1, 2048)
    outweigh(q, k, v, nats)
    q, k, v = (x.bfloat16() if config.dtype == "bf16" else x for x in (q, k, v))
    check_forward(*run(config, q, k, v), q, k, v, causal=True)


@all_configs
@pytest.mark.parametrize("level", [-15.9, -17.3, -20.2])
def test_many_equal_small_weights_beside_a_large_one(config, level):
    """All weights are rounded alike, so that errors do not average out. They equal those of
    FlashAttention-2's order, in which the largest P of a row is 1."""
    q, k, v = problem([0.0] + [level] * 63, 1, 2048, spread=0.0)
    k[:, -1], k[:, -BLOCK:-1] = k[:, -1].clone(), k[:, 0, None]
    v[:] = 1
    v[:, -1] = 0
    out, lse = run(config, q, k, v)
    expected = flash_attention_2(q, k.flip(1), v.flip(1))  # visits the first key first
    torch.testing.assert_close(out, expected.out, atol=0, rtol=torch.finfo(q.dtype).eps)
    torch.testing.assert_close(lse, expected.lse, atol=LSE_ATOL, rtol=LSE_RTOL)


@all_configs
def test_rows_that_attend_to_themselves(config):
    """A row's own key outweighs each earlier one by 13 nats, and most of these come in later
    blocks."""
    q, k, v = problem([0.0] * 40, D // 2, 1280)
    own = torch.eye(D // 2, dtype=torch.float16)[None, :, None]
    q[..., D // 2 :] = 16 * own
    k[..., D // 2 :] = 0
    k[:, -D // 2 :, :, D // 2 :] = 13 / 16 * D**0.5 * own
    v.abs_()
    v[:, -D // 2 :] = 0
    check_forward(*run(config, q, k, v), q, k, v, causal=True)


# Where some rows rise, 14.9 is within what a thread's share of a sum may reach beside a maximum of
# 1, and 15.5 is not; fp16 holds up to 2^15.9.
@all_configs
@pytest.mark.parametrize("rows", [slice(None), ROWS], ids=["all rows", "some rows"])
@pytest.mark.parametrize(
    "rise", [0.0, 4.0, 8.9, 14.9, 15.5, 15.9, 21.5, 24.0, 100.0, 300.0, -20.0, -300.0]
)
def test_levels_that_rise(config, rise, rows):
    q, k, v = problem([rise * i for i in range(6)], 70, 192, rows=rows)
    check_forward(*run(config, q, k, v), q, k, v, causal=True)


@all_configs
def test_one_score_in_a_row_of_equal_ones(config):
    """All scores of all rows are equal but one, 2^20 above, in the block that is visited last."""
    q, k, v = problem([0.0] * 5, 64, 160, spread=0.0)
    k[0, 7, 0, 0] = 20 / (64 * D**-0.5 * math.log2(math.e))
    check_forward(*run(config, q, k, v), q, k, v, causal=True)


@all_configs
@pytest.mark.parametrize("level", [-2600.0, -40.0, 0.0, 40.0, 2600.0])
def test_scores_far_from_zero(config, level):
    """Scores are about 1e4 before the scale, so that relative to 0 weights vanish or overflow."""
    q, k, v = problem([level] * 4, 64, 128, rows=ROWS)
    check_forward(*run(config, q, k, v), q, k, v, causal=True)


@all_configs
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("rise", [0.0, 14.9, 24.0])
def test_scale_above_one(config, rise, scale):
    levels = [rise * i for i in range(5)]
    q, k, v = problem(levels, 64, 160, scale=scale)
    out, lse = run(config, q, k, v, softmax_scale=scale)
    check_forward(out, lse, q, k, v, causal=True, softmax_scale=scale)


@all_configs
@pytest.mark.parametrize("level", [-30.0, 0.0, 30.0])
def test_rows_whose_first_keys_come_in_an_unmasked_block(config, level):
    """Row 0 sees the first key block, or the first two, and none of those that are visited
    before."""
    for seqlen_k in (config.tile_m + BLOCK - 1, config.tile_m + 2 * BLOCK - 1):
        blocks = -(-seqlen_k // BLOCK)
        q, k, v = problem([0.0] * (blocks - 1) + [level], config.tile_m, seqlen_k, rows=ROWS)
        check_forward(*run(config, q, k, v), q, k, v, causal=True)


@all_configs
def test_scores_of_minus_infinity(config):
    """All scores are minus infinity in two unmasked blocks, which are visited before any other."""
    q, k, v = problem([0.0] * 6, 40, 192)
    k[0, 2 * BLOCK :, 0, 0] = -math.inf
    check_forward(*run(config, q, k, v), q, k, v, causal=True)


@all_configs
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fall", [0.0, 200.0])
def test_a_row_without_a_result_leaves_others_alone(config, fall, value):
    """The row makes its warp compute every block again."""
    q, k, v = problem([-fall * i for i in range(6)], 70, 192)
    q[0, 9, 1, 5] = value
    out, lse = run(config, q, k, v)
    assert out[0, 9, 1].isnan().all()
    check_forward(out, lse, q, k, v, causal=True)


@all_configs
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_key_without_a_result_leaves_rows_before_it_alone(config, value):
    q, k, v = problem([0.0] * 4, 64, 128)
    k[0, 100, 0, 0] = value
    out, lse = run(config, q, k, v)
    assert out[0, 36:].isnan().all()
    check_forward(out, lse, q, k, v, causal=True)


EXTREMES = [
    *((config, value) for config in CONFIGS for value in (8192.0, 3e4)),
    *((config, value) for config in BF16 for value in (3e4, 5e4, 1e8, 1e15, 1e18)),
]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("config", "value"), EXTREMES, ids=lambda x: getattr(x, "full_name", x))
def test_equal_scores_of_any_magnitude(config, value, sign):
    """The exponent of the maximum is exactly 0, and not the rounding error of m * c: with one FFMA
    for product and difference the output was NaN, or 0 with a log-sum-exp of minus infinity."""
    dtype = torch.float16 if config.dtype == "fp16" else torch.bfloat16
    q = torch.full((1, 40, 2, D), value, dtype=dtype)
    k = torch.full((1, 160, 1, D), sign * value, dtype=dtype)
    v = torch.randn(1, 160, 1, D, generator=torch.Generator().manual_seed(2)).to(dtype)
    out, lse = run(config, q, k, v)
    check_forward(out, lse, q, k, v, causal=True)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_huge_scores_that_differ_in_one_element(config):
    """Rows around 8192: the exact scores differ by more than their rounding, so one key wins."""
    q = torch.full((1, 40, 1, D), 8192.0, dtype=torch.float16)
    k = torch.full((1, 160, 1, D), 8192.0, dtype=torch.float16)
    k[0, :, 0, 3] += 8.0 * (torch.arange(160) % 9)
    v = torch.randn(1, 160, 1, D, generator=torch.Generator().manual_seed(3)).half()
    check_forward(*run(config, q, k, v), q, k, v, causal=True)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_rows_of_a_warp_of_which_some_are_huge(config):
    q, k, v = problem([0.0] * 5, 64, 160, rows=ROWS)
    q[0, 5] = 3e4
    k[0, :, 0, 1] = 3e4
    check_forward(*run(config, q, k, v), q, k, v, causal=True)


# Values of bf16 that stay exact whatever the scores do; see SECURITY.md.
@pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e26])
@pytest.mark.parametrize("rise", [0.0, 20.0, 80.0, 90.0, -80.0])
@pytest.mark.parametrize("config", BF16, ids=lambda c: c.full_name)
def test_the_range_of_values(config, rise, magnitude):
    q, k, v = (x.bfloat16() for x in problem([rise * i for i in range(5)], 64, 160))
    v *= magnitude
    out, lse = run(config, q, k, v)
    scaled = (x.float() / magnitude for x in (out, v))  # tolerances are absolute
    out, v = (x.bfloat16() for x in scaled)
    check_forward(out, lse, q, k, v, causal=True)


def test_results_do_not_depend_on_the_ctas_earlier_tiles():
    """Rows of the first head need their maxima in every block. Those of the second have one block
    in which the maximum stays within the range of P and sums do not: it is computed again, also
    where the CTA computed maxima first in the tile before."""
    q, k, v = problem([40.0 * i for i in range(6)], 300, 192, spread=0.1)
    k, v = k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)
    second = problem([0.0, 14.6, 14.6, 14.6, 14.6, 14.6], 300, 192, spread=0.1)[1]
    k[:, :, 1] = second[:, :, 0]
    runs = [
        sim.run_fwd(q, k, v, SM90, sms=sms, seed=seed) for sms, seed in ((1, 0), (2, 1), (6, 2))
    ]
    assert all(run.verdict == "pass" for run in runs)
    for run_ in runs[1:]:
        assert torch.equal(run_.out, runs[0].out)
        assert torch.equal(run_.lse, runs[0].lse)
