"""Kernels and the torch binding as shared objects: found, or built on first use, checked, loaded.

Importing this package starts no compiler and imports no torch.
"""

from .binding import load_binding
from .build import BuildResult
from .kernels import Kernel, build_kernels, get_kernel
from .sources import source_text
from .toolchain import BuildError

__all__ = [
    "BuildError",
    "BuildResult",
    "Kernel",
    "build_kernels",
    "get_kernel",
    "load_binding",
    "source_text",
]
