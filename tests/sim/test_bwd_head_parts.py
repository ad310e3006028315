"""The query heads of a key head are divided into parts, whose dK and dV are summed up."""

import dataclasses

import backward_options
import bwd_checks
import mutants_bwd_head_parts
import pytest
import tiers
import torch
from backward import check, make_problem, passed, with_mask
from backward_options import SOME, make_ragged
from mutants_bwd_fused import DIVIDED, FUSED
from mutants_bwd_sm90 import COLUMNS, ROWS, UNEVEN
from mutants_bwd_wide_sm90 import WIDE
from planted import build_mutants
from problems import DTYPES

from flashcute import sim
from flashcute.config import MASKS
from flashcute.heuristics import bwd_with_options

TOGETHER, SPLIT = backward_options.TOGETHER, backward_options.SPLIT
DENSE = (
    *(with_mask(COLUMNS, mask) for mask in MASKS),
    *(ROWS, UNEVEN, with_mask(WIDE, "none")),
    *(FUSED, with_mask(DIVIDED, "local"), TOGETHER, SPLIT),
)
RAGGED = (
    *(bwd_with_options(c, varlen=True) for c in (COLUMNS, with_mask(ROWS, "local"), WIDE)),
    *(c for c in backward_options.RAGGED if c.fused or c.split_dkv),
)
PLANTED = tiers.faults(mutants_bwd_head_parts.MUTANTS)
COMPILED = [(config, "none") for config in (*DENSE, *RAGGED)]
# b, seqlen_q, seqlen_k, h, h_k, and the number of parts of a key head.
SHAPES = ((2, 100, 150, 8, 2, 2), (1, 150, 300, 6, 1, 3), (2, 70, 129, 4, 1, 4))
PARTS = 2  # of a key head in ragged batches, which have four query heads for two key heads


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none", "memcheck"])
    return sim.build_kernels(COMPILED)


def sums_of(config, partial, scale, parts):
    """Returns dK and dV, in 16 bits, from the sums over all parts, and from each part alone."""
    factors = torch.tensor([scale, 4 / 3 if config.dropout else 1.0], dtype=torch.float32)
    factors = factors.view(2, *[1] * (partial.dim() - 1))
    total = torch.zeros_like(partial[..., ::parts, :])
    for part in range(parts):
        total += partial[..., part::parts, :]
    dtype = DTYPES[config.dtype]
    return (total * factors).to(dtype), (partial * factors).to(dtype)


# (configuration, shape, deterministic): each configuration takes one of the shapes; those of the
# sm90 class, which can do both, take another one for deterministic gradients.
CASES = [(config, SHAPES[i % len(SHAPES)], False) for i, config in enumerate(DENSE)]
CASES += [(c, SHAPES[(i + 1) % len(SHAPES)], True) for i, c in enumerate(DENSE) if c.arch == 90]


@pytest.mark.parametrize(("config", "shape", "deterministic"), CASES, ids=str)
def test_sums_are_those_of_key_heads_of_their_own(config, shape, deterministic):
    *shape, parts = shape
    problem = make_problem(config, shape, extras=True)
    given = {"deterministic": deterministic, "copy_mode": "random", "sms": 4}
    result = problem.run(config, head_parts=parts, **given)
    check(problem, result)
    partial = result.outputs["dkv_partial"]
    of_heads, of_parts = sums_of(config, partial, problem.q.shape[3] ** -0.5, parts)
    repeated = dataclasses.replace(
        problem, **{name: getattr(problem, name).repeat_interleave(parts, 2) for name in "kv"}
    )
    apart = passed(repeated.run(config, **given))
    for i, name in enumerate(("dk", "dv")):
        assert torch.equal(of_parts[i], apart.outputs[name]), name
        assert torch.equal(of_heads[i], result.outputs[name]), name


@pytest.mark.parametrize("config", RAGGED, ids=lambda c: c.full_name)
def test_ragged_batches(config):
    """Gradients are right, those of rows of no sequence included, which are zeros. A batch of
    overlapping sequences runs to its end."""
    problem = make_ragged(config, SOME)
    result = problem.run(config, head_parts=PARTS, copy_mode="random")
    problem.check(result)
    partial = result.outputs["dkv_partial"]
    of_heads, _ = sums_of(config, partial, problem.q.shape[2] ** -0.5, PARTS)
    assert torch.equal(of_heads, torch.stack([result.outputs[x] for x in ("dk", "dv")]))
    hostile = backward_options.make_hostile(config, "overlapping")
    passed(hostile.run(config, head_parts=PARTS))


@pytest.mark.parametrize("config", (COLUMNS, with_mask(COLUMNS, "none"), FUSED, SPLIT))
def test_only_dq_takes_no_sums(config):
    problem = make_problem(config, (1, 100, 150, 4, 1), extras=True)
    every = passed(problem.run(config, head_parts=4))
    assert not every.outputs["dkv_partial"].isnan().any()
    some = passed(problem.run(config, head_parts=4, wanted=("dq",)))
    assert some.outputs["dkv_partial"].isnan().all()
    check(problem, every)


@pytest.mark.parametrize("config", (COLUMNS, FUSED))
def test_parts_that_do_not_divide_the_heads_are_refused(config):
    problem = make_problem(config, (1, 100, 150, 4, 1))
    for parts in (3, 5, 8):
        result = problem.run(config, head_parts=parts)
        assert result.verdict == "fail" and not result.message, parts


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return build_mutants(PLANTED, tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize("mutant", PLANTED, ids=lambda m: m.name)
def test_mutant_is_found(mutant, planted):
    problems = [
        dataclasses.replace(
            make_problem(mutant.config, shape), launch={"head_parts": parts, "sms": 4}
        )
        for *shape, parts in SHAPES
    ]
    bwd_checks.check_that_mutant_is_found(mutant, planted[mutant.name], problems)
