"""The number of parts into which a backward divides the query heads of a key head.

The model's own code is called on the CPU.
"""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import pytest
from test_tile_scheduler import compiled
from test_tile_scheduler_bwd import problem, scheduler

CASES = Path(__file__).parent / "head_parts_cases.cpp"
SMS = 132


@pytest.fixture(scope="module")
def parts():
    of_model = compiled(CASES, "")

    def call(
        mask, b, h, h_k, seqlen_q, seqlen_k=None, window=(0, 0), sms=SMS, sm90=True, **changed
    ):
        params = problem(b, h, h_k, seqlen_q, seqlen_k)
        params.window_left, params.window_right = window
        params.total_q, params.total_k = b * params.seqlen_q, b * params.seqlen_k
        for name, value in changed.items():
            setattr(params, name, value)
        kind = ("none", "causal", "local").index(mask)
        may_share = mask == "none" and sm90 and not params.deterministic
        shared = scheduler().most_steps(ctypes.byref(params), sms, False) if may_share else 0
        return [
            of_model.parts(ctypes.byref(params), kind, ragged, sms, sm90, ctypes.c_int64(steps))
            for ragged, steps in ((False, shared), (True, 0))
        ]

    return call


def both(n):
    return [n, n]


def test_few_tiles_are_divided(parts):
    """The numbers of parts are those that an H100 was fastest with: docs/tried_sm90.md."""
    assert parts("causal", 1, 8, 1, 4096) == both(8)
    assert parts("causal", 1, 8, 1, 8192) == both(4)
    assert parts("causal", 2, 32, 2, 4096) == both(2)
    assert parts("causal", 1, 28, 4, 4096) == both(7)
    assert parts("local", 1, 8, 1, 8192, window=(4095, 0)) == both(8)
    assert parts("causal", 2, 32, 2, 4096, deterministic=1) == both(8)
    assert parts("causal", 1, 32, 8, 4096, sm90=False) == both(4)


def test_heads_are_not_divided_where_sharing_tiles_is_as_good(parts):
    for sizes in ((1, 8, 1, 8192), (1, 28, 4, 3000), (1, 16, 4, 2048)):
        assert parts("none", *sizes)[0] == 1 < parts("none", *sizes)[1]
        assert parts("none", *sizes, dk_ptr=None)[0] > 1, "without sums none are shared"
    assert parts("none", 1, 8, 1, 1024) == both(8), "by four workers at most"
    assert parts("none", 1, 32, 2, 256, 2048) == both(4), "of few visits"
    assert parts("none", 1, 7, 1, 384, 77) == both(7)
    assert parts("none", 1, 1, 1, 4096, 77) == both(1)


def test_enough_tiles_are_not(parts):
    for mask in ("none", "causal", "local"):
        for h_k in (4, 16):
            assert parts(mask, 4, 16, h_k, 4096, window=(1023, 0)) == both(1)
    assert parts("causal", 1, 32, 8, 4096) == both(1), "two tiles for an SM"
    assert parts("causal", 1, 64, 8, 8192) == both(1)


def test_one_long_sequence_among_short_ones_is_divided(parts):
    """The longest sequence of a ragged batch counts. Too large a bound costs only more sums."""
    assert parts("causal", 140, 8, 1, 256) == both(1)
    tokens = 8192 + 139 * 256
    assert parts("causal", 140, 8, 1, 8192, total_q=tokens, total_k=tokens)[1] > 1


@pytest.mark.parametrize("seed", range(10))
def test_parts_divide_the_heads_and_bound_the_workspace(parts, seed):
    rng = random.Random(seed)
    divided = 0
    for _ in range(200):
        h_k, ratio = rng.choice((1, 2, 3, 8)), rng.choice((1, 2, 3, 4, 6, 7, 8, 16))
        b, seqlen_q, seqlen_k = rng.randint(1, 8), *(rng.randint(0, 20_000) for _ in range(2))
        mask, sms = rng.choice(("none", "causal", "local")), rng.choice((1, 66, 132, 264))
        window = rng.randint(0, 3000), rng.randint(0, 300)
        found = parts(mask, b, h_k * ratio, h_k, seqlen_q, seqlen_k, window, sms)
        for n in found:
            tiles = b * h_k * n * -(-seqlen_k // 128)
            assert ratio % n == 0 and (n == 1 or tiles <= 8 * sms)
            divided += n > 1
    assert divided > 20


def test_tiles_that_keep_their_order_are_not_shared(parts):
    """Without sharing tiles, a second wave of 12 tiles takes as long as the first one."""
    assert parts("none", 1, 32, 4, 4500)[0] == 1
    assert parts("none", 1, 32, 4, 4500, deterministic=1, sm90=False)[0] > 1


def test_without_keys_there_is_nothing_to_divide(parts):
    for mask in ("none", "causal", "local"):
        assert parts(mask, 1, 8, 1, 4096, 0) == both(1)


def test_as_many_key_heads_are_never_divided(parts):
    for mask in ("none", "causal", "local"):
        assert parts(mask, 1, 8, 8, 128) == both(1)
