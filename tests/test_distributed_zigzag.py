"""The layout of tokens on ranks: every visible pair of query and key is computed exactly once."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashcute.distributed import zigzag_merge, zigzag_positions, zigzag_split
from flashcute.distributed.zigzag import Layout
from flashcute.reference import visible_keys

WINDOWS = [(-1, -1), (-1, 0), (0, 0), (3, 0), (5, 2), (-1, 3), (4, -1), (17, 0), (0, 9), (30, 30)]


def positions(layout: Layout, rank: int) -> list[tuple[int, int]]:
    """Returns (sequence, position) of a rank's tokens, in order of memory."""
    return [(x.sequence, x.start + i) for x in layout.segments(rank) for i in range(x.length)]


def count(pieces, queries, keys, counts) -> None:
    for piece in pieces:
        rows, columns = queries[piece.rows], keys[piece.keys]
        seen = visible_keys(len(rows), len(columns), piece.causal, piece.window)
        assert seen.any(1).all(), f"{piece}: a row sees no key"
        for i, j in seen.nonzero().tolist():
            pair = rows[i], columns[j]
            counts[pair] = counts.get(pair, 0) + 1


def visible(layout: Layout) -> set:
    """Returns the pairs of a query and a key that it sees, each as (sequence, position)."""
    left, right = layout.window
    found = set()
    for sequence, length in enumerate(layout.lengths):
        s = length * layout.world
        seen = visible_keys(s, s, right == 0, (left, right))
        found |= {((sequence, i), (sequence, j)) for i, j in seen.nonzero().tolist()}
    return found


@pytest.mark.parametrize("gathered", [False, True], ids=["ring", "gathered"])
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_each_visible_pair_is_computed_once(world, order, gathered):
    for lengths, window in itertools.product([(4,), (2, 0, 6)], WINDOWS):
        layout = Layout(lengths, order, world, window)
        counts = {}
        everything = [(i, p) for i, n in enumerate(lengths) for p in range(n * world)]
        for rank in range(world):
            queries = positions(layout, rank)
            if gathered:
                count(layout.gathered(rank), queries, everything, counts)
                continue
            count(layout.own(rank), queries, queries, counts)
            for other in set(range(world)) - {rank}:
                keys = positions(layout, other)
                for i, x in enumerate(layout.segments(other)):
                    if not layout.needs(rank, other, i):  # it was not sent
                        keys[x.rows] = [None] * x.length
                count(layout.foreign(rank, other), queries, keys, counts)
        assert set(counts) == visible(layout), (lengths, window)
        assert set(counts.values()) == {1}, (lengths, window)


@pytest.mark.parametrize("world", [2, 4, 7])
def test_zigzag_order_gives_every_rank_the_same_work(world):
    layout = Layout((8,), "zigzag", world, (-1, 0))
    work = []
    for rank in range(world):
        counts = {}
        queries = positions(layout, rank)
        everything = [(0, p) for p in range(8 * world)]
        count(layout.gathered(rank), queries, everything, counts)
        work.append(len(counts))
    assert len(set(work)) == 1


def test_a_causal_ring_makes_few_calls():
    layout = Layout((64,), "zigzag", 4, (-1, 0))
    assert len(layout.own(1)) == 1
    assert layout.own(1)[0].causal
    # Both chunks of rank 1 see all of the first chunk of rank 0, and nothing of the second one.
    (piece,) = layout.foreign(1, 0)
    assert piece.full
    assert (piece.rows, piece.keys) == (slice(0, 64), slice(0, 32))
    assert not layout.needs(1, 0, 1)
    # The second chunk of rank 1 sees both chunks of rank 2, its first chunk sees neither.
    (piece,) = layout.foreign(1, 2)
    assert piece.full
    assert (piece.rows, piece.keys) == (slice(32, 64), slice(0, 64))


def test_packed_sequences_are_computed_as_each_alone():
    lengths = 8, 0, 2, 14
    for world, window in itertools.product((2, 3, 5), WINDOWS):
        packed = Layout(lengths, "zigzag", world, window)
        for rank, other in itertools.permutations(range(world), 2):
            expected = []
            for i, length in enumerate(lengths):
                first = sum(lengths[:i])
                for x in Layout((length,), "zigzag", world, window).foreign(rank, other):
                    rows, keys = (slice(y.start + first, y.stop + first) for y in (x.rows, x.keys))
                    expected.append(x._replace(rows=rows, keys=keys))
            assert packed.foreign(rank, other) == tuple(expected)


def test_a_window_needs_neighbours_only():
    layout = Layout((64,), "contiguous", 8, (64, 0))
    needed = {other for other in range(8) if layout.needs(5, other, 0)}
    assert needed == {4, 5}
    packed = Layout((64, 2), "contiguous", 8, (64, 0))
    assert {other for other in range(8) if packed.needs(5, other, 0)} == {4, 5}
    assert {other for other in range(8) if packed.needs(5, other, 1)} == set(range(6))


def test_split_and_merge_are_inverse_and_agree_with_the_positions():
    x = torch.arange(2 * 24 * 3).view(2, 24, 3)
    parts = [zigzag_split(x, rank, 3) for rank in range(3)]
    assert torch.equal(zigzag_merge(parts), x)
    for rank, part in enumerate(parts):
        assert torch.equal(part, x[:, zigzag_positions(24, rank, 3)])
    assert parts[0][0, :, 0].tolist() == [3 * i for i in (0, 1, 2, 3, 20, 21, 22, 23)]


def test_packed_sequences_are_split_one_by_one():
    x = torch.arange(16)
    cu_seqlens = torch.tensor([0, 4, 4, 16])
    parts = [zigzag_split(x, rank, 2, dim=0, cu_seqlens=cu_seqlens) for rank in range(2)]
    assert parts[0].tolist() == [0, 3, 4, 5, 6, 13, 14, 15]
    assert parts[1].tolist() == [1, 2, 7, 8, 9, 10, 11, 12]
    assert torch.equal(zigzag_merge(parts, dim=0, cu_seqlens=cu_seqlens.tolist()), x)
    layout = Layout((2, 0, 6), "zigzag", 2, (-1, 0))
    for rank, part in enumerate(parts):
        found = [p + (0, 4, 4)[i] for i, p in positions(layout, rank)]
        assert part.tolist() == found


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zigzag_split(torch.zeros(1, 6), 0, 2), "multiple of 2 \\* world_size = 4, got 6"),
        (lambda: zigzag_split(torch.zeros(1, 8), 2, 2), "got rank=2 and world_size=2"),
        (lambda: zigzag_positions(10, 0, 4), "multiple of 2 \\* world_size = 8, got 10"),
        (
            lambda: zigzag_split(torch.zeros(8), 0, 2, dim=0, cu_seqlens=[0, 4]),
            "number of tokens, 8, got cu_seqlens=\\[0, 4\\]",
        ),
        (lambda: zigzag_merge([torch.zeros(1, 2), torch.zeros(1, 4)]), "parts of one shape"),
    ],
)
def test_what_cannot_be_split_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


X = torch.zeros(1, 8)
WRONG_KINDS = [
    (lambda: zigzag_positions(8.0, 0, 2), "seqlen to be an int, got seqlen=8.0"),
    (lambda: zigzag_positions(8, 0, 2.0), "world_size to be an int, got world_size=2.0"),
    (lambda: zigzag_positions(8, None, 2), "rank to be an int, got rank=None"),
    (lambda: zigzag_positions("8", 0, 2), "seqlen to be an int, got seqlen='8'"),
    (lambda: zigzag_split(X, False, 2), "rank to be an int, got rank=False"),
    (lambda: zigzag_split([1, 2], 0, 2), "x to be a torch.Tensor, got x of type list"),
    (lambda: zigzag_split(X.to_sparse(), 0, 2), "got x as a tensor of layout torch.sparse_coo"),
    (lambda: zigzag_split(X, 0, 2, dim=1.0), "dim to be an int, got dim=1.0"),
    (
        lambda: zigzag_split(X, 0, 2, cu_seqlens=8),
        "cu_seqlens to be .*, got cu_seqlens of type int",
    ),
    (
        lambda: zigzag_split(X, 0, 2, cu_seqlens=[0, 8.0]),
        r"cu_seqlens\[1\] to be an int, got .*8.0",
    ),
    (lambda: zigzag_split(X, 0, 2, cu_seqlens=[0, None]), r"got cu_seqlens\[1\]=None"),
    (lambda: zigzag_split(X, 0, 2, cu_seqlens=torch.tensor(8)), "got cu_seqlens of type Tensor"),
    (lambda: zigzag_split(X, 0, 2, cu_seqlens=torch.tensor([0.0, 8.0])), r"cu_seqlens\[0\]=0.0"),
    (lambda: zigzag_split(X, 0, 2, cu_seqlens=torch.tensor([[0, 8]])), r"cu_seqlens\[0\]=\[0, 8"),
    (lambda: zigzag_merge(None), "parts to be a sequence of tensors, got parts of type NoneType"),
    (lambda: zigzag_merge("ab"), r"parts\[0\] to be a torch.Tensor, got parts\[0\] of type str"),
    (lambda: zigzag_merge([X, X.half()]), "parts of one dtype, got .*torch.float16"),
]


@pytest.mark.parametrize(("call", "message"), WRONG_KINDS, ids=range(len(WRONG_KINDS)))
def test_what_is_of_another_kind_is_named(call, message):
    with pytest.raises(TypeError, match=f"^zigzag_\\w+: expected .*{message}.*; .+"):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zigzag_positions(-8, 0, 2), "0 <= seqlen .*, got seqlen=-8"),
        (lambda: zigzag_positions(2**70, 0, 2), "seqlen < 2\\*\\*63, got seqlen=118"),
        (lambda: zigzag_positions(8, -1, 2), "got rank=-1 and world_size=2"),
        (lambda: zigzag_positions(8, 0, 0), "got rank=0 and world_size=0"),
        (lambda: zigzag_split(X, 0, 2, dim=2), "dim of x, from -2 to 1, got dim=2"),
        (lambda: zigzag_split(torch.tensor(1.0), 0, 2), "dimension, got x.shape=\\(\\)"),
        (lambda: zigzag_merge([X, X], dim=-3), "from -2 to 1, got dim=-3"),
        (lambda: zigzag_split(X, 0, 2, cu_seqlens=[0, -4, 8]), r"cu_seqlens\[1\] .*=-4"),
    ],
)
def test_numbers_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=f"^zigzag_\\w+: expected .*{message}.*; .+"):
        call()


def test_numpy_numbers_count_as_pythons():
    np = pytest.importorskip("numpy")
    found = zigzag_positions(np.int64(8), np.int32(0), np.int64(2))
    assert found.dtype == torch.int64 and found.tolist() == [0, 1, 6, 7]
    assert zigzag_split(X, 0, 2, cu_seqlens=np.array([0, 8])).shape == (1, 4)
