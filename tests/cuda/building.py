"""Builds the kernels of tests in parallel before the tests run, not each at its first use."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from asked import Gpu
from conditions import choosing

from flashcute import jit
from flashcute.config import BwdConfig, FwdConfig
from flashcute.jit import kernels


def build(configs: Iterable[FwdConfig | BwdConfig]) -> None:
    """Builds those of ``configs`` that are missing for this GPU, and asserts that no backward
    spills registers."""
    target = "".join(map(str, torch.cuda.get_device_capability()))
    specs = [(config, target) for config in dict.fromkeys(configs)]
    missing = [spec for spec in specs if kernels.find_built(*spec)[1] is None]
    for result in jit.build_kernels(missing) if missing else ():
        assert result.artefact is not None, result
    backwards = [spec for spec in specs if spec[0].kind == "bwd"]
    built = [jit.get_kernel(*spec) for spec in backwards]
    spilling = {k.config.full_name: k.spill_bytes for k in built if k.spill_bytes > 0}
    assert not spilling, spilling


def of_both_classes(kernels_of: Callable, cases: Iterable) -> set[FwdConfig | BwdConfig]:
    """Returns what ``kernels_of(case, gpu)`` returns for all cases, under each kernel class that
    this GPU runs."""
    gpu, cases, found = Gpu(torch.cuda.get_device_capability()), list(cases), set()
    for name in ("80", "90") if gpu.capability == (9, 0) else ("80",):
        with choosing(name):
            for case in cases:
                found |= kernels_of(case, gpu)
    return found
