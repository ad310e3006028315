"""Kernels compiled for their instructions, and for what ptxas says of them."""

from __future__ import annotations

import dataclasses

from flashcute.jit.build import Unit


def without_host_code(unit: Unit) -> Unit:
    """The unit as a cubin. The host's code, which describes and launches kernels, is a quarter of
    the compile time."""
    flags = [flag for flag in unit.flags if flag != "-shared"]
    return dataclasses.replace(unit, flags=(*flags, "-cubin"))
