"""Prints, beside pytest's own report, what did not run and, with several workers (``-n``), a line
for each test file in place of letters, which the workers' files would mix."""

from __future__ import annotations

import collections

import pytest
import torch

# Both are of tests/cuda: the number of deselected tests, and how many cases of each name ran.
DESELECTED = pytest.StashKey[int]()
CASES = pytest.StashKey[dict[str, int]]()

_left: dict[str, int] = {}  # from a file to the number of its tests that have not ended
_seconds: dict[str, float] = collections.defaultdict(float)
_outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        stash = session.config.stash
        session.config.workeroutput["not_run"] = stash.get(DESELECTED, 0)
        session.config.workeroutput["cases"] = stash.get(CASES, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    output, stash = getattr(node, "workeroutput", {}), node.config.stash
    # Every worker collects all tests, so the counts of deselected ones must not be added up.
    stash[DESELECTED] = max(stash.get(DESELECTED, 0), output.get("not_run", 0))
    cases = collections.Counter(stash.get(CASES, {}))
    cases.update(output.get("cases", {}))
    stash[CASES] = dict(cases)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if count := config.stash.get(DESELECTED, 0):
        terminalreporter.write_line(
            f"tests/cuda: {count} tests NOT RUN, deselected: torch {torch.__version__} sees no GPU",
            yellow=True,
        )
    if cases := config.stash.get(CASES, {}):
        counts = ", ".join(f"{count} {name}" for name, count in sorted(cases.items()))
        device = torch.cuda.get_device_name()
        terminalreporter.write_line(f"tests/cuda: cases checked on {device}: {counts}")


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    _left.update(collections.Counter(map(_file, ids)))  # every worker collects the same


def _of_worker(report: pytest.TestReport) -> bool:
    return hasattr(report, "node") and report.node.config.get_verbosity() <= 0


def _reason(report: pytest.TestReport) -> str:
    """Returns the exception's first line; pytest prints the traceback after all tests."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message.partition("\n")[0][:200] if crash is not None else ""


@pytest.hookimpl(wrapper=True)
def pytest_report_teststatus(report):
    category, letter, word = yield
    of_worker = isinstance(report, pytest.TestReport) and _of_worker(report)
    return category, "" if of_worker else letter, word


@pytest.hookimpl(trylast=True)  # after the terminal's hook, which asks for the status
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not _of_worker(report):
        return
    terminal = report.node.config.pluginmanager.get_plugin("terminalreporter")
    if report.failed:
        terminal.write_line(f"FAILED in {report.when}: {report.nodeid}", red=True)
        if why := _reason(report):
            terminal.write_line(f"  {why}", red=True)
    file = _file(report.nodeid)
    if report.when == "call" or not report.passed:
        _outcomes[file][report.outcome] += 1
    _seconds[file] += report.duration
    _left[file] -= report.when == "teardown"
    if report.when == "teardown" and not _left[file]:
        counts = ", ".join(f"{n} {name}" for name, n in _outcomes[file].items())
        left = sum(_left.values())
        terminal.write_line(f"{file}: {counts} in {_seconds[file]:.0f} s; {left} tests left")
