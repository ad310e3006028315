"""Memory of a GPU that several workers share."""

from __future__ import annotations

import time

import pytest
import torch


def needs_memory(gib: int, seconds: float = 600.0) -> None:
    """Skips the test unless the GPU has so much free. Waits for other workers, which give back what
    they keep when a file ends."""
    deadline = time.monotonic() + seconds
    torch.cuda.empty_cache()
    while True:
        free, total = (n / 2**30 for n in torch.cuda.mem_get_info())
        if free >= gib:
            return
        if total < gib or time.monotonic() > deadline:
            pytest.skip(f"needs {gib} GiB of free GPU memory, {free:.0f} of {total:.0f} are")
        time.sleep(1)
