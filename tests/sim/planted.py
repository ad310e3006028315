"""Compiles many mutants in one translation unit, because they share the instantiation of CuTe's
templates, which is nearly all of the compile time."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from mutants import Mutant, plant

from flashcute import sim
from flashcute.jit import build, sources, toolchain
from flashcute.jit.build import Unit
from flashcute.jit.toolchain import BuildError
from flashcute.sim.build import device_unit, entry

AT_MOST = 30  # mutants, or kernels, in one unit; several units compile in parallel

_HEAD = """\
#include <cuda_runtime.h>

#include <arch_sm90.h>
#include <dynamic_smem.h>
#include <wgmma_sm90.h>
"""
# Each mutant has its own namespace. Mutants share only the simulator's replacements of Hopper's
# instructions and of dynamic shared memory.
_MUTANT = """\
namespace {name} {{
using ::flash::dynamic_smem;
namespace sm90 {{
using namespace ::flash::sm90;
}}
}}
#define flash {name}
#define flash_kernel {name}_fwd
#define flash_bwd_kernel {name}_bwd
#include "{name}/flash_{pass_}_launch_template{of_class}.h"
{entry}
#undef flash
#undef flash_kernel
#undef flash_bwd_kernel
"""


def checker(mutant: Mutant) -> str:
    """Returns the checker that the mutant has to be compiled for."""
    return mutant.finder if mutant.finder in sim.CHECKERS else "none"


def _identifier(mutant: Mutant) -> str:
    """Returns a C++ identifier that ends in a hash, as mutants of different files may have the same
    name."""
    number = hashlib.sha256(repr(mutant).encode()).hexdigest()[:8]
    return "mutant_" + re.sub(r"\W+", "_", f"{mutant.name}_{number}")


def _alike(mutant: Mutant) -> tuple[str, int, int, str]:
    config = mutant.config
    return config.kind, config.arch, config.head_dim, checker(mutant)


def pieces(group: Sequence) -> list[tuple]:
    """Cuts ``group`` into pieces of about the same size, of at most :data:`AT_MOST` elements."""
    size = -(-len(group) // -(-len(group) // AT_MOST))
    return [tuple(group[i : i + size]) for i in range(0, len(group), size)]


_together: dict[Mutant, tuple[Mutant, ...]] = {}


def compile_mutants_together(mutants: Iterable[Mutant]) -> None:
    """Groups ``mutants`` into translation units, which :func:`build_mutants` compiles as a whole
    from now on, whichever of their mutants it is asked for."""
    for group in _groups(mutants):
        for piece in pieces(group):
            _together.update(dict.fromkeys(piece, piece))


def _groups(mutants: Iterable[Mutant]) -> list[list[Mutant]]:
    alike = defaultdict(list)
    for mutant in dict.fromkeys(mutants):
        alike[_alike(mutant)].append(mutant)
    return list(alike.values())


def _unit(name: str, group: Sequence[Mutant], folder: Path) -> Unit:
    texts = [_HEAD]
    for mutant in group:
        text = _MUTANT.format(
            name=_identifier(mutant),
            pass_=mutant.config.kind,
            of_class="_sm90" if mutant.config.arch == 90 else "",
            entry=entry(mutant.config, sources.entry_point(mutant.config)),
        )
        texts.append(text)
    return device_unit(name, "\n".join(texts), (folder,), checker(group[0]))


def build_mutants(mutants: Sequence[Mutant], folder: Path) -> dict[str, tuple[Path, str]]:
    """Plants ``mutants`` in ``folder`` and compiles those that are not cached, together with the
    mutants of other test files that share a translation unit with them.

    Returns:
        A dictionary from each mutant's name to its ``kernel`` for :func:`flashcute.sim.run_fwd`.

    Raises:
        BuildError: with the compiler's messages, in which each mutant has a folder of its name.
        ValueError: where two mutants have one name, or a mutant's text does not occur exactly once.
    """
    if len({mutant.name for mutant in mutants}) < len(mutants):
        raise ValueError(f"expected names that differ, got {[m.name for m in mutants]}")
    groups = {}
    for group in _groups(mutants):
        shared = [_together[mutant] for mutant in group if mutant in _together]
        for piece in dict.fromkeys(shared if len(shared) == len(group) else pieces(group)):
            for mutant in piece:
                plant(mutant, sources.kernel_include_dir(), folder / _identifier(mutant))
            kind, arch, head_dim, _ = _alike(piece[0])
            unit = _unit(f"mutants_{kind}_hdim{head_dim}_sm{arch}", piece, folder)
            groups[unit] = piece
    results = build.build_many(list(groups), toolchain.find_host_compiler())
    kernels = {}
    for result in results:
        if result.artefact is None:
            raise BuildError(result.error)
        for mutant in groups[result.unit]:
            function = f"{_identifier(mutant)}_{mutant.config.kind}"
            kernels[mutant] = (result.artefact.path, function)
    return {mutant.name: kernels[mutant] for mutant in mutants}
