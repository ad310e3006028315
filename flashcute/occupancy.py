"""How many CTAs of a kernel one SM holds, computed from the kernel's resources.

Limits: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability", and the
allocation rules of ``cuda_occupancy.h``. No GPU is needed.
"""

from __future__ import annotations

import dataclasses

from .config import MAX_SMEM_BYTES

_REGISTERS = 65536
_SUBPARTITIONS = 4
_REGISTER_UNIT = 256  # registers are given to a warp in such units
_SMEM_UNIT = 128
_SMEM_RESERVED = 1024  # by the system, for each CTA; an SM has this much more than a CTA may have

# Resident warps and CTAs per SM, by compute capability.
_WARPS_AND_CTAS = {
    (8, 0): (64, 32),
    (8, 6): (48, 16),
    (8, 7): (48, 16),
    (8, 9): (48, 24),
    (9, 0): (64, 32),
    (10, 0): (64, 32),
    (10, 3): (64, 32),
    (12, 0): (48, 24),
    (12, 1): (48, 24),
}


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """CTAs per SM, and which resource ends first: registers, shared memory, warps or CTAs."""

    ctas: int
    limit: str


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def warps_per_sm(capability: tuple[int, int]) -> int:
    """Returns how many warps one SM can hold at the same time."""
    return _WARPS_AND_CTAS[capability][0]


def ctas_per_sm(
    threads: int, registers: int, smem_bytes: int, capability: tuple[int, int]
) -> Occupancy:
    """Computes how many CTAs of one kernel are resident on one SM at the same time.

    Args:
        threads: Per CTA.
        registers: Per thread.
        smem_bytes: Static and dynamic shared memory per CTA.
        capability: Compute capability of the GPU.

    Returns:
        The count (0 where a single CTA does not fit) and the resource that limits it.
    """
    max_warps, max_ctas = _WARPS_AND_CTAS[capability]
    warps = -(-threads // 32)
    registers_per_warp = _round_up(registers * 32, _REGISTER_UNIT)
    resident = _SUBPARTITIONS * (_REGISTERS // _SUBPARTITIONS // registers_per_warp)
    # A launch is refused as if its warps were rounded up to a multiple of the subpartitions.
    if registers_per_warp * _round_up(warps, _SUBPARTITIONS) > _REGISTERS:
        resident = 0
    smem = _round_up(smem_bytes + _SMEM_RESERVED, _SMEM_UNIT)
    counts = {
        "registers": resident // warps,
        "shared memory": (MAX_SMEM_BYTES[capability] + _SMEM_RESERVED) // smem,
        "warps": max_warps // warps,
        "CTAs": max_ctas,
    }
    limit = min(counts, key=counts.__getitem__)
    return Occupancy(counts[limit], limit)
