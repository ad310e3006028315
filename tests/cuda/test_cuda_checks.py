"""CUDA tensors that are refused, from the tables of bad_input*.py. No kernel is built for an
error."""

from __future__ import annotations

import bad_input
import bad_input_kvcache
import bad_input_varlen
import pytest
import torch

from flashcute import ops

REFUSED = [
    (table.__name__, case)
    for table in (bad_input, bad_input_varlen, bad_input_kvcache)
    for case in table.CASES
    if "cuda" in case.on and case.error is not None
]


@pytest.fixture(scope="session")
def _built_kernels() -> None:
    """Replaces the fixture that builds all kernels, as this file asks for none."""


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(problem) -> None:
        raise AssertionError("an odd input reached the choice of a kernel")

    monkeypatch.setattr(ops, "_choose", choose)


@pytest.mark.filterwarnings(*bad_input.WARNINGS)
@pytest.mark.parametrize(
    ("table", "case"), REFUSED, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_odd_input_is_refused(table: str, case, no_kernel) -> None:
    failure = case.failure("cuda")
    assert failure is None, failure
    torch.cuda.synchronize()  # the context survived
