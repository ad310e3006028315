"""Contexts in which seeded cases run on a GPU: one kernel class, and outputs that hold NaN before
the call."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from unittest import mock

import torch

from flashcute import heuristics, ops
from flashcute.config import BwdConfig


def sm80_backwards(dtype: str, head_dim: int, mask: str) -> list[BwdConfig]:
    """Returns the sm80 class's backwards on this GPU: the one of several kernels, and the fused one
    where it fits."""
    capability = torch.cuda.get_device_capability()
    fused = heuristics.fused_bwd_config(dtype, head_dim, mask, capability)
    several = heuristics.bwd_config(dtype, head_dim, mask)
    return [several] if fused is None else [several, fused]


def choosing(name: str) -> contextlib.AbstractContextManager:
    """Makes the heuristics choose kernels of class ``"80"`` or ``"90"`` inside the context."""
    return mock.patch.dict(os.environ, FLASHCUTE_ARCH=name)


@contextlib.contextmanager
def class_of_kernels(name: str) -> Iterator[None]:
    """Makes calls take kernels of this class; the binding forgets its earlier choices on the way in
    and out."""
    ops.load()
    set_resolver = ops._keep_alive[0].flashcute_set_resolver
    with choosing(name):
        set_resolver(ops._resolve)
        try:
            yield
        finally:
            set_resolver(ops._resolve)


@contextlib.contextmanager
def outputs_of_nan() -> Iterator[None]:
    """Fills new tensors with NaN instead of leftovers, so that an element never written shows.
    torch fills them only while deterministic algorithms are on; the patch hides that setting from
    the gradients, which most users compute without it."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    with (
        mock.patch.object(torch, "are_deterministic_algorithms_enabled", lambda: False),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message=".*deterministic")  # the reference's operators
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = before
