"""Chooses the configuration of a kernel for a problem and a GPU: all tuning is in this file.

C++ never chooses a tile. Each number below carries the limit it hits or the measurement behind it.
"""

from __future__ import annotations

import dataclasses
import functools
import os

from . import env
from .config import (
    BWD_OPTIONS,
    DTYPES,
    HEAD_DIMS,
    MAX_SMEM_BYTES,
    ROW_STATS_MULTIPLE,
    SM90_BWD_TILES,
    BwdConfig,
    BwdTile,
    FwdConfig,
)
from .problem import FwdProblem, rounded

# (tile_m, tile_n, warps, stages, all of Q in registers, min_ctas) per instantiated head dimension.
# The shared memory port is the tightest roof of this class: an MMA's B fragment costs 2 clocks of
# it per 16 rows that a warp owns, so warps own 32 rows wherever the accumulators allow it. Two CTAs
# an SM let one's softmax run under the other's MMAs. Found by tools/config_search.py on an H200
# among tiles that do not spill; the figures are geometric means of the speed over FlashAttention-2
# in PyTorch, s 512 to 8192 (d = 96: H100, to 16384), full / causal, with the runner-up or what
# spills. Data, when kernels still sought each maximum: benchmarks/results/search_sm80_h200.json.
_SM80_TILES = {
    32: (128, 32, 4, 2, False, 2),  # 1.18 / 1.22; 128x64 1.10 / 1.27
    64: (128, 64, 4, 2, True, 2),  # 1.11 / 1.17
    96: (128, 64, 4, 2, False, 2),  # 1.07 / 1.05; one stage 1.00 / 1.06
    128: (128, 48, 4, 1, False, 2),  # 1.09 / 1.14; 128x64 1.10 / 1.15, but it spills
    192: (64, 64, 4, 1, True, 2),  # 1.13 / 1.19
    256: (64, 64, 4, 1, False, 2),  # 1.04 / 1.06
}

# 163 KB per SM (8.0, 8.7): two CTAs of the tile above do not fit.
_SM80_TILES_163KB = {256: (128, 64, 8, 1, False, 1)}  # 128 KB; the tile of FlashAttention-2

# 99 KB per CTA and 100 KB per SM (8.6, 8.9, 12.x), 1 KB of it lost to each CTA. Not measured.
_SM80_TILES_99KB = {
    96: (128, 64, 4, 1, False, 2),  # 48 KB; with two stages, 72 KB, only one CTA of 4 warps fits
    128: (128, 32, 4, 1, False, 2),  # 48 KB; with 128x48, 56 KB, only one CTA of 4 warps fits
    192: (64, 64, 4, 1, True, 1),  # 72 KB
    256: (64, 64, 4, 1, False, 1),  # 96 KB
}

# (tile_n, stages, min_ctas) of tiles of 64 rows over a cache with at most 128 rows of packed heads.
# Warps without rows only load, so bytes in flight count: 64 KB a stage in both CTAs at d = 128.
# There 65 to 128 rows, two tiles, have 64x128 with one stage where two CTAs fit: 3 % slower to 12 %
# faster on an H200 with one query of 128/1 heads over a contiguous cache (docs/tried_sm80.md).
_SM80_CACHE_TILES = {64: (64, 2, 4), 128: (64, 2, 2)}


@dataclasses.dataclass(frozen=True)
class _Sm90Tile:
    """A tile of the sm90 class and how fast it is.

    Attributes:
        tile_n: Keys of a block.
        warpgroups: Consumers, each with 64 query rows.
        speed: TFLOP/s, counting all that the tile computes, padding included, as :func:`work` does.
        q_in_regs: k16 steps of Q in registers.
        min_ctas: CTAs per SM.
        stages: K/V buffers.
    """

    tile_n: int
    warpgroups: int
    speed: int
    q_in_regs: int = 0
    min_ctas: int = 1
    stages: int = 2


# Tiles by head dimension and causal mask, that for long sequences first; calls with a window use
# the tiles without a mask. All have two stages: four win up to 1 % at head dimension 32 and nothing
# elsewhere, so the loads are not late. Warpgroups of a CTA take turns, which wins up to 27 %.
#
# S, P and O of a thread take tile_n / 2 + tile_n / 4 + head_dim / 2 registers; about 200 are
# available with two consumers and 132 with three. Three consumers hide more softmax behind products
# and read K and V from shared memory less often for each row; two compute less beyond the end of
# short sequences, as their tiles have 128 rows and not 192. Steps of Q fill the registers that are
# left. Found by tools/config_search.py on an H200, bf16, lengths 512 to 16384
# (benchmarks/results/search_sm90_no_max_h200.json).
#
# CTAs of one consumer, three or four an SM, have tiles of 64 rows and run independently: where
# tiles have few key blocks, the loads, first products and epilogue of one CTA overlap with the work
# of the others. At head dimension 64 that wins 5 to 20 % up to 512 keys; at 128 it loses, as 64
# registers of O a thread leave room for only two CTAs of 64x64.
#
# Speeds are fitted by tools/tile_times.py to shapes of all kinds, each timed with every tile, with
# packed heads and without (benchmarks/results/tiles_sm90_h200.json): the tiles that they make
# :func:`choose_fwd` choose reach 99.9 % of the best speed.
_SM90_TILES = {
    (32, False): (_Sm90Tile(112, 3, 388), _Sm90Tile(64, 1, 353, min_ctas=4)),
    (32, True): (_Sm90Tile(144, 3, 404), _Sm90Tile(64, 1, 379, min_ctas=4)),
    (64, False): (
        _Sm90Tile(128, 3, 634),
        _Sm90Tile(96, 1, 562, min_ctas=3),
        _Sm90Tile(80, 1, 559, min_ctas=3),
        _Sm90Tile(64, 1, 536, min_ctas=3),
    ),
    (64, True): (_Sm90Tile(128, 3, 681), _Sm90Tile(64, 1, 583, min_ctas=3)),
    (96, False): (_Sm90Tile(96, 3, 750, q_in_regs=3), _Sm90Tile(128, 2, 645)),
    (96, True): (_Sm90Tile(96, 3, 825, q_in_regs=3), _Sm90Tile(128, 2, 718)),
    (128, False): (
        _Sm90Tile(80, 3, 842, q_in_regs=2),
        _Sm90Tile(128, 2, 769, q_in_regs=8),
    ),
    (128, True): (
        _Sm90Tile(80, 3, 895, q_in_regs=2),
        _Sm90Tile(128, 2, 818, q_in_regs=8),
    ),
    (192, False): (_Sm90Tile(64, 2, 760, q_in_regs=12),),  # 128x80 with 11 steps is 2 % slower
    (192, True): (_Sm90Tile(64, 2, 768, q_in_regs=12),),
    (256, False): (_Sm90Tile(64, 2, 832),),  # 6 steps of Q in registers win nothing
    (256, True): (_Sm90Tile(64, 2, 892),),
}

# Tiles over a cache: for at most 64 rows of packed heads, which read keys at the speed of memory
# (few at head dimension 64 with four stages and one CTA an SM, :func:`_cache_config`);
# for at most 128, so that keys are read once, and for few tiles in one wave of CTAs that plan
# (CtaPlan, four stages); for more rows over pages. Blocks have multiples of 64 keys, as most page
# sizes divide them or are multiples; three consumers would leave no registers for loads of pages.
# Measured at head dimensions 64 and 128 only.
_SM90_CACHE_TILES = {
    32: (_Sm90Tile(128, 1, 0, min_ctas=2), _Sm90Tile(128, 2, 0, stages=4), _Sm90Tile(128, 2, 0)),
    64: (_Sm90Tile(128, 1, 0, min_ctas=2), _Sm90Tile(128, 2, 0, stages=4), _Sm90Tile(128, 2, 0)),
    96: (_Sm90Tile(64, 1, 0, min_ctas=2), _Sm90Tile(64, 2, 0, stages=4), _Sm90Tile(128, 2, 0)),
    128: (_Sm90Tile(64, 1, 0), _Sm90Tile(64, 2, 0, stages=4), _Sm90Tile(128, 2, 0)),
    192: (_Sm90Tile(64, 1, 0), _Sm90Tile(64, 2, 0), _Sm90Tile(64, 2, 0)),
    256: (_Sm90Tile(64, 1, 0), _Sm90Tile(64, 2, 0), _Sm90Tile(64, 2, 0)),
}
_DECODING_ROWS = 128
_PLANNED_TILES = 4  # the most of a sequence: CtaPlan::kMostOfSequence
_PLANNED_WORK = 4096 * 128  # keys times head dimension per SM; 8 times as many are 3 % slower

# What a tile costs beside its key blocks, in keys: first loads, epilogue, and the softmax that no
# other block's products hide; what a block that the mask cuts costs in addition, in blocks; and the
# part of the longest tile's time that SMs idle where CTAs steal work. Fitted with the speeds.
_TILE_OVERHEAD_KEYS = 170
_MASKED_BLOCK = 0.4
_TAIL = 0.2


def _pack_shift(problem: FwdProblem) -> int:
    """Returns log2 of the rows of a query position with packed heads, padding included."""
    return (problem.h // problem.h_k - 1).bit_length()


def _may_pack(problem: FwdProblem) -> bool:
    return problem.h > problem.h_k and not problem.dropout


def _packed_rows(problem: FwdProblem) -> int:
    return problem.seqlen_q << (_pack_shift(problem) if _may_pack(problem) else 0)


def _is_decoding(problem: FwdProblem) -> bool:
    return problem.cache and _packed_rows(problem) <= _DECODING_ROWS


def packs_heads(problem: FwdProblem, config: FwdConfig, sms: int = 132) -> bool:
    """Returns whether the query heads of a key head share tiles (pack-GQA).

    They do where that makes :func:`work` less. Few query positions, which leave a tile of one head
    nearly empty, then fill a tile. Under a mask a tile spans fewer positions, so less of what it
    computes is masked. Fewer tiles also read the keys less often. With dropout heads never share
    tiles, as dropout masks are drawn for tiles of one head.
    """
    if not _may_pack(problem):
        return False
    if _is_decoding(problem):
        return True  # a cache is read once
    problem = rounded(problem)
    return work(problem, config, True, sms) < work(problem, config, False, sms)


# At most this many tiles of a head are looked at for the length of its tiles.
_SAMPLES = 8


def _tile_lengths(problem: FwdProblem, config: FwdConfig, m_blocks: int, shift: int) -> list[float]:
    """Returns the costs, in keys, of evenly spaced tiles of one head, including the last tile."""
    rows, step = config.tile_m, config.tile_n
    everything = max(problem.seqlen_q, problem.seqlen_k)
    sides = (everything, 0) if config.mask == "causal" else (everything, everything)
    left, right = problem.window or sides
    diagonal = problem.seqlen_k - problem.seqlen_q
    last = m_blocks - 1
    lengths = []
    for m in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
        first_row = (m * rows >> shift) + diagonal
        last_row = min((m + 1) * rows - 1 >> shift, problem.seqlen_q - 1) + diagonal
        begin = max(first_row - left, 0) // step
        end = -(-max(min(last_row + right + 1, problem.seqlen_k), 0) // step)
        blocks = max(end - begin, 0)
        whole_begin = -(-max(last_row - left, 0) // step)
        whole_end = max(min(first_row + right + 1, problem.seqlen_k), 0) // step
        masked = 0 if config.mask == "none" else blocks - max(whole_end - whole_begin, 0)
        lengths.append((blocks + _MASKED_BLOCK * masked) * step + _TILE_OVERHEAD_KEYS)
    return lengths


def work(problem: FwdProblem, config: FwdConfig, packed: bool, sms: int) -> tuple[float, int]:
    """Returns the work of the SM that finishes last, in rows times keys, to compare kernels; and
    the number of tiles.

    Without a mask and with one CTA an SM, CTAs take tiles in turn: it is the most that a CTA gets.
    Else it is the mean plus the idle time at the end. Under a mask CTAs take tiles as they become
    free, longest first; several CTAs an SM without a mask take tiles in turn, but share the SM.
    """
    shift = _pack_shift(problem) if packed else 0
    m_blocks = max(-(-(problem.seqlen_q << shift) // config.tile_m), 1)
    tiles = problem.b * (problem.h_k if packed else problem.h) * m_blocks
    lengths = _tile_lengths(problem, config, m_blocks, shift)
    longest = max(lengths)
    ctas = sms * config.min_ctas
    if config.mask == "none" and config.min_ctas == 1:
        keys = -(-tiles // ctas) * longest
    else:
        mean = sum(lengths) / len(lengths)
        # Idle time of the last round, in which few tiles of like length are left for many CTAs.
        idle = -tiles % ctas / ctas * min(lengths) if config.min_ctas == 1 else 0
        keys = max(longest, tiles * mean / ctas + max(_TAIL * longest, idle))
    return keys * config.min_ctas * config.tile_m, tiles


def instantiated_head_dim(d: int) -> int:
    """Returns the smallest instantiated head dimension that holds ``d``."""
    return next(hd for hd in HEAD_DIMS if hd >= d)


def fwd_config(dtype: str, head_dim: int, causal: bool, capability: tuple[int, int]) -> FwdConfig:
    """Returns the sm80 class's configuration for a head dimension on a compute capability."""
    tile = _SM80_TILES[head_dim]
    if MAX_SMEM_BYTES[capability] < 163 * 1024:
        tile = _SM80_TILES_99KB.get(head_dim, tile)
    elif MAX_SMEM_BYTES[capability] < 227 * 1024:
        tile = _SM80_TILES_163KB.get(head_dim, tile)
    tile_m, tile_n, warps, stages, all_q_in_regs, min_ctas = tile
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
    )


# Tiles (rows, step, warps, stages, min_ctas) of dQ, and of dK and dV, per instantiated head
# dimension. Beside the fragments a thread holds rows * (d + 2 * step) / threads registers for dQ
# and rows * (2 d + 2 * step) / threads for dK and dV, which from d = 192 on have a kernel each. A
# CTA fits into 99 KB of shared memory, and two into 227 KB. Chosen so that nothing spills.
_SM80_BWD_TILES = {
    32: ((128, 64, 4, 2, 2), (128, 64, 4, 2, 2)),
    64: ((128, 32, 4, 2, 2), (64, 64, 4, 2, 2)),  # dK and dV with 128x32 spill
    96: ((128, 32, 4, 1, 2), (64, 32, 4, 2, 2)),
    128: ((128, 32, 4, 1, 2), (64, 32, 4, 2, 2)),
    192: ((64, 64, 4, 1, 2), (64, 64, 4, 1, 2)),
    256: ((64, 32, 4, 1, 2), (64, 32, 4, 1, 2)),
}


# Tiles of one kernel for all gradients; their last number is warps_step. The second ones are for
# less shared memory, and for options, for which the first have no registers left. The kernel has 5
# products where those above have 7. Speeds over FlashAttention-2 in PyTorch on an H200, s = 8192.
_SM80_FUSED_TILES = {
    32: ((128, 32, 4, 2, 2, 1), (64, 64, 4, 2, 2, 1)),  # 128x64 spills 8 bytes with a window
    64: ((128, 32, 4, 1, 2, 1), (64, 64, 4, 1, 2, 1)),  # 1.17; two stages 1.16 and 8 bytes spilled
    96: ((64, 64, 4, 2, 2, 2), (64, 64, 4, 1, 2, 2)),  # 1.02 and 0.98; 128x64 and eight warps 0.97
    128: ((128, 64, 8, 2, 1, 2), (128, 32, 8, 1, 1, 2)),  # 1.03; 64x64 and four warps 0.99
    192: ((64, 128, 8, 1, 1, 4), (64, 64, 8, 1, 1, 4)),  # 1.08 and 0.94; 64x64 and two stages 0.97
    256: ((64, 64, 8, 2, 1, 4), (64, 64, 8, 1, 1, 4)),  # 1.01 and 0.97
}


def bwd_config(dtype: str, head_dim: int, mask: str = "none") -> BwdConfig:
    """Returns the sm80 class's backward of several kernels: repeatable, the same on every GPU."""
    dq, dkv = (BwdTile(*tile) for tile in _SM80_BWD_TILES[head_dim])
    return BwdConfig(80, dtype, head_dim, mask, dq, dkv, split_dkv=head_dim > 128)


def fused_bwd_config(
    dtype: str, head_dim: int, mask: str = "none", capability: tuple[int, int] = (9, 0)
) -> BwdConfig | None:
    """Returns the sm80 class's backward of one kernel, None where it does not fit: it is faster
    than that of :func:`bwd_config`, but sums dQ in a fixed order only if that is asked for."""
    tiles = [BwdTile(*tile) for tile in _SM80_FUSED_TILES[head_dim]]
    first, second = (BwdConfig(80, dtype, head_dim, mask, t, t, fused=True) for t in tiles)
    if head_dim == 128 and capability < (9, 0):  # adding to dQ takes registers: 8 bytes spill
        tile = dataclasses.replace(first.dkv, stages=1)
        first = dataclasses.replace(first, dq=tile, dkv=tile)
    room = MAX_SMEM_BYTES[capability] + 1024  # an SM's; a CTA takes 1 KB more than it asks for
    if first.dkv.min_ctas * (first.smem_bytes + 1024) <= room:
        return first
    return second if second.smem_bytes + 1024 <= room else None


def bwd_with_options(
    config: BwdConfig,
    softcap: bool = False,
    alibi: bool = False,
    dropout: bool = False,
    varlen: bool = False,
) -> BwdConfig:
    """Returns ``config`` with options. In the sm80 class, where registers do not suffice for them,
    it has other tiles, which were not measured, and with which nothing spills."""
    options = {"softcap": softcap, "alibi": alibi, "dropout": dropout, "varlen": varlen}
    if config.arch == 90:
        return dataclasses.replace(config, **options)
    d, dq, dkv, both = config.head_dim, config.dq, config.dkv, softcap and dropout
    if config.fused:
        if softcap or alibi or dropout or (varlen and d == 256):  # there two stages spill 8 bytes
            dkv = BwdTile(*_SM80_FUSED_TILES[d][1])
        # With steps of 64 queries some of these spill 16 to 80 bytes where dQ is summed in order or
        # a batch is ragged (docs/tried_sm80.md), and d = 256 spills 16 bytes under a mask.
        several = d <= 96 and dropout and (softcap or alibi)
        if several or (varlen and d == 256 and config.mask != "none"):
            dkv = dataclasses.replace(dkv, step=32, warps_step=min(dkv.warps_step, 2))
        return dataclasses.replace(config, dq=dkv, dkv=dkv, **options)
    if d == 128 and (softcap or dropout):  # a step of 32 spills 80 bytes with dropout
        dq = dataclasses.replace(dq, step=16)
    if d == 128 and both and alibi and config.mask == "local":
        dkv = dataclasses.replace(dkv, step=16)
    if (d == 32 and (softcap or (alibi and dropout))) or (d == 192 and both):  # 64: 36 to 56 bytes
        dq, dkv = (dataclasses.replace(tile, step=32) for tile in (dq, dkv))
    if d == 64 and both:  # a step of 64 spills 40 bytes
        dkv = dataclasses.replace(dkv, step=32)
    if d == 96 and softcap:  # all options spill 44 bytes; 16 is no whole copy
        dq = dataclasses.replace(dq, rows=64)
    return dataclasses.replace(config, dq=dq, dkv=dkv, **options)


def sm90_bwd_config(dtype: str, head_dim: int, mask: str = "none") -> BwdConfig:
    """Returns the sm90 class's backward, which sums dQ in a fixed order if that is asked for."""
    tile = BwdTile(*SM90_BWD_TILES[head_dim], 8, 2, 1)
    return BwdConfig(90, dtype, head_dim, mask, tile, tile, fused=True)


def _sm80_config(
    problem: FwdProblem, head_dim: int, mask: str, capability: tuple[int, int]
) -> FwdConfig:
    """Returns the sm80 class's configuration for a problem."""
    config = fwd_config(problem.dtype, head_dim, mask == "causal", capability)
    if _is_decoding(problem) and head_dim in _SM80_CACHE_TILES:
        tile_n, stages, min_ctas = _SM80_CACHE_TILES[head_dim]
        tile = {"tile_m": 64, "tile_n": tile_n, "stages": stages, "q_in_regs": 0, "min_ctas": 1}
        config = dataclasses.replace(config, **tile)
        # An SM has 1 KB more than a CTA may ask for, and each CTA takes 1 KB more than it asks for.
        fit = (MAX_SMEM_BYTES[capability] + 1024) // (config.smem_bytes + 1024)
        config = dataclasses.replace(config, min_ctas=min(min_ctas, fit))
        if head_dim == 128 and fit > 1 and problem.is_plain and _packed_rows(problem) > 64:
            config = dataclasses.replace(config, tile_n=128, stages=1)
    config = dataclasses.replace(config, mask=mask, paged=problem.page_size > 0)
    return with_options(config, problem.softcap, problem.alibi, problem.dropout)


@functools.cache
def _sm90_config(dtype: str, head_dim: int, mask: str, tile: _Sm90Tile) -> FwdConfig:
    return FwdConfig(
        arch=90,
        dtype=dtype,
        head_dim=head_dim,
        mask=mask,
        tile_m=64 * tile.warpgroups,
        tile_n=tile.tile_n,
        warps=4 * tile.warpgroups,
        stages=tile.stages,
        q_in_regs=tile.q_in_regs,
        min_ctas=tile.min_ctas,
        ping_pong=tile.warpgroups > 1,
    )


def sm90_configs(dtype: str, head_dim: int, causal: bool) -> list[FwdConfig]:
    """Returns the sm90 class's configurations for one instantiated head dimension, the one for long
    sequences first."""
    mask = "causal" if causal else "none"
    return [_sm90_config(dtype, head_dim, mask, tile) for tile in _SM90_TILES[head_dim, causal]]


def _cache_config(problem: FwdProblem, head_dim: int, mask: str, sms: int) -> FwdConfig | None:
    """Returns the sm90 class's configuration over a cache; None where it is as without a cache."""
    rows, tiles = _packed_rows(problem), _SM90_CACHE_TILES[head_dim]
    m_blocks = -(-rows // _DECODING_ROWS)
    count = problem.b * problem.h_k * m_blocks
    short = count <= sms and count * problem.seqlen_k * head_dim <= sms * _PLANNED_WORK
    measured = head_dim in (64, 128) and _may_pack(problem)
    few = measured and short and m_blocks <= _PLANNED_TILES
    by_ctas = few and not (problem.varlen or problem.page_size or problem.num_splits > 0)
    if not problem.cache or not (problem.page_size or by_ctas or _is_decoding(problem)):
        return None
    tile = tiles[(rows > 64) + (rows > _DECODING_ROWS and not by_ctas)]
    options = mask == "local" or problem.softcap or problem.alibi
    if head_dim == 64 and rows <= 64 and count <= sms and problem.num_splits == 0 and not options:
        # One CTA an SM with twice the stages: no SM has two tiles while others have none. With
        # 64/8 heads and 128 to 256 MiB 3 to 9 % faster on an H200, also in pages; with more tiles
        # than SMs up to 8 % slower. The number of tiles is an estimate: callers round b up.
        tile = dataclasses.replace(tile, stages=4, min_ctas=1)
    if problem.page_size and (mask == "local" or problem.alibi):
        # The producer of pages takes registers: at head dimension 128 128x128 spills 36 bytes with
        # a window, 8 with ALiBi, at 64 with a window it spills 40, and 64x128 24.
        tile = dataclasses.replace(tile, tile_n=min(tile.tile_n, 112))
    config = _sm90_config(problem.dtype, head_dim, mask, tile)
    return dataclasses.replace(config, paged=problem.page_size > 0)


_LEAST_BLOCKS = 2  # the fewest key blocks of a part
MAX_SPLITS = 256  # kMaxSplits of flash.h


def splits(problem: FwdProblem, config: FwdConfig, sms: int = 132) -> tuple[int, int, int]:
    """Returns ``num_splits``, ``split_blocks`` and ``split_ctas`` of ``flash.h`` for a problem.

    Lengths in a cache are known on the device only, so the plan there makes the parts: of about
    equal length, as few as keep all SMs busy (in the sm80 class all CTAs that fit), and fewer, or
    none, where merging would take longer than reading the keys (``part_blocks`` of
    ``plan_segments.h``). A given num_splits splits a sequence by its own length alone.
    """
    if problem.num_splits < 0 or problem.dropout:
        return 1, 1, 0
    if problem.num_splits > 0:
        return problem.num_splits, 1, 0
    blocks = -(-problem.seqlen_k // config.tile_n)
    most = max(min(blocks // _LEAST_BLOCKS, MAX_SPLITS), 1)
    # One CTA of the sm90 class reads as fast as its SM can: more parts cost their merge alone.
    return most, _LEAST_BLOCKS, sms if config.arch == 90 else sms * config.min_ctas


def with_options(
    config: FwdConfig, softcap: bool = False, alibi: bool = False, dropout: bool = False
) -> FwdConfig:
    """Returns ``config`` with a softcap, ALiBi, dropout, some of them or none.

    The options' operands take registers: tiles that have none left are replaced, so that only
    kernels named in docs/facts.md spill, none of which ships. Of the sm90 class other tiles were
    timed at head dimensions 64, 128 and 256 (docs/tried_sm90.md); the best is 1 % faster.
    """
    if not (softcap or alibi or dropout):
        return config
    config = dataclasses.replace(config, softcap=softcap, alibi=alibi, dropout=dropout)
    if config.arch == 90:
        # With a window 192x80 and two steps of Q spill 116 bytes at head dimension 128; 192x128
        # spills 12 and 128x128 96 at 64. With softcap and ALiBi 192x128 spills 80 at 64, 192x96 44
        # at 96 (20 without ALiBi), and with a window, too, 192x112 8 at 32.
        q_in_regs = 0 if config.warps == 12 else config.q_in_regs
        tile_n = min(config.tile_n, 112) if config.mask == "local" else config.tile_n
        limits = ({32: 96, 64: 112, 96: 80} if alibi else {96: 80}) if softcap else {}
        tile_n = min(tile_n, limits.get(config.head_dim, tile_n))
        return dataclasses.replace(config, q_in_regs=q_in_regs, tile_n=tile_n)
    if config.arch == 80 and config.head_dim == 128:
        # 128x48 spills 24 bytes with softcap and ALiBi, and 24 with dropout.
        return dataclasses.replace(config, tile_n=32)
    return config


def _asked_class() -> int | None:
    """Returns ``FLASHCUTE_ARCH`` or None; reading all variables takes as long as the choice."""
    return env.read().arch if "FLASHCUTE_ARCH" in os.environ else None


def kernel_class(capability: tuple[int, int]) -> int:
    """Returns a GPU's kernel class: ``FLASHCUTE_ARCH`` where it is set, else the newest that runs.

    Raises:
        ValueError: where ``FLASHCUTE_ARCH`` names a class that the GPU does not run.
    """
    newest = 90 if capability == (9, 0) else 80
    wanted = _asked_class()
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
    """Returns every configuration that :func:`choose_fwd` may choose for such problems."""
    if kernel_class(capability) == 80:
        return [fwd_config(dtype, head_dim, causal, capability)]
    return sm90_configs(dtype, head_dim, causal)


def choose_fwd(problem: FwdProblem, capability: tuple[int, int], sms: int = 132) -> FwdConfig:
    """Returns the configuration for one problem on one compute capability.

    A single query row attends to every key under the bottom-right causal mask, so it needs no mask.
    Lengths are first rounded up by :func:`rounded`.

    Args:
        problem: The call.
        capability: Of the GPU.
        sms: Its multiprocessors; an H100's or H200's by default.
    """
    problem = rounded(problem)
    head_dim, causal = instantiated_head_dim(problem.d), problem.causal and problem.seqlen_q > 1
    mask = "local" if problem.window is not None else "causal" if causal else "none"
    # With dropout over pages some kernels of the sm90 class spill, or their loops' wgmma differ.
    if kernel_class(capability) == 80 or (problem.cache and problem.dropout):
        return _sm80_config(problem, head_dim, mask, capability)
    if (config := _cache_config(problem, head_dim, mask, sms)) is not None:
        return with_options(config, problem.softcap, problem.alibi)

    def clocks(tile: _Sm90Tile) -> float:
        config = _sm90_config(problem.dtype, head_dim, mask, tile)
        ways = (False, True) if _may_pack(problem) else (False,)
        return min(work(problem, config, packed, sms)[0] for packed in ways) / tile.speed

    tiles = _SM90_TILES[head_dim, causal]
    if problem.softcap or problem.alibi:  # several CTAs an SM have no registers left for them
        tiles = tuple(tile for tile in tiles if tile.min_ctas == 1)
    config = _sm90_config(problem.dtype, head_dim, mask, min(tiles, key=clocks))
    return with_options(config, problem.softcap, problem.alibi, problem.dropout)


def bwd_configs_in_use(
    dtype: str, head_dim: int, causal: bool, capability: tuple[int, int]
) -> list[BwdConfig]:
    """Returns what :func:`choose_bwd` may choose, the one for gradients of one side alone last."""
    mask = "causal" if causal else "none"
    if kernel_class(capability) == 90:
        return [sm90_bwd_config(dtype, head_dim, mask)]
    fastest = fused_bwd_config(dtype, head_dim, mask, capability)
    return [c for c in (fastest, bwd_config(dtype, head_dim, mask)) if c is not None]


def choose_bwd(
    problem: FwdProblem, capability: tuple[int, int], sms: int = 132, *, every: bool = True
) -> BwdConfig:
    """Returns the backward's configuration for one problem; arguments as in :func:`choose_fwd`.

    The number of SMs changes nothing: ``sms`` is there so that one call serves both passes.

    Short ragged sequences, whose mean lengths the problem has, use the sm80 class's several kernels
    on all GPUs: sums of dQ in a fused kernel take whole blocks of ``ROW_STATS_MULTIPLE`` rows of a
    sequence, as do tiles of the sm90 class. On an H200 the sm90 class is 2.1 times as fast at 4,000
    tokens, 1.9 at 500, 0.99 at 144, 0.64 at 128 (d = 64).

    Args:
        every: All gradients, not those of one side alone, for which the sm80 class's several
            kernels are faster.
    """
    problem = rounded(problem)
    head_dim, causal = instantiated_head_dim(problem.d), problem.causal and problem.seqlen_q > 1
    mask = "local" if problem.window is not None else "causal" if causal else "none"
    options = {name: getattr(problem, name) for name in BWD_OPTIONS}
    short = problem.varlen and min(problem.seqlen_q, problem.seqlen_k) < 2 * ROW_STATS_MULTIPLE
    if kernel_class(capability) == 90 and not short:
        return bwd_with_options(sm90_bwd_config(problem.dtype, head_dim, mask), **options)
    fused = fused_bwd_config(problem.dtype, head_dim, mask, capability)
    if every and not short and fused is not None:
        return bwd_with_options(fused, **options)
    return bwd_with_options(bwd_config(problem.dtype, head_dim, mask), **options)


# (dtype, head_dim, causal) of everything that is shipped.
_CHOICES = [(t, d, causal) for d in HEAD_DIMS for t in DTYPES for causal in (False, True)]


def shipped_configs(arch: int | None = None) -> list[FwdConfig]:
    """Returns the forward configurations of dense calls that ship, of one class or of all."""
    sm80 = [fwd_config(*choice, (9, 0)) for choice in _CHOICES]
    sm90 = [config for choice in _CHOICES for config in sm90_configs(*choice)]
    return {None: sm80 + sm90, 80: sm80, 90: sm90}[arch]


def shipped_bwd_configs(arch: int | None = None) -> list[BwdConfig]:
    """Returns the backward configurations of dense calls that ship, of one class or of all."""
    kinds = {80: (fused_bwd_config, bwd_config), 90: (sm90_bwd_config,)}
    kinds[None] = (*kinds[90], *kinds[80])
    masks = {False: "none", True: "causal"}
    return [kind(*of, masks[causal]) for *of, causal in _CHOICES for kind in kinds[arch]]
