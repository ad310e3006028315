"""Tuning has one home: shapes and GPU in, configuration out.

C++ never chooses a tile. Each number below carries the limit it hits or the measurement behind it.
"""

from __future__ import annotations

import dataclasses
import math

from . import env
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


# (tile_m, tile_n, warps, stages, all of Q in registers, min_ctas, peel_masked) per instantiated
# head dimension.
#
# The shared memory port is the tightest roof of this class: an MMA's B fragment costs 2 clocks of
# it per 16 rows that a warp owns, so warps own 32 rows wherever the accumulators allow it. Two CTAs
# an SM let one's softmax run under the other's MMAs. Found by tools/config_search.py on an H200
# among tiles that do not spill; the figures are geometric means of the speed over FlashAttention-2
# in PyTorch, s = 512, 2048 and 8192, full / causal, with the runner-up or what spills; the data:
# benchmarks/results/search_sm80_h200.json, of when a maximum was sought in every block.
_SM80_TILES = {
    32: (128, 32, 4, 2, False, 2, False),  # 1.18 / 1.22; 128x64 1.10 / 1.27
    64: (128, 64, 4, 2, True, 2, True),  # 1.13 / 1.18; one loop 1.11 / 1.17
    96: (128, 64, 4, 1, False, 2, True),  # 1.05 / 1.07; two stages 1.06 / 1.05 spill now
    128: (128, 48, 4, 1, False, 2, True),  # 1.09 / 1.14; 128x64 1.10 / 1.15, but it spills
    192: (64, 64, 4, 1, True, 2, False),  # 1.13 / 1.19; two loops 1.11 / 1.19
    256: (64, 64, 4, 1, False, 2, True),  # 1.04 / 1.08; one loop 1.04 / 1.06
}

# 163 KB per SM (8.0, 8.7): two CTAs of the tile above do not fit.
_SM80_TILES_163KB = {
    256: (128, 64, 8, 1, False, 1, False),  # 128 KB; the tile of FlashAttention-2
}

# 99 KB per CTA and 100 KB per SM (8.6, 8.9, 12.x).
_SM80_TILES_99KB = {
    192: (64, 64, 4, 1, True, 1, False),  # 72 KB
    256: (64, 64, 4, 1, False, 1, True),  # 96 KB
}


@dataclasses.dataclass(frozen=True)
class _Sm90Tile:
    """Tile choices of the sm90 class, which hold for at most ``max_seqlen`` keys."""

    tile_n: int
    warpgroups: int
    max_seqlen: float = math.inf
    q_in_regs: int = 0


# By head dimension and causal mask, shortest sequences first; two stages everywhere: four win
# up to 1 % at head dimension 32, elsewhere nothing, so the loads are not late. O is rescaled lazily
# (18 % won at most) and warpgroups take turns (27 %) everywhere.
#
# S, P and O of a thread take tile_n / 2 + tile_n / 4 + head_dim / 2 registers, of which about 200
# are there with two MMA warpgroups and 132 with three. Three bring more softmax under the products
# and read K and V from shared memory less often for each row; two compute less beyond the end of
# short sequences, as their tiles are 128 rows and not 192. Steps of Q in registers fill what is
# left of them. Found by tools/config_search.py on an H200, bf16, lengths 512 to 16384; the figures
# are geometric means, over the lengths a tile is used for, of the speed over the better of
# FlashAttention-3 and cuDNN, with the best other choice; two searches differ by 0.01, and nothing
# was changed for less. The data: benchmarks/results/search_sm90_no_max_h200.json. Tiles in fp16,
# before maxima were sought only when needed: benchmarks/results/search_sm90_fp16_h200.json.
_SM90_TILES = {
    (32, False): (_Sm90Tile(128, 3),),  # 1.32; 192x144 1.28
    (32, True): (
        _Sm90Tile(128, 2, 1024),  # 1.19; O rescaled every time 1.14
        _Sm90Tile(144, 3),  # 1.29; 192x128 1.27
    ),
    (64, False): (_Sm90Tile(128, 3),),  # 1.17; 192x96 with all of Q and 192x112 1.07
    (64, True): (
        _Sm90Tile(128, 2, 1024),  # 1.05; not in turns 0.98
        _Sm90Tile(128, 3),  # 1.19; 192x96 with all of Q 1.14
    ),
    (96, False): (
        _Sm90Tile(128, 2, 1024),  # 1.22; with all of Q 1.23
        _Sm90Tile(96, 3, q_in_regs=3),  # 1.26; 192x112 1.24
    ),
    (96, True): (
        _Sm90Tile(128, 2, 1024),  # 1.29; with all of Q 1.27
        _Sm90Tile(96, 3, q_in_regs=3),  # 1.30; 192x112 1.29
    ),
    (128, False): (
        _Sm90Tile(128, 2, 1024, q_in_regs=8),  # 1.04; 128x176 1.04
        _Sm90Tile(80, 3, q_in_regs=2),  # 1.08; 128x176 1.07
    ),
    (128, True): (
        _Sm90Tile(128, 2, 4096, q_in_regs=8),  # 1.05; not in turns 1.05
        _Sm90Tile(80, 3, q_in_regs=2),  # 1.05; not in turns 1.07: 8192 -1 %, 16384 +4 %
    ),
    (192, False): (_Sm90Tile(64, 2, q_in_regs=12),),  # 1.08; 128x80 with 11 steps 1.06
    (192, True): (_Sm90Tile(64, 2, q_in_regs=12),),  # 1.07; not in turns 1.07
    (256, False): (_Sm90Tile(64, 2),),  # 1.06; with 6 steps of Q 1.06
    (256, True): (_Sm90Tile(64, 2),),  # 1.08; with 6 steps of Q 1.08
}


def instantiated_head_dim(d: int) -> int:
    """The smallest instantiated head dimension that holds ``d``."""
    return next(hd for hd in HEAD_DIMS if hd >= d)


def fwd_config(dtype: str, head_dim: int, causal: bool, capability: tuple[int, int]) -> FwdConfig:
    """The sm80 class's configuration for one instantiated head dimension on one capability."""
    tile = _SM80_TILES[head_dim]
    if MAX_SMEM_BYTES[capability] < 163 * 1024:
        tile = _SM80_TILES_99KB.get(head_dim, tile)
    elif MAX_SMEM_BYTES[capability] < 227 * 1024:
        tile = _SM80_TILES_163KB.get(head_dim, tile)
    tile_m, tile_n, warps, stages, all_q_in_regs, min_ctas, peel_masked = tile
    return FwdConfig(
        arch=80,
        dtype=dtype,
        head_dim=head_dim,
        mask="causal" if causal else "none",
        tile_m=tile_m,
        tile_n=tile_n,
        warps=warps,
        stages=stages,
        q_in_regs=head_dim // 16 if all_q_in_regs else 0,
        min_ctas=min_ctas,
        peel_masked=peel_masked,
    )


def sm90_configs(dtype: str, head_dim: int, causal: bool) -> list[tuple[FwdConfig, float]]:
    """The sm90 class's configurations for one instantiated head dimension, each with the most keys
    it is used for, in ascending order of that."""
    return [
        (
            FwdConfig(
                arch=90,
                dtype=dtype,
                head_dim=head_dim,
                mask="causal" if causal else "none",
                tile_m=64 * tile.warpgroups,
                tile_n=tile.tile_n,
                warps=4 * tile.warpgroups,
                stages=2,
                q_in_regs=tile.q_in_regs,
                min_ctas=1,
                peel_masked=True,
                lazy_rescale=True,
                ping_pong=True,
            ),
            tile.max_seqlen,
        )
        for tile in _SM90_TILES[head_dim, causal]
    ]


def kernel_class(capability: tuple[int, int]) -> int:
    """The kernel class for a GPU: ``FLASHCUTE_ARCH`` where it is set, else the newest that runs.

    Raises:
        ValueError: where ``FLASHCUTE_ARCH`` names a class that the GPU does not run.
    """
    newest = 90 if capability == (9, 0) else 80
    wanted = env.read().arch
    if wanted is None:
        return newest
    if wanted > newest:
        raise ValueError(
            f"flashcute: expected FLASHCUTE_ARCH=80 on a GPU of compute capability {capability}, "
            f"got FLASHCUTE_ARCH={wanted}; unset it"
        )
    return wanted


def configs_in_use(
    dtype: str, head_dim: int, causal: bool, capability: tuple[int, int]
) -> list[FwdConfig]:
    """Every configuration that :func:`choose_fwd` may answer with for such problems."""
    if kernel_class(capability) == 80:
        return [fwd_config(dtype, head_dim, causal, capability)]
    return [config for config, _ in sm90_configs(dtype, head_dim, causal)]


def choose_fwd(problem: FwdProblem, capability: tuple[int, int]) -> FwdConfig:
    """The configuration for one problem on one compute capability.

    A single query row attends to every key under the bottom-right causal mask, so it needs no mask.
    Queries that the smallest tile holds take it however many keys there are: what a larger one
    computes beyond them is lost.
    """
    causal = problem.causal and problem.seqlen_q > 1
    head_dim = instantiated_head_dim(problem.d)
    if kernel_class(capability) == 80:
        return fwd_config(problem.dtype, head_dim, causal, capability)
    configs = sm90_configs(problem.dtype, head_dim, causal)
    smallest = min((config for config, _ in configs), key=lambda config: config.tile_m)
    if problem.seqlen_q <= smallest.tile_m:
        return smallest
    return next(config for config, max_seqlen in configs if problem.seqlen_k <= max_seqlen)


def shipped_configs(arch: int | None = None) -> list[FwdConfig]:
    """The forward configurations that are committed as .cu files and shipped prebuilt, of one
    kernel class or of all."""
    choices = [
        (dtype, head_dim, causal)
        for head_dim in HEAD_DIMS
        for dtype in ("fp16", "bf16")
        for causal in (False, True)
    ]
    sm80 = [fwd_config(*choice, (9, 0)) for choice in choices]
    sm90 = [config for choice in choices for config, _ in sm90_configs(*choice)]
    return {None: sm80 + sm90, 80: sm80, 90: sm90}[arch]


def instantiations() -> dict[str, FwdConfig]:
    """The shipped configurations by the stem of their .cu file: the configuration's name, with the
    most keys it is used for where that is limited."""
    found = {config.name: config for config in shipped_configs(80)}
    for config in shipped_configs(90):
        limits = dict(sm90_configs(config.dtype, config.head_dim, config.mask == "causal"))
        limit = limits[config]
        found[config.name if limit == math.inf else f"{config.name}_upto{limit}"] = config
    return found
