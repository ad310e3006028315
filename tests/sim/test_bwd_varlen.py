"""Ragged batches in the backward of the sm80 class: plans of query tiles and of key tiles, and all
options."""

import dataclasses
import functools
import itertools
import re

import mutants_bwd_varlen
import pytest
import tiers
import torch
from backward import GRADIENTS, make_problem, passed, same, with_mask
from backward_options import (
    BATCHES,
    COMPILED,
    HOSTILE,
    ORDER,
    RAGGED,
    SOME,
    TOGETHER,
    Behind,
    check_that_infinity_stays,
    make_hostile,
    make_ragged,
    one_of,
    outputs,
    permuted,
    run_dense,
)
from planted import build_mutants
from ragged import PADDED

from flashcute import sim
from flashcute.config import MASKS
from flashcute.heuristics import bwd_config, bwd_with_options, fused_bwd_config

PLANTED = mutants_bwd_varlen.MUTANTS if tiers.everything else mutants_bwd_varlen.FIRST
PLAIN = [config for config in RAGGED if not config.softcap]
EVERY = [config for config in RAGGED if config.softcap]
CAUSAL = [config for config in PLAIN if config.mask == "causal"]
CHECKERS = [checker for checker in sim.CHECKERS if checker != "none"]
each = pytest.mark.parametrize("config", RAGGED, ids=lambda c: c.full_name)
each_kind = pytest.mark.parametrize(  # several kernels, and one
    "config", (CAUSAL[0], CAUSAL[-1]), ids=lambda c: c.full_name
)
each_causal = pytest.mark.parametrize("config", CAUSAL, ids=lambda c: c.full_name)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none"])
    return sim.build_kernels(COMPILED)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return build_mutants(PLANTED, tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize("batch", BATCHES, ids=lambda b: "-".join(map(str, b[0])) or "none")
@each
def test_gradients(config, batch):
    """With sinks and a gradient of the log-sum-exp; rows of no sequence are NaN."""
    problem = make_ragged(config, batch)
    problem.check(problem.run(config))


@pytest.mark.parametrize("config", PLAIN, ids=lambda c: c.full_name)
def test_without_extras(config):
    problem = make_ragged(config, SOME, h=2, h_k=2, extras=False)
    problem.check(problem.run(config))


@each
def test_rows_that_are_not_used(config):
    """Unused rows are NaN, like the rows behind the sequences, and their gradients are 0."""
    problem = make_ragged(config, SOME, used=((64, 1, 0, 0, 129, 0), (130, 20, 3, 0, 0, 0)))
    problem.check(problem.run(config))


@pytest.mark.parametrize(("n", "m"), [(1, 0), (127, 3), (128, 128), (300, 1)])
@each_kind
def test_rows_before_the_first_sequence(config, n, m):
    """Rows before the first sequence are NaN and have gradients of 0, also if none follows."""
    for batch in (SOME, ((), ())):
        problem = Behind(make_ragged(config, batch), n, m)
        problem.check(problem.run(config))


@each_causal
def test_padding_around_the_tokens(config):
    batch, used = PADDED
    problem = make_ragged(config, batch, used=used)
    problem.check(problem.run(config, max_seqlen_q=90))


@each_causal
def test_bound_below_a_length(config):
    """A sequence's rows from max_seqlen_q on count as unused."""
    used = tuple(min(n, 100) for n in SOME[0]), SOME[1]
    problem = make_ragged(config, SOME, used=used)
    given = {"seqused_q": None, "seqused_k": None, "max_seqlen_q": 100}
    problem.check(problem.run(config, **given))
    whole = make_ragged(config, SOME)
    assert same(passed(whole.run(config, max_seqlen_q=10**9)), passed(whole.run(config)))


@each_causal
def test_equal_lengths_equal_a_dense_batch(config):
    """They are equal bit for bit; with more than two tiles of keys, where deterministic gradients
    are asked for."""
    dense = dataclasses.replace(config, varlen=False)
    for n, m in ((100, 70), (70, min(150, config.repeatable_keys)), (70, 200)):
        repeatable = {"deterministic": m == 200}
        problem = make_problem(dense, (3, n, m, 4, 2), extras=True)
        expected = run_dense(problem, dense, **repeatable)
        rows = {"q": n, "k": m, "v": m, "dout": n}
        flat = {name: getattr(problem, name).flatten(0, 1) for name in rows}
        ragged = make_ragged(config, ((n,) * 3, (m,) * 3), more=0, sinks=problem.options["sinks"])
        dlse = problem.dlse.transpose(0, 1).flatten(1)
        found = dataclasses.replace(ragged, dlse=dlse, **flat).run(config, **repeatable)
        for name, x in outputs(found).items():
            assert torch.equal(x, expected.outputs[name].flatten(0, 1)), name


@each_kind
def test_neighbours_do_not_matter(config):
    """A sequence among others of NaN has every bit that it has alone."""
    for m, repeatable in ((min(170, config.repeatable_keys), False), (170, True)):
        batch = (40, 150, 60), (50, m, 90)
        problem = make_ragged(config, batch)
        for i in range(3):
            alone, among, parts = one_of(problem, batch, i)
            result = among.run(config, seed=i, deterministic=repeatable)
            expected = outputs(alone.run(config, deterministic=repeatable))
            for name, part in parts.items():
                assert torch.equal(passed(result).outputs[name][part], expected[name]), name


@each_causal
def test_what_is_infinite_stays_in_its_sequence(config):
    check_that_infinity_stays(config)


@pytest.mark.parametrize("config", PLAIN, ids=lambda c: c.full_name)
def test_keys_behind_the_last_one_do_not_count(config):
    """Scores are far below 0, so that exp(0 - LSE), for a row of zeros behind the keys, is
    infinite."""
    problem = make_ragged(config, ((129, 65), (150, 20)), extras=False)
    problem = dataclasses.replace(problem, q=problem.q / 8 + 5, k=problem.k / 8 - 5)
    problem.check(problem.run(config))


@pytest.mark.parametrize("config", (*CAUSAL, EVERY[0]), ids=lambda c: c.full_name)
def test_order_of_sequences_does_not_matter(config):
    """Gradients are equal bit for bit; dropout is left out, as its mask depends on the order. The
    kernels are launched twice, as they overwrite the plans."""
    if config.dropout:
        config = dataclasses.replace(config, dropout=False)
    problem = make_ragged(config, SOME, more=0)
    other, parts = permuted(problem, SOME, ORDER)
    found, expected = outputs(other.run(config, launches=2)), outputs(problem.run(config))
    for name, part in parts.items():
        if name != "dq" or max(SOME[1]) <= config.repeatable_keys:
            assert torch.equal(found[name], expected[name][part]), name


@pytest.mark.parametrize(("mask", "window"), [("none", (500, 500)), ("causal", (500, 0))])
def test_window_that_covers_all_equals_none(mask, window):
    local, plain = (
        next(c for c in PLAIN if (c.head_dim, c.mask) == (32, m)) for m in ("local", mask)
    )
    problem = make_ragged(local, SOME, window_size=window)
    options = {**problem.options, "causal": mask == "causal", "window_size": (-1, -1)}
    expected = dataclasses.replace(problem, options=options).run(plain)
    assert same(passed(problem.run(local)), passed(expected), (*GRADIENTS, "dsinks"))


@pytest.mark.parametrize("config", EVERY, ids=lambda c: c.full_name)
def test_every_schedule_gives_the_same_bits(config):
    problem = make_ragged(config, ((70, 0, 130), (100, 50, 40)))
    first = passed(problem.run(config))
    for seed, copy_mode in enumerate(sim.COPY_MODES):
        again = passed(problem.run(config, seed=seed, copy_mode=copy_mode, sms=1 + seed))
        assert same(first, again, (*GRADIENTS, "dsinks"))


@pytest.mark.parametrize("wanted", [(), ("dq",), ("dk", "dv")], ids="-".join)
def test_only_gradients_that_are_wanted_are_computed(wanted):
    config = CAUSAL[0]
    problem = make_ragged(config, SOME)
    every, some = passed(problem.run(config)), passed(problem.run(config, wanted=wanted))
    assert some.outputs.keys() == {*wanted, "dsinks", "row_stats", "plan"}
    assert same(some, every, (*wanted, "dsinks"))
    assert (some.counters["mma"] < every.counters["mma"]) and bool(some.counters["mma"]) == bool(
        wanted
    )


@each_kind
def test_more_sequences_than_the_planner_has_threads(config):
    batch = tuple(i % 3 // 2 for i in range(600)), tuple(i % 7 for i in range(600))
    problem = make_ragged(config, batch, h=1, h_k=1)
    problem.check(problem.run(config))


def run_hostile(config, name, **options):
    """Runs a hostile batch. Its results are undefined, but each access must stay inside."""
    passed(make_hostile(config, name).run(config, **options))


HOSTILE_TO = mutants_bwd_varlen.CONFIG, CAUSAL[-1]
if tiers.everything:
    COMPILED = [*COMPILED, *((c, x) for c in HOSTILE_TO for x in ("memcheck", "ubcheck"))]
each_hostile = pytest.mark.parametrize("config", HOSTILE_TO, ids=lambda c: c.full_name)


@pytest.mark.parametrize("name", HOSTILE)
@each_hostile
def test_no_lengths_reach_beyond_the_tensors(config, name):
    """The simulator itself checks copies to shared memory, stores of 16 bytes and reductions."""
    run_hostile(config, name)


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize("checker", ["memcheck", "ubcheck"])
@each_hostile
def test_no_lengths_reach_beyond_any_memory(config, checker):
    for name in HOSTILE:
        run_hostile(config, name, checker=checker)
    problem = make_ragged(config, SOME, h=2, h_k=1)
    problem.check(problem.run(config, checker=checker))


def test_kernels_must_be_of_ragged_batches():
    with pytest.raises(ValueError, match=r"^sim.run_varlen_bwd: expected kernels of ragged"):
        make_ragged(with_mask(TOGETHER, "causal"), SOME).run(TOGETHER)


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("config", EVERY, ids=lambda c: c.full_name)
def test_checkers_are_silent(config, checker):
    problem = make_ragged(config, ((70, 0, 130), (100, 50, 40)), h=2, h_k=1)
    problem.check(problem.run(config, checker=checker))


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [*itertools.product(("fp16", "bf16"), (32, 64, 96, 128, 192, 256))]
)
def test_tiles_in_use(dtype, head_dim):
    kinds = bwd_config, fused_bwd_config
    for mask, several, kind in itertools.product(MASKS, (False, True), kinds):
        plain = kind(dtype, head_dim, mask)
        config = bwd_with_options(plain, several, several, several, varlen=True)
        problem = make_ragged(config, ((130, 0, 1), (70, 20, 150)))
        problem.check(problem.run(config))


@functools.cache
def mutant_problems():
    batches = (((40, 130, 1, 100), (130, 70, 40, 33)), 5), (SOME, 70), (((), ()), 5)
    return [make_ragged(mutants_bwd_varlen.CONFIG, batch, more=more) for batch, more in batches]


def find_fault(kernel):
    """Returns the report of a run, "numerics" if results are wrong, or None."""
    for problem in mutant_problems():
        result = problem.run(mutants_bwd_varlen.CONFIG, kernel=kernel, timeout=120)
        if result.verdict != "pass":
            return result.message
        try:
            problem.check(result)
        except AssertionError:
            return "numerics"
    return None


@pytest.mark.parametrize("mutant", PLANTED, ids=lambda m: m.name)
def test_mutant_is_found(mutant, planted):
    found = find_fault(planted[mutant.name])
    assert found and re.search(mutant.report or "^numerics$", found), f"{mutant.name}: {found}"


def test_unmutated_kernels_pass_the_same_checks():
    assert find_fault(kernel=None) is None
