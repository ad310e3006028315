"""Types of command line arguments that several commands take."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number of at least 1, for ``argparse``."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)
