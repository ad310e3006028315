"""The platform tag of a wheel from what its shared objects ask of the C and C++ libraries.

A tag ``manylinux_2_28`` says that the wheel runs where glibc is 2.28 or later (PEP 600).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

_OLDEST = 17
# The newest GLIBCXX_3.4.x that libstdc++ has on systems of a glibc 2.y, by auditwheel's policies.
_GLIBC_OF_GLIBCXX = {19: 17, 22: 24, 24: 27, 28: 31, 29: 34, 30: 35, 33: 39}


def tag(objects: Iterable[Path], platform: str) -> str:
    """Returns the oldest manylinux tag that fits ``objects``, for a platform as ``linux_x86_64``.

    ``platform`` is returned as it is where the tag cannot be told: no Linux, no ``objdump``, a
    newer C++ library than those known here.
    """
    system, _, machine = platform.partition("_")
    if system != "linux":
        return platform
    needed = _OLDEST
    for path in objects:
        try:
            command = ["objdump", "-T", str(path)]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return platform
        glibcxx = max(map(int, re.findall(r"\bGLIBCXX_3\.4\.(\d+)", text)), default=0)
        fitting = [glibc for newest, glibc in _GLIBC_OF_GLIBCXX.items() if glibcxx <= newest]
        if not fitting:
            return platform
        needed = max(needed, min(fitting), *map(int, re.findall(r"\bGLIBC_2\.(\d+)", text)))
    return f"manylinux_2_{needed}_{machine}"
