"""flash_attn_with_kvcache, and flash_attn_varlen_func with a block_table, of CPU tensors."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

import flashcute
from flashcute import flash_attn_interface, flash_attn_varlen_func, flash_attn_with_kvcache
from flashcute.reference_kvcache import attention_kvcache_ref
from flashcute.rotary import apply_rotary_emb

H, H_K, D = 4, 2, 16
LENGTHS = (0, 5, 17, 1, 12)
B, CAPACITY = len(LENGTHS), 24
GARBAGE = (-1, 2**31 - 1, -(2**31), 10**6)

OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "softmax_scale": 0.3},
    "window": {"window_size": (4, 1)},
    "left": {"window_size": (3, -1), "causal": True},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 2, H), "causal": True},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 0.4, H)},
    "alibi_b": {"alibi_slopes": torch.rand(B, H, generator=torch.Generator().manual_seed(1))},
    "all": {
        "causal": True,
        "window_size": (6, -1),
        "softcap": 3.0,
        "sinks": torch.linspace(-1, 2, H),
        "alibi_slopes": torch.linspace(0.1, 0.4, H),
        "num_splits": 3,
    },
}
each_option = pytest.mark.parametrize("name", OPTIONS)
# Every page size with all options, and every option with pages of 3, which end within sequences.
each_page_size = pytest.mark.parametrize(
    ("name", "page_size"),
    [*(("all", n) for n in (1, 2, 8, 24, 32)), *((name, 3) for name in OPTIONS)],
)


def random(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def make(n_new: int = 0, seqlen_q: int = 2, dtype=torch.float32) -> dict[str, object]:
    """Returns arguments with a cache of one entry a sequence, with NaN in unused slots."""
    given = {"q": random(B, seqlen_q, H, D, seed=1, dtype=dtype)}
    for name, seed in (("k_cache", 2), ("v_cache", 3)):
        cache = random(B, CAPACITY, H_K, D, seed=seed, dtype=dtype)
        for i, n in enumerate(LENGTHS):
            cache[i, n:] = math.nan
        given[name] = cache
    given["cache_seqlens"] = torch.tensor(LENGTHS, dtype=torch.int32)
    if n_new:
        given["k"], given["v"] = (
            random(B, n_new, H_K, D, seed=seed, dtype=dtype) for seed in (4, 5)
        )
    return given


def in_pages(given: dict, page_size: int, seed: int = 0) -> dict[str, object]:
    """Returns arguments with the cache in pages of random order, and garbage in unused slots."""
    generator = torch.Generator().manual_seed(seed)
    n_new = given["k"].shape[1] if "k" in given else 0
    width = -(-CAPACITY // page_size) + 1
    order = torch.randperm(B * width + 3, generator=generator)
    table = torch.tensor(GARBAGE)[torch.arange(B * width) % 4].view(B, width).int()
    paged = dict(given)
    for name in ("k_cache", "v_cache"):
        paged[name] = torch.full((len(order), page_size, H_K, D), math.nan, dtype=given[name].dtype)
    for i, n in enumerate(given["cache_seqlens"].tolist()):
        for j in range(-(-(n + n_new) // page_size)):
            page = int(order[i * width + j])
            table[i, j] = page
            rows = slice(j * page_size, min((j + 1) * page_size, CAPACITY))
            for name in ("k_cache", "v_cache"):
                part = given[name][i, rows]
                paged[name][page, : len(part)] = part
    return {**paged, "block_table": table}


def call(given: dict, **options) -> tuple[torch.Tensor, torch.Tensor]:
    return flash_attn_with_kvcache(**given, **options, return_softmax_lse=True)


def copied(given: dict) -> dict[str, object]:
    return given | {name: given[name].clone() for name in ("k_cache", "v_cache")}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether tensors are equal, with NaN in the same places."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@each_option
@pytest.mark.parametrize("n_new", [0, 1, 3])
def test_is_the_reference(name: str, n_new: int) -> None:
    given = make(n_new)
    options = {n: x for n, x in OPTIONS[name].items() if n != "num_splits"}
    exact = attention_kvcache_ref(**given, **options)
    out, lse = call(given, **OPTIONS[name])
    torch.testing.assert_close(out, exact.out, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse, exact.lse, atol=2e-6, rtol=2e-6)
    assert same(given["k_cache"], exact.k_cache) and same(given["v_cache"], exact.v_cache)
    assert out.isfinite().all() and out.is_contiguous() and lse.dtype == torch.float32


@each_page_size
def test_pages_are_contiguous_bit_for_bit(name: str, page_size: int) -> None:
    for n_new in (0, 3):
        given = make(n_new)
        paged = in_pages(given, page_size)
        expected = call(given, **OPTIONS[name])
        assert all(map(torch.equal, call(paged, **OPTIONS[name]), expected))
        for cache in ("k_cache", "v_cache"):
            for i, n in enumerate(LENGTHS):
                for token in range(n + n_new):
                    page = paged["block_table"][i, token // page_size]
                    assert torch.equal(
                        paged[cache][page, token % page_size], given[cache][i, token]
                    )
            n_nan = paged[cache].isnan().sum() // (H_K * D)
            slots = paged[cache].shape[0] * page_size
            assert slots - n_nan == sum(LENGTHS) + n_new * B  # and nothing else was written


@each_option
@pytest.mark.parametrize("page_size", [None, 4])
def test_appending_is_concatenating_bit_for_bit(name: str, page_size: int | None) -> None:
    given = make(4, seqlen_q=3)
    dense = copied(given)
    if page_size:
        given = in_pages(given, page_size)
    got = call(given, **OPTIONS[name])
    options = dict(OPTIONS[name]) | {"causal": OPTIONS[name].get("causal", False)}
    options.pop("num_splits", None)
    slopes = options.pop("alibi_slopes", None)
    for i, n in enumerate(LENGTHS):
        keys, values = (
            torch.cat((dense[cache][i : i + 1, :n], dense[x][i : i + 1]), 1)
            for cache, x in (("k_cache", "k"), ("v_cache", "v"))
        )
        if slopes is not None:
            options["alibi_slopes"] = slopes[i] if slopes.dim() == 2 else slopes
        q = dense["q"][i : i + 1]
        out, lse, _ = flashcute.flash_attn_func(q, keys, values, return_attn_probs=True, **options)
        assert torch.equal(got[0][i : i + 1], out) and torch.equal(got[1][i : i + 1], lse)


def test_tokens_one_by_one_are_all_tokens_at_once() -> None:
    # As in decoding, each call appends where the call before ended, across page boundaries.
    k, v, q = (random(B, 7, heads, D, seed=7) for heads in (H_K, H_K, H))
    for page_size in (None, 1, 2, 3):
        given = make()
        given["cache_seqlens"] = torch.tensor([0, 5, 17, 1, 11]).int()
        at_once = copied(given) | {"q": q, "k": k, "v": v}
        given["k"] = given["v"] = k[:, :0]
        if page_size:
            room = at_once if page_size is None else in_pages(at_once, page_size)
            given |= {n: room[n].clone() for n in ("k_cache", "v_cache", "block_table")}
        cos, sin = random(80, 3, seed=8), random(80, 3, seed=9)
        given |= {"rotary_cos": cos, "rotary_sin": sin, "causal": True}
        at_once |= {"rotary_cos": cos, "rotary_sin": sin, "causal": True}
        expected = flash_attn_with_kvcache(**at_once)
        outs = []
        for step in range(7):
            new = {n: x[:, step : step + 1] for n, x in (("q", q), ("k", k), ("v", v))}
            outs.append(flash_attn_with_kvcache(**given | new))
            given["cache_seqlens"] = given["cache_seqlens"] + 1
        torch.testing.assert_close(torch.cat(outs, 1), expected, atol=1e-6, rtol=1e-6)
        if not page_size:
            assert same(given["k_cache"], at_once["k_cache"])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary_dim", [2, 6, 16])
@pytest.mark.parametrize("name", ["plain", "causal", "window", "left"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotates_queries_and_new_keys(interleaved, rotary_dim, name, dtype) -> None:
    given = make(3, seqlen_q=3, dtype=dtype)
    cos, sin = (random(30, rotary_dim // 2, seed=s, dtype=dtype) for s in (8, 9))
    rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    plain = copied(given)
    offsets = given["cache_seqlens"]
    plain["k"] = apply_rotary_emb(given["k"], cos, sin, interleaved, seqlen_offsets=offsets)
    q = given["q"]
    if name == "plain":  # all queries of a sequence have the same position
        rows = q.transpose(1, 2).reshape(B, 1, 3 * H, D)
        rows = apply_rotary_emb(rows, cos, sin, interleaved, seqlen_offsets=offsets)
        plain["q"] = rows.view(B, H, 3, D).transpose(1, 2).contiguous()
    else:
        plain["q"] = apply_rotary_emb(q, cos, sin, interleaved, seqlen_offsets=offsets)
    before = q.clone(), given["k"].clone()
    got = call(given, **rotary, **OPTIONS[name])
    assert all(map(torch.equal, got, call(plain, **OPTIONS[name])))
    assert same(given["k_cache"], plain["k_cache"]) and same(given["v_cache"], plain["v_cache"])
    assert torch.equal(q, before[0]) and torch.equal(given["k"], before[1])


def test_interleaved_is_the_default() -> None:
    tables = {"rotary_cos": random(24, 4, seed=8), "rotary_sin": random(24, 4, seed=9)}
    one, other = make(1), make(1)
    expected = call(one, **tables, rotary_interleaved=True)
    assert all(map(torch.equal, call(other, **tables), expected))
    assert not torch.equal(call(make(1), **tables, rotary_interleaved=False)[0], expected[0])


@each_option
def test_sequences_do_not_depend_on_each_other(name: str) -> None:
    given = make(2)
    paged = in_pages(given, 4)
    order = torch.tensor([3, 0, 4, 1, 2])
    options = dict(OPTIONS[name])
    expected = call(copied(paged), **options)
    if name == "alibi_b":
        options["alibi_slopes"] = options["alibi_slopes"][order]
    names = ("q", "k", "v", "cache_seqlens", "block_table")
    out, lse = call(paged | {n: paged[n][order] for n in names}, **options)
    assert torch.equal(out, expected[0][order]) and torch.equal(lse, expected[1][order])


def test_pages_shared_between_sequences() -> None:
    # Sequences share the pages of a common prefix. Further pages, which are appended to, are their
    # own.
    given = make(2)
    prefix_k, prefix_v = random(8, H_K, D, seed=11), random(8, H_K, D, seed=12)
    for name, prefix in (("k_cache", prefix_k), ("v_cache", prefix_v)):
        given[name] = torch.full_like(given[name], math.nan)
        given[name][:, :8] = prefix
    given["cache_seqlens"] = torch.full((B,), 8, dtype=torch.int32)
    paged = in_pages(given, 4)
    paged["block_table"][:, :2] = paged["block_table"][0, :2]
    assert all(map(torch.equal, call(paged, causal=True), call(given, causal=True)))
    # A sequence may also have the same page twice.
    paged = in_pages(make(), 4) | {"cache_seqlens": torch.full((B,), 8, dtype=torch.int32)}
    paged["k_cache"], paged["v_cache"] = (
        paged["k_cache"].nan_to_num(),
        random(*paged["v_cache"].shape),
    )
    paged["block_table"][:] = 1
    out, _ = call(paged)
    once, _ = call(paged | {"cache_seqlens": torch.full((B,), 4, dtype=torch.int32)})
    torch.testing.assert_close(out, once)


LAYOUTS = {
    "heads_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "pages_last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "dims_apart": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "with_gaps": lambda x: torch.cat((x, x), 2)[:, :, :H_K],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [None, 4])
def test_any_strides_of_the_cache(layout: str, page_size: int | None) -> None:
    given = make(3)
    if page_size:
        given = in_pages(given, page_size)
    strided = given | {n: LAYOUTS[layout](given[n]) for n in ("k_cache", "v_cache")}
    strided["q"], strided["k"] = (LAYOUTS["heads_first"](given[n]) for n in ("q", "k"))
    expected = call(given, causal=True)
    got = call(strided, causal=True)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    for name in ("k_cache", "v_cache"):
        assert same(strided[name], given[name]), name


def test_keys_and_values_interleaved_in_one_tensor() -> None:
    given = in_pages(make(3), 4)
    expected = call(copied(given), causal=True)
    kv = torch.stack((given["k_cache"], given["v_cache"]), 1)  # (pages, 2, page_size, h_k, d)
    got = call(given | {"k_cache": kv[:, 0], "v_cache": kv[:, 1]}, causal=True)
    assert all(map(torch.equal, got, expected))


def test_entries_of_the_cache() -> None:
    given = make(2)
    expected = call(copied(given), causal=True)
    entries = torch.tensor([6, 0, 3, 5, 1]).int()
    moved = dict(given)
    for name in ("k_cache", "v_cache"):
        moved[name] = torch.full((8, CAPACITY, H_K, D), math.nan)
        moved[name][entries] = given[name]
    got = call(moved, cache_batch_idx=entries, causal=True)
    assert all(map(torch.equal, got, expected))
    call(given, causal=True)
    for name in ("k_cache", "v_cache"):
        assert same(moved[name][entries], given[name])
        assert moved[name][[2, 4, 7]].isnan().all()
    # Without cache_batch_idx a cache with more entries than sequences uses its first ones.
    more = {n: moved[n][[*entries.tolist(), 2, 4, 7]] for n in ("k_cache", "v_cache")}
    assert same(call(copied(make(2)) | more, causal=True)[0], expected[0])
    # Two sequences may read one entry.
    twice = torch.tensor([6, 6, 3, 3, 1]).int()
    reading = {n: moved[n] for n in ("k_cache", "v_cache", "cache_seqlens")}
    reading |= {"q": given["q"], "cache_seqlens": torch.tensor([2, 2, 9, 9, 5]).int()}
    out, _ = call(reading, cache_batch_idx=twice)
    alone, _ = call(reading | {"q": given["q"].roll(1, 0)}, cache_batch_idx=twice)
    assert torch.equal(out[0], alone[1]) and torch.equal(out[2], alone[3])


@each_option
def test_padding_on_the_left_is_not_there(name: str) -> None:
    padding = (0, 2, 17, 1, 5)
    given = make(2)
    for cache in ("k_cache", "v_cache"):
        for i, n in enumerate(padding):
            given[cache][i, :n] = math.nan
    got = call(copied(given), cache_leftpad=torch.tensor(padding).int(), **OPTIONS[name])
    moved = make(2)
    moved["cache_seqlens"] = moved["cache_seqlens"] - torch.tensor(padding).int()
    for cache in ("k_cache", "v_cache"):
        for i, n in enumerate(padding):
            moved[cache][i] = given[cache][i].roll(-n, 0)
    assert all(map(torch.equal, got, call(moved, **OPTIONS[name])))


def test_padding_counts_in_rotary_positions() -> None:
    given, tables = make(1), {"rotary_cos": random(24, 4), "rotary_sin": random(24, 4, seed=1)}
    padded = copied(given)
    call(given, **tables)
    call(padded, **tables, cache_leftpad=torch.tensor([0, 3, 4, 1, 2]).int())
    assert same(given["k_cache"], padded["k_cache"])


def test_lengths_as_an_int_or_none() -> None:
    given = {n: x.nan_to_num() for n, x in make(2).items()}
    for n in (0, 9, CAPACITY - 2):
        lengths = torch.full((B,), n, dtype=torch.int32)
        expected = call(copied(given) | {"cache_seqlens": lengths})
        assert all(map(torch.equal, call(copied(given) | {"cache_seqlens": n}), expected))
    reading = {n: given[n] for n in ("q", "k_cache", "v_cache")}
    whole = call(reading, cache_seqlens=CAPACITY)
    assert all(map(torch.equal, call(reading), whole))
    # The cache has as many pages as the table, which are more than the sequences.
    pages = torch.arange(2 * B).view(B, 2).int()
    paged = {n: given[n].view(2 * B, CAPACITY // 2, H_K, D) for n in ("k_cache", "v_cache")}
    paged |= {"q": given["q"], "block_table": pages}
    assert all(map(torch.equal, call(paged), whole))
    assert all(map(torch.equal, call(paged, cache_seqlens=CAPACITY), whole))


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("d", [1, 8, 20, 72])
def test_heads_and_head_dims(heads, d: int) -> None:
    h, h_k = heads
    given = {
        "q": random(2, 1, h, d),
        "k_cache": random(2, 6, h_k, d, seed=1),
        "v_cache": random(2, 6, h_k, d, seed=2),
        "k": random(2, 1, h_k, d, seed=3),
        "v": random(2, 1, h_k, d, seed=4),
        "cache_seqlens": torch.tensor([5, 2]).int(),
    }
    exact = attention_kvcache_ref(**given)
    out, lse = call(given)
    torch.testing.assert_close(out, exact.out, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse, exact.lse, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    given = make(2, dtype=dtype)
    exact = attention_kvcache_ref(**given, upcast=torch.float64, causal=True)
    out, lse = call(given, causal=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    error = torch.finfo(dtype).eps * 4
    torch.testing.assert_close(out.double(), exact.out, atol=error, rtol=error)
    assert same(given["k_cache"].double(), exact.k_cache)


def test_nothing_to_see_or_to_compute() -> None:
    given = make() | {"cache_seqlens": torch.zeros(B, dtype=torch.int32)}
    out, lse = call(given)
    assert not out.any() and (lse == -math.inf).all()
    sinks = torch.linspace(-1, 1, H)
    out, lse = call(given, sinks=sinks)
    assert not out.any() and torch.equal(lse, sinks[None, :, None].expand(B, H, 2))
    empty = given | {"q": given["q"][:, :0], "k": random(B, 2, H_K, D), "v": random(B, 2, H_K, D)}
    assert call(empty)[0].shape == (B, 0, H, D)
    assert not given["k_cache"][:, :2].isnan().any()  # appended all the same
    none = {n: x[:0] for n, x in make(2).items()} | {"k_cache": given["k_cache"][:1]}
    none["v_cache"] = none["k_cache"]
    assert call(none)[0].shape == (0, 2, H, D)
    table = torch.zeros(B, 0, dtype=torch.int32)
    assert (call(given | {"block_table": table})[1] == -math.inf).all()
    no_pages = {n: random(0, 4, H_K, D) for n in ("k_cache", "v_cache")}
    assert not call(given | no_pages | {"block_table": table})[0].any()


def test_garbage_in_a_table_of_one_page() -> None:
    pages = random(3, CAPACITY, H_K, D)
    lengths = torch.tensor([0, 4, 0, 24, 0]).int()
    table = torch.tensor([[2**31 - 1], [2], [-(2**31)], [0], [3]]).int()
    given = {"q": random(B, 2, H, D, seed=1), "k_cache": pages, "v_cache": pages}
    out, lse = call(given, cache_seqlens=lengths, block_table=table)
    assert not out[::2].any() and (lse[::2] == -math.inf).all()
    wide = torch.cat((table, table), 1)
    assert torch.equal(call(given, cache_seqlens=lengths, block_table=wide)[0], out)
    packed = given["q"].flatten(0, 1), pages, pages, 2 * torch.arange(B + 1), None, 2, 24
    ragged = flash_attn_varlen_func(*packed, block_table=table, seqused_k=lengths)
    assert torch.equal(ragged.view(out.shape), out)


def test_gathered_pages_are_a_cache() -> None:
    """The error on CUDA advises to gather pages."""
    pages, table = random(6, 4, H_K, D), torch.tensor([[3, 1], [5, 0]]).int()
    lengths = torch.tensor([3, 7]).int()
    given = {"q": random(2, 2, H, D, seed=1), "cache_seqlens": lengths}
    expected = call(given | {"k_cache": pages, "v_cache": pages}, block_table=table)
    gathered = dict.fromkeys(("k_cache", "v_cache"), pages[table].flatten(1, 2))
    assert all(map(torch.equal, call(given | gathered), expected))


def test_numpy_scalars_count_as_pythons() -> None:
    given = {n: x.nan_to_num() for n, x in make(2).items()}
    expected = call(copied(given) | {"cache_seqlens": 7}, num_splits=2)
    got = call(copied(given) | {"cache_seqlens": np.int32(7)}, num_splits=np.int8(2))
    assert all(map(torch.equal, got, expected))
    with pytest.raises(ValueError, match="got cache_seqlens=127 with 2 tokens to append"):
        call(given | {"cache_seqlens": np.int8(127)})


def test_nothing_is_written_where_an_argument_is_wrong() -> None:
    given = make(3)
    given["cache_seqlens"][2] = CAPACITY - 2  # the only sequence without room
    before = copied(given)
    with pytest.raises(ValueError, match=r"got cache_seqlens\[2\]=22 with 3 tokens to append"):
        call(given)
    assert same(given["k_cache"], before["k_cache"]) and same(given["v_cache"], before["v_cache"])


def test_splits_change_nothing() -> None:
    expected = call(make(), causal=True)
    for n in (1, 2, 128):
        assert all(map(torch.equal, call(make(), causal=True, num_splits=n), expected))


def test_default_device_and_autocast_change_nothing() -> None:
    tables = {"rotary_cos": random(28, 4), "rotary_sin": random(28, 4, seed=1), "causal": True}
    for page_size in (None, 4):
        given = make(2) if page_size is None else in_pages(make(2), page_size)
        given["cache_seqlens"] = 5 if page_size is None else given["cache_seqlens"]
        given |= {n: given[n].nan_to_num() for n in ("k_cache", "v_cache")}
        expected = call(copied(given), **tables)
        with torch.device("meta"):
            assert all(map(torch.equal, call(copied(given), **tables), expected))
        with torch.autocast("cpu", torch.bfloat16):
            assert all(map(torch.equal, call(copied(given), **tables), expected))


# --- flash_attn_varlen_func with a block_table ---

LENGTHS_Q = (3, 0, 4, 1, 9)


def ragged(page_size: int, dtype=torch.float32) -> tuple[dict, dict]:
    """Returns the arguments of the same call with packed keys and with keys in pages."""
    given = make(dtype=dtype)
    paged = in_pages(given, page_size)
    cu = [torch.tensor([0, *n]).cumsum(0).int() for n in (LENGTHS_Q, LENGTHS)]
    packed = {
        "q": random(sum(LENGTHS_Q) + 2, H, D, seed=6, dtype=dtype),
        "cu_seqlens_q": cu[0],
        "cu_seqlens_k": cu[1],
        "max_seqlen_q": 9,
        "max_seqlen_k": 17,
        "return_attn_probs": True,
    }
    used = torch.arange(CAPACITY) < given["cache_seqlens"][:, None]
    pages = packed | {"k": paged["k_cache"], "v": paged["v_cache"]}
    pages["block_table"] = paged["block_table"]
    return packed | {"k": given["k_cache"][used], "v": given["v_cache"][used]}, pages


@each_page_size
def test_ragged_queries_over_pages_bit_for_bit(name: str, page_size: int) -> None:
    options = {n: x for n, x in OPTIONS[name].items() if n != "num_splits"}
    packed, paged = ragged(page_size)
    expected = flash_attn_varlen_func(**packed, **options)
    assert all(map(torch.equal, flash_attn_varlen_func(**paged, **options), expected))
    seqused_k = torch.tensor(LENGTHS).int()
    nothing = torch.zeros_like(paged["cu_seqlens_k"])
    for cu_seqlens_k in (None, nothing, nothing - 7):  # seqused_k replaces it
        given = paged | {"cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
        assert all(map(torch.equal, flash_attn_varlen_func(**given, **options), expected))


def test_ragged_queries_over_pages_with_fewer_used() -> None:
    packed, paged = ragged(4)
    used = {"seqused_q": torch.tensor([2, 0, 4, 0, 5]).int()}
    used["seqused_k"] = torch.tensor([0, 3, 16, 1, 2]).int()
    expected = flash_attn_varlen_func(**packed, **used, causal=True)
    assert all(map(torch.equal, flash_attn_varlen_func(**paged, **used, causal=True), expected))
    torch.manual_seed(3)
    expected = flash_attn_varlen_func(**packed, dropout_p=0.3)
    torch.manual_seed(3)
    assert all(map(torch.equal, flash_attn_varlen_func(**paged, dropout_p=0.3), expected))


def test_a_chunk_of_each_sequence_is_a_call_with_a_cache() -> None:
    given = in_pages(make(seqlen_q=3), 4)
    expected = call(given, causal=True)
    cu = 3 * torch.arange(B + 1).int()
    out, lse, _ = flash_attn_varlen_func(
        *(given["q"].flatten(0, 1), given["k_cache"], given["v_cache"], cu, None, 3, 17),
        block_table=given["block_table"],
        seqused_k=given["cache_seqlens"],
        causal=True,
        return_attn_probs=True,
    )
    assert torch.equal(out.view(B, 3, H, D), expected[0])
    assert torch.equal(lse.view(H, B, 3).transpose(0, 1), expected[1])


def test_gradients_reach_pages() -> None:
    packed, paged = ragged(4)
    grads = []
    for given in (packed, paged):
        leaves = [given[n].nan_to_num().requires_grad_() for n in ("q", "k", "v")]
        given |= dict(zip(("q", "k", "v"), leaves, strict=True))
        out = flash_attn_varlen_func(**given, causal=True)[0]
        grads.append(torch.autograd.grad(out.square().sum(), leaves))
    torch.testing.assert_close(grads[1][0], grads[0][0])
    starts = packed["cu_seqlens_k"].tolist()
    for dense, pages in zip(grads[0][1:], grads[1][1:], strict=True):
        for i, n in enumerate(LENGTHS):
            for token in range(n):
                page = paged["block_table"][i, token // 4]
                torch.testing.assert_close(pages[page, token % 4], dense[starts[i] + token])
        torch.testing.assert_close(pages.sum(), dense.sum())


def test_no_sequence_over_pages() -> None:
    q, pages = random(2, H, D), random(3, 4, H_K, D)
    cu, table = torch.zeros(1, dtype=torch.int32), torch.zeros(0, 2, dtype=torch.int32)
    out = flash_attn_varlen_func(q, pages, pages, cu, cu, 0, 0, block_table=table)
    assert torch.equal(out, torch.zeros_like(q))


# --- the interface ---


def test_signature_is_flash_attns() -> None:
    assert flash_attn_interface.flash_attn_with_kvcache is flash_attn_with_kvcache
    parameters = inspect.signature(flash_attn_with_kvcache).parameters.values()
    required = inspect.Parameter.empty
    assert [(p.name, p.default) for p in parameters] == [
        *((name, required) for name in ("q", "k_cache", "v_cache")),
        *((name, None) for name in ("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens")),
        *((name, None) for name in ("cache_batch_idx", "cache_leftpad", "block_table")),
        ("softmax_scale", None),
        ("causal", False),
        ("window_size", (-1, -1)),
        ("softcap", 0.0),
        ("rotary_interleaved", True),
        ("alibi_slopes", None),
        ("num_splits", 0),
        ("return_softmax_lse", False),
        ("sinks", None),
    ]
    assert [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY] == ["sinks"]


def test_unknown_names_get_pythons_own_words() -> None:
    with pytest.raises(AttributeError, match=r"^module 'flashcute' has no attribute 'x'$"):
        flashcute.x  # noqa: B018
    script = "from flashcute import flash_attn_with_kvcache, nothing"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "cannot import name 'nothing' from 'flashcute'" in run.stderr
