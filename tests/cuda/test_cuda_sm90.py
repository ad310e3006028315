"""What only the sm90 class has: CTAs that stay, counters of dealt tiles, classes side by side."""

from __future__ import annotations

import pytest
import torch

import flashcute
from flashcute import heuristics, testing
from flashcute.config import DTYPES, HEAD_DIMS

_TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an H100 or H200")


def _qkv(b, seqlen_q, seqlen_k, h, h_k, d, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = ((b, seqlen_q, h, d), (b, seqlen_k, h_k, d), (b, seqlen_k, h_k, d))
    return [torch.randn(s, generator=generator, device="cuda", dtype=dtype) for s in shapes]


def _attend(q, k, v, causal=True):
    with torch.no_grad():
        return flashcute.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)[:2]


def _differs(got, expected) -> torch.Tensor:
    return sum((g != e).any() for g, e in zip(got, expected, strict=True))


def _lengths(dtype: str, head_dim: int, causal: bool) -> list[int]:
    """One length for every configuration in use: where it gives way to the next, or beyond."""
    limits = [limit for _, limit in heuristics.sm90_configs(dtype, head_dim, causal)]
    return [min(limit, 1111) if i == 0 else limits[i - 1] + 77 for i, limit in enumerate(limits)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_many_tiles_a_cta(head_dim, dtype, causal, poisoned_outputs, count_cases) -> None:
    """Every CTA walks through several tiles of several heads; the last wave is not full."""
    for seqlen in _lengths(dtype, head_dim, causal):
        b, h = (3, 21) if seqlen < 2000 else (1, 9)
        q, k, v = _qkv(b, seqlen - 13, seqlen, h, h // 3, head_dim, _TORCH[dtype])
        out, lse = _attend(q, k, v, causal)
        for batch in range(b):  # float64 scores of all heads at once would not fit
            one = slice(batch, batch + 1)
            heads = slice(0, 3) if seqlen > 4096 else slice(None)
            kv = slice(0, 1) if seqlen > 4096 else slice(None)
            testing.check_forward(
                out[one, :, heads],
                lse[one, heads],
                q[one, :, heads],
                k[one, :, kv],
                v[one, :, kv],
                causal=causal,
            )
        count_cases("sm90 many tiles", 1)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_classes_agree(causal, monkeypatch) -> None:
    """FLASHCUTE_ARCH switches the class; another batch size makes the shape new."""
    for d in (64, 96, 128):  # whose key blocks differ, and with them the order of sums
        q, k, v = _qkv(3, 700, 700, 8, 4, d)
        newer = _attend(q, k, v, causal)
        monkeypatch.setenv("FLASHCUTE_ARCH", "80")
        older = _attend(q[:2], k[:2], v[:2], causal)
        monkeypatch.delenv("FLASHCUTE_ARCH")
        torch.testing.assert_close(newer[0][:2], older[0], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(newer[1][:2], older[1], atol=1e-4, rtol=1e-4)
        assert not torch.equal(newer[1][:2], older[1])


def test_1000_repeats_are_bitwise_equal_under_memory_pressure() -> None:
    """Counters reset themselves; no copy is read before it has landed, whatever runs beside."""
    big = torch.empty(64 * 2**20, device="cuda")
    side = torch.cuda.Stream()
    differences = torch.zeros((), device="cuda", dtype=torch.int64)
    for d, causal, dtype in (
        (64, True, torch.bfloat16),
        (96, True, torch.float16),
        (128, True, torch.bfloat16),
        (128, False, torch.float16),
        (256, True, torch.bfloat16),
    ):
        q, k, v = _qkv(8, 500, 613, 8, 4, d, dtype)
        expected = _attend(q, k, v, causal)
        for repeat in range(1000):
            with torch.cuda.stream(side):
                big.add_(1)
            filler = torch.empty(1 + repeat * 4097, device="cuda").fill_(torch.nan)
            got = _attend(q, k, v, causal)
            del filler
            differences += _differs(got, expected)
    assert differences.item() == 0


def test_streams_beside_each_other() -> None:
    """Each stream has a counter of its own; graphs have theirs, replayed beside eager calls."""
    q, k, v = _qkv(4, 900, 900, 16, 16, 64)
    expected = _attend(q, k, v)
    differences = torch.zeros((), device="cuda", dtype=torch.int64)
    capture_stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capture_stream):
        captured = _attend(q, k, v)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        with torch.cuda.stream(streams[0]):
            graph.replay()
        for stream in (capture_stream, *streams[1:]):
            with torch.cuda.stream(stream):
                results.append(_attend(q, k, v))
        torch.cuda.synchronize()
        differences += _differs(captured, expected)
        for result in results:
            differences += _differs(result, expected)
        results.clear()
        for output in captured:
            output.fill_(torch.nan)
    assert differences.item() == 0


def test_more_captured_launches_than_counters() -> None:
    """Once all counters are given away, tiles are dealt out by their number: still right."""
    q, k, v = _qkv(2, 600, 600, 32, 32, 32)
    expected = _attend(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4200):
            last = _attend(q, k, v)
    for _ in range(2):
        for output in last:
            output.fill_(torch.nan)
        graph.replay()
        assert _differs(last, expected).item() == 0
    assert _differs(_attend(q, k, v), expected).item() == 0


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("d", [40, 64, 96, 128, 256])
def test_what_lies_beyond_the_tensors_never_leaks(d, poison, causal) -> None:
    """TMA fills with zeros outside the tensor: rows after the end, heads and columns beside it."""
    b, seqlen, h = 3, 133, 5
    views, clean = [], []
    for values in _qkv(b, seqlen, seqlen, h, h, d):
        whole = torch.full((b + 1, seqlen + 200, h + 2, d + 8), poison, device="cuda").bfloat16()
        view = whole[:b, 100 : 100 + seqlen, 1 : 1 + h, :d]
        view.copy_(values)
        views.append(view)
        clean.append(values)
    got = _attend(*views, causal)
    assert _differs(got, _attend(*clean, causal)).item() == 0
