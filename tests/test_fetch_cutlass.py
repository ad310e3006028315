"""The script without its download, on a wheel that the tests make."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "third_party" / "fetch_cutlass.py"


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Returns the script, with a small wheel pinned and an output folder of its own."""
    spec = importlib.util.spec_from_file_location("fetch_cutlass", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pin(module, make_wheel(tmp_path / "small.whl"), monkeypatch)
    monkeypatch.setattr(module, "FOLDER", tmp_path / "third_party" / "cutlass")
    (tmp_path / "third_party").mkdir()
    return module


def make_wheel(path: Path, *extra: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("cutlass_library/source/include/cute/tensor.hpp", "tensor")
        archive.writestr("cutlass_library/source/include/cutlass/cutlass.h", "cutlass")
        archive.writestr("cutlass_library/source/examples/example.cu", "not wanted")
        archive.writestr("cutlass_library/__init__.py", "not wanted")
        archive.writestr("nvidia_cutlass-4.2.0.0.dist-info/licenses/LICENSE.txt", "licence")
        for name in extra:
            archive.writestr(name, "planted")
    return path


def pin(module, wheel, monkeypatch):
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())


def run(tool, monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["fetch_cutlass", *map(str, arguments)])
    return tool.main()


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


WHOLE = {"LICENSE.txt", "STAMP", "include/cute/tensor.hpp", "include/cutlass/cutlass.h"}


def test_unpacks_headers_and_licence_only_and_once(tool, tmp_path, monkeypatch):
    wheel = tmp_path / "small.whl"
    assert run(tool, monkeypatch, "--wheel", wheel) == 0
    assert files(tool.FOLDER) == WHOLE
    assert files(tmp_path / "third_party") == {f"cutlass/{name}" for name in WHOLE}
    wheel.unlink()
    assert run(tool, monkeypatch, "--wheel", wheel) == 0  # exists, so no wheel is read


@pytest.mark.parametrize("damage", ["change", "remove", "add", "stamp"])
def test_damage_is_seen_and_mended(tool, tmp_path, monkeypatch, damage):
    wheel = tmp_path / "small.whl"
    run(tool, monkeypatch, "--wheel", wheel)
    header = tool.FOLDER / "include" / "cute" / "tensor.hpp"
    if damage == "change":
        header.write_text("other")
    elif damage == "remove":
        header.unlink()
    elif damage == "add":
        header.with_name("stray.hpp").touch()
    else:
        (tool.FOLDER / "STAMP").unlink()
    assert run(tool, monkeypatch, "--check") == 1
    assert run(tool, monkeypatch, "--wheel", wheel) == 0
    assert run(tool, monkeypatch, "--check") == 0
    assert files(tool.FOLDER) == WHOLE
    assert header.read_text() == "tensor"


def test_wheel_with_another_hash_is_refused(tool, tmp_path, monkeypatch):
    other = make_wheel(tmp_path / "other.whl", "cutlass_library/source/include/planted.h")
    with pytest.raises(ValueError, match="to have SHA-256"):
        run(tool, monkeypatch, "--wheel", other)
    assert not tool.FOLDER.exists()
    assert files(tmp_path / "third_party") == set()


@pytest.mark.parametrize("name", ["../planted.h", "/planted.h", "cutlass_library/../../planted.h"])
def test_names_that_leave_the_folder_are_refused(tool, tmp_path, monkeypatch, name):
    other = make_wheel(tmp_path / "other.whl", name)
    pin(tool, other, monkeypatch)
    with pytest.raises(ValueError, match="expected names inside the wheel"):
        run(tool, monkeypatch, "--wheel", other)
    assert not tool.FOLDER.exists()
    assert "planted.h" not in {path.name for path in tmp_path.rglob("*")}


def test_symbolic_link_in_place_of_the_folder_is_replaced(tool, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    tool.FOLDER.symlink_to(elsewhere)
    assert run(tool, monkeypatch, "--wheel", tmp_path / "small.whl") == 0
    assert not tool.FOLDER.is_symlink()
    assert files(tool.FOLDER) == WHOLE
    assert files(elsewhere) == set()
