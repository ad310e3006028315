"""Changes units so that they are compiled for machine code and the messages of ptxas alone."""

from __future__ import annotations

import dataclasses

from flashcute.jit.build import Unit


def without_host_code(unit: Unit) -> Unit:
    """Returns the unit compiled to a cubin.

    This omits the host's code, which describes and launches kernels and is a quarter of the
    compile time.
    """
    flags = [flag for flag in unit.flags if flag != "-shared"]
    return dataclasses.replace(unit, flags=(*flags, "-cubin"))
