"""Checks of repeatable gradients, for which tiles of keys add to dQ in a fixed order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import pytest
import tiers
from backward import GRADIENTS, Problem, passed, same
from bwd_checks import wrong_numbers
from mutants import Mutant

from flashcute import sim

# Up to five tiles of keys visit a block of queries; with one or two the order of the sums would not
# change the result.
WINDOW = (300, 130)


def check_order(run: Callable, check_result: Callable) -> sim.SimResult:
    """Asserts that runs under several schedules give the same bits; returns one result."""
    first = run()
    check_result(first)
    for seed, copy_mode in enumerate(sim.COPY_MODES):
        again = run(seed=seed + 1, copy_mode=copy_mode, launches=1 + seed % 2)
        assert same(first, passed(again))
    return first


def visitors(n: int, m: int, mask: str, queries: int, keys: int) -> list[int]:
    """Returns how many tiles of ``keys`` keys visit each block of ``queries`` queries, for ``n``
    queries and ``m`` keys."""
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


_SCHEDULES = 2 * sim.COPY_MODES


def faults(
    problems, config, kernel, finder: str, copy_modes: Sequence[str] = _SCHEDULES
) -> Iterator[str]:
    """Runs ``problems`` under a schedule for each of ``copy_modes`` and yields the message of each
    failed run, and ``finder`` where gradients are wrong or differ between schedules.

    Args:
        problems: Pairs of a problem and a number of SMs.
    """
    for problem, sms in problems:
        first = None
        for seed, copy_mode in enumerate(copy_modes):
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
    # check_order() compares schedules of the same kernels, if of fewer problems.
    copy_modes = _SCHEDULES if tiers.everything else _SCHEDULES[:2]
    assert not [*faults(problems, faultless.config, kernel, "numerics", copy_modes)]
