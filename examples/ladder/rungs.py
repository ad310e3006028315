"""The rungs of the ladder, from the naive kernel to the library's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

KERNELS = Path(__file__).resolve().parent / "kernels"
HEAD_DIMS = (64, 128)
DTYPES = ("fp16", "bf16")


@dataclasses.dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Attributes:
        number: Its place in the ladder, from 1.
        stem: Stem of its header's name in ``kernels``.
        idea: What is new, in a few words.
        counter: The quantity that is expected to move, a key of :data:`counters.COUNTERS`.
        predicted: The expected speed over the rung before, written down before the measurement and
            not changed since; README.md has the reasons.
        arch: Least compute capability, e.g. 80.
        fp32: Takes and returns float32.
    """

    number: int
    stem: str
    idea: str
    counter: str
    predicted: float | None
    arch: int = 80
    fp32: bool = False

    @property
    def name(self) -> str:
        return self.stem.removeprefix("rung_")

    @property
    def header(self) -> Path:
        return KERNELS / f"{self.stem}.h"

    def runs_on(self, capability: int) -> bool:
        """Whether a GPU of this compute capability, e.g. 90, runs the rung."""
        # Code for sm_90a runs on Hopper only.
        return capability // 10 == 9 if self.arch == 90 else capability >= self.arch

    @property
    def lines(self) -> int:
        """Number of lines of its header."""
        return len(self.header.read_text(encoding="utf-8").splitlines())


RUNGS = (
    Rung(1, "rung_01_naive", "FA1's loop order, fp32, one warp per head", "warps", None, fp32=True),
    Rung(2, "rung_02_grid", "a CTA per row tile and head, coalesced loads", "warps", 10),
    Rung(3, "rung_03_registers", "online softmax in registers", "shared_accesses", 5),
    Rung(4, "rung_04_warp_wmma", "tensor cores: one warp, WMMA", "instructions", 1),
    Rung(5, "rung_05_block_wmma", "four warps share tiles of 64 x 64", "l2_bytes", 2),
    Rung(6, "rung_06_row_blocks", "each warp keeps 16 whole rows", "shared_accesses", 1.3),
    Rung(7, "rung_07_mma", "mma.sync: S, P and O in registers", "shared_accesses", 1.2),
    Rung(8, "rung_08_swizzle", "swizzled shared memory", "bank_conflicts", 4),
    Rung(9, "rung_09_q_registers", "Q in registers", "shared_accesses", 1.1),
    Rung(10, "rung_10_cp_async", "cp.async, two buffers", "memory_stalls", 1.3),
    Rung(11, "rung_11_cute", "the same in CuTe", "instructions", 1),
    Rung(12, "rung_12_sm80", "the library's sm80 loop, reduced", "shared_accesses", 1.3),
    Rung(13, "rung_13_sm90", "TMA, WGMMA, warp specialisation", "instructions", 1.9, arch=90),
)


def find(text: str) -> Rung:
    """Returns the rung with a given number, name or stem.

    Raises:
        ValueError: if there is none.
    """
    for rung in RUNGS:
        if text in (str(rung.number), f"{rung.number:02d}", rung.name, rung.stem):
            return rung
    names = ", ".join(rung.name for rung in RUNGS)
    raise ValueError(f"ladder: expected a rung, one of {names} or its number, got {text!r}")
