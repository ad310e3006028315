"""All shipped kernels of the sm90 class on the CPU: correct by the rule used on a GPU, with exactly
the expected work."""

import pytest
import torch
from formulas import tma_bytes, wgmma_count
from mutants_sm90 import ASKING, STRIDING
from problems import SHAPES, problem
from tiers import shipped_configs

from flashcute import sim
from flashcute.testing import check_forward

CONFIGS = shipped_configs(90)
CHECKERS = [checker for checker in sim.CHECKERS if checker != "none"]
CHECKED = (ASKING, STRIDING)
SHIPPED = [(config, "none") for config in CONFIGS]
OF_CHECKERS = [(config, checker) for config in CHECKED for checker in CHECKERS]
COMPILED = SHIPPED + OF_CHECKERS
# Two persistent CTAs compute 3 or 4 tiles, one of them without keys.
SEVERAL_TILES = (1, 400, 200, 1, 1, 0)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Compiles the shipped kernels in parallel."""
    sim.build_runners(["none"])
    return sim.build_kernels(SHIPPED)


@pytest.fixture(scope="module")
def checked_kernels():
    """Compiles in parallel the kernels that :func:`test_checkers_are_silent` runs."""
    sim.build_runners(CHECKERS)
    return sim.build_kernels(OF_CHECKERS)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_results_and_work(config):
    for i, (name, shape) in enumerate(SHAPES.items()):
        b, seqlen_q, seqlen_k, h, _, _ = shape
        q, k, v = problem(config, shape)
        result = sim.run_fwd(q, k, v, config, seed=i, copy_mode=sim.COPY_MODES[i % 3], sms=2)
        assert result.verdict == "pass", f"{name}: {result.message}"
        check_forward(result.out, result.lse, q, k, v, causal=config.mask == "causal")
        counters = result.counters
        assert counters["wgmma"] == wgmma_count(config, b, seqlen_q, seqlen_k, h), name
        found = counters["tma_bytes"], counters["tma_zero_bytes"]
        assert found == tma_bytes(config, b, seqlen_q, seqlen_k, h, q.shape[3]), name


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_no_false_alarm_under_many_schedules(config):
    q, k, v = problem(config, SEVERAL_TILES)
    first = None
    for seed in range(50):
        copy_mode = sim.COPY_MODES[seed % 3]
        result = sim.run_fwd(q, k, v, config, seed=seed, copy_mode=copy_mode, sms=2)
        assert result.verdict == "pass", f"seed {seed}: {result.message}"
        first = first or result
        # The schedule must not change the arithmetic, so any order of lanes gives the same bits.
        assert torch.equal(result.out, first.out), f"seed {seed}"
        assert torch.equal(result.lse, first.lse), f"seed {seed}"
        assert result.counters == first.counters, f"seed {seed}"


def test_blocks_share_tiles_differently_from_seed_to_seed():
    config = next(c for c in CONFIGS if c.variant.startswith("128x128") and c.mask == "causal")
    q, k, v = problem(config, SEVERAL_TILES)
    shares = set()
    for seed in range(8):
        runs = [sim.run_fwd(q, k, v, config, seed=seed, sms=2, trace=True) for _ in range(2)]
        # The rows of Q that each of the two blocks has loaded, which a seed determines.
        of_q = [run.trace[run.trace[:, 1] == 0] for run in runs]
        loaded = [tuple(sorted(map(tuple, rows.tolist()))) for rows in of_q]
        assert loaded[0] == loaded[1]
        shares.add(loaded[0])
        assert runs[0].counters["atomics"] > 0
    assert len(shares) > 1


@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("config", CHECKED, ids=lambda c: c.full_name)
def test_checkers_are_silent(checker, config, checked_kernels):
    q, k, v = problem(config, (1, 300, 200, 2, 1, 8))
    result = sim.run_fwd(q, k, v, config, checker=checker, seed=3, sms=2, launches=2)
    assert result.verdict == "pass", result.message
    check_forward(result.out, result.lse, q, k, v, causal=config.mask == "causal")
