"""What pyproject.toml cannot say: the sources that travel in the wheel, and kernels built ahead.

A wheel carries ``csrc``, kernels and simulator, and CUTLASS's headers with their licence under
``flashcute/_src``, so all of it can be built where it is installed. Nothing is compiled while it is
made, unless ``FLASHCUTE_PREBUILD`` names GPUs: then the torch binding and the shipped kernels for
each of them are built into ``flashcute/prebuilt``, and the wheel becomes one for this platform: for
Linux of the oldest glibc that they run on. No wheel asks for one release of torch.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools

if int(setuptools.__version__.partition(".")[0]) < 77:  # as pyproject.toml asks for
    raise SystemExit(
        f"setup.py: expected setuptools 77 or later, got {setuptools.__version__}, which cannot "
        "read pyproject.toml: pip install 'setuptools>=77', or leave --no-build-isolation out"
    )

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CUTLASS = ROOT / "third_party" / "cutlass"
# setuptools runs this file with a sys.path that lacks its folder.
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import manylinux  # noqa: E402

from flashcute import env  # noqa: E402 - imports no torch


class BuildPackage(build_py):
    """build_py, then the sources and the kernels that are asked for."""

    def run(self) -> None:
        package = ROOT / "flashcute" if self.editable_mode else Path(self.build_lib) / "flashcute"
        if package.resolve() != ROOT / "flashcute":
            # Of an earlier build, whose modules may be gone from the sources.
            shutil.rmtree(package, ignore_errors=True)
        super().run()
        fetch = ROOT / "third_party" / "fetch_cutlass.py"
        subprocess.run([sys.executable, str(fetch)], check=True)
        if not self.editable_mode:
            _copy_sources(package / "_src")
        if targets := _targets():
            _prebuild(targets, package / "prebuilt")


class Package(Distribution):
    """A distribution for any platform, or with compiled kernels for this one."""

    def has_ext_modules(self) -> bool:
        return bool(_targets())


class BuildWheel(bdist_wheel):
    """A wheel of that distribution, never tied to a Python."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        built = Path(self.bdist_dir) / "flashcute" / "prebuilt"
        return "py3", "none", manylinux.tag(built.rglob("*.so"), platform)


def _targets() -> tuple[str, ...]:
    """The GPUs of ``FLASHCUTE_PREBUILD``; a wrong value ends the installation with a message."""
    try:
        return env.prebuild_targets()
    except ValueError as error:
        raise SystemExit(f"setup.py: {error}") from None


def _copy_sources(folder: Path) -> None:
    shutil.copytree(ROOT / "csrc", folder / "csrc")  # the kernels, and the simulator that runs them
    third_party = folder / "third_party" / "cutlass"
    shutil.copytree(CUTLASS / "include", third_party / "include")
    shutil.copy(CUTLASS / "LICENSE.txt", third_party)


def _prebuild(targets: tuple[str, ...], folder: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        raise SystemExit(
            "setup.py: expected torch while FLASHCUTE_PREBUILD is set, found none; the binding is "
            "built against it: install torch, then pip install --no-build-isolation"
        )
    command = [sys.executable, "-m", "flashcute", "build", "--all", "--target", *targets]
    command += ["--output", str(folder.resolve())]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        raise SystemExit("setup.py: FLASHCUTE_PREBUILD failed for the reason above")


commands = {"build_py": BuildPackage, "bdist_wheel": BuildWheel}
setup(distclass=Package, cmdclass=commands)
