"""Checks that the tests of every backward make of its kernels, and of whether planted faults are
found."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from backward import (
    GRADIENTS,
    Problem,
    check,
    compare,
    infinite_behind_the_keys,
    make_problem,
    passed,
    same,
    with_mask,
)
from mutants import Mutant
from planted import checker

from flashcute import sim
from flashcute.config import MASKS, SEMAPHORE_ROWS, BwdConfig, FwdConfig
from flashcute.oracles import embed_in_nan
from flashcute.reference import attention_ref, visible_keys

# All gradients but dQ, which CTAs may sum up in any order.
BUT_DQ = ("dk", "dv", "dsinks")
# So long that tiles of the sm90 class begin at the diagonal under a causal mask.
ASCENDING = (1, 1100, 1100, 2, 1)


def check_tiles_in_use(kind: Callable[..., BwdConfig], dtype: str, head_dim: int) -> None:
    """Checks gradients of the configurations in use. ``kind``: a function of
    :mod:`flashcute.heuristics` that returns them."""
    for mask in MASKS:
        config = kind(dtype, head_dim, mask)
        # More keys than queries, fewer, and as many; groups of two heads, one head, three heads.
        for shape in ((1, 130, 150, 2, 1), (2, 270, 100, 1, 1), (1, 128, 128, 3, 3)):
            problem = make_problem(config, shape, extras=True)
            if shape[1] > shape[2]:
                problem.options["sinks"] = None  # so that the LSE of empty rows is -inf
            check(problem, problem.run(config))


def check_strides_and_surroundings(config: BwdConfig, seqlen_k: int, order: str) -> None:
    """Checks that NaN around every input and output is neither read nor overwritten."""
    problem = make_problem(config, (2, 70, seqlen_k, 2, 1))
    names = ("q", "k", "v", "dout")
    inputs = {name: embed_in_nan(getattr(problem, name), order).view for name in names}
    out, lse = problem.forward
    shapes = {"dq": problem.q, "dk": problem.k, "dv": problem.v}
    outputs = {
        name: embed_in_nan(torch.full_like(x, math.nan), order) for name, x in shapes.items()
    }
    result = sim.run_bwd(
        config,
        *(inputs[name] for name in "qkv"),
        embed_in_nan(out, order).view,
        lse,
        inputs["dout"],
        gradients={name: x.view for name, x in outputs.items()},
    )
    check(problem, result)
    assert seqlen_k <= config.repeatable_keys and same(result, problem.run(config))
    assert all(x.untouched() for x in outputs.values())


def check_that_schedules_change_only_the_sums_of_dq(config: BwdConfig) -> None:
    problem = make_problem(config, (1, 70, 500, 2, 1), extras=True)
    run = functools.partial(problem.run, config, sms=3 * config.cluster)
    first = passed(run())
    assert same(first, run())
    equal = []
    for seed, copy_mode in enumerate(2 * sim.COPY_MODES):
        again = run(seed=seed, copy_mode=copy_mode)
        check(problem, again)
        assert same(first, again, BUT_DQ) and first.counters == again.counters
        equal.append(same(first, again, ("dq_accum",)))
    assert not all(equal)


def check_that_two_tiles_of_keys_add_to_dq_in_one_order(config: BwdConfig) -> None:
    """Checks that dQ has the same bits in every schedule up to ``config.repeatable_keys`` keys, two
    tiles, and not with a third tile. The tests on a GPU rely on it where they ask for repeatable
    bits."""
    config = with_mask(config, "none")
    for keys, repeatable in ((config.repeatable_keys, True), (config.repeatable_keys + 60, False)):
        problem = make_problem(config, (1, 70, keys, 2, 1))
        run = functools.partial(problem.run, config)
        first = passed(run())
        schedules = enumerate(2 * sim.COPY_MODES)
        sms = 3 * config.cluster
        again = [run(seed=seed, copy_mode=mode, sms=sms) for seed, mode in schedules]
        assert all(same(first, passed(x), ("dq_accum",)) for x in again) == repeatable


def semaphores_of(problem: Problem, config: BwdConfig, result: sim.SimResult) -> torch.Tensor:
    """Returns the semaphores of dQ of the sm90 class: (b, h, blocks of queries)."""
    b, seqlen_q, h, _ = problem.q.shape
    flat = result.outputs["dq_semaphore"][:-1].view(b, h, -1)  # without the counter of tiles
    flat = flat[..., :: config.dkv.step // SEMAPHORE_ROWS]
    return flat[..., : -(-seqlen_q // config.dkv.step)]


def check_short_tiles_of_long_heads(
    config: BwdConfig, problem: Problem, run: Callable[..., sim.SimResult]
) -> None:
    """Checks that dK and dV have the same bits whether first tiles store dQ or add to it, which
    depends on the batch, and checks deterministic gradients, for which tiles keep their order and
    all begin with the last block. problem: of :data:`ASCENDING`."""
    adding = run(sms=8, copy_mode="random")
    storing = run(sms=2)
    check(problem, adding)
    check(problem, storing)
    assert semaphores_of(problem, config, storing).eq(config.cluster).all()
    assert not semaphores_of(problem, config, adding).any()
    assert same(adding, storing, BUT_DQ)
    check(problem, run(sms=4, deterministic=True))


def check_linear_in_the_gradient_of_the_output(config: BwdConfig) -> None:
    """Checks that twice dO and dLSE give exactly twice every gradient. config: of bf16, whose range
    no value leaves."""
    problem = make_problem(config, (1, 100, 150, 2, 1), extras=True)
    twice = dataclasses.replace(problem, dout=2 * problem.dout, dlse=2 * problem.dlse)
    once, double = passed(problem.run(config)), passed(twice.run(config))
    for name in (*GRADIENTS, "dsinks"):
        assert torch.equal(2 * once.outputs[name], double.outputs[name]), name


def check_that_rows_of_ds_sum_to_zero(config: BwdConfig) -> None:
    """All keys have 1 in column 0, so dQ's column 0 is the scaled sum of a row of dS: 0 but for
    the roundings of dS and of the output in D."""
    problem = make_problem(config, (1, 100, 150, 2, 1))
    problem.k[..., 0] = 1
    result = passed(problem.run(config))
    out, _, p = attention_ref(
        problem.q, problem.k, problem.v, upcast=torch.float64, return_probs=True, **problem.options
    )
    dout, v = problem.dout.double().transpose(1, 2), problem.v.double().transpose(1, 2)
    ds = p * (dout @ v.mT - (dout * out.transpose(1, 2)).sum(-1, keepdim=True))
    d_error = (dout * out.transpose(1, 2)).abs().sum(-1)  # (b, h, seqlen_q)
    scale, half_ulp = problem.q.shape[3] ** -0.5, torch.finfo(problem.q.dtype).eps / 2
    bound = scale * half_ulp * (ds.abs().sum(-1) + d_error) + 1e-5
    assert (result.outputs["dq"][..., 0].double().transpose(1, 2).abs() <= bound).all()


def check_uniform_probabilities(config: BwdConfig) -> None:
    """Checks that with Q = 0 and 64 keys dV is exactly the mean of dO over the group's queries and
    heads, times their number over 64, and that dK is 0."""
    config = with_mask(config, "none")
    problem = make_problem(config, (2, 90, 64, 4, 2))
    integers = torch.randint(-8, 9, problem.dout.shape, generator=torch.Generator().manual_seed(1))
    problem = dataclasses.replace(
        problem, q=torch.zeros_like(problem.q), dout=integers.to(problem.dout.dtype)
    )
    result = passed(problem.run(config))
    expected = integers.double().sum(1).unflatten(1, (2, 2)).sum(2) / 64  # (b, h_k, d)
    dv = result.outputs["dv"]
    assert torch.equal(dv, expected[:, None].expand(dv.shape).to(dv.dtype))
    assert not result.outputs["dk"].any()


def check_recomputed_probabilities(config: BwdConfig, forward: FwdConfig) -> None:
    """Checks that the backward recomputes the P of the forward. Where the last rows of V are the
    identity, a row of O holds weights of P; where the last rows of dO are, a column of dV does.
    Both kernels thus show the P of the last d queries and keys."""
    problem = make_problem(config, (1, 130, 180, 2, 2))
    d = problem.q.shape[3]
    for x in (problem.v, problem.dout):
        x.zero_()
        x[0, -d:] = torch.eye(d, dtype=x.dtype)[:, None]  # of the last rows
    first = passed(sim.run_fwd(problem.q, problem.k, problem.v, forward))
    of_forward = first.out[0, -d:].permute(1, 0, 2)  # (h, queries, keys)

    def of_backward(lse: torch.Tensor) -> torch.Tensor:
        given = first.out, lse, problem.dout
        result = passed(sim.run_bwd(config, problem.q, problem.k, problem.v, *given))
        return result.outputs["dv"][0, -d:].permute(1, 2, 0)

    info = torch.finfo(problem.q.dtype)
    # Both kernels round P by at most half of eps, and the forward rounds O as well. In fp16 weights
    # may be subnormal.
    bound = 1.51 * info.eps * of_forward.double() + 2 * info.tiny * info.eps

    def equal(p: torch.Tensor) -> bool:
        return bool(((p.double() - of_forward.double()).abs() <= bound).all())

    assert of_forward.max() > 0.01 and equal(of_backward(first.lse))
    assert not equal(of_backward(first.lse + 4 * info.eps))


def check_rows_without_keys(config: BwdConfig) -> None:
    """Checks that rows without keys take part in nothing, whatever the gradient of their
    log-sum-exp, -inf, is."""
    problem = make_problem(config, (1, 150, 70, 2, 2), extras=True)
    problem.options["sinks"] = None
    garbage = problem.dlse.clone()
    garbage[:, :, : 150 - 70] = math.nan
    result = problem.run(config)
    check(problem, result)
    assert not result.outputs["dq"][:, : 150 - 70].any()
    assert same(result, passed(dataclasses.replace(problem, dlse=garbage).run(config)))


def check_keys_that_no_query_sees(config: BwdConfig) -> None:
    """Checks that keys outside of every window have zero gradients and, where their whole block is
    outside, are not read."""
    config = with_mask(config, "local")
    problem = make_problem(config, (1, 20, 300, 2, 1), window=(30, 0))
    result = passed(problem.run(config))
    unseen = 300 - 20 - 30
    for name in ("dk", "dv"):
        assert not result.outputs[name][:, :unseen].any()
        assert result.outputs[name][:, unseen:].any(-1).all()
    k, v = problem.k.clone(), problem.v.clone()
    of_tiles = unseen - unseen % (config.cluster * config.dkv.rows)
    k[:, :of_tiles], v[:, :of_tiles] = math.nan, math.nan
    assert same(result, passed(dataclasses.replace(problem, k=k, v=v).run(config)))


def check_window_that_covers_all(
    config: BwdConfig, mask: str, window: tuple[int, int], seqlen_k: int
) -> None:
    local = with_mask(config, "local")
    problem = make_problem(local, (1, 100, seqlen_k, 2, 1), window=window)
    assert same(passed(problem.run(local)), passed(problem.run(with_mask(config, mask))))


def check_keys_behind_the_last_one(config: BwdConfig) -> None:
    problem = infinite_behind_the_keys(config)
    check(problem, problem.run(config))


def visits(problem: Problem, queries: int, keys: int) -> int:
    """Returns how many pairs of a block of ``queries`` queries and a block of ``keys`` keys hold a
    visible pair of a query and a key, for one head."""
    options = problem.options
    visible = visible_keys(
        problem.q.shape[1], problem.k.shape[1], options["causal"], options["window_size"]
    )
    return sum(
        bool(block.any()) for rows in visible.split(queries, 0) for block in rows.split(keys, 1)
    )


def mma_count(config: BwdConfig, problem: Problem) -> int:
    """Returns the MMAs of the sm80 class's products in visible blocks alone: five products in a
    fused kernel; else three for dQ, and four for dK and dV or five if these are split."""
    b, _, h, _ = problem.q.shape
    dq, dkv = config.dq, config.dkv
    of_keys = visits(problem, dkv.step, dkv.rows) * dkv.rows * dkv.step
    if config.fused:
        products = 5 * of_keys
    else:
        of_queries = visits(problem, dq.rows, dq.step) * dq.rows * dq.step
        products = 3 * of_queries + (5 if config.split_dkv else 4) * of_keys
    return b * h * products * config.head_dim // (16 * 8 * 16)


def wrong_counts(config: BwdConfig, problem: Problem, result: sim.SimResult) -> bool:
    """Returns whether a kernel of the sm80 class computed another number of products than planned,
    or had bank conflicts in shared memory."""
    counters = result.counters
    conflicts = any(n for name, n in counters.items() if name.endswith("_conflicts"))
    return conflicts or counters["mma"] != mma_count(config, problem)


def check_work_done(config: BwdConfig, shape: tuple[int, int, int, int, int]) -> None:
    problem = make_problem(config, shape)
    result = passed(problem.run(config))
    assert not wrong_counts(config, problem, result)
    gradients = problem.q.numel() + problem.k.numel() + problem.v.numel()
    assert result.counters["global_store_bytes"] == 2 * gradients


# Keys that no query of a window sees; queries that see no key; more keys than queries, with heads
# in groups.
_MUTANT_SHAPES = ((1, 70, 200, 1, 1), (1, 150, 70, 2, 2), (2, 100, 150, 4, 2))


@functools.cache
def mutant_problems(
    config: BwdConfig, *shapes: tuple[int, int, int, int, int]
) -> tuple[Problem, ...]:
    """Returns the problems for kernels with planted faults, further ``shapes`` included. They are
    cached, and with them the expected results that they hold."""
    problems = []
    for shape in (*_MUTANT_SHAPES, *shapes):
        problem = make_problem(config, shape, extras=True)
        if shape[1] > shape[2]:
            problem.options["sinks"] = None  # so that the LSE of empty rows is -inf
        problems.append(problem)
    return *problems, infinite_behind_the_keys(config)


def faultless(configs: Iterable[BwdConfig], finder: str = "") -> list[Mutant]:
    """Returns one mutant without a fault for each configuration, to be planted like the others."""
    nothing = ("flash.h", "#pragma once", "#pragma once")
    of_finder = f"{finder} finds " * bool(finder)
    return [
        Mutant(f"{of_finder}none in {c.full_name}", *nothing, finder, "", c)
        for c in dict.fromkeys(configs)
    ]


def wrong_numbers(problem: Problem, result: sim.SimResult) -> bool:
    return not all(r.ok for r in compare(problem, result).values())


# A function of a configuration, a problem and a result that returns whether the counts are wrong.
Counts = Callable[[BwdConfig, Problem, sim.SimResult], bool]


def check_that_mutant_is_found(
    mutant: Mutant,
    kernel: tuple[Path, str],
    problems: Iterable[Problem],
    wrong_counts: Counts = wrong_counts,
) -> None:
    """Fails unless the mutant is found by its finder, or reported as it expects, with one of
    ``problems``."""
    config, (finder, _, copy_mode) = mutant.config, mutant.finder.partition("/")
    results = []
    for problem in problems:
        options = {"checker": checker(mutant), "copy_mode": copy_mode or "late"}
        result = problem.run(config, kernel=kernel, timeout=120, **options)
        results.append(result)
        if result.verdict == "fail" and mutant.report and re.search(mutant.report, result.message):
            return
        if result.verdict == "pass":
            if finder == "numerics" and wrong_numbers(problem, result):
                return
            if finder == "counters" and wrong_counts(config, problem, result):
                assert not wrong_numbers(problem, result)
                return
    pytest.fail(f"{mutant.name} survived: {[(r.verdict, r.message) for r in results]}")


def check_that_nothing_is_found(
    faultless: Mutant,
    kernel: tuple[Path, str],
    problems: Iterable[Problem],
    wrong_counts: Counts = wrong_counts,
) -> None:
    for problem in problems:
        result = problem.run(faultless.config, kernel=kernel, checker=checker(faultless))
        assert not wrong_numbers(problem, passed(result))
        assert not wrong_counts(faultless.config, problem, result)
