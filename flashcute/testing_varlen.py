"""When gradients of a ragged batch count as correct: by the rule of :mod:`flashcute.testing`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks_testing import check_gradients
from .testing import (
    Bound,
    ExpectedGradients,
    GradientReport,
    compare_qkv,
    compare_sinks,
    expect_gradients,
    raise_where_wrong,
)

_NOTHING = Bound(0.0, 0.0)


class _Sequence(NamedTuple):
    rows: slice  # of the queries in use
    keys: slice
    qkv: tuple[Tensor, Tensor, Tensor]  # (1, n, h, d), (1, m, h_k, d) twice
    dout: Tensor  # (1, n, h, d)
    dlse: Tensor | None  # (1, h, n)
    options: dict[str, Any]


def _sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lengths: Sequence[Tensor | None],
    dlse: Tensor | None,
    options: Mapping[str, Any],
) -> Iterator[_Sequence]:
    sides = [_rows_in_use(*side) for side in zip(lengths[:2], lengths[2:], strict=True)]
    slopes, mask = options.get("alibi_slopes"), options.get("dropout_mask")
    for i, (rows, keys) in enumerate(zip(*sides, strict=True)):
        given = dict(options)
        if slopes is not None:
            given["alibi_slopes"] = slopes[i] if slopes.dim() == 2 else slopes
        if mask is not None:
            n, m = rows.stop - rows.start, keys.stop - keys.start
            given["dropout_mask"] = mask[i, :, :n, :m]
        qkv = q[None, rows], k[None, keys], v[None, keys]
        of_lse = None if dlse is None else dlse[None, :, rows]
        yield _Sequence(rows, keys, qkv, dout[None, rows], of_lse, given)


def expect_gradients_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lengths: Sequence[Tensor | None],
    *,
    dlse: Tensor | None = None,
    **options: Any,
) -> list[ExpectedGradients]:
    """Computes what :func:`check_backward_varlen`, whose arguments these are, compares with."""
    return [
        expect_gradients(one.qkv, one.dout, one.dlse, one.options)
        for one in _sequences(q, k, v, dout, lengths, dlse, options)
    ]


def check_backward_varlen(
    gradients: Mapping[str, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lengths: Sequence[Tensor | None],
    *,
    dlse: Tensor | None = None,
    expected: Sequence[ExpectedGradients] | None = None,
    **options: Any,
) -> None:
    """Does :func:`flashcute.testing.check_backward` for each sequence; other rows have to be 0.

    A sequence may have only a few elements, so the rule of the mean is for all sequences together.

    Args:
        gradients: ``"dq"`` (total_q, h, d), ``"dk"`` and ``"dv"`` (total_k, h_k, d), ``"dsinks"``.
        q: (total_q, h, d); k and v (total_k, h_k, d).
        dout: As q.
        lengths: cu_seqlens_q and cu_seqlens_k (b + 1,), seqused_q and seqused_k (b,) or None.
        dlse: (h, total_q).
        expected: What :func:`expect_gradients_varlen` returned for the other arguments, which takes
            nearly all of the time; computed by default.
        options: Of :func:`flashcute.testing.compare_backward`; alibi_slopes are (h,) or (b, h), and
            dropout_mask is (b, h, rows, keys) of the longest sequence or more.

    Raises:
        AssertionError: naming the sequence and its numbers.
        TypeError, ValueError: as :func:`flashcute.testing.compare_backward`.
    """
    fn = "check_backward_varlen"
    check_gradients(fn, gradients, (q, k, v), dout, dlse, options.get("sinks"))
    unused = [torch.ones(x.shape[0], dtype=torch.bool, device=x.device) for x in (q, k)]
    pieces = []
    means = {name: [] for name in ("dq", "dk", "dv")}
    for i, one in enumerate(_sequences(q, k, v, dout, lengths, dlse, options)):
        unused[0][one.rows], unused[1][one.keys] = False, False
        parts = zip(means, (one.rows, one.keys, one.keys), strict=True)
        found = {name: gradients[name][None, part] for name, part in parts}
        given = None if expected is None else expected[i]
        reports, of_sinks = compare_qkv(found, one.qkv, one.dout, one.dlse, one.options, given)
        pieces += [] if of_sinks is None else [of_sinks]
        for name, report in reports.items():
            means[name].append((found[name].numel(), report.mean))
            reports[name] = dataclasses.replace(report, mean=_NOTHING)
        raise_where_wrong(reports, *one.qkv, {"sequence": i, **one.options})
    reports = {name: GradientReport(_NOTHING, _mean(found), 0) for name, found in means.items()}
    raise_where_wrong(reports, q, k, v, options)
    for name, rest in zip(means, (unused[0], unused[1], unused[1]), strict=True):
        if gradients[name][rest].count_nonzero():  # NaN counts
            raise AssertionError(f"{name}: rows of no sequence are not 0")
    if pieces:
        ref, variance = (sum(parts) for parts in zip(*pieces, strict=True))
        reports = {"dsinks": compare_sinks(gradients["dsinks"], ref, variance)}
        raise_where_wrong(reports, q, k, v, options)


def _mean(found: list[tuple[int, Bound]]) -> Bound:
    """Returns the bound on the overall mean, from means' element counts and bounds."""
    n = max(sum(count for count, _ in found), 1)
    error, allowed = (
        sum(count * getattr(bound, side) for count, bound in found) / n
        for side in ("error", "allowed")
    )
    return Bound(error, allowed)


def _rows_in_use(starts: Tensor, used: Tensor | None) -> list[slice]:
    ends = starts[1:] if used is None else starts[:-1] + used
    return [slice(*pair) for pair in zip(starts[:-1].tolist(), ends.tolist(), strict=True)]
