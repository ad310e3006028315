"""Tensors that the kernels can read in place, and copies of those that they cannot."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashcute import loading


def test_only_tensors_off_the_16_byte_grid_are_copied() -> None:
    def loadable(tensor: torch.Tensor) -> torch.Tensor:
        return loading.loadable("f", "q", tensor)

    packed = torch.empty(2, 9, 3, 4, 64)
    for tensor in (
        packed[:, :, 1],
        packed[:, :, 0].transpose(1, 2),
        packed[:1, :, 2, :1].expand(5, -1, 7, -1),
        packed.as_strided((1, 9, 1, 64), (3, 64, 5, 1)),
    ):
        assert loadable(tensor) is tensor
    gap = torch.randn(2, 9, 4, 68)[..., :64]
    copy = loadable(gap)
    assert copy.is_contiguous() and torch.equal(copy, gap)
    # An empty tensor counts as contiguous whatever its strides are, but the binding checks them.
    empty = loadable(torch.empty(2, 0, 4, 68)[..., :64])
    assert all(stride % 8 == 0 for stride in empty.stride()[:3])


def test_in_place_is_what_loadable_says_of_each() -> None:
    packed = torch.empty(2, 9, 3, 4, 64)
    tensors = (
        packed[:, :, 1].contiguous(),
        packed[:, :, 1],
        torch.empty(2, 4, 9, 64).transpose(1, 2),
        torch.empty(2, 9, 4, 68)[..., :64],
        torch.empty(2, 9, 64, 4).transpose(2, 3),
        torch.empty(2 * 9 * 4 * 64 + 1)[1:].view(2, 9, 4, 64),
        torch.empty(2 * 9 * 4 * 64 + 8)[8:].view(2, 9, 4, 64),
    )
    empty = torch.empty(2, 0, 4, 64), torch.empty(2, 0, 4, 68)[..., :64]
    triples = [*itertools.product(tensors, repeat=3)]
    triples += [(q, k, v) for q in (*tensors, *empty) for k in empty for v in empty]
    triples += [(q, k, k) for q in empty for k in tensors]
    found = {True: 0, False: 0}
    for triple in triples:
        expected = all(loading.loadable("f", "q", x) is x for x in triple)
        assert loading.in_place(*triple) == expected, [x.stride() for x in triple]
        found[expected] += 1
    assert min(found.values()) > 20


@pytest.mark.parametrize("shape", [(2, 9, 4, 20), (9, 4, 20)])
def test_padded(shape) -> None:
    x = torch.randn(shape)
    padded = loading.padded("f", "q", x)
    assert padded.shape == (*shape[:-1], 24) and padded.is_contiguous()
    assert torch.equal(padded[..., :20], x) and not padded[..., 20:].any()


def test_packed_tokens() -> None:
    """Packed tokens are treated as a batch of one."""
    qkv = torch.randn(9, 3, 4, 64)
    assert all(loading.loadable("f", "q", x) is x for x in qkv.unbind(1))
    gap = torch.randn(9, 4, 68)[..., :64]
    copy = loading.loadable("f", "q", gap)
    assert copy is not gap and loading.regular(copy) and torch.equal(copy, gap)
