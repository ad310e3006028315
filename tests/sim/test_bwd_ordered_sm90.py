"""Repeatable gradients of the sm90 class, for which tiles of keys add to dQ in a fixed order."""

import functools

import mutants_bwd_ordered_sm90
import pytest
import tiers
from backward import check, make_problem, passed, same, with_mask
from backward_options import SOME, make_ragged
from bwd_checks import faultless, semaphores_of
from mutants_bwd_sm90 import COLUMNS, ROWS
from mutants_bwd_wide_sm90 import WIDE
from ordered_checks import (
    WINDOW,
    check_order,
    check_that_it_is_found,
    check_without_fault,
    visitors,
)
from planted import build_mutants
from test_bwd_sm90 import OWNED

from flashcute import sim
from flashcute.config import MASKS
from flashcute.heuristics import bwd_with_options

# b, seqlen_q, seqlen_k, h, h_k, SMs: six tiles of keys a head; two tiles of keys, with queries that
# see no key and heads in groups.
SHAPES = ((2, 140, 700, 2, 1, 4), (1, 300, 200, 4, 2, 6))
# One configuration for each way to write dQ; the others differ from these in sizes.
DENSE = [with_mask(config, mask) for config in (ROWS, COLUMNS, WIDE) for mask in MASKS]
RAGGED = [bwd_with_options(config, varlen=True) for config in DENSE]
COMPILED = [(config, "none") for config in (*DENSE, *RAGGED)]
LONG = ((300, 40, 500), (500, 300, 500))
# With the window OF_RISING the first tiles visit fewer blocks than those behind them. None of these
# may come before the first tiles, as it would wait for ever on one SM.
RISING = ((1100, 100), (1100, 100))
OF_RISING = (0, 700)
# Long sequences, whose tiles have different numbers of blocks.
UNLIKE = ((100, 600), (1300, 1300))
MUTANTS = tiers.faults(mutants_bwd_ordered_sm90.MUTANTS)
FAULTLESS = faultless(mutant.config for mutant in MUTANTS)
PLANTED = (*MUTANTS, *FAULTLESS)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none"])
    return sim.build_kernels(COMPILED)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("config", DENSE, ids=lambda c: c.full_name)
def test_gradients_are_repeatable(config, shape):
    """A semaphore ends with the number of tiles that visit its block, times the CTAs of each."""
    *shape, sms = shape
    problem = make_problem(config, shape, extras=True, window=WINDOW)

    def run(**options):
        return problem.run(config, sms=sms, deterministic=True, **options)

    result = check_order(run, lambda x: check(problem, x))
    keys, queries = config.cluster * config.dkv.rows, config.dkv.step
    counts = visitors(*shape[1:3], config.mask, queries, keys)
    found = semaphores_of(problem, config, result).flatten(0, 1)
    assert all(row == [config.cluster * x for x in counts] for row in found.tolist())


@pytest.mark.parametrize("shape", OWNED, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize(
    "config", [c for c in DENSE if c.head_dim <= 128], ids=lambda c: c.full_name
)
def test_heads_owned_by_a_cta_are_as_without(config, shape):
    problem = make_problem(config, shape, extras=True, window=WINDOW)
    assert same(passed(problem.run(config)), passed(problem.run(config, deterministic=True)))


def ragged_problem(config, batch, window):
    window = {"window_size": window} if config.mask == "local" else {}
    return make_ragged(config, batch, **window)


@pytest.mark.parametrize(
    ("config", "batch"),
    [
        pytest.param(config, batch, id=f"{config.full_name}-{name}")
        for config in RAGGED
        for name, batch in (("some", SOME), ("long", LONG))
        # Configurations with clusters take as long as all others together.
        if tiers.everything or config.cluster == 1 or name == "some"
    ],
)
def test_gradients_of_a_ragged_batch_are_repeatable(config, batch):
    problem = ragged_problem(config, batch, WINDOW)
    check_order(
        lambda **options: problem.run(config, sms=4, deterministic=True, **options), problem.check
    )


@pytest.mark.parametrize("config", [c for c in RAGGED if c.mask == "local"], ids=lambda c: c.name)
def test_tiles_of_a_plan_are_in_order(config):
    problem = ragged_problem(config, RISING, OF_RISING)
    problem.check(problem.run(config, sms=1, deterministic=True))


@functools.cache
def mutant_problems(config):
    if config.varlen:
        batch = RISING if config.mask == "local" else UNLIKE
        return [(ragged_problem(config, batch, OF_RISING), 1)]
    shapes = ((1, 500, 500, 1, 1, 8), (1, 300, 700, 2, 1, 12), *SHAPES, (*OWNED[1], 3))
    return [
        (make_problem(config, shape, extras=True, window=WINDOW), sms) for *shape, sms in shapes
    ]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return build_mutants(PLANTED, tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_found(mutant, planted):
    check_that_it_is_found(mutant, mutant_problems(mutant.config), planted[mutant.name])


@pytest.mark.parametrize("faultless", FAULTLESS, ids=lambda m: m.name)
def test_unmutated_kernels_pass_the_same_checks(faultless, planted):
    check_without_fault(faultless, mutant_problems(faultless.config), planted[faultless.name])
