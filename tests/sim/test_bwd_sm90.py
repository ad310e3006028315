"""The backward kernels of the sm90 class in the simulator."""

import dataclasses
import functools
import itertools

import bwd_checks
import mutants_bwd_sm90
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
from bwd_checks import ASCENDING, mutant_problems, semaphores_of, visits
from mutants import ONE_STAGE
from mutants_bwd_sm90 import COLUMNS, NARROWEST, ROWS, UNEVEN
from mutants_bwd_wide_sm90 import WIDE, WIDEST
from mutants_sm90 import ASKING
from planted import build_mutants

from flashcute import heuristics, sim
from flashcute.config import DTYPES, HEAD_DIMS, MASKS

EVERY = (ROWS, COLUMNS, UNEVEN, WIDE, WIDEST)
CONFIGS = [with_mask(config, mask) for config in EVERY for mask in MASKS]
CONFIGS.append(NARROWEST)  # holds K and V in registers alone
COMPILED = [(config, "none") for config in (*CONFIGS, ASKING, ONE_STAGE)]
# Several tiles for a CTA, the last of which is cut by the end of the keys.
LONG = (1, 300, 700, 2, 1)
# On three SMs each CTA owns heads, which have one or two tiles of keys, or two query heads.
OWNED = ((6, 70, 128, 1, 1), (1, 100, 120, 12, 6), (3, 100, 256, 1, 1))
# b, seqlen_q, seqlen_k, h, h_k, SMs: at least four waves of tiles, with two to four tiles a head,
# so that a head's first tile stores dQ and the others add to it.
STORED_FIRST = ((3, 140, 500, 4, 2, 4), (5, 129, 400, 2, 1, 4), (4, 140, 300, 4, 2, 6))
# b, seqlen_q, seqlen_k, h, h_k, and CTAs or clusters: these share the tiles that whole waves leave
# over, and in the last shape all tiles. Where clusters compute tiles, :func:`sharing_problem` takes
# half as many queries, for as many steps.
SHARED = (
    (1, 1500, 100, 4, 4, 3),
    (1, 3200, 100, 5, 5, 3),
    (1, 1500, 200, 4, 2, 3),
    (1, 3200, 100, 2, 2, 5),
)
# Shapes for planted faults. All but the first and the last are for three SMs; one has queries that
# see no key, whose sums are zeros first. Tiles of the last shape have one step, after which V is
# released ahead of any fence.
MUTANT_SHAPES = (LONG, *OWNED[1:], (4, 300, 300, 2, 1), (4, 450, 300, 2, 1), (1, 20, 200, 1, 1))
PLAIN = [with_mask(config, "none") for config in EVERY]
STORING = [config for config in CONFIGS if config.mask != "local"]
if not tiers.everything:  # the widest takes as long as all up to d = 128, and has the code of WIDE
    PLAIN = [config for config in PLAIN if config.head_dim < 256]
    STORING = [config for config in STORING if config.head_dim < 256]
NARROW = [config for config in CONFIGS if config.head_dim <= 128]


def name_of(config):
    return config.full_name


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none"])
    return sim.build_kernels(COMPILED)


@pytest.mark.parametrize("shape", (*SHAPES, LONG), ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_gradients(config, shape):
    """They are right, counters are exact, and shared memory has no bank conflicts."""
    problem = make_problem(config, shape, extras=True)
    result = problem.run(config, copy_mode="random")
    check(problem, result)
    assert not wrong_counts(config, problem, result)


@pytest.mark.parametrize("shape", OWNED, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("config", NARROW, ids=name_of)
def test_heads_owned_by_a_cta(config, shape):
    """Only one CTA adds to a head's sums of dQ, so that these have a place for each CTA."""
    problem = make_problem(config, shape, extras=True)
    first = problem.run(config)
    check(problem, first)
    b, _, _, _, h_k = shape
    unused = first.outputs["dq_accum"].reshape(b * h_k, -1).isnan().all(1)
    assert unused.tolist() == [False] * 3 + [True] * (b * h_k - 3)
    for seed, copy_mode in enumerate(sim.COPY_MODES):
        again = problem.run(config, seed=seed, copy_mode=copy_mode)
        assert same(first, again, ("dq", *bwd_checks.BUT_DQ))


@pytest.mark.parametrize("config", STORING, ids=name_of)
def test_first_tiles_store_dq(config):
    """The other tiles add to dQ once the semaphore of a block says so; every launch resets it."""
    for seed, (copy_mode, (*shape, sms)) in enumerate(
        zip(sim.COPY_MODES, STORED_FIRST, strict=True)
    ):
        problem = make_problem(config, shape, extras=True)
        result = problem.run(config, seed=seed, copy_mode=copy_mode, sms=sms, launches=1 + seed)
        check(problem, result)
        assert semaphores_of(problem, config, result).eq(config.cluster).all()


@pytest.mark.parametrize("config", [c for c in STORING if c.mask == "causal"], ids=name_of)
def test_short_tiles_of_long_heads_begin_at_the_diagonal(config):
    problem = make_problem(config, ASCENDING, extras=True)
    run = functools.partial(problem.run, config)
    bwd_checks.check_short_tiles_of_long_heads(config, problem, run)


def sharing_problem(config, b, seqlen_q, seqlen_k, h, h_k, workers):
    shape = (b, seqlen_q // config.cluster, seqlen_k, h, h_k)
    launch = {"sms": workers * config.cluster, "seed": 0}
    return dataclasses.replace(make_problem(config, shape, extras=True), launch=launch)


@pytest.mark.parametrize("config", PLAIN, ids=name_of)
def test_tiles_of_the_last_wave_are_shared(config):
    """The CTA with a tile's first visits leaves its sums of dK and dV to the one with the last."""
    modes = itertools.cycle(sim.COPY_MODES)
    for seed, (copy_mode, shape) in enumerate(zip(modes, SHARED, strict=False)):
        problem = sharing_problem(config, *shape)
        run = functools.partial(problem.run, config)
        result = passed(run(seed=seed, copy_mode=copy_mode, launches=1 + seed))
        check(problem, result)
        left = ~result.outputs["dkv_partial"].isnan().flatten(1)
        assert (left.all(1) == left.any(1)).all() and left.any()
        assert same(result, run(seed=seed + 3, copy_mode="random"), bwd_checks.BUT_DQ)


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_in_use(dtype, head_dim):
    bwd_checks.check_tiles_in_use(heuristics.sm90_bwd_config, dtype, head_dim)


@pytest.mark.parametrize("order", ["bshd", "bhsd", "sbhd"])
def test_strides_and_surroundings(order):
    bwd_checks.check_strides_and_surroundings(ROWS, 200, order)


@pytest.mark.parametrize("config", EVERY, ids=name_of)
def test_only_the_sums_of_dq_depend_on_the_schedule(config):
    bwd_checks.check_that_schedules_change_only_the_sums_of_dq(config)


@pytest.mark.parametrize("config", EVERY, ids=name_of)
def test_two_tiles_of_keys_add_to_dq_in_one_order(config):
    bwd_checks.check_that_two_tiles_of_keys_add_to_dq_in_one_order(config)


@pytest.mark.parametrize("sms", [1, 2, 3])
@pytest.mark.parametrize("config", EVERY, ids=name_of)
def test_few_sms(config, sms):
    """SMs are fewer than a cluster's CTAs, or of a number that whole clusters do not use up."""
    problem = make_problem(config, LONG)
    check(problem, problem.run(config, sms=sms))


@pytest.mark.parametrize("wanted", [(), ("dq",), ("dk", "dv")], ids="-".join)
@pytest.mark.parametrize("shape", [(2, 100, 150, 4, 2), OWNED[1]], ids=["shared", "owned"])
@pytest.mark.parametrize("config", [ROWS, COLUMNS], ids=name_of)
def test_only_gradients_that_are_wanted_are_written(config, shape, wanted):
    problem = make_problem(config, shape, extras=True)
    every = passed(problem.run(config))
    some = passed(problem.run(config, wanted=wanted))
    assert some.outputs.keys() == {*wanted, "dsinks", "row_stats", "dq_accum", "dq_semaphore"}
    assert same(some, every, (*wanted, "dsinks"))
    assert bool(some.counters["wgmma"]) == bool(wanted)


def instructions(config):
    """Returns the wgmmas of a visit in all CTAs of a cluster: the k16 steps of S, dP, dV and dK for
    each 64 keys, which one warpgroup computes, and those of dQ in both warpgroups."""
    d, keys, queries = config.head_dim, config.cluster * config.dkv.rows, config.dkv.step
    return keys // 64 * (2 * d // 16 + 2 * queries // 16) + 2 * config.cluster * keys // 16


def stored_blocks(result):
    """Returns for how many blocks of queries, of all heads, a tile has stored the first sums."""
    return (result.outputs["dq_semaphore"][:-1] > 0).sum().item()  # the last one counts tiles


def wrong_counts(config, problem, result):
    counters = result.counters
    b, _, h, _ = problem.q.shape
    # The CTAs of a cluster share a tile of keys.
    of_all_heads = b * h * visits(problem, config.dkv.step, config.cluster * config.dkv.rows)
    dq_bytes = 4 * config.dkv.step * config.head_dim
    # Where tiles are shared, semaphores count something else than stored blocks.
    shares = "dkv_partial" in result.outputs and not result.outputs["dkv_partial"].isnan().all()
    stored = 0 if shares else stored_blocks(result)
    return (
        any(n for name, n in counters.items() if name.endswith("_conflicts"))
        or counters["wgmma"] != of_all_heads * instructions(config)
        or counters["reduction_bytes"] != (of_all_heads - stored) * dq_bytes
    )


@pytest.mark.parametrize("config", [c for c in EVERY if c.dtype == "bf16"], ids=name_of)
def test_linear_in_the_gradient_of_the_output(config):
    bwd_checks.check_linear_in_the_gradient_of_the_output(config)


@pytest.mark.parametrize("config", EVERY, ids=name_of)
def test_uniform_probabilities(config):
    bwd_checks.check_uniform_probabilities(config)


@pytest.mark.parametrize("config", EVERY, ids=name_of)
def test_rows_of_ds_sum_to_zero(config):
    bwd_checks.check_that_rows_of_ds_sum_to_zero(config)


@pytest.mark.parametrize("config", EVERY, ids=name_of)
def test_keys_that_no_query_sees(config):
    bwd_checks.check_keys_that_no_query_sees(config)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_keys_behind_the_last_one_do_not_count(config):
    bwd_checks.check_keys_behind_the_last_one(config)


@pytest.mark.parametrize("config", EVERY, ids=name_of)
def test_rows_without_keys(config):
    bwd_checks.check_rows_without_keys(config)


FORWARDS = {COLUMNS: ASKING}  # others take what the reference returns


@pytest.mark.parametrize("level", [2**12, -(2**16), 2**20])
@pytest.mark.parametrize("config", EVERY, ids=name_of)
def test_large_scores(config, level):
    check_large_scores(large_scores(config, level), config, FORWARDS.get(config))


@pytest.mark.parametrize(
    ("config", "forward"),
    [(COLUMNS, ASKING), (ROWS, ONE_STAGE)],
    ids=name_of,
)
def test_recomputed_probabilities_are_those_of_the_forward(config, forward):
    bwd_checks.check_recomputed_probabilities(config, forward)


@pytest.mark.parametrize("config", EVERY, ids=name_of)
def test_one_large_score(config):
    check_large_scores(one_large_score(config), config, FORWARDS.get(config))


MUTANTS = tiers.faults(mutants_bwd_sm90.MUTANTS)
FAULTLESS = bwd_checks.faultless(mutant.config for mutant in MUTANTS)
PLANTED = (*MUTANTS, *FAULTLESS)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Returns the kernels of all mutants by name."""
    return build_mutants(PLANTED, tmp_path_factory.mktemp("mutants"))


@functools.cache
def problems_of(config):
    """Returns the problems for planted faults: those of :func:`mutant_problems`, then some in which
    other CTAs, above d = 128 another cluster, store dQ at the same time, and some in which CTAs
    share tiles. They run under several schedules, as a fault shows only under some."""
    problems = [*mutant_problems(config, *MUTANT_SHAPES)]
    *shape, sms = STORED_FIRST[0]
    several = [(shape, sms, (1, 2, 3, 5))]
    if config.mask == "causal" and config.head_dim <= 128:
        several.append((ASCENDING, 4, (0,)))
    if config.mask == "none":
        for (*shape, workers), seeds in ((SHARED[2], (0,)), (SHARED[0], (2, 3, 5))):
            several.append((shape, workers * config.cluster, seeds))
    for shape, sms, seeds in several:
        problem = make_problem(config, shape, extras=True)
        problems += [problem.launched(sms=sms, seed=seed) for seed in seeds]
    return problems


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_found(mutant, planted):
    problems, kernel = problems_of(mutant.config), planted[mutant.name]
    bwd_checks.check_that_mutant_is_found(mutant, kernel, problems, wrong_counts)


@pytest.mark.parametrize("faultless", FAULTLESS, ids=lambda m: m.name)
def test_unmutated_kernels_pass_the_same_checks(faultless, planted):
    problems, kernel = problems_of(faultless.config), planted[faultless.name]
    if not tiers.everything:  # of the launches of one problem the last
        problems = {id(problem.q): problem for problem in problems}.values()
    bwd_checks.check_that_nothing_is_found(faultless, kernel, problems, wrong_counts)
