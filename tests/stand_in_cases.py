"""A family of cases for fuzz_gpu that need no GPU; some fail, one in each way that a case can."""

from __future__ import annotations

import dataclasses
import os
import time

import fuzz_gpu
import torch

from flashcute import heuristics

WRONG, ODD, DEAD, SILENT, BROKEN = 3, 5, 7, 9, 11


@dataclasses.dataclass(frozen=True)
class Case:
    seed: int
    d: int


def make_case(seed: int) -> Case:
    return Case(seed, (64, 128)[seed // 10 % 2])


def kernels_of(case: Case, gpu) -> set:
    problem = heuristics.FwdProblem("bf16", False, 1, 64, 64, 1, 1, case.d)
    return {heuristics.choose_fwd(problem, gpu.capability)} if case.seed % 2 else set()


def check_all_well(case: Case) -> str | None:
    assert torch.empty(3).isnan().all() and os.environ["FLASHCUTE_ARCH"] in ("80", "90")


def check(case: Case) -> str | None:
    check_all_well(case)
    if case.seed == WRONG:
        return f"{case}: wrong"
    if case.seed == ODD:
        raise ValueError("odd")
    if case.seed == BROKEN:
        fuzz_gpu._is_broken = lambda: True  # of this process alone
        raise RuntimeError("an illegal memory access was encountered")
    if case.seed == DEAD:
        os._exit(4)
    if case.seed == SILENT:
        time.sleep(600)
    return None
