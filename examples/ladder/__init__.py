"""From a naive attention kernel to the production one, one idea per rung: see README.md."""

from .launch import attention
from .rungs import RUNGS, Rung, find

__all__ = ["RUNGS", "Rung", "attention", "find"]
