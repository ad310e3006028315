"""What to type to install the packages of an optional dependency."""

from __future__ import annotations

import importlib.metadata
import shlex


def install_command(extra: str) -> str:
    """Returns a command that installs the packages of an extra of pyproject.toml.

    It names the packages themselves, so it works from a wheel and from a checkout alike, and never
    ``flashcute[extra]``: on an index, that name may be anyone's.
    """
    try:
        requirements = importlib.metadata.requires("flashcute") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return f"`pip install '.[{extra}]'` in the checkout"
    parts = [requirement.split(";") for requirement in requirements]
    packages = [p[0].strip() for p in parts if p[1:] and f'extra == "{extra}"' in p[1]]
    return f"`pip install {shlex.join(packages)}`"
