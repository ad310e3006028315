"""The GPU run's bookkeeping: no phase is lost, none runs past its limit, none hides another."""

from __future__ import annotations

import json
import pathlib
import re
import signal
import subprocess
import sys
import time

import check_gpu
import fuzz_gpu
import pytest

from flashcute import __main__ as main
from flashcute import heuristics
from flashcute.bench import command
from flashcute.bench.models import MODELS
from flashcute.bench.options import OPTIONS
from flashcute.config import HEAD_DIMS, MASKS


def script(text):
    return lambda _args, _seconds: ["-c", text]


@pytest.fixture
def phases(monkeypatch):
    def use(**commands):
        made = {
            name: check_gpu.Phase(20, command, 200, default=name != "extra")
            for name, command in commands.items()
        }
        monkeypatch.setattr(check_gpu, "PHASES", made)

    return use


def outcomes(folder):
    summary = json.loads((folder / "summary.json").read_text())
    return {name: result["outcome"] for name, result in summary.items()}


def test_phases_go_on_after_a_failure(phases, tmp_path, capsys):
    phases(
        first=script("print('one'); raise SystemExit(3)"),
        second=script("print('x' * 500 + 'the end')"),
    )
    assert check_gpu.main(["--out", str(tmp_path)]) == 1
    assert outcomes(tmp_path) == {"first": "FAILED (3)", "second": "passed"}
    out = capsys.readouterr().out
    assert "one" in out
    assert "the end" in out
    assert "x" * 300 not in out  # only the end of a log is shown, all of it is kept
    assert "x" * 500 in (tmp_path / "second.log").read_text()
    assert out.splitlines()[-1].endswith("passed")


def test_the_summary_names_what_had_no_time(phases, tmp_path):
    phases(one=script("pass"), two=script("pass"))
    assert check_gpu.main(["--out", str(tmp_path), "--total", "5"]) == 1
    assert set(outcomes(tmp_path).values()) == {"NOT RUN, no time left"}
    assert set(outcomes(tmp_path)) == {"one", "two"}


def test_success_is_zero(phases, tmp_path):
    phases(only=script("pass"))
    assert check_gpu.main(["--out", str(tmp_path)]) == 0


@pytest.fixture
def _in_the_background():
    """Ignores SIGINT, as processes and their children do that a shell starts with an ampersand."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_in_the_background")
def test_a_phase_out_of_time_may_finish_its_report(phases, tmp_path, capsys):
    waiting = (
        "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('partial')"
    )
    phases(slow=script(waiting), after=script("print('ran')"))
    assert check_gpu.main(["--out", str(tmp_path), "--limit", "slow=20"]) == 1
    assert outcomes(tmp_path) == {"slow": "OUT OF TIME", "after": "passed"}
    assert "partial" in capsys.readouterr().out


def test_what_a_phase_started_dies_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(check_gpu, "GRACE_S", 1)
    note = tmp_path / "child"
    text = f"""
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path({str(note)!r}).write_text(str(child.pid))
time.sleep(60)
"""
    start = time.monotonic()
    outcome, _ = check_gpu.run_phase([sys.executable, "-c", text], tmp_path / "log", 5)
    assert outcome == "OUT OF TIME"
    assert time.monotonic() - start < 30
    for _ in range(100):
        state = pathlib.Path(f"/proc/{note.read_text()}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the child is still running")


def test_no_phase_starts_without_time(phases, tmp_path):
    phases(only=script("pass"))
    assert check_gpu.main(["--out", str(tmp_path), "--total", "20"]) == 1


def test_phases_can_be_selected(phases, tmp_path):
    phases(first=script("raise SystemExit(1)"), second=script("pass"))
    assert check_gpu.main(["--out", str(tmp_path), "--phases", "second"]) == 0
    assert outcomes(tmp_path) == {"second": "passed"}


def test_what_is_no_default_runs_when_asked_for(phases, tmp_path):
    phases(usual=script("pass"), extra=script("raise SystemExit(1)"))
    assert check_gpu.main(["--out", str(tmp_path)]) == 0
    assert outcomes(tmp_path) == {"usual": "passed"}
    assert check_gpu.main(["--out", str(tmp_path), "--phases", "extra"]) == 1


@pytest.mark.parametrize("limit", ["tests", "nothing=3", "tests=", "tests=soon"])
def test_a_wrong_limit_is_refused(limit):
    with pytest.raises(SystemExit, match="PHASE=SECONDS"):
        check_gpu.parse(["--limit", limit])


def test_every_command_is_one_the_project_has(tmp_path):
    args = check_gpu.parse(["--out", str(tmp_path), "--model", "folder", "--bench", "--repeats 5"])
    for phase in check_gpu.PHASES.values():
        command = phase.command(args, 100.0)
        module = command[1] if command[0] == "-m" else command[0]
        if module not in ("flashcute", "pytest"):
            assert (check_gpu.ROOT / module).is_file()
    assert check_gpu.PHASES["model"].command(args, 1.0)[-2:] == ["--model", "folder"]
    assert check_gpu.PHASES["bench"].command(args, 100.0)[-2:] == ["--repeats", "5"]


@pytest.mark.parametrize(
    ("phase", "result", "points", "rows"),
    [
        ("bench", "fwd.json", 60, 1),
        ("models", "fwd_models.json", len(MODELS), 1),
        ("inputs", "fwd_inputs.json", 12, 26),
        ("options", "fwd_options.json", len(OPTIONS), 1),
    ],
)
def test_a_benchmark_measures_what_its_result_is_called(phase, result, points, rows, tmp_path):
    args = check_gpu.parse(["--out", str(tmp_path), "--bench=--sustained"])
    made = check_gpu.PHASES[phase].command(args, 100.0)
    options = main._parser().parse_args(made[2:])  # after -m flashcute
    wanted = command._points(options, on_gpu=True)
    assert [len(point) for point in wanted] == [rows] * points
    assert options.json == tmp_path / result
    assert (options.sustained, options.time_limit) == (1.0, 75.0)


def test_seeded_cases_end_before_their_phase(tmp_path):
    args = check_gpu.parse(["--out", str(tmp_path), "--fuzz=--families kvcache --cases 7"])
    name, *made = check_gpu.PHASES["fuzz"].command(args, 100.0)
    options = fuzz_gpu.parse(made, fuzz_gpu.FAMILIES)
    assert (name, options.seconds) == ("tools/fuzz_gpu.py", 75.0)
    assert (options.json, options.families, options.cases) == (
        tmp_path / "fuzz.json",
        ["kvcache"],
        7,
    )


def test_a_progress_bar_shows_as_one_line(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"10%\r50%\r100%\nend\n")
    assert check_gpu._tail(log, 100) == "100%\nend"


# Collects tests as if there were a Hopper GPU, and runs none.
COLLECT = """
import sys, pytest, torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.get_device_name = lambda *_: "none"
sys.exit(pytest.main([*sys.argv[1:], "--collect-only", "-q", "-p", "no:cacheprovider"]))
"""


def collected(phase):
    """Returns (test, kernel) of each test that a phase would run."""
    made = check_gpu.PHASES[phase].command(check_gpu.parse([]), 100.0)
    command = [sys.executable, "-c", COLLECT, *(x for x in made[2:] if x != "-v")]
    run = subprocess.run(command, cwd=check_gpu.ROOT, capture_output=True, text=True, check=False)
    found = re.findall(r"::(\w+)\[(\w+)", run.stdout)
    assert found, run.stdout + run.stderr
    return found


def test_a_phase_of_the_backward_runs_the_kernels_of_a_head_dimension():
    found = collected("bwd-96")
    assert len({test for test, _ in found}) >= 5
    kernels = {heuristics.sm90_bwd_config("bf16", 96, mask).full_name for mask in MASKS}
    assert {kernel for test, kernel in found if test == "test_random_lengths"} == kernels
    assert {kernel for _, kernel in found} == kernels
    assert all(f"bwd-{d}" in check_gpu.PHASES for d in HEAD_DIMS)
