"""What the tolerance rule refuses to compare, each with a message that says the way out."""

import math

import pytest
import torch

from flashcute.oracles import Shape, make_qkv
from flashcute.reference import attention_ref
from flashcute.testing import check_backward, check_forward, compare_backward, compare_forward

Q, K, V = make_qkv(Shape(1, 4, 4, 2, 1, 8), torch.float16)
OUT, LSE, _ = attention_ref(Q, K, V)
GRADIENTS = {"dq": Q, "dk": K, "dv": V}
SINKS = torch.zeros(2)


def check_message(caught, function):
    assert str(caught.value).startswith(f"{function}: expected ")
    assert ", got " in str(caught.value)
    assert "; " in str(caught.value)


@pytest.mark.parametrize("function", [check_forward, compare_forward])
@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"out": OUT.float()}, TypeError, r"q's dtype torch.float16, got out.dtype=torch.float32"),
        ({"out": (OUT, LSE)}, TypeError, r"out to be a torch.Tensor, got out of type tuple"),
        ({"out": OUT.transpose(1, 2)}, ValueError, r"\(1, 4, 2, 8\), got out.shape=\(1, 2, 4, 8"),
        ({"lse": LSE.mT}, ValueError, r"lse of shape \(1, 2, 4\), got lse.shape=\(1, 4, 2\)"),
        ({"lse": 1.0}, TypeError, r"lse to be a torch.Tensor, got lse of type float"),
        ({"q": None}, TypeError, r"q to be a torch.Tensor, got q of type NoneType"),
        ({"v": V[0]}, ValueError, r"heads, head_dim\), got v.shape=\(4, 1, 8\)"),
    ],
)
def test_a_result_is_refused(function, changed, error, match):
    with pytest.raises(error, match=match) as caught:
        function(**{"out": OUT, "lse": LSE, "q": Q, "k": K, "v": V, **changed})
    check_message(caught, "check_forward")


@pytest.mark.parametrize("function", [check_backward, compare_backward])
@pytest.mark.parametrize(
    ("gradients", "changed", "error", "match"),
    [
        ((Q, K, V), {}, TypeError, r"gradients to be a dict, got gradients of type tuple"),
        ({"dq": Q, "dv": V}, {}, ValueError, r"of dq, dk, dv, got gradients of dq, dv; add dk"),
        ({}, {}, ValueError, r"got gradients of nothing; add dq"),
        (GRADIENTS, {"sinks": SINKS}, ValueError, r"dv, dsinks, got .*; add dsinks"),
        ({**GRADIENTS, "dk": None}, {}, TypeError, r"got gradients\['dk'\] of type NoneType"),
        ({**GRADIENTS, "dq": Q.mT}, {}, ValueError, r"got gradients\['dq'\].shape=\(1, 4, 8, 2\)"),
        ({**GRADIENTS, "dv": V.float()}, {}, ValueError, r"\['dv'\].*torch.float16.*torch.float32"),
        ({**GRADIENTS, "dv": V.to("meta")}, {}, ValueError, r"\['dv'\].* on cpu, got .* on meta"),
        (
            {**GRADIENTS, "dsinks": SINKS[:1]},
            {"sinks": SINKS},
            ValueError,
            r"\['dsinks'\] of shape \(2,\).*, got .*\(1,\)",
        ),
        (GRADIENTS, {"dout": Q[:, :3]}, ValueError, r"dout of shape \(1, 4, 2, 8\).*\(1, 3, 2, 8"),
        (GRADIENTS, {"dout": None}, TypeError, r"dout to be a torch.Tensor, got dout of type None"),
        (GRADIENTS, {"dlse": LSE.mT}, ValueError, r"dlse of shape \(1, 2, 4\).*\(1, 4, 2\)"),
        (GRADIENTS, {"q": [1.0]}, TypeError, r"q to be a torch.Tensor, got q of type list"),
        (GRADIENTS, {"sinks": [0, 0]}, TypeError, r"sinks to be a torch.Tensor, got .*list"),
    ],
)
def test_gradients_are_refused(function, gradients, changed, error, match):
    with pytest.raises(error, match=match) as caught:
        function(gradients, **{"q": Q, "k": K, "v": V, "dout": OUT, **changed})
    check_message(caught, "check_backward")


def test_a_gradient_of_sinks_may_have_their_dtype_or_float32():
    for dtype in (torch.float16, torch.float32):
        gradients = {**GRADIENTS, "dsinks": torch.full((2,), math.nan, dtype=dtype)}
        reports = compare_backward(gradients, Q, K, V, OUT, sinks=SINKS.half())
        assert reports["dsinks"].misplaced == 2
