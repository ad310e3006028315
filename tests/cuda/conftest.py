"""Deselects the GPU tests where there is no GPU, and reports that; builds kernels once; counts
cases."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import conditions
import pytest
import torch
from building import build
from reporting import CASES, DESELECTED

from flashcute import heuristics, support
from flashcute.config import DTYPES, HEAD_DIMS, MASKS, FwdConfig

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE.parent))  # bad_input.py


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    # Deselected rather than skipped: what did not run is not part of a green result.
    mine = [item for item in items if item.path.is_relative_to(HERE)]
    items[:] = [item for item in items if not item.path.is_relative_to(HERE)]
    config.hook.pytest_deselected(items=mine)
    config.stash[DESELECTED] = len(mine)


@pytest.fixture(scope="module", autouse=True)
def _give_memory_back():
    """Gives a file's cached GPU memory back at its end, for other workers."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture
def count_cases(request: pytest.FixtureRequest):
    """Returns ``count_cases(name, n)``, which adds to the counts in the last line of the run."""
    cases = request.config.stash.setdefault(CASES, {})

    def count(name: str, n: int) -> None:
        cases[name] = cases.get(name, 0) + n

    return count


def _configs_in_use() -> list[FwdConfig]:
    """Returns the forwards in use on this GPU, or on Hopper where no GPU runs them, so that tests
    are collected anyway."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    capability = capability if capability in support.CAPABILITIES else (9, 0)
    return [
        config
        for head_dim in HEAD_DIMS
        for dtype in DTYPES
        for causal in (False, True)
        for config in heuristics.configs_in_use(dtype, head_dim, causal, capability)
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "config" in metafunc.fixturenames:
        metafunc.parametrize("config", _configs_in_use(), ids=lambda config: config.full_name)


@pytest.fixture(scope="session", autouse=True)
def _built_kernels() -> None:
    """Builds in parallel every forward in use that is missing."""
    build(_configs_in_use())


@pytest.fixture(scope="session")
def backward_kernels() -> None:
    """Builds in parallel every backward that tests may ask for on this GPU, and the forwards of
    both classes and all masks that run before them."""
    capability = torch.cuda.get_device_capability()
    configs = []
    for head_dim in HEAD_DIMS:
        for dtype in DTYPES:
            plain = [
                *conditions.sm80_backwards(dtype, head_dim, "none"),
                heuristics.fwd_config(dtype, head_dim, False, capability),
            ]
            configs += [dataclasses.replace(c, mask=mask) for c in plain for mask in MASKS]
            if capability == (9, 0):
                sm90 = heuristics.sm90_configs(dtype, head_dim, False)
                configs += [dataclasses.replace(config, mask="local") for config in sm90]
                configs += [heuristics.sm90_bwd_config(dtype, head_dim, mask) for mask in MASKS]
    build(configs)


@pytest.fixture(params=["80", "90"])
def kernel_class(request: pytest.FixtureRequest):
    """Runs a test once with each kernel class."""
    if request.param == "90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0")
    with conditions.class_of_kernels(request.param):
        yield request.param


@pytest.fixture
def poisoned_outputs():
    with conditions.outputs_of_nan():
        yield


@pytest.fixture
def busy_memory():
    """Returns ``busy_memory()``, which has a few SMs read and write 100 MB on a side stream.

    One CTA computes one row, so that few SMs are taken: a kernel that fills every SM would run
    before or after ours, not at the same time.
    """
    rows = torch.rand(24, 2**19, device="cuda")
    results = torch.empty_like(rows)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()

    def start() -> None:
        with torch.cuda.stream(side):
            torch.softmax(rows, 1, out=results)

    yield start
    torch.cuda.synchronize()
