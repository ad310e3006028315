"""Rotary embedding against products of complex numbers in float64."""

from __future__ import annotations

import re

import pytest
import torch

from flashcute.rotary import apply_rotary_emb

F64 = torch.float64
STYLES = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def tables(n: int = 40, pairs: int = 4, dtype=F64) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(
        torch.arange(n, dtype=F64), 100.0 ** -torch.linspace(0, 0.9, pairs).to(F64)
    )
    return angles.cos().to(dtype), angles.sin().to(dtype)


def random(*shape: int, dtype=F64, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=F64, generator=generator).to(dtype)


def turned(x: torch.Tensor, position: int, cos, sin, interleaved: bool) -> torch.Tensor:
    """Rotates one token (h, d), pair by pair: (x + iy) (cos + i sin)."""
    out, n = x.double().clone(), cos.shape[1]
    for pair in range(n):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + n)
        product = torch.complex(x[:, i].double(), x[:, j].double()) * torch.complex(
            cos[position, pair].double(), sin[position, pair].double()
        )
        out[:, i], out[:, j] = product.real, product.imag
    return out


def by_definition(x, positions, cos, sin, interleaved) -> torch.Tensor:
    """Rotates tokens (..., h, d) at ``positions`` (...)."""
    flat = zip(x.flatten(0, -3), positions.flatten().tolist(), strict=True)
    return torch.stack([turned(*token, cos, sin, interleaved) for token in flat]).view(x.shape)


@STYLES
@pytest.mark.parametrize("pairs", [1, 4, 5], ids=lambda n: f"rotary_dim{2 * n}")
@pytest.mark.parametrize("offsets", [0, 3, (0, 7, 30)], ids=str)
def test_is_a_complex_product(interleaved: bool, pairs: int, offsets) -> None:
    x, (cos, sin) = random(3, 6, 2, 10), tables(pairs=pairs)
    given = torch.tensor(offsets, dtype=torch.int32) if isinstance(offsets, tuple) else offsets
    got = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=given)
    positions = torch.arange(6) + torch.as_tensor(offsets).view(-1, 1).expand(3, 1)
    expected = by_definition(x, positions, cos, sin, interleaved)
    torch.testing.assert_close(got, expected, atol=1e-14, rtol=1e-14)
    assert torch.equal(got[..., 2 * pairs :], x[..., 2 * pairs :])


@STYLES
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed_sequences_are_sequences(interleaved: bool, index: torch.dtype) -> None:
    lengths, offsets = (4, 0, 1, 5), (0, 3, 20, 9)
    x, (cos, sin) = random(12, 2, 8), tables()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(index)
    given = torch.tensor(offsets, dtype=index)
    for shift in (0, 2, given):
        got = apply_rotary_emb(
            *(x, cos, sin, interleaved), seqlen_offsets=shift, cu_seqlens=cu_seqlens, max_seqlen=5
        )
        parts = x.split([*lengths, 2])
        shifts = [shift] * 4 if isinstance(shift, int) else offsets
        for part, n, y in zip(parts, shifts, got.split([*lengths, 2]), strict=False):
            alone = apply_rotary_emb(part[None], cos, sin, interleaved, seqlen_offsets=n)[0]
            assert torch.equal(y, alone)
        assert torch.equal(got[10:], x[10:])  # tokens of no sequence
    none = torch.zeros(1, dtype=index)
    assert torch.equal(apply_rotary_emb(x, cos, sin, cu_seqlens=none), x)


@STYLES
def test_conjugate_undoes_it_and_is_its_gradient(interleaved: bool) -> None:
    x, (cos, sin) = random(2, 5, 3, 8).requires_grad_(), tables()
    there = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=2)
    back = apply_rotary_emb(there, cos, sin, interleaved, seqlen_offsets=2, conjugate=True)
    torch.testing.assert_close(back, x, atol=1e-14, rtol=1e-14)
    grad = random(2, 5, 3, 8, seed=2)
    (got,) = torch.autograd.grad(there, x, grad)
    expected = apply_rotary_emb(grad, cos, sin, interleaved, seqlen_offsets=2, conjugate=True)
    torch.testing.assert_close(got, expected, atol=1e-14, rtol=1e-14)


@STYLES
def test_gradients_of_input_and_tables(interleaved: bool) -> None:
    x, (cos, sin) = random(1, 3, 1, 6), tables(5, 2)
    inputs = [y.requires_grad_() for y in (x, cos, sin)]
    for conjugate in (False, True):

        def call(x, cos, sin, conjugate=conjugate):
            return apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=1, conjugate=conjugate)

        assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(call, inputs)


@STYLES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("table_dtype", [None, torch.float32])
def test_rounds_once(interleaved: bool, dtype, table_dtype) -> None:
    x, (cos, sin) = random(2, 4, 2, 8, dtype=dtype), tables(dtype=table_dtype or dtype)
    got = apply_rotary_emb(x, cos, sin, interleaved)
    assert got.dtype == dtype
    exact = apply_rotary_emb(x.float(), cos.float(), sin.float(), interleaved)
    assert torch.equal(got, exact.to(dtype))
    positions = torch.arange(4).expand(2, 4)
    expected = by_definition(x, positions, cos, sin, interleaved)
    torch.testing.assert_close(exact.double(), expected, atol=1e-6, rtol=1e-6)


def test_in_place_writes_into_any_strides() -> None:
    cos, sin = tables()
    base = random(2, 3, 6, 8)
    x = base.transpose(1, 2)[:, ::2]
    expected = apply_rotary_emb(x, cos, sin, seqlen_offsets=1)
    before = base.clone()
    assert torch.equal(base, before) and expected.is_contiguous()
    assert apply_rotary_emb(x, cos, sin, False, True, 1) is x
    assert torch.equal(x, expected)
    assert torch.equal(base[:, :, 1::2], before[:, :, 1::2])  # what x leaves out
    y = random(1, 3, 1, 8).requires_grad_()
    z = y * 1
    apply_rotary_emb(z, cos, sin, inplace=True).sum().backward()
    assert y.grad.isfinite().all() and not torch.equal(y.grad, torch.ones_like(y))


def test_compiled_and_under_vmap() -> None:
    torch._dynamo.reset()
    cos, sin = tables(dtype=torch.float32)
    x = random(2, 5, 2, 8, dtype=torch.float32)
    offsets, cu = torch.tensor([3, 0]), torch.tensor([0, 2, 5])
    compiled = torch.compile(apply_rotary_emb, backend="aot_eager", fullgraph=True)
    got = compiled(x, cos, sin, seqlen_offsets=offsets)
    assert torch.equal(got, apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets))
    got = compiled(x[0], cos, sin, seqlen_offsets=offsets, cu_seqlens=cu)
    assert torch.equal(got, apply_rotary_emb(x[0], cos, sin, seqlen_offsets=offsets, cu_seqlens=cu))
    each = torch.vmap(lambda x, n: apply_rotary_emb(x[None], cos, sin, seqlen_offsets=n[None])[0])
    assert torch.equal(each(x, offsets), apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets))
    # A compiled function does not read the offsets, so tokens beyond the tables stay unchanged.
    far = compiled(x, cos, sin, seqlen_offsets=torch.tensor([38, 40]))
    assert torch.equal(far[0, :2], apply_rotary_emb(x[:1, :2], cos, sin, seqlen_offsets=38)[0])
    assert torch.equal(far[0, 2:], x[0, 2:]) and torch.equal(far[1], x[1])
    meta = apply_rotary_emb(*(y.to("meta") for y in (x, cos, sin)))
    assert (meta.shape, meta.dtype, meta.device.type) == (x.shape, x.dtype, "meta")


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)], ids=str)
def test_nothing_to_rotate(shape) -> None:
    x = torch.zeros(shape)
    assert apply_rotary_emb(x, *tables(dtype=torch.float32)).shape == shape
    if 0 in shape[:2]:
        assert apply_rotary_emb(x, *tables(0, dtype=torch.float32)).shape == shape


ONES = torch.ones(2, 5, 2, 8)
INT = torch.ones(2, dtype=torch.int32)
WRONG = [
    (TypeError, "x to be a torch.Tensor, got x of type list; convert", {"x": [1.0]}),
    (ValueError, r"x of shape \(batch, seqlen, heads, head_dim\), got x.shape=", {"x": ONES[0]}),
    (ValueError, r"x of shape \(total, heads, head_dim\), got x.shape=", {"cu_seqlens": INT}),
    (TypeError, "x.dtype .*, got x.dtype=torch.int32; cast", {"x": ONES.int()}),
    (TypeError, "cos to be a torch.Tensor, got cos of type NoneType", {"cos": None}),
    (ValueError, r"sin of shape \(seqlen_ro, rotary_dim / 2\), got sin.shape=", {"sin": INT}),
    (ValueError, r"2 <= rotary_dim <= 8, .*got cos.shape=\(5, 5\)", {"cos": torch.ones(5, 5)}),
    (ValueError, r"got cos.shape=\(5, 0\); pass", {"cos": torch.ones(5, 0)}),
    (TypeError, "cos of dtype torch.float32, got cos.dtype=torch.float64", {"cos": tables()[0]}),
    (
        ValueError,
        r"sin of cos's shape \(40, 4\).*got sin.shape=\(3, 4\)",
        {"sin": torch.ones(3, 4)},
    ),
    (
        ValueError,
        "cos on cpu as x, got cos.device=meta; move",
        {"cos": torch.ones(40, 4).to("meta")},
    ),
    (ValueError, r"cos of at least 44 rows, .*got cos.shape=\(40, 4\)", {"seqlen_offsets": 39}),
    (ValueError, "at least 41 rows", {"seqlen_offsets": torch.tensor([0, 36])}),
    (ValueError, "0 <= seqlen_offsets < .*got seqlen_offsets=-1", {"seqlen_offsets": -1}),
    (ValueError, "seqlen_offsets from 0 on, got .*-2", {"seqlen_offsets": torch.tensor([0, -2])}),
    (TypeError, "seqlen_offsets to be an int, got seqlen_offsets=1.0", {"seqlen_offsets": 1.0}),
    (TypeError, "got seqlen_offsets.dtype=torch.float32; cast", {"seqlen_offsets": torch.ones(2)}),
    (ValueError, r"of shape \(2,\), got .*\(3,\)", {"seqlen_offsets": torch.ones(3).int()}),
    (ValueError, "on cpu as x, got seqlen_offsets.device=meta", {"seqlen_offsets": INT.to("meta")}),
    (TypeError, "got cu_seqlens of type list", {"x": ONES[0], "cu_seqlens": [0, 5]}),
    (ValueError, r"got cu_seqlens.shape=\(0,\); pass", {"x": ONES[0], "cu_seqlens": INT[:0]}),
    *(
        (ValueError, pattern, {"x": ONES[0], "cu_seqlens": torch.tensor(values)})
        for values, pattern in {
            (1, 5): r"cu_seqlens to start at 0, got cu_seqlens\[0\]=1",
            (0, 4, 2, 5): r"non-decreasing, got cu_seqlens\[1:3\]=\[4, 2\]",
            (0, -4, 5): r"non-decreasing, got cu_seqlens\[0:2\]=\[0, -4\]",
            (0, 6): r"cu_seqlens\[-1\] <= 5, the rows of x, got cu_seqlens\[-1\]=6",
            (0, 2**62): r"cu_seqlens\[-1\] <= 5, the rows of x, got",
        }.items()
    ),
    (TypeError, "interleaved to be a bool, got interleaved=1", {"interleaved": 1}),
    (TypeError, "inplace to be a bool, got inplace=None", {"inplace": None}),
    (TypeError, "conjugate to be a bool, got conjugate='yes'", {"conjugate": "yes"}),
    (TypeError, "max_seqlen to be an int, got max_seqlen=2.5", {"max_seqlen": 2.5}),
]


@pytest.mark.parametrize(("error", "pattern", "change"), WRONG, ids=range(len(WRONG)))
def test_odd_input_is_refused(error, pattern, change) -> None:
    cos, sin = tables(dtype=torch.float32)
    given = {"x": ONES, "cos": cos, "sin": sin}
    with pytest.raises(error) as raised:
        apply_rotary_emb(**given | change)
    message = str(raised.value)
    assert re.search(r"^apply_rotary_emb: expected .*, got .*; .+", message), message
    assert re.search(pattern, message), message
