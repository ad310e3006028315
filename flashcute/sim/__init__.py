"""Runs and checks the CUDA kernels on the CPU: their sources, compiled with g++ over ``csrc/sim``.

:func:`run_fwd` executes one configuration on CPU tensors and returns outputs, exact counters and a
verdict; :func:`run_bwd` does so with the kernels of a backward. ``csrc/sim/README.md`` lists what
is modelled and what is not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backward import run_bwd, run_varlen_bwd
    from .build import CHECKERS, build_kernels, build_runners, compile_together
    from .run import SimResult, run_fwd, run_varlen
    from .serving import run_serving

__all__ = [
    "CHECKERS",
    "COPY_MODES",
    "SimResult",
    "build_kernels",
    "build_runners",
    "compile_together",
    "run_bwd",
    "run_fwd",
    "run_serving",
    "run_varlen",
    "run_varlen_bwd",
]

# When asynchronous copies complete; the order is that of sim::CopyMode.
COPY_MODES = ("late", "random", "eager")

_HOMES = {
    **dict.fromkeys(("CHECKERS", "build_kernels", "build_runners", "compile_together"), "build"),
    **dict.fromkeys(("SimResult", "run_fwd", "run_varlen"), "run"),
    **dict.fromkeys(("run_bwd", "run_varlen_bwd"), "backward"),
    "run_serving": "serving",
}


def __getattr__(name: str) -> object:
    # Lazy, so that the command line imports torch only when it runs a kernel.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
