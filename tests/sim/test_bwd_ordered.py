"""Repeatable gradients of the sm80 class's one kernel, whose tiles of keys add to dQ in order."""

from __future__ import annotations

import functools

import mutants_bwd_ordered
import pytest
import tiers
from backward import check, make_problem, passed, same, with_mask
from backward_options import DENSE as DENSE_WITH_OPTIONS
from backward_options import RAGGED as RAGGED_WITH_OPTIONS
from backward_options import SOME, asking, make_dense, make_ragged, run_dense
from bwd_checks import faultless
from mutants_bwd_fused import DIVIDED, FUSED, ONE_STAGE
from ordered_checks import (
    WINDOW,
    check_order,
    check_that_it_is_found,
    check_without_fault,
    visitors,
)
from planted import build_mutants

from flashcute import sim
from flashcute.config import BWD_OPTIONS, MASKS, ROW_STATS_MULTIPLE, SEMAPHORE_ROWS
from flashcute.heuristics import bwd_with_options

# b, seqlen_q, seqlen_k, h, h_k, SMs: up to eleven tiles of keys; queries that see no key, with
# heads in groups; heads that are scheduled two at a time, and one at a time. There are fewer SMs
# than tiles that wait for each other.
SHAPES = (
    (2, 140, 700, 2, 1, 4),
    (1, 300, 200, 4, 2, 6),
    (1, 300, 500, 1, 1, 1),
    (3, 90, 200, 2, 1, 2),
)
DENSE = [with_mask(config, mask) for config in (FUSED, DIVIDED) for mask in MASKS] + [ONE_STAGE]
RAGGED = [bwd_with_options(config, varlen=True) for config in DENSE[:6]]
IN_REGISTERS = asking(FUSED, "causal", *BWD_OPTIONS[:3])  # P is in registers, with two stages
WITH_OPTIONS = [c for c in (*DENSE_WITH_OPTIONS, *RAGGED_WITH_OPTIONS) if c.fused and c.dropout]
WITH_OPTIONS.append(IN_REGISTERS)
COMPILED = [(config, "none") for config in (*DENSE, *RAGGED, *WITH_OPTIONS)]
# With the window OF_RISING the first tiles visit fewer blocks than those behind them.
RISING = ((300, 100), (300, 100))
OF_RISING = (0, 190)
# Two sequences have the same lengths, and one has no keys.
TURNS = ((130, 0, 40, 200, 90, 40), (500, 70, 300, 260, 0, 300))
MANY = (9,) * 200, (17, 70) * 100
CAUSAL = [config for config in RAGGED if config.mask == "causal"]
MUTANTS = tiers.faults(mutants_bwd_ordered.MUTANTS)
FAULTLESS = faultless(mutant.config for mutant in MUTANTS)
PLANTED = (*MUTANTS, *FAULTLESS)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none"])
    return sim.build_kernels(COMPILED)


def check_semaphores(result, config, n: int, m: int, heads: int) -> int:
    """Asserts that each semaphore ends with the number of tiles that visit its block. Returns how
    many tiles were drawn."""
    counts = visitors(n, m, config.mask, ROW_STATS_MULTIPLE, config.dkv.rows)
    *found, drawn = result.outputs["dq_semaphore"].tolist()
    words = len(found) // heads
    every = ROW_STATS_MULTIPLE // SEMAPHORE_ROWS
    for head in range(heads):
        of_head = found[head * words : (head + 1) * words]
        assert of_head[::every][: len(counts)] == counts
    return drawn


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("config", DENSE, ids=lambda c: c.full_name)
def test_gradients_are_repeatable(config, shape):
    *shape, sms = shape
    b, n, m, h, _ = shape
    problem = make_problem(config, shape, extras=True, window=WINDOW)

    def run(**options):
        return problem.run(config, sms=sms, deterministic=True, **options)

    result = check_order(run, lambda x: check(problem, x))
    drawn = check_semaphores(result, config, n, m, heads=b * h)
    assert drawn == -(-m // config.dkv.rows) * b * shape[4]


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_of_the_heads_keep_an_order_of_their_own(parts):
    problem = make_problem(FUSED, (1, 140, 300, 4, 1), extras=True)
    check_order(
        lambda **options: problem.run(
            FUSED, sms=5, deterministic=True, head_parts=parts, **options
        ),
        lambda result: check(problem, result),
    )


@pytest.mark.parametrize("wanted", [("dq",), ("dk", "dv")], ids="-".join)
def test_some_gradients(wanted):
    problem = make_problem(FUSED, (1, 140, 300, 4, 2), extras=True)
    every = passed(problem.run(FUSED, sms=4, deterministic=True))
    some = passed(problem.run(FUSED, sms=4, deterministic=True, wanted=wanted))
    assert same(some, every, (*wanted, "dsinks"))


@pytest.mark.parametrize("config", RAGGED, ids=lambda c: c.full_name)
def test_gradients_of_a_ragged_batch_are_repeatable(config):
    window = {"window_size": WINDOW} if config.mask == "local" else {}
    problem = make_ragged(config, SOME, **window)
    check_order(
        lambda **options: problem.run(config, sms=4, deterministic=True, **options), problem.check
    )


@pytest.mark.parametrize("config", [c for c in RAGGED if c.mask == "local"], ids=lambda c: c.name)
def test_tiles_of_a_plan_are_in_order(config):
    """On one SM a tile that comes ahead of one for which it waits would wait for ever."""
    problem = make_ragged(config, RISING, window_size=OF_RISING)
    problem.check(problem.run(config, sms=1, deterministic=True))


def tiles_in_turns(config, batch, more, size):
    """Yields (segment, tile) in the order of a plan in which ``size`` sequences take turns.
    Sequence i is segment 2 i + 1; the last segment is rows of no sequence."""
    segments = [(0, 0)]
    for n, m in zip(*batch, strict=True):
        step = config.dkv.step
        segments += (-(-n // step) - max(n - m, 0) // step, -(-m // config.dkv.rows)), (0, 0)
    segments[-1] = 0, -(-more // config.dkv.rows)
    ranked = sorted(range(len(segments)), key=lambda i: -segments[i][0])
    for group in (ranked[i : i + size] for i in range(0, len(ranked), size)):
        for tile in range(max(segments[i][1] for i in group)):
            yield from ((i, tile) for i in group if tile < segments[i][1])


def check_turns(config, batch, size, sms, longest=None, **heads):
    """Asserts that in the plan ``size`` sequences at a time take turns, and that the gradients have
    the bits of another number of SMs.

    Args:
        longest: ``max_seqlen_q``; None for the default.
    """
    problem = make_ragged(config, batch, **heads)
    bound = {} if longest is None else {"max_seqlen_q": longest}
    sms //= config.dkv.min_ctas
    result = problem.run(config, sms=sms, deterministic=True, **bound)
    problem.check(result)
    assert same(passed(result), problem.run(config, sms=4, deterministic=True), ("dq", "dk", "dv"))
    expected = list(tiles_in_turns(config, batch, heads.get("more", 5), size))
    count, *_ = plan = result.outputs["plan"]
    tiles = plan[4 : 4 + 8 * count].view(-1, 8)
    assert [(row[0].item(), row[5].item()) for row in tiles] == [(m, i // 2) for i, m in expected]


@pytest.mark.parametrize(("sms", "size"), [(8, 2), (20, 3), (32, 6)])
@pytest.mark.parametrize("config", CAUSAL, ids=lambda c: c.full_name)
def test_sequences_take_turns(config, sms, size):
    check_turns(config, TURNS, size, sms)


def test_at_most_sixteen_sequences_take_turns():
    check_turns(CAUSAL[0], [lengths[:20] for lengths in MANY], 10, 40, h=1, h_k=1)


@pytest.mark.parametrize(("shorter", "size"), [(1100, 2), (1000, 1)])
@pytest.mark.parametrize("config", CAUSAL, ids=lambda c: c.full_name)
def test_of_long_sequences_fewer_where_they_are_unequal(config, shorter, size):
    check_turns(config, ((1100, shorter), (100, 100)), size, 8, more=0)


@pytest.mark.parametrize("config", CAUSAL, ids=lambda c: c.full_name)
def test_a_bound_that_is_too_large_leaves_as_many_turns(config):
    check_turns(config, TURNS, 6, 32, longest=10**6)


def test_of_many_sequences_none_takes_turns():
    """None of more than 127 sequences takes turns, as so many would take long to rank."""
    config = CAUSAL[0]
    problem = make_ragged(config, MANY, h=1, h_k=1)
    result = problem.run(config, sms=8, deterministic=True)
    problem.check(result)
    assert result.outputs["plan"][0] == 301


@pytest.mark.parametrize("config", WITH_OPTIONS, ids=lambda c: c.full_name)
def test_gradients_with_all_options_are_repeatable(config):
    """Up to five tiles visit a block, and at least three visit most blocks."""
    window = {"window_size": WINDOW} if config.mask == "local" else {}
    if config.varlen:
        problem = make_ragged(config, ((130, 0, 40), (500, 70, 300)), **window)
        run, right = problem.run, problem.check
    else:
        problem = make_dense(config, (1, 140, 500, 2, 1), **window)
        run, right = functools.partial(run_dense, problem), functools.partial(check, problem)
    result = check_order(functools.partial(run, config, sms=4, deterministic=True), right)
    if not config.varlen:
        check_semaphores(result, config, 140, 500, heads=2)


@functools.cache
def mutant_problems(config):
    if config.varlen:
        if config.mask == "causal":
            many = make_ragged(config, MANY, h=1, h_k=1)
            return [*((make_ragged(config, TURNS), sms) for sms in (4, 8)), (many, 8)]
        return [(make_ragged(config, RISING, window_size=OF_RISING), 1)]
    return [
        (make_problem(config, shape, extras=True, window=WINDOW), sms)
        for *shape, sms in ((1, 140, 500, 1, 1, 8), *SHAPES)
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
