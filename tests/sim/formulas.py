"""The work of a forward kernel, counted from the shapes alone."""

from __future__ import annotations

from flashcute.config import FwdConfig


def visited_blocks(config: FwdConfig, m_block: int, seqlen_q: int, seqlen_k: int) -> int:
    """Key blocks with a key that is visible to some row of query tile ``m_block``."""
    keys = seqlen_k
    if config.mask == "causal":
        last_row = min((m_block + 1) * config.tile_m, seqlen_q) - 1
        keys = max(min(keys, last_row + 1 + seqlen_k - seqlen_q), 0)
    return -(-keys // config.tile_n)


def mma_rows(config: FwdConfig, m_block: int, seqlen_q: int) -> int:
    """Rows of query tile ``m_block`` that the sm80 class multiplies. In the kernels for KV caches a
    warp whose 16 rows hold no query computes nothing; in the others all warps compute."""
    of_caches = config.paged or (config.tile_m == 64 and config.head_dim <= 128)
    if not of_caches:
        return config.tile_m
    queries = min(config.tile_m, seqlen_q - m_block * config.tile_m)
    return -(-queries // 16) * 16


def mma_count(config: FwdConfig, b: int, seqlen_q: int, seqlen_k: int, h: int) -> int:
    """m16n8k16 MMAs of all warps: Q K^T and P V over the visited blocks, nothing else."""
    rows = sum(
        visited_blocks(config, m, seqlen_q, seqlen_k) * mma_rows(config, m, seqlen_q)
        for m in range(-(-seqlen_q // config.tile_m))
    )
    return b * h * 2 * (rows // 16) * (config.tile_n // 8) * (config.head_dim // 16)


def wgmma_count(config: FwdConfig, b: int, seqlen_q: int, seqlen_k: int, h: int) -> int:
    """m64nNk16 of all warpgroups: Q K^T in d / 16 and P V in tile_n / 16 steps a visited block."""
    per_block = config.tile_m // 64 * (config.head_dim // 16 + config.tile_n // 16)
    blocks = sum(
        visited_blocks(config, m, seqlen_q, seqlen_k) for m in range(-(-seqlen_q // config.tile_m))
    )
    return b * h * blocks * per_block


def tma_bytes(
    config: FwdConfig, b: int, seqlen_q: int, seqlen_k: int, h: int, d: int
) -> tuple[int, int]:
    """Bytes of the boxes of Q, K and V, and how many of them lie outside the tensors.

    A query tile that sees no key loads nothing.
    """
    boxes, inside = 0, 0
    for m in range(-(-seqlen_q // config.tile_m)):
        blocks = visited_blocks(config, m, seqlen_q, seqlen_k)
        if blocks:
            rows = min(config.tile_m, seqlen_q - m * config.tile_m)
            boxes += (config.tile_m + 2 * blocks * config.tile_n) * config.head_dim
            inside += (rows + 2 * min(blocks * config.tile_n, seqlen_k)) * d
    return 2 * b * h * boxes, 2 * b * h * (boxes - inside)


def bytes_read(config: FwdConfig, b: int, seqlen_q: int, seqlen_k: int, h: int, d: int) -> int:
    """Bytes of Q once, and of K and V once for each query tile that visits them."""
    rows = seqlen_q
    for m in range(-(-seqlen_q // config.tile_m)):
        blocks = visited_blocks(config, m, seqlen_q, seqlen_k)
        rows += 2 * min(blocks * config.tile_n, seqlen_k)
    return b * h * rows * d * 2
