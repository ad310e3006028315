"""The lengths that the binding's kernel table uses as keys are the same in C++ and in Python."""

from __future__ import annotations

import ctypes
import random

import pytest

from flashcute.jit import build, sources, toolchain
from flashcute.problem import rounded_length, typical_length

SOURCE = """
#include "kernel_table.h"
extern "C" int32_t rounded(int32_t length) { return flash::rounded_length(length); }
extern "C" int32_t typical(int64_t total, int64_t b, int64_t longest) {
    return flash::typical_length(total, b, longest);
}
"""


@pytest.fixture(scope="module")
def lib() -> ctypes.CDLL:
    unit = build.Unit(
        name="kernel_table_cases",
        target="host",
        source=SOURCE,
        suffix=".cpp",
        flags=("-std=c++20", "-O1", "-fPIC", "-shared"),
        project_dirs=(sources.kernel_include_dir(),),
        external_dirs=(),
        external=(),
    )
    found = ctypes.CDLL(build.build(unit, toolchain.find_host_compiler()).artefact.path)
    found.typical.argtypes = (ctypes.c_int64,) * 3
    return found


def test_lengths_are_rounded_alike(lib: ctypes.CDLL) -> None:
    draw = random.Random(0)
    lengths = [*range(2000), *(draw.randrange(2**24) for _ in range(2000))]
    assert [lib.rounded(x) for x in lengths] == [rounded_length(x) for x in lengths]


def test_typical_lengths_are_alike(lib: ctypes.CDLL) -> None:
    draw = random.Random(0)
    batches = [
        (0, 0, 0),
        (0, 3, 5),
        (7, 1, 7),
        (7, 1, 100),
        (3, 3, 2),
        (16384 + 63 * 128, 64, 16384),
    ]
    for _ in range(2000):
        b, longest = draw.randint(1, 600), draw.randint(1, 40_000)
        batches.append((draw.randint(0, b * longest), b, longest))
    found = [typical_length(*batch) for batch in batches]
    assert [lib.typical(*batch) for batch in batches] == found
    for length, (total, b, longest) in zip(found, batches, strict=True):
        assert 1 <= length <= max(longest, 1)
        assert length >= int(min(total / max(b, 1), longest))
