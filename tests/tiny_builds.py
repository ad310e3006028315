"""A C++ unit that is small enough to build often, and a compiler that counts its runs.

Builds differ from a kernel's only in the unit, the compiler and the cache folder.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from flashcute.jit import build
from flashcute.jit.toolchain import Compiler

ROOT = Path(__file__).resolve().parents[1]

# Counts its run in a file, then sleeps for TEST_SLEEP seconds, then compiles.
_COMPILER = """\
#!/bin/sh
[ "$1" = --version ] && exec g++ --version
echo run >> "$TEST_COUNT"
sleep "${TEST_SLEEP:-0}"
exec g++ "$@"
"""

# A process runs this: it builds the unit, loads it, and prints its path and its answer().
_PROCESS = """\
import ctypes, os, sys, time
from pathlib import Path
from flashcute.jit import build
sys.path.insert(0, os.environ["TEST_FOLDER"])
from tiny_builds import tiny_unit, counting_compiler
if "TEST_GO" in os.environ:
    while not os.path.exists(os.environ["TEST_GO"]):
        time.sleep(0.001)
folder = Path(os.environ["TEST_TMP"])
path = build.build(tiny_unit(folder), counting_compiler(folder)).artefact.path
print(path, ctypes.CDLL(str(path)).answer())
"""


def tiny_unit(folder: Path) -> build.Unit:
    return build.Unit(
        name="tiny",
        target="host",
        source='#include "answer.h"\nextern "C" int answer() { return kAnswer; }\n',
        suffix=".cpp",
        flags=("-shared", "-fPIC", "-O1"),
        project_dirs=(folder / "include",),
    )


def counting_compiler(folder: Path) -> Compiler:
    return Compiler(folder / "compiler", "counting 1.0")


def answer(path: Path) -> int:
    """Returns answer() of a shared object; loads a copy, as dlopen does not reload a known path."""
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(shutil.copy(path, folder)).answer()


def prepare(tmp_path, monkeypatch) -> Path:
    """Makes a folder with a header, a counting compiler and an empty cache; returns it."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "answer.h").write_text("constexpr int kAnswer = 42;\n")
    (tmp_path / "compiler").write_text(_COMPILER)
    (tmp_path / "compiler").chmod(0o755)
    monkeypatch.setenv("FLASHCUTE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TEST_COUNT", str(tmp_path / "count"))
    monkeypatch.setenv("TEST_TMP", str(tmp_path))
    monkeypatch.setenv("TEST_FOLDER", str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def make(tmp: Path) -> build.BuildResult:
    return build.build(tiny_unit(tmp), counting_compiler(tmp))


def runs(tmp: Path) -> int:
    count = tmp / "count"
    return len(count.read_text().splitlines()) if count.exists() else 0


def start_process(code: str = _PROCESS, **kwargs) -> subprocess.Popen:
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **kwargs)
