"""Tensor maps of ragged batches in the simulator: rows of a sequence, zeros behind it, reports; and
the priority in L2 of the keys of a cache."""

import re

import pytest
from programs import program, run


@pytest.fixture(scope="module")
def cases():
    return program("simulator_cases_sm90_ragged")


@pytest.mark.parametrize("case", ["inside", "single"])
def test_rows_of_a_sequence_and_zeros_behind_it(cases, case):
    for seed in range(5):
        assert run(cases, case, seed)["code"] == "0"


@pytest.mark.parametrize(
    ("case", "report"),
    [
        ("behind", r"TMA for mbarrier 0 .* reads outside every tensor"),
        ("before", r"TMA for mbarrier 0 .* reads outside every tensor"),
        ("nowhere", r"TMA for mbarrier 0 .* reads its tensor's address, which is in no tensor"),
        ("next_tensor", r"TMA for mbarrier 0 .* reads outside the tensor of its descriptor"),
    ],
)
def test_report(cases, case, report):
    for seed in range(5):
        found = run(cases, case, seed)
        assert found["code"] == "700"
        assert re.search(report, found["error"]), found["error"]


def test_steps_of_rows_heads_and_entries_in_layouts_of_all_kinds(cases):
    assert run(cases, "axes")["code"] == "0"


def test_keys_of_a_small_cache_that_one_tile_reads_leave_l2_first(cases):
    assert run(cases, "hints")["code"] == "0"
