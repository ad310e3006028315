"""Wheels' platform tags, of shared objects built here and of made-up ones."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import types
from pathlib import Path

import manylinux
import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[1]


def objdump(monkeypatch, *texts):
    """Makes objdump print these texts, one for each file."""
    printed = iter(texts)
    monkeypatch.setattr(
        manylinux.subprocess,
        "run",
        lambda *args, **options: types.SimpleNamespace(stdout=next(printed)),
    )


@pytest.mark.parametrize(
    ("texts", "tag"),
    [
        ([], "manylinux_2_17_x86_64"),
        (["GLIBC_2.2.5 GLIBC_2.14"], "manylinux_2_17_x86_64"),
        (["(GLIBC_2.34) memcpy", "GLIBC_2.28"], "manylinux_2_34_x86_64"),
        (["GLIBC_2.14 GLIBCXX_3.4.21"], "manylinux_2_24_x86_64"),
        (["GLIBC_2.28 GLIBCXX_3.4.30 GLIBCXX_3.4"], "manylinux_2_35_x86_64"),
        (["GLIBC_2.14 GLIBCXX_3.4.99"], "linux_x86_64"),
    ],
)
def test_the_oldest_system_that_has_it_all(monkeypatch, texts, tag):
    objdump(monkeypatch, *texts)
    files = [Path(f"{i}.so") for i in range(len(texts))]
    assert manylinux.tag(files, "linux_x86_64") == tag


def test_what_cannot_be_told_stays(monkeypatch, tmp_path):
    assert manylinux.tag([tmp_path / "none.so"], "linux_x86_64") == "linux_x86_64"
    assert manylinux.tag([], "any") == "any"
    assert manylinux.tag([], "win_amd64") == "win_amd64"
    assert manylinux.tag([], "linux_aarch64") == "manylinux_2_17_aarch64"
    monkeypatch.setenv("PATH", "")
    assert manylinux.tag([tmp_path / "none.so"], "linux_x86_64") == "linux_x86_64"


@pytest.fixture
def build_wheel(monkeypatch):
    """Returns a function that makes setup.py's command, and does not run it."""
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    defined = runpy.run_path(str(ROOT / "setup.py"))

    def make(folder):
        package = defined["Package"]({"name": "flashcute", "version": "0"})
        built = defined["BuildWheel"](package)
        built.ensure_finalized()
        built.bdist_dir = str(folder)
        return built

    return make


def test_a_wheel_with_kernels_is_of_the_glibc_they_need(monkeypatch, build_wheel, tmp_path):
    if shutil.which("g++") is None or shutil.which("objdump") is None:
        pytest.skip("g++ and objdump are not there")
    folder = tmp_path / "flashcute" / "prebuilt" / "sm_80"
    folder.mkdir(parents=True)
    (tmp_path / "a.cpp").write_text('#include <cstdio>\nvoid f() { std::puts(""); }\n')
    command = ["g++", "-shared", "-fPIC", str(tmp_path / "a.cpp"), "-o", str(folder / "a.so")]
    subprocess.run(command, check=True)
    monkeypatch.setenv("FLASHCUTE_PREBUILD", "80")
    python, abi, platform = build_wheel(tmp_path).get_tag()
    assert (python, abi) == ("py3", "none")
    assert re.fullmatch(r"manylinux_2_\d+_\w+", platform)
    monkeypatch.delenv("FLASHCUTE_PREBUILD")
    assert build_wheel(tmp_path).get_tag() == ("py3", "none", "any")


def test_no_release_of_torch_is_pinned():
    text = (ROOT / "pyproject.toml").read_text()
    (needs,) = re.findall(r"^dependencies = \[(.*)\]$", text, re.MULTILINE)
    assert '"torch>=2.10"' in needs and "==" not in needs
