"""Ragged batches in the simulator: their tokens, a run, and a check of all rows."""

from __future__ import annotations

import itertools

import torch
from problems import DTYPES

from flashcute import sim
from flashcute.testing import check_forward


def starts(lengths):
    return torch.tensor([*itertools.accumulate(lengths, initial=0)], dtype=torch.int32)


# Rows of 90 queries and 130 keys with 25, 0, 80 and 90 places of padding before their tokens, which
# are not moved: lengths, and of these the rows that are used. Before the first token is a sequence
# that has none, and from one row's first token to that of the next may be more than a row.
PADDED = (
    ((25, 65, 170, 100, 0), (25, 105, 210, 140, 40)),
    ((0, 65, 90, 10, 0), (0, 105, 130, 50, 40)),
)


def make_qkv(config, batch, h=4, h_k=2, more=5, seed=0):
    """Tokens of all sequences, and ``more`` behind them that are NaN."""
    generator = torch.Generator().manual_seed(seed)
    d = config.head_dim - 8
    tensors = []
    for lengths, heads in ((batch[0], h), (batch[1], h_k), (batch[1], h_k)):
        x = torch.randn((sum(lengths) + more, heads, d), generator=generator)
        x[sum(lengths) :] = torch.nan
        tensors.append(x.to(DTYPES[config.dtype]))
    return tensors


def run(config, qkv, batch, **options):
    """``run_varlen`` of sequences of these lengths; ``max_seqlen_q`` is the longest by default."""
    options = {"max_seqlen_q": max(batch[0], default=0), "sms": 2} | options
    return sim.run_varlen(*qkv, starts(batch[0]), starts(batch[1]), config, **options)


def check(result, config, qkv, batch, used=None, **options):
    """Each sequence against the reference, and all other rows against zeros and -inf.

    ``used``: rows of each sequence that count; all by default. ``alibi_slopes``: (b, h).
    ``dropout_mask``: (b, h, rows, keys) of the longest sequence or more.
    """
    assert result.verdict == "pass", result.message
    q, k, v = qkv
    of_no_sequence = torch.ones(q.shape[0], dtype=torch.bool)
    begins = (starts(lengths).tolist() for lengths in batch)
    slopes, mask = (options.pop(name, None) for name in ("alibi_slopes", "dropout_mask"))
    for s, (i, j, n, m) in enumerate(zip(*begins, *(used or batch), strict=False)):
        rows, keys = slice(i, i + n), slice(j, j + m)
        of_no_sequence[rows] = False
        if n > 0:
            out, lse = result.out[rows][None], result.lse[:, rows][None]
            one = q[rows][None], k[keys][None], v[keys][None]
            of_one = options if slopes is None else options | {"alibi_slopes": slopes[s]}
            if mask is not None:
                of_one = of_one | {"dropout_mask": mask[s, :, :n, :m]}
            check_forward(out, lse, *one, causal=config.mask == "causal", **of_one)
    assert (result.out[of_no_sequence] == 0).all()
    assert (result.lse[:, of_no_sequence] == -torch.inf).all()


def equal(result, other):
    assert result.verdict == other.verdict == "pass", result.message + other.message
    return torch.equal(result.out, other.out) and torch.equal(result.lse, other.lse)
