"""cp.async with mbarriers in the simulator: results, and reports of misuse."""

import re

import pytest
from programs import program, race_of, run, with_racecheck


@pytest.fixture(scope="module")
def cases():
    return program("simulator_cases_sm90_copies")


RIGHT = (
    *("copies_late", "copies_random", "copies_eager", "copies_of_zeros", "copies_loaded"),
    "copies_awaited_by_writers",
)


@pytest.mark.parametrize("case", RIGHT)
def test_result(cases, case):
    for seed in range(5):
        assert run(cases, case, seed)["code"] == "0"


_BYTE = r"warpgroup 1: a wgmma reads byte \d+"
_UNFENCED = rf"{_BYTE}(, stored by a thread|, written by cp.async,) without fence.proxy.async after"
_TRACKED = rf"{_BYTE}, written by cp.async, without fence.proxy.async after phase \d of mbarrier 0"
_UNAWAITED = rf"{_BYTE} without having waited for phase \d of mbarrier 0"
_OVERWRITTEN = r"overwritten too early: cp.async writes byte \d+, which a wgmma of warpgroup 1"


@pytest.mark.parametrize(
    ("case", "report"),
    [
        ("copies_unfenced", _UNFENCED),
        ("copies_unfenced_eager", _UNFENCED),
        ("copies_fenced_early", _UNFENCED),
        ("copies_fenced_early_eager", _UNFENCED),
        # In the simulator the fence of one thread publishes all stores; on the chip it need not.
        ("copies_one_fences", _TRACKED),
        ("copies_unawaited", rf"{_UNAWAITED}|{_OVERWRITTEN}"),
        ("copies_reused", rf"{_UNAWAITED}|{_OVERWRITTEN}"),
        ("copies_unread", r"load at byte \d+ without having waited for phase 1 of mbarrier 0"),
        ("copies_early", rf"{_BYTE}"),
        ("copies_twice", r"cp.async.mbarrier.arrive is pending|for phase [34] of mbarrier 0"),
        ("copies_silent", r"deadlock: .*mbarrier 0 .*127 of 128 arrived"),
    ],
)
def test_report(cases, case, report):
    for seed in range(5):
        found = run(cases, case, seed)
        assert found["code"] == "719"
        assert re.search(report, found["error"]), found["error"]


def test_races():
    cases = with_racecheck("simulator_cases_sm90_copies")
    assert race_of(cases, "copies_loaded") == ""
    assert "data race" in race_of(cases, "copies_raced")
