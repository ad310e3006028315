"""Types of command line arguments that several commands take: what is wrong is said at once.

A file or folder for results is tried before the work, not after it.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

MAX_INT32 = 2**31 - 1  # the kernels' sizes


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or len(text) > 10 or not least <= int(text) <= MAX_INT32:
        raise argparse.ArgumentTypeError(
            f"expected a whole number from {least} to {MAX_INT32}, got {text!r}"
        )
    return int(text)


def positive(text: str) -> int:
    """A whole number of at least 1, for ``argparse``."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """A whole number of at least 0, for ``argparse``."""
    return _whole(text, 0)


def seconds(text: str) -> float:
    """A finite number above 0, for ``argparse``."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return value


def _place(text: str, kind: str) -> Path:
    """``text`` as a path below the nearest folder that is there, which must be writable."""
    path = Path(text)
    above = path.absolute()
    while not os.path.exists(above) and above != above.parent:
        above = above.parent
    if not text or (above != path.absolute() and not os.path.isdir(above)):
        reason = f"{above} is no folder" if text else "the name is empty"
    elif not os.access(above, os.W_OK):
        reason = f"{above} cannot be written"
    else:
        return path
    raise argparse.ArgumentTypeError(f"expected a {kind} for results, got {text!r}: {reason}")


def output_folder(text: str) -> Path:
    """A folder that is there, or can be made, and be written to, for ``argparse``."""
    path = _place(text, "folder")
    if os.path.exists(path) and not os.path.isdir(path):
        raise argparse.ArgumentTypeError(
            f"expected a folder for results, got {text!r}: it is a file"
        )
    return path


def output_file(text: str) -> Path:
    """A file that can be written, in a folder that can be made, for ``argparse``."""
    path = _place(text, "file")
    if os.path.isdir(path):
        raise argparse.ArgumentTypeError(
            f"expected a file for results, got {text!r}: it is a folder"
        )
    return path
