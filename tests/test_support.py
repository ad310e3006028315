"""The support table agrees with what the interface does."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest
import torch
from bad_input import CASES, Case, tensors
from bad_input_varlen import VARLEN, arguments
from test_checks_kvcache import CACHE
from test_checks_kvcache import arguments as cache_arguments
from torch._subclasses import FakeTensorMode

import flashcute
from flashcute import support

# For each argument a value that asks for its feature, from supports() and from the function.
ASKING = {
    "causal": True,
    "deterministic": True,
    "return_attn_probs": True,
    "requires_grad": True,
    "dropout_p": 0.2,
    "window_size": (2, 0),
    "softcap": 15.0,
    "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
    "sinks": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
    "num_heads_k": 2,
    "cu_seqlens": True,
    "k_cache": True,
    "block_table": True,
    "alibi_slopes with requires_grad": True,
    "block_table with requires_grad": True,
}


def _call(device: str, argument: str) -> object:
    q, k, v = tensors(device)
    value = ASKING[argument]
    if argument.partition(" ")[0] in ("k_cache", "block_table"):
        return _call_with_cache(device, argument)
    if argument == "cu_seqlens":
        return _call_varlen(device)
    if argument == "alibi_slopes with requires_grad":
        slopes = ASKING["alibi_slopes"].to(device).requires_grad_()
        return flashcute.flash_attn_func(q, k, v, alibi_slopes=slopes)
    if argument == "requires_grad":
        return flashcute.flash_attn_func(q.requires_grad_(), k, v)
    if argument == "num_heads_k":
        assert (q.shape[2], k.shape[2]) == (4, value)
        return flashcute.flash_attn_func(q, k, v)
    if argument in ("alibi_slopes", "sinks"):
        value = value.to(device)
    return flashcute.flash_attn_func(q, k, v, **{argument: value})


def _call_varlen(device: str) -> object:
    # These shapes have no kernel, which meta tensors do not notice, so fake CUDA tensors are used.
    cuda = device == "meta"
    with FakeTensorMode() if cuda else contextlib.nullcontext():
        given = arguments(VARLEN, "cuda" if cuda else device)
        return flashcute.flash_attn_varlen_func(**given)


def _call_with_cache(device: str, argument: str) -> object:
    cuda = device == "meta"
    function = CACHE if argument == "k_cache" else VARLEN
    with FakeTensorMode() if cuda else contextlib.nullcontext():
        given = cache_arguments(function, "cuda" if cuda else device, argument != "k_cache")
        if argument.endswith("requires_grad"):
            given["q"].requires_grad_()
        return getattr(flashcute, function)(**given)


@pytest.mark.parametrize("feature", support.FEATURES, ids=lambda feature: feature.argument)
def test_each_feature_works_or_is_refused_as_the_table_says(feature: support.Feature) -> None:
    arguments_of = feature.argument.split(" with ")
    asked = {"num_heads": 4} | {name: ASKING[name] for name in arguments_of}
    if feature.argument == "alibi_slopes with requires_grad":
        asked["alibi_slopes"] = asked["alibi_slopes"].clone().requires_grad_()
    assert flashcute.supports(device="cpu", **asked)
    _call("cpu", feature.argument)
    answer = flashcute.supports(device="cuda", **asked)
    assert bool(answer) == answer.ok == feature.cuda == (not answer.reasons)
    if feature.cuda:
        _call("meta", feature.argument)
        return
    with pytest.raises(NotImplementedError) as raised:
        _call("meta", feature.argument)
    # supports() and the function give the same reason.
    functions = {"cu_seqlens": VARLEN, "block_table": VARLEN, "k_cache": CACHE}
    function = functions.get(arguments_of[0], "flash_attn_func")
    assert str(raised.value) == f"{function}: {answer.reasons[0]}"


def test_every_option_of_the_interface_has_a_row() -> None:
    assert {feature.argument for feature in support.FEATURES} == set(ASKING)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    assert flashcute.supports(device="cpu", dtype=dtype)
    flashcute.flash_attn_func(*tensors("cpu", dtype=dtype))
    if flashcute.supports(dtype=dtype):
        flashcute.flash_attn_func(*tensors("meta", dtype=dtype))
    else:
        with pytest.raises(TypeError):
            flashcute.flash_attn_func(*tensors("meta", dtype=dtype))


def test_reasons_name_argument_and_value() -> None:
    answer = flashcute.supports(
        dtype=torch.float32, head_dim=300, num_heads=3, num_heads_k=2, softcap=1e38, dropout_p=1.0
    )
    text = " | ".join(answer.reasons)
    for part in (
        "got dtype=torch.float32",
        "got head_dim=300",
        "got num_heads=3 and num_heads_k=2",
        "got softcap=1e+38 with softmax_scale=",
        "got dropout_p=1.0",
    ):
        assert part in text
    assert len(answer.reasons) == 5
    assert not flashcute.supports(device="cpu", dtype=torch.int32)
    assert not flashcute.supports(device="cpu", head_dim=0)
    assert "got device='meta'" in flashcute.supports(device="meta").reasons[0]


def test_capabilities() -> None:
    assert flashcute.supports(capability=(9, 0))
    assert flashcute.supports(capability=(8, 6))
    assert "got capability=(7, 5)" in flashcute.supports(capability=(7, 5)).reasons[0]


def test_matrix_is_a_table_of_every_feature() -> None:
    lines = flashcute.support_matrix().splitlines()
    assert all(line.count("|") == 4 for line in lines)
    for feature in support.FEATURES:
        (line,) = (line for line in lines if line.startswith(f"| {feature.title} |"))
        assert ("not yet" in line) == (not feature.cuda)


ASKED = [(case, case.asked_of_supports()) for case in CASES]
ASKED = [(case, asked) for case, asked in ASKED if asked is not None]


@pytest.mark.parametrize(("case", "asked"), ASKED, ids=lambda value: getattr(value, "name", ""))
def test_agrees_with_the_call_and_says_the_same(case: Case, asked: dict) -> None:
    for device, same_checks in (("cpu", "cpu"), ("cuda", "meta")):
        answer = flashcute.supports(device=device, **asked)
        assert bool(answer) == (case.error_on(same_checks) is None), answer
        if answer or case.sizes:  # a call's error names tensors, not sizes
            continue
        function, args, options = case.arguments(same_checks)
        with pytest.raises(case.error_on(same_checks)) as raised:
            function(*args, **options)
        assert f"flash_attn_func: {answer.reasons[0]}" == str(raised.value)


# Arguments of supports() alone, which a call takes from its tensors, with wrong values.
WRONG = [
    *(("head_dim", value) for value in (64.5, "64", None, True, 0, -8, 2**63, 10**5000, [64])),
    *(("num_heads", value) for value in (None, 0, -1, 2.0, "8", torch.tensor(8), 2**70)),
    *(("num_heads_k", value) for value in (0, 3, 16, "2", 2.0, False)),
    *(("device", value) for value in ("foo", "", None, 3.5, "cuda:x", "meta", "mps", -1, object())),
    *(("device", value) for value in (["cuda"], torch.device("meta"), torch.zeros(1), 2**70)),
    *(("dtype", value) for value in ("float16", None, np.float16, torch.int8, torch.complex64)),
    *(("dtype", value) for value in (np.zeros(2), float, torch.quint8)),
    *(("capability", value) for value in (9, 9.0, "90", (9,), (9, 0, 0), ("9", "0"))),
    *(("requires_grad", value) for value in (1, None, "no", torch.tensor(True))),
    *(("alibi_slopes", value) for value in ([0.5], 1, "yes", False, np.zeros(4))),
    *(("alibi_slopes", torch.zeros(8).to(dtype)) for dtype in (torch.float64, torch.bfloat16)),
    *((name, torch.zeros(4).to_sparse()) for name in ("alibi_slopes", "sinks")),
    *(("cu_seqlens", value) for value in ([0, 1], 1, "yes", False)),
    *((name, value) for name in ("k_cache", "block_table") for value in ([0, 1], "yes", False)),
    *(("sinks", value) for value in ([0.5], 1, "yes", False, np.zeros(4))),
]


@pytest.mark.parametrize(
    ("name", "value"), WRONG, ids=[f"{n}-{i}" for i, (n, _) in enumerate(WRONG)]
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_wrong_value_is_a_reason_and_none_an_exception(device, name, value) -> None:
    asked = {"device": device, "num_heads": 8, name: value}
    answer = flashcute.supports(**asked)
    assert not answer
    reason = answer.reasons[0]
    assert re.match(rf"expected .*{name}.*, got .*{name}.*; .+", reason), reason
    assert "\n" not in reason and len(reason) < 400


def test_numpy_scalars_count_as_pythons() -> None:
    sizes = {"head_dim": np.int64(64), "num_heads": np.int32(8), "num_heads_k": np.uint8(2)}
    options = {
        "causal": np.True_,
        "softmax_scale": np.float32(0.5),
        "window_size": (np.int8(-1),) * 2,
    }
    assert flashcute.supports(**sizes, **options, capability=(np.int64(9), 0))
    assert flashcute.supports(device="cpu", dropout_p=np.float16(0.5), requires_grad=np.True_)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gradient_through_a_cache(device: str) -> None:
    answer = flashcute.supports(device=device, k_cache=True, requires_grad=True)
    assert "expected no gradient through a cache, on any device" in answer.reasons[0]
    advised = True if "flash_attn_varlen_func" in answer.reasons[0] else None
    assert flashcute.supports(device=device, requires_grad=True, cu_seqlens=advised)
    call = cache_arguments(CACHE, "cpu") | {"q": torch.ones(3, 2, 4, 16).half().requires_grad_()}
    with pytest.raises(NotImplementedError) as raised:
        flashcute.flash_attn_with_kvcache(**call)
    said = answer.reasons[0].replace("got requires_grad=True", "got q.requires_grad=True")
    assert str(raised.value) == f"{CACHE}: {said}"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("shape", [(3,), (), (4, 8), (2, 3), (2, 4, 1)], ids=str)
def test_slopes_of_other_shapes(device, shape) -> None:
    answer = flashcute.supports(device=device, num_heads=4, alibi_slopes=torch.zeros(shape))
    assert answer.reasons == (
        f"expected alibi_slopes of shape (4,) or (batch, 4), got alibi_slopes.shape={shape}; "
        "pass one slope per query head",
    )
    assert flashcute.supports(device="cpu", num_heads=4, alibi_slopes=torch.zeros(7, 4))


def test_wrong_slopes_are_one_reason() -> None:
    for value in ("x", torch.zeros(3), torch.zeros(8, dtype=torch.float64)):
        answer = flashcute.supports(device="cuda", num_heads=8, alibi_slopes=value)
        assert len(answer.reasons) == 1 and "(a tensor)" not in answer.reasons[0]


def test_all_reasons_are_given_at_once() -> None:
    answer = flashcute.supports(
        device="foo", dtype=None, head_dim=0, num_heads=None, causal=1, softcap=1e39, window_size=3
    )
    named = ("device", "head_dim", "num_heads", "causal", "softcap", "window_size")
    assert len(answer.reasons) == len(named)
    assert all(f"got {name}=" in reason for name, reason in zip(named, answer.reasons, strict=True))


def test_scale_that_only_the_reference_takes():
    assert flashcute.supports(device="cpu", softmax_scale=-1.0).ok
    ways_out = {
        0.0: "pass torch.zeros_like(q) and softmax_scale=1.0, ",
        -0.5: "pass -q and softmax_scale=0.5, ",
        1e-40: "pass 1e-40 * q and softmax_scale=1.0, ",
        -1e-40: "pass -1e-40 * q and softmax_scale=1.0, ",
    }
    for scale, way_out in ways_out.items():
        answer = flashcute.supports(device="cuda", softmax_scale=scale)
        assert not answer.ok and f"got softmax_scale={scale}; {way_out}" in answer.reasons[0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("name", "tensor", "pattern"),
    [
        ("sinks", torch.zeros(3), r"sinks of shape \(4,\), got sinks.shape=\(3,\)"),
        ("sinks", torch.zeros(4, dtype=torch.int32), "got sinks.dtype=torch.int32"),
        ("sinks", torch.zeros(4, dtype=torch.float64), "got sinks.dtype=torch.float64"),
        ("cu_seqlens", torch.zeros(3), "got cu_seqlens.dtype=torch.float32; cast it with .int()"),
        ("cu_seqlens", torch.zeros(2, 2).int(), r"got cu_seqlens.shape=\(2, 2\)"),
        ("cu_seqlens", torch.zeros(0).int(), r"got cu_seqlens.shape=\(0,\)"),
        ("block_table", torch.zeros(2, 2), "got block_table.dtype=torch.float32"),
        ("block_table", torch.zeros(2).int(), r"\(batch, max_pages\), got .*=\(2,\)"),
        ("k_cache", torch.zeros(3), r"seqlen_cache, heads, head_dim\), got k_cache.shape=\(3,\)"),
    ],
)
def test_a_tensor_is_checked_as_the_call_checks_it(device, name, tensor, pattern) -> None:
    answer = flashcute.supports(device=device, num_heads=4, **{name: tensor})
    assert len(answer.reasons) == 1
    assert re.search(f"^expected .*{pattern}", answer.reasons[0]), answer.reasons
    assert flashcute.supports(device="cpu", num_heads=4, sinks=torch.zeros(4)).ok


@pytest.mark.parametrize(
    ("name", "value"),
    [("dropout_p", 0.3), ("cu_seqlens", True)]
    + [(name, True) for name in ("deterministic", "return_attn_probs")],
)
def test_what_the_function_with_a_cache_does_not_take(name, value) -> None:
    answer = flashcute.supports(device="cpu", k_cache=True, **{name: value})
    assert len(answer.reasons) == 1
    shown = "" if name == "cu_seqlens" else f"{value};"
    pattern = rf"^expected no {name} with k_cache, .*, got {name}={shown}"
    assert re.search(pattern, answer.reasons[0])


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"head_dim": 32}, "k_cache of head_dim 32, got 16; ask"),
        ({"num_heads_k": 4}, "k_cache of num_heads_k 4, got 2; ask"),
        ({"dtype": torch.bfloat16}, "k_cache of dtype torch.bfloat16, got torch.float16; ask"),
    ],
    ids=str,
)
def test_a_cache_of_other_heads(change, pattern) -> None:
    k_cache = torch.zeros(3, 8, 2, 16).half()
    asked = {"device": "cpu", "dtype": torch.float16, "head_dim": 16, "num_heads": 4}
    asked |= {"num_heads_k": 2, "k_cache": k_cache}
    assert flashcute.supports(**asked).ok
    answer = flashcute.supports(**asked | change)
    assert len(answer.reasons) == 1 and f"expected {pattern}" in answer.reasons[0], answer.reasons


def test_the_cpu_has_no_capability() -> None:
    assert flashcute.supports(device="cpu", capability=(7, 0)).ok
    assert not flashcute.supports(device="cuda", capability=(7, 0)).ok
