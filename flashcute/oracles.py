"""Inputs for tests: random, with results known beforehand, and surrounded by NaN.

An oracle needs no reference and next to no tolerance, so it shows faults that rounding noise can
hide: a mask that is off by one, a key that is dropped, a row from the wrong head.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .reference import visible_keys
from .testing import LSE_ATOL, LSE_RTOL


class Shape(NamedTuple):
    """The sizes of one problem, as the makers below take them."""

    b: int
    seqlen_q: int
    seqlen_k: int
    h: int
    h_k: int
    d: int

    @property
    def q(self) -> tuple[int, int, int, int]:
        return (self.b, self.seqlen_q, self.h, self.d)

    @property
    def kv(self) -> tuple[int, int, int, int]:
        return (self.b, self.seqlen_k, self.h_k, self.d)


def make_qkv(
    shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns standard normal q, k and v."""
    gen = torch.Generator(device).manual_seed(seed)
    return tuple(
        torch.randn(size, generator=gen, device=device, dtype=torch.float32).to(dtype)
        for size in (shape.q, shape.kv, shape.kv)
    )


def make_sparse_integer_qkv(
    shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns integers from -2 to 2, 84 % of them 0: every product and sum of Q K^T is exact.

    The remaining error is small, so that a fault stands out. Compare with ``check_drift=False``.
    """
    gen = torch.Generator(device).manual_seed(seed)

    def draw(size: tuple[int, ...]) -> Tensor:
        value = torch.randint(-2, 3, size, generator=gen, device=device)
        keep = torch.rand(size, generator=gen, device=device) < 0.2
        return (value * keep).to(dtype)

    return draw(shape.q), draw(shape.kv), draw(shape.kv)


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Inputs whose result is known without computing attention.

    Attributes:
        q, k, v: The inputs.
        options: Options to pass to the attention under test: softmax_scale, causal, window_size.
        out: Expected output (b, seqlen_q, h, d), float64.
        lse: Expected log-sum-exp (b, h, seqlen_q), float64; None where it is not known.
        rtol: Relative error allowed in each element of out; zeros have to be exact.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    out: Tensor
    lse: Tensor | None
    rtol: float

    def check(self, out: Tensor, lse: Tensor | None) -> None:
        """Raises AssertionError, which names the first wrong element, if the result is wrong."""
        right = (out.double() - self.out).abs() <= self.rtol * self.out.abs()
        self._require(right, out, self.out, "out")
        if lse is not None and self.lse is not None:
            close = (lse.double() - self.lse).abs() <= LSE_ATOL + LSE_RTOL * self.lse.abs()
            self._require(close | (lse.double() == self.lse), lse, self.lse, "lse")

    @staticmethod
    def _require(right: Tensor, got: Tensor, expected: Tensor, name: str) -> None:
        if bool(right.all()):
            return
        wrong = (~right).nonzero()
        index = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{len(wrong)} of {right.numel()} elements of {name} are wrong, first "
            f"{name}{list(index)}: expected {expected[index].item()}, got {got[index].item()}"
        )


def uniform_oracle(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Oracle:
    """Makes an oracle with Q = 0: visible keys have equal weights, so out is their mean of V.

    The first half of the head dimension holds the key's number, j % 256, which shows a shifted
    mask; the other half has one column for each j modulo its width, which shows a key that is
    missing or one too many. The log-sum-exp is log(number of visible keys). Everything is exact but
    for the rounding of the result.
    """
    b, seqlen_q, seqlen_k, h, _, d = shape
    j = torch.arange(seqlen_k, device=device)
    column = torch.arange(d, device=device)
    width = max(d - d // 2, 1)
    indicator = (j[:, None] % width == column - d // 2).double()
    value = torch.where(column < d // 2, j[:, None] % 256, indicator)  # (seqlen_k, d)

    visible = visible_keys(seqlen_q, seqlen_k, causal, window_size, device=device).double()
    count = visible.sum(-1)  # (seqlen_q)
    mean = visible @ value / count.clamp(min=1)[:, None]
    gen = torch.Generator(device).manual_seed(0)
    return Oracle(
        q=torch.zeros(shape.q, dtype=dtype, device=device),
        k=torch.randn(shape.kv, generator=gen, device=device).to(dtype),
        v=value.to(dtype)[None, :, None].expand(shape.kv).contiguous(),
        options={"causal": causal, "window_size": window_size},
        out=mean[None, :, None].expand(b, seqlen_q, h, d),
        lse=count.log()[None, None].expand(b, h, seqlen_q),
        rtol=torch.finfo(dtype).eps / 2 + 1e-6,  # rounded once, of a float32 result
    )


def ones_oracle(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    seed: int = 0,
) -> Oracle:
    """Makes an oracle with V = 1: for any Q and K out is 1 in rows that see a key, and else 0."""
    q, k, v = make_qkv(shape, dtype, device, seed)
    visible = visible_keys(shape.seqlen_q, shape.seqlen_k, causal, window_size, device=device)
    return Oracle(
        q=q,
        k=k,
        v=torch.ones_like(v),
        options={"causal": causal, "window_size": window_size},
        out=visible.any(-1).double()[None, :, None, None].expand(shape.q),
        lse=None,
        rtol=torch.finfo(dtype).eps + 1e-6,  # P and the result are rounded
    )


def one_hot_oracle(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    seed: int = 0,
) -> Oracle:
    """Makes an oracle in which each row selects one visible key: out is exactly that key's V.

    Keys are told apart by the binary digits of their number, as signs; the right one leads by at
    least 128, and exp(-128) is 0 in float32. Shows a wrong row, head or batch entry without any
    tolerance.

    Raises:
        ValueError: there are more than 2**d keys.
    """
    b, seqlen_q, seqlen_k, h, h_k, d = shape
    digits = max((seqlen_k - 1).bit_length(), 1)
    if digits > d:
        raise ValueError(
            f"one_hot_oracle: expected seqlen_k <= 2**d = {2**d}, got seqlen_k={seqlen_k}; "
            "use a larger head dimension"
        )
    # A power of two, and as small as the lead allows: large scores cost accuracy of the
    # exponential.
    magnitude = 64 / 2 ** int(math.log2(d // digits))
    gen = torch.Generator(device).manual_seed(seed)
    digit = torch.arange(d, device=device) % digits
    code = (torch.arange(seqlen_k, device=device)[:, None] >> digit) % 2 * 2 - 1  # (seqlen_k, d)

    visible = visible_keys(seqlen_q, seqlen_k, causal, window_size, device=device)
    sees_a_key = visible.any(-1)[None, :, None, None]  # (1, seqlen_q, 1, 1)
    v = torch.randn(shape.kv, generator=gen, device=device).to(dtype)
    if seqlen_k == 0:
        q, out = torch.ones(shape.q, device=device), torch.zeros(shape.q, device=device)
    else:
        lottery = torch.rand(b, h, seqlen_q, seqlen_k, generator=gen, device=device)
        target = torch.where(visible, lottery, -1).argmax(-1).transpose(1, 2)  # (b, seqlen_q, h)
        q = magnitude * code[target]
        head = torch.arange(h, device=device) // (h // h_k)
        batch = torch.arange(b, device=device)[:, None, None]
        out = torch.where(sees_a_key, v[batch, target, head], 0)
    score = torch.where(sees_a_key, float(magnitude * d), -torch.inf).double()
    return Oracle(
        q=q.to(dtype),
        k=code.to(dtype)[None, :, None].expand(shape.kv).contiguous(),
        v=v,
        options={"causal": causal, "window_size": window_size, "softmax_scale": 1.0},
        out=out.double(),
        lse=score[..., 0].transpose(1, 2).expand(b, h, seqlen_q),
        rtol=0.0,
    )


class Embedded(NamedTuple):
    """A strided tensor inside a larger buffer of NaN.

    Attributes:
        view: The tensor.
        buffer: (n,), everything around it included.
    """

    view: Tensor
    buffer: Tensor

    def untouched(self) -> bool:
        """Returns whether all of the buffer outside the view is still NaN: nothing wrote there."""
        outside = self.buffer.clone()
        view = self.view
        torch.as_strided(outside, view.shape, view.stride(), view.storage_offset()).fill_(math.nan)
        return bool(outside.isnan().all())


def embed_in_nan(x: Tensor, order: str = "bshd", margin: int = 512) -> Embedded:
    """Returns a copy of ``x`` with NaN before it, behind it and in gaps between rows, heads and
    batch entries.

    Reading or writing a single element out of place then shows. Strides stay multiples of 8
    elements and the start aligned to 16 bytes, as kernels require, if ``d`` is a multiple of 8.

    Args:
        x: (b, s, h, d), floating point.
        order: Order of the dimensions in memory, outermost first; "d" comes last.
        margin: Elements of NaN before the first and behind the last.

    Raises:
        ValueError: order is not a permutation of "bshd" that ends in "d".
    """
    if sorted(order) != sorted("bshd") or order[-1] != "d":
        raise ValueError(
            f'embed_in_nan: expected order to be a permutation of "bshd" that ends in "d", '
            f'got order="{order}"; "bshd" and "bhsd" are the usual ones'
        )
    dims = ["bshd".index(letter) for letter in order]
    strides, stride = [1] * 4, x.shape[3] + 8
    for dim in reversed(dims[:3]):
        strides[dim] = stride
        stride *= x.shape[dim] + 1
    buffer = x.new_full((stride + 2 * margin,), math.nan)
    view = buffer.as_strided(x.shape, strides, margin)
    view.copy_(x)
    return Embedded(view, buffer)
