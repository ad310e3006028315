"""Dropout masks, in plain PyTorch: the same bits as ``csrc/flash_attn/src/dropout.h``, any device.

Which weights are dropped depends on the two numbers of a random state, and on batch entry, head,
query and key, never on a kernel or a device. A weight has 16 random bits, and ``dropout_p * 2**16``
of their patterns drop it, so probabilities are multiples of 2**-16. Dividing the kept weights by
``1 - dropout_p`` leaves the expected output as it is without dropout.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from .jit.abi import dropout_bound

_LOW = 0xFFFFFFFF


def draw_state(device: torch.device) -> Tensor:
    """Draws a random state, int64 (2,), seed and offset, from ``device``'s default generator."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int = 7
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns four words of 32 random bits; all words are int64 and broadcast with each other.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # Products wrap around at 2**64, as products of unsigned numbers do.
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = (b >> 32 & _LOW) ^ c1 ^ k0, b & _LOW
        c2, c3 = (a >> 32 & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = k0 + 0x9E3779B9 & _LOW, k1 + 0xBB67AE85 & _LOW
    return c0, c1, c2, c3


def dropout_mask(
    rng_state: Tensor,
    b: int,
    h: int,
    seqlen_q: int,
    seqlen_k: int,
    dropout_p: float,
    *,
    batch: slice = slice(None),
    rows: slice = slice(None),
) -> Tensor:
    """Returns which attention weights dropout keeps.

    Args:
        rng_state: int64 (2,), as an operator got it.
        b: Batch entries, or sequences of a ragged batch.
        h: Query heads.
        seqlen_q: Queries; of a ragged batch those of the longest sequence.
        seqlen_k: Keys; of a ragged batch those of the longest sequence.
        dropout_p: Probability, rounded to a multiple of 2**-16.
        batch: Entries that are asked for; all by default.
        rows: Queries that are asked for; all by default.

    Returns:
        bool (b, h, seqlen_q, seqlen_k), or that part of it, on the device of ``rng_state``: True
        where a weight is kept.
    """
    device = rng_state.device
    bits, flips = dropout_bound(round(dropout_p * 2**16))
    # A Python number, as the copy of a tensor to the device would break a CUDA graph capture.
    (bound,) = struct.unpack("<e", bits.to_bytes(2, "little"))
    entry = torch.arange(b, device=device)[batch, None, None, None]
    head = torch.arange(h, device=device)[:, None, None]
    row = torch.arange(seqlen_q, device=device)[rows, None]
    column = torch.arange(-(-seqlen_k // 16) * 4, device=device)
    seed, offset = rng_state.unbind()
    counter = (row // 16 * 8 + row % 8, column, entry * h + head & _LOW, offset & _LOW)
    words = philox4x32(counter, (seed & _LOW, seed >> 32 & _LOW))
    # A call of Philox is for queries r and r + 8, and keys c, c + 1, c + 8 and c + 9.
    second = row % 16 >= 8
    left, right = (torch.where(second, words[i + 1], words[i]) for i in (0, 2))
    halves = [(x >> i).to(torch.int16) for x in (left, right) for i in (0, 16)]
    less = torch.stack(halves, -1).view(torch.float16) < bound
    kept = (less if flips else ~less).unflatten(-1, (2, 2))  # (b, h, rows, columns, 2, 2)
    kept = kept.unflatten(3, (-1, 4)).transpose(4, 5)  # (b, h, rows, seqlen_k / 16, 2, 4, 2)
    return kept.flatten(3)[..., :seqlen_k]
