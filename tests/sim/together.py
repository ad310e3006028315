"""Compiles in one translation unit the kernels of one pass, kernel class and head dimension that
the collected files need with one checker: most of a kernel's compile time is CuTe's templates,
which the kernels of a translation unit share.

A file lists what it compiles in ``COMPILED``, pairs of a configuration and a checker, and the
faults it plants in ``PLANTED``. A kernel that no file lists is compiled when a test asks for it,
together with what :func:`flashcute.sim.build.companions` returns."""

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
    """Returns False for shipped forwards without a checker, which share a translation unit for each
    head dimension anyway."""
    config, checker = pair
    return checker != "none" or config not in shipped_configs(config.arch)


def compile_together(modules: Iterable[ModuleType]) -> None:
    """Groups what ``modules`` compile into translation units, from now on in this process."""
    modules = sorted(modules, key=lambda x: x.__name__)  # every process makes the same units
    compiled = [getattr(module, "COMPILED", ()) for module in modules]
    pairs = filter(_not_shipped, dict.fromkeys(itertools.chain(*compiled)))
    for (*_, checker), group in itertools.groupby(sorted(pairs, key=_alike), _alike):
        for piece in pieces([config for config, _ in group]):
            sim.compile_together(piece, [checker])
    compile_mutants_together(m for x in modules for m in getattr(x, "PLANTED", ()))
