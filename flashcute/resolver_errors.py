"""What choosing or building a kernel raised, or torch's allocator, carried past the binding, which
passes text on."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import torch

_raised = threading.local()

# Of fail_to_allocate() in flash_api_tensors.h.
_NO_MEMORY = re.compile(r"failed to allocate (\d+) bytes on (\S+)")


def remember(exception: BaseException, text: str) -> None:
    """Of this thread, until an operator fails.

    Args:
        exception: What was raised.
        text: What the binding's own error holds of it.
    """
    _raised.last = exception, text


def raise_cause(error: RuntimeError) -> None:
    """Raises what choosing or building the kernel raised, where that made an operator's error;
    torch.OutOfMemoryError where memory was missing.

    The text tells: an exception of an earlier call may be left where nobody asked for it.
    """
    exception, text = _raised.__dict__.pop("last", (None, ""))
    if exception is not None and text in str(error):
        raise exception from None
    missing = _NO_MEMORY.search(str(error))
    if missing:
        try:
            # torch's own error has figures that its C interface does not pass on.
            torch.empty(int(missing[1]), dtype=torch.uint8, device=missing[2])
        except RuntimeError as own:
            raise own from None
        raise torch.OutOfMemoryError(str(error)) from None  # somebody has freed memory since


def call(op: Callable, *args):
    """The operator's results; what :func:`raise_cause` knows of an error is raised instead."""
    try:
        return op(*args)
    except RuntimeError as error:
        raise_cause(error)
        raise
