"""The operator with all options: schema, fake, CPU implementation and gradient."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from flashcute import ops
from flashcute.dropout import dropout_mask
from flashcute.reference import attention_ref

# Never edit an old entry: a saved program or a caller may hold to it. New arguments go to the end,
# with defaults.
FROZEN_SCHEMAS = (
    "flashcute::attend(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal,"
    " int window_left, int window_right, Tensor? sinks) -> (Tensor out, Tensor softmax_lse)",
    "flashcute::attend(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal,"
    " int window_left, int window_right, Tensor? sinks, float softcap=0.,"
    " Tensor? alibi_slopes=None) -> (Tensor out, Tensor softmax_lse)",
    "flashcute::attend(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal,"
    " int window_left, int window_right, Tensor? sinks, float softcap=0.,"
    " Tensor? alibi_slopes=None, bool deterministic=False) -> (Tensor out, Tensor softmax_lse)",
    "flashcute::attend(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal,"
    " int window_left, int window_right, Tensor? sinks, float softcap=0.,"
    " Tensor? alibi_slopes=None, bool deterministic=False, Tensor? rng_state=None,"
    " float dropout_p=0.) -> (Tensor out, Tensor softmax_lse)",
)
STATE = torch.tensor([5, 7])
# The operator's arguments after the scale; shapes stand for tensors.
OPTIONS = (
    (False, -1, -1, None),
    (True, -1, -1, (4,)),
    (True, 3, 0, None),
    (False, 2, 4, (4,)),
    (False, -1, 1, None),
    (True, -1, -1, None, 1.5),
    (False, 4, -1, None, 0.0, (4,)),
    (False, -1, -1, (4,), 0.5, (2, 4)),
    (True, -1, -1, None, 0.0, None, False, STATE, 0.25),
    (False, 4, -1, (4,), 0.5, (2, 4), True, STATE, 0.5),
)
options = pytest.mark.parametrize("options", OPTIONS, ids=str)


def _inputs(options: tuple) -> tuple[tuple[torch.Tensor, ...], tuple]:
    """Returns q, k, v, and the options with tensors in place of shapes."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 9, 4, 16), (2, 11, 2, 16), (2, 11, 2, 16)
    qkv = tuple(torch.randn(shape, generator=generator) for shape in shapes)
    made = (torch.randn(x, generator=generator) if isinstance(x, tuple) else x for x in options)
    return qkv, tuple(made)


def _expected(qkv: tuple, scale: float, options: tuple):
    defaults = 0.0, None, False, None, 0.0
    options = (*options, *defaults[len(options) - 4 :])
    causal, left, right, sinks, softcap, slopes, _, state, dropout_p = options
    mask = None if state is None else dropout_mask(state, 2, 4, 9, 11, dropout_p)
    return attention_ref(
        *qkv, softmax_scale=scale, causal=causal, window_size=(left, right), sinks=sinks,
        softcap=softcap, alibi_slopes=slopes, dropout_p=dropout_p, dropout_mask=mask,
    )  # fmt: skip


def _op():
    ops.load()
    return torch.ops.flashcute.attend.default


def test_schema_is_the_frozen_one() -> None:
    for frozen in map(torch._C.parse_schema, FROZEN_SCHEMAS):
        assert _op()._schema.is_backward_compatible_with(frozen)
    assert str(_op()._schema) == str(frozen), "compatible, but add the new schema to the frozen"


@options
def test_cpu_implementation(options) -> None:
    qkv, (causal, left, right, *others) = _inputs(options)
    out, lse = ops.attend(*qkv, 0.3, causal, (left, right), *others)
    expected = _expected(qkv, 0.3, (causal, left, right, *others))
    torch.testing.assert_close(out, expected.out)
    torch.testing.assert_close(lse, expected.lse)


@options
def test_opcheck(options) -> None:
    qkv, options = _inputs(options)
    results = torch.library.opcheck(_op(), (*qkv, 0.25, *options))
    assert set(results.values()) == {"SUCCESS"}


@options
def test_gradient_on_the_cpu(options) -> None:
    qkv, options = _inputs(options)
    tensors = [t for t in (*qkv, *options) if isinstance(t, torch.Tensor) and t is not STATE]
    leaves = [t.requires_grad_() for t in tensors]
    out, lse = _op()(*qkv, 0.25, *options)
    expected = _expected(qkv, 0.25, options)
    got = torch.autograd.grad(out.square().sum() + lse.sin().sum(), leaves)
    wanted = torch.autograd.grad(expected.out.square().sum() + expected.lse.sin().sum(), leaves)
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize(
    ("change", "error", "pattern"),
    [
        ({"window_left": -2}, ValueError, r"flashcute::attend: expected window_size .*\(-2, 0\)"),
        ({"sinks": torch.zeros(3)}, ValueError, r"flashcute::attend: expected sinks of shape"),
        ({"sinks": torch.zeros(4).double()}, TypeError, r"flashcute::attend: expected sinks of dt"),
        ({"softcap": -1.0}, ValueError, r"flashcute::attend: expected a finite softcap"),
        (
            {"alibi_slopes": torch.zeros(3, 4)},
            ValueError,
            r"flashcute::attend: expected alibi_slopes of shape \(4,\) or \(2, 4\)",
        ),
        (
            {"dropout_p": 1.0, "rng_state": STATE},
            ValueError,
            r"flashcute::attend: expected 0 <= dropout_p <= 1 - 2\*\*-16, got dropout_p=1.0; pass",
        ),
        (
            {"dropout_p": 0.5},
            ValueError,
            r"expected rng_state with dropout_p > 0, got rng_state=None with dropout_p=0.5; pass",
        ),
        (
            {"dropout_p": 0.5, "rng_state": STATE.int()},
            TypeError,
            r"expected rng_state of dtype torch.int64, got rng_state.dtype=torch.int32; pass",
        ),
        (
            {"dropout_p": 0.5, "rng_state": STATE[:1]},
            ValueError,
            r"expected rng_state of shape \(2,\), got rng_state.shape=\(1,\); pass",
        ),
        (
            {"dropout_p": 0.5, "rng_state": STATE.to("meta")},
            ValueError,
            r"expected rng_state on cpu as q, got rng_state.device=meta; move",
        ),
    ],
)
def test_wrong_options_are_refused(change, error, pattern) -> None:
    qkv, _ = _inputs(())
    arguments = {"window_left": -1, "window_right": 0, "sinks": None} | change
    with pytest.raises(error, match=pattern):
        _op()(*qkv, 0.25, False, **arguments)


def _of_q(name: str, device: str):
    """Returns an operator as a function of q alone, and a q."""
    ops.load()
    op = getattr(getattr(torch.ops, ops.NAMESPACE), name)
    dtype = torch.float64 if device == "cpu" else torch.half
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 5, 2, 8, dtype=dtype, generator=generator).to(device) for _ in range(3)
    )
    cu = torch.tensor([0, 5], dtype=torch.int32, device=device)
    lengths = cu, cu, None, None, 5, 5
    return {
        "fwd": lambda q: op(q, k, v, 0.3, False),
        "attend": lambda q: op(q, k, v, 0.3, False, 2, 1, None),
        "attend_varlen": lambda q: op(q[0], k[0], v[0], *lengths, 0.3, False, -1, -1, None),
    }[name], q


operators = pytest.mark.parametrize("name", ["fwd", "attend", "attend_varlen"])


@operators
def test_forward_mode_derivative_on_the_cpu(name) -> None:
    function, q = _of_q(name, "cpu")
    direction = torch.ones_like(q)
    with forward_ad.dual_level():
        outputs = function(forward_ad.make_dual(q, direction))
        tangents = [forward_ad.unpack_dual(x).tangent for x in outputs]
    step = 1e-6
    ends = [function(q + sign * step * direction)[0] for sign in (1, -1)]
    torch.testing.assert_close(tangents[0], (ends[0] - ends[1]) / (2 * step), atol=1e-8, rtol=1e-6)
    assert tangents[1].abs().max() > 0.01
    with pytest.raises(NotImplementedError, match=f"::{name}: expected no .* call flash_attn_"):
        torch.func.jvp(function, (q,), (direction,))


@operators
def test_forward_mode_derivative_is_refused_elsewhere(name) -> None:
    function, q = _of_q(name, "meta")
    message = f"flashcute::{name}: expected no derivative in forward mode .* got q with a tangent"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(function, (q,), (q,))
    with torch.no_grad(), forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match=message):
            function(forward_ad.make_dual(q, q))
        assert function(q)[0].device.type == "meta"
