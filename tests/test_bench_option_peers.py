"""Contenders with options give the same output on the same tensors, or say why they cannot run."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
import torch._dynamo.config as dynamo

import flashcute
from flashcute import benchmarking as bm
from flashcute import heuristics
from flashcute.bench import command, inputs, option_peers, options, peers
from flashcute.bench.options import OPTIONS
from flashcute.bench.sweep import Variant
from flashcute.support import Support

SMALL = {
    name: dataclasses.replace(options.shrink(shape, 48), h=8, h_k=4, d=16)
    for name, shape in OPTIONS.items()
    if not (name.startswith("ragged") and "d64" in name)
}
BY_FAMILY = {name.partition("-")[0]: shape for name, shape in SMALL.items()}


def make(shape, *names, dtype=torch.float32, what="fwd", **modules):
    q, k, v = inputs.make("normal", shape.tensors, dtype, "cpu")
    # With a softcap, q is scaled so that scores exceed it. Without one it is not, so that sinks and
    # slopes still count beside the scores.
    return option_peers.make(q.mul_(10) if shape.softcap else q, k, v, shape, names, what, modules)


def seeded(call):
    """Returns the result of a call that draws the same dropout mask each time."""
    torch.manual_seed(1)
    return call()


@pytest.mark.parametrize("name", SMALL)
def test_contenders_agree(name):
    calls, missing = make(SMALL[name], "flashcute", "torch")
    assert missing == {}
    ours, exact = (seeded(calls[x]) for x in ("flashcute", "torch"))
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


def test_dropout_draws_another_mask_in_each_call():
    calls, _ = make(BY_FAMILY["dropout"], "flashcute", "torch")
    for call in calls.values():
        assert (call() - call()).abs().max() > 0.1


def test_with_dropout_only_the_same_masks_are_compared():
    names = ("flashcute", "repeatable", "torch", "fa2", "plain", "other")
    found = {
        family: [name for name in names if option_peers.is_compared(name, shape)]
        for family, shape in BY_FAMILY.items()
    }
    assert found.pop("dropout") == ["flashcute", "repeatable", "torch"]
    assert all(x == ["flashcute", "repeatable", "torch", "fa2", "other"] for x in found.values())
    trusted = {option_peers.trusted(BY_FAMILY["dropout"], x, "cuda") for x in peers.PASSES}
    assert trusted == {"torch"}


@pytest.mark.parametrize("what", ["bwd", "fwd+bwd"])
@pytest.mark.parametrize("name", SMALL)
def test_gradients_agree(name, what):
    with torch.no_grad():  # as in a sweep
        calls, missing = make(SMALL[name], "flashcute", peers.REPEATABLE, "torch", what=what)
        assert missing == {}
        expected = seeded(calls["torch"])
        for call in ("flashcute", peers.REPEATABLE):
            for found, x in zip(seeded(calls[call]), expected, strict=True):
                torch.testing.assert_close(found, x, rtol=1e-4, atol=1e-4)
    assert option_peers.trusted(SMALL[name], what, "cpu") == "torch"
    assert option_peers.trusted(SMALL[name], what, "cuda") in ("fa2", "torch")


@pytest.mark.parametrize("name", SMALL)
def test_the_definition_takes_rows_in_pieces(name, monkeypatch):
    calls, _ = make(SMALL[name], "torch")
    whole = seeded(calls["torch"])
    monkeypatch.setattr(option_peers, "_CHUNK", 1000)
    torch.testing.assert_close(seeded(calls["torch"]), whole)


@pytest.mark.parametrize("family", ["sinks", "softcap", "alibi", "dropout"])
def test_plain_is_without_the_option(family):
    shape = BY_FAMILY[family]
    calls, _ = make(shape, "flashcute", "plain", "torch")
    bare = dataclasses.replace(shape, sinks=False, softcap=0.0, alibi=False, dropout=0.0)
    q, k, v = inputs.make("normal", shape.tensors, torch.float32, "cpu")
    q = q.mul_(10) if shape.softcap else q
    exact = option_peers.make(q, k, v, bare, ("torch",))[0]["torch"]()
    torch.testing.assert_close(calls["plain"](), exact, rtol=1e-4, atol=1e-4)
    # The option changes the output, so comparing outputs finds a contender that forgets it.
    assert (calls["plain"]() - calls["torch"]()).abs().max() > 0.1


def test_plain_of_one_length_is_a_dense_batch():
    shape = SMALL["ragged-16-of-1024-d128-causal"]
    calls, missing = make(shape, "plain", "torch")
    assert missing == {}
    torch.testing.assert_close(calls["plain"](), calls["torch"]())
    for name, reason in {
        "ragged-8-of-4k-d128-causal": "sequences of one length",
        "window-1023-d64-8k": "without its window",
    }.items():
        uneven = SMALL[name]
        if uneven.lengths:
            lengths = (*uneven.lengths[:-1], uneven.lengths[-1] + 1)
            uneven = dataclasses.replace(uneven, lengths=lengths, seqlen_q=max(lengths))
        assert reason in make(uneven, "plain")[1]["plain"]


@pytest.mark.parametrize("family", ["window", "ragged", "softcap"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_flash_attention_3_gets_the_options(family, with_lse, monkeypatch):
    asked = []

    def noting(function):
        def attend(*tensors, **arguments):
            asked.append(arguments)
            out = function(*tensors, **arguments)
            return (out, None) if with_lse else out

        return attend

    module = types.SimpleNamespace(
        flash_attn_func=noting(flashcute.flash_attn_func),
        flash_attn_varlen_func=noting(flashcute.flash_attn_varlen_func),
    )
    monkeypatch.setattr(peers, "fa3_module", lambda: module)
    shape = BY_FAMILY[family]
    calls, missing = make(shape, "fa3", "torch")
    assert missing == {}
    torch.testing.assert_close(calls["fa3"](), calls["torch"](), rtol=1e-4, atol=1e-4)
    names = ("causal", "window_size", "softcap")
    expected = dict(zip(names, (shape.causal, shape.window, shape.softcap), strict=True))
    assert all(call == expected for call in asked)


@pytest.fixture
def fa2_on_cpu():
    """Gives CPU tensors PyTorch's op, which only GPUs have: its schema, flashcute's results."""

    def attend(q, k, v, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, debug, **keywords):
        sides = (keywords.get("window_size_left"), keywords.get("window_size_right"))
        options = {
            "causal": is_causal,
            "window_size": tuple(-1 if x is None else x for x in sides),
            "alibi_slopes": keywords.get("alibi_slopes"),
            "dropout_p": dropout_p,
            "return_attn_probs": True,
        }
        if cum_q is None:
            assert (max_q, max_k) == (q.shape[1], k.shape[1])
            out, lse, _ = flashcute.flash_attn_func(q, k, v, **options)
        else:
            lengths = (cum_q, cum_k, max_q, max_k)
            out, lse, _ = flashcute.flash_attn_varlen_func(q, k, v, *lengths, **options)
        return out, lse, *(q.new_empty(0) for _ in range(3))

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", attend, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("fa2_on_cpu")
@pytest.mark.parametrize("family", ["window", "sinks", "ragged", "alibi", "dropout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flash_attention_2_gets_the_options(family, dtype):
    calls, missing = make(BY_FAMILY[family], "fa2", "torch", dtype=dtype)
    assert missing == {}
    out, exact = seeded(calls["fa2"]), seeded(calls["torch"])
    assert out.dtype == dtype
    # The tolerance covers the roundings of 16-bit contenders. A wrong mask causes at least 0.1.
    tolerance = 1e-4 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(out, exact, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "name", ["window-1023-d64-8k", "window-512-512-d128-8k", "softcap-d128", "alibi-d128"]
)
def test_flex_attention_gets_the_options(name, monkeypatch):
    compiled = []

    def compile(function, **how):
        compiled.append(how)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    with dynamo.patch(recompile_limit=8):
        calls, missing = make(SMALL[name], "flex", "torch")
        assert dynamo.recompile_limit > len(OPTIONS) * 2  # two dtypes
    assert missing == {}
    assert compiled[0] == {"dynamic": False, "fullgraph": True}
    torch.testing.assert_close(calls["flex"](), calls["torch"](), rtol=1e-4, atol=1e-4)


def forward_local(q, k, v, left, right):
    return lambda: flashcute.flash_attn_func(q, k, v, window_size=(left, right))


LOCAL = types.SimpleNamespace(forward_local=forward_local)


@pytest.mark.parametrize("what", peers.PASSES)
@pytest.mark.parametrize("name", ["window-1023-d64-8k", "window-512-512-d128-8k"])
def test_a_file_is_a_contender_with_windows(name, what):
    # The file may also take the name of a known contender.
    calls, missing = make(SMALL[name], "fa3", "torch", what=what, fa3=LOCAL)
    assert missing == {}
    torch.testing.assert_close(calls["fa3"](), calls["torch"](), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [*BY_FAMILY, "window with sinks"])
def test_a_file_is_missing_on_what_it_has_no_function_for(family):
    window = BY_FAMILY["window"]
    shape = BY_FAMILY.get(family) or dataclasses.replace(window, sinks=True)
    module = LOCAL if shape != window else types.SimpleNamespace(forward=None)
    calls, missing = make(shape, "flashcute", "other", other=module)
    windows_only = "of the options, a file of --peer-module has windows only"
    no_function = "its file has no forward_local(q, k, v, left, right)"
    assert set(calls) == {"flashcute"}
    assert missing == {"other": windows_only if shape != window else no_function}


def test_a_file_that_returns_something_else_is_missing():
    module = types.SimpleNamespace(forward_local=lambda q, *_: lambda: (q, None))
    calls, missing = make(BY_FAMILY["window"], "other", other=module)
    assert calls == {} and "expected a tensor" in missing["other"]


def test_a_peer_without_the_option_names_it():
    reasons = {
        ("fa2", "softcap"): "no softcap",
        ("fa3", "sinks"): "no sinks",
        ("fa3", "alibi"): "no ALiBi",
        ("fa3", "dropout"): "no dropout",
        ("flex", "dropout"): "no dropout",
        ("flex", "sinks"): "no argument for sinks",
        ("flex", "ragged"): "no argument for packed sequences",
        ("cudnn", "window"): "takes no option",
    }
    for (peer, family), reason in reasons.items():
        calls, missing = make(BY_FAMILY[family], peer)
        assert calls == {} and reason in missing[peer]


def test_what_flashcute_does_not_support_is_missing_with_its_reason(monkeypatch):
    shape, asked = BY_FAMILY["softcap"], []

    def supports(**arguments):
        asked.append(arguments)
        return Support(False, ("expected no softcap on CUDA", "nor ALiBi"))

    monkeypatch.setattr(option_peers, "supports", supports)
    calls, missing = make(shape, "flashcute", "plain", "torch")
    assert set(calls) == {"plain", "torch"}
    assert missing == {"flashcute": "expected no softcap on CUDA; nor ALiBi"}
    (arguments,) = asked
    assert (arguments["softcap"], arguments["causal"]) == (50.0, True)
    assert make(shape, "torch")[1] == {}


@pytest.mark.parametrize("family", BY_FAMILY)
def test_support_is_asked_about_each_option(family, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        option_peers, "supports", lambda **arguments: asked.update(arguments) or Support(True, ())
    )
    shape = BY_FAMILY[family]
    make(shape, "torch")
    given = {
        "window": asked["window_size"] != (-1, -1),
        "sinks": asked["sinks"] is not None,
        "softcap": asked["softcap"] != 0.0,
        "alibi": asked["alibi_slopes"] is not None,
        "dropout": asked["dropout_p"] != 0.0,
        "ragged": asked["cu_seqlens"] is not None,
    }
    assert [name for name, is_given in given.items() if is_given] == [family]
    assert (asked["head_dim"], asked["num_heads"], asked["num_heads_k"]) == (16, 8, 4)


def test_an_error_of_flashcute_is_raised(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("broken")

    monkeypatch.setattr(option_peers, "flash_attn_func", broken)
    with pytest.raises(RuntimeError, match="broken"):
        make(BY_FAMILY["sinks"], "flashcute")


def test_the_sweep_has_no_peers_of_options():
    q, k, v = bm.make_qkv(bm.Shape(1, 8, 8, 2, 2, 16, True), torch.float32, "cpu")
    calls, missing = peers.make(q, k, v, True, ("plain", "flex"))
    assert calls == {}
    assert all("no contender on such shapes" in reason for reason in missing.values())


def test_kernels_of_calls_without_options_are_built_ahead(monkeypatch):
    """Else each would be built by its first call, one after the other."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    gpu = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: gpu)

    def configs(name, *names):
        variant = Variant("bf16", OPTIONS[name])
        return command.configs_of([[variant]], "fwd", names)

    (with_softcap,) = configs("softcap-d256", "flashcute", "fa3")
    assert with_softcap.softcap
    first, second = configs("softcap-d256", "flashcute", "plain")
    assert (first, second.softcap, second.head_dim) == (with_softcap, False, 256)
    dense = bm.Shape(16, 1024, 1024, 12, 12, 64, False).problem("bf16")
    ragged = configs("ragged-16-of-1024-d64-full", "plain")
    assert heuristics.choose_fwd(dense, (9, 0)) in ragged
    for name in ("window-127-d64-8k", "ragged-512-short-d64-full"):
        assert len(configs(name, "plain")) == 1, name
