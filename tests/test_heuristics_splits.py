"""The number of parts into which a tile's keys are split."""

import pytest

from flashcute.heuristics import MAX_SPLITS, num_splits, splits_of_lengths_unknown


def test_full_rounds_are_not_split():
    for tiles in (264, 528, 2640):
        assert num_splits(tiles, 128, 264) == 1


def test_few_blocks_are_not_split():
    """The merge costs more than the blocks."""
    assert [num_splits(8, blocks, 264) for blocks in (0, 1, 2)] == [1, 1, 1]


def test_one_sequence_fills_the_gpu():
    """8 heads of 8192 keys: nearly all CTAs have a part."""
    assert 264 * 0.7 <= 8 * num_splits(8, 128, 264) <= 264


@pytest.mark.parametrize("tiles", [7, 8, 100, 132, 200, 263, 265, 300, 400])
def test_no_other_number_takes_half_the_time(tiles):
    """Rounds times key blocks, without any overhead."""
    blocks, ctas = 512, 264

    def rounds_times_blocks(parts):
        return -(-tiles * parts // ctas) * -(-blocks // parts)

    parts = num_splits(tiles, blocks, ctas)
    best = min(map(rounds_times_blocks, range(1, MAX_SPLITS + 1)))
    assert rounds_times_blocks(parts) < 1.35 * best


def test_at_most_as_many_as_the_workspace_and_the_blocks_allow():
    assert num_splits(1, 100_000, 264) <= MAX_SPLITS
    assert num_splits(1, 5, 264) <= 5
    assert splits_of_lengths_unknown(10**6, 264)[0] == MAX_SPLITS
    for blocks in (0, 1, 3):
        assert splits_of_lengths_unknown(blocks, 264)[0] == 1
