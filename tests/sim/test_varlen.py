"""Ragged batches in both kernel classes: the plan, and the kernels that follow it."""

import dataclasses
import itertools
import re

import mutants_varlen
import pytest
import tiers
import torch
from mutants import ONE_STAGE, TWO_STAGES
from mutants_sm90 import ASKING, STRIDING
from planted import build_mutants
from problems import outweigh
from ragged import PADDED, check, equal, make_qkv, run, starts

from flashcute import sim

CONFIGS = (TWO_STAGES, ONE_STAGE, ASKING, STRIDING)
CHECKED = CONFIGS[0], CONFIGS[2]  # one of each class
WINDOWED = tuple(dataclasses.replace(config, mask="local") for config in CHECKED)
CHECKERS = [x for x in sim.CHECKERS if x != "none"]
COMPILED = [(c, "none") for c in (*CONFIGS, *WINDOWED)]
COMPILED += [(c, checker) for c in CHECKED for checker in CHECKERS]
PLANTED = tiers.faults(mutants_varlen.MUTANTS)
# Lengths of queries and keys: a single sequence; sequences without queries or without keys; only
# empty sequences; an empty sequence and lengths at a tile's edge; many short sequences; none.
BATCHES = (
    ((100,), (100,)),
    ((130, 1, 0, 64, 200), (130, 77, 50, 0, 33)),
    ((0, 0), (0, 0)),
    ((3, 0, 128, 129), (300, 0, 128, 20)),
    ((7,) * 12, (31,) * 12),
    ((), ()),
)
SOME = BATCHES[1]
each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
each_checked = pytest.mark.parametrize("config", CHECKED, ids=lambda c: c.full_name)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(sim.CHECKERS)
    return sim.build_kernels(COMPILED)


@pytest.fixture(scope="module")
def mutants(tmp_path_factory):
    return build_mutants(PLANTED, tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize("batch", BATCHES, ids=lambda b: "-".join(map(str, b[0])) or "none")
@each_config
def test_results(config, batch):
    """Neither NaN behind the sequences nor tokens of other sequences reach a result."""
    for seed, copy_mode in enumerate(sim.COPY_MODES):
        qkv = make_qkv(config, batch, seed=seed)
        result = run(config, qkv, batch, seed=seed, copy_mode=copy_mode)
        check(result, config, qkv, batch)


@each_config
def test_packed_heads_and_sinks(config):
    """Three packed heads take four rows. Rows without keys have sinks, rows of no sequence none."""
    sinks = torch.tensor([1.0, -2.0, 3.0, 0.0, 5.0, -1.0])
    qkv = make_qkv(config, SOME, h=6)
    result = run(config, qkv, SOME, pack_heads=True, sinks=sinks)
    check(result, config, qkv, SOME, sinks=sinks)


@each_checked
def test_one_key_that_outweighs_many(config):
    """The small weights together make up most of the output."""
    batch = (1, 2, 1), (700, 300, 900)
    q, k, v = make_qkv(config, batch)
    for i, j in itertools.pairwise(starts(batch[1]).tolist()):
        outweigh(q, k[i:j], v[i:j], 14.0)
    check(run(config, (q, k, v), batch), config, (q, k, v), batch)


@pytest.mark.parametrize("window", [(40, 10), (0, 0), (300, 300)], ids=str)
@pytest.mark.parametrize("config", WINDOWED, ids=lambda c: c.full_name)
def test_windows(config, window):
    qkv = make_qkv(config, SOME)
    result = run(config, qkv, SOME, window_size=window)
    check(result, config, qkv, SOME, window_size=window)


@each_config
def test_rows_that_are_not_used(config):
    """Unused rows are NaN in q, k and v, like the rows behind the sequences."""
    used = (64, 1, 0, 0, 129), (130, 20, 3, 0, 0)
    qkv = make_qkv(config, SOME)
    for x, lengths, counts in zip(qkv, (*SOME, SOME[1]), (*used, used[1]), strict=True):
        for (begin, end), n in zip(itertools.pairwise(starts(lengths)), counts, strict=True):
            x[begin + n : end] = torch.nan
    seqused = [torch.tensor(counts, dtype=torch.int32) for counts in used]
    result = run(config, qkv, SOME, max_seqlen_q=129, seqused_q=seqused[0], seqused_k=seqused[1])
    check(result, config, qkv, SOME, used)


@each_checked
def test_padding_around_the_tokens(config):
    batch, used = PADDED
    qkv = make_qkv(config, batch, more=0)
    for x, lengths, counts in zip(qkv, (*batch, batch[1]), (*used, used[1]), strict=True):
        for (begin, end), n in zip(itertools.pairwise(starts(lengths)), counts, strict=True):
            x[begin + n : end] = torch.nan
    seqused = [torch.tensor(counts, dtype=torch.int32) for counts in used]
    options = {"max_seqlen_q": 90, "seqused_q": seqused[0], "seqused_k": seqused[1]}
    check(run(config, qkv, batch, **options), config, qkv, batch, used)


@each_checked
def test_bound_below_a_length(config):
    """A sequence's rows from max_seqlen_q on count as unused."""
    qkv = make_qkv(config, SOME)
    used = tuple(min(n, 100) for n in SOME[0]), SOME[1]
    check(run(config, qkv, SOME, max_seqlen_q=100), config, qkv, SOME, used)
    assert equal(run(config, qkv, SOME, max_seqlen_q=10**9), run(config, qkv, SOME))


@each_config
def test_equal_lengths_equal_a_dense_batch(config):
    """Bit for bit."""
    for n, m in ((100, 70), (70, 150)):
        batch = (n,) * 3, (m,) * 3
        q, k, v = make_qkv(config, batch, more=0)
        dense = (q.view(3, n, *q.shape[1:]), *(x.view(3, m, *x.shape[1:]) for x in (k, v)))
        expected = sim.run_fwd(*dense, config, sms=2)
        result = run(config, (q, k, v), batch)
        assert torch.equal(result.out.view_as(dense[0]), expected.out)
        assert torch.equal(result.lse.view(-1, 3, n).transpose(0, 1), expected.lse)


@each_config
def test_neighbours_do_not_matter(config):
    """A sequence among others of NaN has every bit that it has alone."""
    batch = (40, 150, 60), (50, 170, 90)
    begins = [starts(lengths) for lengths in (batch[0], batch[1], batch[1])]
    qkv = [4 * x for x in make_qkv(config, batch)]
    for i in range(3):
        alone = [x[s[i] : s[i + 1]] for x, s in zip(qkv, begins, strict=True)]
        expected = run(config, alone, ((batch[0][i],), (batch[1][i],)))
        among = [torch.full_like(x, torch.nan) for x in qkv]
        rows = slice(begins[0][i], begins[0][i + 1])
        for x, part, s in zip(among, alone, begins, strict=True):
            x[s[i] : s[i + 1]] = part
        result = run(config, among, batch, seed=i)
        assert result.verdict == "pass", result.message
        assert torch.equal(result.out[rows], expected.out)
        assert torch.equal(result.lse[:, rows], expected.lse)


@each_checked
def test_order_of_sequences_does_not_matter(config):
    """Results are equal bit for bit. Of two launches the second finds the tile counters as the
    first has left them."""
    order = (3, 0, 4, 1, 2)
    qkv = [4 * x for x in make_qkv(config, SOME)]
    sides = SOME[0], SOME[1], SOME[1]
    rows = [torch.cat([torch.arange(starts(n)[i], starts(n)[i + 1]) for i in order]) for n in sides]
    permuted = [x[r] for x, r in zip(qkv, rows, strict=True)]
    lengths = tuple(tuple(side[i] for i in order) for side in SOME)
    expected = run(config, qkv, SOME)
    result = run(config, permuted, lengths, launches=2)
    assert torch.equal(result.out, expected.out[rows[0]])
    assert torch.equal(result.lse, expected.lse[:, rows[0]])


def plan_of(config, batch, more=5):
    """Returns the tiles of a head as (first row, block, key blocks), in the plan's order."""
    result = run(config, make_qkv(config, batch, h=1, h_k=1, more=more), batch)
    plan = result.outputs["plan"]
    m = config.tile_m

    def key_blocks(block, _row_q, _row_k, seqlen_q, seqlen_k, *_):
        last = min((block + 1) * m, seqlen_q) - 1
        causal = config.mask == "causal"
        end = min(last + seqlen_k - seqlen_q + 1, seqlen_k) if causal else seqlen_k
        return -(-max(end, 0) // config.tile_n)

    tiles = plan[4 : 4 + 8 * int(plan[0])].view(-1, 8).tolist()
    return [(row, block, key_blocks(block, row, *rest)) for block, row, *rest in tiles]


def tiles_of(config, lengths, more=5):
    """Returns (first row, block) of the tiles of all sequences, and of ``more`` rows of no sequence
    behind them, in the batch's order."""
    begins = starts(lengths).tolist()
    segments = [*zip(begins, lengths, strict=False), (begins[-1], more)]
    return [(row, block) for row, n in segments for block in range(-(-n // config.tile_m))]


@each_config
def test_plan(config):
    """The plan has each tile of a head once, and those with most key blocks come first."""
    batch = SOME[0], (130, 77, 50, 0, 250)
    tiles = plan_of(config, batch)
    assert sorted(tile[:2] for tile in tiles) == sorted(tiles_of(config, batch[0]))
    blocks = [tile[2] for tile in tiles]
    assert blocks == sorted(blocks, reverse=True)  # few enough for exact order
    assert max(blocks) > min(blocks) + 3


@each_config
def test_plan_of_tiles_that_are_alike(config):
    """Such tiles come in the batch's order, as neighbours share their keys and none is much
    longer."""
    batch = (70, 200, 0, 130, 65), (40, 3 * config.tile_n, 50, 70, 1)
    if config.mask == "causal":
        batch = (50, 2, 0, 3 * config.tile_n, 64), (50, 2, 0, 3 * config.tile_n, 64)
    tiles = plan_of(config, batch)
    assert [tile[:2] for tile in tiles] == tiles_of(config, batch[0])
    assert 0 < max(tile[2] for tile in tiles) <= 3


@pytest.mark.parametrize("more", [0, 5], ids=["whole", "rows of none"])
@pytest.mark.parametrize("config", CONFIGS[::2], ids=lambda c: c.full_name)
def test_plan_of_equal_sequences(config, more):
    """Under a causal mask the last tiles of all sequences come first, in the batch's order. Rows of
    no sequence behind them make the plan sort by key blocks instead."""
    lengths = (300,) * 5
    tiles = plan_of(config, (lengths, lengths), more)
    blocks = [tile[2] for tile in tiles]
    assert blocks == sorted(blocks, reverse=True)
    assert max(blocks) > min(blocks) + 3
    levels = sorted(tiles_of(config, lengths, more), key=lambda tile: -tile[1])
    if more == 0:
        assert [tile[:2] for tile in tiles] == levels
    assert sorted(tile[:2] for tile in tiles) == sorted(levels)


@pytest.mark.parametrize("b", [600, 700])
def test_more_sequences_than_the_planner_has_threads(b):
    """700 sequences are also more than the planner has room for in shared memory."""
    batch = tuple(i % 3 // 2 for i in range(b)), tuple(i % 7 for i in range(b))
    qkv = make_qkv(TWO_STAGES, batch, h=1, h_k=1)
    check(run(TWO_STAGES, qkv, batch, max_seqlen_q=1), TWO_STAGES, qkv, batch)


@pytest.mark.parametrize("which", CHECKERS)
@each_checked
def test_checkers_are_silent(config, which):
    batch = (70, 0, 130), (100, 50, 40)
    qkv = make_qkv(config, batch, h=2, h_k=1)
    result = run(config, qkv, batch, checker=which, seed=3)
    assert result.verdict == "pass", result.message


LARGE, SMALL = 2**31 - 1, -(2**31)
# Invalid values of cu_seqlens_q and cu_seqlens_k, and of seqused_q and seqused_k.
HOSTILE = {
    "decreasing": ((0, 150, 30, 90), (200, 100, 0, 50)),
    "overlapping": ((0, 200, 0, 200, 0, 200, 0, 200), (0, 200) * 4),
    "negative": ((-7, -3, 60, 90), (-200, 40, -1, 70)),
    "beyond the tokens": ((0, 150, 400, LARGE), (150, 250, LARGE, 7)),
    "extreme": ((SMALL, LARGE, SMALL, LARGE), (LARGE, SMALL, LARGE, SMALL)),
    "used": ((0, 50, 200), (0, 100, 200), (LARGE, -5), (-1, LARGE)),
}


@pytest.mark.parametrize(
    ("name", "which"), [*((name, "memcheck") for name in HOSTILE), ("extreme", "ubcheck")]
)
@each_checked
def test_no_lengths_reach_beyond_the_tensors(config, name, which):
    """Results are undefined then, but each access stays inside the tensors."""
    qkv = make_qkv(config, ((200,), (200,)), h=2, h_k=1, more=0)
    lengths = [torch.tensor(x, dtype=torch.int32) for x in HOSTILE[name]]
    options = dict(zip(("seqused_q", "seqused_k"), lengths[2:], strict=False))
    options |= {"max_seqlen_q": LARGE, "checker": which, "sms": 2}
    result = sim.run_varlen(*qkv, *lengths[:2], config, **options)
    assert result.verdict == "pass", result.message


@pytest.mark.parametrize("mutant", PLANTED, ids=lambda m: m.name)
def test_mutant_is_found(mutant, mutants):
    """A report finds it, or a comparison with the reference in some order of the warps."""
    config = mutant.config
    batch = (100, 30, 1, 200), (150, 70, 40, 33)
    qkv = make_qkv(config, batch)
    for seed in range(5):
        result = run(config, qkv, batch, seed=seed, kernel=mutants[mutant.name], timeout=120)
        if mutant.report:
            assert re.search(mutant.report, result.message), result
            return
        assert result.verdict == "pass", result.message
        try:
            check(result, config, qkv, batch)
        except AssertionError:
            return
    pytest.fail(f"{mutant.name} survived")
