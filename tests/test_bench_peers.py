"""Contenders give the same output on the same tensors, or are left out with their own message."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest
import torch

from flashcute import benchmarking as bm
from flashcute import flash_attn_func
from flashcute.bench import peers

SHAPE = bm.Shape(1, 16, 16, 4, 2, 32, causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_outputs_have_one_layout(causal):
    q, k, v = bm.make_qkv(SHAPE, torch.float32, "cpu")
    calls, missing = peers.make(q, k, v, causal, peers.NAMES["cpu"])
    assert (set(calls), missing) == ({"flashcute", "torch"}, {})
    k, v = (x.repeat_interleave(2, dim=2) for x in (k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal
    ).transpose(1, 2)
    for name, call in calls.items():
        torch.testing.assert_close(call(), exact, msg=name)


@pytest.mark.parametrize("what", ["bwd", "fwd+bwd"])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_the_same_problem(causal, what):
    q, k, v = bm.make_qkv(SHAPE, torch.float32, "cpu")
    with torch.no_grad():  # as in a sweep
        calls, missing = peers.make(q, k, v, causal, peers.NAMES["cpu"], what)
        assert (set(calls), missing) == ({"flashcute", "torch"}, {})
        for found in zip(calls["flashcute"](), calls["torch"](), (q, k, v), strict=True):
            torch.testing.assert_close(*found[:2])
            assert found[0].shape == found[2].shape
    assert not q.requires_grad


def test_repeatable_gradients_are_a_contender_of_their_own(monkeypatch):
    asked = []

    def function(*args, deterministic=False, **options):
        asked.append(deterministic)
        return flash_attn_func(*args, deterministic=deterministic, **options)

    monkeypatch.setattr(peers, "flash_attn_func", function)
    q, k, v = bm.make_qkv(SHAPE, torch.float32, "cpu")
    names = "flashcute", peers.REPEATABLE
    calls, missing = peers.make(q, k, v, True, names, "bwd")
    assert (tuple(calls), missing, asked) == (names, {}, [False, True])
    assert peers.make(q, k, v, True, names)[1] == {peers.REPEATABLE: "a forward always is"}


@pytest.mark.parametrize("name", peers.NAMES["cpu"])
@pytest.mark.parametrize("seqlen_k", [5, 40])
def test_the_causal_mask_is_aligned_to_the_bottom_right_corner(name, seqlen_k):
    q, k, v = bm.make_qkv(dataclasses.replace(SHAPE, seqlen_q=5, h_k=4), torch.float32, "cpu")
    k, v = (torch.zeros_like(x[:, :1]).repeat(1, seqlen_k, 1, 1) for x in (k, v))
    v[:, -1] = 1.0  # only the last query sees it, among keys that weigh the same
    (call,) = peers.make(q, k, v, True, (name,))[0].values()
    expected = torch.zeros_like(q)
    expected[:, -1] = 1 / seqlen_k
    torch.testing.assert_close(call(), expected)


def test_cudnn_is_no_peer_where_its_mask_is_another():
    wider = dataclasses.replace(SHAPE, seqlen_k=24)
    for shape, reason in ((wider, True), (dataclasses.replace(wider, causal=False), False)):
        q, k, v = bm.make_qkv(shape, torch.bfloat16, "cpu")
        calls, missing = peers.make(q, k, v, shape.causal, ("cudnn",))
        assert calls == {}
        assert ("top-left corner" in missing["cudnn"]) == reason


def test_a_peer_that_cannot_run_drops_out_with_its_own_words():
    q, k, v = bm.make_qkv(SHAPE, torch.float32, "cpu")
    calls, missing = peers.make(q, k, v, True, ("flashcute", "cudnn"))
    assert "cudnn" in missing  # needs CUDA
    assert "cudnn" not in calls


@pytest.mark.parametrize("error", [ImportError("undefined symbol\nmore"), AssertionError()])
def test_whatever_a_peer_raises_is_its_reason(monkeypatch, error):
    def broken(*_):
        raise error

    monkeypatch.setitem(peers._MAKERS, "torch", broken)
    q, k, v = bm.make_qkv(SHAPE, torch.float32, "cpu")
    calls, missing = peers.make(q, k, v, True, peers.NAMES["cpu"])
    assert set(calls) == {"flashcute"}
    assert missing["torch"] in ("undefined symbol", "AssertionError()")


def test_flashcute_is_never_dropped(monkeypatch):
    def broken():
        raise RuntimeError("broken")

    monkeypatch.setitem(peers._MAKERS, "flashcute", lambda *_: broken)
    q, k, v = bm.make_qkv(SHAPE, torch.float32, "cpu")
    with pytest.raises(RuntimeError, match="broken"):
        peers.make(q, k, v, True, ("flashcute", "torch"))


@pytest.mark.parametrize("module", peers._FA3_MODULES)
@pytest.mark.parametrize("with_lse", [False, True])
def test_flash_attention_3_under_either_name(monkeypatch, module, with_lse):
    def flash_attn_func(q, k, v, causal):
        return (q, None) if with_lse else q

    for name in peers._FA3_MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    fake = types.ModuleType(module)
    fake.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, module, fake)
    real = peers.importlib.util.find_spec
    monkeypatch.setattr(
        peers.importlib.util, "find_spec", lambda name: fake if name == module else real(name)
    )
    q, k, v = bm.make_qkv(SHAPE, torch.float32, "cpu")
    calls, missing = peers.make(q, k, v, True, ("fa3",))
    assert calls["fa3"]() is q
    assert missing == {}


MODULE = """
import torch

def forward(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
"""
BACKWARD = """
import math, torch

def backward(q, k, v, out, dout, lse, causal):
    def call():
        group = q.shape[2] // k.shape[2]
        keys, values = (x.repeat_interleave(group, dim=2) for x in (k, v))
        s = torch.einsum("bqhd,bkhd->bhqk", q, keys) / math.sqrt(q.shape[3])
        if causal:
            s = s.masked_fill(torch.ones(s.shape[2:]).triu(1).bool(), -math.inf)
        p = torch.exp(s - lse[..., None])
        dp = torch.einsum("bqhd,bkhd->bhqk", dout, values)
        d = (dout * out).sum(-1).transpose(1, 2)[..., None]
        ds = p * (dp - d) / math.sqrt(q.shape[3])
        dk = torch.einsum("bhqk,bqhd->bkhd", ds, q).unflatten(2, (-1, group)).sum(3)
        dv = torch.einsum("bhqk,bqhd->bkhd", p, dout).unflatten(2, (-1, group)).sum(3)
        return torch.einsum("bhqk,bkhd->bqhd", ds, keys), dk, dv
    return call
"""


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("source", "passes"),
    [(MODULE, set(peers.PASSES)), (BACKWARD, {"bwd"}), (MODULE + BACKWARD, set(peers.PASSES))],
)
def test_a_file_is_a_contender_in_the_passes_that_it_has(tmp_path, source, passes, causal):
    path = tmp_path / "other.py"
    path.write_text(source)
    modules = {"other": peers.load_module("other", path)}
    q, k, v = bm.make_qkv(SHAPE, torch.float32, "cpu")
    for what in peers.PASSES:
        names = ("flashcute", "other")
        with torch.no_grad():
            calls, missing = peers.make(q, k, v, causal, names, what, modules)
            assert ("other" in calls) == (what in passes)
            if what not in passes:
                assert missing["other"] == f"its file has no forward, which the pass {what} needs"
                continue
            torch.testing.assert_close(calls["other"](), calls["flashcute"]())
        if what == "bwd":
            assert any(x.requires_grad for x in calls["other"]()) is False


def test_a_file_for_windows_alone_is_missing_without_one(tmp_path):
    path = tmp_path / "other.py"
    path.write_text("def forward_local(q, k, v, left, right):\n    return lambda: q\n")
    q, k, v = bm.make_qkv(SHAPE, torch.float32, "cpu")
    modules = {"other": peers.load_module("other", path)}
    for what in peers.PASSES:
        calls, missing = peers.make(q, k, v, True, ("other",), what, modules)
        reason = f"its file has no forward, which the pass {what} needs"
        assert (calls, missing) == ({}, {"other": reason})


def test_a_backward_in_a_file_is_timed_without_autograd(tmp_path):
    path = tmp_path / "other.py"
    path.write_text(MODULE + "def backward(q, k, v, *_):\n    return lambda: (q, k, v)\n")
    q, k, v = bm.make_qkv(SHAPE, torch.float32, "cpu")
    modules = {"other": peers.load_module("other", path)}
    calls, _ = peers.make(q, k, v, True, ("other",), "bwd", modules)
    assert calls["other"]()[0] is q


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("a.py", "1 / 0", "ZeroDivisionError"),
        ("a.py", "x = 1", "got none of them in"),
        ("a.py", "import sys; sys.exit(0)", "SystemExit"),
        ("a.txt", MODULE, "does not end in .py"),
    ],
)
def test_files_that_hold_no_contender_are_refused(tmp_path, name, source, message):
    path = tmp_path / name
    path.write_text(source)
    with pytest.raises(ValueError, match=message) as error:
        peers.load_module("other", path)
    assert "--peer-module other=FILE" in str(error.value)


@pytest.mark.parametrize(
    ("what", "returned", "reason"),
    [
        ("fwd", "None", "expected a tensor (1, 16, 4, 32), got NoneType"),
        ("fwd", "(q, q)", "expected a tensor (1, 16, 4, 32), got tuple"),
        ("fwd", "q[:, :1]", "got a tensor (1, 1, 4, 32)"),
        ("bwd", "q", "expected 3 tensors, got Tensor"),
        ("bwd", "(q, None, q)", "expected a tensor (1, 16, 2, 32), got NoneType"),
        ("bwd", "exit()", "SystemExit"),
    ],
)
def test_a_file_that_returns_something_else_drops_out(tmp_path, what, returned, reason):
    path = tmp_path / "other.py"
    function = "forward(q, *_)" if what == "fwd" else "backward(q, *_)"
    path.write_text(f"def {function}:\n    return lambda: {returned}\n")
    modules = {"other": peers.load_module("other", path)}
    q, k, v = bm.make_qkv(SHAPE, torch.float32, "cpu")
    calls, missing = peers.make(q, k, v, True, ("other",), what, modules)
    assert calls == {} and reason in missing["other"]


def test_flash_attention_3_is_missing_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    q, k, v = bm.make_qkv(SHAPE, torch.float32, "cpu")
    calls, missing = peers.make(q, k, v, True, ("fa3",))
    assert calls == {}
    assert "flash_attn_interface" in missing["fa3"]
