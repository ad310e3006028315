"""What only the sm90 class has: persistent CTAs, counters that deal out tiles, and another class to
switch to."""

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
    """Returns lengths such that each configuration in use is chosen for at least one of them."""
    left = set(heuristics.sm90_configs(dtype, head_dim, causal))
    lengths = []
    for seqlen in (1111, 4173, 9000, *range(100, 600, 7)):
        b, h = _sizes(seqlen)
        problem = heuristics.FwdProblem(dtype, causal, b, seqlen - 13, seqlen, h, h // 3, head_dim)
        config = heuristics.choose_fwd(problem, (9, 0))
        if config in left:
            left.remove(config)
            lengths.append(seqlen)
    assert not left, "a configuration that none of these lengths takes"
    return lengths


def _sizes(seqlen: int) -> tuple[int, int]:
    return (3, 21) if seqlen < 2000 else (1, 9)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_many_tiles_a_cta(head_dim, dtype, causal, poisoned_outputs, count_cases) -> None:
    """Every CTA computes several tiles of several heads, and the last wave is not full."""
    for seqlen in _lengths(dtype, head_dim, causal):
        b, h = _sizes(seqlen)
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
    """FLASHCUTE_ARCH switches the class for shapes that are new, here by another batch size."""
    for d in (64, 96, 128):  # the classes' key blocks differ, and with them the order of sums
        q, k, v = _qkv(3, 700, 700, 8, 4, d)
        newer = _attend(q, k, v, causal)
        monkeypatch.setenv("FLASHCUTE_ARCH", "80")
        older = _attend(q[:2], k[:2], v[:2], causal)
        monkeypatch.delenv("FLASHCUTE_ARCH")
        torch.testing.assert_close(newer[0][:2], older[0], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(newer[1][:2], older[1], atol=1e-4, rtol=1e-4)
        assert not torch.equal(newer[1][:2], older[1])


def test_more_captured_launches_than_counters() -> None:
    """Once all counters are in use, tiles are dealt out by their number, and results stay right."""
    q, k, v = _qkv(2, 600, 600, 32, 32, 32)
    expected = _attend(q, k, v)
    graph = torch.cuda.CUDAGraph()
    kept = {}
    with torch.cuda.graph(graph):
        for i in range(4200):
            outputs = _attend(q, k, v)
            if i < 4 or i % 700 == 0 or 3838 <= i <= 3841 or i > 4197:
                kept[i] = outputs
    for _ in range(2):
        for outputs in kept.values():
            for output in outputs:
                output.fill_(torch.nan)
        graph.replay()
        wrong = {i: _differs(outputs, expected).item() for i, outputs in kept.items()}
        assert not any(wrong.values()), wrong
    assert _differs(_attend(q, k, v), expected).item() == 0
