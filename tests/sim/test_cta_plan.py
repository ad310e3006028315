"""CTAs that plan for themselves plan as the planning kernel does for the same launch."""

import dataclasses
import random
import re

import mutants_serving
import pytest
import tiers
import torch
from mutants import TWO_STAGES
from mutants_sm90 import ASKING, DECODING
from planted import build_mutants, checker
from serving import check, contiguous, garbage, paged, run

from flashcute import heuristics, sim
from flashcute.jit.abi import Splits

PAGED_80, PAGED_90, PAGED = (
    dataclasses.replace(c, paged=True) for c in (TWO_STAGES, ASKING, DECODING)
)
ROWS = dataclasses.replace(DECODING, tile_m=128, warps=8, stages=4, min_ctas=1, ping_pong=True)
# A configuration whose parts take long to merge.
SLOW = dataclasses.replace(ROWS, tile_n=64, mask="causal")
CONFIGS = (PAGED_80, TWO_STAGES, DECODING, PAGED, ROWS)
WINDOWED = tuple(dataclasses.replace(config, mask="local") for config in (PAGED_80, DECODING))
WIDER = dataclasses.replace(TWO_STAGES, tile_m=128)
OTHERS = WIDER, ASKING, PAGED_90  # their kernels have no code for CTAs to plan
MERGING = DECODING, PAGED  # kernels whose CTAs merge
OF_OTHER_WIDTHS = tuple(dataclasses.replace(DECODING, head_dim=d) for d in (32, 96, 256))
MOST = {80: 128, 90: 256}  # sequences for which the CTAs of a class plan
MOST_TILES = {80: 1, 90: heuristics._PLANNED_TILES}  # query tiles of each of these sequences
SPLITS = Splits(), Splits(3), Splits(40, 2), Splits(16, 1, 12)
SINKS = torch.tensor([1.0, -2.0, 3.0, 0.0, 5.0, -1.0])
COMPILED = [(config, "none") for config in (*OTHERS, *CONFIGS, *WINDOWED, *OF_OTHER_WIDTHS, SLOW)]
COMPILED += [(config, checker) for config in CONFIGS for checker in ("memcheck", "racecheck")]
PLANTED = tiers.faults(mutants_serving.OF_CTA_PLANS + mutants_serving.OF_SEVERAL_TILES)


def each(configs):
    return pytest.mark.parametrize("config", configs, ids=lambda c: c.full_name)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none", "memcheck", "racecheck"])
    sim.build_kernels(COMPILED)


@pytest.fixture(scope="module")
def mutants(tmp_path_factory):
    return build_mutants(PLANTED, tmp_path_factory.mktemp("mutants"))


def over_cache(config, lengths, **options):
    """Returns the problem over pages of 16 tokens if the kernel is paged, else over a contiguous
    cache."""
    return (
        paged(config, lengths, 16, **options)
        if config.paged
        else contiguous(config, lengths, **options)
    )


def lengths_of(b, seed, longest=300):
    """Returns random numbers of keys: each is 0, 1, ``longest`` or any number below it."""
    draw = random.Random(seed)
    return tuple(draw.choice((0, 1, longest, draw.randrange(longest))) for _ in range(b))


def bits(result):
    """Returns the bits of the outputs and of the workspace but the plan, which show where each
    part's rows are and what they hold. Rows that no kernel wrote are NaN."""
    return {
        name: x.contiguous().view(torch.uint8)
        for name, x in result.outputs.items()
        if name != "plan"
    }


def assert_planned_alike(config, problem, splits, planned_by_ctas=True, **options):
    """Asserts that CTAs plan as the planning kernel does, which runs if ``cu_seqlens_q`` is
    given."""
    expected = run(config, problem, splits, **options)
    del problem.tensors["cu_seqlens_q"]
    result = run(config, problem, splits, **options)
    assert expected.verdict == result.verdict == "pass", (expected.message, result.message)
    assert expected.outputs["plan"][0] > 0
    assert (result.outputs["plan"][0] == -1) == planned_by_ctas
    of_kernel, of_ctas = bits(expected), bits(result)
    for name, x in of_kernel.items():
        assert torch.equal(x, of_ctas[name]), name
    return result


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@each(CONFIGS)
def test_same_parts_at_the_same_places(config, splits):
    for seed, (b, queries, packs) in enumerate(((1, 1, True), (2, 5, False), (7, 3, True))):
        lengths = (queries,) * b, lengths_of(b, seed)
        more = {} if config.paged else {"leftpad": tuple(range(b))}
        problem = over_cache(config, lengths, h=6, seed=seed, **more)
        options = {"pack_heads": packs, "seed": seed, "sinks": SINKS, "launches": 2}
        result = assert_planned_alike(config, problem, splits, **options)
        check(result, config, problem, sinks=SINKS)


@pytest.mark.parametrize("more", [-1, 0, 1])
@each(CONFIGS)
def test_as_many_sequences_as_threads(config, more):
    b = MOST[config.arch] + more
    problem = over_cache(config, ((1,) * b, lengths_of(b, more, 70)), h=2, h_k=1)
    splits = Splits(2) if more < 0 else Splits(16, 1, 200)
    assert_planned_alike(config, problem, splits, more <= 0, pack_heads=True)


@each(CONFIGS)
def test_sequences_of_one_length(config):
    problem = over_cache(config, ((2,) * 5, (16 * config.tile_n,) * 5))
    for splits in SPLITS:
        tensors = dict(problem.tensors)
        result = assert_planned_alike(config, problem, splits, pack_heads=True)
        problem.tensors = tensors
    check(result, config, problem)


@pytest.mark.parametrize(
    ("config", "queries", "parts"), [(SLOW, 20, 8), (DECODING, 3, 8), (DECODING, 6, 6)]
)
def test_parts_that_take_long_to_merge_are_longer(config, queries, parts):
    """Of the 16 blocks of each of two sequences two or three make a part, not one, although there
    are 200 CTAs."""
    problem = over_cache(config, ((queries,) * 2, (16 * config.tile_n,) * 2))
    splits = Splits(16, 1, 200)
    planned = run(config, problem, splits, pack_heads=True)
    assert planned.outputs["plan"][0] == 2 * parts
    result = assert_planned_alike(config, problem, splits, pack_heads=True)
    check(result, config, problem)


@pytest.mark.parametrize("window", [(40, 10), (0, 0), (300, 300)], ids=str)
@each(WINDOWED)
def test_windows(config, window):
    for queries in (2, 1 + config.tile_m * (MOST_TILES[config.arch] - 1)):
        problem = over_cache(config, ((queries,) * 4, (300, 0, 7, 170)), h=1, h_k=1)
        result = assert_planned_alike(config, problem, Splits(5), window_size=window)
        check(result, config, problem, window_size=window)


@each(CONFIGS)
def test_queries_of_more_tiles_have_a_kernel_that_plans(config):
    most = MOST_TILES[config.arch] * config.tile_m // 2  # with two heads packed
    for queries, by_ctas in ((most, True), (most + 1, False)):
        problem = over_cache(config, ((queries,) * 2, (100, 170)))
        result = assert_planned_alike(config, problem, Splits(3), by_ctas, pack_heads=True)
        check(result, config, problem)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@each((DECODING, PAGED, ROWS, SLOW))
def test_several_tiles_of_queries(config, splits):
    """Several tiles of queries have as many parts each, for single heads and packed ones; the last
    tile has a single row. Under the mask parts of the first tile are empty, and rows see no
    key."""
    for seed, (tiles, packs) in enumerate(((2, False), (3, True))):
        queries = (tiles - 1) * config.tile_m // (1 + packs) + 1
        problem = over_cache(config, ((queries,) * 4, (300, queries, 60, 0)), seed=seed)
        options = {"pack_heads": packs, "seed": seed, "launches": 2, "sms": 3}
        result = assert_planned_alike(config, problem, splits, **options)
        check(result, config, problem)


@each(OTHERS)
def test_other_kernels_have_a_kernel_that_plans(config):
    problem = over_cache(config, ((2,) * 2, (100, 170)))
    result = assert_planned_alike(config, problem, Splits(3), False, pack_heads=True)
    check(result, config, problem)


@pytest.mark.parametrize(
    ("b", "queries", "by_ctas"), [(3, 8, True), (3, 9, False), (64, 1, True), (65, 1, False)]
)
@each(MERGING)
def test_the_cta_that_stores_last_merges(config, b, queries, by_ctas):
    """It merges up to 16 rows of a tile and 128 tiles, in launch after launch and any order of the
    CTAs. The result is that of the combine kernel, for which the planning kernel lists the
    positions."""
    lengths = (queries,) * b, (300, *lengths_of(b - 1, queries, 100))
    problem = over_cache(config, lengths)
    for seed in range(3 if by_ctas else 1):
        tensors = dict(problem.tensors)
        options = {"seed": seed, "launches": 3, "pack_heads": True, "sms": 3}
        result = assert_planned_alike(config, problem, Splits(5), **options)
        problem.tensors = tensors
        assert (result.outputs["plan"][1] == -1) == by_ctas
    check(result, config, problem)


@each((*MERGING, *OF_OTHER_WIDTHS))
def test_a_row_has_more_parts_than_lanes(config):
    """A warp finds the parts' weights in several turns, relative to the largest among all parts, or
    they would overflow. The result is that of the combine kernel."""
    lengths = (2,) * 2, (70 * config.tile_n, 17 * config.tile_n)
    problem = over_cache(config, lengths, h=2, h_k=1, scale=1024.0)
    result = assert_planned_alike(config, problem, Splits(70), pack_heads=True)
    assert result.outputs["plan"][1] == -1
    check(result, config, problem)


@each(CONFIGS)
def test_no_values_reach_beyond_the_tensors(config):
    names = "seqused_k", "block_table", "cache_batch_idx", "leftpad_k"
    several = MOST_TILES[config.arch] * 33
    for seed, (queries, splits) in enumerate(((10, Splits(3)), (several, Splits(64, 1, 12)))):
        problem = over_cache(config, ((queries,) * 3, (40, 70, 130)), h=2)
        del problem.tensors["cu_seqlens_q"]
        shapes = {name: x.shape for name, x in problem.tensors.items() if name in names}
        if not config.paged:
            shapes["leftpad_k"] = (3,)
        problem.tensors |= {name: garbage(x, seed + len(name)) for name, x in shapes.items()}
        result = run(config, problem, splits, checker="memcheck")
        assert result.verdict == "pass", result.message


@each(CONFIGS)
def test_no_races(config):
    for splits, queries in ((Splits(3), 2), (Splits(16, 1, 12), MOST_TILES[config.arch] * 33)):
        problem = over_cache(config, ((queries,) * 3, (100, 70, 300)), h=2, h_k=1)
        del problem.tensors["cu_seqlens_q"]
        result = run(config, problem, splits, checker="racecheck", copy_mode="random", seed=3)
        check(result, config, problem)


@pytest.mark.parametrize("mutant", PLANTED, ids=lambda m: m.name)
def test_mutant_is_found(mutant, mutants):
    """A report finds it, or a comparison with the reference in some order of the warps."""
    config = mutant.config
    masked = {"window_size": (300, 300)} if config.mask == "local" else {}
    for seed in range(4):
        b = 3 + 2 * seed
        queries = 30 if mutant in mutants_serving.OF_SEVERAL_TILES else 2
        lengths = (queries,) * b, (40, *lengths_of(b - 2, seed), 300)
        problem = over_cache(config, lengths, h=6, seed=seed)
        del problem.tensors["cu_seqlens_q"]
        more = {"pack_heads": True, "timeout": 120, "seed": seed, "checker": checker(mutant)}
        more["launches"] = 2  # the second launch finds the counters as the first has left them
        more |= masked
        result = run(config, problem, Splits(12), kernel=mutants[mutant.name], **more)
        if mutant.report:
            if re.search(mutant.report, result.message):
                return
            continue
        assert result.verdict == "pass", result.message
        try:
            check(result, config, problem, **masked)
        except AssertionError:
            return
    pytest.fail(f"{mutant.name} survived")
