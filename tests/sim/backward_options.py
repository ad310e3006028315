"""Ragged backward problems, options of the reference for softcap, ALiBi and dropout, and the
configurations of kernels with these options, dense and ragged."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import backward
import ragged
import torch
from backward import GRADIENTS, WINDOW, passed, with_mask
from mutants_bwd_fused import DIVIDED, FUSED
from torch import Tensor

from flashcute import sim
from flashcute.config import BwdConfig
from flashcute.dropout import dropout_mask
from flashcute.reference_varlen import attention_varlen_ref
from flashcute.testing import ExpectedGradients
from flashcute.testing_varlen import check_backward_varlen, expect_gradients_varlen

# Lengths of queries and keys: sequences without queries, without keys, without both, of length 1,
# of no multiple of a tile; a single sequence; lengths at a tile's edges; many short sequences; only
# empty sequences, and none at all.
SOME = ((130, 1, 0, 64, 150, 0), (130, 77, 50, 0, 33, 0))
BATCHES = (
    SOME,
    ((100,), (150,)),
    ((3, 0, 128, 65), (200, 0, 64, 20)),
    ((7,) * 9, (11,) * 9),
    ((0, 0), (0, 0)),
    ((), ()),
)
ORDER = (3, 0, 4, 1, 5, 2)  # a permutation of SOME's sequences
LARGE, SMALL = 2**31 - 1, -(2**31)
# Invalid values of cu_seqlens_q and cu_seqlens_k, and of seqused_q and seqused_k.
HOSTILE = {
    "decreasing": ((0, 150, 30, 90), (200, 100, 0, 50)),
    "overlapping": ((0, 200, 0, 200, 0, 200, 0, 200), (0, 200) * 4),
    "beyond the tokens": ((0, 150, 400, LARGE), (150, 250, LARGE, 7)),
    "extreme": ((SMALL, LARGE, SMALL, LARGE), (LARGE, SMALL, LARGE, SMALL)),
    "used": ((0, 50, 200), (0, 100, 200), (LARGE, -5), (-1, LARGE)),
}
STATE = torch.tensor([2**62 + 12345, -77])
DROPOUT_P = 0.25
SOFTCAP = 1.5  # so low that many scores exceed it


def asking(config: BwdConfig, mask: str, *options: str) -> BwdConfig:
    return dataclasses.replace(with_mask(config, mask), **dict.fromkeys(options, True))


TOGETHER, SPLIT = backward.TOGETHER, backward.SPLIT
SCORES = ("softcap", "alibi")
EVERYTHING = (*SCORES, "dropout", "varlen")
# fp16 and bf16 each have all options, dense and ragged.
DENSE = (
    *(asking(TOGETHER, "local", *SCORES), asking(SPLIT, "causal", *SCORES)),
    asking(DIVIDED, "local", *SCORES, "dropout"),
)
SLOPED = asking(TOGETHER, "causal", "alibi")
RAGGED = (
    *(asking(TOGETHER, mask, "varlen") for mask in ("none", "causal", "local")),
    asking(TOGETHER, "causal", *EVERYTHING),
    asking(SPLIT, "causal", "varlen"),
    asking(SPLIT, "local", *EVERYTHING),
    asking(FUSED, "causal", "varlen"),
    asking(DIVIDED, "local", *EVERYTHING),
)
# Kernels with fewer options, with which those above are compared.
OTHERS = (
    *(asking(TOGETHER, "causal"), asking(SPLIT, "causal"), asking(FUSED, "causal"), SLOPED),
    *(asking(TOGETHER, "causal", *SCORES), asking(TOGETHER, "causal", *SCORES, "varlen")),
)
COMPILED = [(config, "none") for config in (*DENSE, *RAGGED, *OTHERS)]


@dataclasses.dataclass(frozen=True)
class Ragged:
    """The inputs and options of the backward of a ragged batch.

    Attributes:
        q, dout: (total_q, h, d); k, v: (total_k, h_k, d). Rows of no sequence are NaN.
        dlse: (h, total_q), or None. Rows of no sequence are NaN.
        lengths: cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k; the last two may be None.
        options: Options of the reference, but dropout_mask is one tensor, (b, h, rows, keys).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    lengths: tuple[Tensor | None, ...]
    options: Mapping[str, Any]

    @functools.cached_property
    def forward(self) -> tuple[Tensor, Tensor]:
        """The output, in q's dtype, and the LSE in float32, both computed in float64."""
        cu_q, cu_k, used_q, used_k = self.lengths
        options = dict(self.options)
        if "dropout_mask" in options:
            sides = ((cu_q, used_q), (cu_k, used_k))
            sizes = (c.diff() if u is None else u for c, u in sides)
            pairs = zip(options["dropout_mask"], *(x.tolist() for x in sizes), strict=True)
            options["dropout_mask"] = [mask[:, :n, :m] for mask, n, m in pairs]
        out, lse, _ = attention_varlen_ref(
            *(self.q, self.k, self.v, cu_q, cu_k),
            seqused_q=used_q,
            seqused_k=used_k,
            upcast=torch.float64,
            **options,
        )
        return out.to(self.q.dtype), lse.float()

    def run(
        self, config: BwdConfig, forward: tuple[Tensor, Tensor] | None = None, **options: Any
    ) -> sim.SimResult:
        """Returns the kernels' result; the options are those of
        :func:`flashcute.sim.run_varlen_bwd`."""
        given = simulator_options(config, self.options)
        used = dict(zip(("seqused_q", "seqused_k"), self.lengths[2:], strict=True))
        longest = self.lengths[0].diff().max().item() if len(self.lengths[0]) > 1 else 0
        given |= {"dlse": self.dlse, "max_seqlen_q": longest, "sms": 2, **used, **options}
        tensors = self.q, self.k, self.v, *(forward or self.forward), self.dout
        return sim.run_varlen_bwd(config, *tensors, *self.lengths[:2], **given)

    @functools.cached_property
    def expected(self) -> list[ExpectedGradients]:
        tensors = self.q, self.k, self.v, self.dout
        return expect_gradients_varlen(*tensors, self.lengths, dlse=self.dlse, **self.options)

    def check(self, result: sim.SimResult) -> None:
        tensors = self.q, self.k, self.v, self.dout
        given = {"dlse": self.dlse, "expected": self.expected, **self.options}
        check_backward_varlen(passed(result).outputs, *tensors, self.lengths, **given)


def simulator_options(config: BwdConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the simulator's arguments for those of the reference's ``options`` that the kernels
    of ``config`` take."""
    given = {"sinks": options["sinks"]}
    if config.mask == "local":
        given["window_size"] = options["window_size"]
    given |= {name: options[name] for name in ("softcap", "alibi_slopes") if name in options}
    if config.dropout:
        given |= {"rng_state": STATE, "dropout_p": DROPOUT_P}
    return given


def options_of(
    config: BwdConfig, b: int, h: int, longest: tuple[int, int], sinks: bool = True
) -> dict[str, Any]:
    """Returns the reference's options for ``config``; each batch entry and head has its own
    slope."""
    options: dict[str, Any] = {
        "causal": config.mask == "causal",
        "window_size": WINDOW if config.mask == "local" else (-1, -1),
        "sinks": torch.linspace(-1, 2, h) if sinks else None,
    }
    if config.softcap:
        options["softcap"] = SOFTCAP
    if config.alibi:
        options["alibi_slopes"] = torch.arange(1, b * h + 1).view(b, h) / 32
    if config.dropout:
        mask = dropout_mask(STATE, b, h, *longest, DROPOUT_P)
        options |= {"dropout_p": DROPOUT_P, "dropout_mask": mask}
    return options


def make_dense(
    config: BwdConfig, shape: tuple[int, int, int, int, int], **change: Any
) -> backward.Problem:
    problem = backward.make_problem(config, shape, extras=True)
    b, seqlen_q, seqlen_k, h, _ = shape
    options = options_of(config, b, h, (seqlen_q, seqlen_k)) | change
    return dataclasses.replace(problem, options=options)


def run_dense(problem: backward.Problem, config: BwdConfig, **options: Any) -> sim.SimResult:
    return problem.run(config, **simulator_options(config, problem.options) | options)


def check_slopes_of_zero(config: BwdConfig) -> None:
    """They equal none, bit for bit."""
    problem = make_dense(config, (2, 100, 150, 4, 2), alibi_slopes=torch.zeros(2, 4))
    plain = dataclasses.replace(config, alibi=False)
    without = {name: x for name, x in problem.options.items() if name != "alibi_slopes"}
    of_plain = dataclasses.replace(problem, options=without)
    found, expected = run_dense(problem, config), run_dense(of_plain, plain)
    assert backward.same(passed(found), passed(expected), (*GRADIENTS, "dsinks"))


def check_shared_slopes(config: BwdConfig) -> None:
    """Slopes that all entries share, with a batch stride of 0, equal slopes of each bit for bit."""
    slopes = torch.tensor([0.5, 0.25, -0.125, 1.0]).expand(2, 4)
    problem = make_dense(config, (2, 100, 150, 4, 2), alibi_slopes=slopes.contiguous())
    backward.check(problem, run_dense(problem, config))
    shared = run_dense(problem, config, alibi_slopes=slopes)
    assert backward.same(passed(shared), run_dense(problem, config))


def make_ragged(
    config: BwdConfig,
    batch: Sequence[Sequence[int]],
    *,
    used: Sequence[Sequence[int]] | None = None,
    h: int = 4,
    h_k: int = 2,
    more: int = 5,
    extras: bool = True,
    **change: Any,
) -> Ragged:
    """Returns a problem with standard normal tensors of sequences with these lengths of queries and
    of keys, and ``more`` NaN rows behind them. Head dimension and extras are as in
    :func:`backward.make_problem`. used: seqused_q and seqused_k of the sequences."""
    q, k, v = ragged.make_qkv(config, batch, h, h_k, more)
    dout = ragged.make_qkv(config, batch, h, h_k, more, seed=1)[0]
    generator = torch.Generator().manual_seed(2)
    dlse = torch.randn(h, q.shape[0], generator=generator)
    dlse[:, sum(batch[0]) :] = torch.nan
    starts = [ragged.starts(lengths) for lengths in batch]
    if used is not None:
        for side, tensors in ((0, (q, dout, dlse.mT)), (1, (k, v))):
            pairs = itertools.pairwise(starts[side].tolist())
            for (begin, end), n in zip(pairs, used[side], strict=True):
                for x in tensors:
                    x[begin + n : end] = torch.nan
    seqused = [None if used is None else torch.tensor(x, dtype=torch.int32) for x in used or batch]
    longest = tuple(max(lengths, default=0) for lengths in batch)
    options = options_of(config, len(batch[0]), h, longest, extras) | change
    lengths = (*starts, *seqused)
    return Ragged(q, k, v, dout, dlse if extras else None, lengths, options)


def one_of(problem: Ragged, batch: Sequence[Sequence[int]], i: int) -> tuple[Ragged, Ragged, dict]:
    """Returns a problem of sequence ``i`` alone, one of the whole batch in which all others are
    NaN, and where the sequence's gradients are in those of the batch."""
    sides = [ragged.starts(lengths).tolist() for lengths in batch]
    rows, keys = (slice(side[i], side[i + 1]) for side in sides)
    tensors = {"q": rows, "dout": rows, "k": keys, "v": keys}
    alone = {name: getattr(problem, name)[part] for name, part in tensors.items()}
    lengths = (*(ragged.starts((side[i],)) for side in batch), None, None)
    one = dataclasses.replace(problem, **alone, dlse=problem.dlse[:, rows], lengths=lengths)
    among = {name: torch.full_like(getattr(problem, name), torch.nan) for name in tensors}
    for name, part in tensors.items():
        among[name][part] = alone[name]
    return one, dataclasses.replace(problem, **among), {"dq": rows, "dk": keys, "dv": keys}


def permuted(
    problem: Ragged, batch: Sequence[Sequence[int]], order: Sequence[int]
) -> tuple[Ragged, dict]:
    """Returns the problem with its sequences in another order, and from which rows of the original
    gradients its gradients come."""
    sides = [ragged.starts(lengths) for lengths in batch]
    rows, keys = (torch.cat([torch.arange(side[i], side[i + 1]) for i in order]) for side in sides)
    tensors = {"q": rows, "dout": rows, "k": keys, "v": keys}
    given: dict[str, Any] = {name: getattr(problem, name)[part] for name, part in tensors.items()}
    lengths = (*(ragged.starts([side[i] for i in order]) for side in batch), None, None)
    options = dict(problem.options)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"][list(order)]
    given |= {"dlse": problem.dlse[:, rows], "lengths": lengths, "options": options}
    return dataclasses.replace(problem, **given), {"dq": rows, "dk": keys, "dv": keys}


@dataclasses.dataclass(frozen=True)
class Behind:
    """A batch behind ``n`` rows of queries and ``m`` rows of keys that are of no sequence and are
    NaN."""

    problem: Ragged
    n: int
    m: int

    def run(self, config: BwdConfig, **options: Any) -> sim.SimResult:
        x, (out, lse) = self.problem, self.problem.forward
        rows = [_behind(self.n, t) for t in (x.q, out, lse.mT, x.dout, x.dlse.mT)]
        keys = [_behind(self.m, t) for t in (x.k, x.v)]
        lengths = (x.lengths[0] + self.n, x.lengths[1] + self.m, *x.lengths[2:])
        q, out, lse, dout, dlse = rows
        moved = dataclasses.replace(
            x, q=q, k=keys[0], v=keys[1], dout=dout, dlse=dlse.mT.contiguous(), lengths=lengths
        )
        return moved.run(config, forward=(out, lse.mT.contiguous()), **options)

    def check(self, result: sim.SimResult) -> None:
        outputs = dict(passed(result).outputs)
        for name, rows in (("dq", self.n), ("dk", self.m), ("dv", self.m)):
            assert not outputs[name][:rows].count_nonzero(), name
            outputs[name] = outputs[name][rows:]
        self.problem.check(dataclasses.replace(result, outputs=outputs))


def _behind(n: int, x: Tensor) -> Tensor:
    return torch.cat([x.new_full((n, *x.shape[1:]), torch.nan), x])


@dataclasses.dataclass(frozen=True)
class Hostile:
    """A batch whose ``cu_seqlens`` and ``seqused`` hold values that are no valid lengths."""

    problem: Ragged
    lengths: Sequence[Tensor]

    def run(self, config: BwdConfig, **options: Any) -> sim.SimResult:
        used = dict(zip(("seqused_q", "seqused_k"), self.lengths[2:], strict=False))
        given = {"dlse": self.problem.dlse, "max_seqlen_q": LARGE, "sms": 2, **used}
        given |= simulator_options(config, self.problem.options)
        x = self.problem
        tensors = x.q, x.k, x.v, *x.forward, x.dout
        return sim.run_varlen_bwd(config, *tensors, *self.lengths[:2], **given | options)


def make_hostile(config: BwdConfig, name: str) -> Hostile:
    lengths = [torch.tensor(x, dtype=torch.int32) for x in HOSTILE[name]]
    b = len(lengths[0]) - 1
    problem = make_ragged(config, ((200,) + (0,) * (b - 1),) * 2, h=2, h_k=1, more=0)
    return Hostile(problem, lengths)


def infinite_key(config: BwdConfig) -> Ragged:
    """Returns a batch with an infinite key: the gradients of its sequence are NaN, but nothing
    behind the sequence may be."""
    problem = make_ragged(config, ((70, 60), (30, 20)), used=((65, 60), (30, 20)), extras=False)
    problem.k[7] = torch.inf
    return problem


def check_that_infinity_stays(config: BwdConfig) -> None:
    """Asserts that an infinite key spoils the gradients of its own sequence alone."""
    result = infinite_key(config).run(config)
    assert passed(result).outputs["dq"][:65].isnan().any()
    assert not spoils_neighbours(result)


def spoils_neighbours(result: sim.SimResult) -> bool:
    """Returns whether a result of :func:`infinite_key` is wrong outside of the key's sequence."""
    dq, dk = (passed(result).outputs[name] for name in ("dq", "dk"))
    return bool(dq[65:70].count_nonzero()) or not (dq[70:].isfinite().all() and dk[30:].any())


def outputs(result: sim.SimResult) -> dict[str, Tensor]:
    return {name: passed(result).outputs[name] for name in GRADIENTS}
