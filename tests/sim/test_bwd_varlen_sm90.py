"""Ragged batches in the backward of the sm90 class."""

import dataclasses
import functools
import itertools
import re

import mutants_bwd_varlen_sm90
import pytest
import tiers
import torch
from backward import make_problem, passed, same, with_mask
from backward_options import (
    BATCHES,
    HOSTILE,
    ORDER,
    SOME,
    Behind,
    check_that_infinity_stays,
    infinite_key,
    make_hostile,
    make_ragged,
    one_of,
    outputs,
    permuted,
    spoils_neighbours,
)
from bwd_checks import visits
from mutants_bwd_sm90 import COLUMNS, ROWS
from mutants_bwd_wide_sm90 import WIDE
from planted import build_mutants
from ragged import PADDED
from test_bwd_sm90 import instructions, stored_blocks

from flashcute import sim
from flashcute.config import MASKS
from flashcute.heuristics import bwd_with_options, sm90_bwd_config

PLANTED = tiers.faults(mutants_bwd_varlen_sm90.MUTANTS)
OTHERS = [
    sm90_bwd_config("bf16", head_dim, mask)
    for head_dim, mask in ((32, "causal"), (96, "none"), (192, "local"))
]


def ragged(config):
    return bwd_with_options(config, varlen=True)


PAIR = (ragged(ROWS), ragged(COLUMNS))
CONFIGS = [with_mask(config, mask) for config in PAIR for mask in MASKS] + [*map(ragged, OTHERS)]
COMPILED = [(config, "none") for config in (*CONFIGS, ragged(WIDE), ROWS, COLUMNS)]
# Several tiles of keys and several blocks of queries; two CTAs take the tiles from a queue.
LONG = ((300, 40, 500), (200, 300, 500))
# On four SMs these tiles take four waves and more, so that first tiles store dQ.
STORING = ((300, 40, 200, 0, 150), (300, 500, 130, 100, 0))
# Sequences of more than eight tiles of keys on average. SORTED has a sorted plan, and LEVELS, whose
# sequences are alike, one by levels.
SORTED = ((70, 700, 1, 300), (900, 2300, 200, 1000))
LEVELS = ((650, 650), (1300, 1300))
# A sorted plan, too, in which two sequences have tiles of as many blocks, and first tiles store dQ.
EQUALLY_LONG = ((1000, 950, 1), (1900, 1900, 60))
# Many tiles of keys that no query sees, and other tiles among them.
UNSEEN = ((64, 0, 40), (130, 1500, 40))


def name_of(batch):
    return "-".join(map(str, batch[0])) or "none"


each = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
each_causal = pytest.mark.parametrize("config", PAIR, ids=lambda c: c.full_name)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none"])
    return sim.build_kernels(COMPILED)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return build_mutants(PLANTED, tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize(
    "batch", (*BATCHES, LONG, UNSEEN), ids=lambda b: "-".join(map(str, b[0])) or "none"
)
@each
def test_gradients(config, batch):
    """With sinks and a gradient of the log-sum-exp; rows of no sequence are NaN. Counters are
    exact, and shared memory has no bank conflicts."""
    problem = make_ragged(config, batch)
    result = problem.run(config, copy_mode="random")
    problem.check(result)
    assert not wrong_counts(config, batch, result)


@each_causal
def test_without_extras(config):
    problem = make_ragged(config, SOME, h=2, h_k=2, extras=False)
    problem.check(problem.run(config))


@each
def test_rows_that_are_not_used(config):
    """Unused rows are NaN, like the rows behind the sequences, and their gradients are 0."""
    problem = make_ragged(config, SOME, used=((64, 1, 0, 0, 129, 0), (130, 20, 3, 0, 0, 0)))
    problem.check(problem.run(config))


@pytest.mark.parametrize(("n", "m"), [(1, 0), (127, 3), (128, 128), (300, 1)])
def test_rows_before_the_first_sequence(n, m):
    """Rows before the first sequence are NaN and have gradients of 0, also if none follows."""
    for batch in (SOME, ((), ())):
        problem = Behind(make_ragged(PAIR[0], batch), n, m)
        problem.check(problem.run(PAIR[0]))


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


@each_causal
def test_what_is_infinite_stays_in_its_sequence(config):
    check_that_infinity_stays(config)


@pytest.mark.parametrize(("n", "m"), [(100, 70), (70, 128), (300, 200), (1100, 1100)])
@pytest.mark.parametrize("dense", [ROWS, COLUMNS], ids=lambda c: c.full_name)
def test_equal_lengths_equal_a_dense_batch(dense, n, m):
    """They are equal bit for bit, where the sums of dQ have only one order."""
    config = ragged(dense)
    problem = make_problem(dense, (3, n, m, 4, 2), extras=True)
    expected = problem.run(dense, sms=1)
    rows = {"q": n, "k": m, "v": m, "dout": n}
    flat = {name: getattr(problem, name).flatten(0, 1) for name in rows}
    packed = make_ragged(config, ((n,) * 3, (m,) * 3), more=0, sinks=problem.options["sinks"])
    dlse = problem.dlse.transpose(0, 1).flatten(1)
    found = dataclasses.replace(packed, dlse=dlse, **flat).run(config, sms=1)
    for name, x in outputs(found).items():
        if name != "dq" or m <= config.dkv.rows:
            assert torch.equal(x, expected.outputs[name].flatten(0, 1)), name


@each_causal
def test_neighbours_do_not_matter(config):
    """A sequence among others of NaN has the bits that it has alone, but for the order of sums."""
    batch = (40, 150, 60), (50, 128, 90)
    problem = make_ragged(config, batch)
    for i in range(3):
        alone, among, parts = one_of(problem, batch, i)
        result, expected = among.run(config, seed=i), outputs(alone.run(config))
        for name, part in parts.items():
            assert torch.equal(passed(result).outputs[name][part], expected[name]), name


@each_causal
def test_order_of_sequences_does_not_matter(config):
    """Gradients but dQ are equal bit for bit. The kernels are launched twice, as the plan and the
    queue are used again."""
    problem = make_ragged(config, SOME, more=0)
    other, parts = permuted(problem, SOME, ORDER)
    result = other.run(config, launches=2)
    other.check(result)
    found, expected = outputs(result), outputs(problem.run(config))
    for name in ("dk", "dv"):
        assert torch.equal(found[name], expected[name][parts[name]]), name


@pytest.mark.parametrize(("mask", "window"), [("none", (500, 500)), ("causal", (500, 0))])
def test_window_that_covers_all_equals_none(mask, window):
    local, plain = (with_mask(PAIR[0], kind) for kind in ("local", mask))
    # With query heads in groups the steps of a window have another order than those of other masks.
    problem = make_ragged(local, SOME, h=2, h_k=2, window_size=window)
    options = {**problem.options, "causal": mask == "causal", "window_size": (-1, -1)}
    expected = dataclasses.replace(problem, options=options).run(plain)
    assert same(passed(problem.run(local)), passed(expected), ("dk", "dv", "dsinks"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_first_tiles_store_dq_of_sequences_where_it_pays(config):
    """The other sequences start from zeros. One sequence has more tiles of keys than steps, one has
    queries that see no key, and one has no keys at all. The bits of dK and dV do not depend on
    whether first tiles store dQ."""
    local = config.mask == "local"
    problem = make_ragged(config, STORING, **{"window_size": (60, 20)} if local else {})
    adding = passed(problem.run(config, sms=64))
    assert local or not adding.outputs["dq_semaphore"].any()
    for seed, copy_mode in enumerate(sim.COPY_MODES):
        sms = 2 * (1 + seed % 2)
        storing = problem.run(
            config, seed=seed, copy_mode=copy_mode, sms=sms, launches=1 + seed % 2
        )
        problem.check(storing)
        assert storing.outputs["dq_semaphore"][:-1].any()
        assert same(adding, storing, ("dk", "dv", "dsinks"))


@pytest.mark.parametrize("sms", [1, 2])
def test_tiles_of_a_window_wait_for_tiles_drawn_before_them(sms):
    """Tiles inside a sequence have more blocks than its first tile, but must not come before it."""
    config = with_mask(PAIR[1], "local")
    batch = (1500, 100), (1500, 100)
    problem = make_ragged(config, batch, h=1, h_k=1, window_size=(300, 300))
    problem.check(problem.run(config, sms=sms))


@each_causal
def test_only_the_sums_of_dq_depend_on_the_schedule(config):
    problem = make_ragged(config, ((70, 0, 130), (400, 50, 300)))
    first = passed(problem.run(config))
    for seed, copy_mode in enumerate(sim.COPY_MODES):
        again = problem.run(config, seed=seed, copy_mode=copy_mode, sms=1 + seed)
        problem.check(again)
        assert same(first, again, ("dk", "dv", "dsinks"))


@pytest.mark.parametrize("wanted", [(), ("dq",), ("dk", "dv")], ids="-".join)
def test_only_gradients_that_are_wanted_are_written(wanted):
    config = PAIR[0]
    problem = make_ragged(config, SOME)
    every, some = passed(problem.run(config)), passed(problem.run(config, wanted=wanted))
    assert some.outputs.keys() == {
        *(*wanted, "dsinks", "row_stats", "plan", "dq_accum", "dq_semaphore"),
    }
    assert same(some, every, ("dsinks", *set(wanted).difference(["dq"])))
    assert bool(some.counters["wgmma"]) == bool(wanted)


def wrong_counts(config, batch, result, heads=4):
    """Returns whether counters differ from those of the visits that the sequences' masks require,
    summed over all query heads."""
    n = 0
    for length in zip(*batch, strict=True):
        if length[0] and length[1]:
            problem = make_problem(config, (1, *length, 1, 1))
            n += heads * visits(problem, config.dkv.step, config.cluster * config.dkv.rows)
    counters = result.counters
    added = n - stored_blocks(result)
    return (
        any(x for name, x in counters.items() if name.endswith("_conflicts"))
        or counters["wgmma"] != n * instructions(config)
        or counters["reduction_bytes"] != added * 4 * config.dkv.step * config.head_dim
    )


def planned(config, batch):
    """Returns (sequence, tile of its keys, number of blocks of queries that see it) in the plan's
    order."""
    problem = make_ragged(config, batch, h=1, h_k=1)
    result = problem.run(config)
    problem.check(result)
    plan = result.outputs["plan"]
    tiles = plan[4 : 4 + 8 * plan[0]].view(-1, 8).tolist()
    found = []
    for m_block, _, _, seqlen_q, seqlen_k, sequence, *rest in tiles:
        assert rest == [1, -1]
        if seqlen_q > 0:  # other tiles are of no sequence, or of one without queries
            first_key = m_block * config.cluster * config.dkv.rows
            first_query = max(first_key - (seqlen_k - seqlen_q), 0)
            blocks = -(-seqlen_q // config.dkv.step) - first_query // config.dkv.step
            found.append((sequence, m_block, blocks if first_query < seqlen_q else 0))
    assert len(set(found)) == len(found)
    return found


@pytest.mark.parametrize("config", (*PAIR, ragged(WIDE)), ids=lambda c: c.full_name)
def test_short_sequences_come_one_after_the_other(config):
    """The longest sequence comes first; one that is a third shorter is in another bucket."""
    lengths = (40, 500, 1, 0, 130, 300)
    found = planned(config, (lengths, lengths))
    order = list(dict.fromkeys(sequence for sequence, _, _ in found))
    if config.dkv.step == 64:
        assert order in ([1, 5, 4, 0, 2], [1, 5, 4, 2, 0])
    keys = config.cluster * config.dkv.rows
    expected = [(s, m) for s in order for m in range(-(-lengths[s] // keys))]
    assert [(s, m) for s, m, _ in found] == expected


@pytest.mark.parametrize("batch", [SORTED, LEVELS], ids=name_of)
@each_causal
def test_longest_tiles_of_long_sequences_come_first(config, batch):
    """The first tile of each sequence comes even earlier, as the sequence's other tiles may wait
    for it."""
    found = planned(config, batch)
    first = {sequence: i for i, (sequence, m, _) in enumerate(found) if m == 0}
    assert all(first[sequence] <= i for i, (sequence, _, _) in enumerate(found))
    blocks = [n for _, m, n in found if m > 0]
    assert all(a >= b for a, b in itertools.pairwise(blocks))
    assert [m for _, m, _ in found] != sorted(m for _, m, _ in found) or batch is LEVELS


def test_more_sequences_than_the_planner_has_threads():
    config = ragged(OTHERS[0])
    batch = tuple(i % 3 // 2 for i in range(600)), tuple(i % 7 for i in range(600))
    problem = make_ragged(config, batch, h=1, h_k=1)
    problem.check(problem.run(config))


@pytest.mark.parametrize("name", HOSTILE)
@each_causal
def test_no_lengths_reach_beyond_the_tensors(config, name):
    """Results are undefined then; the simulator itself checks TMA copies, reductions and stores."""
    passed(make_hostile(config, name).run(config))


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize("checker", [checker for checker in sim.CHECKERS if checker != "none"])
def test_checkers_are_silent(checker):
    config = PAIR[0]
    problem = make_ragged(config, ((70, 0, 130), (100, 50, 40)), h=2, h_k=1)
    problem.check(problem.run(config, checker=checker))
    for name in HOSTILE:
        # Tiles of overlapping sequences write the same gradients, which is a race without harm.
        if checker != "racecheck" or name in ("beyond the tokens", "used"):
            passed(make_hostile(config, name).run(config, checker=checker))


@functools.cache
def mutant_problems(config):
    some = make_ragged(config, ((40, 130, 1, 100), (130, 70, 40, 33)))
    used = make_ragged(config, SOME, used=((64, 1, 0, 0, 129, 0), (130, 20, 3, 0, 0, 0)))
    others = [make_ragged(config, batch) for batch in (UNSEEN, STORING, EQUALLY_LONG)]
    return some, used, Behind(some, 200, 1), *others


def find_fault(kernel, config):
    """Returns the report of a run, "numerics" if results are wrong, or None."""
    for problem in mutant_problems(config):
        result = problem.run(config, kernel=kernel, timeout=120)
        if result.verdict != "pass":
            return result.message
        try:
            problem.check(result)
        except AssertionError:
            return "numerics"
    problem = infinite_key(config)
    return "numerics" if spoils_neighbours(problem.run(config, kernel=kernel)) else None


@pytest.mark.parametrize("mutant", PLANTED, ids=lambda m: m.name)
def test_mutant_is_found(mutant, planted):
    found = find_fault(planted[mutant.name], mutant.config)
    assert found and re.search(mutant.report or "^numerics$", found), f"{mutant.name}: {found}"


@pytest.mark.parametrize("config", (*PAIR, ragged(WIDE)), ids=lambda c: c.full_name)
def test_unmutated_kernels_pass_the_same_checks(config, kernels):
    assert find_fault(None, config) is None
