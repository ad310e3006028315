"""Types of command line arguments that several commands take; a wrong argument raises at once.

A file or folder for results is tried before the work starts. If it cannot be written after all,
e.g. because the disk is full by then, the command reports that after it has shown the results.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

MAX_INT32 = 2**31 - 1  # the kernels' sizes are int32

_SMALL_RESULT = 2**16  # bytes


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or len(text) > 10 or not least <= int(text) <= MAX_INT32:
        raise argparse.ArgumentTypeError(
            f"expected a whole number from {least} to {MAX_INT32}, got {text!r}"
        )
    return int(text)


def positive(text: str) -> int:
    """Parses a whole number of at least 1, for ``argparse``."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """Parses a whole number of at least 0, for ``argparse``."""
    return _whole(text, 0)


def seconds(text: str) -> float:
    """Parses a finite number above 0, for ``argparse``."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return value


def _refuse(text: str, kind: str, reason: str) -> None:
    raise argparse.ArgumentTypeError(f"expected a {kind} for results, got {text!r}: {reason}")


def _try(text: str, kind: str, write: Callable[[Path], None]) -> Path:
    """Returns ``text`` as a path after trying to write there; removes again what that created.

    Trying is the only way to know: root may write everywhere by permission, but not to /proc or to
    a file system that is mounted read-only or full.
    """
    path = Path(text)
    if not text:
        _refuse(text, kind, "the name is empty")
    missing = []
    for above in (path, *path.parents) if kind == "folder" else path.parents:
        if os.path.exists(above):
            if not os.path.isdir(above):
                _refuse(text, kind, f"{above.absolute()} is no folder")
            break
        missing.append(above)
    made = []
    try:
        for folder in reversed(missing):
            folder.mkdir()
            made.append(folder)
        write(path)
    except OSError as error:
        _refuse(text, kind, f"it cannot be written ({error.strerror})")
    finally:
        for folder in reversed(made):
            folder.rmdir()
    return path


def output_folder(text: str) -> Path:
    """Returns a folder that exists or can be made, and can be written to, for ``argparse``."""
    return _try(text, "folder", lambda path: _fill(tempfile.TemporaryFile(dir=path)))


def output_file(text: str) -> Path:
    """Returns a file that can be written, in a folder that can be made, for ``argparse``."""

    def write(path: Path) -> None:
        if path.is_file():
            path.open("ab").close()  # this changes nothing in the file
        elif os.path.lexists(path):  # e.g. a pipe; closing it would tell its reader that it ends
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            file = path.open("xb")
            try:
                _fill(file)
            finally:
                path.unlink()

    if os.path.isdir(text):
        _refuse(text, "file", "it is a folder")
    return _try(text, "file", write)


def _fill(file: IO[bytes]) -> None:
    """Writes as much as a small result takes: a full disk still has room for empty files."""
    with file:
        file.write(bytes(_SMALL_RESULT))


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether sizes that the caller chose do not fit into the host's or a GPU's memory."""
    import torch

    # OutOfMemoryError is for a GPU's memory only, and not for what a compiled function allocates.
    texts = "allocate memory", "Storage size", "failed to allocate"
    is_known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return is_known or any(text in str(error) for text in texts)


def failures(command: str, *writes: tuple[Path, Callable[[], object]]) -> list[str]:
    """Calls each function that writes results to a path; returns a message for each that fails.

    The caller shows the results before this call, as they may have taken hours.
    """
    messages = []
    for path, write in writes:
        try:
            write()
        except BrokenPipeError:  # the reader of standard output has ended
            raise
        except OSError as error:
            messages.append(
                f"flashcute {command}: expected to write {path}, got: {error.strerror or error}; "
                "make room there, or name another place"
            )
    return messages
