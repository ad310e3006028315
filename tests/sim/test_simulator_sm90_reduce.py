"""Bulk stores and reductions in the simulator, and polls of a counter: sums, their order and
reports."""

import re

import pytest
from programs import program, run


@pytest.fixture(scope="module")
def cases():
    return program("simulator_cases_sm90_reduce")


@pytest.mark.parametrize("case", ["reduce_late", "reduce_random", "reduce_eager"])
def test_sums_are_right_and_their_order_is_the_schedule(cases, case):
    found = [run(cases, case, seed) for seed in range(10)]
    assert {x["code"] for x in found} == {"0"}
    assert len({x["order"] for x in found}) > 1


@pytest.mark.parametrize(
    ("case", "code", "report"),
    [
        ("reduce_without_fence", 719, r"a TMA store reads byte 0, stored by .* without fence"),
        ("reduce_unwritten", 719, r"a TMA store reads byte 0, which has not been written"),
        ("reduce_only_read", 719, r"exits before a bulk store or reduction of its is complete"),
        (
            "reduce_overwritten",
            719,
            r"overwritten too early: byte \d+, which a TMA store of warp 0",
        ),
        ("reduce_misaligned", 716, r"cp.reduce.async.bulk of 256 bytes: address and size must be"),
        ("reduce_outside", 700, r"cp.reduce.async.bulk outside every tensor"),
        ("store_without_fence", 719, r"a TMA store reads byte 0, stored by .* without fence"),
        ("store_misaligned", 716, r"a store by cp.async.bulk of 256 bytes: address and size must"),
    ],
)
def test_report(cases, case, code, report):
    for seed in range(5):
        found = run(cases, case, seed)
        assert found["code"] == str(code)
        assert re.search(report, found["error"]), found["error"]


def test_what_is_added_behind_a_store_is_kept(cases):
    assert all(run(cases, "store", seed)["code"] == "0" for seed in range(10))


def test_what_is_added_beside_a_store_is_lost_at_times(cases):
    assert {run(cases, "store_unordered", seed)["order"] for seed in range(20)} == {"1", "2"}


def test_what_came_before_an_addition_is_seen_behind_a_poll(cases):
    assert all(run(cases, "poll", seed)["code"] == "0" for seed in range(10))


def test_a_poll_for_what_never_comes_is_a_deadlock(cases):
    found = run(cases, "poll_for_nothing", 0)
    assert found["code"] == "702"
    assert re.search("deadlock: a thread polls global memory", found["error"]), found["error"]
