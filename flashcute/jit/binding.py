"""The torch binding: found or built with the host compiler, then loaded once per process."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from pathlib import Path

from .. import env
from ..config import NAMESPACE
from . import build, cache, sources, toolchain
from .toolchain import BuildError

logger = logging.getLogger("flashcute")


def binding_unit(namespace: str) -> build.Unit:
    """Returns the unit that builds the binding against the torch of this process.

    Torch's version is not part of the key: with the stable ABI one binary works with every torch
    since 2.10.
    """
    import torch

    root = Path(torch.__file__).parent
    return build.Unit(
        name="flash_api",
        target="host",
        source=sources.binding_source().read_text(),
        suffix=".cpp",
        flags=(*toolchain.BINDING_FLAGS, f"-DFLASHCUTE_NAMESPACE={namespace}"),
        libraries=(f"-L{root / 'lib'}", *toolchain.BINDING_LIBRARIES),
        project_dirs=(sources.binding_source().parent, sources.kernel_include_dir()),
        external_dirs=(root / "include", root / "include" / "torch" / "csrc" / "api" / "include"),
    )


def find() -> cache.Artefact | None:
    """Finds the binding in the package or in the user's cache; builds nothing."""
    unit = binding_unit(NAMESPACE)
    folder = sources.prebuilt_dir() / unit.target
    artefact = cache.find(folder, unit.name, source_key=unit.source_key())
    if artefact is not None:
        return artefact
    compiler = None
    with contextlib.suppress(BuildError):
        compiler = toolchain.find_host_compiler()
    return build.find(unit, compiler)


def _find_or_build() -> cache.Artefact:
    settings = env.read()
    artefact = find()
    if artefact is not None:
        return artefact
    compiler = toolchain.find_host_compiler()
    if settings.no_build:
        raise BuildError(
            "flashcute: expected the torch binding to be built already, got none in "
            f"{sources.prebuilt_dir()} and {cache.cache_dir()} while FLASHCUTE_NO_BUILD=1; unset "
            "it, or run `python -m flashcute build --all` first"
        )
    return build.build(binding_unit(NAMESPACE), compiler).artefact


def build_binding(
    progress: Callable[[build.BuildResult], None] | None = None,
    watch: Callable[[build.Running], None] | None = None,
) -> build.BuildResult:
    """Builds the binding into the user's cache; a failure is reported in the result."""
    units, compiler = [binding_unit(NAMESPACE)], toolchain.find_host_compiler()
    return build.build_many(units, compiler, 1, progress, watch)[0]


@functools.lru_cache(maxsize=1)
def load_binding() -> Path:
    """Loads the operators' C++ half into torch, building it where it is not there yet.

    Returns:
        The path of the shared object.

    Raises:
        BuildError: if it is missing and cannot be built, or torch cannot load it.
    """
    import torch

    path = _find_or_build().path
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        way_out = cache.load_advice(error)
        if "undefined symbol" in str(error):
            way_out = "flashcute needs torch 2.10 or later"
        raise BuildError(
            f"flashcute: torch {torch.__version__} cannot load the binding {path}: {error}; "
            f"{way_out}"
        ) from error
    return path
