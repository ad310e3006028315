"""Contenders over a KV cache give the same output on the same tensors, or say why they cannot."""

from __future__ import annotations

import dataclasses
import itertools
import types

import pytest
import torch

import flashcute
from flashcute import benchmarking as bm
from flashcute.bench import peers, serving_peers, sweep
from flashcute.bench.serving import APPENDS, Serving
from flashcute.bench.sweep import Variant

DECODE = Serving(2, 3, 256, 4, 2, 16, causal=True)
MIXED = Serving(3, 5, 256, 4, 2, 16, causal=True, decodes=2)
SHAPES = {
    **{f"decode, pages of {n}": dataclasses.replace(DECODE, page_size=n) for n in (0, 1, 16)},
    **{f"mixed, pages of {n}": dataclasses.replace(MIXED, page_size=n) for n in (0, 1, 16)},
    **{
        f"append {append}, pages of {n}": dataclasses.replace(DECODE, append=append, page_size=n)
        for append, n in itertools.product(APPENDS[1:], (0, 16))
    },
}
CPU = sweep.Options("cpu", ("flashcute", "torch"), 1, 0, flush_bytes=1 << 10, what="decode")


def make(shape, *names, dtype=torch.float32):
    return serving_peers.make(*bm.make_qkv(shape.tensors, dtype, "cpu"), shape, names)


def outputs(shape, *names):
    calls, missing = make(shape, *names)
    assert missing == {}
    return [calls[name]() for name in names]


@pytest.mark.parametrize("name", SHAPES)
def test_contenders_agree(name):
    ours, expected = outputs(SHAPES[name], "flashcute", "torch")
    sizes = [(1, 5, 4, 16), (2, 1, 4, 16)] if SHAPES[name].decodes else [(2, 3, 4, 16)]
    assert [tuple(x.shape) for x in expected] == sizes
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_pages_and_what_is_appended_change_the_output():
    found = {name: outputs(shape, "torch")[0][0] for name, shape in SHAPES.items()}
    decode = {name: x for name, x in found.items() if not name.startswith("mixed")}
    for (one, a), (other, b) in itertools.combinations(decode.items(), 2):
        assert (a - b).abs().max() > 0.01 * a.abs().max(), (one, other)


def test_a_call_again_gives_the_same():
    for name in ("append rotary, pages of 0", "append tokens, pages of 16"):
        calls, _ = make(SHAPES[name], "flashcute", "torch")
        first = [calls[x]() for x in ("flashcute", "torch", "flashcute", "torch")]
        assert all(torch.equal(a[0], b[0]) for a, b in zip(first[:2], first[2:], strict=True))


WRONG = {
    "a lost page": {"cache_seqlens": torch.full((2,), 240, dtype=torch.int32)},
    "no causal mask": {"causal": False},
    "pages in order": {"block_table": torch.arange(32, dtype=torch.int32).view(2, 16)},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_output_shows_in_the_row(monkeypatch, wrong):
    """Outputs over many keys are small, so differences are relative to the largest output."""
    shape = dataclasses.replace(DECODE, page_size=16)

    def attend(*tensors, **options):
        return flashcute.flash_attn_with_kvcache(*tensors, **options | WRONG[wrong])

    (right,) = sweep.measure([Variant("bf16", shape, model="x")], 0, CPU, [], {})
    assert right["difference"]["flashcute"] <= sweep.AGREEMENT["bf16"]
    monkeypatch.setattr(serving_peers, "flash_attn_with_kvcache", attend)
    (row,) = sweep.measure([Variant("bf16", shape, model="x")], 0, CPU, [], {})
    assert row["difference"]["flashcute"] > sweep.AGREEMENT["bf16"]


def test_num_splits_are_passed_on(monkeypatch):
    asked = []

    def noting(function):
        return lambda *x, **options: asked.append(options["num_splits"]) or function(*x, **options)

    for name in ("flash_attn_with_kvcache", "flash_attn_varlen_func"):
        monkeypatch.setattr(serving_peers, name, noting(getattr(flashcute, name)))
    for shape in (DECODE, MIXED):
        outputs(dataclasses.replace(shape, num_splits=3), "flashcute")
    assert set(asked) == {3} and len(asked) == 4


def fa3(with_lse=False, pages=True):
    """Returns a stand-in for FlashAttention-3's function, which takes packed queries, too."""

    def attend(q, k_cache, v_cache, page_table=None, cu_seqlens_q=None, max_seqlen_q=None, **more):
        if page_table is not None and not pages:
            raise RuntimeError("This flash attention build does not support paged KV.\nat x.cpp")
        if cu_seqlens_q is None:
            out = flashcute.flash_attn_with_kvcache(
                q, k_cache, v_cache, block_table=page_table, **more
            )
        else:
            if page_table is None:
                page_table = torch.arange(k_cache.shape[0], dtype=torch.int32)[:, None]
            out = flashcute.flash_attn_varlen_func(
                *(q, k_cache, v_cache, cu_seqlens_q, None, max_seqlen_q, 256),
                causal=more["causal"],
                block_table=page_table,
                seqused_k=more["cache_seqlens"],
            )
        return (out, None) if with_lse else out

    return types.SimpleNamespace(flash_attn_with_kvcache=attend)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("with_lse", [False, True])
def test_flash_attention_3_gets_the_cache(name, with_lse, monkeypatch):
    monkeypatch.setattr(peers, "fa3_module", lambda: fa3(with_lse))
    shape = SHAPES[name]
    names = ("fa3", serving_peers.RAGGED) if shape.decodes else ("fa3",)
    *found, expected = outputs(shape, *names, "torch")
    for out in found:
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_one_ragged_call_is_no_contender_on_other_shapes(monkeypatch):
    monkeypatch.setattr(peers, "fa3_module", fa3)
    assert make(DECODE, serving_peers.RAGGED) == ({}, {})


def test_a_build_without_pages_is_missing_with_its_reason(monkeypatch):
    monkeypatch.setattr(peers, "fa3_module", lambda: fa3(pages=False))
    for name, shape in SHAPES.items():
        calls, missing = make(shape, "fa3")
        assert set(calls) == (set() if shape.page_size else {"fa3"}), name
        assert set(missing.values()) <= {"This flash attention build does not support paged KV."}


@pytest.mark.parametrize("name", SHAPES)
def test_peers_without_a_cache_get_the_keys_in_use(name, monkeypatch):
    def maker(q, k, v, causal):
        assert not (causal and q.shape[1] == 1)  # top-left alignment would be another mask
        return peers._torch(q, k, v, causal)

    for peer in ("fa2", "cudnn"):
        dense = serving_peers.partial(serving_peers._dense, maker)
        monkeypatch.setitem(serving_peers._MAKERS, peer, dense)
    shape = SHAPES[name]
    calls, missing = make(shape, "fa2", "cudnn", "torch")
    if shape.page_size or shape.append:
        reason = "no append to a cache" if shape.append else "no cache in pages"
        assert set(calls) == {"torch"} and all(reason in why for why in missing.values())
        return
    assert missing == {}
    for peer in ("fa2", "cudnn"):
        torch.testing.assert_close(calls[peer](), calls["torch"](), rtol=1e-4, atol=1e-4)


def test_cudnn_says_why_it_has_no_chunks():
    _, missing = make(MIXED, "cudnn")
    assert "aligns the causal mask to the top-left corner" in missing["cudnn"]


def test_an_error_of_flashcute_is_raised(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("broken")

    monkeypatch.setattr(serving_peers, "flash_attn_with_kvcache", broken)
    with pytest.raises(RuntimeError, match="broken"):
        make(DECODE, "flashcute")


def test_host_time_is_of_another_length_each_time(monkeypatch):
    asked, plans = [], []

    class Plan:
        def __init__(self, cache_seqlens, causal):
            assert causal and cache_seqlens.shape == (8,) and 1 <= cache_seqlens.max() <= 4096
            self.calls = 0
            plans.append(self)

        def __call__(self, q, k_cache, v_cache):
            assert q.shape[1] == 1 and k_cache.shape == v_cache.shape
            self.calls += 1
            return q

    def attend(q, k_cache, v_cache, cache_seqlens, causal):
        assert causal and q.shape[1] == 1 and k_cache.shape[1] == 4096
        asked.append(cache_seqlens)
        return q

    def timed(call):
        asked.clear()
        for _ in range(bm.HOST_CALLS):
            call()
        if plans:  # the plan is the last to be timed
            assert not asked
            return 7.04
        kinds = {type(x) for x in asked}
        lengths = {int(x[0]) if isinstance(x, torch.Tensor) else x for x in asked}
        assert len(lengths) == bm.HOST_CALLS and max(lengths) <= 4096
        return 11.26 if kinds == {int} else 12.34

    monkeypatch.setattr(serving_peers, "flash_attn_with_kvcache", attend)
    monkeypatch.setattr(serving_peers, "KVCachePlan", Plan)
    monkeypatch.setattr(bm, "host_time", timed)
    found = serving_peers.measure_host(("flashcute", serving_peers.RAGGED), "cpu")
    assert found == {
        "host_us_decode": {"flashcute": 12.3},
        "host_us_decode_int": {"flashcute": 11.3},
        "host_us_decode_plan": {"flashcute": 7.0},
    }
    assert [plan.calls for plan in plans] == [1 + bm.HOST_CALLS]  # one plan, tried once
    views = []

    def fails_later(q, k, v, causal):
        if k.shape[1] > 4000:
            return lambda: q.view(-1, 7)  # an error of a later call
        return lambda: q

    monkeypatch.setitem(serving_peers._SDPA, "cudnn", fails_later)
    monkeypatch.setattr(bm, "host_time", None)
    none = {"host_us_decode": {}, "host_us_decode_int": {}, "host_us_decode_plan": {}}
    assert serving_peers.measure_host(("cudnn",), "cpu") == none

    def maker(q, k, v, causal):
        return lambda: views.append((k.shape[1], v.shape[1], causal))

    def of_views(call):
        views.clear()
        for _ in range(bm.HOST_CALLS):
            call()
        assert len(set(views)) == bm.HOST_CALLS
        assert all(k == v <= 4096 and not causal for k, v, causal in views)
        return 20.0

    monkeypatch.setitem(serving_peers._SDPA, "fa2", maker)
    monkeypatch.setattr(bm, "host_time", of_views)
    found = serving_peers.measure_host(("fa2",), "cpu")
    of_lengths = {"host_us_decode": {"fa2": 20.0}, "host_us_decode_int": {"fa2": 20.0}}
    assert found == none | of_lengths


def test_host_time_is_of_calls_that_run(monkeypatch):
    monkeypatch.setattr(serving_peers, "HOST_SHAPE", bm.Shape(2, 1, 64, 4, 2, 16, causal=True))
    monkeypatch.setattr(serving_peers, "_HOST_LENGTHS", range(2, 64))
    monkeypatch.setattr(bm, "host_time", lambda call: call().numel())
    found = serving_peers.measure_host(("flashcute",), "cpu")
    fields = ("host_us_decode", "host_us_decode_int", "host_us_decode_plan")
    assert found == {field: {"flashcute": 2 * 1 * 4 * 16} for field in fields}
