"""The length of the parts into which a plan splits key blocks; its own code runs on the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import random
from pathlib import Path

import pytest
from test_tile_scheduler import compiled

from flashcute import heuristics
from flashcute.jit.abi import FlashFwdParams

CASES = Path(__file__).parent / "plan_segments_cases.cpp"
SMS = 132
MERGED_BY_CTAS = 16  # kMostRowsMerged of flash.h


@pytest.fixture(scope="module")
def part_blocks():
    other = dataclasses.replace(heuristics.sm90_configs("bf16", 128, True)[1], mask="none")
    assert (other.tile_m, other.tile_n) == (128, 128)
    few_rows = dataclasses.replace(other, tile_m=64, tile_n=64, warps=4, ping_pong=False)
    slow = dataclasses.replace(other, tile_n=64)
    configs = {
        "kMergedByCtas": few_rows,
        "kMergedByCtasOfPages": dataclasses.replace(few_rows, paged=True),
        "kOfWindows": dataclasses.replace(few_rows, mask="local"),
        "kSlow": slow,
        "kSlowOfPages": dataclasses.replace(slow, paged=True),
        "kOther": other,
    }
    lines = (f"constexpr flash::FwdConfig {name}{c.to_cpp()};\n" for name, c in configs.items())
    lib = compiled(CASES, "".join(lines))

    def call(b, blocks, h_k, rows, kind="kSlow", blocks_of_all=None, **changed):
        """Returns how many key blocks a part has.

        The batch has b sequences of ``blocks`` key blocks; with ``blocks_of_all`` these are the
        most of a sequence, and all together. ``rows``, a power of two, are those of all query heads
        of a key head.
        """
        params = FlashFwdParams(
            b=b,
            h=rows * h_k,
            h_k=h_k,
            h_h_k_ratio=rows,
            seqlen_q=1,
            total_q=b,
            pack_shift=rows.bit_length() - 1,
            num_splits=256,
            split_blocks=1,
            split_ctas=SMS,
        )
        for name, value in changed.items():
            setattr(params, name, value)
        size = ctypes.c_int64(blocks_of_all or b * blocks * -(-rows // 128))
        return lib.part_blocks(ctypes.byref(params), list(configs).index(kind), size, blocks)

    return call


def test_parts_that_a_kernel_merges_are_as_long_as_an_h100_was_fastest_with(part_blocks):
    """One key head has 128 query heads, and blocks have 64 keys: docs/tried_sm90.md."""
    found = {
        (b, blocks): part_blocks(b, blocks, 1, 128)
        for b, blocks in ((1, 32), (1, 128), (4, 64), (2, 128), (1, 512), (8, 64))
    }
    assert found == {(1, 32): 2, (1, 128): 4, (4, 64): 6, (2, 128): 6, (1, 512): 8, (8, 64): 8}
    assert part_blocks(2, 512, 1, 128) == 11, "8 would keep the CTAs busy"
    assert [part_blocks(b, n, 1, 128, "kSlowOfPages") for b, n in found] == list(found.values())


def test_parts_of_few_rows_are_longer_where_a_cta_would_have_many_to_merge(part_blocks):
    """Heads 32/8, 32/4, 16/2 and 8/1 with d = 128, around the lengths that an H100 was fastest
    with: docs/tried_sm90.md."""
    expected = {
        **{(1, 32, 8, 4): 3, (1, 128, 8, 4): 8, (4, 64, 8, 4): 16},
        **{(1, 128, 4, 8): 8, (1, 256, 4, 8): 8, (1, 128, 2, 8): 8},
        **{(1, 512, 2, 8): 16, (1, 128, 1, 8): 8},
    }
    found = {case: part_blocks(*case, "kMergedByCtas") for case in expected}
    assert found == expected
    few = 1, 128, 1, 8
    assert part_blocks(1, 128, 1, 32, "kMergedByCtas") == 1, "a kernel merges so many rows"
    for kind in ("kMergedByCtasOfPages", "kOfWindows", "kOther"):
        assert part_blocks(*few, kind) == 1
    mixed = {"blocks_of_all": 768, "kind": "kMergedByCtas"}
    assert part_blocks(128, 512, 1, 8, **mixed) == 16
    assert part_blocks(129, 512, 1, 8, **mixed) == 6, "a kernel merges so many tiles"


def test_parts_keep_the_ctas_busy(part_blocks):
    """This holds for parts of few rows, which CTAs merge, and for parts of long caches."""
    assert part_blocks(1, 64, 8, 4) == 4, "16 parts of each of 8 heads"
    assert part_blocks(16, 128, 1, 128) == 16
    assert part_blocks(1, 2048, 1, 128) == 16
    assert part_blocks(64, 64, 1, 128) == 64, "half of the CTAs read as fast"
    assert part_blocks(1, 64, 8, 4, split_blocks=6) == 6


def test_only_parts_of_one_tile_a_head_and_of_kernels_that_were_timed_are_longer(part_blocks):
    assert part_blocks(1, 128, 1, 128) == 4
    assert part_blocks(1, 128, 1, 128, kind="kOther") == 1
    assert part_blocks(2, 128, 1, 128, total_q=1) == 2, "lengths differ"
    assert part_blocks(1, 128, 1, 256) == 2, "two tiles a head"
    assert part_blocks(1, 128, 1, 128, num_splits=64, split_ctas=0) == 1, "as asked for"


@pytest.mark.parametrize("seed", range(5))
def test_parts_are_longer_than_keeps_the_ctas_busy_only_where_that_takes_less_time(
    part_blocks, seed
):
    """The time is what one CTA reads and what is merged of all parts, in units of a block."""
    rng = random.Random(seed)
    longer = 0
    for _ in range(300):
        b, h_k, blocks = rng.choice((1, 2, 5, 32)), rng.choice((1, 2, 8)), rng.randint(1, 600)
        rows = rng.choice((1, 4, 16, 32, 64, 128))
        found = part_blocks(b, blocks, h_k, rows)
        busy = part_blocks(b, blocks, h_k, 1)
        if rows <= MERGED_BY_CTAS:
            assert found == busy >= 1
        elif found not in (busy, blocks):
            longer += 1
            took, before, after, instead = (
                n + rows / 1024 * b * h_k * blocks / n for n in (found, found - 1, found + 1, busy)
            )
            assert found > busy and took < instead
            assert took <= 1.01 * min(before, after)
    assert longer > 10
