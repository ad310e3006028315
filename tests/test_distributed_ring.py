"""The plan of the ring's rounds: what is sent is what is awaited, and what is needed arrives."""

from __future__ import annotations

import pytest

from flashcute.distributed import ring
from flashcute.distributed.zigzag import Layout

LAYOUTS = [
    Layout((16,), order, world, window)
    for world in (2, 3, 4, 7, 8)
    for order in ("zigzag", "contiguous")
    for window in ((-1, 0), (5, 0), (20, 0), (40, 3), (-1, 9), (0, 30))
] + [Layout((16,), "contiguous", 5, (-1, -1)), Layout((2, 4), "zigzag", 4, (7, 0))]


def rounds(layout: Layout, transfers, count: int):
    """Yields each round with every rank's transfers; sends must match receives, in their order."""
    for round_ in range(count):
        lists = [list(transfers(layout, rank, round_)) for rank in range(layout.world)]
        for a in range(layout.world):
            for b in range(layout.world):
                sent = [x.number for x in lists[a] if x.send and x.peer == b]
                awaited = [x.number for x in lists[b] if not x.send and x.peer == a]
                assert sent == awaited, (layout, round_, a, b)
                assert a != b or not sent
        yield round_, lists


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_needed_keys_arrive_and_no_others(layout):
    world, parts = layout.world, range(len(layout.segments(0)))
    held = {(rank, part): None for rank in range(world) for part in parts}  # the owner of the keys
    for round_, lists in rounds(layout, ring.key_transfers, world + 1):
        arrived = {}
        for rank, transfers in enumerate(lists):
            for x in transfers:
                if not x.send:
                    continue
                owner = rank if x.own else held[rank, x.number]
                assert (x.peer, x.number) not in arrived
                arrived[x.peer, x.number] = owner
        for rank in range(world):
            for part in parts:
                owner = (rank - round_) % world
                needs = 0 < round_ < world and layout.needs(rank, owner, part)
                assert arrived.get((rank, part)) == (owner if needs else None)
                held[rank, part] = owner if needs else None


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_of_all_users_come_home_once(layout):
    world, parts = layout.world, range(len(layout.segments(0)))
    sums = {}  # (rank, part): (owner, users so far)
    home = {(rank, part): [] for rank in range(world) for part in parts}
    for round_, lists in rounds(layout, ring.gradient_transfers, world + 1):
        messages = [
            (rank, x, sums.get((rank, x.number)))
            for rank, transfers in enumerate(lists)
            for x in transfers
            if x.send
        ]
        sums = {}
        for rank in range(world):
            owner = (rank - round_) % world
            for part in parts:
                if 0 < round_ < world and layout.needs(rank, owner, part):
                    sums[rank, part] = owner, [rank]
        for rank, x, (owner, users) in messages:
            (other,) = (
                y for y in lists[x.peer] if not y.send and (y.peer, y.number) == (rank, x.number)
            )
            if other.own:
                assert x.peer == owner
                home[owner, x.number] += users
            else:
                assert sums[x.peer, x.number][0] == owner
                sums[x.peer, x.number][1].extend(users)
    assert not sums
    for (owner, part), users in home.items():
        needed = [r for r in range(world) if r != owner and layout.needs(r, owner, part)]
        assert sorted(users) == needed


def sent(layout: Layout) -> int:
    ranks = range(layout.world)
    return sum(x.send for r in ranks for step in ranks for x in ring.key_transfers(layout, r, step))


def test_a_causal_ring_moves_three_quarters_of_the_keys():
    assert sent(Layout((16,), "zigzag", 8, (-1, 0))) == 8 * 7 * 2 * 3 / 4


def test_a_window_moves_only_neighbours_keys():
    assert sent(Layout((64,), "contiguous", 8, (64, 0))) == 7


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout((0,), "zigzag", 2, (-1, 0))], ids=str)
def test_how_many_pieces_a_query_is_in(layout):
    for rank in range(layout.world):
        others = [n for n in range(layout.world) if n != rank]
        pieces = [*layout.own(rank), *(x for n in others for x in layout.foreign(rank, n))]
        rows = [row for x in pieces for row in range(x.rows.start, x.rows.stop)]
        assert ring.most_terms(layout, rank) == max(map(rows.count, rows), default=0)


def test_a_causal_ring_of_two_sums_two_pieces():
    assert [ring.most_terms(Layout((16,), "zigzag", 2, (-1, 0)), n) for n in range(2)] == [2, 2]
