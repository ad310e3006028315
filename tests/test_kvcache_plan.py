"""One plan for all calls of a step; test_ops_kvcache and the GPU tests check its launches."""

from __future__ import annotations

import copy

import pytest
import torch
from test_flash_attn_kvcache import in_pages, make
from test_ops_kvcache import TABLES

from flashcute import KVCachePlan, flash_attn_with_kvcache, kvcache_plan, ops_kvcache


def tensors(page_size: int | None, layer: int = 0) -> tuple[tuple, dict]:
    """Returns q, k_cache and v_cache of a layer, and the places of sequences in its caches."""
    given = make() if page_size is None else in_pages(make(), page_size)
    given |= {n: given[n].nan_to_num() for n in ("k_cache", "v_cache")}
    places = {n: given[n] for n in ("cache_seqlens", "block_table") if n in given}
    return tuple(given[n] + layer for n in ("q", "k_cache", "v_cache")), places


@pytest.mark.parametrize("page_size", [None, 4])
def test_layers_and_steps_are_calls_of_the_function(page_size: int | None) -> None:
    _, places = tensors(page_size)
    options = {"causal": True, "window_size": (9, -1), "softmax_scale": 0.3, **places}
    plan = KVCachePlan(**options)
    for _ in range(3):
        for layer in range(2):
            given, _ = tensors(page_size, layer)
            assert torch.equal(plan(*given), flash_attn_with_kvcache(*given, **options))
        places["cache_seqlens"].sub_(1).clamp_(min=0)
        plan.renew()


def appending(page_size: int | None, layer: int = 0) -> tuple[tuple, dict]:
    """Returns q, k_cache, v_cache, k and v of a layer, and the plan's options."""
    given = make(2) if page_size is None else in_pages(make(2), page_size)
    given |= {n: given[n].nan_to_num() for n in ("k_cache", "v_cache")}
    places = {n: given[n] for n in ("cache_seqlens", "block_table") if n in given}
    options = places | TABLES | {"rotary_interleaved": False, "causal": True}
    return tuple(given[n] + layer for n in ("q", "k_cache", "v_cache", "k", "v")), options


@pytest.mark.parametrize("page_size", [None, 4])
def test_steps_append_to_the_cache_of_each_layer(page_size: int | None) -> None:
    _, options = appending(page_size)
    if page_size:
        table = options["block_table"]
        table.copy_(torch.arange(table.numel()).view(table.shape))
    options["cache_seqlens"].clamp_(max=9)
    plan = KVCachePlan(**options)
    layers, again = ([appending(page_size, n)[0] for n in range(2)] for _ in range(2))
    for step in range(3):
        for (q, *caches, k, v), (_, *same, _, _) in zip(layers, again, strict=True):
            new = k + step, v + step
            before = caches[0].clone()
            expected = flash_attn_with_kvcache(q, *same, *new, **options)
            assert torch.equal(plan(q, *caches, *new), expected)
            assert all(map(torch.equal, caches, same)) and not torch.equal(caches[0], before)
        options["cache_seqlens"].add_(2)
        plan.renew()


def test_a_compiled_step_appends() -> None:
    torch._dynamo.reset()
    given, options = appending(4)
    again, _ = appending(4)
    plan = KVCachePlan(**options)

    def step(q, k_cache, v_cache, k, v):
        return plan(q, k_cache, v_cache, k, v) + 1, k_cache.sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for got, expected in zip(compiled(*given), step(*again), strict=True):
        torch.testing.assert_close(got, expected)
    assert torch.equal(given[1], again[1])


def test_autograd_notices_what_was_appended_to() -> None:
    given, options = appending(None)
    product = given[1] * torch.ones((), requires_grad=True)  # saves the cache
    KVCachePlan(**options)(*given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_plan_that_appends_is_not_one_that_reads() -> None:
    given, options = appending(None)
    plan = KVCachePlan(**options)
    with pytest.raises(ValueError, match="expected k and v with rotary_cos"):
        plan(*given[:3])
    plan(*given)  # the failed call does not count
    before = given[1].clone()
    for other, name, got in (
        (given[:3], "k", "a NoneType"),
        ((*given[:4], None), "v", "a NoneType"),
        ((*given[:3], given[3][:, :1], given[4][:, :1]), "k", r"\(5, 1, 2, 16\)"),
    ):
        pattern = rf"^KVCachePlan: expected {name} as in .*first call, .*, got .*{got}.*; make a"
        with pytest.raises(ValueError, match=pattern):
            plan(*other)
    assert torch.equal(given[1], before)


def test_a_plan_of_another_problem_is_refused() -> None:
    (q, k, v), places = tensors(None)
    plan = KVCachePlan(**places)
    plan(q, k, v)
    for given, name, got in (
        ((q[:, :1], k, v), "q", r"\(5, 1, 4, 16\)"),
        ((q.half(), k, v), "q", "torch.float16"),
        ((q, k[:, :20], v[:, :20]), "k_cache", r"\(5, 20, "),
        ((q, k, v.to("meta")), "v_cache", "on meta"),
        ((q, k, None), "v_cache", "a NoneType"),
    ):
        pattern = rf"^KVCachePlan: expected {name} as in .*first call, .*, got .*{got}.*; make a"
        with pytest.raises(ValueError, match=pattern):
            plan(*given)
    plan(q, k, v)


def test_lengths_are_read_on_the_device() -> None:
    with pytest.raises(TypeError, match=r"^KVCachePlan: expected cache_seqlens .*type int; pass a"):
        KVCachePlan(cache_seqlens=3)


def test_compiled_calls() -> None:
    torch._dynamo.reset()
    given, places = tensors(4)
    plan = KVCachePlan(causal=True, **places)
    compiled = torch.compile(lambda *x: plan(*x) + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*given), plan(*given) + 1)


def test_a_copy_has_no_plan_of_the_binding() -> None:
    given, places = tensors(4)
    plan = KVCachePlan(**places)
    plan(*given)
    plan._number = 7
    copied = copy.deepcopy(plan)
    assert copied._number == 0 and copied._first is None
    copied._places[0].sub_(2).clamp_(min=0)
    expected = flash_attn_with_kvcache(*given, **places | {"cache_seqlens": copied._places[0]})
    assert torch.equal(copied(*given), expected)


def test_every_capture_lays_out_its_tiles(monkeypatch) -> None:
    """A captured layout of tiles has not run, so only later layers of the same capture use it."""
    given, places = tensors(None)
    plan = KVCachePlan(**places)
    plan._number = 7
    asked = []
    monkeypatch.setattr(ops_kvcache, "planned", lambda: (None, "read", "append"))
    monkeypatch.setattr(ops_kvcache, "call_binding", lambda op, *args: asked.append(args) or op)
    for capture, renewed, wanted in (
        (0, True, True),
        (0, False, False),
        (3, False, True),  # after calls outside of a capture
        (3, False, False),
        (3, True, True),
        (4, False, True),  # after a capture that may have failed
        (4, False, False),
        (0, False, True),
        (0, False, True),  # replays may have changed the lengths in between
        (4, False, False),
    ):
        monkeypatch.setattr(kvcache_plan, "_current_capture", lambda capture=capture: capture)
        if renewed:
            plan.renew()
        assert plan(*given) == "read"
        assert asked.pop() == (*given, 7, *([True] if wanted else []))


def test_gradients_of_the_plans_own_tensors_are_refused() -> None:
    given, places = tensors(None)
    sinks = torch.zeros(given[0].shape[2], requires_grad=True)
    plan = KVCachePlan(sinks=sinks, **places)
    with torch.no_grad():
        plan(*given)
    with pytest.raises(NotImplementedError, match="expected no gradient through a cache"):
        plan(*given)


@pytest.mark.parametrize(("change", "error"), [({"window_size": 3}, TypeError), ({}, ValueError)])
def test_an_error_names_the_plan(change: dict, error: type[Exception]) -> None:
    (q, *caches), places = tensors(None)
    with pytest.raises(error, match=r"^KVCachePlan: expected"):
        KVCachePlan(**places, **change)(q[0], *caches)


def test_a_gradient_is_refused() -> None:
    (q, k, v), places = tensors(None)
    plan = KVCachePlan(**places)
    plan(q, k, v)
    with pytest.raises(NotImplementedError, match="expected no gradient through a cache"):
        plan(q.requires_grad_(), k, v)
