"""The operators over a KV cache: schemas, mutated arguments, tracers, fakes, and no gradients."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch
from test_flash_attn_kvcache import H_K, OPTIONS, B, D, H, in_pages, make, ragged, random, same
from torch._subclasses import FakeTensorMode

import flashcute
from flashcute import flash_attn_varlen_func, flash_attn_with_kvcache, ops_kvcache

ROOT = pathlib.Path(flashcute.__file__).parents[1]

# Never edit an old entry: a saved program or a caller may hold to it. New arguments go to the end,
# with defaults.
FROZEN_SCHEMAS = {
    "attend_kvcache": (
        "flashcute::attend_kvcache(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cache_seqlens,"
        " Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? block_table, float softmax_scale,"
        " bool causal, int window_left, int window_right, Tensor? sinks, float softcap,"
        " Tensor? alibi_slopes, int num_splits) -> (Tensor out, Tensor softmax_lse)"
    ),
    "append_attend_kvcache": (
        "flashcute::append_attend_kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache,"
        " Tensor k, Tensor v, Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved,"
        " Tensor cache_seqlens, Tensor? cache_batch_idx, Tensor? cache_leftpad,"
        " Tensor? block_table, float softmax_scale, bool causal, int window_left,"
        " int window_right, Tensor? sinks, float softcap, Tensor? alibi_slopes, int num_splits)"
        " -> (Tensor out, Tensor softmax_lse)"
    ),
}
TABLES = {"rotary_cos": random(40, 3, seed=8), "rotary_sin": random(40, 3, seed=9)}
NEW = pytest.mark.parametrize("n_new", [0, 2], ids=["read", "append"])


def op(n_new: int):
    name = "append_attend_kvcache" if n_new else "attend_kvcache"
    return getattr(torch.ops.flashcute, name).default


def arguments(n_new: int, page_size: int | None = 4, dtype=torch.float32, **change) -> dict:
    """Returns arguments of the operator that reads a cache, or with ``n_new`` of the one that
    appends."""
    given = make(n_new, dtype=dtype)
    if page_size:
        given = in_pages(given, page_size)
    options = {"window_left": -1, "window_right": -1, "sinks": None, "alibi_slopes": None}
    options |= {
        "softcap": 0.0,
        "softmax_scale": 0.25,
        "causal": True,
        "num_splits": 0,
        "block_table": None,
    }
    options |= {"cache_batch_idx": None, "cache_leftpad": None}
    if n_new:
        options |= {n: x.to(dtype) for n, x in TABLES.items()} | {"rotary_interleaved": True}
    for cache in ("k_cache", "v_cache"):
        given[cache] = given[cache].nan_to_num()
    return options | given | change


@NEW
def test_schema_is_the_frozen_one(n_new: int) -> None:
    schema = op(n_new)._schema
    frozen = FROZEN_SCHEMAS[schema.name.removeprefix("flashcute::")]
    assert schema.is_backward_compatible_with(torch._C.parse_schema(frozen))
    assert str(schema) == frozen, "compatible, but freeze the new schema, too"


@NEW
@pytest.mark.parametrize("page_size", [None, 4])
def test_opcheck(n_new: int, page_size: int | None) -> None:
    given = arguments(n_new, page_size)
    change = {n: x for n, x in OPTIONS["all"].items() if n in given} if page_size else {}
    checks = torch.library.opcheck(op(n_new), (), given | change)
    assert set(checks.values()) == {"SUCCESS"}
    if not page_size:
        return
    empty = given | {n: given[n][:0] for n in ("q", "k", "v", "cache_seqlens") if n in given}
    empty["block_table"] = given["block_table"][:0]
    assert set(torch.library.opcheck(op(n_new), (), empty).values()) == {"SUCCESS"}


@NEW
def test_operator_is_the_function(n_new: int) -> None:
    given, again = arguments(n_new), arguments(n_new)
    out, lse = op(n_new)(**given)
    options = {"causal": True, "softmax_scale": 0.25, "return_softmax_lse": True}
    names = ("q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "block_table", *TABLES)
    rest = {n: again[n] for n in names if n in again}
    expected = flash_attn_with_kvcache(**rest, **options)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert torch.equal(given["k_cache"], again["k_cache"])


@NEW
def test_autograd_notices_what_was_changed(n_new: int) -> None:
    for call in (
        lambda given: op(n_new)(**given),
        lambda given: flash_attn_with_kvcache(
            *(given.get(n) for n in ("q", "k_cache", "v_cache", "k", "v")),
            cache_seqlens=given["cache_seqlens"],
            block_table=given["block_table"],
        ),
    ):
        given = arguments(n_new)
        factor = torch.ones((), requires_grad=True)
        product = given["k_cache"] * factor  # autograd saves the cache
        call(given)
        if not n_new:
            product.sum().backward()
            continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def step(q, k_cache, v_cache, k, v, cache_seqlens, block_table):
    """Computes a layer of a decoder, whose last operations read what the call wrote."""
    out, lse = flash_attn_with_kvcache(
        *(q * 2, k_cache, v_cache, k, v),
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        causal=True,
        return_softmax_lse=True,
        **TABLES,
    )
    return out + 1, lse, k_cache.sum() + v_cache.sum()


def inputs(n: int = 4, grow: int = 0, page_size: int | None = 4) -> list:
    given = make(n)
    if page_size:
        given = in_pages(given, page_size)
    for cache in ("k_cache", "v_cache"):
        given[cache] = given[cache].nan_to_num()
    names = ("q", "k_cache", "v_cache", "k", "v", "cache_seqlens")
    lengths = given["cache_seqlens"]
    given["cache_seqlens"] = torch.where(lengths > 1, lengths - grow, lengths)
    return [*(given[name] for name in names), given.get("block_table")]


def assert_same_steps(compiled, args) -> None:
    clones = [x if x is None else x.clone() for x in args]
    expected = step(*clones)
    got = compiled(*args)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
    for i in (1, 2):
        assert same(args[i], clones[i])


def test_compiled_appends() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        # No two sizes are equal, as the graph would take equal sizes for one symbol.
        assert_same_steps(compiled, inputs(7, page_size=3))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for n, grow in ((7, 1), (6, 0), (3, 1)):
                assert_same_steps(compiled, inputs(n, grow, 3))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
def test_compiled_with_inductor_on_views_of_one_tensor() -> None:
    torch._dynamo.reset()

    def layer(kv, q, k, v, lengths, table):
        return step(q, kv[:, 0], kv[:, 1], k, v, lengths, table)

    q, k_cache, v_cache, k, v, lengths, table = inputs()
    kv = torch.stack((k_cache, v_cache), 1)
    eager_kv = kv.clone()
    with torch.no_grad():
        expected = layer(eager_kv, q, k, v, lengths, table)
        got = torch.compile(layer, fullgraph=True)(kv, q, k, v, lengths, table)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(kv, eager_kv)


def test_length_as_an_int_is_no_constant_of_the_graph() -> None:
    torch._dynamo.reset()

    def decode(q, k_cache, k, n):
        return flash_attn_with_kvcache(q, k_cache, k_cache.clone(), k, k, cache_seqlens=n)

    q, _, k_cache, k, *_ = inputs(page_size=None)
    with torch.no_grad():
        compiled = torch.compile(decode, backend="aot_eager", fullgraph=True, dynamic=True)
        for n in (3, 4, 7):
            with torch._dynamo.config.patch(error_on_recompile=n > 3):
                got = compiled(q, k_cache.clone(), k, n)
            assert torch.equal(got, decode(q, k_cache.clone(), k, n))
        with pytest.raises(ValueError, match=r"got cache_seqlens\[0\]=23 with 4 tokens to append"):
            compiled(q, k_cache.clone(), k, 23)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")  # torch's own use
def test_export_and_load_in_a_process_that_only_imports_the_package(tmp_path) -> None:
    class Step(torch.nn.Module):
        def forward(self, *args):
            return step(*args)

    args = inputs()
    with torch.no_grad():
        program = torch.export.export(Step(), tuple(args))
    assert "append_attend_kvcache" in str(program.graph)
    torch.export.save(program, tmp_path / "step.pt2")
    torch.save({"args": args, "expected": step(*(x.clone() for x in args))}, tmp_path / "call.pt")
    script = (
        "import sys, torch, flashcute\n"
        "from flashcute import flash_attn_func\n"
        "program = torch.export.load(sys.argv[1] + '/step.pt2').module()\n"
        "call = torch.load(sys.argv[1] + '/call.pt')\n"
        "got = program(*call['args'])\n"
        "for x, y in zip(got, call['expected'], strict=True):\n"
        "    torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)\n"
        "total = call['args'][1].sum() + call['args'][2].sum()\n"
        "torch.testing.assert_close(total, call['expected'][2], atol=1e-3, rtol=1e-5)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


@NEW
@pytest.mark.parametrize("device", ["fake", "meta"])
def test_fake_and_meta_tensors(n_new: int, device: str) -> None:
    given = arguments(n_new, dtype=torch.float16)
    names = ("q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "block_table")
    real = {n: given[n] for n in names if n in given}
    expected = flash_attn_with_kvcache(**real, return_softmax_lse=True)
    if device == "meta":
        shapes = {n: x.to("meta") for n, x in real.items()}
        before = shapes["k_cache"]._version
        got = flash_attn_with_kvcache(**shapes, return_softmax_lse=True)
        # Meta tensors have no memory to write, but their version counts as on any device.
        assert shapes["k_cache"]._version - before == (1 if n_new else 0)
    else:
        with FakeTensorMode() as mode:
            shapes = {n: mode.from_tensor(x) for n, x in real.items()}
            got = flash_attn_with_kvcache(**shapes, return_softmax_lse=True)
            at = flash_attn_with_kvcache(**shapes | {"cache_seqlens": 3})
        assert at.shape == got[0].shape
    for g, e in zip(got, expected, strict=True):
        # The kernels' log-sum-exp has the strides of a tensor (h, b, seqlen_q).
        by_kernels = device == "meta" and e.dim() == 3
        like = e.transpose(0, 1).contiguous().transpose(0, 1) if by_kernels else e
        assert (g.shape, g.dtype, g.stride()) == (like.shape, like.dtype, like.stride())
        assert g.device.type == ("meta" if device == "meta" else "cpu")


@pytest.mark.parametrize(
    ("where", "name"),
    [
        *((where, n) for where in ("function", "operator") for n in ("q", "k_cache", "v", "sinks")),
        *(("compiled", "q"), ("meta", "q")),
    ],
)
def test_a_gradient_is_refused(where: str, name: str) -> None:
    given = arguments(2, dtype=torch.float16, sinks=torch.ones(H))
    if where == "meta":
        given = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    given[name].requires_grad_()
    names = (*make(2), "block_table", "sinks")

    def call(given):
        if where == "operator":
            return op(2)(**given)
        return flash_attn_with_kvcache(**{n: given[n] for n in names})

    function = call
    if where == "compiled":
        torch._dynamo.reset()
        function = torch.compile(call, backend="eager", fullgraph=True)
    pattern = rf"expected no gradient through a cache, .*got {name}.requires_grad=True; .*no_grad"
    error = Exception if where == "compiled" else NotImplementedError
    before = given["k_cache"].detach().clone()
    with pytest.raises(error, match=pattern):
        function(given)
    if where != "meta":
        assert torch.equal(given["k_cache"], before)
    with torch.no_grad():
        assert not (function(given)[0]).requires_grad


def test_transforms_and_tangents_are_refused() -> None:
    given = make()
    rest = {n: given[n] for n in ("k_cache", "v_cache", "cache_seqlens")}

    def attend(q):
        return flash_attn_with_kvcache(q, **rest)

    pattern = r"^flash_attn_with_kvcache: expected no gradient through a cache, .*got .*; call it"
    inside = r"^flash_attn_with_kvcache: expected no transform of torch.func \(vmap, .*; stack what"
    with pytest.raises(NotImplementedError, match=inside):  # torch.no_grad() would not help
        torch.vmap(attend)(given["q"][None])
    for transform in (
        lambda: torch.func.grad(lambda q: attend(q).sum())(given["q"]),
        lambda: torch.func.jvp(attend, (given["q"],), (given["q"],)),
    ):
        with pytest.raises(NotImplementedError, match=pattern):
            transform()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given["q"], given["q"])
        with pytest.raises(NotImplementedError, match=rf"{pattern[1:-9]}; |got q with a tangent"):
            attend(dual)


def test_inference_mode() -> None:
    expected = flash_attn_with_kvcache(**make(2))
    with torch.inference_mode():
        assert torch.equal(flash_attn_with_kvcache(**make(2)), expected)
        given = arguments(2, None)
        op(2)(**given)
        assert given["k_cache"].is_inference()


def test_operator_repeats_the_checks() -> None:
    for n_new in (0, 2):
        fn = re.escape(op(n_new)._schema.name)
        for change, pattern in (
            ({"num_splits": 129}, "num_splits <= 128, got num_splits=129"),
            ({"softcap": -1.0}, "got softcap=-1.0"),
            ({"window_left": -2}, "window_size of two ints >= -1"),
            ({"sinks": torch.ones(3)}, r"sinks of shape \(4,\)"),
            ({"alibi_slopes": torch.ones(3)}, r"\(4,\) or \(5, 4\)"),
            ({"block_table": torch.zeros(4, 7).int()}, r"block_table of shape \(5, 7\)"),
            ({"cache_seqlens": torch.full((5,), 99).int()}, r"got cache_seqlens\[0\]=99"),
        ):
            with pytest.raises(ValueError, match=rf"^{fn}: expected .*{pattern}"):
                op(n_new)(**arguments(n_new, **change))
        ints = {n: torch.ones(B, 2, H_K, D).int() for n in ("k", "v")} if n_new else {}
        ints |= {n: torch.ones(9, 4, H_K, D).int() for n in ("k_cache", "v_cache")}
        tables = {n: x.int() for n, x in TABLES.items()} if n_new else {}
        with pytest.raises(TypeError, match=rf"^{fn}: expected q.dtype .*got .*int32"):
            op(n_new)(**arguments(n_new, q=torch.ones(B, 1, H, D).int(), **ints, **tables))


def test_eager_calls_do_not_go_through_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_kvcache, "attend", None)
    assert flash_attn_with_kvcache(**make(2)).shape == (B, 2, H, D)


def test_the_eager_operator_has_no_python_between_call_and_kernel() -> None:
    flashcute.ops.load()
    for name in ("read_kvcache", "attend_kvcache", "attend_varlen"):
        op = f"flashcute::{name}_no_grad"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(op, "CUDA")
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(op, "Autograd")


@pytest.mark.skipif(shutil.which("g++") is None, reason="the binding needs g++")
def test_the_binding_decides_what_needs_no_check_in_python() -> None:
    """Calls have the same errors and the same launches as with the checks in Python."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(pathlib.Path(__file__).parent / "host_binding.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "0 are wrong", run.stdout


# --- ragged queries over pages ---


def test_compiled_ragged_queries_over_pages() -> None:
    torch._dynamo.reset()
    options = {n: x for n, x in OPTIONS["all"].items() if n != "num_splits"}

    def attend(given):
        return flash_attn_varlen_func(**given, **options)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for n, page_size in enumerate((13, 7, 8)):  # none equals another size
        _, given = ragged(page_size)
        given |= {x: given[x].nan_to_num() for x in ("k", "v")}
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            got = compiled(given)
        for x, y in zip(got, attend(given), strict=True):
            torch.testing.assert_close(x, y)
    seqused = given | {"cu_seqlens_k": None, "seqused_k": torch.tensor([0, 3, 16, 1, 2]).int()}
    assert torch.equal(compiled(seqused)[0], attend(seqused)[0])


def test_opcheck_of_ragged_queries_over_pages() -> None:
    _, given = ragged(4)
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "block_table")
    q, k, v, cu_q, cu_k, table = (given[n] for n in names)
    for grad in (False, True):
        tensors = [x.nan_to_num().requires_grad_(grad) for x in (q, k, v)]
        args = (*tensors, None, None, cu_q, cu_k, None, None, None, table)
        options = (9, 17, 0.25, True, -1, -1, 0.0, 0.0, False)
        checked = torch.library.opcheck(
            torch.ops.flashcute.attend_varlen_paged_cpu.default, (*args, *options)
        )
        assert set(checked.values()) == {"SUCCESS"}
