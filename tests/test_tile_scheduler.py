"""Which CTA computes which tile, and when, by the scheduler's own code, called on the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import random
from fractions import Fraction
from pathlib import Path

import pytest

from flashcute import heuristics
from flashcute.jit import build, sources, toolchain
from flashcute.jit.abi import FlashFwdParams

CAUSAL = heuristics.sm90_configs("bf16", 128, True)[1]
CASES = Path(__file__).parent / "tile_scheduler_cases.cpp"


class WorkTile(ctypes.Structure):
    """The mirror of ``flash::WorkTile``."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in (
            *("m_block", "head", "batch", "head_q", "head_k", "row_q", "row_k"),
            *("seqlen_q", "seqlen_k", "batch_k"),
            *("blocks_count", "blocks_unmasked", "blocks_begin", "blocks_left"),
            *("partial_row", "part", "parts"),
        )
    ]


def compiled(cases: Path, configs: str) -> ctypes.CDLL:
    """Compiles a file of cases behind the text of its configurations; returns its functions."""
    cuda = toolchain.find_cuda_headers()
    unit = build.Unit(
        name=cases.stem,
        target="host",
        source=f'#include "flash.h"\n{configs}{cases.read_text()}',
        suffix=".cpp",
        flags=("-std=c++20", "-O1", "-w", "-fPIC", "-shared"),
        project_dirs=(sources.kernel_include_dir(),),
        external_dirs=(sources.cutlass_include_dir(), cuda.include, cuda.cccl),
        external=(f"CUTLASS {sources.cutlass_version()}", f"CUDA {cuda.version}"),
    )
    found = ctypes.CDLL(build.build(unit, toolchain.find_host_compiler()).artefact.path)
    found.num_tiles.restype = ctypes.c_int64
    return found


@pytest.fixture(scope="module")
def lib():
    plain = dataclasses.replace(CAUSAL, mask="none")
    configs = "".join(
        f"static constexpr flash::FwdConfig {name}{config.to_cpp()};\n"
        for name, config in (("kPlain", plain), ("kCausal", CAUSAL))
    )
    found = compiled(CASES, configs)
    found.tile.restype = found.tile_in_group.restype = WorkTile
    found.tile.argtypes = (ctypes.c_void_p, ctypes.c_bool, ctypes.c_int)
    return found


def problem(b, h, h_k, seqlen_q, seqlen_k=1024, d=128, *, packed=False):
    ratio = h // h_k
    return FlashFwdParams(
        b=b,
        h=h,
        h_k=h_k,
        h_h_k_ratio=ratio,
        pack_shift=(ratio - 1).bit_length() if packed else 0,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        d=d,
    )


def m_blocks(params):
    return -(-(params.seqlen_q << params.pack_shift) // CAUSAL.tile_m)


def grid_heads(params):
    return params.h_k if params.pack_shift else params.h


def every_tile(params):
    sizes = m_blocks(params), grid_heads(params), params.b
    return set(itertools.product(*map(range, sizes)))


def places(params, answer):
    """Returns (m_block, head, batch) of every index, in order."""
    count = params.b * grid_heads(params) * m_blocks(params)
    return [(t.m_block, t.head, t.batch) for t in map(answer, range(count))]


def batch_head(params, place):
    return place[2] * grid_heads(params) + place[1]


# One tile, one head, grouped heads, one key head, odd sizes, and packed heads.
PROBLEMS = [
    problem(1, 1, 1, 1),
    problem(1, 1, 1, 9 * CAUSAL.tile_m),
    problem(2, 8, 2, 3 * CAUSAL.tile_m - 1),
    problem(3, 4, 1, 2 * CAUSAL.tile_m + 1),
    problem(3, 7, 7, 5 * CAUSAL.tile_m),
    problem(3, 10, 2, CAUSAL.tile_m // 8 + 1, packed=True),
]
each_problem = pytest.mark.parametrize(
    "params", PROBLEMS, ids=lambda p: f"b{p.b}_h{p.h}_hk{p.h_k}_sq{p.seqlen_q}_pack{p.pack_shift}"
)


@each_problem
def test_every_tile_once(lib, params):
    assert lib.num_tiles(ctypes.byref(params)) == len(every_tile(params))
    for causal in (False, True):
        found = places(params, lambda i, c=causal: lib.tile(ctypes.byref(params), c, i))
        assert len(found) == len(set(found)) and set(found) == every_tile(params)
        heads = [batch_head(params, place) for place in found]
        assert heads == sorted(heads), "tiles of one head are neighbours"
        for _, tiles in itertools.groupby(found, key=lambda place: place[1:]):
            rows = [m for m, _, _ in tiles]
            assert rows == sorted(rows, reverse=causal)


@each_problem
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, "all but one", "all"])
def test_every_tile_once_in_groups(lib, params, group):
    heads = params.b * grid_heads(params)
    group = {"all": heads, "all but one": max(heads - 1, 1)}.get(group, group)
    group = min(group, heads)  # the last group is smaller where it does not divide the heads
    found = places(params, lambda i: lib.tile_in_group(ctypes.byref(params), group, i))
    assert len(found) == len(set(found)) and set(found) == every_tile(params)
    groups = [batch_head(params, place) // group for place in found]
    assert groups == sorted(groups), "one group after the other"
    for _, tiles in itertools.groupby(found, key=lambda place: batch_head(params, place) // group):
        rows = [m for m, _, _ in tiles]
        assert rows == sorted(rows, reverse=True), "longest first"


@pytest.mark.parametrize("causal", [False, True], ids=("full", "causal"))
@pytest.mark.parametrize("lengths", [(1, 5), (300, 300), (129, 700), (700, 129), (64, 0), (40, 1)])
@pytest.mark.parametrize("heads", [(4, 4, False), (6, 2, False), (8, 2, True), (10, 2, True)])
def test_a_tile_visits_every_key_that_a_row_sees(lib, causal, lengths, heads):
    """The expected visibility is computed from positions, not from tiles."""
    h, h_k, packed = heads
    params = problem(2, h, h_k, *lengths, packed=packed)
    ratio, (seqlen_q, seqlen_k) = h // h_k, lengths
    for index in range(lib.num_tiles(ctypes.byref(params))):
        tile = lib.tile(ctypes.byref(params), causal, index)
        assert (tile.seqlen_q, tile.seqlen_k) == lengths
        assert tile.head_k == tile.head_q // ratio
        assert tile.head_q == (tile.head * ratio if packed else tile.head)
        rows = range(tile.m_block * CAUSAL.tile_m, (tile.m_block + 1) * CAUSAL.tile_m)
        positions = {row >> params.pack_shift for row in rows}
        seen = [
            min(max(p + 1 + seqlen_k - seqlen_q, 0), seqlen_k) if causal else seqlen_k
            for p in positions
            if p < seqlen_q
        ]
        assert tile.blocks_count == -(-max(seen) // CAUSAL.tile_n)
        assert tile.blocks_unmasked == min(seen) // CAUSAL.tile_n


def test_indices_near_the_largest_grid(lib):
    """There are at most 2^31 - 1 tiles, and no intermediate product may exceed 32 bits."""
    params = problem(1 << 16, 1 << 5, 1, 1023 * CAUSAL.tile_m)
    tiles = lib.num_tiles(ctypes.byref(params))
    assert 2**31 - 2**22 < tiles < 2**31
    heads = params.b * params.h
    for group in (1, 5, lib.heads_in_group(ctypes.byref(params), 132), heads - 1, heads):
        for index in (0, 1, tiles // 3, tiles // 2, tiles - 2, tiles - 1):
            first = index // (group * 1023) * group
            within = index - first * 1023
            m, head = divmod(within, min(group, heads - first))
            found = lib.tile_in_group(ctypes.byref(params), group, index)
            expected = (1022 - m, *reversed(divmod(first + head, params.h)))
            assert (found.m_block, found.head, found.batch) == expected


@pytest.mark.parametrize("seqlen_k", [0, 1, 512, 4096, 65536, 2**31 - 1024])
@pytest.mark.parametrize(
    "heads", [(1, 1, 1), (4, 32, 8), (8, 32, 8), (2, 7, 1), (16, 16, 16), (9, 21, 21)]
)
@pytest.mark.parametrize("d", [8, 128, 256])
def test_groups_fit_the_cache_and_fill_the_last_wave(lib, seqlen_k, heads, d):
    b, h, h_k = heads
    params = problem(b, h, h_k, 1024, seqlen_k, d)
    group = lib.heads_in_group(ctypes.byref(params), 132)
    assert 1 <= group <= b * h
    # A group has whole key heads, so that no key head is read for two groups.
    ratio = h // h_k
    assert group % ratio == 0
    size = 2 * 2 * seqlen_k * d  # K and V of one head
    l2 = 32 * 2**20
    assert group // ratio * size <= l2 or group == ratio
    # A group has as many key heads as three waves of tiles take, if L2 holds them. If these are not
    # all heads, a group may be smaller, down to half, to make the last group as full as possible.
    tiles = ratio * -(-params.seqlen_q // CAUSAL.tile_m)  # of one key head
    most = max(1, min(l2 // max(size, 1), -(-3 * 132 // tiles)))
    keys = group // ratio
    if b * h_k <= most:
        assert keys == b * h_k
        return
    assert most / 2 < keys <= most
    fullest = max(Fraction((b * h_k - 1) % n + 1, n) for n in range(most // 2 + 1, most + 1))
    assert Fraction((b * h_k - 1) % keys + 1, keys) == fullest


@pytest.mark.parametrize("ctas", [1, 2, 7, 132])
@pytest.mark.parametrize("tiles", [1, 2, 131, 132, 133, 1000])
def test_every_tile_is_taken_once_in_any_order(lib, tiles, ctas):
    """This holds in one launch after the other on a counter that nothing clears between them."""
    ctas = min(ctas, tiles)
    counter = ctypes.c_uint(0)
    for seed in range(3):
        draw = random.Random(seed)
        at = {cta: cta for cta in range(ctas)}
        taken = []
        while at:
            cta = draw.choice(list(at))
            taken.append(at[cta])
            at[cta] = lib.next_tile(tiles, ctypes.byref(counter), ctas, at[cta])
            assert at[cta] > taken[-1], "a CTA goes forwards"
            if at[cta] >= tiles:
                del at[cta]
        assert sorted(taken) == list(range(tiles))
        assert counter.value == 0, "reset for the next launch"


@pytest.mark.parametrize("tiles", [1, 131, 132, 1000])
def test_every_tile_is_taken_once_without_a_counter(lib, tiles):
    ctas = min(132, tiles)
    taken = []
    for cta in range(ctas):
        tile = cta
        while tile < tiles:
            taken.append(tile)
            tile = lib.next_tile(tiles, None, ctas, tile)
    assert sorted(taken) == list(range(tiles))
