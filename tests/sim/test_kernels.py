"""All shipped kernels of the sm80 class on the CPU: correct by the rule used on a GPU, with exactly
the expected work."""

import pytest
import torch
from formulas import bytes_read, mma_count
from problems import SHAPES, problem
from tiers import shipped_configs

from flashcute import sim
from flashcute.testing import check_forward

CHECKERS = [checker for checker in sim.CHECKERS if checker != "none"]
CHECKED_HEAD_DIMS = (64, 128)
CHECKED = [config for config in shipped_configs(80) if config.head_dim in CHECKED_HEAD_DIMS]
SHIPPED = [(config, "none") for config in shipped_configs(80)]
OF_CHECKERS = [(config, checker) for config in CHECKED for checker in CHECKERS]
COMPILED = SHIPPED + OF_CHECKERS


@pytest.fixture(scope="module")
def kernels():
    """Compiles the shipped kernels in parallel."""
    sim.build_runners(["none"])
    return sim.build_kernels(SHIPPED)


@pytest.fixture(scope="module")
def checked_kernels():
    """Compiles in parallel the kernels that :func:`test_checkers_are_silent` runs."""
    sim.build_runners(CHECKERS)
    return sim.build_kernels(OF_CHECKERS)


@pytest.mark.parametrize("config", shipped_configs(80), ids=lambda c: c.name)
def test_work_done_is_the_work_planned(kernels, config):
    for name, shape in SHAPES.items():
        b, seqlen_q, seqlen_k, h, _, less = shape
        q, k, v = problem(config, shape)
        counters = sim.run_fwd(q, k, v, config).counters
        assert counters["mma"] == mma_count(config, b, seqlen_q, seqlen_k, h), name
        read = bytes_read(config, b, seqlen_q, seqlen_k, h, q.shape[3])
        assert counters["cp_async_bytes"] == read, name
        assert counters["global_store_bytes"] == q.numel() * 2, name
        conflicts = {key: n for key, n in counters.items() if key.endswith("_conflicts")}
        assert not any(conflicts.values()), f"{name}: {conflicts}"
        if less == 0:  # rows begin at sector boundaries, so every byte of a sector is used
            assert counters["cp_async_sectors"] * 32 == read, name
            assert counters["global_store_sectors"] * 32 == q.numel() * 2, name


@pytest.mark.parametrize("config", shipped_configs(80), ids=lambda c: c.name)
def test_no_false_alarm_under_many_schedules(kernels, config):
    q, k, v = problem(config, (1, 20, 100, 1, 1, 0))
    first = None
    for seed in range(50):
        result = sim.run_fwd(q, k, v, config, seed=seed, copy_mode=sim.COPY_MODES[seed % 2])
        assert result.verdict == "pass", f"seed {seed}: {result.message}"
        first = first or result
        # The schedule must not change the arithmetic, so any order of lanes gives the same bits.
        assert torch.equal(result.out, first.out), f"seed {seed}"
        assert torch.equal(result.lse, first.lse), f"seed {seed}"
        assert result.counters == first.counters, f"seed {seed}"


@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("head_dim", CHECKED_HEAD_DIMS)
def test_checkers_are_silent(checker, head_dim, checked_kernels):
    for config in shipped_configs(80):
        if config.head_dim == head_dim:
            q, k, v = problem(config, (1, 130, 150, 2, 1, 8))
            result = sim.run_fwd(q, k, v, config, checker=checker, seed=3)
            assert result.verdict == "pass", result.message
            check_forward(result.out, result.lse, q, k, v, causal=config.mask == "causal")
