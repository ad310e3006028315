"""Rates of one SM per clock, by compute capability: the roofs for a kernel.

Sources: CUDA C++ Programming Guide, table "Throughput of Native Arithmetic Instructions" (results
per clock and SM); NVIDIA's architecture white papers for the tensor cores. That mma.sync reaches
only 63 % of Hopper's tensor peak, which is wgmma's: Luo et al., "Benchmarking and Dissecting the
Nvidia Hopper GPU Architecture", arXiv 2402.13499.
"""

from __future__ import annotations

import dataclasses

WARP = 32
SUBPARTITIONS = 4  # of an SM, each issues one instruction a clock
SMEM_BYTES = 128  # that the shared memory port moves in a clock


@dataclasses.dataclass(frozen=True)
class Machine:
    """Rates of one SM in a clock.

    Attributes:
        tensor_macs: Multiply-adds of 16-bit operands into fp32, at peak; on 8.6 and 8.9 that of the
            data centre GPUs, GeForce has half of it.
        mma_sync: The part of that peak that mma.sync can reach.
        fp32: Lanes of FADD, FMUL, FFMA; IMAD runs on half of them but is counted as FFMA.
        alu: Lanes of comparisons, logic and conversions between 32 and 16 bits.
        mufu: Lanes of exp2, reciprocal and the like.
    """

    tensor_macs: int
    mma_sync: float
    fp32: int
    alu: int
    mufu: int


_MACHINES = {
    (8, 0): Machine(tensor_macs=1024, mma_sync=1.0, fp32=64, alu=64, mufu=16),
    (8, 6): Machine(tensor_macs=512, mma_sync=1.0, fp32=128, alu=64, mufu=16),
    (8, 9): Machine(tensor_macs=512, mma_sync=1.0, fp32=128, alu=64, mufu=16),
    (9, 0): Machine(tensor_macs=2048, mma_sync=0.63, fp32=128, alu=64, mufu=16),
}


def machine(capability: tuple[int, int]) -> Machine | None:
    """Returns the rates of a compute capability, None where they are not known here."""
    return _MACHINES.get(capability)
