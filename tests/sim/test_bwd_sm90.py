"""The backward kernels of the sm90 class in the simulator."""

import dataclasses
import functools
import math
import re

import pytest
import tiers
import torch
from backward import (
    SHAPES,
    check,
    check_large_scores,
    compare,
    large_scores,
    make_problem,
    one_large_score,
    passed,
    same,
    with_mask,
)
from mutants import Mutant
from mutants_bwd_sm90 import COLUMNS, MUTANTS, ROWS, UNEVEN
from mutants_bwd_wide_sm90 import WIDE, WIDEST
from mutants_sm90 import ASKING
from planted import build_mutants, checker

from flashcute import heuristics, sim
from flashcute.config import DTYPES, HEAD_DIMS, MASKS
from flashcute.oracles import embed_in_nan
from flashcute.reference import visible_keys

EVERY = (ROWS, COLUMNS, UNEVEN, WIDE, WIDEST)
CONFIGS = [with_mask(config, mask) for config in EVERY for mask in MASKS]
# And several tiles for a CTA, whose keys are cut by the end.
LONG = (1, 300, 700, 2, 1)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none"])
    return sim.build_kernels([(config, "none") for config in CONFIGS])


@pytest.mark.parametrize("shape", (*SHAPES, LONG), ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_gradients(config, shape):
    problem = make_problem(config, shape, extras=True)
    check(problem, problem.run(config, copy_mode="random"))


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_in_use(dtype, head_dim):
    for mask in MASKS:
        config = heuristics.sm90_bwd_config(dtype, head_dim, mask)
        problem = make_problem(config, (1, 130, 150, 2, 1), extras=True)
        check(problem, problem.run(config))


@pytest.mark.parametrize("order", ["bshd", "bhsd", "sbhd"])
def test_strides_and_surroundings(order):
    """NaN around every input and output: neither read nor overwritten."""
    problem = make_problem(ROWS, (2, 70, 200, 2, 1))
    names = ("q", "k", "v", "dout")
    inputs = {name: embed_in_nan(getattr(problem, name), order).view for name in names}
    out, lse = problem.forward()
    shapes = {"dq": problem.q, "dk": problem.k, "dv": problem.v}
    outputs = {
        name: embed_in_nan(torch.full_like(x, math.nan), order) for name, x in shapes.items()
    }
    result = sim.run_bwd(
        ROWS,
        *(inputs[name] for name in "qkv"),
        embed_in_nan(out, order).view,
        lse,
        inputs["dout"],
        gradients={name: x.view for name, x in outputs.items()},
    )
    check(problem, result)
    assert all(x.untouched() for x in outputs.values())


@pytest.mark.parametrize("config", EVERY, ids=lambda c: c.full_name)
def test_only_the_sums_of_dq_depend_on_the_schedule(config):
    problem = make_problem(config, (1, 70, 500, 2, 1), extras=True)
    run = functools.partial(problem.run, config, sms=3 * config.cluster)
    first = passed(run())
    assert same(first, run())
    equal = []
    for seed, copy_mode in enumerate(2 * sim.COPY_MODES):
        again = run(seed=seed, copy_mode=copy_mode)
        check(problem, again)
        assert same(first, again, ("dk", "dv", "dsinks"))
        assert first.counters == again.counters
        equal.append(same(first, again, ("dq_accum",)))
    assert not all(equal)


@pytest.mark.parametrize("config", EVERY, ids=lambda c: c.full_name)
def test_two_tiles_of_keys_add_to_dq_in_one_order(config):
    """Of one more the schedule decides; the tests on a GPU ask for repeatable bits by this."""
    for keys, repeatable in ((config.repeatable_keys, True), (config.repeatable_keys + 60, False)):
        problem = make_problem(with_mask(config, "none"), (1, 70, keys, 2, 1))
        run = functools.partial(problem.run, with_mask(config, "none"))
        first = passed(run())
        schedules = enumerate(2 * sim.COPY_MODES)
        sms = 3 * config.cluster
        again = [run(seed=seed, copy_mode=mode, sms=sms) for seed, mode in schedules]
        assert all(same(first, passed(x), ("dq_accum",)) for x in again) == repeatable


@pytest.mark.parametrize("sms", [1, 2, 3])
@pytest.mark.parametrize("config", EVERY, ids=lambda c: c.full_name)
def test_few_sms(config, sms):
    """Fewer than a cluster has CTAs, and a number that whole clusters do not use up."""
    problem = make_problem(config, LONG)
    check(problem, problem.run(config, sms=sms))


@pytest.mark.parametrize("wanted", [(), ("dq",), ("dk", "dv")], ids="-".join)
def test_only_gradients_that_are_wanted_are_written(wanted):
    problem = make_problem(ROWS, (2, 100, 150, 4, 2), extras=True)
    every = passed(problem.run(ROWS))
    some = passed(problem.run(ROWS, wanted=wanted))
    assert some.outputs.keys() == {*wanted, "dsinks", "row_stats", "dq_accum"}
    assert same(some, every, (*wanted, "dsinks"))
    assert bool(some.counters["wgmma"]) == bool(wanted)


def visits(config, problem):
    """Pairs of a tile of keys and a block of queries that share a visible pair, of one head. The
    CTAs of a cluster share a tile."""
    seqlen_q, seqlen_k = problem.q.shape[1], problem.k.shape[1]
    options = problem.options
    visible = visible_keys(seqlen_q, seqlen_k, options["causal"], options["window_size"])
    return sum(
        bool(block.any())
        for rows in visible.split(config.dkv.step, 0)
        for block in rows.split(config.cluster * config.dkv.rows, 1)
    )


def instructions(config):
    """wgmmas of a visit: k16 steps of S, dP, dV and dK of each 64 keys, which one warpgroup
    computes, and of dQ in each of the two; of all CTAs of a cluster."""
    d, keys, queries = config.head_dim, config.cluster * config.dkv.rows, config.dkv.step
    return keys // 64 * (2 * d // 16 + 2 * queries // 16) + 2 * config.cluster * keys // 16


def wrong_counts(config, problem, result):
    counters = result.counters
    b, _, h, _ = problem.q.shape
    of_all_heads = b * h * visits(config, problem)
    dq_bytes = 4 * config.dkv.step * config.head_dim
    return (
        any(n for name, n in counters.items() if name.endswith("_conflicts"))
        or counters["wgmma"] != of_all_heads * instructions(config)
        or counters["reduction_bytes"] != of_all_heads * dq_bytes
    )


@pytest.mark.parametrize("shape", (*SHAPES[1:5], LONG), ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_work_done_is_the_work_planned(config, shape):
    """And shared memory is read and written without bank conflicts."""
    problem = make_problem(config, shape)
    assert not wrong_counts(config, problem, passed(problem.run(config)))


def infinite_behind_the_keys(config):
    """All scores far below 0, so that exp(0 - LSE), of a row of zeros, is infinite."""
    problem = make_problem(config, (1, 100, 150, 2, 1))
    ones = torch.ones_like(problem.q)
    return dataclasses.replace(problem, q=5 * ones + problem.q / 8, k=problem.k / 8 - 5)


@pytest.mark.parametrize("config", EVERY, ids=lambda c: c.full_name)
def test_keys_behind_the_last_one_do_not_count(config):
    config = with_mask(config, "none")
    problem = infinite_behind_the_keys(config)
    check(problem, problem.run(config))


@pytest.mark.parametrize("config", EVERY, ids=lambda c: c.full_name)
def test_rows_without_keys(config):
    problem = make_problem(config, (1, 150, 70, 2, 2), extras=True)
    problem.options["sinks"] = None
    result = problem.run(config)
    check(problem, result)
    assert not result.outputs["dq"][:, : 150 - 70].any()


FORWARDS = {COLUMNS: ASKING}  # others take what the reference returns


@pytest.mark.parametrize("level", [2**12, -(2**16), 2**20])
@pytest.mark.parametrize("config", EVERY, ids=lambda c: c.full_name)
def test_large_scores(config, level):
    check_large_scores(large_scores(config, level), config, FORWARDS.get(config))


@pytest.mark.parametrize("config", EVERY, ids=lambda c: c.full_name)
def test_one_large_score(config):
    check_large_scores(one_large_score(config), config, FORWARDS.get(config))


# A window with unseen keys; queries that see no key; more keys than queries, in groups; several
# tiles for a CTA.
MUTANT_SHAPES = ((1, 70, 200, 1, 1), (1, 150, 70, 2, 2), (2, 100, 150, 4, 2), LONG)
_NOTHING = ("flash.h", "#pragma once", "#pragma once")
FAULTLESS = [
    Mutant(f"none in {c.full_name}", *_NOTHING, "", "", c)
    for c in dict.fromkeys(m.config for m in MUTANTS)
]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The kernels of all mutants by name."""
    return build_mutants([*MUTANTS, *FAULTLESS], tmp_path_factory.mktemp("mutants"))


def problems(config):
    for shape in MUTANT_SHAPES:
        problem = make_problem(config, shape, extras=True)
        if shape[1] > shape[2]:
            problem.options["sinks"] = None  # so that the LSE of empty rows is -inf
        yield problem
    yield infinite_behind_the_keys(config)


def wrong_numbers(problem, result):
    return not all(r.ok for r in compare(problem, result).values())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_found(mutant, planted):
    config, (finder, _, copy_mode) = mutant.config, mutant.finder.partition("/")
    results = []
    for problem in problems(config):
        options = {"checker": checker(mutant), "copy_mode": copy_mode or "late"}
        result = problem.run(config, kernel=planted[mutant.name], timeout=120, **options)
        results.append(result)
        if result.verdict == "fail" and mutant.report and re.search(mutant.report, result.message):
            return
        if result.verdict == "pass":
            if finder == "numerics" and wrong_numbers(problem, result):
                return
            if finder == "counters" and wrong_counts(config, problem, result):
                assert not wrong_numbers(problem, result)
                return
    pytest.fail(f"{mutant.name} survived: {[(r.verdict, r.message) for r in results]}")


@pytest.mark.parametrize("faultless", FAULTLESS, ids=lambda m: m.name)
def test_unmutated_kernels_pass_the_same_checks(faultless, planted):
    config = faultless.config
    for problem in problems(config):
        result = passed(problem.run(config, kernel=planted[faultless.name]))
        assert not wrong_numbers(problem, result) and not wrong_counts(config, problem, result)
