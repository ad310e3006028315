"""Carries exceptions past the binding, which passes only text on: those of choosing or building a
kernel, and those of torch's allocator."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import torch

_raised = threading.local()

# The message of fail_to_allocate() in flash_api_tensors.h.
_NO_MEMORY = re.compile(r"failed to allocate (\d+) bytes on (\S+)")


def remember(exception: BaseException, text: str) -> None:
    """Remembers an exception, for this thread, until an operator fails.

    Args:
        exception: What was raised.
        text: What the binding's own error holds of it.
    """
    _raised.last = exception, text


def raise_cause(error: RuntimeError) -> None:
    """Raises what choosing or building the kernel raised, if that is the cause of ``error``, or
    torch.OutOfMemoryError, if memory was missing.

    The text decides about the cause, as an exception of an earlier call may still be remembered.
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
        raise torch.OutOfMemoryError(str(error)) from None  # memory is free again


def call(op: Callable, *args):
    """Returns the operator's results; raises the cause of its error, if known, in its place."""
    try:
        return op(*args)
    except RuntimeError as error:
        raise_cause(error)
        raise
