"""Programs of small kernels on top of the simulator."""

from __future__ import annotations

import subprocess
from pathlib import Path

from flashcute.jit import build, sources, toolchain
from flashcute.jit.build import Unit
from flashcute.sim.build import RUNTIME_SOURCES, simulator_dir


def program(stem: str, *extra_flags: str) -> Path:
    """Compiles ``<stem>.cpp`` of this folder with the simulator."""
    cuda = toolchain.find_cuda_headers()
    simulator = simulator_dir()
    folder = Path(__file__).parent
    cases = (folder / f"{stem}.cpp").read_text()
    text = "".join(f'#include "{source}.cpp"\n' for source in RUNTIME_SOURCES) + cases
    include = simulator / "include"
    headers = sorted(p.read_text() for p in include.rglob("*") if p.is_file())
    unit = Unit(
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
    result = build.build(unit, toolchain.find_host_compiler())
    return result.artefact.path


def run(path: Path, case: str, seed: int = 0) -> dict[str, str]:
    """What the case printed: code, error and counters; fails where a result was wrong."""
    done = subprocess.run(
        [path, case, str(seed)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{case}: {done.stdout}{done.stderr}"
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())
