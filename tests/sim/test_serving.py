"""Queries over a cache in both kernel classes: pages, splits, and the merge of split tiles."""

import collections
import dataclasses
import re

import mutants_serving
import pytest
import tiers
import torch
from mutants import ONE_STAGE, TWO_STAGES
from mutants_sm90 import ASKING, STRIDING
from planted import build_mutants
from ragged import equal
from serving import MAX_INT, check, contiguous, garbage, paged, planned, run

from flashcute import sim
from flashcute.config import FwdConfig
from flashcute.jit.abi import Splits

CONFIGS = (TWO_STAGES, ONE_STAGE, ASKING, STRIDING)
CHECKED = TWO_STAGES, ASKING
PAGED = tuple(dataclasses.replace(config, paged=True) for config in (*CHECKED, STRIDING))
# Tiles of one shared-memory page, of four pages, and with rows left over by the turns in which all
# warps copy.
OTHER_TILES = tuple(
    FwdConfig(90, "bf16", d, "none", 64, n, 4, 2, 0, 2, False, paged=True)
    for d, n in ((64, 128), (256, 32), (64, 48), (64, 112), (96, 80))
)
WINDOWED = tuple(dataclasses.replace(config, mask="local") for config in CHECKED)
COMPILED = [(config, "none") for config in (*CONFIGS, *PAGED, *WINDOWED, *OTHER_TILES)]
COMPILED += [(config, "memcheck") for config in (*CHECKED, *PAGED[:2])]
COMPILED += [(config, "racecheck") for config in CHECKED]
PLANTED = tiers.faults(mutants_serving.MUTANTS)
# Lengths of queries and keys: a prefill chunk, decoding, speculative tokens, no queries, no keys,
# fewer keys than queries.
MIXED = (130, 1, 3, 0, 2, 70), (200, 77, 10, 150, 0, 50)
DECODE = (1,) * 4, (300, 64, 1, 129)
SINKS = torch.tensor([1.0, -2.0, 3.0, 0.0, 5.0, -1.0])


def each(configs):
    return pytest.mark.parametrize("config", configs, ids=lambda c: c.full_name)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none", "memcheck", "racecheck"])
    sim.build_kernels(COMPILED)


@pytest.fixture(scope="module")
def mutants(tmp_path_factory):
    return build_mutants(PLANTED, tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 24, 48, 64])
@each(PAGED)
def test_pages(config, page_size):
    runs = ("late", 3), ("random", 200 if page_size == 16 else 1)
    for seed, (copy_mode, splits) in enumerate(runs):
        problem = paged(config, MIXED, page_size, h=2, seed=seed, heads_first=seed > 0)
        result = run(config, problem, Splits(splits), seed=seed, copy_mode=copy_mode)
        check(result, config, problem)


@pytest.mark.parametrize("page_size", [1, 2, 8, 64])
@each(OTHER_TILES)
def test_pages_of_other_tiles(config, page_size):
    for seed, mode in enumerate(("late", "eager")):
        problem = paged(config, DECODE, page_size, seed=seed)
        check(run(config, problem, Splits(2), seed=seed, copy_mode=mode), config, problem)


@each(PAGED[1:])
def test_keys_of_small_pages_are_copied(config):
    """Keys of small pages are copied once, in pieces of 16 bytes; those of large pages come in TMA
    boxes."""
    tokens = 96  # whole blocks
    each = 2 * 2 * tokens  # bytes of a column of keys and values
    queries = 2 * config.tile_m * config.head_dim
    for page_size in (1, tokens):
        problem = paged(config, ((1,), (tokens,)), page_size, h=1, h_k=1)
        counters = run(config, problem).counters
        d = problem.q.shape[2]
        copied, boxes = counters["cp_async_bytes"], counters["tma_bytes"] - queries
        if page_size == 1:
            assert (copied, boxes) == (each * d, 0)
            assert counters["cp_async_zero_bytes"] == each * (config.head_dim - d)
            assert counters["cp_async_conflicts"] == 0
        else:
            assert (copied, boxes) == (0, each * config.head_dim)


@each(CONFIGS)
def test_contiguous_cache(config):
    pads = (33, 0, 7, 5, 0, 90)
    runs = (3, pads, 4), (1, pads, 2), (200, None, 2)
    # The kernels not in CHECKED differ only in the main loop, which runs for each part, so that one
    # run is enough.
    for seed, (splits, leftpad, h) in enumerate(runs if config in CHECKED else runs[:1]):
        problem = contiguous(config, MIXED, h=h, seed=seed, leftpad=leftpad)
        check(run(config, problem, Splits(splits), seed=seed), config, problem)


@each((*CHECKED, PAGED[0], PAGED[1]))
def test_packed_heads_and_sinks(config):
    """Three packed heads take four rows. A sink counts once, also where no part sees a key."""
    # The rows of the first sequence take several tiles.
    lengths = (40, 1, 3, 0, 2, 15), (100, 77, 10, 50, 0, 5)
    cache = paged(config, lengths, 16, h=6) if config.paged else contiguous(config, lengths, h=6)
    for splits in (1, 3):
        result = run(config, cache, Splits(splits), pack_heads=True, sinks=SINKS, launches=2)
        check(result, config, cache, sinks=SINKS)


# Lengths whose small weights, taken together, make up most of the output.
LONG = (1, 1, 2), (700, 900, 300)


@each((*CHECKED, *PAGED[:2]))
def test_one_key_that_outweighs_many(config):
    make = (lambda *x, **o: paged(*x, 16, **o)) if config.paged else contiguous
    problem = make(config, LONG, nats=14.0)
    for splits in (1, 3):
        check(run(config, problem, Splits(splits)), config, problem)


@pytest.mark.parametrize("window", [(40, 10), (0, 0), (100, 0), (300, 300)], ids=str)
@each(WINDOWED)
def test_windows(config, window):
    problem = contiguous(config, MIXED, h=1, h_k=1)
    for splits in (2, 5, 200):
        result = run(config, problem, Splits(splits), window_size=window)
        check(result, config, problem, window_size=window)


@each(CHECKED)
def test_parts_are_equal_and_cover_a_tile(config):
    result = run(config, contiguous(config, MIXED, h=1, h_k=1), Splits(3))
    tiles, positions = planned(result)
    parts = collections.defaultdict(list)
    for block, row_q, _, seqlen_q, seqlen_k, _, part, of, row in tiles:
        if of > 1:
            parts[row_q, block].append(part)
            assert row >= 0 and of == min(3, -(-seqlen_k // config.tile_n)) and seqlen_q > 0
        else:
            assert row == -1
    assert all(sorted(x) == [*range(len(x))] for x in parts.values())
    split = [n for n, m in zip(*MIXED, strict=True) if m > config.tile_n]
    assert positions == sum(split) > 0


@each((CHECKED[0], PAGED[1]))
def test_layers_share_a_plan_bit_for_bit(config):
    """A layer with other queries, keys and values at the same places can take over the plan."""
    make = (lambda *x, **o: paged(*x, 16, **o)) if config.paged else contiguous
    first = make(config, MIXED)
    other = dict(first.tensors)
    for name in ("q", "k", "v"):
        other[name] = other[name].flip(-1) * 2
    second = dataclasses.replace(first, tensors=other)
    plan = run(config, first, Splits(3)).outputs["plan"]
    expected = run(config, second, Splits(3))
    result = run(config, second, Splits(3), plan=plan, launches=2, seed=1)
    assert result.verdict == expected.verdict == "pass", result.message
    assert torch.equal(result.out, expected.out) and torch.equal(result.lse, expected.lse)


@each((*CHECKED, *PAGED[:2]))
def test_neighbours_do_not_matter(config):
    """With a given number of splits, neither lengths nor values of neighbours change a bit."""
    make = (lambda *x, **o: paged(*x, 16, **o)) if config.paged else contiguous
    alone = make(config, ((3,), (170,)), scale=4.0)
    among = make(config, ((9, 3, 70), (40, 170, 250)), scale=4.0, seed=1)
    among.q[9:12] = alone.q
    for name, of_alone in (("k", alone.keys), ("v", alone.values)):
        cache = among.tensors[name]
        if config.paged:
            for j, page in enumerate(among.tensors["block_table"][1, : -(-170 // 16)]):
                piece = of_alone[0][16 * j : 16 * (j + 1)]
                cache[page, : len(piece)] = piece
        else:
            cache[among.tensors["cache_batch_idx"][1], :170] = of_alone[0]
    expected = run(config, alone, Splits(4), pack_heads=True)
    result = run(config, among, Splits(4), pack_heads=True, seed=3)
    assert expected.verdict == result.verdict == "pass"
    assert torch.equal(result.out[9:12], expected.out)
    assert torch.equal(result.lse[:, 9:12], expected.lse)


@each(CHECKED)
def test_as_few_parts_as_keep_all_ctas_busy(config):
    """With 8 tiles of one length, 12 CTAs compute three parts of each, in two waves."""
    problem = contiguous(config, ((1,) * 4, (16 * config.tile_n,) * 4))
    for ctas, expected in ((4, 1), (8, 1), (12, 3), (16, 2), (24, 3)):
        result = run(config, problem, Splits(16, 1, ctas), pack_heads=True)
        tiles, _ = planned(result)
        assert {tile[7] for tile in tiles if tile[4] > 0} == {expected}, ctas
    check(result, config, problem)


@each(CHECKED)
def test_parts_of_sequences_of_many_lengths(config):
    """Parts are about equally long, so that the longest sequence has most of them."""
    problem = contiguous(config, DECODE)
    result = run(config, problem, Splits(16, 1, 12), pack_heads=True)
    check(result, config, problem)
    tiles, _ = planned(result)
    of_longest = max(tile[7] for tile in tiles if tile[4] == 300)
    assert of_longest > max(tile[7] for tile in tiles if tile[4] < 300)
    longer = run(config, problem, Splits(16, 4, 12), pack_heads=True)
    assert max(tile[7] for tile in planned(longer)[0]) <= -(-300 // (4 * config.tile_n))
    check(longer, config, problem)


@each(CHECKED)
def test_queries_of_one_length_need_no_offsets(config):
    lengths = (3,) * 4, (100, 0, 33, 170)
    problem = contiguous(config, lengths, h=2)
    expected = run(config, problem, Splits(3))
    del problem.tensors["cu_seqlens_q"]
    assert equal(run(config, problem, Splits(3)), expected)


@each(CHECKED)
def test_tiles_with_few_blocks_are_not_split(config):
    problem = contiguous(config, MIXED, h=1, h_k=1)
    expected = run(config, problem)
    result = run(config, problem, Splits(3, 1000))
    assert equal(result, expected) and planned(result)[1] == 0


@pytest.mark.parametrize("seed", range(3))
@each((*CHECKED, *PAGED[:2]))
def test_no_values_reach_beyond_the_tensors(config, seed):
    """This holds for any values in any tensor of integers. Results are undefined then, but each
    access stays inside."""
    make = (lambda *x, **o: paged(*x, 16, **o)) if config.paged else contiguous
    problem = make(config, ((9, 1, 20), (40, 70, 130)), h=2)
    names = "seqused_k", "cu_seqlens_q", "block_table", "cache_batch_idx", "leftpad_k"
    shapes = {name: x.shape for name, x in problem.tensors.items() if name in names}
    if not config.paged:
        shapes["leftpad_k"] = (3,)
    hostile = {name: garbage(shape, seed + i) for i, (name, shape) in enumerate(shapes.items())}
    problem.tensors |= hostile
    for splits in (Splits(3), Splits(64, 1, 12)):
        result = run(config, problem, splits, checker="memcheck", max_seqlen_q=MAX_INT)
        assert result.verdict == "pass", result.message


def test_warpgroups_without_rows_compute_nothing():
    """A tile belongs to two warpgroups, with 64 rows each."""
    config = PAGED[1]
    assert config.arch == 90 and config.tile_m == 128
    counters = []
    for queries in (1, 64, 65, 128):
        problem = paged(config, ((queries,), (200,)), 16, h=1, h_k=1)
        result = run(config, problem, Splits(1))
        check(result, config, problem)
        counters.append(result.counters["wgmma"])
    one = counters[0]
    assert one > 0 and counters == [one, one, 2 * one, 2 * one]


@each(PAGED[:2])
def test_columns_behind_the_last_key_are_not_read(config):
    """The table ends where the last sequence's pages do."""
    problem = paged(config, ((1, 1), (64, 65)), 16, columns=0)
    result = run(config, problem, Splits(2), checker="memcheck")
    check(result, config, problem)


@each(PAGED[:2])
def test_a_page_that_does_not_exist_is_zeros(config):
    problem = paged(config, ((1,), (40,)), 16)
    for page in (-1, problem.tensors["k"].shape[0], -MAX_INT - 1, MAX_INT):
        problem.tensors["block_table"][0, 1] = page
        for tokens in (problem.keys[0], problem.values[0]):
            tokens[16:32] = 0
        check(run(config, problem, Splits(3)), config, problem)


@each(CHECKED)
def test_an_entry_that_does_not_exist_has_no_keys(config):
    problem = contiguous(config, ((1, 1, 1), (40, 50, 60)))
    problem.tensors["cache_batch_idx"][:2] = torch.tensor([-1, problem.tensors["k"].shape[0]])
    problem.keys[:2] = problem.values[:2] = [problem.keys[0][:0]] * 2
    check(run(config, problem, Splits(3)), config, problem)


@each(CHECKED)
def test_no_races(config):
    problem = contiguous(config, ((9, 1), (100, 70)), h=2, h_k=1)
    result = run(config, problem, Splits(3), checker="racecheck", copy_mode="random", seed=3)
    check(result, config, problem)


@pytest.mark.parametrize("mutant", PLANTED, ids=lambda m: m.name)
def test_mutant_is_found(mutant, mutants):
    """A report finds it, or a comparison with the reference in some order of the warps."""
    config = mutant.config
    lengths = (100, 3, 1, 2, 70), (150, 100, 129, 0, 40)
    leftpad = (33, 0, 7, 5, 0)
    for seed in range(5):
        packs = seed % 2 == 1
        options = {"h": 6, "seed": seed}
        if seed == 4:  # so few rows that all threads of a CTA merge one
            lengths, leftpad = ((1, 1), (150, 129)), (33, 7)
        if config.paged:
            page_size = 64 if "box" in mutant.name else 3  # small pages are copied
            problem = paged(config, lengths, page_size, **options)
        else:
            problem = contiguous(config, lengths, leftpad=leftpad, **options)
        sinks = {"sinks": SINKS} if seed in (0, 1, 4) else {}
        more = {"pack_heads": packs, "timeout": 120, "seed": seed} | sinks
        splits = Splits(5 if seed == 2 else 3)
        result = run(config, problem, splits, kernel=mutants[mutant.name], **more)
        if mutant.report:
            assert re.search(mutant.report, result.message), result
            return
        assert result.verdict == "pass", result.message
        try:
            check(result, config, problem, **sinks)
        except AssertionError:
            return
    pytest.fail(f"{mutant.name} survived")
