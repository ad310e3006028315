"""Compiles kernels for the simulator, with the same builder and cache as for a GPU."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from ..config import MASKS, BwdConfig, FwdConfig
from ..heuristics import shipped_configs
from ..jit import build, cache, sources, toolchain
from ..jit.build import BuildResult, Unit
from ..jit.sources import kernel_type
from ..jit.toolchain import BuildError

# Compiler flags of each checker. UBSan's null and vptr checks cost compile time and do not check
# index arithmetic. With AddressSanitizer, -Og compiles in about half the time of -O1, and the code
# is as fast; with the other sanitizers it brings nothing.
CHECKERS = {
    "none": (),
    "memcheck": ("-fsanitize=address", "-Og", "-g1"),
    "racecheck": ("-fsanitize=thread", "-g1"),
    "ubcheck": ("-fsanitize=undefined", "-fno-sanitize=null,vptr", "-fno-sanitize-recover", "-g1"),
}
# The runner links the sanitizer's library and annotates fibre switches for it. It is not
# instrumented itself: the simulator's own accesses are not the kernel's.
_RUNTIME_MACROS = {
    "none": (),
    "memcheck": ("-DSIM_ASAN",),
    "racecheck": ("-DSIM_TSAN",),
    "ubcheck": (),
}
_RUNTIME_LIBRARIES = {
    "none": (),
    "memcheck": ("-Wl,--no-as-needed", "-lasan"),
    "racecheck": ("-Wl,--no-as-needed", "-ltsan"),
    "ubcheck": ("-Wl,--no-as-needed", "-lubsan"),
}

_COMMON_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-DNDEBUG", "-fno-strict-aliasing")
# -w: CuTe gives warnings with host compilers.
# -ffp-contract=fast: as with nvcc, a product and a sum become one FMA where the host has it, so the
# roundings are those of the GPU. At -O1 that pass needs -fexpensive-optimizations.
# ggc-min-heapsize: gcc collects garbage from 1 GB on, not from 128 MB, which took it a tenth of the
# time and more.
# -ftrivial-auto-var-init: uninitialised registers are NaN in fp16 and -1.7e38 in bf16 and fp32.
_KERNEL_FLAGS = (
    *(*_COMMON_FLAGS, "-shared", "-fvisibility=hidden", "-w"),
    *("-ffp-contract=fast", "-fexpensive-optimizations"),
    "-ftrivial-auto-var-init=pattern",
    "--param=ggc-min-heapsize=1000000",
)
# Headers of the libraries and the simulator that all kernels include: a third of the time that
# compiling one takes.
_HEADERS = """\
#include <arch_sm90.h>
#include <cuda_runtime.h>

#include <cute/tensor.hpp>
#include <cutlass/numeric_conversion.h>
"""
RUNTIME_SOURCES = (
    *("fiber", "block", "cluster", "memory", "instructions", "counters", "dependency", "mbarrier"),
    *("copy_arrival", "tma", "tma_store", "wgmma", "workers", "launch"),
)


def simulator_dir() -> Path:
    """Returns the folder of the simulator's sources.

    Raises:
        BuildError: where they are missing.
    """
    folder = sources.source_root() / "csrc" / "sim"
    if not (folder / "src" / "runner.cpp").is_file():
        raise BuildError(
            f"flashcute sim: expected the simulator's sources in {folder}, got none; install "
            "flashcute again, they are part of its wheel"
        )
    return folder


def _machine_flags() -> tuple[str, ...]:
    """Returns the flag for x86-64-v3 where this CPU supports it: FMA, as on the GPU, and AVX2."""
    if platform.machine() != "x86_64":
        return ()
    flags = set(Path("/proc/cpuinfo").read_text().split())
    v3 = {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"}
    return ("-march=x86-64-v3",) if v3 <= flags else ()


# The configurations that :func:`compile_together` was given, by configuration and checker.
_together: dict[tuple[FwdConfig | BwdConfig, str], tuple[FwdConfig | BwdConfig, ...]] = {}


def compile_together(
    configs: Sequence[FwdConfig | BwdConfig], checkers: Sequence[str] = ("none",)
) -> None:
    """Makes ``configs`` one translation unit for ``checkers``, from now on in this process.

    It is worth it where all of them are used, as they share most of their compile time.

    Args:
        configs: Configurations of one pass, kernel class and head dimension.
        checkers: Names from :data:`CHECKERS`.

    Raises:
        ValueError: where the configurations do not fit into one unit.
    """
    kinds = {(config.kind, config.arch, config.head_dim) for config in configs}
    if len(kinds) != 1:
        raise ValueError(
            "sim.compile_together: expected configs of one pass, kernel class and head dimension, "
            f"got {sorted(kinds)}; call it for each of them"
        )
    for config in configs:
        for checker in checkers:
            _together[config, checker] = tuple(configs)


def companions(
    config: FwdConfig | BwdConfig, checker: str = "none"
) -> tuple[FwdConfig | BwdConfig, ...]:
    """Returns the configurations compiled together with ``config``, itself among them.

    The shipped configurations of a class and head dimension share nearly all of their types, and so
    nearly all of the compile time: four in one translation unit take 12 s, each alone 11 s. The
    configurations of a backward with every mask share theirs, too. Others are compiled alone, or as
    :func:`compile_together` says.
    """
    if (config, checker) in _together:
        return _together[config, checker]
    if isinstance(config, BwdConfig):
        return tuple(dataclasses.replace(config, mask=mask) for mask in MASKS)
    shipped = tuple(c for c in shipped_configs(config.arch) if c.head_dim == config.head_dim)
    return shipped if config in shipped else (config,)


def entry(config: FwdConfig | BwdConfig, function: str) -> str:
    """Returns the code of an exported function like ``flash_kernel()``, for ``config``."""
    return (
        'extern "C" __attribute__((visibility("default"))) '
        f"const flash::{kernel_type(config)} *\n"
        f"{function}() {{ return flash::describe_{config.kind}"
        f"<flash::{type(config).__name__}{config.to_cpp()}>"
        f'("{config.full_name}"); }}'
    )


def kernel_unit(
    config: FwdConfig | BwdConfig, checker: str = "none", *, kernel_dir: Path | None = None
) -> Unit:
    """Returns the unit of a simulator's shared object with ``config`` and its companions.

    It exports a function like ``flash_kernel()`` for each, with the configuration's name.

    Args:
        config: The configuration.
        checker: One of :data:`CHECKERS`.
        kernel_dir: Folder of altered kernel headers; compiles ``config`` alone. The project's own
            headers by default.
    """
    configs = companions(config, checker) if kernel_dir is None else (config,)
    return unit_of(configs, checker, kernel_dir or sources.kernel_include_dir())


def unit_of(
    configs: Sequence[FwdConfig | BwdConfig], checker: str = "none", kernel_dir: Path | None = None
) -> Unit:
    """Returns the unit of all of ``configs``, which have one kind, class and head dimension."""
    kernel_dir = kernel_dir or sources.kernel_include_dir()
    config = configs[0]
    entries = "\n".join(entry(c, c.full_name) for c in configs)
    of_class = "_sm90" if config.arch == 90 else ""
    text = f"""\
#include "flash_{config.kind}_launch_template{of_class}.h"

{entries}
"""
    together = f"flash_{config.kind}_hdim{config.head_dim}_sm{config.arch}"
    name = config.full_name if len(configs) == 1 else together
    return device_unit(name, text, (kernel_dir,), checker)


def device_unit(
    name: str, source: str, project_dirs: tuple[Path, ...], checker: str = "none"
) -> Unit:
    """Returns the unit of a shared object of CUDA device code for the simulator.

    Args:
        name: Stem of the files.
        source: The code.
        project_dirs: Include folders of the project's own headers.
        checker: One of :data:`CHECKERS`.
    """
    sources.require_cutlass()
    cuda = toolchain.find_cuda_headers()
    header = Unit(
        name="headers",
        target=f"sim-{checker}",
        source=_HEADERS,
        suffix=".h",
        flags=(*_KERNEL_FLAGS, *_machine_flags(), *CHECKERS[checker], "-x", "c++-header"),
        # First on the include path: it replaces some of the kernels' headers.
        overriding_dirs=(simulator_dir() / "include",),
        external_dirs=(sources.cutlass_include_dir(), cuda.include, cuda.cccl),
        external=(f"CUTLASS {sources.cutlass_version()}", f"CUDA {cuda.version}"),
    )
    return dataclasses.replace(
        header,
        name=name,
        source=source,
        suffix=".cpp",
        flags=header.flags[:-2],
        project_dirs=project_dirs,
        header=header,
    )


def runner_unit(checker: str = "none", *, extra_flags: Sequence[str] = ()) -> Unit:
    """Returns the unit of the program that loads a kernel's shared object and runs a problem."""
    source_dir = simulator_dir() / "src"
    includes = "".join(f'#include "{stem}.cpp"\n' for stem in (*RUNTIME_SOURCES, "runner"))
    return Unit(
        name="simulator",
        target=f"sim-{checker}",
        source=includes,
        suffix=".cpp",
        flags=(
            *(*_COMMON_FLAGS, "-O3", "-Wall", "-Wextra", "-rdynamic"),
            *(*_machine_flags(), *_RUNTIME_MACROS[checker], *extra_flags),
        ),
        libraries=_RUNTIME_LIBRARIES[checker],
        project_dirs=(source_dir, simulator_dir() / "include" / "sim"),
    )


def _artefacts(results: Sequence[BuildResult]) -> list[cache.Artefact]:
    errors = [result.error for result in results if result.artefact is None]
    if errors:
        raise BuildError("\n".join(str(error) for error in errors))
    return [result.artefact for result in results if result.artefact is not None]


def build_runners(
    checkers: Sequence[str] = tuple(CHECKERS),
    jobs: int | None = None,
    progress: Callable[[BuildResult], None] | None = None,
    watch: Callable[[build.Running], None] | None = None,
) -> list[Path]:
    """Builds the runners of ``checkers`` where they are not cached; returns their paths.

    Raises:
        BuildError: with the compiler's message.
    """
    units = [runner_unit(checker) for checker in checkers]
    compiler = toolchain.find_host_compiler()
    results = build.build_many(units, compiler, jobs, progress, watch)
    return [artefact.path for artefact in _artefacts(results)]


def build_kernels(
    specs: Sequence[tuple[FwdConfig | BwdConfig, str]],
    *,
    kernel_dir: Path | None = None,
    jobs: int | None = None,
    progress: Callable[[BuildResult], None] | None = None,
    watch: Callable[[build.Running], None] | None = None,
) -> list[Path]:
    """Builds the shared objects of ``(configuration, checker)`` pairs where needed; returns paths.

    Raises:
        BuildError: with the compiler's messages.
    """
    units = [kernel_unit(config, checker, kernel_dir=kernel_dir) for config, checker in specs]
    distinct = list(dict.fromkeys(units))
    compiler = toolchain.find_host_compiler()
    results = build.build_many(distinct, compiler, jobs, progress, watch)
    paths = dict(zip(distinct, (a.path for a in _artefacts(results)), strict=True))
    return [paths[unit] for unit in units]
