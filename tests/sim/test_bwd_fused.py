"""The backward of the sm80 class that computes all gradients in one kernel, in the simulator."""

from __future__ import annotations

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
from mutants_bwd_fused import DIVIDED, FUSED, MUTANTS, ONE_STAGE
from planted import build_mutants, checker

from flashcute import heuristics, sim
from flashcute.config import DTYPES, HEAD_DIMS, MASKS, BwdConfig, BwdTile
from flashcute.oracles import embed_in_nan
from flashcute.reference import visible_keys

# Four warps on a step, whose dQ is computed in two parts.
_FOUR = BwdTile(64, 128, 8, 1, 1, 4)
FOUR = BwdConfig(80, "bf16", 64, "causal", _FOUR, _FOUR, fused=True)
PAIR = (FUSED, DIVIDED)
# Four warps divide the rows of dQ, as the head dimension has no columns for four; two stages.
_UNEVEN = BwdTile(64, 64, 8, 2, 1, 2)
UNEVEN = BwdConfig(80, "bf16", 32, "causal", _UNEVEN, _UNEVEN, fused=True)
CONFIGS = [with_mask(config, mask) for config in PAIR for mask in MASKS]
CONFIGS += [ONE_STAGE, FOUR, UNEVEN]
BUT_DQ = ("dk", "dv", "dsinks")
CHECKERS = [checker for checker in sim.CHECKERS if checker != "none"]
each = pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none"])
    return sim.build_kernels([(config, "none") for config in CONFIGS])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_gradients(config, shape):
    """With sinks and a gradient of the log-sum-exp."""
    problem = make_problem(config, shape, extras=True)
    check(problem, problem.run(config))


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_in_use(dtype, head_dim):
    for mask in MASKS:
        config = heuristics.fused_bwd_config(dtype, head_dim, mask)
        problem = make_problem(config, (1, 130, 150, 2, 1), extras=True)
        check(problem, problem.run(config))


@pytest.mark.parametrize("order", ["bshd", "bhsd", "sbhd"])
@each
def test_strides_and_surroundings(config, order):
    """NaN around every input and output: neither read nor overwritten."""
    problem = make_problem(config, (2, 70, 100, 2, 1))
    names = ("q", "k", "v", "dout")
    inputs = {name: embed_in_nan(getattr(problem, name), order).view for name in names}
    out, lse = problem.forward()
    shapes = {"dq": problem.q, "dk": problem.k, "dv": problem.v}
    outputs = {
        name: embed_in_nan(torch.full_like(x, math.nan), order) for name, x in shapes.items()
    }
    result = sim.run_bwd(
        config,
        *(inputs[name] for name in "qkv"),
        embed_in_nan(out, order).view,
        lse,
        inputs["dout"],
        gradients={name: x.view for name, x in outputs.items()},
    )
    check(problem, result)
    assert same(result, problem.run(config))
    assert all(x.untouched() for x in outputs.values())


@each
def test_only_the_sums_of_dq_depend_on_the_schedule(config):
    problem = make_problem(config, (1, 70, 500, 2, 1), extras=True)
    run = functools.partial(problem.run, config, sms=3)
    first = passed(run())
    assert same(first, run())
    equal = []
    for seed, copy_mode in enumerate(2 * sim.COPY_MODES):
        again = run(seed=seed, copy_mode=copy_mode)
        check(problem, again)
        assert same(first, again, BUT_DQ) and first.counters == again.counters
        equal.append(same(first, again, ("dq_accum",)))
    assert not all(equal)


@each
def test_two_tiles_of_keys_add_to_dq_in_one_order(config):
    """Of one more the schedule decides; the tests on a GPU ask for repeatable bits by this."""
    config = with_mask(config, "none")
    for keys, repeatable in ((config.repeatable_keys, True), (config.repeatable_keys + 60, False)):
        problem = make_problem(config, (1, 70, keys, 2, 1))
        first = passed(problem.run(config))
        schedules = enumerate(2 * sim.COPY_MODES)
        again = [problem.run(config, seed=seed, copy_mode=mode, sms=3) for seed, mode in schedules]
        assert all(same(first, passed(x), ("dq_accum",)) for x in again) == repeatable


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("config", (*PAIR, ONE_STAGE), ids=lambda c: c.full_name)
def test_checkers_are_silent(config, checker):
    """Racecheck is always asked by :func:`test_unmutated_kernels_pass_the_same_checks`."""
    problem = make_problem(config, (1, 70, 100, 2, 1), extras=True)
    check(problem, problem.run(config, checker=checker, seed=3))


def mma_count(config, problem):
    """Five products of visible blocks."""
    b, seqlen_q, h, _ = problem.q.shape
    options, tile = problem.options, config.dkv
    seqlen_k = problem.k.shape[1]
    visible = visible_keys(seqlen_q, seqlen_k, options["causal"], options["window_size"])
    blocks = sum(
        bool(block.any())
        for rows in visible.split(tile.step, 0)
        for block in rows.split(tile.rows, 1)
    )
    return b * h * blocks * 5 * tile.rows * tile.step * config.head_dim // (16 * 8 * 16)


@pytest.mark.parametrize("shape", SHAPES[1:5], ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_work_done_is_the_work_planned(config, shape):
    """And shared memory is read and written without bank conflicts."""
    problem = make_problem(config, shape)
    counters = passed(problem.run(config)).counters
    assert counters["mma"] == mma_count(config, problem)
    assert not any(n for name, n in counters.items() if name.endswith("_conflicts"))
    gradients = problem.q.numel() + problem.k.numel() + problem.v.numel()
    assert counters["global_store_bytes"] == 2 * gradients


@pytest.mark.parametrize("wanted", [(), ("dq",), ("dk", "dv")], ids="-".join)
@each
def test_only_gradients_that_are_wanted_are_written(config, wanted):
    problem = make_problem(config, (2, 100, 120, 4, 2), extras=True)
    every = passed(problem.run(config))
    some = passed(problem.run(config, wanted=wanted))
    assert some.outputs.keys() == {*wanted, "dsinks", "row_stats", "dq_accum"}
    assert same(some, every, (*wanted, "dsinks"))
    products = {(): 0, ("dq",): 5, ("dk", "dv"): 4}[wanted]
    assert 5 * some.counters["mma"] == products * every.counters["mma"]


@each
def test_uniform_probabilities(config):
    """Q = 0 and 64 keys: dV is the mean of dO over the group's queries and heads, times their
    number over 64, exactly; dK is 0."""
    config = with_mask(config, "none")
    problem = make_problem(config, (2, 90, 64, 4, 2))
    integers = torch.randint(-8, 9, problem.dout.shape, generator=torch.Generator().manual_seed(1))
    problem = dataclasses.replace(
        problem, q=torch.zeros_like(problem.q), dout=integers.to(problem.dout.dtype)
    )
    result = passed(problem.run(config))
    expected = integers.double().sum(1).unflatten(1, (2, 2)).sum(2) / 64  # (b, h_k, d)
    dv = result.outputs["dv"]
    assert torch.equal(dv, expected[:, None].expand(dv.shape).to(dv.dtype))
    assert not result.outputs["dk"].any()


@each
def test_rows_without_keys(config):
    """Whatever the gradient of their log-sum-exp, -inf, is: they take part in nothing."""
    problem = make_problem(config, (1, 150, 70, 2, 2), extras=True)
    problem.options["sinks"] = None
    garbage = problem.dlse.clone()
    garbage[:, :, : 150 - 70] = math.nan
    result = problem.run(config)
    check(problem, result)
    assert not result.outputs["dq"][:, : 150 - 70].any()
    assert same(result, passed(dataclasses.replace(problem, dlse=garbage).run(config)))


@each
def test_keys_that_no_query_sees(config):
    """What they hold reaches nothing: blocks outside of every window are not read."""
    config = with_mask(config, "local")
    problem = make_problem(config, (1, 20, 300, 2, 1), window=(30, 0))
    result = passed(problem.run(config))
    unseen = 300 - 20 - 30
    for name in ("dk", "dv"):
        assert not result.outputs[name][:, :unseen].any()
        assert result.outputs[name][:, unseen:].any(-1).all()
    k, v = problem.k.clone(), problem.v.clone()
    k[:, :192], v[:, :192] = math.nan, math.nan
    assert same(result, passed(dataclasses.replace(problem, k=k, v=v).run(config)))


@each
@pytest.mark.parametrize(("mask", "window"), [("none", (500, 500)), ("causal", (500, 0))])
def test_window_that_covers_all_equals_none(config, mask, window):
    local = with_mask(config, "local")
    problem = make_problem(local, (1, 100, 120, 2, 1), window=window)
    assert same(passed(problem.run(local)), passed(problem.run(with_mask(config, mask))))


@pytest.mark.parametrize("level", [2**12, -(2**16), 2**20])
@each
def test_large_scores(config, level):
    check_large_scores(large_scores(config, level), config, None)


@each
def test_one_large_score(config):
    check_large_scores(one_large_score(config), config, None)


# A window with unseen keys; queries that see no key; more keys than queries, in groups.
MUTANT_SHAPES = ((1, 70, 200, 1, 1), (1, 150, 70, 2, 2), (2, 100, 150, 4, 2))
_NOTHING = ("flash.h", "#pragma once", "#pragma once")
RACES = tuple(dict.fromkeys(m.config for m in MUTANTS if m.finder == "racecheck"))
# Planted like a mutant, without a fault.
FAULTLESS = [
    *(Mutant(f"none in {c.full_name}", *_NOTHING, "", "", c) for c in (FUSED, DIVIDED)),
    *(Mutant(f"no races in {c.full_name}", *_NOTHING, "racecheck", "", c) for c in RACES),
    Mutant(
        "sums of single words, as GPUs before Hopper have them",
        "dq_sums.h",
        "#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900",
        "#if true",
        *("", "", DIVIDED),
    ),
]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The kernels of all mutants by name."""
    return build_mutants([*MUTANTS, *FAULTLESS], tmp_path_factory.mktemp("mutants"))


def wrong_numbers(problem, result):
    return not all(r.ok for r in compare(problem, result).values())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_found(mutant, planted):
    config, (finder, _, copy_mode) = mutant.config, mutant.finder.partition("/")
    results = []
    for shape in MUTANT_SHAPES:
        problem = make_problem(config, shape, extras=True)
        options = {"checker": checker(mutant), "copy_mode": copy_mode or "late"}
        result = problem.run(config, kernel=planted[mutant.name], timeout=120, **options)
        results.append(result)
        if result.verdict == "fail" and mutant.report and re.search(mutant.report, result.message):
            return
        if result.verdict == "pass" and finder == "numerics" and wrong_numbers(problem, result):
            return
    pytest.fail(f"{mutant.name} survived: {[(r.verdict, r.message) for r in results]}")


@pytest.mark.parametrize("faultless", FAULTLESS, ids=lambda m: m.name)
def test_unmutated_kernels_pass_the_same_checks(faultless, planted):
    config = faultless.config
    for shape in MUTANT_SHAPES:
        problem = make_problem(config, shape, extras=True)
        options = {"kernel": planted[faultless.name], "checker": checker(faultless)}
        result = passed(problem.run(config, **options))
        assert not wrong_numbers(problem, result)
        assert result.counters["mma"] == mma_count(config, problem)
