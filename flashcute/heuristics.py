"""Tuning has one home: shapes and GPU in, configuration out.

C++ never chooses a tile. Each number below carries the limit it hits or the measurement behind it.
"""

from __future__ import annotations

import dataclasses

from .config import HEAD_DIMS, MAX_SMEM_BYTES, FwdConfig


@dataclasses.dataclass(frozen=True)
class FwdProblem:
    """One forward call as far as the choice of a kernel depends on it."""

    dtype: str
    causal: bool
    b: int
    seqlen_q: int
    seqlen_k: int
    h: int
    h_k: int
    d: int


# (tile_m, tile_n, warps, stages, q_in_regs, min_ctas) per instantiated head dimension.
_SM80_TILES = {
    32: (128, 64, 4, 2, True, 2),
    64: (128, 64, 4, 2, True, 2),
    96: (128, 64, 4, 2, False, 2),
    128: (128, 64, 4, 1, False, 2),
    192: (128, 64, 8, 1, False, 1),
    256: (128, 64, 8, 1, False, 1),
}

# Parts with 99 KB of shared memory per CTA (8.6, 8.9, 12.x): what of the table above does not fit.
_SM80_TILES_99KB = {
    192: (64, 64, 4, 1, False, 1),
    256: (64, 64, 4, 1, False, 1),
}


def instantiated_head_dim(d: int) -> int:
    """The smallest instantiated head dimension that holds ``d``."""
    return next(hd for hd in HEAD_DIMS if hd >= d)


def fwd_config(dtype: str, head_dim: int, causal: bool, capability: tuple[int, int]) -> FwdConfig:
    """The configuration for one instantiated head dimension on one compute capability."""
    tile = _SM80_TILES[head_dim]
    if MAX_SMEM_BYTES[capability] < 163 * 1024:
        tile = _SM80_TILES_99KB.get(head_dim, tile)
    tile_m, tile_n, warps, stages, q_in_regs, min_ctas = tile
    return FwdConfig(
        arch=80,
        dtype=dtype,
        head_dim=head_dim,
        mask="causal" if causal else "none",
        tile_m=tile_m,
        tile_n=tile_n,
        warps=warps,
        stages=stages,
        q_in_regs=q_in_regs,
        min_ctas=min_ctas,
    )


def choose_fwd(problem: FwdProblem, capability: tuple[int, int]) -> FwdConfig:
    """The configuration for one problem on one compute capability.

    A single query row attends to every key under the bottom-right causal mask, so it needs no mask.
    """
    causal = problem.causal and problem.seqlen_q > 1
    return fwd_config(problem.dtype, instantiated_head_dim(problem.d), causal, capability)


def shipped_configs() -> list[FwdConfig]:
    """The 24 forward configurations that are committed as .cu files and shipped prebuilt."""
    return [
        fwd_config(dtype, head_dim, causal, (9, 0))
        for head_dim in HEAD_DIMS
        for dtype in ("fp16", "bf16")
        for causal in (False, True)
    ]
