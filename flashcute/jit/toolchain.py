"""Finds the compilers, and defines their flags."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from ..extras import install_command

# The compilers read these variables, so they are part of the cache key.
_COMPILER_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH")

SYSTEM_CUDA = Path("/usr/local/cuda")  # where the toolkit's installer puts it

# A file of each PyPI wheel that a build needs: nvidia-nvvm, -cuda-crt, -cuda-runtime.
_NVCC_PARTS = ("nvvm/bin/cicc", "include/crt/host_config.h", "include/cuda_runtime.h")
# `pip install torch` installs CUDA's runtime without the compiler's headers.
_CUDA_HEADERS = ("include/cuda_runtime_api.h", "include/crt/host_config.h", "include/cuda_fp16.h")
_MIN_NVCC = (12, 0)  # the first with -std=c++20; Ubuntu 22.04 has 11.5
_MIN_GCC = 11  # g++ 9 and older know no -std=c++20; 10 was not tried
_CCCL_HEADER = "cuda/std/utility"

# Without -lineinfo, which writes the absolute paths of all sources into the machine code.
NVCC_FLAGS = (
    "-std=c++20",
    "-O3",
    "-ftz=true",
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-Xptxas=-v",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-Xlinker=--strip-all",
    "-cudart=static",
    "-nodlink",  # there is no device code to link; linking would leave the toolkit's path
    "-shared",
)

# The stable ABI of torch 2.10: the binding then loads into that torch and every later one.
BINDING_FLAGS = (
    "-std=c++20",
    "-O2",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wl,--strip-all",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
)
BINDING_LIBRARIES = ("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10")


class BuildError(RuntimeError):
    """A shared object cannot be built, or is missing where builds are not allowed."""


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A compiler with the arguments for the paths of its own parts.

    Attributes:
        path: The executable.
        version: The output of ``--version``, of this compiler and of its host compiler.
        arguments: Passed before everything else.
    """

    path: Path
    version: str
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = self.version.splitlines()
        return f"{self.path}, {next((x for x in lines if 'release' in x), lines[0])}"

    @property
    def release(self) -> tuple[int, int] | None:
        """CUDA's release as nvcc prints it, e.g. (13, 0); None if it prints none."""
        found = re.search(r"\brelease (\d+)\.(\d+)", self.version)
        return (int(found[1]), int(found[2])) if found else None

    @property
    def gcc(self) -> int | None:
        """The major version of a g++; None for other compilers.

        A g++ prints e.g. "g++ (Debian 12.2.0-14) 12.2.0"; others print nothing of such a form.
        """
        found = re.match(r"\S+ \(.*?\) (\d+)\.\d", self.version)
        return int(found[1]) if found else None

    @property
    def newest_gcc(self) -> int | None:
        """The last g++ that this nvcc takes, as its header says; None if that is not known."""
        header = self.path.parents[1] / "include" / "crt" / "host_config.h"
        try:
            text = header.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        found = re.search(r"^#if __GNUC__ > (\d+)$", text, re.MULTILINE)
        return int(found[1]) if found else None

    def identity(self) -> str:
        """Returns a digest of everything about the compiler that can change its output."""
        parts = [str(self.path), self.version, *self.arguments]
        parts += [f"{name}={os.environ.get(name, '')}" for name in _COMPILER_VARIABLES]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.lru_cache
def _version(path: Path) -> str:
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(
            f"flashcute: expected a working compiler, got {path}: {error}; reinstall it or "
            "let CUDA_HOME, CXX and PATH point to another one"
        ) from error
    version = done.stdout.strip()
    if not version:
        raise BuildError(
            f"flashcute: expected a working compiler, got {path}, which prints no version; "
            "reinstall it or let CUDA_HOME, CXX and PATH point to another one"
        )
    return version


def find_host_compiler() -> Compiler:
    """Finds ``$CXX`` if set, else g++, else c++.

    Raises:
        BuildError: where there is none.
    """
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "c++"):
        found = shutil.which(name)
        if found:
            path = Path(found).absolute()  # compilers run in folders of their own
            compiler = Compiler(path, _version(path))
            if compiler.gcc is not None and compiler.gcc < _MIN_GCC:
                raise BuildError(
                    f"flashcute: expected g++ {_MIN_GCC} or later, got {compiler}; install a newer "
                    "one, or set CXX to its path"
                )
            return compiler
    raise BuildError(
        f"flashcute: expected a C++ compiler, got {'CXX=' + wanted if wanted else 'none on PATH'}; "
        f"install g++ {_MIN_GCC} or later, or set CXX to the compiler's path"
    )


def _cuda_roots() -> list[Path]:
    """Lists folders that may be a CUDA toolkit, best first."""
    home = os.environ.get("CUDA_HOME")
    if home:
        return [Path(home).absolute()]  # no fallback: a wrong CUDA_HOME must be an error
    roots = []
    on_path = shutil.which("nvcc")
    if on_path:
        roots.append(Path(on_path).resolve().parents[1])
    # The PyPI wheels nvidia-cuda-nvcc, -crt, -runtime, -cccl and nvidia-nvvm share one folder.
    for scheme in ("purelib", "platlib"):
        wheels = Path(sysconfig.get_path(scheme)) / "nvidia"
        roots += sorted(wheels.glob("cu[0-9]*"), reverse=True)
    roots.append(SYSTEM_CUDA)
    return roots


def _lacking(root: Path, files: Sequence[str]) -> str | None:
    """Returns a text with the ``files`` that a CUDA toolkit lacks; None if it has all."""
    missing = [name for name in files if not (root / name).exists()]
    return f"{root} (lacks {', '.join(missing)})" if missing else None


def find_nvcc_alone() -> Compiler:
    """Finds nvcc of ``CUDA_HOME`` if set, else of PATH, of the PyPI wheels, of /usr/local/cuda.

    It compiles nothing yet, as it has no host compiler. Releases before 12.0 are skipped. So are
    wheels if some of nvcc's parts are missing: other packages install only its assembler.

    Raises:
        BuildError: where there is none.
    """
    rejected = []
    for root in _cuda_roots():
        nvcc = root / "bin" / "nvcc"
        if not os.access(nvcc, os.X_OK):
            rejected.append(f"{root} (lacks bin/nvcc)")
            continue
        if root.parent.name == "nvidia" and (lacking := _lacking(root, _NVCC_PARTS)):
            rejected.append(lacking)
            continue
        found = Compiler(nvcc, _version(nvcc))
        if found.release is not None and found.release < _MIN_NVCC:
            rejected.append("{} (release {}.{}, before 12.0)".format(root, *found.release))
            continue
        return found
    raise BuildError(
        f"flashcute: expected nvcc in one of {', '.join(rejected)}, got none; install the CUDA "
        f"toolkit, or {install_command('nvcc')}, or set CUDA_HOME to the toolkit's folder"
    )


def find_nvcc() -> Compiler:
    """Returns :func:`find_nvcc_alone`'s compiler with its host compiler, as builds need it.

    Raises:
        BuildError: where there is none, or no host compiler for it.
    """
    nvcc, host = find_nvcc_alone(), find_host_compiler()
    root, arguments = nvcc.path.parents[1], [f"-ccbin={host.path}"]
    # nvcc looks for its libraries in lib64, the wheels install them in lib.
    if (root / "lib" / "libcudart_static.a").is_file() and not (root / "lib64").is_dir():
        arguments.append(f"-L{root / 'lib'}")
    parts = [nvcc.version, host.version]
    # cicc is in a separate wheel, which can be newer than nvcc, and prints no version.
    cicc = root / "nvvm" / "bin" / "cicc"
    if cicc.is_file():
        parts.append(f"cicc of {cicc.stat().st_size} bytes")
    return Compiler(nvcc.path, "\n".join(parts), tuple(arguments))


@dataclasses.dataclass(frozen=True)
class CudaHeaders:
    """CUDA's headers, enough to compile a kernel's source with a host compiler.

    Attributes:
        include: Folder that holds ``cuda_runtime.h``.
        cccl: Folder that holds ``cuda/std``.
        version: As ``CUDART_VERSION`` spells it, e.g. ``"13000"``.
    """

    include: Path
    cccl: Path
    version: str


def find_cuda_headers() -> CudaHeaders:
    """Finds the headers of the first CUDA toolkit or set of PyPI wheels with all; needs no nvcc.

    Raises:
        BuildError: where there are none.
    """
    rejected = []
    for root in _cuda_roots():
        include = root / "include"
        cccl = include / "cccl" if (include / "cccl").is_dir() else include
        needed = [*_CUDA_HEADERS, f"{(cccl / _CCCL_HEADER).relative_to(root)}"]
        if lacking := _lacking(root, needed):
            rejected.append(lacking)
            continue
        text = (include / "cuda_runtime_api.h").read_text(errors="replace")
        version = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
        return CudaHeaders(include, cccl, version[1] if version else "unknown")
    raise BuildError(
        f"flashcute: expected CUDA's headers in one of {', '.join(rejected)}, got none; install "
        f"the CUDA toolkit, or {install_command('nvcc')}, or set CUDA_HOME to the toolkit's folder"
    )
