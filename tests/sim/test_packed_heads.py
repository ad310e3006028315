"""Pack-GQA: the query heads of a key head as rows of one tile, in both kernel classes."""

import pytest
import torch
from mutants import ONE_STAGE, TWO_STAGES
from mutants_sm90 import ASKING, STRIDING
from problems import problem

from flashcute import sim
from flashcute.testing import check_forward

CONFIGS = (TWO_STAGES, ONE_STAGE, ASKING, STRIDING)
# (b, seqlen_q, seqlen_k, h, h_k): one position and several; whole powers of two and padded ones; a
# tile's edge within a position's heads; more heads than a warpgroup has rows; no visible key.
SHAPES = (
    (2, 1, 100, 8, 2),
    (1, 1, 70, 71, 1),
    (2, 5, 130, 10, 2),
    (1, 40, 65, 6, 1),
    (1, 3, 90, 130, 1),
    (2, 33, 20, 8, 4),
    (1, 50, 200, 16, 2),
    (1, 2, 0, 4, 2),
)
CHECKERS = [checker for checker in sim.CHECKERS if checker != "none"]
COMPILED = [(config, checker) for config in CONFIGS for checker in sim.CHECKERS]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(sim.CHECKERS)
    return sim.build_kernels(COMPILED)


def make_qkv(config, shape, seed=0):
    return problem(config, (*shape, 8), seed)  # the last columns have to be predicated


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_results(config, shape):
    for seed, copy_mode in enumerate(sim.COPY_MODES):
        q, k, v = make_qkv(config, shape, seed)
        options = {"seed": seed, "copy_mode": copy_mode, "sms": 2}
        result = sim.run_fwd(q, k, v, config, pack_heads=True, **options)
        assert result.verdict == "pass", result.message
        check_forward(result.out, result.lse, q, k, v, causal=config.mask == "causal")


@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_checkers_are_silent(config, checker):
    for shape in ((2, 5, 130, 10, 2), (1, 3, 90, 130, 1)):
        q, k, v = make_qkv(config, shape, 3)
        result = sim.run_fwd(q, k, v, config, pack_heads=True, checker=checker, seed=3, sms=2)
        assert result.verdict == "pass", result.message


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_keys_are_read_once_for_all_heads(config):
    """One position of eight heads is one tile and not eight, with the same bits, as a row's
    arithmetic does not depend on its place."""
    q, k, v = make_qkv(config, (1, 1, 100, 8, 1), 0)
    alone, packed = (sim.run_fwd(q, k, v, config, pack_heads=p, sms=1) for p in (False, True))
    assert torch.equal(alone.out, packed.out) and torch.equal(alone.lse, packed.lse)
    count = "wgmma" if config.arch == 90 else "mma"
    assert alone.counters[count] == 8 * packed.counters[count] > 0


def test_gaps_between_heads_and_rows_are_not_written():
    q, k, v = make_qkv(STRIDING, (2, 3, 40, 6, 2), 0)
    wide = torch.full((2, 4, 8, q.shape[3] + 8), 7.0, dtype=q.dtype)
    out = wide[:, :3, 1:7, : q.shape[3]]
    result = sim.run_fwd(q, k, v, STRIDING, pack_heads=True, out=out)
    assert result.verdict == "pass", result.message
    check_forward(result.out, result.lse, q, k, v, causal=False)
    written = torch.zeros_like(wide, dtype=torch.bool)
    written[:, :3, 1:7, : q.shape[3]] = True
    assert torch.equal(wide[~written], torch.full_like(wide[~written], 7.0))
