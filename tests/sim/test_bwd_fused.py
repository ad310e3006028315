"""The backward of the sm80 class that computes all gradients in one kernel, in the simulator."""

from __future__ import annotations

import bwd_checks
import mutants_bwd_fused
import pytest
import tiers
from backward import (
    SHAPES,
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
from mutants import Mutant
from mutants_bwd_fused import DIVIDED, FUSED, ONE_STAGE
from planted import build_mutants

from flashcute import heuristics, sim
from flashcute.config import DTYPES, HEAD_DIMS, MASKS, BwdConfig, BwdTile

# Four warps divide a step, whose dQ is computed in two parts.
_FOUR = BwdTile(64, 128, 8, 1, 1, 4)
FOUR = BwdConfig(80, "bf16", 64, "causal", _FOUR, _FOUR, fused=True)
PAIR = (FUSED, DIVIDED)
# Four warps divide the rows of dQ, as the head dimension has too few columns for four warps. It has
# two stages.
_UNEVEN = BwdTile(64, 64, 8, 2, 1, 2)
UNEVEN = BwdConfig(80, "bf16", 32, "causal", _UNEVEN, _UNEVEN, fused=True)
CONFIGS = [with_mask(config, mask) for config in PAIR for mask in MASKS]
CONFIGS += [ONE_STAGE, FOUR, UNEVEN]
COMPILED = [(config, "none") for config in CONFIGS]
CHECKERS = [checker for checker in sim.CHECKERS if checker != "none"]
each = pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none"])
    return sim.build_kernels(COMPILED)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_gradients(config, shape):
    """Gradients with sinks and a gradient of the log-sum-exp."""
    problem = make_problem(config, shape, extras=True)
    check(problem, problem.run(config))


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_in_use(dtype, head_dim):
    bwd_checks.check_tiles_in_use(heuristics.fused_bwd_config, dtype, head_dim)


@pytest.mark.parametrize("order", ["bshd", "bhsd", "sbhd"])
@each
def test_strides_and_surroundings(config, order):
    bwd_checks.check_strides_and_surroundings(config, 100, order)


@each
def test_only_the_sums_of_dq_depend_on_the_schedule(config):
    bwd_checks.check_that_schedules_change_only_the_sums_of_dq(config)


@each
def test_two_tiles_of_keys_add_to_dq_in_one_order(config):
    bwd_checks.check_that_two_tiles_of_keys_add_to_dq_in_one_order(config)


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("config", (*PAIR, ONE_STAGE), ids=lambda c: c.full_name)
def test_checkers_are_silent(config, checker):
    """Racecheck always runs in :func:`test_unmutated_kernels_pass_the_same_checks`."""
    problem = make_problem(config, (1, 70, 100, 2, 1), extras=True)
    check(problem, problem.run(config, checker=checker, seed=3))


@pytest.mark.parametrize("shape", SHAPES[1:5], ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_work_done_is_the_work_planned(config, shape):
    """Counters are exact, and shared memory has no bank conflicts."""
    bwd_checks.check_work_done(config, shape)


@pytest.mark.parametrize("wanted", [(), ("dq",), ("dk", "dv")], ids="-".join)
@each
def test_only_gradients_that_are_wanted_are_written(config, wanted):
    problem = make_problem(config, (2, 100, 120, 4, 2), extras=True)
    every = passed(problem.run(config))
    some = passed(problem.run(config, wanted=wanted))
    assert some.outputs.keys() == {*wanted, "dsinks", "row_stats", "dq_accum", "dq_semaphore"}
    assert same(some, every, (*wanted, "dsinks"))
    products = {(): 0, ("dq",): 5, ("dk", "dv"): 4}[wanted]
    assert 5 * some.counters["mma"] == products * every.counters["mma"]


@each
def test_uniform_probabilities(config):
    bwd_checks.check_uniform_probabilities(config)


@each
def test_rows_without_keys(config):
    bwd_checks.check_rows_without_keys(config)


@each
def test_keys_that_no_query_sees(config):
    bwd_checks.check_keys_that_no_query_sees(config)


@each
@pytest.mark.parametrize(("mask", "window"), [("none", (500, 500)), ("causal", (500, 0))])
def test_window_that_covers_all_equals_none(config, mask, window):
    bwd_checks.check_window_that_covers_all(config, mask, window, 120)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_keys_behind_the_last_one_do_not_count(config):
    bwd_checks.check_keys_behind_the_last_one(config)


@pytest.mark.parametrize("level", [2**12, -(2**16), 2**20])
@each
def test_large_scores(config, level):
    check_large_scores(large_scores(config, level), config, None)


@each
def test_one_large_score(config):
    check_large_scores(one_large_score(config), config, None)


MUTANTS = tiers.faults(mutants_bwd_fused.MUTANTS)
FAULTLESS = [
    *bwd_checks.faultless((FUSED, DIVIDED)),
    *bwd_checks.faultless((m.config for m in MUTANTS if m.finder == "racecheck"), "racecheck"),
    Mutant(
        "sums of single words, as GPUs before Hopper have them",
        "dq_sums.h",
        "#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900",
        "#if true",
        *("", "", DIVIDED),
    ),
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
