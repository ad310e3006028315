"""``python -m flashcute doctor``: what a machine lacks for the kernels, and how to mend it.

Each probe looks at one thing and imports no more than it needs, so that it answers on a machine
where others fail.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import os
import shutil
from collections import Counter
from collections.abc import Callable

from . import env, heuristics, shipped
from .config import MAX_SMEM_BYTES
from .jit import binding, build, cache, kernels, sources, toolchain
from .jit.toolchain import BuildError

_MIN_TORCH = (2, 10)
_CUDA_OF_WHEELS = 13  # major version of nvcc in PyPI's wheels; those for CUDA 12 lack it
# The first nvcc that compiles for a compute capability, if the oldest accepted nvcc does not.
_FIRST_NVCC = {(10, 0): (12, 8), (10, 3): (12, 9), (12, 0): (12, 8), (12, 1): (12, 9)}
_COMPILING = "nvcc", "C++", "ninja", "CUTLASS"
_MIN_FREE_BYTES = 2**30  # all kernels of one GPU, and what compilers write meanwhile


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one probe found.

    Attributes:
        text: What is there, or what was expected and what was found.
        mend: What to do; "" where nothing is missing.
        limits: Whether only kernels that do not ship need what is missing.
    """

    text: str
    mend: str = ""
    limits: bool = False


class Missing(Exception):
    """What a probe raises if something is not as it should be: (text, mend) of a Finding."""


def _torch() -> str:
    try:
        import torch
    except ImportError as error:
        way_out = "`pip install torch`, a build for CUDA"
        raise Missing(f"expected torch 2.10 or later, got {error}", way_out) from None
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release < _MIN_TORCH:
        text = f"expected torch 2.10 or later, got {torch.__version__}"
        raise Missing(text, "`pip install --upgrade torch`")
    if torch.version.cuda is None:
        text = f"expected a torch for CUDA, got {torch.__version__}, which is for the CPU alone"
        raise Missing(text, "install a build for CUDA, as https://pytorch.org says")
    return f"{torch.__version__} for CUDA {torch.version.cuda}"


def _cuda_of_driver() -> tuple[int, int] | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(number))
    return number.value // 1000, number.value % 1000 // 10


def _driver() -> str:
    version = _cuda_of_driver()
    if version is None:
        raise Missing(
            "expected NVIDIA's driver (libcuda.so.1), found none",
            "install the driver; start a container with its GPUs (docker run --gpus all)",
        )
    needed = _cuda_of_torch()
    text = f"for CUDA {version[0]}.{version[1]}"
    # Within a major version newer libraries run on an older driver.
    if needed is not None and version[0] < needed[0]:
        raise Missing(
            f"expected a driver for CUDA {needed[0]}, which torch is built for, got one {text}",
            "install a newer driver, or a torch for the driver's CUDA",
        )
    return text


def _cuda_of_torch() -> tuple[int, int] | None:
    try:
        from torch import version
    except ImportError:
        return None
    if version.cuda is None:
        return None
    major, minor = version.cuda.split(".")[:2]
    return int(major), int(minor)


def _capabilities() -> dict[tuple[int, int], str]:
    """Returns the compute capabilities of the GPUs that torch sees, with the GPUs' names."""
    try:
        import torch
    except ImportError:
        return {}
    devices = range(torch.cuda.device_count())
    return {torch.cuda.get_device_capability(i): torch.cuda.get_device_name(i) for i in devices}


def _gpu() -> str:
    found = _capabilities()
    if not found:
        raise Missing(
            "expected a GPU that torch can use, got none",
            "mend torch and the driver first; look at `nvidia-smi` and CUDA_VISIBLE_DEVICES",
        )
    known = sorted(MAX_SMEM_BYTES)
    lines = []
    for capability, name in found.items():
        number = "{}.{}".format(*capability)
        if capability not in known:
            lines.append(f"{name} of {number}, without kernels")
            continue
        classes = "sm80" if heuristics.kernel_class(capability) == 80 else "sm80 and sm90"
        lines.append(f"{name}, compute capability {number}, kernels of class {classes}")
    if not set(found) & set(known):
        raise Missing(
            f"expected a compute capability of {_listed(known)}, got {'; '.join(lines)}",
            "use another GPU, or CPU tensors",
        )
    return "; ".join(lines)


def _listed(capabilities) -> str:
    return ", ".join("{}.{}".format(*capability) for capability in capabilities)


def _nvcc() -> str:
    # Kernels have their CUDA runtime linked in; it runs on older drivers of its major version.
    driver = _cuda_of_driver()
    mend = "install a newer driver, or a toolkit of the driver's CUDA, and set CUDA_HOME to it"
    try:
        compiler = toolchain.find_nvcc_alone()
    except BuildError as error:
        if driver is None or driver[0] >= _CUDA_OF_WHEELS:
            raise  # with the advice to install PyPI's wheels
        raise Missing(f"{error}".removeprefix("flashcute: ").partition("; ")[0], mend) from None
    if driver is not None and compiler.release is not None and compiler.release[0] > driver[0]:
        text = f"expected nvcc of CUDA {driver[0]}, which the driver is for, got {compiler}"
        raise Missing(text, mend)
    try:
        capabilities = list(_capabilities())
    except (OSError, RuntimeError, ValueError):  # torch is broken: the GPU's probe says so
        capabilities = []
    for capability in capabilities:
        needed = _FIRST_NVCC.get(capability)
        if needed is not None and compiler.release is not None and compiler.release < needed:
            release, number = ("{}.{}".format(*x) for x in (needed, capability))
            text = f"expected nvcc {release} or later for compute capability {number}"
            raise Missing(f"{text}, got {compiler}", "install a newer toolkit, or set CUDA_HOME")
    return f"{compiler}"


def _host_compiler() -> str:
    compiler = toolchain.find_host_compiler()
    with contextlib.suppress(BuildError):  # nvcc's own probe reports it
        nvcc = toolchain.find_nvcc_alone()
        newest = nvcc.newest_gcc
        if None not in (newest, compiler.gcc) and compiler.gcc > newest:
            raise Missing(
                f"expected g++ {newest} or older for {nvcc}, got {compiler}",
                f"install g++-{newest} and set CXX to it, or install a newer nvcc",
            )
    return f"{compiler}"


def _cutlass() -> str:
    sources.require_cutlass()
    return f"CUTLASS {sources.cutlass_version() or 'of an unknown version'}"


def _cache() -> str:
    folder = cache.writable_cache_dir()
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise Missing(
            f"expected a folder that code can be loaded from, got {folder}, mounted noexec",
            "set FLASHCUTE_CACHE_DIR to a folder on another file system",
        )
    free = shutil.disk_usage(folder).free
    if free < _MIN_FREE_BYTES:
        raise Missing(
            f"expected {_MIN_FREE_BYTES >> 20} MiB of free space for compiled kernels in {folder}, "
            f"got {free >> 20} MiB",
            "free some, or set FLASHCUTE_CACHE_DIR to a folder on another disk",
        )
    return f"{folder}, {free / 2**30:.0f} GiB free"


def _places() -> dict[str, Counter[str]]:
    """Returns for each GPU's target how many of its shipped kernels are in each place."""
    found = {}
    for capability in _capabilities():
        if capability not in MAX_SMEM_BYTES:
            continue
        target = "{}{}".format(*capability)
        configs = shipped.dense_configs(capability) + shipped.configs_of_calls(capability)
        found[target] = Counter(kernels.find_built(config, target)[0] for config in configs)
    return found


def _kernels() -> str:
    texts = []
    for target, places in _places().items():
        counts = ", ".join(f"{places[place]} {place}" for place in kernels.PLACES)
        texts.append(f"sm_{target}: {counts}")
        if env.read().no_build and places["not built"]:
            raise Missing(
                f"expected all kernels to be built while FLASHCUTE_NO_BUILD=1, got {texts[-1]}",
                "unset it, or run `python -m flashcute build --all` without it",
            )
    if texts:
        return "; ".join(texts)
    found = Counter(path.parent.name for path in sources.prebuilt_dir().glob("sm_*/*.so"))
    counts = [f"{n} for {target}" for target, n in sorted(found.items())]
    return f"of no GPU here; prebuilt: {', '.join(counts) or 'none'}; others: on first use"


def _probes() -> dict[str, Callable[[], str]]:
    return {
        "torch": _torch,
        "driver": _driver,
        "GPU": _gpu,
        "nvcc": _nvcc,
        "C++": _host_compiler,
        "ninja": build.find_ninja,
        "CUTLASS": _cutlass,
        "cache": _cache,
        "kernels": _kernels,
    }


def _has_binding() -> bool:
    """Returns whether kernels can be launched without a compiler."""
    with contextlib.suppress(BuildError):  # other users can write to the cache
        return binding.find() is not None
    return False


def examine() -> dict[str, Finding]:
    """Returns what each probe found, by name."""
    found = {}
    for name, probe in _probes().items():
        try:
            found[name] = Finding(probe())
        except Missing as missing:
            found[name] = Finding(*missing.args)
        except BuildError as error:  # "flashcute: expected ..., got ...; what to do"
            text, _, mend = f"{error}".removeprefix("flashcute: ").partition("; ")
            found[name] = Finding(text, mend or "see above")
        except (OSError, RuntimeError, ValueError) as error:  # a broken torch or driver
            found[name] = Finding(f"{type(error).__name__}: {error}", "mend what is named here")
    places = [] if found["kernels"].mend else list(_places().values())
    if places and not any(of["not built"] for of in places) and _has_binding():
        for name in _COMPILING:
            limits = bool(found[name].mend)
            found[name] = dataclasses.replace(found[name], limits=limits)
    return found


def run(args: argparse.Namespace) -> int:
    """Prints what was found; returns 1 if anything is missing."""
    found = examine()
    for name, finding in found.items():
        state = "limited" if finding.limits else "missing" if finding.mend else "ok"
        print(f"{state:<9}{name:<9}{finding.text}")
        if finding.mend:
            print(f"{'':<9}{'mend':<9}{finding.mend}")
    missing = [name for name, finding in found.items() if finding.mend and not finding.limits]
    if missing:
        print(f"\nmissing: {', '.join(missing)}. CPU tensors need torch alone.")
        return 1
    if any(finding.limits for finding in found.values()):
        print("\nnothing is missing for shipped kernels; others, as ALiBi's, cannot be built")
        return 0
    print("\nnothing is missing")
    return 0
