"""Softcap and ALiBi in the backward of the sm80 class; test_bwd_varlen.py tests ragged batches."""

import dataclasses

import pytest
import tiers
import torch
from backward import GRADIENTS, SHAPES, check, make_problem, passed, same, with_mask
from backward_options import (
    COMPILED,
    DENSE,
    SLOPED,
    SOFTCAP,
    check_shared_slopes,
    check_slopes_of_zero,
    make_dense,
    run_dense,
)

from flashcute import sim
from flashcute.heuristics import bwd_config, bwd_with_options, fused_bwd_config

each = pytest.mark.parametrize("config", DENSE, ids=lambda c: c.full_name)
CHECKERS = [checker for checker in sim.CHECKERS if checker != "none"]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none"])
    return sim.build_kernels(COMPILED)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@each
def test_gradients(config, shape):
    """Gradients with sinks and a gradient of the log-sum-exp."""
    problem = make_dense(config, shape)
    check(problem, run_dense(problem, config))


@each
def test_each_option_alone(config):
    """A softcap far beyond the scores, and slopes of 0, change nothing, so that the other option is
    alone."""
    for change in ({"softcap": 1e6}, {"alibi_slopes": torch.zeros(2, 4)}):
        problem = make_dense(config, (2, 100, 150, 4, 2), **change)
        result = run_dense(problem, config)
        without = {name: x for name, x in problem.options.items() if name not in change}
        check(dataclasses.replace(problem, options=without), result)


@pytest.mark.parametrize("cap", [0.01, 5.0, 50.0])
@each
def test_scores_far_beyond_the_cap(config, cap):
    """Scores far beyond the cap have a derivative of nearly 0."""
    problem = make_dense(config, (1, 100, 150, 2, 1), softcap=cap)
    problem = dataclasses.replace(problem, q=30 * problem.q)
    check(problem, run_dense(problem, config))


def test_slopes_of_zero_equal_none():
    check_slopes_of_zero(SLOPED)


def test_slopes_that_all_entries_share():
    check_shared_slopes(SLOPED)


@each
def test_every_schedule_gives_the_same_bits(config):
    problem = make_dense(config, (2, 70, 100, 2, 1))
    first = passed(run_dense(problem, config))
    for seed, copy_mode in enumerate(sim.COPY_MODES):
        again = passed(run_dense(problem, config, seed=seed, copy_mode=copy_mode, sms=1 + seed))
        assert same(first, again, (*GRADIENTS, "dsinks")) and first.counters == again.counters


def test_window_that_covers_all_equals_none():
    config = DENSE[0]
    problem = make_dense(config, (1, 100, 170, 2, 1), window_size=(500, 0))
    causal = with_mask(config, "causal")
    options = {**problem.options, "causal": True, "window_size": (-1, -1)}
    expected = run_dense(dataclasses.replace(problem, options=options), causal)
    assert same(passed(run_dense(problem, config)), passed(expected))


def test_options_must_be_those_of_the_kernels():
    problem = make_problem(DENSE[0], (1, 8, 8, 1, 1))
    with pytest.raises(ValueError, match=r"got softcap=0.0, .*softcap=True, alibi=True"):
        problem.run(DENSE[0])
    with pytest.raises(ValueError, match=rf"got softcap={SOFTCAP}, .*softcap=False"):
        problem.run(with_mask(SLOPED, "causal"), softcap=SOFTCAP)


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize("checker", CHECKERS)
def test_checkers_are_silent(checker):
    config = DENSE[0]
    problem = make_dense(config, (1, 70, 100, 2, 1))
    check(problem, run_dense(problem, config, checker=checker))


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_tiles_in_use(dtype, head_dim):
    for mask in ("none", "causal", "local"):
        for kind in (bwd_config, fused_bwd_config):
            plain = kind(dtype, head_dim, mask)
            config = bwd_with_options(plain, softcap=True, alibi=True, dropout=True)
            problem = make_dense(config, (1, 130, 150, 2, 1))
            check(problem, run_dense(problem, config))
