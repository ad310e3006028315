"""The reference over a KV cache against lists of tokens: append to these, then attend densely."""

from __future__ import annotations

import math

import pytest
import torch
from test_rotary import turned

from flashcute.reference import attention_ref
from flashcute.reference_kvcache import attention_kvcache_ref

F64 = torch.float64
B, H, H_K, D, PAGE = 4, 4, 2, 6, 3
LENGTHS = (0, 7, 3, 5)
TABLE = torch.tensor([[2, 9, 99, 4], [11, 3, 0, 8], [7, 5, -1, 2**31 - 1], [1, 10, 6, -7]]).int()


def random(*shape: int, seed: int = 0, dtype=F64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=F64, generator=generator).to(dtype)


def make(paged: bool, seqlen_q: int = 2, n_new: int = 2, dtype=F64) -> dict[str, object]:
    """Returns arguments with NaN in unused slots of the cache."""
    shape = (12, PAGE) if paged else (B, 11)
    given = {
        "q": random(B, seqlen_q, H, D, seed=1, dtype=dtype),
        "k_cache": torch.full((*shape, H_K, D), math.nan, dtype=dtype),
        "v_cache": torch.full((*shape, H_K, D), math.nan, dtype=dtype),
        "cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32),
    }
    if paged:
        given["block_table"] = TABLE
    for i, n in enumerate(LENGTHS):
        for token in range(n):
            for name in ("k_cache", "v_cache"):
                seed = 100 * i + token + 1000 * (name == "v_cache")
                given[name][place(paged, i, token)] = random(H_K, D, seed=seed, dtype=dtype)
    if n_new:
        given["k"], given["v"] = (random(B, n_new, H_K, D, seed=s, dtype=dtype) for s in (2, 3))
    return given


def place(paged: bool, i: int, token: int) -> tuple[int, int]:
    return (int(TABLE[i, token // PAGE]), token % PAGE) if paged else (i, token)


def expected(paged: bool, given: dict, i: int, skip: int = 0, **options):
    """Returns out and lse of one sequence, its keys and its values, from lists of tokens."""
    n, k, v = LENGTHS[i], given.get("k"), given.get("v")
    caches = given["k_cache"], given["v_cache"]
    keys, values = ([cache[place(paged, i, t)] for t in range(n)] for cache in caches)
    q = given["q"][i]
    if k is not None:
        keys += k[i].unbind()
        values += v[i].unbind()
    if "rotary_cos" in given:
        tables = given["rotary_cos"], given["rotary_sin"], given.get("rotary_interleaved", True)
        keys[n:] = [turned(x, n + j, *tables) for j, x in enumerate(keys[n:])]
        step = options.get("causal", False) or options.get("window_size", (-1, -1)) != (-1, -1)
        q = torch.stack([turned(x, n + step * j, *tables) for j, x in enumerate(q)])
    empty = q.new_empty(0, H_K, D)
    keys, values = (torch.stack(x) if x else empty for x in (keys, values))
    out = attention_ref(q[None], keys[None, skip:], values[None, skip:], **options)
    return out.out[0], out.lse[0], keys, values


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 0)},
    "right": {"window_size": (-1, 1)},
    "softcap": {"softcap": 2.0, "softmax_scale": 0.7},
    "sinks": {"sinks": torch.linspace(-1, 1, H, dtype=F64), "causal": True},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 0.5, H, dtype=F64)},
}


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize(
    ("n_new", "rotary"), [(0, None), (1, None), (3, "halves"), (2, "interleaved")]
)
@pytest.mark.parametrize("name", OPTIONS)
def test_is_attention_to_a_list_of_tokens(paged, n_new, rotary, name) -> None:
    given = make(paged, n_new=n_new)
    if rotary:
        given["rotary_cos"], given["rotary_sin"] = random(12, 2, seed=5), random(12, 2, seed=6)
        given["rotary_interleaved"] = rotary == "interleaved"
    before = [given[n].clone() for n in ("k_cache", "v_cache")]
    got = attention_kvcache_ref(**given, **OPTIONS[name])
    for i, n in enumerate(LENGTHS):
        out, lse, keys, values = expected(paged, given, i, **OPTIONS[name])
        torch.testing.assert_close(got.out[i], out, atol=1e-13, rtol=1e-13)
        torch.testing.assert_close(got.lse[i], lse, atol=1e-13, rtol=1e-13)
        for cache, tokens in ((got.k_cache, keys), (got.v_cache, values)):
            stored = [cache[place(paged, i, t)] for t in range(n + n_new)]
            if stored:
                torch.testing.assert_close(torch.stack(stored), tokens, atol=1e-14, rtol=1e-14)
    # The rest of the returned cache is unchanged, and the given cache is not written to.
    kept = [got.k_cache.clone(), got.v_cache.clone()]
    for i, n in enumerate(LENGTHS):
        for cache, old in zip(kept, before, strict=True):
            for token in range(n, n + n_new):
                cache[place(paged, i, token)] = old[place(paged, i, token)]
    for cache, old, now in zip(kept, before, (given["k_cache"], given["v_cache"]), strict=True):
        assert torch.equal(cache.nan_to_num(7.0), old.nan_to_num(7.0))
        assert torch.equal(now.nan_to_num(7.0), old.nan_to_num(7.0))


def test_entries_and_padding() -> None:
    given = make(False)
    order = torch.tensor([2, 0, 3, 1]).int()
    padding = torch.tensor([0, 3, 3, 5]).int()
    moved = {
        **given,
        "q": given["q"][order],
        "k": given["k"][order],
        "v": given["v"][order],
        "cache_seqlens": given["cache_seqlens"][order],
        "cache_batch_idx": order,
        "cache_leftpad": padding[order],
    }
    got = attention_kvcache_ref(**moved, causal=True)
    for at, i in enumerate(order.tolist()):
        out, lse, *_ = expected(False, given, i, skip=int(padding[i]), causal=True)
        torch.testing.assert_close(got.out[at], out, atol=1e-13, rtol=1e-13)
        torch.testing.assert_close(got.lse[at], lse, atol=1e-13, rtol=1e-13)


def test_lengths_default_to_all_of_the_cache_and_an_int_is_for_all() -> None:
    k_cache, v_cache, q = random(5, 9, H_K, D), random(5, 9, H_K, D, seed=1), random(B, 2, H, D)
    whole = attention_kvcache_ref(q, k_cache, v_cache)
    dense = attention_ref(q, k_cache[:B], v_cache[:B])
    torch.testing.assert_close(whole.out, dense.out, atol=1e-13, rtol=1e-13)
    assert whole.k_cache is k_cache
    for n in (0, 6):
        got = attention_kvcache_ref(q, k_cache, v_cache, cache_seqlens=n)
        dense = attention_ref(q, k_cache[:B, :n], v_cache[:B, :n])
        torch.testing.assert_close(got.out, dense.out, atol=1e-13, rtol=1e-13)
    none = attention_kvcache_ref(q[:0], k_cache, v_cache)
    assert (none.out.shape, none.lse.shape) == ((0, 2, H, D), (0, H, 2))


def test_computes_in_the_dtype_asked_for() -> None:
    given = make(True, dtype=torch.bfloat16)
    given |= {n: random(12, 2, seed=5, dtype=torch.bfloat16) for n in ("rotary_cos", "rotary_sin")}
    exact = attention_kvcache_ref(**given, upcast=F64, causal=True)
    wide = {n: x.double() if x.is_floating_point() else x for n, x in given.items()}
    doubles = attention_kvcache_ref(**wide, causal=True)
    assert torch.equal(exact.out, doubles.out)
    assert torch.equal(exact.k_cache.nan_to_num(), doubles.k_cache.nan_to_num())
    low = attention_kvcache_ref(**given, causal=True)
    assert low.out.dtype == low.k_cache.dtype == torch.bfloat16 and low.lse.dtype == torch.float32
    assert torch.equal(low.k_cache.nan_to_num(), exact.k_cache.bfloat16().nan_to_num())
    torch.testing.assert_close(low.out.double(), exact.out, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_gradients(paged: bool) -> None:
    given = make(paged)
    given = {n: x.nan_to_num(0.5) if x.is_floating_point() else x for n, x in given.items()}
    given |= {"rotary_cos": random(12, 2, seed=5), "rotary_sin": random(12, 2, seed=6)}
    names = [n for n, x in given.items() if x.is_floating_point()]
    leaves = [given[n].requires_grad_() for n in names]

    def call(*tensors):
        result = attention_kvcache_ref(
            **given | dict(zip(names, tensors, strict=True)), causal=True
        )
        return result.out, result.k_cache, result.v_cache

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
