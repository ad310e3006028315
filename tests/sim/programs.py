"""Programs of small kernels on top of the simulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from flashcute.jit import build, sources, toolchain
from flashcute.jit.build import Unit
from flashcute.sim.build import RUNTIME_SOURCES, simulator_dir

_FOLDER = Path(__file__).parent
_FLAGS = ("-std=c++20", "-O1", "-w", "-pthread", "-fno-strict-aliasing")
_RUNTIME = "".join(f'#include "{source}.cpp"\n' for source in RUNTIME_SOURCES)


def _build(name: str, source: str, flags: tuple[str, ...], libraries: tuple[str, ...] = ()) -> Path:
    cuda = toolchain.find_cuda_headers()
    simulator = simulator_dir()
    include = simulator / "include"
    headers = sorted(p.read_text() for p in include.rglob("*") if p.is_file())
    unit = Unit(
        name=name,
        target="sim-test",
        source=source,
        suffix=".cpp",
        flags=(*_FLAGS, *flags),
        libraries=libraries,
        overriding_dirs=(include, include / "sim"),
        project_dirs=(_FOLDER, simulator / "src", sources.kernel_include_dir()),
        external_dirs=(sources.cutlass_include_dir(), cuda.include, cuda.cccl),
        external=tuple(headers),
    )
    return build.build(unit, toolchain.find_host_compiler()).artefact.path


def program(stem: str, *extra_flags: str) -> Path:
    """Compiles ``<stem>.cpp`` of this folder with the simulator."""
    return _build(stem, _RUNTIME + (_FOLDER / f"{stem}.cpp").read_text(), extra_flags)


def with_racecheck(stem: str) -> Path:
    """Likewise for ThreadSanitizer, which must not see the simulator's own accesses."""
    shared = ("-fPIC", "-shared", "-DSIM_TSAN")
    runtime = _build("runtime_tsan", _RUNTIME, shared, ("-Wl,--no-as-needed", "-ltsan"))
    source = f"// {runtime.name}\n{(_FOLDER / f'{stem}.cpp').read_text()}"
    return _build(f"{stem}_tsan", source, ("-fsanitize=thread", "-g1"), (str(runtime),))


def run(path: Path, case: str, seed: int = 0) -> dict[str, str]:
    """What the case printed: code, error and counters; fails where a result was wrong."""
    done = subprocess.run(
        [path, case, str(seed)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{case}: {done.stdout}{done.stderr}"
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def race_of(path: Path, case: str, seed: int = 0) -> str:
    """ThreadSanitizer's report on a case, empty if there is none."""
    command = [str(path), case, str(seed)]
    if setarch := shutil.which("setarch"):  # gcc 12's cannot live with many random address bits
        command = [setarch, "-R", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stderr
