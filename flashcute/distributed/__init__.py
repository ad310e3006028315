"""Sequence parallelism on torch.distributed: one sequence over several GPUs, or processes."""

from __future__ import annotations

from .functions import (
    allgather_flash_attn_func,
    allgather_flash_attn_varlen_func,
    ring_flash_attn_func,
    ring_flash_attn_varlen_func,
)
from .zigzag import zigzag_merge, zigzag_positions, zigzag_split

__all__ = [
    "allgather_flash_attn_func",
    "allgather_flash_attn_varlen_func",
    "ring_flash_attn_func",
    "ring_flash_attn_varlen_func",
    "zigzag_merge",
    "zigzag_positions",
    "zigzag_split",
]
