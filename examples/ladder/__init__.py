"""From a naive attention kernel to the production one, an idea a step: see README.md."""

from .launch import attention
from .rungs import RUNGS, Rung, find

__all__ = ["RUNGS", "Rung", "attention", "find"]
