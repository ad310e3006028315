"""Hopper's asynchronous instructions in the simulator: what they do, count and report."""

import re

import pytest
from programs import program, run


@pytest.fixture(scope="module")
def cases():
    return program("simulator_cases_sm90_async")


@pytest.mark.parametrize(
    "case",
    [
        *("dependent_late", "dependent_random", "dependent_eager", "dependent_by_mbarrier"),
        *("independent", "independent_never", "early_plain_load"),
    ],
)
def test_result(cases, case):
    for seed in range(5):
        assert run(cases, case, seed)["code"] == "0"


_THREAD_40 = r"block \(\d, 0, 0\), warp 1, lane 8: programmatic dependent launch: "


@pytest.mark.parametrize(
    ("case", "report"),
    [
        ("early_load", rf"^{_THREAD_40}load of in before griddepcontrol.wait"),
        ("early_load_eager", rf"^{_THREAD_40}load of in before griddepcontrol.wait"),
        ("early_store", rf"^{_THREAD_40}store of out before griddepcontrol.wait"),
        ("early_plain_store", r"^programmatic dependent launch: byte 160 of out was written"),
        ("early_async_copy", rf"^{_THREAD_40}cp.async of in before griddepcontrol.wait"),
        ("early_box", rf"^{_THREAD_40}TMA of boxes before griddepcontrol.wait"),
        ("early_atomic", rf"^{_THREAD_40}atomic of counter before griddepcontrol.wait"),
        ("untold", r"warp 1, lane \d+: programmatic dependent launch: load of in before"),
        ("never_waits", r"programmatic dependent launch: load of in before"),
        ("idle", r"^programmatic dependent launch: no thread executes griddepcontrol.wait"),
    ],
)
def test_report(cases, case, report):
    for seed in range(5):
        found = run(cases, case, seed)
        assert found["code"] == "719"
        assert re.search(report, found["error"]), found["error"]
