from __future__ import annotations

import pytest

from flashcute.jit import toolchain
from flashcute.jit.toolchain import BuildError


def fake(path, version):
    """Makes an executable that only prints its version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return path


HEADERS = ("cuda_runtime_api.h", "cuda_runtime.h", "cuda_fp16.h")


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("#define CUDART_VERSION 13000\n")


def wheels(site, name, version="wheels"):
    """Makes the shared folder that the PyPI wheels of nvcc and its parts leave."""
    root = site / "nvidia" / name
    touch(root / "include", *HEADERS, "crt/host_config.h", "cccl/cuda/std/utility")
    fake(root / "nvvm" / "bin" / "cicc", "")
    return fake(root / "bin" / "nvcc", version)


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """Makes the machine one with g++ on PATH and no CUDA."""
    for name in ("CUDA_HOME", "CXX"):
        monkeypatch.delenv(name, raising=False)
    fake(tmp_path / "path" / "g++", "g++ 12")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda scheme: str(tmp_path / "site"))
    monkeypatch.setattr(toolchain, "SYSTEM_CUDA", tmp_path / "usr" / "cuda")
    return tmp_path


def test_nothing_found_names_every_place_and_the_way_out(bare):
    with pytest.raises(BuildError, match=r"expected nvcc in one of .*lacks bin/nvcc.*pip install"):
        toolchain.find_nvcc()
    with pytest.raises(BuildError, match=r"expected CUDA's headers in one of .*pip install"):
        toolchain.find_cuda_headers()


def test_order_is_path_wheels_system(bare, monkeypatch):
    system = fake(bare / "usr" / "cuda" / "bin" / "nvcc", "system")
    assert toolchain.find_nvcc().path == system
    wheels12 = wheels(bare / "site", "cu12", "wheels 12")
    assert toolchain.find_nvcc().path == wheels12
    wheels13 = wheels(bare / "site", "cu13")
    assert toolchain.find_nvcc().path == wheels13
    on_path = fake(bare / "cuda" / "bin" / "nvcc", "path")
    (bare / "path" / "nvcc").symlink_to(on_path)
    assert toolchain.find_nvcc().path == on_path
    home = fake(bare / "home" / "bin" / "nvcc", "home")
    monkeypatch.setenv("CUDA_HOME", str(bare / "home"))
    found = toolchain.find_nvcc()
    assert found.path == home
    assert found.version == "home\ng++ 12"
    assert found.arguments == (f"-ccbin={bare / 'path' / 'g++'}",)


OLD = ("g++ (GCC) 4.8.5 20150623 (Red Hat 4.8.5-44)", "g++ (Ubuntu 9.4.0-1ubuntu1~20.04) 9.4.0")
NEW = (
    *("g++ (GCC) 11.5.0 20240719 (Red Hat 11.5.0-5)", "g++ (Debian 12.2.0-14+deb12u1) 12.2.0"),
    *("x86_64-conda-linux-gnu-c++ (conda-forge gcc 13.3.0-1) 13.3.0", "clang version 9.0.1"),
    "Intel(R) oneAPI DPC++/C++ Compiler 2024.2.0 (2024.2.0.20240602)",
)


@pytest.mark.parametrize("version", OLD)
def test_a_host_compiler_without_cxx20_is_named(bare, version):
    path = fake(bare / "path" / "g++", version)
    wheels(bare / "site", "cu13")
    for find in (toolchain.find_host_compiler, toolchain.find_nvcc):
        with pytest.raises(BuildError, match=r"expected g\+\+ 11 or later, got .*; inst") as said:
            find()
        assert f"{path}, {version}" in str(said.value)


@pytest.mark.parametrize("version", NEW)
def test_other_host_compilers_are_taken(bare, version):
    fake(bare / "path" / "g++", version)
    assert toolchain.find_host_compiler().version == version


def test_a_release_that_knows_no_cxx20_is_passed_over(bare):
    """Ubuntu 22.04's own nvcc is on PATH, and a newer one is in the PyPI wheels."""
    old = fake(bare / "cuda" / "bin" / "nvcc", "Cuda compilation tools, release 11.5, V11.5.119")
    (bare / "path" / "nvcc").symlink_to(old)
    with pytest.raises(BuildError, match=r"/cuda \(release 11\.5, before 12\.0\)"):
        toolchain.find_nvcc()
    new = wheels(bare / "site", "cu13", "Cuda compilation tools, release 13.0, V13.0.88")
    assert toolchain.find_nvcc().path == new
    assert toolchain.find_nvcc().release == (13, 0)
    fake(old, "Cuda compilation tools, release 12.0, V12.0.76")
    toolchain._version.cache_clear()
    assert toolchain.find_nvcc().path == old


def test_optimiser_of_another_wheel_is_another_compiler(bare):
    cicc = wheels(bare / "site", "cu13").parents[1] / "nvvm" / "bin" / "cicc"
    before = toolchain.find_nvcc().identity()
    assert toolchain.find_nvcc().identity() == before
    cicc.write_text(cicc.read_text() + "#")
    assert toolchain.find_nvcc().identity() != before


def test_wrong_cuda_home_is_not_papered_over(bare, monkeypatch):
    fake(bare / "usr" / "cuda" / "bin" / "nvcc", "system")
    monkeypatch.setenv("CUDA_HOME", str(bare / "nowhere"))
    with pytest.raises(BuildError, match=r"one of \S*nowhere \(lacks bin/nvcc\), got none"):
        toolchain.find_nvcc()
    touch(bare / "usr" / "cuda" / "include", *HEADERS, "crt/host_config.h", "cuda/std/utility")
    with pytest.raises(BuildError, match=r"one of \S*nowhere \(lacks include/cuda_runtime_api"):
        toolchain.find_cuda_headers()


def test_wheels_have_their_libraries_in_lib(bare):
    root = wheels(bare / "site", "cu13").parents[1]
    (root / "lib").mkdir()
    (root / "lib" / "libcudart_static.a").touch()
    assert f"-L{root / 'lib'}" in toolchain.find_nvcc().arguments
    (root / "lib64").mkdir()
    assert f"-L{root / 'lib'}" not in toolchain.find_nvcc().arguments


@pytest.mark.parametrize("part", ["crt/host_config.h", "cccl/cuda/std/utility", "cuda_fp16.h"])
def test_headers_are_those_of_a_whole_toolkit(bare, part):
    """``pip install torch`` leaves CUDA's runtime without the compiler's headers."""
    root = wheels(bare / "site", "cu13").parents[1]
    (root / "bin" / "nvcc").unlink()
    assert toolchain.find_cuda_headers().include == root / "include"
    assert toolchain.find_cuda_headers().cccl == root / "include" / "cccl"
    (root / "include" / part).unlink()
    with pytest.raises(BuildError, match=rf"cu13 \(lacks include/{part}\)"):
        toolchain.find_cuda_headers()
    system = bare / "usr" / "cuda" / "include"
    touch(system, *HEADERS, "crt/host_config.h", "cuda/std/utility")
    found = toolchain.find_cuda_headers()
    assert (found.include, found.cccl, found.version) == (system, system, "13000")


@pytest.mark.parametrize("part", ["nvvm/bin/cicc", "include/crt/host_config.h"])
def test_wheels_with_a_part_missing_are_passed_over(bare, part):
    """Other packages install nvcc's wheel for its assembler, without what compiling needs."""
    root = wheels(bare / "site", "cu13").parents[1]
    (root / part).unlink()
    with pytest.raises(BuildError, match=rf"cu13 \(lacks {part}\)"):
        toolchain.find_nvcc()
    system = fake(bare / "usr" / "cuda" / "bin" / "nvcc", "system")
    assert toolchain.find_nvcc().path == system


def test_cxx_is_honoured_and_checked(bare, monkeypatch):
    other = fake(bare / "other" / "g++-14", "g++ 14")
    monkeypatch.setenv("CXX", str(other))
    assert toolchain.find_host_compiler().path == other
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="got CXX=no-such-compiler; install"):
        toolchain.find_host_compiler()


def test_relative_paths_are_of_the_folder_where_they_were_given(bare, monkeypatch):
    monkeypatch.chdir(bare)
    monkeypatch.setenv("CXX", "./path/g++")
    assert toolchain.find_host_compiler().path == bare / "path" / "g++"
    home = fake(bare / "home" / "bin" / "nvcc", "home")
    monkeypatch.setenv("CUDA_HOME", "home")
    assert toolchain.find_nvcc().path == home


def test_compiler_that_does_not_run_is_named(bare, monkeypatch):
    broken = fake(bare / "broken", "")
    broken.write_text("#!/bin/sh\nexit 3\n")
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(BuildError, match=r"expected a working compiler, got .*broken.*status 3"):
        toolchain.find_host_compiler()


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_compiler_that_says_nothing_is_no_compiler(bare, text):
    path = fake(bare / "path" / "g++", "")
    path.write_text(f"#!/bin/sh\nprintf '{text}'\n")
    with pytest.raises(BuildError, match=rf"expected a working compiler, got {path}.*no version"):
        toolchain.find_host_compiler()
