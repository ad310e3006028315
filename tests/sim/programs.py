"""Compiles and runs programs of small kernels on top of the simulator."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from flashcute.jit import build, sources, toolchain
from flashcute.jit.build import Unit
from flashcute.sim.build import RUNTIME_SOURCES, simulator_dir

# A program compiled with these flags traps at a signed integer overflow; in kernels the checker
# `ubcheck` reports such overflows.
_NO_OVERFLOW = "-fsanitize=signed-integer-overflow", "-fsanitize-undefined-trap-on-error"
UCONTEXT = ("-DSIM_UCONTEXT", *_NO_OVERFLOW)
# The programs of :func:`program`: the stem of a file in this folder, and further compiler flags.
_PROGRAMS = (
    ("simulator_cases", ()),
    ("simulator_cases", UCONTEXT),
    ("simulator_cases_sm90", ()),
    ("simulator_cases_sm90_async", ()),
    ("simulator_cases_sm90_cluster", ()),
    ("simulator_cases_sm90_copies", ()),
    ("simulator_cases_sm90_reduce", ()),
    ("simulator_cases_sm90_ragged", ()),
)
# The stems of the programs of :func:`with_racecheck`.
_RACECHECKED = tuple(f"simulator_cases_sm90_{of}" for of in ("async", "cluster", "copies"))

_FOLDER = Path(__file__).parent
_RUNTIME = "".join(f'#include "{source}.cpp"\n' for source in RUNTIME_SOURCES)


def _unit(name: str, text: str, flags: tuple[str, ...], libraries: tuple[str, ...] = ()) -> Unit:
    cuda = toolchain.find_cuda_headers()
    simulator = simulator_dir()
    include = simulator / "include"
    headers = sorted(p.read_text() for p in include.rglob("*") if p.is_file())
    return Unit(
        name=name,
        target="sim-test",
        source=text,
        suffix=".cpp",
        flags=("-std=c++20", "-O1", "-w", "-fno-strict-aliasing", *flags),
        libraries=libraries,
        overriding_dirs=(include, include / "sim"),
        project_dirs=(_FOLDER, simulator / "src", sources.kernel_include_dir()),
        external_dirs=(sources.cutlass_include_dir(), cuda.include, cuda.cccl),
        external=tuple(headers),
    )


def _build(units: Sequence[Unit]) -> list[Path]:
    results = build.build_many(units, toolchain.find_host_compiler())
    errors = [result.error for result in results if result.error]
    assert not errors, "\n".join(errors)
    return [result.artefact.path for result in results]


def _cases(stem: str) -> str:
    return (_FOLDER / f"{stem}.cpp").read_text()


@functools.cache
def _programs() -> dict[tuple[str, tuple[str, ...]], Path]:
    units = [_unit(stem, _RUNTIME + _cases(stem), flags) for stem, flags in _PROGRAMS]
    return dict(zip(_PROGRAMS, _build(units), strict=True))


def program(stem: str, *extra_flags: str) -> Path:
    """Returns the path of ``<stem>.cpp`` of this folder, compiled with the simulator; the first
    call compiles all programs in parallel."""
    return _programs()[stem, extra_flags]


@functools.cache
def _racechecked() -> dict[str, Path]:
    # The runtime is a separate shared object without instrumentation: ThreadSanitizer must not see
    # the simulator's own accesses.
    flags = ("-fPIC", "-shared", "-DSIM_TSAN")
    (runtime,) = _build([_unit("runtime_tsan", _RUNTIME, flags, ("-Wl,--no-as-needed", "-ltsan"))])
    units = [
        _unit(
            f"{stem}_tsan",
            f"// {runtime.name}\n{_cases(stem)}",
            ("-fsanitize=thread", "-g1"),
            (str(runtime),),
        )
        for stem in _RACECHECKED
    ]
    return dict(zip(_RACECHECKED, _build(units), strict=True))


def with_racecheck(stem: str) -> Path:
    """Returns the path of the program compiled with ThreadSanitizer, for :func:`race_of`."""
    return _racechecked()[stem]


def run(path: Path, case: str, seed: int = 0) -> dict[str, str]:
    """Returns the output of the case: code, error and counters. Fails if a result was wrong."""
    done = subprocess.run(
        [path, case, str(seed)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{case}: {done.stdout}{done.stderr}"
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def race_of(path: Path, case: str, seed: int = 0) -> str:
    """Returns ThreadSanitizer's report on a case, which is empty if it found nothing."""
    command = [str(path), case, str(seed)]
    # The sanitizer of gcc 12 fails where addresses are randomised in many bits.
    if setarch := shutil.which("setarch"):
        command = [setarch, "-R", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stderr
