"""Programs of small kernels on top of the simulator."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

from flashcute.jit import build, sources, toolchain
from flashcute.jit.build import Unit
from flashcute.sim.build import RUNTIME_SOURCES, simulator_dir

# What :func:`program` can be asked for: the stem of a file in this folder, and flags.
_PROGRAMS = (
    ("simulator_cases", ()),
    ("simulator_cases", ("-DSIM_UCONTEXT",)),
    ("simulator_cases_sm90", ()),
    ("simulator_cases_sm90_async", ()),
)


def _unit(stem: str, extra_flags: tuple[str, ...]) -> Unit:
    cuda = toolchain.find_cuda_headers()
    simulator = simulator_dir()
    folder = Path(__file__).parent
    cases = (folder / f"{stem}.cpp").read_text()
    text = "".join(f'#include "{source}.cpp"\n' for source in RUNTIME_SOURCES) + cases
    include = simulator / "include"
    headers = sorted(p.read_text() for p in include.rglob("*") if p.is_file())
    return Unit(
        name=stem,
        target="sim-test",
        source=text,
        suffix=".cpp",
        flags=("-std=c++20", "-O1", "-w", "-pthread", "-fno-strict-aliasing", *extra_flags),
        overriding_dirs=(include, include / "sim"),
        project_dirs=(folder, simulator / "src", sources.kernel_include_dir()),
        external_dirs=(sources.cutlass_include_dir(), cuda.include, cuda.cccl),
        external=tuple(headers),
    )


@functools.cache
def _programs() -> dict[tuple[str, tuple[str, ...]], Path]:
    units = [_unit(*program) for program in _PROGRAMS]
    results = build.build_many(units, toolchain.find_host_compiler())
    errors = [result.error for result in results if result.error]
    assert not errors, "\n".join(errors)
    return {name: r.artefact.path for name, r in zip(_PROGRAMS, results, strict=True)}


def program(stem: str, *extra_flags: str) -> Path:
    """``<stem>.cpp`` of this folder with the simulator, compiled side by side with all others."""
    return _programs()[stem, extra_flags]


def run(path: Path, case: str, seed: int = 0) -> dict[str, str]:
    """What the case printed: code, error and counters; fails where a result was wrong."""
    done = subprocess.run(
        [path, case, str(seed)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{case}: {done.stdout}{done.stderr}"
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())
