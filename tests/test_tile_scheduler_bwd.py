"""The order of tiles of keys in the sm90 class's backward, by the scheduler's own code, called on
the CPU."""

from __future__ import annotations

import ctypes
import functools
import itertools
import random
from pathlib import Path

import pytest
from test_tile_scheduler import WorkTile, compiled

from flashcute import heuristics
from flashcute.config import SEMAPHORE_ROWS
from flashcute.jit.abi import ROW_STATS_MULTIPLE, FlashBwdParams

CAUSAL = heuristics.sm90_bwd_config("bf16", 128, "causal")
FULL = heuristics.sm90_bwd_config("bf16", 128, "none")
NARROW = heuristics.sm90_bwd_config("bf16", 32, "causal")
WINDOW = heuristics.sm90_bwd_config("bf16", 128, "local")
WIDE_WINDOW = heuristics.sm90_bwd_config("bf16", 256, "local")
CASES = Path(__file__).parent / "tile_scheduler_bwd_cases.cpp"
KEYS = CAUSAL.dkv.rows


@functools.cache
def scheduler():
    """Compiles the cases; returns their functions."""
    configs = {"kCausal": CAUSAL, "kFull": FULL, "kNarrow": NARROW, "kWindow": WINDOW}
    configs["kWideWindow"] = WIDE_WINDOW
    lines = (f"constexpr flash::BwdConfig {name}{c.to_cpp()};\n" for name, c in configs.items())
    found = compiled(CASES, "".join(lines))
    found.may_store_first.restype = found.stores_under_window.restype = ctypes.c_bool
    found.most_steps.restype = ctypes.c_int64
    found.get_tile.restype = found.get_ragged_tile.restype = WorkTile
    found.owns_heads.restype = ctypes.c_bool
    return found


@pytest.fixture(scope="module")
def lib():
    return scheduler()


def problem(b, h, h_k, seqlen_q, seqlen_k=None, d=128):
    return FlashBwdParams(
        b=b,
        h=h,
        h_k=h_k,
        h_h_k_ratio=h // h_k,
        seqlen_q=seqlen_q,
        seqlen_q_rounded=-(-seqlen_q // ROW_STATS_MULTIPLE) * ROW_STATS_MULTIPLE,
        seqlen_k=seqlen_q if seqlen_k is None else seqlen_k,
        d=d,
        dq_semaphore_ptr=1,
        dk_ptr=1,
        head_parts=1,
    )


def order(lib, params, group):
    """Returns (m_block, batch and key head as one number) of every index, in order."""
    tiles = lib.num_tiles(ctypes.byref(params))
    found = [lib.get_tile(ctypes.byref(params), tiles, group, i) for i in range(tiles + 1)]
    assert found.pop().m_block == -1
    for tile in found:
        assert tile.head_q == tile.head * params.h_h_k_ratio
        assert tile.head_k == tile.head
        assert (tile.seqlen_q, tile.seqlen_k) == (params.seqlen_q, params.seqlen_k)
    return [(tile.m_block, tile.batch * params.h_k + tile.head) for tile in found]


@pytest.mark.parametrize(
    "params",
    [
        problem(1, 1, 1, 1),
        problem(1, 1, 1, 9 * KEYS),
        problem(2, 8, 2, 3 * KEYS - 1),
        problem(3, 7, 7, 5 * KEYS, 2 * KEYS + 1),
        problem(9, 6, 3, KEYS),
    ],
    ids=lambda p: f"b{p.b}_h{p.h}_hk{p.h_k}_sk{p.seqlen_k}",
)
def test_longest_tiles_first_in_groups_of_which_the_first_may_be_smaller(lib, params):
    heads = params.b * params.h_k
    blocks = -(-params.seqlen_k // KEYS)
    for group in {1, 2, 4, max(heads - 1, 1), heads} & set(range(1, heads + 1)):
        found = order(lib, params, group)
        sizes = [(heads - 1) % group + 1, *[group] * ((heads - 1) // group)]
        last_first = iter(reversed(range(heads)))
        expected = []
        for size in sizes:
            of_group = list(itertools.islice(last_first, size))
            expected += [(n, head) for n in range(blocks) for head in of_group]
        assert found == expected


def test_indices_near_the_largest_grid(lib):
    """There are at most 2^31 - 1 tiles, and no intermediate product may exceed 32 bits."""
    params = problem(1 << 16, 1 << 5, 1 << 5, KEYS, 1023 * KEYS)
    tiles = lib.num_tiles(ctypes.byref(params))
    assert 2**31 - 2**22 < tiles < 2**31
    heads = params.b * params.h_k
    for group in (1, 5, lib.heads_in_group(ctypes.byref(params), 132), heads - 1, heads):
        first = (heads - 1) % group + 1
        for index in (0, 1, tiles // 3, tiles // 2, tiles - 2, tiles - 1):
            behind = index - first * 1023
            begin = 0 if behind < 0 else first + behind // (group * 1023) * group
            n, place = divmod(index - begin * 1023, first if behind < 0 else group)
            found = lib.get_tile(ctypes.byref(params), tiles, group, index)
            expected = (n, *divmod(heads - 1 - begin - place, params.h_k))
            assert (found.m_block, found.batch, found.head) == expected


@pytest.mark.parametrize("seqlen", [1, 512, 1024])
@pytest.mark.parametrize("heads", [(1, 1, 1), (4, 32, 8), (2, 7, 1), (64, 16, 16)])
@pytest.mark.parametrize("d", [8, 128])
@pytest.mark.parametrize("ordered", [0, 1])
def test_groups_of_short_heads_fit_the_cache(lib, seqlen, heads, d, ordered):
    b, h, h_k = heads
    params = problem(b, h, h_k, seqlen, d=d)
    params.deterministic = ordered
    group = lib.heads_in_storing_group(ctypes.byref(params), 132, True)
    in_l2 = 2**25 // (h // h_k * seqlen * (4 * d + 4 * CAUSAL.head_dim))
    wave = (2 if ordered else 1) * 132 // -(-seqlen // KEYS)
    assert group == max(min(in_l2, wave, b * h_k), 1)


def heads_under_a_window(lib, shape, window, workers=132, deterministic=0):
    b, h, h_k, seqlen = shape
    params = problem(b, h, h_k, seqlen)
    params.window_left, params.window_right = window
    params.deterministic = deterministic
    return lib.heads_in_window_group(ctypes.byref(params), workers)


@pytest.mark.parametrize(
    ("shape", "window", "heads"),
    [
        ((2, 16, 4, 8192), (1023, 0), 1),
        ((2, 16, 4, 8192), (1535, 0), 1),
        ((2, 16, 4, 8192), (1000, 1000), 8),  # all of them
        ((2, 16, 4, 8192), (4095, 0), 8),
        ((4, 16, 4, 4096), (2047, 0), 16),
        ((8, 32, 8, 4096), (2047, 0), 16),
        ((1, 64, 16, 32768), (8191, 0), 4),
        ((2, 16, 16, 8192), (4095, 0), 4),
        ((1, 64, 8, 65536), (40000, 0), 1),
    ],
)
def test_tiles_in_work_of_a_grouped_head_own_half_a_wide_window(lib, shape, window, heads):
    assert heads_under_a_window(lib, shape, window) == heads


@pytest.mark.parametrize(
    ("heads_k", "window", "narrow", "wide"),
    [
        (16, (127, 0), True, True),
        (16, (128, 127), True, True),
        (16, (255, 0), True, True),
        (16, (256, 0), True, False),  # two tiles of a cluster
        (16, (4095, 0), True, False),
        (4, (127, 0), True, True),
        (4, (512, 512), True, False),
        (4, (2731, 0), False, False),  # a third of the keys
    ],
)
def test_first_tiles_that_store_under_a_window(lib, heads_k, window, narrow, wide):
    params = problem(2, 16, heads_k, 8192)
    params.window_left, params.window_right = window
    found = [lib.stores_under_window(ctypes.byref(params), is_wide) for is_wide in (False, True)]
    assert found == [narrow, wide]


def test_some_head_is_scheduled_under_every_window(lib):
    """A group of no heads would mean that CTAs own whole heads."""
    sizes = [2**i + j for i in range(0, 19, 3) for j in (-1, 0, 1)]
    for ratio, seqlen, left, workers in itertools.product(
        (1, 2, 4, 5, 8, 16), sizes[1:], sizes, (1, 16, 66, 132)
    ):
        window = min(left, seqlen), min(left // 3, seqlen)
        for ordered in (0, 1):
            group = heads_under_a_window(lib, (1, 2 * ratio, 2, seqlen), window, workers, ordered)
            assert 1 <= group <= 2, (ratio, seqlen, window, workers, ordered)


@pytest.mark.parametrize("seqlen", [1025, 2048, 3072, 4096, 5120, 16384, 65536])
@pytest.mark.parametrize("heads", [(1, 1, 1), (4, 32, 8), (5, 16, 4), (2, 7, 1), (64, 16, 16)])
@pytest.mark.parametrize("ordered", [0, 1])
def test_groups_of_long_heads_are_of_one_size_and_two_or_four_waves(lib, seqlen, heads, ordered):
    b, h, h_k = heads
    params = problem(b, h, h_k, seqlen)
    params.deterministic = ordered
    group = lib.heads_in_storing_group(ctypes.byref(params), 132, True)
    if not ordered:
        assert group == lib.heads_in_group(ctypes.byref(params), 132)
    waves = 4 if ordered and h == h_k else 2
    groups = max(round(b * h_k * -(-seqlen // KEYS) / (waves * 132)), 1)
    assert 1 <= group == -(-b * h_k // groups)


def steps(lib, params, index, window=False):
    """Returns (block of queries, query head) of each step of a tile, in order."""
    most = params.h_h_k_ratio * (params.seqlen_q // CAUSAL.dkv.step + 1)
    heads, blocks = (ctypes.c_int * most)(), (ctypes.c_int * most)()
    count = lib.steps(ctypes.byref(params), window, index, heads, blocks)
    assert 0 <= count <= most, "a step is not the one before the next"
    return list(zip(blocks[:count], heads[:count], strict=True))


@pytest.mark.parametrize("seqlens", [(1024, 1024), (2048, 2048), (1400, 3000), (3000, 1400)])
@pytest.mark.parametrize("ratio", [1, 3])
@pytest.mark.parametrize("ordered", [0, 1])
def test_short_tiles_of_long_heads_begin_at_the_diagonal(lib, seqlens, ratio, ordered):
    """A tile visits a block of queries for all query heads, then the next one, in one direction."""
    params = problem(1, ratio, 1, *seqlens)
    params.deterministic = ordered
    seqlen_q, seqlen_k = seqlens
    rows, ups = CAUSAL.dkv.step, 0
    for n in range(-(-seqlen_k // KEYS)):
        first = max(n * KEYS - seqlen_k + seqlen_q, 0) // rows
        visited = list(range(first, -(-seqlen_q // rows)))
        up = not ordered and min(seqlens) > 8 * KEYS and 2 * len(visited) * rows <= min(seqlens)
        visited = visited if up else visited[::-1]
        assert steps(lib, params, n) == [(m, head) for m in visited for head in range(ratio)]
        ups += up
    assert (ups > 0) == (not ordered and min(seqlens) > 8 * KEYS)


@pytest.mark.parametrize("window", [(0, 0), (200, 70), (511, 0)])
@pytest.mark.parametrize("ratio", [1, 3])
def test_under_a_window_each_query_head_is_visited_at_a_time(lib, window, ratio):
    params = problem(1, ratio, 1, 2000)
    params.window_left, params.window_right = window
    for n in range(-(-2000 // KEYS)):
        begin, end = ctypes.c_int(), ctypes.c_int()
        lib.visited_blocks(ctypes.byref(params), n, ctypes.byref(begin), ctypes.byref(end))
        visited = range(begin.value, end.value)[::-1]
        expected = [(m, head) for head in range(ratio) for m in visited]
        assert steps(lib, params, n, True) == expected


@pytest.mark.parametrize("heads", [1, 2, 131, 132, 133, 400])
@pytest.mark.parametrize("seqlen_k", [1, KEYS, 3 * KEYS - 1])
@pytest.mark.parametrize("sms", [1, 3, 132])
def test_owned_heads_are_computed_whole_and_each_once(lib, heads, seqlen_k, sms):
    params = problem(heads, 1, 1, 256, seqlen_k)
    tiles = lib.num_tiles(ctypes.byref(params))
    blocks = -(-seqlen_k // KEYS)
    workers = min(heads, sms)
    computed = []
    for worker in range(workers):
        index = lib.first_owned(ctypes.byref(params), worker)
        own = []
        while index < tiles:
            tile = lib.get_tile(ctypes.byref(params), tiles, 0, index)
            own.append((tile.batch, tile.m_block))
            index = lib.next_owned(ctypes.byref(params), index, workers)
        last_first = [batch for batch, n in own if n == 0]
        assert own == [(batch, n) for batch in last_first for n in range(blocks)]
        assert last_first == list(range(heads - 1 - worker, -1, -workers))
        computed += last_first
    assert sorted(computed) == list(range(heads))


def test_heads_are_owned_where_they_are_short_and_fill_the_sms(lib):
    def owns(b, h, h_k, seqlen_q, seqlen_k=None, sms=132, or_stores=True, d=128):
        params = problem(b, h, h_k, seqlen_q, seqlen_k, d)
        return lib.owns_heads(ctypes.byref(params), sms, or_stores, d)

    # 132 heads of d = 128 are a wave. They have one tile of keys, or two if the sums of dQ need at
    # most 8 MB.
    assert all(owns(12, 11, 11, s) for s in (1, 128)) and not owns(12, 11, 11, 256)
    assert owns(12, 11, 11, 128, 256) and not owns(12, 11, 11, 128, 257)
    assert owns(12, 22, 11, 128) and not owns(12, 22, 11, 128, 256)  # two query heads a key head
    # Owned heads would need a second wave for 33 heads, and tiles less.
    assert not owns(15, 11, 11, 128, 256)
    assert owns(15, 11, 11, 128), "a head is a tile"
    assert owns(24, 11, 11, 128, 256)
    # Of 288 heads with two tiles each an SM computes six tiles if it owns heads, else five. Heads
    # are owned if the alternative is to add to zeros, but not if first tiles could store dQ.
    assert not owns(24, 12, 12, 128, 256) and owns(24, 12, 12, 128, 256, or_stores=False)
    # With d = 32 the sums of dQ, times the tiles that add to each, may have 8 MB, 63 KB an SM. With
    # a causal mask and two tiles of keys, fewer than two tiles add to each sum on average.
    assert owns(12, 11, 11, 256, d=32) and not owns(12, 11, 11, 384, d=32)
    assert owns(12, 11, 11, 384, d=32, or_stores=False)
    # With few heads their tiles fill SMs that owned heads would leave idle.
    assert owns(1, 1, 1, 128) and not owns(1, 1, 1, 128, 256)
    assert not owns(12, 11, 11, 128, 0), "there is no tile"
    assert not owns(12, 11, 11, 2**31 - 128, 2**31 - 128), "no product leaves 64 bits"
    many = 1 << 10, 1 << 10, 128, 2 * KEYS  # indices go on behind the last tile
    assert owns(1048575, *many) and not owns(1048576, *many)
    # Long sums of dQ take long, even of few heads.
    assert owns(1, 1, 1, 256, 77) and not owns(1, 1, 1, 384, 77)
    assert not owns(1, 64, 1, 128) and owns(1, 2, 1, 128)
    # Sums may be longer if first tiles do not store dQ instead: up to two blocks of keys with a
    # causal mask, as with three blocks the sums of 384 rows, 25 MB, are added to twice on average.
    assert owns(12, 11, 11, 256, or_stores=False) and not owns(12, 11, 11, 384, or_stores=False)
    assert owns(1, 1, 1, 640, 77, or_stores=False) and not owns(1, 1, 1, 768, 77, or_stores=False)


@pytest.mark.parametrize("causal", [False, True])
def test_first_tiles_store_dq_of_short_heads_in_four_waves_and_more(lib, causal):
    def stores(b, h, seqlen_q, seqlen_k=None, sms=132, **changed):
        params = problem(b, h, h, seqlen_q, seqlen_k)
        for name, value in changed.items():
            setattr(params, name, value)
        return lib.may_store_first(ctypes.byref(params), sms, causal)

    assert all(stores(64 * 512 // s, 16, s) for s in (128, 512, 2048))
    assert not stores(64, 16, 2049)
    assert not stores(64, 16, 512, dq_semaphore_ptr=None)
    assert not stores(64, 16, 512, 0)
    assert stores(64, 16, 1024, 2048) and not stores(64, 16, 960, 2048), "fewer steps than tiles"
    assert stores(33, 4, 512) and not stores(131, 1, 512)
    assert stores(64, 16, 513, 512)


@pytest.mark.parametrize("seqlen", [128, 512, 1024, 1152, 2048])
@pytest.mark.parametrize("heads", [1, 24, 1000])
def test_groups_where_first_tiles_store_dq_without_a_mask(lib, seqlen, heads):
    params = problem(heads, 1, 1, seqlen)
    tiles = -(-seqlen // KEYS)
    full = lib.heads_in_storing_group(ctypes.byref(params), 132, False)
    assert full == min(-(-3 * 132 // (4 * tiles)), heads)


# (b, h, h_k, seqlen_q, seqlen_k, number of CTAs or clusters, whether clusters). The last wave has a
# few tiles of 4096 queries, or is nearly full. Other cases have fewer visits than workers, query
# heads that share keys, fewer tiles than workers, and fewer counters than workers.
SHARED = [
    (4, 16, 16, 4096, 4096, 132, False),
    (1, 12, 12, 4100, 3000, 132, False),
    (1, 3, 3, 1024, 9 * KEYS, 20, False),
    (4, 67, 67, 960, 64, 132, False),
    (3, 32, 8, 640, 7 * KEYS - 1, 132, False),
    (2, 64, 1, 500, 70 * KEYS, 132, False),
    (1, 4, 2, 2200, 90 * KEYS, 132, False),
    (1, 8, 8, 4096, 77, 132, False),
    (2, 40, 10, 4096, 5 * KEYS, 132, False),
    (1, 1, 1, 2048, 12 * KEYS, 40, False),
    (4, 16, 16, 4096, 4096, 66, True),
    (2, 8, 8, 4096, 77, 66, True),
    (1, 1, 1, 4096, 9 * 2 * KEYS, 66, True),
]


class SharedPiece(ctypes.Structure):
    """The mirror of ``flash::SharedPiece``."""

    _fields_ = [(name, ctypes.c_int) for name in ("tile", "begin", "count", "part")]


def pieces_of(lib, params, workers, clusters, rest, worker):
    found = (SharedPiece * 3)()
    tiles = lib.get_pieces(ctypes.byref(params), workers, clusters, rest, worker, found)
    assert found[2].tile == tiles
    return list(itertools.takewhile(lambda piece: piece.tile != tiles, found))


@pytest.mark.parametrize("shape", SHARED, ids=lambda s: "-".join(map(str, s)))
def test_shared_tiles_are_computed_once_in_ranges_of_one_length(lib, shape):
    *sizes, workers, clusters = shape
    params = problem(*sizes)
    keys = KEYS * (1 + clusters)
    tiles = params.b * params.h_k * -(-params.seqlen_k // keys)
    rest = lib.shared_tiles(ctypes.byref(params), workers, clusters)
    assert 0 < rest == tiles % workers
    counters = params.b * params.h * (params.seqlen_q_rounded // SEMAPHORE_ROWS)
    each = -(-params.seqlen_q // FULL.dkv.step)
    visits, works, before = {}, [], {}
    for worker in range(workers):
        pieces = pieces_of(lib, params, workers, clusters, rest, worker)
        assert len(pieces) <= 2
        works.append(sum(piece.count for piece in pieces))
        # The piece of a tile that another worker completes comes first, as that worker awaits it.
        assert [piece.part < 0 for piece in pieces] in ([], [True], [False], [True, False])
        for piece in pieces:
            # Pieces follow each other downwards from the last block.
            assert piece.count > 0
            assert piece.begin + piece.count == visits.get(piece.tile, each)
            visits[piece.tile] = piece.begin
            assert (piece.begin == 0) == (piece.part >= 0)
            if piece.part >= 0:
                assert before.pop(piece.tile, []) == list(range(worker - piece.part, worker))
            else:
                before.setdefault(piece.tile, []).append(worker)
                assert (worker + 1) * (1 + clusters) <= counters
    assert not before and not any(visits.values())
    assert visits.keys() == set(range(tiles - rest, tiles))
    shares = [work for work in works if work]
    most = (tiles // workers * each + max(shares)) * params.h // params.h_k
    assert lib.most_steps(ctypes.byref(params), workers, clusters) == most
    assert max(shares) - min(shares) <= 1 and min(shares) >= min(each, 4)
    assert max(shares) <= each - 8 * params.h_k / params.h and 4 * max(shares) >= each


def test_tiles_are_shared_where_that_saves_steps(lib):
    def shared(b, h, h_k, seqlen_q, seqlen_k, workers=132, **changed):
        params = problem(b, h, h_k, seqlen_q, seqlen_k)
        for name, value in changed.items():
            setattr(params, name, value)
        return lib.shared_tiles(ctypes.byref(params), workers, False)

    assert shared(1, 16, 16, 16384, 16384) == 2048 % 132
    assert shared(1, 132, 132, 4096, KEYS) == 0, "the wave is full"
    assert shared(1, 131, 131, 4096, KEYS) == 0, "nearly full"
    assert shared(1, 100, 100, 4096, KEYS) == 100, "there need not be a wave before"
    assert shared(1, 8, 8, 4096, KEYS) == 8
    assert shared(1, 8, 8, 4096, 0) == shared(0, 8, 8, 4096, KEYS) == 0
    assert shared(1, 133, 133, 640, KEYS) == 0, "five steps instead of ten"
    assert shared(1, 133, 133, 768, KEYS) == 1, "four instead of twelve"
    assert shared(1, 4 * 133, 133, 448, KEYS) == 0, "the visits of a range are four and more"
    assert shared(1, 4 * 133, 133, 512, KEYS) == 1, (
        "four visits of each query head instead of eight"
    )
    assert shared(1, 133, 133, 4096, KEYS, dk_ptr=None) == 0
    assert shared(1, 133, 133, 4096, KEYS, dq_semaphore_ptr=None) == 0
    # The CTAs' counters lie where semaphores of dQ would, so there must be enough of these.
    assert shared(1, 1, 1, 100 * SEMAPHORE_ROWS, 232 * KEYS) == 0
    assert shared(1, 1, 1, 132 * SEMAPHORE_ROWS, 232 * KEYS) == 100
    most = shared(1 << 12, 1 << 12, 1 << 12, 1 << 20, 100 * KEYS)
    assert most == (100 << 24) % 132, "no product leaves 64 bits"


@pytest.mark.parametrize("seed", range(20))
def test_tiles_of_a_window_that_visit_a_block_follow_each_other(lib, seed):
    """They follow the first visitor, which a tile computes to wait only for the tiles before it."""
    rng = random.Random(seed)
    seen = 0
    for _ in range(100):
        lengths = (rng.choice((1, 63, 64, 200, 700, 1500)) + rng.randrange(100) for _ in range(2))
        params = problem(1, 1, 1, *lengths)
        params.window_left, params.window_right = (rng.choice((0, 7, 130, 2000)) for _ in range(2))
        visitors = {}
        for n in range(-(-params.seqlen_k // 128)):
            begin, end = ctypes.c_int(), ctypes.c_int()
            lib.visited_blocks(ctypes.byref(params), n, ctypes.byref(begin), ctypes.byref(end))
            for m in range(begin.value, end.value):
                visitors.setdefault(m, []).append(n)
        for m, tiles in visitors.items():
            first = lib.first_visitor(ctypes.byref(params), m)
            assert tiles == list(range(first, first + len(tiles)))
            seen += len(tiles)
    assert seen > 1000


def ragged_group(lib, mask, b, h_k, seqlen, ratio=4, longest=None, **changed):
    params = problem(b, ratio * h_k, h_k, longest or seqlen)
    params.total_q = params.total_k = b * seqlen
    for name, value in changed.items():
        setattr(params, name, value)
    kind = ("none", "causal", "local").index(mask)
    tiles = b * -(-seqlen // KEYS)
    return lib.heads_in_ragged_group(ctypes.byref(params), kind, 132, tiles)


def test_short_sequences_of_a_ragged_batch_come_with_all_heads_one_after_the_other(lib):
    """Groups of long sequences have, with a causal mask, the heads of one or two waves of tiles."""
    for b, seqlen in ((1, 1), (1, 1024), (64, 500), (16, 1024)):
        for mask in ("causal", "local"):
            assert ragged_group(lib, mask, b, 16, seqlen) == -16
        assert ragged_group(lib, "none", b, 8, seqlen, ratio=1) == -8
    assert ragged_group(lib, "causal", 16, 16, 1025) == 1
    assert ragged_group(lib, "causal", 1, 16, 4096) == 264 // 32
    assert ragged_group(lib, "causal", 1, 4, 2048) == 4, "there are no more"
    for mask in ("none", "local"):
        assert ragged_group(lib, mask, 16, 16, 1025) == 1
    assert ragged_group(lib, "local", 16, 16, 1025, stores_first=1) == -1


@pytest.mark.parametrize(("h_k", "group", "tiles"), [(1, 1, 1), (8, 8, 5), (7, 3, 4), (5, 4, 1)])
def test_tiles_of_a_ragged_batch_come_group_after_group_of_heads(lib, h_k, group, tiles):
    """Heads of a tile follow each other. The last group may have fewer heads."""
    params = problem(1, 2 * h_k, h_k, 1)
    of_call = ctypes.byref(params)
    count = tiles * h_k
    found = [lib.get_ragged_tile(of_call, tiles, group, i) for i in range(count + 1)]
    assert found.pop().m_block == -1
    groups = [range(begin, min(begin + group, h_k)) for begin in range(0, h_k, group)]
    wanted = [(n, head) for heads in groups for n in range(tiles) for head in heads]
    assert [(tile.m_block, tile.head) for tile in found] == wanted
    assert all(tile.head_q == 2 * tile.head and tile.head_k == tile.head for tile in found)


def test_sequences_whose_tiles_keep_their_order_come_one_after_the_other(lib):
    """A sequence has as many heads at a time as L2 holds, and enough to keep the workers busy."""

    def group(mask, h_k, seqlen, **sizes):
        return -ragged_group(lib, mask, 4, h_k, seqlen, deterministic=1, **sizes)

    assert group("causal", 16, 4096) == group("causal", 16, 500) == 16
    assert group("none", 32, 512, ratio=1) == 32
    assert group("none", 32, 4096, ratio=1) == 132 // 16
    assert group("none", 32, 1024, ratio=1) == 16, "16 MB"
    assert group("none", 32, 500, ratio=1, longest=16384) == 132 // 16
    assert group("local", 32, 4096, ratio=1) == 1024 // 128
    assert group("local", 32, 2048, ratio=1) == 16, "32 MB"
    assert group("none", 4, 4096) == group("local", 4, 4096) == 4, "there are no more"


def test_tiles_that_keep_their_order_store_first_wherever_they_may(lib):
    def stores(*sizes, deterministic, **changed):
        params = problem(*sizes)
        params.deterministic = deterministic
        for name, value in changed.items():
            setattr(params, name, value)
        return lib.may_store_first(ctypes.byref(params), 132, True)

    for sizes in ((1, 1, 1, 16 * 1024), (1, 1, 1, 1)):  # long heads, and few tiles
        assert stores(*sizes, deterministic=1) and not stores(*sizes, deterministic=0)
    assert not stores(1, 1, 1, 1024, deterministic=1, dq_semaphore_ptr=None)
