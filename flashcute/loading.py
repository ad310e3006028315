"""Which tensors the kernels can read in place, and copies of the others.

Tensors are (b, seqlen, heads, head_dim), or (total, heads, head_dim) as the varlen functions take
them.
"""

from __future__ import annotations

import logging

import torch

from .features import VECTOR

logger = logging.getLogger("flashcute")


def regular(tensor: torch.Tensor) -> bool:
    """Returns whether each row can be loaded 16 bytes at a time, as far as strides tell."""
    if tensor.dim() == 3:
        *outer, last = tensor.stride()
        sizes = tensor.shape[:2]
        return last == 1 and all(
            n <= 1 or s % VECTOR == 0 for n, s in zip(sizes, outer, strict=True)
        )
    s0, s1, s2, s3 = tensor.stride()
    if s3 != 1:
        return False
    if s0 % VECTOR or s1 % VECTOR or s2 % VECTOR:
        n0, n1, n2, _ = tensor.shape
        # Strides of dimensions of size 0 or 1 are arbitrary and never used.
        return not (
            (n0 > 1 and s0 % VECTOR) or (n1 > 1 and s1 % VECTOR) or (n2 > 1 and s2 % VECTOR)
        )
    return True


def in_place(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Returns whether kernels read all three as they are; v.shape == k.shape, d % VECTOR == 0."""
    if torch.compiler.is_compiling():  # is_contiguous() may be a guard there, or an error
        return regular(q) and regular(k) and regular(v)
    # is_contiguous() takes a third of regular()'s time, but holds for empty tensors of any strides.
    contiguous = q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    if not (contiguous and q.numel() and k.numel()) and not (
        regular(q) and regular(k) and regular(v)
    ):
        return False
    return not (
        q.storage_offset() % VECTOR or k.storage_offset() % VECTOR or v.storage_offset() % VECTOR
    )


def aligned(tensor: torch.Tensor) -> bool:
    """Returns whether ``tensor`` starts at a multiple of 16 bytes; True in a traced call.

    Allocators align storages to more than that, so only the offset can misalign; unlike data_ptr()
    fake tensors have it. When a traced program runs, the binding looks at the address itself.
    """
    return torch.compiler.is_compiling() or tensor.storage_offset() % VECTOR == 0


def loadable(fn: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor``, or a copy that the kernels can load."""
    if not regular(tensor):
        strides = tensor.stride()
        _log_copy(fn, name, f"{name}.stride()={strides}, expected 1 after multiples of {VECTOR}")
        return tensor.clone(memory_format=torch.contiguous_format)
    if not aligned(tensor):
        offset = tensor.storage_offset()
        _log_copy(fn, name, f"{name}.storage_offset()={offset}, expected a multiple of {VECTOR}")
        return tensor.clone()
    return tensor


def padded(fn: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy, its last dimension padded with zeros to a multiple of VECTOR."""
    d = tensor.shape[-1]
    _log_copy(fn, name, f"head_dim={d}, expected a multiple of {VECTOR}: pads it with zeros")
    # pad() keeps the order of a channels_last tensor, in which the sequence is innermost.
    return torch.nn.functional.pad(tensor, (0, -d % VECTOR)).contiguous()


def _log_copy(fn: str, name: str, why: str) -> None:
    if not torch.compiler.is_compiling():  # torch.compile cannot trace a logger
        logger.debug("%s: copies %s once: got %s", fn, name, why)
