"""The support table agrees with what the interface does."""

from __future__ import annotations

import pytest
import torch
from bad_input import tensors

import flashcute
from flashcute import support

# A value of each argument that asks for the feature: for supports() and for the function.
ASKING = {
    "causal": True,
    "deterministic": True,
    "return_attn_probs": True,
    "requires_grad": True,
    "dropout_p": 0.2,
    "window_size": (2, 0),
    "softcap": 15.0,
    "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
    "num_heads_k": 2,
}


def _call(device: str, argument: str) -> object:
    q, k, v = tensors(device)
    value = ASKING[argument]
    if argument == "requires_grad":
        return flashcute.flash_attn_func(q.requires_grad_(), k, v)
    if argument == "num_heads_k":
        assert (q.shape[2], k.shape[2]) == (4, value)
        return flashcute.flash_attn_func(q, k, v)
    if argument == "alibi_slopes":
        value = value.to(device)
    return flashcute.flash_attn_func(q, k, v, **{argument: value})


@pytest.mark.parametrize("feature", support.FEATURES, ids=lambda feature: feature.argument)
def test_each_feature_works_or_is_refused_as_the_table_says(feature: support.Feature) -> None:
    asked = {"num_heads": 4, feature.argument: ASKING[feature.argument]}
    assert flashcute.supports(device="cpu", **asked)
    _call("cpu", feature.argument)
    answer = flashcute.supports(device="cuda", **asked)
    assert bool(answer) == answer.ok == feature.cuda == (not answer.reasons)
    if feature.cuda:
        _call("meta", feature.argument)
        return
    with pytest.raises(NotImplementedError) as raised:
        _call("meta", feature.argument)
    # The same words in both places.
    assert str(raised.value) == f"flash_attn_func: {answer.reasons[0]}"


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
        dtype=torch.float32, head_dim=300, num_heads=3, num_heads_k=2, softcap=1.5, dropout_p=0.1
    )
    text = " | ".join(answer.reasons)
    for part in (
        "got dtype=torch.float32",
        "got head_dim=300",
        "got num_heads=3 and num_heads_k=2",
        "got softcap=1.5",
        "got dropout_p=0.1",
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
        (line,) = (line for line in lines if f" {feature.title} |" in line)
        assert ("not yet" in line) == (not feature.cuda)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dropout_p", 2.0),
        ("dropout_p", "0.1"),
        ("window_size", (-2, 0)),
        ("window_size", 3),
        ("softcap", -1.0),
        ("softmax_scale", float("nan")),
    ],
)
def test_what_is_wrong_everywhere_is_not_supported(device, option, value):
    answer = flashcute.supports(device=device, **{option: value})
    assert not answer.ok
    assert any(option in reason for reason in answer.reasons)


def test_scale_that_only_the_reference_takes():
    assert flashcute.supports(device="cpu", softmax_scale=-1.0).ok
    answer = flashcute.supports(device="cuda", softmax_scale=-1.0)
    assert not answer.ok and "softmax_scale" in answer.reasons[0]
