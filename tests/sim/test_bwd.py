"""The backward kernels of the sm80 class in the simulator."""

import dataclasses
import math
import re

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
    compare,
    large_scores,
    make_problem,
    one_large_score,
    passed,
    same,
    with_mask,
)
from mutants import ONE_STAGE, TWO_STAGES, Mutant
from mutants_bwd import MUTANTS
from planted import build_mutants, checker

from flashcute import heuristics, sim
from flashcute.config import DTYPES, HEAD_DIMS, MASKS
from flashcute.oracles import embed_in_nan
from flashcute.reference import attention_ref, visible_keys

PAIR = (TOGETHER, SPLIT)
CONFIGS = [with_mask(config, mask) for config in PAIR for mask in MASKS]
CHECKERS = [checker for checker in sim.CHECKERS if checker != "none"]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none"])
    return sim.build_kernels([(config, "none") for config in CONFIGS])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_gradients(config, shape):
    """With sinks and a gradient of the log-sum-exp; tests below do without."""
    problem = make_problem(config, shape, extras=True)
    check(problem, problem.run(config))


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_in_use(dtype, head_dim):
    for mask in MASKS:
        config = heuristics.bwd_config(dtype, head_dim, mask)
        problem = make_problem(config, (1, 130, 150, 2, 1), extras=True)
        check(problem, problem.run(config))


@pytest.mark.parametrize("order", ["bshd", "bhsd", "sbhd"])
@pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)
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
    """Racecheck is always asked by :func:`test_unmutated_kernels_pass_the_same_checks`."""
    config = TOGETHER
    problem = make_problem(config, (1, 70, 100, 2, 1), extras=True)
    check(problem, problem.run(config, checker=checker, seed=3))


def visits(problem, tile, *, owns_queries):
    """Pairs of an owned tile and a visited block that share a visible pair of a query and a key."""
    seqlen_q, seqlen_k = problem.q.shape[1], problem.k.shape[1]
    options = problem.options
    visible = visible_keys(seqlen_q, seqlen_k, options["causal"], options["window_size"])
    visible = visible if owns_queries else visible.T
    return sum(
        bool(block.any())
        for rows in visible.split(tile.rows, 0)
        for block in rows.split(tile.step, 1)
    )


def mma_count(config, problem):
    """Products of visible blocks alone: three for dQ, four for dK and dV, five where these are
    split."""
    b, _, h, _ = problem.q.shape
    products = 0
    for tile, count in ((config.dq, 3), (config.dkv, 5 if config.split_dkv else 4)):
        blocks = visits(problem, tile, owns_queries=tile is config.dq)
        products += blocks * count * tile.rows * tile.step * config.head_dim
    return b * h * products // (16 * 8 * 16)


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
    """Twice dO and dLSE: exactly twice every gradient. In bf16, whose range nothing leaves."""
    problem = make_problem(SPLIT, (1, 100, 150, 2, 1), extras=True)
    twice = dataclasses.replace(problem, dout=2 * problem.dout, dlse=2 * problem.dlse)
    once, double = passed(problem.run(SPLIT)), passed(twice.run(SPLIT))
    for name in (*GRADIENTS, "dsinks"):
        assert torch.equal(2 * once.outputs[name], double.outputs[name]), name


@pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)
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


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_rows_of_ds_sum_to_zero(config):
    """All keys have 1 in column 0, so dQ's column 0 is the scaled sum of a row of dS: 0 but for
    the roundings of dS and of the output in D."""
    problem = make_problem(config, (1, 100, 150, 2, 1))
    problem.k[..., 0] = 1
    result = passed(problem.run(config))
    out, _, p = attention_ref(
        problem.q, problem.k, problem.v, upcast=torch.float64, return_probs=True, **problem.options
    )
    dout, v = problem.dout.double().transpose(1, 2), problem.v.double().transpose(1, 2)
    ds = p * (dout @ v.mT - (dout * out.transpose(1, 2)).sum(-1, keepdim=True))
    d_error = (dout * out.transpose(1, 2)).abs().sum(-1)  # (b, h, seqlen_q)
    scale, half_ulp = problem.q.shape[3] ** -0.5, torch.finfo(problem.q.dtype).eps / 2
    bound = scale * half_ulp * (ds.abs().sum(-1) + d_error) + 1e-5
    assert (result.outputs["dq"][..., 0].double().transpose(1, 2).abs() <= bound).all()


@pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)
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


@pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)
def test_keys_that_no_query_sees(config):
    """What they hold reaches nothing: blocks outside of every window are not read."""
    config = with_mask(config, "local")
    problem = make_problem(config, (1, 20, 300, 2, 1), window=(30, 0))
    result = passed(problem.run(config))
    unseen = 300 - 20 - 30
    assert not result.outputs["dk"][:, :unseen].any()
    assert not result.outputs["dv"][:, :unseen].any()
    assert result.outputs["dk"][:, unseen:].any(-1).all()
    k, v = problem.k.clone(), problem.v.clone()
    k[:, :192], v[:, :192] = math.nan, math.nan
    assert same(result, passed(dataclasses.replace(problem, k=k, v=v).run(config)))


@pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)
@pytest.mark.parametrize(("mask", "window"), [("none", (500, 500)), ("causal", (500, 0))])
def test_window_that_covers_all_equals_none(config, mask, window):
    local = with_mask(config, "local")
    problem = make_problem(local, (1, 100, 170, 2, 1), window=window)
    assert same(passed(problem.run(local)), passed(problem.run(with_mask(config, mask))))


@pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)
def test_sink_of_minus_infinity_equals_none(config):
    problem = make_problem(config, (1, 150, 70, 2, 2))
    none = passed(problem.run(config))
    result = passed(problem.run(config, sinks=torch.full((2,), -math.inf)))
    assert same(none, result) and not result.outputs["dsinks"].any()


def test_peaked_probabilities():
    """Scores of some hundreds: P is 0 or 1 nearly everywhere."""
    for config in PAIR:
        problem = make_problem(config, (1, 100, 150, 2, 1))
        problem = dataclasses.replace(problem, q=16 * problem.q)
        check(problem, problem.run(config))


FORWARDS = {TOGETHER: TWO_STAGES, SPLIT: ONE_STAGE}


@pytest.mark.parametrize("level", [2**12, -(2**16), 2**20])
@pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)
def test_large_scores(config, level):
    check_large_scores(large_scores(config, level), config, FORWARDS[config])


@pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)
def test_one_large_score(config):
    check_large_scores(one_large_score(config), config, FORWARDS[config])


def test_wrong_arguments_are_named():
    problem = make_problem(TOGETHER, (1, 5, 5, 2, 1))
    with pytest.raises(ValueError, match=r"sim.run_bwd: expected dout of the shape of q"):
        dataclasses.replace(problem, dout=problem.dout[:, :3]).run(TOGETHER)
    with pytest.raises(TypeError, match=r"sim.run_bwd: expected dout of dtype torch.float16"):
        dataclasses.replace(problem, dout=problem.dout.float()).run(TOGETHER)


# A window with unseen keys; queries that see no key; more keys than queries, in groups.
MUTANT_SHAPES = ((1, 70, 200, 1, 1), (1, 150, 70, 2, 2), (2, 100, 150, 4, 2))
# Planted like a mutant, without a fault; the last one is compiled for racecheck.
_NOTHING = ("flash.h", "#pragma once", "#pragma once")
FAULTLESS = [
    *(
        Mutant(f"none in {c.full_name}", *_NOTHING, "", "", c)
        for c in dict.fromkeys(m.config for m in MUTANTS)
    ),
    Mutant("none in what is checked for races", *_NOTHING, "racecheck", "", TOGETHER),
]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The kernels of all mutants by name."""
    return build_mutants([*MUTANTS, *FAULTLESS], tmp_path_factory.mktemp("mutants"))


def wrong_numbers(problem, result):
    return not all(r.ok for r in compare(problem, result).values())


def wrong_counts(config, problem, result):
    counters = result.counters
    conflicts = any(n for name, n in counters.items() if name.endswith("_conflicts"))
    return conflicts or counters["mma"] != mma_count(config, problem)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_found(mutant, planted):
    config, (finder, _, copy_mode) = mutant.config, mutant.finder.partition("/")
    results = []
    for shape in MUTANT_SHAPES:
        problem = make_problem(config, shape, extras=True)
        if shape[1] > shape[2]:
            problem.options["sinks"] = None  # so that the LSE of empty rows is -inf
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
    for shape in MUTANT_SHAPES:
        problem = make_problem(config, shape, extras=True)
        options = {"kernel": planted[faultless.name], "checker": checker(faultless)}
        result = passed(problem.run(config, **options))
        assert not wrong_numbers(problem, result) and not wrong_counts(config, problem, result)
