"""Every environment variable that flashcute reads, in one table.

The variables are read when a kernel has to be found or built, never on the hot path. A value that
cannot be used and a ``FLASHCUTE_*`` name that does not exist are errors: a misspelt variable is
never silently ignored. So that this also holds where nothing is built, as on the CPU, they are
checked once when the functions that users call are imported.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .config import MAX_SMEM_BYTES

PREFIX = "FLASHCUTE_"


def _folder(text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # ~name of an unknown user, or ~ without a home
        path = Path()
    if not path.is_absolute():
        raise ValueError("an absolute path")
    return path


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("0 or 1")
    return text == "1"


def _positive(text: str) -> int:
    # Within ninja's range; Python converts no more than 4300 digits.
    if not text.isdecimal() or len(text) > 10 or not 1 <= int(text) < 2**31:
        raise ValueError("a whole number of at least 1, below 2**31")
    return int(text)


def _kernel_class(text: str) -> int:
    if text not in ("80", "90"):
        raise ValueError("80 or 90")
    return int(text)


def _targets(text: str) -> tuple[str, ...]:
    targets = tuple(part.strip() for part in text.split(","))
    known = [f"{major}{minor}" for major, minor in MAX_SMEM_BYTES]
    if not set(targets) <= set(known):
        raise ValueError(f"sm numbers between commas, e.g. 80,90, of {', '.join(known)}")
    return targets


@dataclasses.dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: Full name, beginning with :data:`PREFIX`.
        field: The attribute of :class:`Settings` that holds its value; None if only pip reads it.
        default: What happens when it is not set, in words.
        meaning: One sentence.
        parse: Text to value; raises ``ValueError`` with the expected form as its message.
        unset: The value of the field when the variable is not set or empty.
    """

    name: str
    field: str | None
    default: str
    meaning: str
    parse: Callable[[str], Any]
    unset: Any = None


VARIABLES = (
    Variable(
        "FLASHCUTE_CACHE_DIR",
        "cache_dir",
        "the user's cache folder, e.g. ~/.cache/flashcute",
        "Folder (absolute) that keeps the shared objects built on first use.",
        _folder,
    ),
    Variable(
        "FLASHCUTE_NO_BUILD",
        "no_build",
        "0",
        "1 turns a build that would start on first use into an error.",
        _switch,
        unset=False,
    ),
    Variable(
        "FLASHCUTE_ARCH",
        "arch",
        "the newest class that the GPU runs",
        "Kernel class, 80 (mma.sync) or 90 (wgmma), to compare them; read when a shape is new.",
        _kernel_class,
    ),
    Variable(
        "FLASHCUTE_JOBS",
        "jobs",
        "as many as cores and memory allow (5 GB a job)",
        "How many compilers run at the same time.",
        _positive,
    ),
    Variable(
        "FLASHCUTE_PREBUILD",
        None,
        "none",
        "Read by `pip install` from source: GPUs, e.g. 80,90, to build the shipped kernels for.",
        _targets,
        unset=(),
    ),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The parsed variables; see :data:`VARIABLES` for what each one means."""

    cache_dir: Path | None
    no_build: bool
    arch: int | None
    jobs: int | None


def _value(variable: Variable, environ: Mapping[str, str]) -> Any:
    text = environ.get(variable.name, "")
    try:
        return variable.parse(text) if text else variable.unset
    except ValueError as error:
        raise ValueError(
            f"flashcute: expected {variable.name} to be {error}, "
            f"got {variable.name}={text!r}; default when unset: {variable.default}"
        ) from None


def read(environ: Mapping[str, str] = os.environ) -> Settings:
    """Parses every variable of the table that is read at run time.

    Raises:
        ValueError: for a value of the wrong form, and for a ``FLASHCUTE_*`` name not in the table.
    """
    known = {variable.name for variable in VARIABLES}
    unknown = sorted(n for n in environ if n.startswith(PREFIX) and n not in known)
    if unknown:
        raise ValueError(
            f"flashcute: expected only known {PREFIX}* variables in the environment, got "
            f"{', '.join(unknown)}; unset it, known are {', '.join(sorted(known))}"
        )
    return Settings(**{v.field: _value(v, environ) for v in VARIABLES if v.field is not None})


def prebuild_targets(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns the GPUs of ``FLASHCUTE_PREBUILD`` as sm numbers, for setup.py.

    Raises:
        ValueError: as :func:`read`.
    """
    read(environ)
    (variable,) = (v for v in VARIABLES if v.name == "FLASHCUTE_PREBUILD")
    return _value(variable, environ)
