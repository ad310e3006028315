"""Checks of repeatable gradients, whose tiles of keys add to dQ in their order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from backward import GRADIENTS, Problem, passed, same
from bwd_checks import wrong_numbers
from mutants import Mutant

from flashcute import sim

# Up to five tiles visit a block; of one or two the order of the sums would not matter.
WINDOW = (300, 130)


def check_order(run: Callable, check_result: Callable) -> sim.SimResult:
    """Under several schedules; returns one result."""
    first = run()
    check_result(first)
    for seed, copy_mode in enumerate(sim.COPY_MODES):
        again = run(seed=seed + 1, copy_mode=copy_mode, launches=1 + seed % 2)
        assert same(first, passed(again))
    return first


def visitors(n: int, m: int, mask: str, queries: int, keys: int) -> list[int]:
    """How many tiles of so many keys visit each block of so many of ``n`` queries."""
    left, right = {"none": (n + m, n + m), "causal": (n + m, 0), "local": WINDOW}[mask]
    return [
        sum(
            max(0, block + m - n - left) < min(first + keys, m)
            and min(block + queries, n) - 1 + m - n + right >= first
            for first in range(0, m, keys)
        )
        for block in range(0, n, queries)
    ]


def _is_wrong(problem, result: sim.SimResult) -> bool:
    if isinstance(problem, Problem):
        return wrong_numbers(problem, result)
    try:
        problem.check(result)
    except AssertionError:
        return True
    return False


def faults(problems, config, kernel, finder: str) -> Iterator[str]:
    """What runs on several schedules report, and whether gradients are wrong or differ.

    Args:
        problems: Pairs of a problem and a number of SMs.
    """
    for problem, sms in problems:
        first = None
        for seed, copy_mode in enumerate(2 * sim.COPY_MODES):
            options = {"seed": seed, "copy_mode": copy_mode, "sms": sms, "timeout": 120}
            result = problem.run(config, kernel=kernel, deterministic=True, **options)
            if result.verdict == "fail":
                yield result.message
                break
            if first is None and _is_wrong(problem, result):
                yield finder
            first = first or result
            if not same(first, result, (*GRADIENTS, "dsinks")):
                yield finder


def check_that_it_is_found(mutant: Mutant, problems, kernel) -> None:
    found = []
    for fault in faults(problems, mutant.config, kernel, mutant.finder):
        found.append(fault)
        if fault == mutant.finder or (mutant.report and re.search(mutant.report, fault)):
            return
    pytest.fail(f"{mutant.name} survived: {found}")


def check_without_fault(faultless: Mutant, problems, kernel) -> None:
    assert not [*faults(problems, faultless.config, kernel, "numerics")]
