"""Backward problems and the configurations that run them in the simulator."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from problems import DTYPES
from torch import Tensor

from flashcute import sim
from flashcute.config import BwdConfig, BwdTile, FwdConfig
from flashcute.reference import attention_ref
from flashcute.testing import (
    ExpectedGradients,
    check_backward,
    compare_backward,
    expect_gradients,
)

# Small tiles compile and run fast. The two take different paths: TOGETHER has two stages for dQ,
# one for dK and dV, and one kernel for both of these; SPLIT has one stage and 32 rows a warp for
# dQ, and a kernel of two stages each for dK and dV.
TOGETHER = BwdConfig(80, "fp16", 32, "causal", BwdTile(64, 32, 4, 2, 1), BwdTile(64, 32, 4, 1, 1))
SPLIT = BwdConfig(
    80, "bf16", 64, "causal", BwdTile(128, 32, 4, 1, 1), BwdTile(64, 16, 4, 2, 1), split_dkv=True
)
# (left, right) of the mask "local".
WINDOW = (40, 10)
# (b, seqlen_q, seqlen_k, h, h_k): whole tiles; more keys than queries and groups of two heads; one
# row past the tiles' edges and one key head; queries that see no key; keys outside every query's
# window; a single query; no keys at all.
SHAPES = (
    *((1, 128, 128, 1, 1), (2, 100, 150, 4, 2), (1, 129, 129, 3, 1), (1, 150, 70, 2, 2)),
    *((1, 20, 200, 1, 1), (1, 1, 65, 2, 1), (1, 5, 0, 2, 1)),
)
GRADIENTS = ("dq", "dk", "dv")
# Relative error of the weights for each unit of the scores' magnitude, in the forward and in the
# backward: SECURITY.md.
WEIGHTS_OFF = 1.2e-7, 4e-7


def with_mask(config: BwdConfig, mask: str) -> BwdConfig:
    return dataclasses.replace(config, mask=mask)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The inputs and options of a backward.

    Attributes:
        q, k, v: The inputs of the forward, in the dtype of the configuration.
        dout: (b, seqlen_q, h, d).
        dlse: (b, h, seqlen_q), float32, or None.
        options: Options of the reference: causal, window_size, sinks.
        launch: Default arguments of :func:`flashcute.sim.run_bwd`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    options: Mapping[str, Any]
    launch: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def expected(self) -> ExpectedGradients:
        return expect_gradients((self.q, self.k, self.v), self.dout, self.dlse, self.options)

    @functools.cached_property
    def forward(self) -> tuple[Tensor, Tensor]:
        """The output, in q's dtype, and the LSE in float32, both computed in float64."""
        out, lse, _ = attention_ref(self.q, self.k, self.v, upcast=torch.float64, **self.options)
        return out.to(self.q.dtype), lse.float()

    def launched(self, **options: Any) -> Problem:
        """Returns the problem with ``options`` as its launch. What is expected is the same, and
        computed once."""
        other = dataclasses.replace(self, launch=options)
        vars(other).update(expected=self.expected, forward=self.forward)
        return other

    def run(self, config: BwdConfig, **options: Any) -> sim.SimResult:
        """Returns the kernels' result; the options are those of :func:`flashcute.sim.run_bwd`."""
        window = {"window_size": self.options["window_size"]} if config.mask == "local" else {}
        given = {"dlse": self.dlse, "sinks": self.options["sinks"], **window}
        given |= {**self.launch, **options}
        return sim.run_bwd(config, self.q, self.k, self.v, *self.forward, self.dout, **given)


def make_problem(
    config: BwdConfig,
    shape: tuple[int, int, int, int, int],
    *,
    window: tuple[int, int] = WINDOW,
    extras: bool = False,
    seed: int = 0,
) -> Problem:
    """Returns a problem with standard normal tensors of shape (b, seqlen_q, seqlen_k, h, h_k) and a
    head dimension 8 below the configuration's, so that columns have to be predicated. extras: with
    sinks and a gradient of the log-sum-exp."""
    b, seqlen_q, seqlen_k, h, h_k = shape
    generator = torch.Generator().manual_seed(seed)
    d = config.head_dim - 8

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    sizes = ((b, seqlen_q, h, d), (b, seqlen_k, h_k, d), (b, seqlen_k, h_k, d), (b, seqlen_q, h, d))
    q, k, v, dout = (draw(*size).to(DTYPES[config.dtype]) for size in sizes)
    return Problem(
        *(q, k, v, dout),
        draw(b, h, seqlen_q) if extras else None,
        {
            "causal": config.mask == "causal",
            "window_size": window if config.mask == "local" else (-1, -1),
            "sinks": draw(h) if extras else None,
        },
    )


def large_scores(config: BwdConfig, level: int) -> Problem:
    """Returns a problem whose scores, at a scale of 1, differ by a few nats around ``level``, a
    power of two or its negative. All scores are exact in float32, so that errors can only come from
    what is computed with them."""
    problem = make_problem(config, (1, 70, 100, 2, 1))
    generator = torch.Generator().manual_seed(1)
    for x in (problem.q, problem.k):
        x[:] = torch.randint(-1, 2, x.shape, generator=generator)
        x[..., 9:] = 0
    bits = abs(level).bit_length() - 1
    problem.q[..., 0] = math.copysign(2 ** (bits // 2), level)
    problem.k[..., 0] = 2 ** (bits - bits // 2)
    problem.dout.div_(4)  # dK has the large q as a factor and must not overflow fp16
    return dataclasses.replace(problem, options={**problem.options, "softmax_scale": 1.0})


def one_large_score(config: BwdConfig) -> Problem:
    """Returns a problem with a single weight, 1, whose score in powers of two, that is times
    log2(e) in float32, has a rounding error of 0.5."""
    problem = make_problem(config, (1, 1, 1, 1, 1))
    for x, first in ((problem.q, 4096), (problem.k, 3072)):
        x[:] = 0
        x[..., 0] = first
    return dataclasses.replace(problem, options={**problem.options, "softmax_scale": 1.0})


def infinite_behind_the_keys(config: BwdConfig) -> Problem:
    """Returns a problem with all scores far below 0, so that exp(0 - LSE) is infinite for the rows
    of zeros that fill a tile behind the last key. Under a causal mask the last query is alone in
    its block, and sees all keys."""
    problem = make_problem(config, (1, 129, 150, 2, 1))
    return dataclasses.replace(problem, q=problem.q / 8 + 5, k=problem.k / 8 - 5)


def check_large_scores(problem: Problem, config: BwdConfig, forward: FwdConfig | None) -> None:
    """Runs ``forward``, or the reference if it is None, then the backward, and compares each result
    with a bound on its own error: the error of the weights, and the rounding of P, dS and the
    result to 16 bits."""
    qkv = problem.q, problem.k, problem.v
    given, lse = problem.forward
    if forward is not None:
        first = passed(sim.run_fwd(*qkv, forward, softmax_scale=1.0))
        given, lse = first.out, first.lse
    second = passed(sim.run_bwd(config, *qkv, given, lse, problem.dout, softmax_scale=1.0))
    results = {"out": given, **{name: second.outputs[name] for name in GRADIENTS}}

    q, k, v, dout = (x.double().transpose(1, 2) for x in (*qkv, problem.dout))  # (b, h, n, d)
    out, lse, p = attention_ref(*qkv, upcast=torch.float64, return_probs=True, **problem.options)
    out = out.transpose(1, 2)
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    info = torch.finfo(problem.q.dtype)
    least = info.tiny * info.eps
    # Relative errors of P in the forward and in the backward, its rounding included: (b, h,
    # seqlen_q, 1).
    first_off, off = (
        x + (1 + x) * info.eps
        for x in (torch.expm1(per_unit * lse.abs())[..., None] for per_unit in WEIGHTS_OFF)
    )
    out_off = first_off * (p @ v.abs())
    d_off = (dout.abs() * out_off).sum(-1, keepdim=True)
    p_off = off * p + least
    ds_off = off * ds.abs() + (1 + off) * p * d_off + least
    exact = {"out": out, "dq": ds @ k, "dk": ds.mT @ q, "dv": p.mT @ dout}
    bounds = {"out": out_off, "dq": ds_off @ k.abs()}
    bounds |= {"dk": ds_off.mT @ q.abs(), "dv": p_off.mT @ dout.abs()}
    for name, result in results.items():
        got = result.double().transpose(1, 2)
        want, bound = (
            x[name].sum(1, keepdim=True) if name in ("dk", "dv") else x[name]
            for x in (exact, bounds)
        )
        allowed = (1 + info.eps) * bound + info.eps * want.abs() + least
        ratio = ((got - want).abs() / allowed).max()
        assert ratio <= 1, f"{name}: {ratio:.3g} of what is allowed"  # fails for NaN


def passed(result: sim.SimResult) -> sim.SimResult:
    assert result.verdict == "pass", result.message
    return result


def compare(problem: Problem, result: sim.SimResult, function: Any = compare_backward) -> Any:
    x = problem
    options = {"dlse": x.dlse, "expected": x.expected, **x.options}
    return function(passed(result).outputs, x.q, x.k, x.v, x.dout, **options)


def check(problem: Problem, result: sim.SimResult) -> None:
    compare(problem, result, check_backward)


def same(a: sim.SimResult, b: sim.SimResult, names: Sequence[str] = GRADIENTS) -> bool:
    return all(torch.equal(a.outputs[name], b.outputs[name]) for name in names)
