"""What the functions with a cache refuse: the table of bad_input_kvcache.py on every device."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import tiers
import torch
from bad_input_kvcache import CACHE, CASES, VARLEN, Case, arguments

import flashcute
from flashcute import checks_kvcache

RUNS = [(device, case) for case in CASES for device in case.on if device != "cuda"]


@pytest.mark.parametrize(
    ("device", "case"), RUNS, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_odd_input_is_refused(device: str, case: Case) -> None:
    failure = case.failure(device)
    assert failure is None, failure


def test_odd_inputs_are_many_and_their_names_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) >= 100


@pytest.mark.parametrize(("function", "paged"), [(CACHE, False), (CACHE, True), (VARLEN, True)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_unchanged_call_is_right(function: str, paged: bool, device: str) -> None:
    given = arguments(function, device, paged)
    out = getattr(flashcute, function)(**given)
    assert (out.shape, out.dtype, out.device.type) == (given["q"].shape, torch.float16, device)


# A compiled function checks the value of an int on the CPU when it runs, not when it is traced.
TRACED = [c for c in CASES if "meta" in c.on and not isinstance(c.change.get("cache_seqlens"), int)]
if not tiers.everything:  # each takes a second: one of each type of error with the same arguments
    TRACED = [*{(c.function, c.paged, *sorted(c.change), c.error): c for c in TRACED}.values()]


@pytest.mark.parametrize("case", TRACED, ids=lambda c: c.name)
def test_odd_input_to_a_compiled_function(case: Case) -> None:
    torch._dynamo.reset()
    failure = case.failure("meta", lambda function: torch.compile(function, backend="eager"))
    assert failure is None, failure


@pytest.mark.parametrize("length", [-1, 8, 2**31, 2**40, 2**70])
def test_a_length_that_does_not_fit_in_a_compiled_function(length: int) -> None:
    """The compiled function checks the length when it runs, as its value is not known before."""
    torch._dynamo.reset()
    given = arguments(CACHE, "cpu") | {"cache_seqlens": length}
    compiled = torch.compile(flashcute.flash_attn_with_kvcache, backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match=r"expected 0 <= cache_seqlens <= 7, .*got cache_seqlens"):
        compiled(**given)


@pytest.mark.parametrize("before", [(), (3,), (3, 4)])
@pytest.mark.parametrize("length", [-1, 8, 2**31, 2**40, 2**70])
def test_a_length_that_does_not_fit_in_a_compiled_function_for_kernels(length, before) -> None:
    """Kernels do not check the length, so the graph must, whether it is a constant there or not."""
    torch._dynamo.reset()
    given = arguments(CACHE, "meta")
    compiled = torch.compile(flashcute.flash_attn_with_kvcache, backend="eager", fullgraph=True)
    for fitting in before:
        compiled(**given | {"cache_seqlens": fitting})
    with pytest.raises(RuntimeError, match=r"torch\._check\(cache_seqlens (>= 0|\+ t.n_new <=)"):
        compiled(**given | {"cache_seqlens": length})


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_length_that_does_not_fit_in_an_exported_program(device: str, strict: bool) -> None:
    class Step(torch.nn.Module):
        def forward(self, q, k_cache, v_cache, k, v, cache_seqlens):
            args = q, k_cache, v_cache, k, v
            return flashcute.flash_attn_with_kvcache(*args, cache_seqlens=cache_seqlens)

    *args, _ = arguments(CACHE, device).values()
    shapes = (None,) * 5 + (torch.export.Dim.DYNAMIC,)
    program = torch.export.export(Step(), (*args, 3), dynamic_shapes=shapes, strict=strict)
    assert program.module()(*args, 7).shape == args[0].shape
    with pytest.raises((AssertionError, ValueError), match="<= 7"):
        program.module()(*args, 8)


def test_one_cache_for_both_is_refused_before_it_is_written() -> None:
    given = arguments(CACHE, "cpu")
    given["v_cache"] = given["k_cache"].view(given["k_cache"].shape)
    before = given["k_cache"].clone()
    pattern = "k_cache and v_cache in places of their own, got both at one address; allocate"
    with pytest.raises(ValueError, match=pattern):
        flashcute.flash_attn_with_kvcache(**given | {"k": 2 * given["k"]})
    assert torch.equal(given["k_cache"], before)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_cache_that_cannot_be_written_is_refused_before_the_other_is(name: str) -> None:
    given = arguments(CACHE, "cpu")
    with torch.inference_mode():
        given[name] = given[name].clone()
    before = given["k_cache"].clone()
    with pytest.raises(ValueError, match=f"{name} that can be written, got a tensor made in inf"):
        flashcute.flash_attn_with_kvcache(**given)
    assert torch.equal(given["k_cache"], before)
    with torch.inference_mode():
        flashcute.flash_attn_with_kvcache(**given)


@pytest.mark.parametrize("paged", [False, True])
def test_new_tokens_that_lie_in_the_cache(paged: bool) -> None:
    """New tokens are read before anything is written."""
    given = arguments(CACHE, "cpu", paged)
    for i, name in enumerate(("k_cache", "v_cache")):
        given[name].copy_(torch.randn(given[name].shape) + i)
    alone = {n: given[f"{n}_cache"][:3, 1:2].clone() for n in ("k", "v")}
    caches = {n: given[n].clone() for n in ("k_cache", "v_cache")}
    expected = flashcute.flash_attn_with_kvcache(**given | caches | alone)
    inside = {n: given[f"{n}_cache"][:3, 1:2] for n in ("k", "v")}
    assert torch.equal(flashcute.flash_attn_with_kvcache(**given | inside), expected)
    assert all(torch.equal(given[n], x) for n, x in caches.items())


def test_odd_input_under_python_O() -> None:
    # -O strips assert statements, so validation that used them would vanish.
    script = (
        "import bad_input_kvcache as t\n"
        "failures = [f for c in t.CASES if 'cpu' in c.on and (f := c.failure('cpu'))]\n"
        "print(*failures, sep='\\n')\n"
        "print(__debug__, len(failures))\n"
    )
    run = subprocess.run(
        [sys.executable, "-O", "-W", "ignore", "-c", script],
        cwd=pathlib.Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(flashcute.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "False 0", run.stdout


@pytest.mark.parametrize("traced", [False, True])
def test_queries_in_the_place_of_new_tokens_are_read_before(traced: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    cache, new = (torch.randn(2, n, 1, 16, generator=generator) for n in (8, 1))
    given = {"k": new, "v": new, "cache_seqlens": 3, "causal": True}
    function = flashcute.flash_attn_with_kvcache
    if traced:
        function = torch.compile(function, backend="eager")
    found = []
    for copies in (False, True):
        k_cache = cache.clone()
        q = k_cache[:, 3:4]
        found.append(function(q.clone() if copies else q, k_cache, cache.clone(), **given))
    assert torch.equal(*found)


def test_read_slots() -> None:
    given = arguments(CACHE, "cpu", paged=True)
    t = checks_kvcache.Tensors(**given)
    assert (t.n_new, t.capacity) == (1, 8)
    slots = checks_kvcache.read_slots("f", t, is_local=False)
    assert slots.pages is t.block_table and slots[1:] == ([0, 0, 0], [7, 4, 0])
    t = checks_kvcache.Tensors(
        **arguments(CACHE, "cpu") | {"cache_leftpad": torch.tensor([2, 4, 0])}
    )
    slots = checks_kvcache.read_slots("f", t, is_local=False)
    assert slots.pages.tolist() == [[0], [1], [2]] and slots[1:] == ([2, 4, 0], [7, 4, 0])
