"""What a rank computes: it merges parts, and has a part's gradient in tiles or by the operator."""

from __future__ import annotations

import operator

import pytest
import torch

from flashcute import flash_attn_func
from flashcute.distributed import local
from flashcute.distributed.zigzag import Piece
from flashcute.reference import attention_ref

ALL = slice(0, 24)


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 24, 4, 16), (2, 24, 2, 16), (2, 24, 2, 16), (2, 24, 4, 16)]
    q, k, v, dout = (torch.randn(x, generator=generator).to(dtype) for x in shapes)
    return q, k, v, dout, torch.randn(2, 4, 24, generator=generator)


def gradients(q, k, v, dout, dlse, **options):
    """Returns output, log-sum-exp and gradients by autograd of the reference, in float64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse, _ = attention_ref(*leaves, upcast=torch.float64, **options)
    found = torch.autograd.grad((out, lse), leaves, (dout.double(), dlse.double()))
    return out.detach(), lse.detach(), found


@pytest.mark.parametrize("max_scores", [1, 2**12, 2**22])
def test_the_gradient_on_the_cpu_in_any_tiles(monkeypatch, max_scores):
    monkeypatch.setattr(local, "_MAX_SCORES", max_scores)
    *tensors, dlse = inputs()
    options = {"causal": False, "window_size": (7, 2)}
    out, lse, expected = gradients(*tensors, dlse, **options)
    q, k, v, dout = tensors
    piece = Piece(ALL, ALL, False, (7, 2))
    found = local.backward_on_cpu(piece, dout, q, k, v, out.float(), lse.float(), dlse, 0.25)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y.float(), rtol=1e-4, atol=1e-5)


def test_the_gradient_of_parts_adds_up(monkeypatch):
    *tensors, dlse = inputs()
    q, k, v, dout = tensors
    out, lse, expected = gradients(*tensors, dlse)
    gradient = local.Gradient(dout, q, out.float(), lse.float(), dlse, 0.25, False)
    dq, dk, dv = local.Sum(q, 2), torch.zeros_like(k), torch.zeros_like(v)
    for keys in (slice(10, 24), slice(0, 10)):
        for rows in (slice(0, 5), slice(5, 24)):
            found = gradient.of(Piece(rows, keys, False, (-1, -1)), k, v)
            dq.add(rows, found[0])
            dk[:, keys] += found[1]
            dv[:, keys] += found[2]
    for x, y in zip((dq.finish(), dk, dv), expected, strict=True):
        torch.testing.assert_close(x, y.float(), rtol=1e-4, atol=1e-5)


def test_float64_is_merged_and_differentiated_as_exactly_as_float32():
    """The log-sum-exp of a call is float32 for float64 tensors, too: see docs/distributed.md."""
    q, k, v, dout, dlse = inputs(torch.float64)
    expected_out, _, expected = gradients(q, k, v, dout, dlse)
    result = local.Result(q)
    for keys in (slice(0, 10), slice(10, 24)):
        piece = Piece(ALL, keys, False, (-1, -1))
        result.add(ALL, *local.attend(piece, q, k, v, 0.25))
    assert result.out.dtype == torch.float64 and result.lse.dtype == torch.float32
    torch.testing.assert_close(result.out, expected_out, rtol=0, atol=1e-6)
    piece = Piece(ALL, ALL, False, (-1, -1))
    found = local.backward_on_cpu(piece, dout, q, k, v, result.out, result.lse, dlse, 0.25)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=5e-6)


@pytest.mark.parametrize(("causal", "window"), [(True, (-1, -1)), (False, (5, 1))])
def test_the_operator_is_called_with_its_arguments(causal, window):
    # Kernels use the lse that they are given. On the CPU the operator computes the forward again,
    # so the piece must hold all keys that its rows see.
    q, k, v, dout, dlse = inputs(torch.bfloat16)
    out, lse, _ = flash_attn_func(
        q, k, v, causal=causal, window_size=window, return_attn_probs=True
    )
    args = Piece(ALL, ALL, causal, window), dout, q, k, v, out, lse, dlse, 0.25
    expected = local.backward_on_cpu(*args)
    for wanted in (7, 7 | 16):
        found = local.backward_by_operator(*args, wanted)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x.float(), y, rtol=0.03, atol=0.03)


def test_rows_that_see_nothing_anywhere_stay_empty():
    q, k, v, *_ = inputs()
    result = local.Result(q)
    nothing = torch.full((2, 4, 10), -torch.inf)
    result.add(slice(0, 10), torch.zeros(2, 10, 4, 16), nothing)
    result.add(slice(0, 10), torch.zeros(2, 10, 4, 16), nothing)
    for keys in (slice(0, 4), slice(4, 24)):
        piece = Piece(slice(10, 24), keys, False, (-1, -1))
        result.add(piece.rows, *local.attend(piece, q, k, v, 0.25))
    assert not result.out[:, :10].any()
    assert (result.lse[:, :, :10] == -torch.inf).all()
    out, lse, _ = attention_ref(q[:, 10:], k, v)
    torch.testing.assert_close(result.out[:, 10:], out)
    torch.testing.assert_close(result.lse[:, :, 10:], lse)


@pytest.mark.parametrize("terms", [1, 2, 3])
@pytest.mark.parametrize("whole_first", [True, False])
def test_sums_round_once(terms, whole_first):
    like = torch.zeros(1, 24, 2, 8, dtype=torch.bfloat16)
    total, exact = local.Sum(like, terms), torch.zeros_like(like, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    for i in range(terms):
        for rows in [ALL] if whole_first and i == 0 else [slice(0, 9), slice(9, 24)]:
            part = torch.randn(like[:, rows].shape, generator=generator).bfloat16()
            exact[:, rows] += part.float()
            total.add(rows, part)
        assert total._total.dtype == (torch.bfloat16 if terms <= 2 else torch.float32)
    assert torch.equal(total.finish(), exact.bfloat16())


def test_a_sum_of_nothing_is_zero():
    like = torch.ones(1, 4, 2, 8, dtype=torch.bfloat16)
    assert torch.equal(local.Sum(like, 0).finish(), torch.zeros_like(like))


def test_one_piece_of_all_rows_is_the_result():
    q = inputs(torch.bfloat16)[0]
    out, lse = torch.ones_like(q), torch.ones(2, 4, 24)
    result = local.Result(q)
    result.add(ALL, out, lse)
    assert all(map(operator.is_, result.finish(), (out, lse)))


def test_memory_of_the_gradient_is_that_of_a_tile(monkeypatch):
    monkeypatch.setattr(local, "_MAX_SCORES", 2**10)
    sizes = []
    exp = torch.exp
    monkeypatch.setattr(torch, "exp", lambda x: sizes.append(x.numel()) or exp(x))
    q = torch.randn(1, 64, 2, 8)
    lse = torch.zeros(1, 2, 64)
    piece = Piece(slice(0, 64), slice(0, 64), True, (-1, -1))
    local.backward_on_cpu(piece, q, q, q, q, q, lse, None, 1.0)
    assert sum(sizes) == 2 * 64 * 64
    assert max(sizes) <= 2**10
