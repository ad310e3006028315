"""Every forward configuration in use on this GPU, launched directly, whatever shapes it is chosen
for."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from flashcute import jit, oracles, testing
from flashcute.config import HEAD_DIMS, FwdConfig
from flashcute.jit import abi
from flashcute.jit.launch import Call

_TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16}
POISONS = (math.nan, math.inf, -math.inf)


@pytest.fixture
def kernel(config) -> abi.FlashKernel:
    target = "".join(map(str, torch.cuda.get_device_capability()))
    return abi.FlashKernel.from_address(jit.get_kernel(config, target).address)


def _make_qkv(config: FwdConfig, *sizes: int, seed: int = 0):
    return oracles.make_qkv(oracles.Shape(*sizes), _TORCH[config.dtype], "cuda", seed)


def _many_tiles(config: FwdConfig):
    """Returns inputs of odd lengths with grouped heads and at least 180 tiles, which are more than
    an H100 or H200 has SMs."""
    return _make_qkv(config, 5, 501, 613, 12, 4, config.head_dim)


def _tiles_of_one_block(config: FwdConfig):
    """Returns inputs with 640 tiles of fewer keys than a block, in which the loader runs furthest
    ahead."""
    return _make_qkv(config, 80, 100, config.tile_n - 8, 8, 1, config.head_dim)


def _differs(got, expected) -> torch.Tensor:
    return sum((g != e).any() for g, e in zip(got, expected, strict=True))


def _surrounded(x: torch.Tensor, poison: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a copy of ``x``, (b, s, h, d), and the buffer of ``poison`` around it."""
    b, s, h, d = x.shape
    buffer = x.new_full((b + 1, s + 200, h + 2, d + 8), poison)
    return buffer[:b, 100 : 100 + s, 1 : 1 + h, :d].copy_(x), buffer


def _surrounded_lse(shape: tuple[int, ...], poison: float) -> tuple[torch.Tensor, torch.Tensor]:
    buffer = torch.full((math.prod(shape) + 128,), poison, device="cuda")
    return buffer[64:-64].fill_(math.nan).view(shape), buffer


def _edges(config: FwdConfig) -> list[tuple[int, int, int]]:
    """Returns (seqlen_q, seqlen_k, d) around the edges of tiles and of a warpgroup's rows; d is in
    turn the most and the fewest columns that the configuration is used for."""
    m, n = config.tile_m, config.tile_n
    seqlens_q = sorted({1, 63, 64, 65, m - 1, m, m + 1})
    seqlens_k = (0, 1, n - 1, n, n + 1, 2 * n - 1, 2 * n, 2 * n + 1, 3 * n)
    fewest = 8 + max((d for d in HEAD_DIMS if d < config.head_dim), default=0)
    pairs = itertools.product(seqlens_q, seqlens_k)
    return [(*pair, fewest if i % 2 else config.head_dim) for i, pair in enumerate(pairs)]


def test_tile_edges(config, kernel, poisoned_outputs, count_cases) -> None:
    """Results are right at every edge, no bit depends on what lies around the tensors, and nothing
    is written there.

    TMA fills with zeros only outside the tensor, not between its heads, rows and batch entries.
    """
    causal = config.mask == "causal"
    edges = _edges(config)
    for seed, (seqlen_q, seqlen_k, d) in enumerate(edges):
        where = f"seqlen_q={seqlen_q} seqlen_k={seqlen_k} d={d}"
        q, k, v = _make_qkv(config, 2, seqlen_q, seqlen_k, 4, 2, d, seed=seed)
        expected = Call(kernel, q, k, v)()
        report = testing.compare_forward(*expected, q, k, v, causal=causal)
        assert report.ok, f"{where}\n{report}"
        for poison in POISONS:
            inputs = [_surrounded(x, poison)[0] for x in (q, k, v)]
            out, around_out = _surrounded(torch.full_like(q, math.nan), poison)
            lse, around_lse = _surrounded_lse(expected[1].shape, poison)
            got = Call(kernel, *inputs, outputs=(out, lse))()
            assert not _differs(got, expected), f"{where}, {poison} around it"
            for written, around in ((out, around_out), (lse, around_lse)):
                written.fill_(poison)
                untouched = around.isnan() if math.isnan(poison) else around == poison
                assert untouched.all(), f"{where}: written where {poison} was"
    count_cases("tile edges", len(edges))


@pytest.mark.parametrize("make", [_many_tiles, _tiles_of_one_block])
def test_1000_repeats_are_bitwise_equal_under_memory_pressure(
    config, kernel, make, busy_memory, poisoned_outputs, count_cases
) -> None:
    """A race would show only now and then: the other stream's work varies the timing, and the
    filler tensors vary addresses."""
    q, k, v = make(config)
    expected = Call(kernel, q, k, v)()
    testing.check_forward(*expected, q, k, v, causal=config.mask == "causal")
    differences = torch.zeros((), device="cuda", dtype=torch.int64)
    for repeat in range(1000):
        busy_memory()
        filler = torch.empty(1 + repeat * 4097, device="cuda")
        differences += _differs(Call(kernel, q, k, v)(), expected)
        del filler
    assert differences.item() == 0
    count_cases("repeats", 1000)


def test_streams_and_a_graph_beside_each_other(config, kernel, poisoned_outputs) -> None:
    """Launches on different streams share no state, nor do launches of a graph and eager ones."""
    q, k, v = _many_tiles(config)
    expected = Call(kernel, q, k, v)()
    captured = Call(kernel, q, k, v)
    graph = torch.cuda.CUDAGraph()
    streams = [torch.cuda.Stream() for _ in range(4)]
    with torch.cuda.graph(graph, stream=streams[0]):
        captured()
    differences = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(50):
        captured.out.fill_(math.nan)
        captured.lse.fill_(math.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[1]):
            graph.replay()
        results = [(captured.out, captured.lse)]
        for stream in (streams[0], *streams[2:]):
            with torch.cuda.stream(stream):
                results.append(Call(kernel, q, k, v)())
        torch.cuda.synchronize()
        for result in results:
            differences += _differs(result, expected)
    assert differences.item() == 0
