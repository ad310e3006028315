"""The contents of a wheel and of a source distribution, and their use outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashcute import shipped
from flashcute.jit import BuildError, cache, toolchain

ROOT = Path(__file__).resolve().parents[1]


def tracked(*folders: str) -> set[str]:
    """Returns the files that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no git checkout: {error}")
    return {name for name in done.stdout.splitlines() if (ROOT / name).exists()}


def setup(*arguments) -> None:
    command = [sys.executable, "setup.py", "-q", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Builds the package as a wheel has it; returns its folder."""
    if not (ROOT / "third_party" / "cutlass").is_dir():
        pytest.skip("CUTLASS's headers are not there: python third_party/fetch_cutlass.py")
    folder = tmp_path_factory.mktemp("wheel")
    # setuptools writes everything into this folder, including the package's metadata.
    metadata = ("egg_info", "--egg-base", folder)
    setup(*metadata, "build", "--build-base", folder, "--build-lib", folder / "lib")
    return folder / "lib"


@pytest.fixture
def run(installed, tmp_path):
    """Runs Python in an empty folder, with an empty home and the package as installed."""
    (tmp_path / "home").mkdir()
    (tmp_path / "empty").mkdir()

    def run(*arguments, **variables):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FLASHCUTE_")}
        environment |= {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(installed), **variables}
        environment.pop("XDG_CACHE_HOME", None)
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path / "empty",
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.parametrize(("name", "value"), [("PREBUILD", "75"), ("PREBUILD", "x"), ("FOO", "1")])
def test_a_wrong_variable_ends_the_installation_with_a_message(name, value, tmp_path):
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    command += ["bdist_wheel", "--dist-dir", str(tmp_path)]
    environment = {**os.environ, f"FLASHCUTE_{name}": value}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("setup.py: flashcute: expected")
    assert f"FLASHCUTE_{name}" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("version", ["65.5.0", "76.1.0"])
def test_an_old_setuptools_ends_the_installation_with_a_message(version, tmp_path):
    """A fresh environment of Python 3.11 has an old setuptools, which --no-build-isolation uses."""
    (tmp_path / "setuptools.py").write_text(f'__version__ = "{version}"\n')
    done = subprocess.run(
        [sys.executable, "setup.py", "bdist_wheel"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    message = f"setup.py: expected setuptools 77 or later, got {version}"
    assert done.stderr.splitlines()[-1].startswith(message)
    assert "pip install 'setuptools>=77'" in done.stderr


def test_a_source_distribution_holds_every_file(tmp_path):
    setup("egg_info", "--egg-base", tmp_path)
    listed = (tmp_path / "flashcute.egg-info" / "SOURCES.txt").read_text().splitlines()
    assert tracked() - set(listed) == set()
    assert not [name for name in listed if name.startswith("third_party/cutlass")]


def test_a_wheel_holds_kernels_and_simulator(installed):
    folder = installed / "flashcute" / "_src"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert tracked("csrc") <= files
    assert {
        "third_party/cutlass/LICENSE.txt",
        "third_party/cutlass/include/cute/tensor.hpp",
    } < files
    assert (installed / "flashcute" / "py.typed").is_file()


def test_a_build_holds_nothing_of_an_earlier_one(tmp_path):
    """setuptools keeps build/lib with modules that were deleted after an earlier build."""
    if not (ROOT / "third_party" / "cutlass").is_dir():
        pytest.skip("CUTLASS's headers are not there: python third_party/fetch_cutlass.py")
    package = tmp_path / "lib" / "flashcute"
    stale = [package / "jit" / "deleted.py", package / "prebuilt" / "host" / "x.so"]
    stale += [package / "_src" / "csrc" / "deleted.h"]
    for path in stale:
        path.parent.mkdir(parents=True)
        path.touch()
    metadata = ("egg_info", "--egg-base", tmp_path)
    setup(*metadata, "build", "--build-base", tmp_path, "--build-lib", tmp_path / "lib")
    assert (package / "jit" / "build.py").is_file()
    assert not any(path.exists() for path in stale)


def test_an_installed_package_describes_itself(run, installed):
    done = run("-m", "flashcute", "info", "--target", "90")
    assert done.returncode == 0, done.stderr
    assert f"sources:      {installed / 'flashcute' / '_src'}" in done.stdout
    count = len(shipped.dense_configs((9, 0))) + len(shipped.configs_of_calls((9, 0)))
    assert f"{count} kernels: 0 prebuilt, 0 cache, {count} not built" in done.stdout
    done = run("-m", "flashcute", "cache")
    assert "does not exist: nothing was built yet" in done.stdout


def test_the_simulator_runs_from_an_installed_package(run):
    """The test uses the user's cache, so that only the first run on changed sources compiles."""
    try:
        toolchain.find_host_compiler()
        toolchain.find_cuda_headers()
    except BuildError as error:
        pytest.skip(str(error))
    arguments = ("sim", "--seqlen-q", "64", "--seqlen-k", "64")
    done = run("-m", "flashcute", *arguments, FLASHCUTE_CACHE_DIR=str(cache.cache_dir()))
    assert done.returncode == 0, done.stderr
    assert "verdict       pass" in done.stdout


def test_the_simulator_says_what_it_needs(run, tmp_path):
    done = run("-m", "flashcute", "sim", CUDA_HOME=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("flashcute: expected CUDA's headers in one of")
    assert len(done.stderr.splitlines()) == 1
    done = run("-m", "flashcute", "sim", CXX="no-compiler")
    assert done.returncode == 1
    assert "got CXX=no-compiler; install g++" in done.stderr.splitlines()[-1]


def test_a_damaged_installation_is_a_message(run, installed, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(installed, copy, ignore=shutil.ignore_patterns("cutlass"))
    done = run("-m", "flashcute", "sim", PYTHONPATH=str(copy))
    assert done.returncode == 1
    assert done.stderr.startswith("flashcute: expected CUTLASS's headers in")
    assert "install flashcute again" in done.stderr and len(done.stderr.splitlines()) == 1
