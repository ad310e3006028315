"""What a build shows on a terminal and in a log."""

from __future__ import annotations

import pytest

from flashcute.jit import build
from flashcute.jit.progress import Progress

UNITS = [build.Unit(f"unit{i}", "host", "", ".cpp", ()) for i in range(3)]


def result(i, seconds=2.0, error=None):
    return build.BuildResult(UNITS[i], None, seconds, error)


def test_a_log_names_what_compiles_now_and_for_how_long(capsys):
    clock = [0.0]
    with Progress(3, terminal=False, now=lambda: clock[0]) as shown:
        for second in range(0, 70, 5):
            clock[0] = float(second)
            shown.running([(UNITS[0], clock[0])] + [(UNITS[1], clock[0] - 40)] * (second >= 40))
        shown.finished(result(0, 70.2))
        shown.finished(result(1, error="flashcute: building unit1 failed"))
        shown.finished(result(2, 0.0))
    assert capsys.readouterr().err.splitlines() == [
        "build 0/3: compiling unit0 for host",
        "build 0/3: still compiling unit0 for host, 30 s",
        "build 0/3: compiling unit1 for host",
        "build 0/3: still compiling unit0 for host, 60 s",
        "build 1/3: unit0 for host, 70 s",
        "build 2/3: failed: flashcute: building unit1 failed",
    ]


def test_a_terminal_shows_what_compiles_now_and_for_how_long(capsys):
    with Progress(3, terminal=True) as shown:
        shown.finished(result(0))
        shown.running([(UNITS[1], 41.2), (UNITS[2], 7.0)])
        drawn = capsys.readouterr().err
        shown.finished(result(1, error="it failed"))
        shown.finished(result(2))
    assert "build 1/3" in drawn and "unit1 for host 41 s; unit2 for host 7 s" in drawn
    after = capsys.readouterr().err
    assert "it failed" in after and "build 3/3" in after


@pytest.mark.parametrize("seconds", [0.0, 3.0])
def test_what_was_there_already_fills_no_log(seconds, capsys):
    with Progress(1, terminal=False) as shown:
        shown.finished(result(0, seconds))
    assert len(capsys.readouterr().err.splitlines()) == (seconds > 0)
