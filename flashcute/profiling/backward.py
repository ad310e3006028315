"""The kernels of a backward that have products, as the static profile sees them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..config import BwdConfig, BwdTile

if TYPE_CHECKING:
    from .disassembly import Binary

# flash::BwdPass of the sm80 class, by its number in a mangled name, and its number of products. All
# passes compute S, all but dV's compute dP, and each has the products of its own results.
_PASSES = {0: ("dq", 3), 1: ("dkv", 4), 2: ("dk", 3), 3: ("dv", 2), 4: ("all", 5)}
# The number is followed, for "all" alone, by whether tiles of keys add to dQ in their order.
_PASS = re.compile(r"BwdPassE(\d)E+(Lb1E)?")
# The last template argument of the sm90 class's traits (KernelTraitsBwdSm90).
_STORES_FIRST = re.compile(r"flash_bwd_kernel_sm90.*Lb1E+v")


@dataclasses.dataclass(frozen=True)
class BwdKernel:
    """One main kernel of a backward.

    Attributes:
        config: Configuration of the whole backward.
        computes: ``"dq"``, ``"dkv"``, ``"dk"`` or ``"dv"`` where there are several, else ``"all"``,
            ``"all in order"`` where tiles of keys add to dQ in their order, or ``"all, first
            stored"`` where the first tiles of keys store dQ and later ones add to it, in the sm90
            class.
        products: Matrix products for each score, in each of its loops.
    """

    config: BwdConfig
    computes: str
    products: float

    @property
    def full_name(self) -> str:
        """The configuration's name, and what this kernel computes of it."""
        return f"{self.config.full_name} {self.computes}"

    @property
    def _tile(self) -> BwdTile:
        return self.config.dq if self.computes == "dq" else self.config.dkv

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return self.config.threads if self.config.arch == 90 else 32 * self._tile.warps

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory per CTA in bytes.

        If there are several kernels, it holds the owned tiles (one for dV alone, else two), the
        visited tiles, and the statistics of visited queries.
        """
        if self.config.fused:
            return self.config.smem_bytes
        tile, owned = self._tile, 1 if self.computes == "dv" else 2
        rows = owned * tile.rows + 2 * tile.stages * tile.step
        stats = 0 if self.computes == "dq" else 8 * tile.stages * tile.step
        return 2 * self.config.head_dim * rows + stats


def kernels(binaries: Iterable[Binary], config: BwdConfig) -> list[tuple[BwdKernel, Binary]]:
    """Returns the kernels with products among those of a backward's shared object, dQ first."""
    found = []
    for binary in binaries:
        if binary.mmas == 0:  # row statistics, the gradient of sinks, the rounding of dQ
            continue
        match = _PASS.search(binary.function.name)
        # Above d = 128 two warpgroups of the sm90 class divide the five products, in a loop each.
        divided = 2.5 if config.head_dim > 128 else 5
        computes, products = ("all", divided) if match is None else _PASSES[int(match[1])]
        if match is not None and match[2]:
            computes += " in order"
        if _STORES_FIRST.search(binary.function.name):
            computes += ", first stored"
        found.append((BwdKernel(config, computes, products), binary))
    return sorted(found, key=lambda pair: (pair[0].computes != "dq", pair[0].computes))
