"""Names of flash-attn 2 that are not here yet: what an access to them says."""

from __future__ import annotations

import sys
from opcode import opmap

# name: what to use instead
INSTEAD = {
    "flash_attn_with_kvcache": "write the new keys and values into the cache with an assignment, "
    "then call flash_attn_func(q, k_cache[:, :n], v_cache[:, :n], causal=True)",
}


def message(module: str, name: str, instead: str) -> str:
    """What is said of a ``name`` of flash-attn 2 that was asked of ``module``."""
    return (
        f"{module}: expected a name of flashcute, got {name}, which flash-attn 2 has and flashcute "
        f"does not have yet; {instead}"
    )


def error(module: str, name: str, instead: str | None = None) -> ImportError | AttributeError:
    """What a module's ``__getattr__`` raises for a ``name`` that the module does not have.

    It says what to use ``instead``, by default that of :data:`INSTEAD`.

    An AttributeError, so that hasattr() and getattr() with a default work. ``from module import
    name`` would replace it by an ImportError without its words, and so gets an ImportError at once.
    """
    instead = instead or INSTEAD.get(name)
    if instead is None:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    caller = sys._getframe(2)  # of __getattr__
    if caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]:
        return ImportError(message(module, name, instead), name=module)
    return AttributeError(message(module, name, instead))
