"""``python -m flashcute doctor`` on machines that lack one thing."""

from __future__ import annotations

import argparse
import builtins
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from flashcute import doctor, shipped
from flashcute.jit import binding, build, kernels, sources, toolchain

ROOT = Path(__file__).resolve().parents[1]


class Driver:
    """A stand-in for libcuda.so.1 of a driver for one version of CUDA."""

    def __init__(self, number):
        self.number = number

    def cuDriverGetVersion(self, pointer):
        pointer._obj.value = self.number


@pytest.fixture
def whole(monkeypatch, tmp_path):
    """Makes the machine one that lacks nothing."""
    monkeypatch.setenv("FLASHCUTE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor.ctypes, "CDLL", lambda name: Driver(13010))
    monkeypatch.setattr(doctor, "_capabilities", lambda: {(9, 0): "NVIDIA H100"})
    monkeypatch.setattr(doctor, "_places", lambda: {"90": Counter({"cache": 1, "not built": 2})})
    compiler = toolchain.Compiler(Path("/usr/bin/some"), "some compiler, release 13.0")
    monkeypatch.setattr(toolchain, "find_nvcc_alone", lambda: compiler)
    monkeypatch.setattr(toolchain, "find_host_compiler", lambda: compiler)
    monkeypatch.setattr(build, "find_ninja", lambda: "/usr/bin/ninja")
    monkeypatch.setattr(sources, "require_cutlass", lambda: None)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: argparse.Namespace(free=2**40))


def examine(capsys):
    """Runs the command and checks its output; returns what is missing, with how to mend it."""
    status = doctor.run(argparse.Namespace())
    printed = capsys.readouterr().out
    found = doctor.examine()
    for name, finding in found.items():
        assert f"{name:<9}{finding.text}" in printed and finding.mend in printed
    missing = {n: f"{f.text}; {f.mend}" for n, f in found.items() if f.mend and not f.limits}
    assert status == (1 if missing else 0)
    assert ("nothing is missing" in printed) == (not missing)
    return missing


def test_a_whole_machine(whole, capsys):
    assert examine(capsys) == {}
    found = doctor.examine()
    assert (
        found["GPU"].text == "NVIDIA H100, compute capability 9.0, kernels of class sm80 and sm90"
    )
    assert found["kernels"].text == "sm_90: 0 prebuilt, 1 cache, 2 not built"
    assert found["driver"].text == "for CUDA 13.1"


def break_torch_away(patch):
    real = builtins.__import__

    def without_torch(name, *args, **kwargs):
        if name.partition(".")[0] == "torch":
            raise ImportError("No module named 'torch'")
        return real(name, *args, **kwargs)

    patch.setattr(builtins, "__import__", without_torch)


def raises(error):
    def call(*args):
        raise error

    return call


BROKEN = {
    "no torch": ("torch", break_torch_away, "expected torch 2.10 or later, got No module"),
    "an old torch": (
        "torch",
        lambda patch: patch.setattr(torch, "__version__", "2.9.1+cu130"),
        "expected torch 2.10 or later, got 2.9.1+cu130; `pip install --upgrade torch`",
    ),
    "a torch for the CPU": (
        "torch",
        lambda patch: patch.setattr(torch.version, "cuda", None),
        "which is for the CPU alone; install a build for CUDA",
    ),
    "no driver": (
        "driver",
        lambda patch: patch.setattr(doctor.ctypes, "CDLL", raises(OSError())),
        "found none; install the driver",
    ),
    "an old driver": (
        "driver",
        lambda patch: patch.setattr(doctor.ctypes, "CDLL", lambda name: Driver(12080)),
        "expected a driver for CUDA 13, which torch is built for, got one for CUDA 12.8",
    ),
    "no GPU": (
        "GPU",
        lambda patch: patch.setattr(doctor, "_capabilities", dict),
        "expected a GPU that torch can use, got none; ",
    ),
    "an old GPU": (
        "GPU",
        lambda patch: patch.setattr(doctor, "_capabilities", lambda: {(7, 5): "Tesla T4"}),
        "expected a compute capability of 8.0, ",
    ),
    "no ninja": (
        "ninja",
        lambda patch: patch.setattr(
            build, "find_ninja", raises(toolchain.BuildError("flashcute: expected ninja; do this"))
        ),
        "expected ninja; do this",
    ),
    "no sources": (
        "CUTLASS",
        lambda patch: patch.setattr(
            sources, "require_cutlass", raises(toolchain.BuildError("flashcute: none; fetch them"))
        ),
        "none; fetch them",
    ),
    "a full disk": (
        "cache",
        lambda patch: patch.setattr(
            doctor.shutil, "disk_usage", lambda folder: argparse.Namespace(free=5 * 2**20)
        ),
        "got 5 MiB; free some, or set FLASHCUTE_CACHE_DIR",
    ),
    "a disk for data alone": (
        "cache",
        lambda patch: patch.setattr(
            doctor.os, "statvfs", lambda folder: argparse.Namespace(f_flag=os.ST_NOEXEC)
        ),
        "mounted noexec; set FLASHCUTE_CACHE_DIR",
    ),
    "no builds allowed": (
        "kernels",
        lambda patch: patch.setenv("FLASHCUTE_NO_BUILD", "1"),
        "while FLASHCUTE_NO_BUILD=1, got sm_90: 0 prebuilt, 1 cache, 2 not built; unset it",
    ),
    "a broken torch": (
        "GPU",
        lambda patch: patch.setattr(
            doctor, "_capabilities", raises(RuntimeError("CUDA driver initialization failed"))
        ),
        "RuntimeError: CUDA driver initialization failed",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_one_thing_is_missing(whole, capsys, monkeypatch, case):
    name, damage, expected = BROKEN[case]
    with pytest.MonkeyPatch.context() as patch:
        damage(patch)
        missing = examine(capsys)
    assert expected in missing.pop(name)
    # If torch fails, the GPUs' kernels are unknown, too. A driver that is too old for torch is also
    # too old for nvcc.
    others = {"a broken torch": {"kernels"}, "an old driver": {"nvcc"}}
    assert set(missing) <= others.get(case, set())


def test_nvcc_newer_than_the_driver_is_missing(whole, capsys, monkeypatch):
    """The compiler is CUDA 13's from PyPI, torch and the driver are for CUDA 12."""
    monkeypatch.setattr(doctor.ctypes, "CDLL", lambda name: Driver(12080))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    missing = examine(capsys)
    assert set(missing) == {"nvcc"}
    assert "expected nvcc of CUDA 12, which the driver is for, got /usr/bin/some" in missing["nvcc"]
    error = toolchain.BuildError("flashcute: expected nvcc, got none; `pip install nvcc`")
    monkeypatch.setattr(toolchain, "find_nvcc_alone", raises(error))
    assert examine(capsys)["nvcc"].startswith("expected nvcc, got none; install a newer driver, or")
    older = toolchain.Compiler(Path("/usr/bin/some"), "some compiler, release 12.9, V12.9.86")
    monkeypatch.setattr(toolchain, "find_nvcc_alone", lambda: older)
    assert examine(capsys) == {}


@pytest.mark.parametrize(
    ("capability", "release", "needed"),
    [
        ((12, 0), "12.6", "12.8"),
        ((12, 0), "12.8", None),
        ((12, 1), "12.8", "12.9"),
        ((10, 0), "12.4", "12.8"),
        ((10, 3), "12.9", None),
        ((9, 0), "12.0", None),
    ],
)
def test_nvcc_that_does_not_know_the_gpu_is_missing(
    whole, capsys, monkeypatch, capability, release, needed
):
    monkeypatch.setattr(doctor, "_capabilities", lambda: {capability: "some GPU"})
    nvcc = toolchain.Compiler(Path("/usr/bin/some"), f"some compiler, release {release}")
    monkeypatch.setattr(toolchain, "find_nvcc_alone", lambda: nvcc)
    missing = examine(capsys)
    if needed is None:
        assert missing == {}
    else:
        number = "{}.{}".format(*capability)
        expected = f"expected nvcc {needed} or later for compute capability {number}, got /usr/bin"
        assert set(missing) == {"nvcc"} and missing["nvcc"].startswith(expected)


@pytest.mark.parametrize("gcc", ["13.3.0", "12.2.0"])
def test_gcc_newer_than_nvcc_takes_is_missing(whole, capsys, monkeypatch, tmp_path, gcc):
    """nvcc's header names the newest gcc, and fails with an error for later ones."""
    header = tmp_path / "include" / "crt" / "host_config.h"
    header.parent.mkdir(parents=True)
    header.write_text("#if defined(__GNUC__)\n#if __GNUC__ > 12\n#error -- unsupported\n#endif\n")
    nvcc = toolchain.Compiler(tmp_path / "bin" / "nvcc", "some compiler, release 12.1")
    host = toolchain.Compiler(Path("/usr/bin/g++"), f"g++ (Ubuntu 13) {gcc}")
    monkeypatch.setattr(toolchain, "find_nvcc_alone", lambda: nvcc)
    monkeypatch.setattr(toolchain, "find_host_compiler", lambda: host)
    missing = examine(capsys)
    if gcc == "12.2.0":
        assert missing == {}
    else:
        assert set(missing) == {"C++"}
        assert missing["C++"].startswith(f"expected g++ 12 or older for {nvcc}, got /usr/bin/g++")
        assert "install g++-12 and set CXX to it" in missing["C++"]


def test_the_release_of_the_wheels_is_that_of_the_extra():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"nvidia-cuda-nvcc=={doctor._CUDA_OF_WHEELS}.' in text


def test_a_display_card_is_not_the_gpu(whole, capsys, monkeypatch):
    both = {(7, 5): "Tesla T4", (9, 0): "NVIDIA H100"}
    monkeypatch.setattr(doctor, "_capabilities", lambda: both)
    assert examine(capsys) == {}
    assert "Tesla T4 of 7.5, without kernels; NVIDIA H100" in doctor.examine()["GPU"].text


def test_all_shipped_kernels_are_looked_for(monkeypatch):
    monkeypatch.setattr(doctor, "_capabilities", lambda: {(7, 5): "T4", (9, 0): "NVIDIA H100"})
    monkeypatch.setattr(kernels, "find_built", lambda config, target: ("prebuilt", None))
    count = len(shipped.dense_configs((9, 0))) + len(shipped.configs_of_calls((9, 0)))
    assert doctor._places() == {"90": Counter({"prebuilt": count})}


@pytest.mark.parametrize("places", [{"prebuilt": 3}, {"cache": 3}, {"prebuilt": 1, "cache": 2}])
def test_compilers_are_a_limit_where_all_that_ships_is_built(whole, capsys, monkeypatch, places):
    error = toolchain.BuildError("flashcute: expected nvcc, got none; install it")
    monkeypatch.setattr(toolchain, "find_nvcc_alone", raises(error))
    monkeypatch.setattr(binding, "find", lambda: "the binding")
    assert set(examine(capsys)) == {"nvcc"}
    monkeypatch.setattr(doctor, "_places", lambda: {"90": Counter(places)})
    assert doctor.run(argparse.Namespace()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "limited  nvcc     expected nvcc, got none" in lines
    assert "         mend     install it" in lines
    assert lines[-1].startswith("nothing is missing for shipped kernels; others")
    for find in (lambda: None, raises(toolchain.BuildError("flashcute: others can write there"))):
        monkeypatch.setattr(binding, "find", find)  # finds the binding, which launches kernels
        assert set(examine(capsys)) == {"nvcc"}


def command(**variables):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | variables
    return subprocess.run(
        [sys.executable, "-m", "flashcute", "doctor"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_of_a_machine_without_compilers_and_a_cache(tmp_path):
    (tmp_path / "file").write_text("")
    done = command(
        CUDA_HOME=str(tmp_path), CXX="no-compiler", FLASHCUTE_CACHE_DIR=str(tmp_path / "file" / "x")
    )
    assert done.returncode == 1 and done.stderr == ""
    lines = done.stdout.splitlines()
    last = lines[-1]
    for name in ("GPU", "nvcc", "C++", "cache"):
        assert name in last
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{'missing':<9}{name}"))
        assert lines[at + 1].startswith(f"{'':<9}mend") and len(lines[at + 1]) > 25
    assert "got CXX=no-compiler" in done.stdout and f"{tmp_path} (lacks" in done.stdout
    assert "expected a writable folder for compiled kernels" in done.stdout


def test_nvcc_is_there_without_a_host_compiler(tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    given = {"CUDA_HOME": str(tmp_path), "FLASHCUTE_CACHE_DIR": str(tmp_path / "cache")}
    printed = command(CXX="", PATH="/empty", **given).stdout
    assert f"{'ok':<9}{'nvcc':<9}{nvcc}" in printed
    assert f"{'missing':<9}{'C++':<9}expected a C++ compiler, got none on PATH" in printed
    assert printed.count("C++ compiler") == 1


def test_the_command_finds_what_is_there(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not there")
    done = command(FLASHCUTE_CACHE_DIR=str(tmp_path / "cache"))
    assert f"{'ok':<9}{'C++':<9}" in done.stdout and f"{'ok':<9}{'cache':<9}" in done.stdout


def test_a_wrong_variable_is_named():
    done = command(FLASHCUTE_FOO="1")
    assert done.returncode == 1 and "FLASHCUTE_FOO" in done.stderr
