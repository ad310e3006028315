"""The tool that runs thousands of seeded cases, here with cases that run on the CPU."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import conditions
import fuzz_gpu
import pytest
import scores
from asked import Gpu
from on_cpu import on_cpu
from stand_in_cases import BROKEN, DEAD, ODD, SILENT, WRONG

from flashcute import heuristics
from flashcute.config import HEAD_DIMS

FAMILIES = {
    "some": fuzz_gpu.Family("stand_in_cases"),
    "well": fuzz_gpu.Family("stand_in_cases", check="check_all_well", classes=("90",)),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns ``run(*arguments, nvcc="") -> (exit status, results)``.

    The compiler runs the shell command ``nvcc``, then writes a file that is never loaded.
    """

    def run(*arguments, nvcc=""):
        compiler = tmp_path / "bin" / "nvcc"
        compiler.parent.mkdir(exist_ok=True)
        compiler.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\n{nvcc}\n'
            'while [ "$1" != -o ]; do shift; done; echo > "$2"\n'
        )
        compiler.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        monkeypatch.setenv("FLASHCUTE_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setattr(fuzz_gpu, "gpu_of_machine", Gpu)
        place = tmp_path / "results" / "fuzz.json"
        arguments = ("--workers", "2", "--first-seed", "0", "--json", str(place), *arguments)
        status = fuzz_gpu.main(arguments, FAMILIES)
        return status, json.loads(place.read_text())

    return run


def test_all_well(run, capsys):
    status, results = run("--families", "well", "--cases", "30")
    assert status == 0 and results["failures"] == []
    found = results["families"]["well, class 90"]
    assert (found["cases"], found["failures"], found["not_run"]) == (30, 0, 0)
    assert results["kernels"] == results["kernels_missing_at_start"] == 2
    assert {"commit", "torch", "python"} <= results["machine"].keys()
    out = capsys.readouterr().out
    assert "well         class 90:     30 cases,    2 kernels, 0 of them backwards" in out
    assert "well, class 90: 30 cases, 0 failures\n" in out


def test_a_case_that_fails_stops_no_other(run, capsys):
    """A case may be wrong, raise, break its process, end it, or hang; all run in each class."""
    status, results = run("--families", "some", "--cases", "30", "--case-seconds", "15")
    assert status == 1
    for arch in ("80", "90"):
        found = results["families"][f"some, class {arch}"]
        assert (found["cases"], found["failures"], found["not_run"]) == (30, 5, 0)
        failures = {x["seed"]: x for x in results["failures"] if x["class"] == arch}
        assert failures.keys() == {WRONG, ODD, DEAD, SILENT, BROKEN}
        assert failures[WRONG]["failure"] == "Case(seed=3, d=64): wrong"
        assert failures[ODD]["failure"] == "Case(seed=5, d=64): ValueError: odd"
        assert "RuntimeError: an illegal memory" in failures[BROKEN]["failure"]
        assert failures[DEAD]["failure"] == "Case(seed=7, d=64): the process ended (4)"
        assert failures[SILENT]["failure"] == "Case(seed=9, d=64): nothing for 15 s"
    alone = f"--families some --classes 80 --first-seed {WRONG} --cases 1 --workers 1"
    assert f"Case(seed=3, d=64): wrong\npython tools/fuzz_gpu.py {alone}\n" in (
        capsys.readouterr().out
    )
    status, results = run(*alone.split())
    assert status == 1 and [x["seed"] for x in results["failures"]] == [WRONG]


def test_a_worker_is_ready_once_all_is_set_up(monkeypatch):
    """So what the set-up takes is not a case's time."""
    happened = []

    class Tasks:
        send = happened.append

        def recv(self):
            raise EOFError

    @contextlib.contextmanager
    def set_up():
        happened.append("set up")
        yield

    monkeypatch.setattr(conditions, "outputs_of_nan", set_up)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process goes on
    fuzz_gpu.work(Tasks(), FAMILIES, 1.0, 0)
    assert happened == ["set up", None]


def test_cases_of_some_head_dimensions(capsys):
    arguments = ("--families", "well", "--cases", "12", "--head-dims", "128", "--dry-run")
    assert fuzz_gpu.main(arguments, FAMILIES) == 0
    assert "12 cases,    1 kernels" in capsys.readouterr().out


def test_a_kernel_that_is_not_built_stops_the_cases_that_use_it(run, capsys):
    status, results = run("--families", "well", "--cases", "30", nvcc="exit 3")
    assert status == 1 and len(results["kernels_not_built"]) == 2
    found = results["families"]["well, class 90"]
    assert (found["cases"], found["failures"], found["not_run"]) == (15, 0, 15)
    assert "NOT BUILT: flashcute: building" in capsys.readouterr().out


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_was_done_is_kept(interrupted, run, monkeypatch, tmp_path):
    """Results are kept at the time limit and when interrupted, and the compilers are ended."""

    def end(self, fuzzer):
        if fuzzer.cases.total() == 15:  # all cases that need no kernel
            fuzzer.args.seconds = 0.0
            if interrupted:
                raise KeyboardInterrupt

    monkeypatch.setattr(fuzz_gpu.Progress, "__call__", end)
    pids = tmp_path / "pids"
    arguments = "--families", "well", "--cases", "30", "--jobs", "2"
    status, results = run(*arguments, nvcc=f"echo $$ >> {pids}; exec sleep 300")
    assert status == (128 + signal.SIGINT if interrupted else 0)
    found = results["families"]["well, class 90"]
    assert (found["cases"], found["failures"], found["not_run"]) == (15, 0, 15)
    left = {int(pid) for pid in pids.read_text().split()}
    deadline = time.monotonic() + 30
    while left and time.monotonic() < deadline:
        left = {pid for pid in left if os.path.exists(f"/proc/{pid}")}
    assert not left


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(fuzz_gpu, "gpu_of_machine", lambda: None)
    with pytest.raises(SystemExit, match="expected a GPU"):
        fuzz_gpu.main(["--cases", "1"])
    assert fuzz_gpu.main(["--cases", "30", "--families", "kvcache", "--dry-run"]) == 0
    assert "kvcache      class 90:     30 cases" in capsys.readouterr().out


@pytest.mark.parametrize("name", fuzz_gpu.FAMILIES)
def test_a_family_runs_on_the_cpu(name):
    """Cases of each family pass their check on the CPU, and their kernels are known."""
    family = fuzz_gpu.FAMILIES[name]
    make, check, kernels_of = map(family.function, (family.make, family.check, "kernels_of"))
    cases = [make(seed) for seed in range(fuzz_gpu.FIRST_SEED, fuzz_gpu.FIRST_SEED + 8)]
    if name == "kvcache":  # on the CPU positions beyond the rotary tables are an error
        cases = [case for case in cases if not case.rotary_dim or case.seqlen_q <= case.seqlen_new]
        assert len(cases) >= 4
    with on_cpu(), conditions.outputs_of_nan():
        failures = [failure for case in cases if (failure := check(case))]
    assert not failures
    for case in cases:
        with conditions.choosing("80"):
            assert all(c.arch == 80 or name == "bwd_sm90" for c in kernels_of(case, Gpu()))


@pytest.mark.parametrize("name", ["options", "varlen", "bwd_options", "bwd_varlen"])
def test_scores_are_changed_in_every_head_dimension(name):
    """Tests draw two or three head dimensions, to compile few kernels. The tool draws all."""
    assert scores.FUZZED == fuzz_gpu.FIRST_SEED
    make = fuzz_gpu.FAMILIES[name].function("make_case")
    cases = [make(seed) for seed in range(fuzz_gpu.FIRST_SEED, fuzz_gpu.FIRST_SEED + 400)]
    of_tests = [make(seed) for seed in range(400)]
    head_dims, few = (
        {heuristics.instantiated_head_dim(case.d) for case in drawn if case.scores.any}
        for drawn in (cases, of_tests)
    )
    assert head_dims == set(HEAD_DIMS) and few < head_dims


@pytest.mark.skipif(shutil.which("g++") is None, reason="the binding needs g++")
def test_the_kernels_that_are_built_are_those_that_the_binding_asks_for():
    here = pathlib.Path(__file__).parent
    folders = (here.parent, here, here / "cuda", here.parent / "tools")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(here / "host_fuzz.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].startswith("0 of "), run.stdout


@pytest.mark.parametrize("name", ["bwd", "bwd_options", "bwd_varlen", "bwd_sm90"])
def test_means_of_gradients_are_of_many_roundings(name):
    """In a mean of one rounding FlashAttention's own formula may exceed the rule of the mean."""
    family = fuzz_gpu.FAMILIES[name]
    make, few = family.function(family.make), 0
    for seed in range(500):
        case = make(seed)
        if hasattr(case, "seqlen_q"):
            lengths = [(case.seqlen_q, case.seqlen_k)] * case.b
        else:
            sides = case.used_q or case.lengths_q, case.used_k or case.lengths_k
            lengths = list(zip(*sides, strict=True))
        one_head = sum(min(pair) for pair in lengths)
        assert case.h % case.h_k == 0 and (one_head == 0 or case.h_k * one_head >= 16), case
        few += 0 < one_head < 16
    assert few >= 30
