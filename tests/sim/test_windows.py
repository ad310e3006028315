"""Sliding windows, the mask ``"local"``, in both kernel classes."""

import dataclasses

import pytest
import torch
from formulas import mma_rows
from mutants import ONE_STAGE, TWO_STAGES
from mutants_sm90 import ASKING, STRIDING
from problems import problem

from flashcute import sim
from flashcute.testing import check_forward

CONFIGS = tuple(
    dataclasses.replace(config, mask="local")
    for config in (TWO_STAGES, ONE_STAGE, ASKING, STRIDING)
)
CHECKED = CONFIGS[0], CONFIGS[2]  # one of each class
CHECKERS = [checker for checker in sim.CHECKERS if checker != "none"]
COMPILED = [(c, "none") for c in CONFIGS] + [(c, x) for c in CHECKED for x in CHECKERS]
for mask in ("none", "causal"):
    COMPILED += [(dataclasses.replace(c, mask=mask), "none") for c in CHECKED]
# ((b, seqlen_q, seqlen_k, h, h_k), (left, right)): the diagonal alone; windows narrower and wider
# than a block, on one side and on both; more queries than keys, so that rows see nothing; more keys
# than queries; a window that ends before the keys begin; a window wider than everything.
PROBLEMS = (
    ((1, 130, 130, 1, 1), (0, 0)),
    ((1, 300, 300, 2, 1), (40, 0)),
    ((1, 200, 333, 1, 1), (0, 70)),
    ((2, 150, 400, 2, 2), (100, 33)),
    ((1, 300, 100, 1, 1), (20, 10)),
    ((1, 260, 70, 1, 1), (5, 100)),
    ((1, 5, 300, 2, 1), (64, 0)),
    ((1, 33, 0, 1, 1), (3, 3)),
    ((1, 250, 250, 1, 1), (1000, 1000)),
)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(sim.CHECKERS)
    return sim.build_kernels(COMPILED)


def make_qkv(config, shape, seed=0):
    return problem(config, (*shape, 8), seed)  # the last columns have to be predicated


@pytest.mark.parametrize(("shape", "window"), PROBLEMS, ids=lambda x: "-".join(map(str, x)))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_results(config, shape, window):
    for seed, copy_mode in enumerate(sim.COPY_MODES):
        q, k, v = make_qkv(config, shape, seed)
        options = {"seed": seed, "copy_mode": copy_mode, "sms": 2}
        result = sim.run_fwd(q, k, v, config, window_size=window, **options)
        assert result.verdict == "pass", result.message
        check_forward(result.out, result.lse, q, k, v, window_size=window)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_window_over_packed_heads(config):
    q, k, v = make_qkv(config, (1, 50, 200, 6, 2))
    result = sim.run_fwd(q, k, v, config, window_size=(60, 3), pack_heads=True, sms=2)
    assert result.verdict == "pass", result.message
    check_forward(result.out, result.lse, q, k, v, window_size=(60, 3))


@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("config", CHECKED, ids=lambda c: c.full_name)
def test_checkers_are_silent(config, checker):
    q, k, v = make_qkv(config, (1, 150, 300, 2, 1))
    result = sim.run_fwd(q, k, v, config, window_size=(50, 20), checker=checker, seed=3, sms=2)
    assert result.verdict == "pass", result.message


@pytest.mark.parametrize("config", CHECKED, ids=lambda c: c.full_name)
@pytest.mark.parametrize(("mask", "window"), [("none", (500, 500)), ("causal", (500, 0))])
def test_window_that_covers_all_equals_none(config, mask, window):
    """Results are equal bit for bit, as the same blocks are visited in the same order."""
    q, k, v = make_qkv(config, (1, 200, 270, 1, 1))
    local = sim.run_fwd(q, k, v, config, window_size=window, sms=2)
    plain = sim.run_fwd(q, k, v, dataclasses.replace(config, mask=mask), sms=2)
    assert torch.equal(local.out, plain.out) and torch.equal(local.lse, plain.lse)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_only_blocks_in_the_window_are_loaded(config):
    """(127, 0) over 1000 keys: each tile loads the keys of its rows and of 127 before."""
    q, k, v = make_qkv(config, (1, 1000, 1000, 1, 1))
    result = sim.run_fwd(q, k, v, config, window_size=(127, 0), sms=2)
    assert result.verdict == "pass", result.message
    m, n = config.tile_m, config.tile_n
    blocks = rows = 0
    for tile, first in enumerate(range(0, 1000, m)):
        begin, end = max(first - 127, 0) // n, -(-min(first + m, 1000) // n)
        blocks += end - begin
        rows += (end - begin) * mma_rows(config, tile, 1000)
    if config.arch == 80:
        # 16 x 8 x 16 products of Q K^T and P V
        assert result.counters["mma"] == rows // 16 * 2 * (n // 8) * (config.head_dim // 16)
    else:
        per_warpgroup = config.head_dim // 16 + n // 16
        assert result.counters["wgmma"] == blocks * (m // 64) * per_warpgroup
