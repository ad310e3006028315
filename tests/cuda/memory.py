"""Waits for free memory on a GPU that several test workers share."""

from __future__ import annotations

import time

import pytest
import torch


def needs_memory(gib: int, seconds: float = 600.0) -> None:
    """Skips the test unless ``gib`` GiB of GPU memory become free within ``seconds``. Other workers
    give back the memory they cache when they end a file."""
    deadline = time.monotonic() + seconds
    torch.cuda.empty_cache()
    while True:
        free, total = (n / 2**30 for n in torch.cuda.mem_get_info())
        if free >= gib:
            return
        if total < gib or time.monotonic() > deadline:
            pytest.skip(f"needs {gib} GiB of free GPU memory, {free:.0f} of {total:.0f} are")
        time.sleep(1)
