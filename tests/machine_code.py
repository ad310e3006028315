"""A kernel's machine code, as cuobjdump prints it."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from flashcute.jit.toolchain import SYSTEM_CUDA

_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;", re.MULTILINE
)
_HGMMA = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)\.")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Opcode with its modifiers, and operands as printed."""

    opcode: str
    operands: str

    @property
    def product(self) -> tuple[str, int, int, int] | None:
        """Of a warpgroup's MMA: where A comes from, ``"smem"`` or ``"registers"``, m, n and k."""
        shape = _HGMMA.match(self.opcode)
        if shape is None:
            return None
        a = "smem" if "gdesc" in self.operands.split(",")[1] else "registers"
        return a, *map(int, shape.groups())


def find_cuobjdump() -> Path:
    """cuobjdump of PATH, ``CUDA_HOME``, the PyPI wheels or the toolkit's usual place.

    Raises:
        FileNotFoundError: where there is none.
    """
    on_path = shutil.which("cuobjdump")
    home = os.environ.get("CUDA_HOME")
    wheels = sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob("cu[0-9]*"), reverse=True)
    roots = [*([Path(home)] if home else []), *wheels, SYSTEM_CUDA]
    for path in [*([Path(on_path)] if on_path else []), *(r / "bin" / "cuobjdump" for r in roots)]:
        if os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(
        "expected the disassembler cuobjdump on PATH, in CUDA_HOME, in the PyPI wheels or in "
        f"{SYSTEM_CUDA}, got none; `pip install flashcute[test]` brings it"
    )


def instructions(path: Path) -> list[Instruction]:
    """Every instruction of the shared object's kernels, by address.

    Raises:
        FileNotFoundError: where the disassembler is missing.
        RuntimeError: with its message, where it finds no machine code.
    """
    command = [find_cuobjdump(), "--dump-sass", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    found = [Instruction(*groups) for groups in _INSTRUCTION.findall(done.stdout)]
    if done.returncode != 0 or not found:
        raise RuntimeError(
            f"expected machine code in {path}, got from {command[0]}: {done.stderr.strip()}; "
            "it needs nvdisasm beside it or on PATH: `pip install flashcute[test]` brings both"
        )
    return found
