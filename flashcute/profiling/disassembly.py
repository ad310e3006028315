"""Runs cuobjdump on a shared object or cubin: machine code and resources of its kernels."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from ..extras import install_command
from ..jit.toolchain import SYSTEM_CUDA
from . import sass


class ToolError(RuntimeError):
    """A required program of NVIDIA's is missing or fails."""


@dataclasses.dataclass(frozen=True)
class Binary:
    """One compiled kernel.

    Attributes:
        target: GPU of the machine code, e.g. ``"sm_90a"``.
        function: Its code.
        registers: Registers per thread at launch.
        smem_bytes: Static shared memory, without the launch's dynamic shared memory.
        stack_bytes: Stack bytes per thread; more than 0 where arrays or spills live in local
            memory.
    """

    target: str
    function: sass.Function
    registers: int
    smem_bytes: int
    stack_bytes: int

    @property
    def mmas(self) -> int:
        """Number of matrix instructions in its code."""
        return sum(x.warp_macs > 0 for x in self.function.instructions)


def find_cuobjdump() -> Path:
    """Finds cuobjdump on PATH, in ``CUDA_HOME``, the PyPI wheels or the toolkit's usual place.

    Raises:
        ToolError: where there is none.
    """
    folders = [Path(sysconfig.get_path("purelib")) / "nvidia"]
    wheels = sorted((path for f in folders for path in f.glob("cu[0-9]*")), reverse=True)
    home = os.environ.get("CUDA_HOME")
    roots = [*([Path(home)] if home else []), *wheels, SYSTEM_CUDA]
    on_path = shutil.which("cuobjdump")
    candidates = [*([Path(on_path)] if on_path else []), *(r / "bin" / "cuobjdump" for r in roots)]
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    raise ToolError(
        "flashcute profile: expected the disassembler cuobjdump, got none on PATH, in CUDA_HOME, "
        f"in the PyPI wheels or in /usr/local/cuda; {install_command('profile')} brings it"
    )


def _cuobjdump(option: str, path: Path) -> str:
    command = [str(find_cuobjdump()), option, str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, timeout=300
    )
    if done.returncode != 0:
        raise ToolError(
            f"flashcute profile: expected machine code in {path}, got from cuobjdump: "
            f"{(done.stderr or done.stdout).strip()}"
        )
    return done.stdout


def parse_resources(text: str) -> dict[str, dict[str, int]]:
    """Parses ``cuobjdump --dump-resource-usage``; returns each function's resources by its name."""
    found = re.findall(r"^\s*Function (\S+):\s*\n\s*(REG:.*)$", text, re.MULTILINE)
    return {
        name: {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", line)}
        for name, line in found
    }


def read_binary(path: Path) -> Binary:
    """Returns the kernel in a shared object or cubin; of several, the one with most MMAs.

    Raises:
        As :func:`read_binaries`.
    """
    return max(read_binaries(path), key=lambda binary: binary.mmas)


def read_binaries(path: Path) -> list[Binary]:
    """Returns all kernels in a shared object or cubin, in its order.

    Raises:
        ToolError: where cuobjdump is missing or finds no machine code.
        FileNotFoundError: where there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"flashcute profile: expected a file, got {path}")
    text = _cuobjdump("--dump-sass", path)
    try:
        functions = sass.parse(text)
    except ValueError as error:
        raise ToolError(
            f"flashcute profile: expected GPU machine code in {path}, got none"
        ) from error
    target = re.findall(r"^\s*(?:code for|arch =)\s*(sm_\w+)", text, re.MULTILINE)
    resources = parse_resources(_cuobjdump("--dump-resource-usage", path))
    return [
        Binary(
            target=target[-1],
            function=function,
            registers=resources[function.name]["REG"],
            smem_bytes=resources[function.name]["SHARED"],
            stack_bytes=resources[function.name]["STACK"],
        )
        for function in functions
    ]
