"""The report says once what did not run and what was counted, with any number of workers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import reporting


def test_workers_are_added_up():
    config = SimpleNamespace(stash=pytest.Stash())
    for cases in ({"grid": 2}, {"grid": 3, "exact": 1}):
        output = {"not_run": 7, "cases": cases}
        reporting.pytest_testnodedown(SimpleNamespace(config=config, workeroutput=output))
    reporting.pytest_testnodedown(SimpleNamespace(config=config))  # a worker that crashed
    assert config.stash[reporting.DESELECTED] == 7
    assert config.stash[reporting.CASES] == {"grid": 5, "exact": 1}


def test_a_file_is_reported_when_its_last_test_ends(monkeypatch):
    lines: list[str] = []
    terminal = SimpleNamespace(write_line=lambda line, **_: lines.append(line))
    config = SimpleNamespace(
        get_verbosity=lambda: 0,
        pluginmanager=SimpleNamespace(get_plugin=lambda _: terminal),
    )
    for name in ("_left", "_seconds", "_outcomes"):
        monkeypatch.setattr(reporting, name, getattr(reporting, name).copy())
    reporting.pytest_xdist_node_collection_finished(["a.py::one", "b.py::one", "a.py::two"])
    left = sum(reporting._left.values())
    for test, outcome in {"a.py::one": "passed", "a.py::two": "failed"}.items():
        for when in ("setup", "call", "teardown"):
            was = outcome if when == "call" else "passed"
            crash = SimpleNamespace(reprcrash=SimpleNamespace(message="ValueError: why\nmore"))
            why = crash if was == "failed" else None
            report = pytest.TestReport(test, ("", 0, ""), {}, was, why, when, duration=2)
            report.node = SimpleNamespace(config=config)
            reporting.pytest_runtest_logreport(report)
    assert lines == [
        "FAILED in call: a.py::two",
        "  ValueError: why",
        f"a.py: 1 passed, 1 failed in 12 s; {left - 2} tests left",
    ]
