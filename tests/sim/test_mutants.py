"""Every planted fault is found by the checker that is meant for it."""

import re

import mutants
import mutants_sm90
import pytest
import tiers
import torch
from formulas import mma_count, tma_bytes, wgmma_count
from planted import build_mutants, checker

from flashcute import sim
from flashcute.jit import sources
from flashcute.jit.toolchain import BuildError
from flashcute.testing import compare_forward

MUTANTS = tiers.faults((*mutants.MUTANTS, *mutants_sm90.MUTANTS))

# (b, seqlen_q, seqlen_k, h, h_k) and a factor for q: more keys than queries; queries that see no
# key at all; scores so large that the running maximum grows from block to block; constant q and k
# with the factor HUGE. In the sm90 class two SMs compute several tiles each, also where each tile
# has one block of keys, and where most tiles have none.
HUGE = 30000
PROBLEMS = {
    80: (
        *(((2, 100, 150, 4, 2), 1), ((1, 150, 70, 2, 2), 1)),
        *(((1, 70, 200, 1, 1), 16), ((1, 70, 100, 1, 1), HUGE)),
    ),
    90: (
        *(((2, 150, 150, 2, 1), 1), ((1, 300, 130, 2, 2), 1)),
        *(((1, 140, 300, 1, 1), 16), ((4, 40, 30, 2, 1), 1), ((1, 140, 100, 1, 1), HUGE)),
        ((1, 2000, 40, 1, 1), 1),
    ),
}
# Three packed heads take four rows, a tile's edge lies among the rows of one key head, and some
# rows see no key. Each head has a sink of its own.
PACKED = ((2, 120, 65, 6, 2), 1)
SINKS = torch.tensor([1.0, -2.0, 3.0, 0.0, 5.0, -1.0])
# The second launch finds the tile counters as the first has left them.
OPTIONS = {80: {}, 90: {"sms": 2, "launches": 2}}


CONFIGS = list(dict.fromkeys(m.config for m in MUTANTS))
# Mutants without a fault, planted like the others.
FAULTLESS = {
    config: mutants.Mutant(
        f"none in {config.full_name}", "flash.h", "#pragma once", "#pragma once", "", "", config
    )
    for config in CONFIGS
}
PLANTED = (*MUTANTS, *FAULTLESS.values())


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Returns the kernels of all mutants by name, compiled in parallel."""
    sim.build_runners()
    return build_mutants(PLANTED, tmp_path_factory.mktemp("mutants"))


def problem(config, shape, factor):
    b, seqlen_q, seqlen_k, h, h_k = shape
    generator = torch.Generator().manual_seed(7)
    dtype = torch.float16 if config.dtype == "fp16" else torch.bfloat16
    d = config.head_dim - 8  # so that the last columns must be predicated
    sizes = ((b, seqlen_q, h, d), (b, seqlen_k, h_k, d), (b, seqlen_k, h_k, d))
    q, k, v = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    if factor == HUGE:
        return torch.full_like(q, HUGE), torch.full_like(k, HUGE), v
    return q * factor, k, v


def options(config, shape):
    """Returns what a kernel is given besides q, k and v: options that the reference takes too, and
    options of the simulator alone."""
    asked = {"window_size": (40, 10)} if config.mask == "local" else {}
    if shape == PACKED[0]:
        asked["sinks"] = SINKS
    causal = config.mask == "causal"
    return {"causal": causal, **asked}, {"pack_heads": shape == PACKED[0], **asked}


def wrong_numbers(mutant, result, shape, q, k, v):
    """Whether the kernel ran to its end with wrong results. A run with another verdict does not
    count: a mutant that gives one must name its report."""
    if result.verdict != "pass":
        return False
    of_reference, _ = options(mutant.config, shape)
    return not compare_forward(result.out, result.lse, q, k, v, **of_reference).ok


def wrong_counts(mutant, result, shape):
    if shape == PACKED[0] or mutant.config.mask == "local":  # the formulas do not cover these
        return False
    b, seqlen_q, seqlen_k, h, _ = shape
    config, counters = mutant.config, result.counters
    conflicts = sum(n for name, n in counters.items() if name.endswith("_conflicts"))
    if config.arch == 90:
        found = counters["wgmma"], counters["tma_bytes"], counters["tma_zero_bytes"]
        d = config.head_dim - 8
        return found != (
            wgmma_count(config, b, seqlen_q, seqlen_k, h),
            *tma_bytes(config, b, seqlen_q, seqlen_k, h, d),
        )
    return conflicts or counters["mma"] != mma_count(config, b, seqlen_q, seqlen_k, h)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_found(mutant, kernels):
    finder, _, copy_mode = mutant.finder.partition("/")
    results = []
    for shape, factor in (*PROBLEMS[mutant.config.arch], PACKED):
        q, k, v = problem(mutant.config, shape, factor)
        result = sim.run_fwd(
            q,
            k,
            v,
            mutant.config,
            checker=checker(mutant),
            copy_mode=copy_mode or "late",
            kernel=kernels[mutant.name],
            timeout=120,
            **options(mutant.config, shape)[1],
            **OPTIONS[mutant.config.arch],
        )
        results.append(result)
        if finder == "numerics" and wrong_numbers(mutant, result, shape, q, k, v):
            return
        if finder == "counters" and wrong_counts(mutant, result, shape):
            # A fault that only costs time has correct numbers and wrong counts.
            assert result.verdict == "pass" and not wrong_numbers(mutant, result, shape, q, k, v)
            return
        if result.verdict == "fail" and mutant.report and re.search(mutant.report, result.message):
            return
    pytest.fail(f"{mutant.name} survived: {[(r.verdict, r.message) for r in results]}")


def test_mutant_must_match_once(tmp_path):
    lost = mutants.Mutant("lost", "mask.h", "no such text", "", "numerics/late")
    with pytest.raises(ValueError, match="holds its text 0 times"):
        mutants.plant(lost, sources.kernel_include_dir(), tmp_path / "lost")


def test_mutant_that_does_not_compile_is_named(tmp_path):
    broken = mutants.Mutant(
        "broken", "mask.h", "#pragma once", '#include "broken_on_purpose.h"', "numerics/late"
    )
    with pytest.raises(BuildError, match=r"mutant_broken_\w+/.*broken_on_purpose\.h: No such file"):
        build_mutants([MUTANTS[0], broken], tmp_path)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
@pytest.mark.parametrize("copy_mode", sim.COPY_MODES)
def test_unmutated_kernel_passes_the_same_checks(config, copy_mode, kernels):
    mutant = FAULTLESS[config]
    for shape, factor in (*PROBLEMS[config.arch], PACKED):
        q, k, v = problem(config, shape, factor)
        result = sim.run_fwd(
            q,
            k,
            v,
            config,
            copy_mode=copy_mode,
            kernel=kernels[mutant.name],
            **options(config, shape)[1],
            **OPTIONS[config.arch],
        )
        assert result.verdict == "pass", result.message
        assert not wrong_numbers(mutant, result, shape, q, k, v)
        assert not wrong_counts(mutant, result, shape)
