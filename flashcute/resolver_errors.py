"""What choosing or building a kernel raised, carried past the binding, which passes text on."""

from __future__ import annotations

import threading
from collections.abc import Callable

_raised = threading.local()


def remember(exception: BaseException) -> None:
    """Of this thread, until its call of an operator ends."""
    _raised.exception = exception


def call(op: Callable, *args):
    """The operator's results; what choosing or building the kernel raised is raised itself."""
    _raised.exception = None
    try:
        return op(*args)
    except RuntimeError:
        if _raised.exception is None:
            raise
        raise _raised.exception from None
