"""Runs and checks the CUDA kernels on the CPU: the same sources, compiled with g++ over ``csrc/sim``.

:func:`run_fwd` executes one configuration on CPU tensors and returns outputs, exact counters and a
verdict. ``csrc/sim/README.md`` says what is modelled and what is not.
"""

from .build import CHECKERS, build_kernels, build_runners
from .run import COPY_MODES, SimResult, run_fwd

__all__ = ["CHECKERS", "COPY_MODES", "SimResult", "build_kernels", "build_runners", "run_fwd"]
