"""What choosing or building a kernel raised, carried past the binding, which passes text on."""

from __future__ import annotations

import threading
from collections.abc import Callable

_raised = threading.local()


def remember(exception: BaseException, text: str) -> None:
    """Of this thread, until an operator fails.

    Args:
        exception: What was raised.
        text: What the binding's own error holds of it.
    """
    _raised.last = exception, text


def raise_cause(error: RuntimeError) -> None:
    """Raises what choosing or building the kernel raised, where that made an operator's error.

    The text tells: an exception of an earlier call may be left where nobody asked for it.
    """
    exception, text = _raised.__dict__.pop("last", (None, ""))
    if exception is not None and text in str(error):
        raise exception from None


def call(op: Callable, *args):
    """The operator's results; what choosing or building the kernel raised is raised itself."""
    try:
        return op(*args)
    except RuntimeError as error:
        raise_cause(error)
        raise
