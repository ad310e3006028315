"""What is decided when a kernel is compiled: ``FwdConfig`` and ``BwdConfig`` of ``flash.h``.

A configuration validates itself, names itself and prints itself as the C++ designated
initialiser that the generated ``.cu`` files contain, so that Python, the file name and the symbol a
profiler shows all speak of the same value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

NAMESPACE = "flashcute"  # namespace of the torch operators: FLASHCUTE_NAMESPACE in kernel_table.h

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
DTYPES = ("fp16", "bf16")
MASKS = ("none", "causal", "local")
KERNEL_CLASSES = (80, 90)
MAX_HEAD_DIM = HEAD_DIMS[-1]

# Largest dynamic shared memory a CTA may ask for, by compute capability (CUDA C++ Programming
# Guide, table "Technical Specifications per Compute Capability").
MAX_SMEM_BYTES = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 7): 163 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (10, 3): 227 * 1024,
    (12, 0): 99 * 1024,
    (12, 1): 99 * 1024,
}


def _cpp(value: Any) -> str:
    """Returns a configuration's value as C++ spells it."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return "{" + ", ".join(f".{f.name} = {_cpp(getattr(value, f.name))}" for f in fields) + "}"
    if value in DTYPES:
        return f"flash::DType::{value}"
    if value in MASKS:
        return f"flash::MaskKind::{value}"
    return str(value).lower()


def _require(config: Any, ok: bool, field: str, supported: str) -> None:
    if not ok:
        name, value = type(config).__name__, getattr(config, field)
        raise ValueError(f"{name}: expected {field} {supported}, got {field}={value!r}")


@dataclasses.dataclass(frozen=True)
class FwdConfig:
    """One forward kernel. Field names, order and meaning are those of ``flash::FwdConfig``.

    Attributes:
        arch: Kernel class, 80 for mma.sync + cp.async, 90 for wgmma + TMA (compute capability 9.0).
        dtype: ``"fp16"`` or ``"bf16"``, of Q, K, V and O; accumulation is fp32.
        head_dim: Instantiated head dimension, one of :data:`HEAD_DIMS`.
        mask: ``"none"``, ``"causal"`` or ``"local"``, a window around the diagonal; both aligned to
            the bottom-right corner.
        tile_m: Query rows per CTA.
        tile_n: Keys per main loop step.
        warps: MMA warps per CTA. The sm90 class adds a warpgroup that loads.
        stages: K/V buffers in shared memory, 1 or 2; in the sm90 class 2 or 4.
        q_in_regs: k16 steps of Q's fragments kept in registers, up to ``head_dim // 16``; in the
            sm80 class none or all.
        min_ctas: CTAs per SM that the register budget must allow; in the sm90 class more than one
            only with 4 warps.
        ping_pong: sm90 class: warpgroups take turns in issuing their products.
        softcap: Scores become softcap * tanh(score / softcap).
        alibi: Scores are lowered by the distance of query and key.
        dropout: Attention weights are dropped at random.
        paged: Keys and values lie in pages, which a block table lists.

    Raises:
        ValueError: naming the field, its value and what is supported.
    """

    kind: ClassVar[str] = "fwd"
    dq_accum: ClassVar[int] = 0  # a backward's property; a forward has no such workspace

    arch: int
    dtype: str
    head_dim: int
    mask: str
    tile_m: int
    tile_n: int
    warps: int
    stages: int
    q_in_regs: int
    min_ctas: int
    ping_pong: bool = False
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    paged: bool = False

    def __post_init__(self) -> None:
        def require(ok: bool, field: str, supported: str) -> None:
            _require(self, ok, field, supported)

        require(self.arch in KERNEL_CLASSES, "arch", f"in {KERNEL_CLASSES}")
        require(self.dtype in DTYPES, "dtype", f"in {DTYPES}")
        require(self.head_dim in HEAD_DIMS, "head_dim", f"in {HEAD_DIMS}")
        require(self.mask in MASKS, "mask", f"in {MASKS}")
        require(self.tile_n in range(16, 257, 16), "tile_n", "to be a multiple of 16 up to 256")
        require(type(self.q_in_regs) is int, "q_in_regs", "to be an int, of k16 steps")
        for flag in ("ping_pong", "softcap", "alibi", "dropout", "paged"):
            require(isinstance(getattr(self, flag), bool), flag, "to be a bool")
        if self.arch == 80:
            self._require_sm80(require)
        else:
            self._require_sm90(require)

    def _require_sm80(self, require: Callable[[bool, str, str], None]) -> None:
        require(self.warps in (4, 8), "warps", "in (4, 8)")
        rows = 16 * self.warps
        require(
            self.tile_m > 0 and self.tile_m % rows == 0, "tile_m", f"to be a multiple of {rows}"
        )
        require(self.stages in (1, 2), "stages", "in (1, 2)")
        steps = (0, self.head_dim // 16)
        require(self.q_in_regs in steps, "q_in_regs", f"in {steps}")
        require(self.min_ctas in (1, 2, 3, 4), "min_ctas", "in (1, 2, 3, 4)")
        require(not self.ping_pong, "ping_pong", "to be False in the sm80 class")

    def _require_sm90(self, require: Callable[[bool, str, str], None]) -> None:
        require(self.warps in (4, 8, 12), "warps", "in (4, 8, 12), one to three warpgroups")
        require(self.tile_m == 16 * self.warps, "tile_m", f"to be {16 * self.warps}")
        require(self.tile_n >= 32, "tile_n", "to be at least 32 in the sm90 class")
        narrow = not self.paged or self.tile_n <= 128  # a lane of the producer loads one box
        require(narrow, "tile_n", "to be at most 128 with paged")
        require(self.stages in (2, 4), "stages", "in (2, 4), a power of two")
        steps = self.head_dim // 16
        require(self.q_in_regs in range(steps + 1), "q_in_regs", f"in 0 ... {steps}")
        # Only CTAs of one warpgroup share an SM; several warpgroups of a CTA take turns instead.
        several = (1, 2, 3, 4) if self.warps == 4 else (1,)
        require(self.min_ctas in several, "min_ctas", f"in {several} with {self.warps} warps")
        require(not self.ping_pong or self.warps > 4, "ping_pong", "to be False with 4 warps")

    @property
    def name(self) -> str:
        """The stem of the instantiation file: what it computes, without tile choices."""
        options = "" if self.mask == "none" else f"_{self.mask}"
        for option in ("softcap", "alibi", "dropout", "paged"):
            options += f"_{option}" * getattr(self, option)
        return f"flash_fwd_hdim{self.head_dim}_{self.dtype}{options}_sm{self.arch}"

    @property
    def variant(self) -> str:
        """The tile choices, which together with :attr:`name` identify the configuration."""
        tile = f"{self.tile_m}x{self.tile_n}"
        if self.arch == 90:
            turns = "_pp" if self.ping_pong else ""
            q = f"_qreg{self.q_in_regs}" if self.q_in_regs else ""
            ctas = f"_c{self.min_ctas}" if self.min_ctas > 1 else ""
            return f"{tile}_s{self.stages}{q}{turns}{ctas}"
        q = "_qreg" if self.q_in_regs else ""
        return f"{tile}_w{self.warps}_s{self.stages}{q}_c{self.min_ctas}"

    @property
    def full_name(self) -> str:
        """``name`` and ``variant``: unique per configuration; what ``Flash_kernel.name`` holds."""
        return f"{self.name}_{self.variant}"

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * self.warps + (128 if self.arch == 90 else 0)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory per CTA in bytes: Q, then ``stages`` buffers each of K and V.

        The sm90 class adds its barriers, 8 bytes each, and the descriptions of tiles, 84 bytes
        each, and rounds up to its alignment. CTAs that plan for themselves ask for their plan in
        addition (``CtaPlan`` of ``cta_plan.h``).
        """
        tiles = 2 * self.head_dim * (self.tile_m + 2 * self.stages * self.tile_n)
        if self.arch == 80:
            return tiles
        slots = 2 * self.stages
        barriers = 2 * self.warps // 4 + 4 * self.stages + 2 * slots
        return -(-(tiles + 8 * barriers + 84 * slots) // 1024) * 1024

    def to_cpp(self) -> str:
        """Returns the C++ initialiser, e.g. ``{.arch = 80, .dtype = flash::DType::bf16, ...}``."""
        return _cpp(self)


# The number of query rows of every backward tile divides this: kRowStatsMultiple of flash.h.
ROW_STATS_MULTIPLE = 128
# Query rows per semaphore of the backward: kSemaphoreRows of flash.h.
SEMAPHORE_ROWS = 64

# (keys of a CTA, queries of a step) of the sm90 class's backward, by head dimension. With 128
# queries each warpgroup computes half of dQ's rows; with 64 queries half of dQ's columns, in whole
# pages of shared memory. Above d = 128 dK and dV of 128 keys exceed the registers: two CTAs form a
# cluster, each computes half of the columns, and its warpgroups divide these.
SM90_BWD_TILES = {
    **{32: (128, 128), 64: (128, 128), 96: (128, 64)},
    **{128: (128, 64), 192: (64, 64), 256: (64, 64)},
}


# Options that kernels of a backward are compiled for, in addition to the mask.
BWD_OPTIONS = ("softcap", "alibi", "dropout", "varlen")


@dataclasses.dataclass(frozen=True)
class BwdTile:
    """The tile of one backward kernel, which owns rows of one side and visits those of the other.

    Attributes:
        rows: Rows that a CTA owns: queries for dQ, keys for dK and dV.
        step: Rows of the other side per main loop step.
        warps: MMA warps per CTA.
        stages: Buffers in shared memory of what a step loads, 1 or 2.
        min_ctas: CTAs per SM that the register budget must allow.
        warps_step: Warps along a step's rows and the columns of dK and dV: 1, or more with
            ``fused``; ``warps / warps_step`` warps divide ``rows``.

    Raises:
        ValueError: naming the field, its value and what is supported.
    """

    rows: int
    step: int
    warps: int
    stages: int
    min_ctas: int
    warps_step: int = 1

    def __post_init__(self) -> None:
        _require(self, self.warps in (4, 8), "warps", "in (4, 8)")
        _require(self, self.warps_step in (1, 2, 4), "warps_step", "in (1, 2, 4)")
        rows = 16 * self.warps // self.warps_step
        several = sorted({64, rows, 2 * rows})  # 64: all warps of the sm90 class share them
        _require(self, self.rows in several, "rows", f"in {several}")
        _require(self, self.step in range(16, 129, 16), "step", "to be a multiple of 16 up to 128")
        _require(self, self.stages in (1, 2), "stages", "in (1, 2)")
        _require(self, self.min_ctas in (1, 2, 3, 4), "min_ctas", "in (1, 2, 3, 4)")

    @property
    def variant(self) -> str:
        divided = f"x{self.warps_step}" if self.warps_step > 1 else ""
        return f"{self.rows}x{self.step}_w{self.warps}{divided}_s{self.stages}_c{self.min_ctas}"


@dataclasses.dataclass(frozen=True)
class BwdConfig:
    """The kernels of one backward. Fields, order and meaning are those of ``flash::BwdConfig``.

    Attributes:
        arch: Kernel class, 80 or 90.
        dtype: ``"fp16"`` or ``"bf16"``; accumulation is fp32.
        head_dim: Instantiated head dimension, one of :data:`HEAD_DIMS`.
        mask: As in :class:`FwdConfig`.
        dq: Tile of the kernel of dQ.
        dkv: Tile of the kernel of dK and dV, or of both kernels where these are split.
        split_dkv: dK and dV have a kernel each, as together they exceed the registers.
        fused: One kernel computes all gradients with the tile ``dkv``, which is equal to ``dq``.
            Its CTAs sum dQ up in global memory, in an order that varies from run to run unless a
            repeatable one is asked for. The sm90 class is always fused.
        softcap: As in :class:`FwdConfig`.
        alibi: As in :class:`FwdConfig`.
        dropout: As in :class:`FwdConfig`.
        varlen: The kernels are for a ragged batch.

    Raises:
        ValueError: naming the field, its value and what is supported.
    """

    kind: ClassVar[str] = "bwd"

    arch: int
    dtype: str
    head_dim: int
    mask: str
    dq: BwdTile
    dkv: BwdTile
    split_dkv: bool = False
    fused: bool = False
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    varlen: bool = False

    def __post_init__(self) -> None:
        _require(self, self.arch in KERNEL_CLASSES, "arch", f"in {KERNEL_CLASSES}")
        _require(self, self.dtype in DTYPES, "dtype", f"in {DTYPES}")
        _require(self, self.head_dim in HEAD_DIMS, "head_dim", f"in {HEAD_DIMS}")
        _require(self, self.mask in MASKS, "mask", f"in {MASKS}")
        for flag in ("split_dkv", "fused", *BWD_OPTIONS):
            _require(self, isinstance(getattr(self, flag), bool), flag, "to be a bool")
        if self.arch == 90:
            self._require_sm90()
            return
        for name in ("dq", "dkv"):
            tile = getattr(self, name)
            warps = tile.warps // tile.warps_step
            _require(self, tile.rows >= 16 * warps, name, "with 16 rows a warp or more")
            divides = self.fused or tile.warps_step == 1
            _require(self, divides, name, "with warps_step=1 without fused")
        multiple = ROW_STATS_MULTIPLE
        _require(self, multiple % self.dq.rows == 0, "dq", f"with rows that divide {multiple}")
        _require(self, multiple % self.dkv.step == 0, "dkv", f"with a step that divides {multiple}")
        if self.fused:
            _require(self, self.dq == self.dkv, "dq", "to be dkv with fused")
            _require(self, self.dkv.step % 32 == 0, "dkv", "with a step of whole 32 with fused")
            # Each warp has at least 16 columns: of dK and dV, whose columns warps_step warps
            # divide, and of dQ, whose rows two warps divide, or four where a step has 64 rows.
            columns = 16 * self.dkv.warps_step
            _require(self, self.head_dim % columns == 0, "dkv", "that divides head_dim with fused")
            whole = self.head_dim % (8 * self.dkv.warps) == 0 or self.dkv.step % 64 == 0
            _require(self, whole, "dkv", "with a step of 64 rows with fused")
            _require(
                *(self, self.dkv.step % (16 * self.dkv.warps_step) == 0, "dkv"),
                "with a step of 16 rows for each of warps_step",
            )
            _require(self, not self.split_dkv, "split_dkv", "to be False with fused")

    def _require_sm90(self) -> None:
        tile = BwdTile(*SM90_BWD_TILES[self.head_dim], 8, 2, 1)
        _require(self, self.dkv == tile, "dkv", f"to be {tile}")
        _require(self, self.dq == self.dkv, "dq", "to be dkv in the sm90 class")
        _require(self, self.fused, "fused", "to be True in the sm90 class")
        _require(self, not self.split_dkv, "split_dkv", "to be False in the sm90 class")

    @property
    def name(self) -> str:
        """What is computed, without tile choices."""
        options = "" if self.mask == "none" else f"_{self.mask}"
        options += "".join(f"_{option}" for option in BWD_OPTIONS if getattr(self, option))
        options += "_fused" * (self.fused and self.arch == 80)  # unfused ones exist beside it
        return f"flash_bwd_hdim{self.head_dim}_{self.dtype}{options}_sm{self.arch}"

    @property
    def variant(self) -> str:
        """The tile choices."""
        if self.arch == 90:
            return f"{self.dkv.rows}x{self.dkv.step}_s{self.dkv.stages}"
        if self.fused:
            return self.dkv.variant
        split = "_split" if self.split_dkv else ""
        return f"dq{self.dq.variant}_dkv{self.dkv.variant}{split}"

    @property
    def full_name(self) -> str:
        """``name`` and ``variant``: unique per configuration."""
        return f"{self.name}_{self.variant}"

    @property
    def threads(self) -> int:
        """Threads per CTA of the kernel with most; the kernel of the row statistics has 256."""
        if self.arch == 90:
            return 128 + 32 * self.dkv.warps
        return max(256, 32 * self.dq.warps, 32 * self.dkv.warps)

    @property
    def tile_m(self) -> int:
        """Query rows per CTA of the kernel of dQ; with ``fused`` query rows of a step."""
        return self.dkv.step if self.fused else self.dq.rows

    @property
    def dq_accum(self) -> int:
        """Floats of the workspace in which dQ is summed up, for each row of queries."""
        return self.head_dim if self.fused else 0

    @property
    def cluster(self) -> int:
        """CTAs of a cluster, which share a tile of keys; ``dkv.rows`` are the keys of one CTA."""
        return 2 if self.arch == 90 and self.head_dim > 128 else 1

    @property
    def repeatable_keys(self) -> float:
        """The most keys of a sequence with which dQ is bitwise repeatable, too. With ``fused`` the
        parts of two tiles of keys, added to 0, have one sum in either order; those of more do not.
        """
        return 2 * self.cluster * self.dkv.rows if self.fused else math.inf

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory in bytes per CTA of the kernel that asks for most.

        Each kernel has the two tiles that it owns and ``stages`` buffers of each of the two that it
        visits, but only one buffer of dO at d = 256 in the sm90 class. The kernel of dK and dV adds
        the statistics of the visited rows, 8 bytes each, and with ``fused`` dS, and P where
        ``warps_step`` is above 1 and warps share it. The sm90 class adds two buffers of dS, one of
        dQ up to d = 128, and zeros behind K at d = 96; above d = 128 it adds P in 32 bits and, from
        the cluster's other CTA, half of K's columns and two buffers of dS. It also adds its
        barriers and the descriptions of tiles, and rounds up.
        """

        def tiles(tile: BwdTile) -> int:
            return 4 * self.head_dim * (tile.rows + tile.stages * tile.step)

        stats = 8 * self.dkv.stages * self.dkv.step
        if self.arch == 90:
            ds = 2 * 2 * self.dkv.rows * self.dkv.step
            p = 4 * self.dkv.rows * self.dkv.step if self.head_dim > 128 else 0
            barriers = 4 + 4 * self.dkv.stages + 2 + 6 + 4 + (2 if p else 0)
            dq = 0 if p else 4 * self.head_dim * self.dkv.step
            other = self.head_dim * self.dkv.rows + ds + 80 if self.head_dim > 128 else 0
            if self.head_dim > 192:  # one buffer of dO
                other -= 2 * self.head_dim * self.dkv.step
            zeros = 2 * 32 * self.dkv.rows if self.head_dim == 96 else 0
            work = 68 * 2 + 16 * 3 + 8  # tiles under way, and the pieces of shared tiles
            total = tiles(self.dkv) + stats + ds + p + dq + other + zeros + 8 * barriers + work
            return -(-total // 1024) * 1024
        shared = 0 if not self.fused else 1 if self.dkv.warps_step == 1 else 2  # dS; or dS and P
        scores = 2 * shared * self.dkv.rows * self.dkv.step
        return max(tiles(self.dq), tiles(self.dkv) + stats + scores)

    def to_cpp(self) -> str:
        """Returns the C++ initialiser, in the form that :class:`FwdConfig` has."""
        return _cpp(self)
