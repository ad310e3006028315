"""Finds, builds and loads the kernel of a configuration."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from .. import env, shipped
from ..config import MAX_SMEM_BYTES, BwdConfig, FwdConfig
from . import build, cache, sources, toolchain
from .abi import ABI_VERSION, FlashBwdParams, FlashFwdParams, FlashKernel
from .toolchain import BuildError

logger = logging.getLogger("flashcute")

AnyConfig = FwdConfig | BwdConfig


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A loaded kernel.

    Attributes:
        config: The configuration that it was compiled for.
        target: sm number of the GPU, e.g. ``"90"``.
        path: The shared object.
        address: Address of its ``const flash::Flash_kernel``; valid until the process ends.
        threads: Threads per CTA.
        smem_bytes: Dynamic shared memory per CTA.
        registers: Registers per thread, as ptxas reported.
        spill_bytes: Spill stores and loads per thread in bytes, as ptxas reported.
    """

    config: AnyConfig
    target: str
    path: Path
    address: int
    threads: int
    smem_bytes: int
    registers: int
    spill_bytes: int


TARGETS = {f"{major}{minor}": (major, minor) for major, minor in MAX_SMEM_BYTES}


def capability_of(target: str) -> tuple[int, int]:
    """Returns the compute capability of a target: ``"90"`` is ``(9, 0)``.

    Raises:
        ValueError: for a target that flashcute has no kernels for.
    """
    if target not in TARGETS:
        raise ValueError(
            f"flashcute: expected target to be one of {', '.join(TARGETS)}, got "
            f"target={target!r}; flashcute has no kernels for other GPUs"
        )
    return TARGETS[target]


def compatible_targets(target: str) -> list[str]:
    """Returns the targets whose machine code runs on ``target``, best first.

    Code for X.y runs on X.z with z >= y (CUDA C++ Programming Guide, "Binary Compatibility"), but
    not between discrete and integrated GPUs (8.7).
    """
    major, minor = capability_of(target)
    if target == "87":
        return [target]
    return [
        name
        for name, (other_major, other_minor) in reversed(TARGETS.items())
        if other_major == major and other_minor <= minor and name != "87"
    ]


def kernel_unit(config: AnyConfig, target: str) -> build.Unit:
    """Returns the unit that builds one kernel for one target."""
    capability_of(target)
    # wgmma and setmaxnreg need sm_90a, which runs on compute capability 9.0 only.
    if config.arch == 90 and target != "90":
        raise ValueError(
            f"flashcute: expected target '90' for a kernel of the sm90 class, got {target=}"
        )
    code = "90a" if config.arch == 90 else target
    version = sources.cutlass_version()
    return build.Unit(
        name=config.full_name,
        target=f"sm_{target}",
        source=sources.source_text(config),
        suffix=".cu",
        flags=(*toolchain.NVCC_FLAGS, f"-gencode=arch=compute_{code},code=sm_{code}"),
        project_dirs=(sources.kernel_include_dir(),),
        external_dirs=(sources.cutlass_include_dir(),),
        external=(f"cutlass {version}",),
    )


def find_prebuilt(config: AnyConfig, target: str) -> cache.Artefact | None:
    """Finds the package's own shared object for ``config`` that runs on ``target``, if any."""
    for candidate in compatible_targets(target):
        unit = kernel_unit(config, candidate)
        folder = sources.prebuilt_dir() / unit.target
        if (folder / f"{unit.name}.so").is_file():
            found = cache.find(folder, unit.name, source_key=unit.source_key())
            if found is not None:
                return found
    return None


def _find_or_build(config: AnyConfig, target: str) -> cache.Artefact:
    settings = env.read()
    artefact = find_prebuilt(config, target)
    if artefact is not None:
        return artefact
    unit = kernel_unit(config, target)
    try:
        compiler = toolchain.find_nvcc()
    except BuildError as error:
        artefact = build.find(unit, None)
        if artefact is not None:
            return artefact
        raise BuildError(
            f"flashcute: kernel {unit.name} for {unit.target} is neither among the package's "
            f"prebuilt kernels nor in {cache.cache_dir()}, and cannot be built: {error}"
        ) from error
    artefact = build.find(unit, compiler)
    if artefact is not None:
        return artefact
    if settings.no_build:
        arguments = build_arguments(config, target)
        command = arguments and f", or run `python -m flashcute build {arguments}` first"
        raise BuildError(
            f"flashcute: expected kernel {unit.name} for {unit.target} to be built already, got "
            f"none in {sources.prebuilt_dir()} and {cache.cache_dir()} while FLASHCUTE_NO_BUILD=1; "
            f"unset it{command}"
        )
    sources.require_cutlass()
    logger.warning(
        "flashcute: building kernel %s for %s, once; later processes load it from %s",
        unit.name,
        unit.target,
        cache.cache_dir(),
    )
    return build.build(unit, compiler).artefact


def build_arguments(config: AnyConfig, target: str) -> str:
    """Returns the arguments of ``python -m flashcute build`` that build a kernel and few others.

    They are empty for a kernel that does not ship, which is built on first use only.
    """
    capability = capability_of(target)
    if config in shipped.configs_of_calls(capability):
        return f"--all --target {target}"
    if config not in shipped.dense_configs(capability):
        return ""
    causal = "yes" if config.mask == "causal" else "no"
    return (
        f"--pass {config.kind} --head-dim {config.head_dim} --dtype {config.dtype} "
        f"--causal {causal} --target {target}"
    )


def load(artefact: cache.Artefact, config: AnyConfig, target: str) -> Kernel:
    """Loads a kernel's shared object and checks its description.

    Raises:
        BuildError: names the first field that differs from what this package expects.
    """
    path = artefact.path
    try:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        entry = getattr(library, sources.entry_point(config))
    except (OSError, AttributeError) as error:
        raise BuildError(
            f"flashcute: expected a kernel in {path}, got {error}; {cache.load_advice(error)}"
        ) from error
    entry.restype = ctypes.c_void_p
    address = entry()
    description = FlashKernel.from_address(address)
    check_description(description, config, path)
    return Kernel(
        config=config,
        target=target,
        path=path,
        address=address,
        threads=description.threads,
        smem_bytes=description.smem_bytes,
        registers=artefact.meta["registers"],
        spill_bytes=artefact.meta["spill_bytes"],
    )


def check_description(description: FlashKernel, config: AnyConfig, path: Path) -> None:
    """Compares what a kernel of ``path`` says of itself with ``config``.

    Raises:
        BuildError: names the first field that differs from what this package expects.
    """
    params = FlashBwdParams if config.kind == "bwd" else FlashFwdParams
    expected = {
        "abi_version": ABI_VERSION,
        "params_size": ctypes.sizeof(params),
        "name": config.full_name.encode(),
        "threads": config.threads,
        "smem_bytes": config.smem_bytes,
        "tile_m": config.tile_m,
        "dq_accum": config.dq_accum,
    }
    # abi_version first: the other fields are valid only if it agrees.
    for field, value in expected.items():
        got = getattr(description, field)
        if got != value:
            raise BuildError(
                f"flashcute: expected {field}={value} in the kernel {path}, got {field}={got}; it "
                "belongs to another version of flashcute: remove the file, it is then built again"
            )


_loaded: dict[tuple[AnyConfig, str], Kernel] = {}
# A lock for each kernel, so that threads wait only for the build of their own kernel.
_loading: dict[tuple[AnyConfig, str], threading.Lock] = {}
# The thread that holds a lock during a fork does not exist in the child.
os.register_at_fork(after_in_child=_loading.clear)


def get_kernel(config: AnyConfig, target: str) -> Kernel:
    """Returns the kernel of ``config`` for the GPU with sm number ``target``, loaded.

    It is searched in this process, in the package's prebuilt folder and in the user's cache, and
    built if it is in none of them.

    Args:
        config: The kernel's configuration.
        target: sm number of the GPU, e.g. ``"90"``.

    Raises:
        ValueError: for a target without kernels, and for a wrong ``FLASHCUTE_*`` variable.
        BuildError: where the kernel is missing and cannot be built, or does not fit this package.
    """
    key = (config, target)
    kernel = _loaded.get(key)
    if kernel is not None:
        return kernel
    with _loading.setdefault(key, threading.Lock()):
        kernel = _loaded.get(key)
        if kernel is None:
            kernel = load(_find_or_build(config, target), config, target)
            _loaded[key] = kernel
    return kernel


def build_kernels(
    specs: Sequence[tuple[AnyConfig, str]],
    jobs: int | None = None,
    progress: Callable[[build.BuildResult], None] | None = None,
    watch: Callable[[build.Running], None] | None = None,
) -> list[build.BuildResult]:
    """Builds many kernels into the user's cache, several at once, without loading them.

    Args:
        specs: Pairs of configuration and target as in :func:`get_kernel`.
        jobs: Compilers at the same time; None: :func:`flashcute.jit.build.default_jobs`.
        progress: Called with each result as it comes, in the calling thread.
        watch: Called with what is being compiled, as by :func:`flashcute.jit.build.build_many`.

    Returns:
        One result per spec, in order. A failed build is reported in its result.

    Raises:
        BuildError: where no build can start at all: no compiler, no CUTLASS headers.
    """
    units = [kernel_unit(config, target) for config, target in specs]
    sources.require_cutlass()
    return build.build_many(units, toolchain.find_nvcc(), jobs, progress, watch)


PLACES = ("prebuilt", "cache", "not built")


def find_built(config: AnyConfig, target: str) -> tuple[str, cache.Artefact | None]:
    """Returns where a kernel is, one of :data:`PLACES`, and its entry there."""
    artefact = find_prebuilt(config, target)
    if artefact is not None:
        return "prebuilt", artefact
    compiler = None
    with contextlib.suppress(BuildError):
        compiler = toolchain.find_nvcc()
    with contextlib.suppress(BuildError):
        artefact = build.find(kernel_unit(config, target), compiler)
    return ("not built", None) if artefact is None else ("cache", artefact)


def place(results: Sequence[build.BuildResult], folder: Path) -> None:
    """Copies built shared objects into ``folder``, laid out like the package's prebuilt folder."""
    for result in results:
        if result.artefact is not None:
            cache.copy(result.artefact, folder / result.unit.target, result.unit.name)
