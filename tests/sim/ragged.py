"""Makes ragged batches, runs them in the simulator and checks all rows."""

from __future__ import annotations

import itertools

import torch
from problems import DTYPES

from flashcute import sim
from flashcute.testing import check_forward


def starts(lengths):
    return torch.tensor([*itertools.accumulate(lengths, initial=0)], dtype=torch.int32)


# Lengths, and how many tokens of each sequence are used, of a padded batch that is read in place as
# a ragged one: four rows of 90 queries and 130 keys, with 25, 0, 80 and 90 places of left padding.
# A sequence reaches from one row's first token to the next one's, which may be more than a row; the
# first sequence is the padding before the first token, of which nothing is used.
PADDED = (
    ((25, 65, 170, 100, 0), (25, 105, 210, 140, 40)),
    ((0, 65, 90, 10, 0), (0, 105, 130, 50, 40)),
)


def make_qkv(config, batch, h=4, h_k=2, more=5, seed=0):
    """Returns q, k and v with the tokens of all sequences, and ``more`` NaN tokens behind them."""
    generator = torch.Generator().manual_seed(seed)
    d = config.head_dim - 8
    tensors = []
    for lengths, heads in ((batch[0], h), (batch[1], h_k), (batch[1], h_k)):
        x = torch.randn((sum(lengths) + more, heads, d), generator=generator)
        x[sum(lengths) :] = torch.nan
        tensors.append(x.to(DTYPES[config.dtype]))
    return tensors


def run(config, qkv, batch, **options):
    """Calls ``run_varlen`` for sequences of these lengths; ``max_seqlen_q`` is by default that of
    the longest."""
    options = {"max_seqlen_q": max(batch[0], default=0), "sms": 2} | options
    return sim.run_varlen(*qkv, starts(batch[0]), starts(batch[1]), config, **options)


def check(result, config, qkv, batch, used=None, **options):
    """Compares each sequence with the reference, and all other rows with zeros and an LSE of -inf.

    ``used``: queries and keys that are used of each sequence; by default all. ``alibi_slopes``:
    (b, h). ``dropout_mask``: (b, h, rows, keys), as long as the longest sequence or longer.
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
