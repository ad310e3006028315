from __future__ import annotations

import pytest

from flashcute.jit import toolchain
from flashcute.jit.toolchain import BuildError


def fake(path, version):
    """An executable that only knows its version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine with g++ on PATH and no CUDA."""
    for name in ("CUDA_HOME", "CXX"):
        monkeypatch.delenv(name, raising=False)
    fake(tmp_path / "path" / "g++", "g++ 12")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda scheme: str(tmp_path / "site"))
    monkeypatch.setattr(toolchain, "SYSTEM_CUDA", tmp_path / "usr" / "cuda")
    return tmp_path


def test_nothing_found_names_every_place_and_the_way_out(bare):
    with pytest.raises(
        BuildError, match=r"expected nvcc in one of .*pip install flashcute\[nvcc\]"
    ):
        toolchain.find_nvcc()


def test_order_is_path_wheels_system(bare, monkeypatch):
    system = fake(bare / "usr" / "cuda" / "bin" / "nvcc", "system")
    assert toolchain.find_nvcc().path == system
    wheels12 = fake(bare / "site" / "nvidia" / "cu12" / "bin" / "nvcc", "wheels 12")
    assert toolchain.find_nvcc().path == wheels12
    wheels = fake(bare / "site" / "nvidia" / "cu13" / "bin" / "nvcc", "wheels")
    assert toolchain.find_nvcc().path == wheels
    on_path = fake(bare / "cuda" / "bin" / "nvcc", "path")
    (bare / "path" / "nvcc").symlink_to(on_path)
    assert toolchain.find_nvcc().path == on_path
    home = fake(bare / "home" / "bin" / "nvcc", "home")
    monkeypatch.setenv("CUDA_HOME", str(bare / "home"))
    found = toolchain.find_nvcc()
    assert found.path == home
    assert found.version == "home\ng++ 12"
    assert found.arguments == (f"-ccbin={bare / 'path' / 'g++'}",)


def test_optimiser_of_another_wheel_is_another_compiler(bare):
    root = bare / "site" / "nvidia" / "cu13"
    fake(root / "bin" / "nvcc", "wheels")
    cicc = fake(root / "nvvm" / "bin" / "cicc", "")
    before = toolchain.find_nvcc().identity()
    assert toolchain.find_nvcc().identity() == before
    cicc.write_text(cicc.read_text() + "#")
    assert toolchain.find_nvcc().identity() != before


def test_wrong_cuda_home_is_not_papered_over(bare, monkeypatch):
    fake(bare / "usr" / "cuda" / "bin" / "nvcc", "system")
    monkeypatch.setenv("CUDA_HOME", str(bare / "nowhere"))
    with pytest.raises(BuildError, match="nowhere, got none"):
        toolchain.find_nvcc()


def test_wheels_have_their_libraries_in_lib(bare):
    root = bare / "site" / "nvidia" / "cu13"
    fake(root / "bin" / "nvcc", "wheels")
    (root / "lib").mkdir()
    (root / "lib" / "libcudart_static.a").touch()
    assert f"-L{root / 'lib'}" in toolchain.find_nvcc().arguments
    (root / "lib64").mkdir()
    assert f"-L{root / 'lib'}" not in toolchain.find_nvcc().arguments


def test_cxx_is_honoured_and_checked(bare, monkeypatch):
    other = fake(bare / "other" / "g++-14", "g++ 14")
    monkeypatch.setenv("CXX", str(other))
    assert toolchain.find_host_compiler().path == other
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="got CXX=no-such-compiler; install"):
        toolchain.find_host_compiler()


def test_compiler_that_does_not_run_is_named(bare, monkeypatch):
    broken = fake(bare / "broken", "")
    broken.write_text("#!/bin/sh\nexit 3\n")
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(BuildError, match=r"expected a working compiler, got .*broken.*status 3"):
        toolchain.find_host_compiler()
