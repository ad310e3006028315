"""The backward kernels of the sm80 class in the simulator."""

import dataclasses
import math

import bwd_checks
import mutants_bwd
import pytest
import tiers
import torch
from backward import (
    GRADIENTS,
    SHAPES,
    SPLIT,
    TOGETHER,
    check,
    check_large_scores,
    large_scores,
    make_problem,
    one_large_score,
    passed,
    same,
    with_mask,
)
from bwd_checks import mutant_problems
from mutants import ONE_STAGE, TWO_STAGES
from planted import build_mutants

from flashcute import heuristics, sim
from flashcute.config import DTYPES, HEAD_DIMS, MASKS

PAIR = (TOGETHER, SPLIT)
CONFIGS = [with_mask(config, mask) for config in PAIR for mask in MASKS]
FORWARDS = {TOGETHER: TWO_STAGES, SPLIT: ONE_STAGE}
COMPILED = [(config, "none") for config in (*CONFIGS, *FORWARDS.values())]
CHECKERS = [checker for checker in sim.CHECKERS if checker != "none"]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none"])
    return sim.build_kernels(COMPILED)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_gradients(config, shape):
    """Gradients with sinks and a gradient of the log-sum-exp, which the tests below leave out."""
    problem = make_problem(config, shape, extras=True)
    check(problem, problem.run(config))


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_in_use(dtype, head_dim):
    bwd_checks.check_tiles_in_use(heuristics.bwd_config, dtype, head_dim)


@pytest.mark.parametrize("order", ["bshd", "bhsd", "sbhd"])
@pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)
def test_strides_and_surroundings(config, order):
    bwd_checks.check_strides_and_surroundings(config, 100, order)


@pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)
def test_every_schedule_gives_the_same_bits(config):
    problem = make_problem(config, (2, 70, 100, 2, 1), extras=True)
    first = passed(problem.run(config))
    for seed, copy_mode in enumerate(2 * sim.COPY_MODES):
        again = passed(problem.run(config, seed=seed, copy_mode=copy_mode, sms=1 + seed))
        assert same(first, again, (*GRADIENTS, "dsinks"))
        assert first.counters == again.counters


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize("checker", CHECKERS)
def test_checkers_are_silent(checker):
    """Racecheck always runs in :func:`test_unmutated_kernels_pass_the_same_checks`."""
    config = TOGETHER
    problem = make_problem(config, (1, 70, 100, 2, 1), extras=True)
    check(problem, problem.run(config, checker=checker, seed=3))


@pytest.mark.parametrize("shape", SHAPES[1:5], ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_work_done_is_the_work_planned(config, shape):
    """Counters are exact, and shared memory has no bank conflicts."""
    bwd_checks.check_work_done(config, shape)


@pytest.mark.parametrize("wanted", [(), ("dq",), ("dk", "dv")], ids="-".join)
@pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)
def test_only_gradients_that_are_wanted_are_computed(config, wanted):
    problem = make_problem(config, (2, 100, 150, 4, 2), extras=True)
    every = passed(problem.run(config))
    some = passed(problem.run(config, wanted=wanted))
    assert some.outputs.keys() == {*wanted, "dsinks", "row_stats"}
    assert same(some, every, (*wanted, "dsinks"))
    parts = [passed(problem.run(config, wanted=x)).counters["mma"] for x in (("dq",), ("dk", "dv"))]
    assert min(parts) > 0 and sum(parts) == every.counters["mma"]
    assert some.counters["mma"] == {0: 0, 1: parts[0], 2: parts[1]}[len(wanted)]


def test_linear_in_the_gradient_of_the_output():
    bwd_checks.check_linear_in_the_gradient_of_the_output(SPLIT)


@pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)
def test_uniform_probabilities(config):
    bwd_checks.check_uniform_probabilities(config)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_rows_of_ds_sum_to_zero(config):
    bwd_checks.check_that_rows_of_ds_sum_to_zero(config)


@pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)
def test_rows_without_keys(config):
    bwd_checks.check_rows_without_keys(config)


@pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)
def test_keys_that_no_query_sees(config):
    bwd_checks.check_keys_that_no_query_sees(config)


@pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)
@pytest.mark.parametrize(("mask", "window"), [("none", (500, 500)), ("causal", (500, 0))])
def test_window_that_covers_all_equals_none(config, mask, window):
    bwd_checks.check_window_that_covers_all(config, mask, window, 170)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_keys_behind_the_last_one_do_not_count(config):
    bwd_checks.check_keys_behind_the_last_one(config)


@pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)
def test_sink_of_minus_infinity_equals_none(config):
    problem = make_problem(config, (1, 150, 70, 2, 2))
    none = passed(problem.run(config))
    result = passed(problem.run(config, sinks=torch.full((2,), -math.inf)))
    assert same(none, result) and not result.outputs["dsinks"].any()


def test_peaked_probabilities():
    """Scores are some hundreds, so that P is 0 or 1 nearly everywhere."""
    for config in PAIR:
        problem = make_problem(config, (1, 100, 150, 2, 1))
        problem = dataclasses.replace(problem, q=16 * problem.q)
        check(problem, problem.run(config))


@pytest.mark.parametrize("level", [2**12, -(2**16), 2**20])
@pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)
def test_large_scores(config, level):
    check_large_scores(large_scores(config, level), config, FORWARDS[config])


@pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)
def test_one_large_score(config):
    check_large_scores(one_large_score(config), config, FORWARDS[config])


@pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)
def test_recomputed_probabilities_are_those_of_the_forward(config):
    bwd_checks.check_recomputed_probabilities(config, FORWARDS[config])


def test_wrong_arguments_are_named():
    problem = make_problem(TOGETHER, (1, 5, 5, 2, 1))
    with pytest.raises(ValueError, match=r"sim.run_bwd: expected dout of the shape of q"):
        dataclasses.replace(problem, dout=problem.dout[:, :3]).run(TOGETHER)
    with pytest.raises(TypeError, match=r"sim.run_bwd: expected dout of dtype torch.float16"):
        dataclasses.replace(problem, dout=problem.dout.float()).run(TOGETHER)


MUTANTS = tiers.faults(mutants_bwd.MUTANTS)
FAULTLESS = [
    *bwd_checks.faultless(mutant.config for mutant in MUTANTS),
    *bwd_checks.faultless([TOGETHER], "racecheck"),
]
PLANTED = (*MUTANTS, *FAULTLESS)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Returns the kernels of all mutants by name."""
    return build_mutants(PLANTED, tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_found(mutant, planted):
    problems = mutant_problems(mutant.config)
    bwd_checks.check_that_mutant_is_found(mutant, planted[mutant.name], problems)


@pytest.mark.parametrize("faultless", FAULTLESS, ids=lambda m: m.name)
def test_unmutated_kernels_pass_the_same_checks(faultless, planted):
    problems = mutant_problems(faultless.config)
    bwd_checks.check_that_nothing_is_found(faultless, planted[faultless.name], problems)
