"""What pyproject.toml cannot say: the sources that travel in the wheel, and kernels built ahead.

A wheel carries ``csrc/flash_attn`` and CUTLASS's headers with their licence under
``flashcute/_src``, so kernels can be built where it is installed. Nothing is compiled while it is
made, unless ``FLASHCUTE_PREBUILD`` names GPUs: then the shipped kernels are built for each of them
into ``flashcute/prebuilt`` and the wheel becomes one for this platform.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CUTLASS = ROOT / "third_party" / "cutlass"
# setuptools runs this file with a sys.path that lacks its folder.
sys.path.insert(0, str(ROOT))

from flashcute import env, heuristics  # noqa: E402 - neither imports torch


class BuildPackage(build_py):
    """build_py, then the sources and the kernels that are asked for."""

    def run(self) -> None:
        super().run()
        if not (CUTLASS / "include").is_dir():
            subprocess.run(
                [sys.executable, str(ROOT / "third_party" / "fetch_cutlass.py")], check=True
            )
        targets = env.read().prebuild
        package = ROOT / "flashcute"
        if not self.editable_mode:
            package = Path(self.build_lib) / "flashcute"
            _copy_sources(package / "_src")
            shutil.rmtree(package / "prebuilt", ignore_errors=True)
        if targets:
            _prebuild(targets, package / "prebuilt")


class BuildWheel(bdist_wheel):
    """A wheel for any platform, or with compiled kernels for this one; never tied to a Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not env.read().prebuild

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        return "py3", "none", platform


def _copy_sources(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "csrc" / "flash_attn", folder / "csrc" / "flash_attn")
    third_party = folder / "third_party" / "cutlass"
    shutil.copytree(CUTLASS / "include", third_party / "include")
    licences = list(CUTLASS.glob("LICENSE*"))
    if not licences:
        raise SystemExit(
            f"setup.py: expected CUTLASS's licence in {CUTLASS}, got none; remove that folder and "
            "run python third_party/fetch_cutlass.py"
        )
    for licence in licences:
        shutil.copy(licence, third_party)


def _prebuild(targets: tuple[str, ...], folder: Path) -> None:
    from flashcute import jit
    from flashcute.jit import cache

    specs = [(config, target) for target in targets for config in heuristics.shipped_configs()]
    results = jit.build_kernels(specs)
    failed = [result.error for result in results if result.error]
    if failed:
        raise SystemExit("\n".join(failed))
    for (config, target), result in zip(specs, results, strict=True):
        cache.copy(result.artefact, folder / f"sm_{target}", config.full_name)


setup(cmdclass={"build_py": BuildPackage, "bdist_wheel": BuildWheel})
