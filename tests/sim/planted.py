"""Compiles many mutants in one translation unit, because they share the instantiation of CuTe's
templates, which is nearly all of the compile time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from mutants import Mutant, plant

from flashcute import sim
from flashcute.jit import build, sources, toolchain
from flashcute.jit.build import Unit
from flashcute.jit.toolchain import BuildError
from flashcute.sim.build import device_unit, entry

_AT_MOST = 30  # mutants in one unit; several units compile in parallel

_HEAD = """\
#include <cuda_runtime.h>

#include <arch_sm90.h>
#include <dynamic_smem.h>
#include <wgmma_sm90.h>
"""
# Each mutant has its own namespace. They share only the replacements of Hopper's instructions and
# of the shared memory.
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
    """The checker that the mutant has to be compiled for."""
    return mutant.finder if mutant.finder in sim.CHECKERS else "none"


def _identifier(mutant: Mutant) -> str:
    return "mutant_" + re.sub(r"\W+", "_", mutant.name)


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
    """Plants ``mutants`` in ``folder`` and compiles them, where they are not cached.

    Returns:
        From each mutant's name to its ``kernel`` for :func:`flashcute.sim.run_fwd`.

    Raises:
        BuildError: with the compiler's messages, in which each mutant has a folder of its name.
    """
    alike = defaultdict(list)
    for mutant in mutants:
        plant(mutant, sources.kernel_include_dir(), folder / _identifier(mutant))
        config = mutant.config
        alike[config.kind, config.arch, config.head_dim, checker(mutant)].append(mutant)
    groups = {}
    for (kind, arch, head_dim, _), group in alike.items():
        pieces = -(-len(group) // _AT_MOST)
        for i in range(pieces):
            unit = _unit(f"mutants_{kind}_hdim{head_dim}_sm{arch}_{i}", group[i::pieces], folder)
            groups[unit] = group[i::pieces]
    results = build.build_many(list(groups), toolchain.find_host_compiler())
    kernels = {}
    for result in results:
        if result.artefact is None:
            raise BuildError(result.error)
        for mutant in groups[result.unit]:
            kernels[mutant.name] = (
                result.artefact.path,
                f"{_identifier(mutant)}_{mutant.config.kind}",
            )
    return kernels
