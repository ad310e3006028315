"""What the collected files compile of one pass, kernel class and head dimension, and for one
checker, is compiled together: most of what a kernel takes is CuTe's templates, which the others of
its translation unit share.

A file says what it compiles in ``COMPILED``, pairs of a configuration and a checker, and which
faults it plants in ``PLANTED``. A kernel that no file names is compiled when a test asks for it, as
:func:`flashcute.sim.build.companions` says."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import ModuleType

from planted import compile_mutants_together, pieces

from flashcute import sim
from flashcute.heuristics import shipped_configs


def _alike(pair: tuple) -> tuple:
    config, checker = pair
    return config.kind, config.arch, config.head_dim, checker


def _not_shipped(pair: tuple) -> bool:
    """Shipped forwards have a unit for each head dimension anyway."""
    config, checker = pair
    return checker != "none" or config not in shipped_configs(config.arch)


def compile_together(modules: Iterable[ModuleType]) -> None:
    """What ``modules`` compile, from now on in this process."""
    modules = sorted(modules, key=lambda x: x.__name__)  # in one order in every process
    compiled = [getattr(module, "COMPILED", ()) for module in modules]
    pairs = filter(_not_shipped, dict.fromkeys(itertools.chain(*compiled)))
    for (*_, checker), group in itertools.groupby(sorted(pairs, key=_alike), _alike):
        for piece in pieces([config for config, _ in group]):
            sim.compile_together(piece, [checker])
    compile_mutants_together(m for x in modules for m in getattr(x, "PLANTED", ()))
