from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from flashcute import shipped

TOOL = Path(__file__).resolve().parents[1] / "tools" / "generate_instantiations.py"


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("generate_instantiations", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_write_makes_the_folder_right_and_touches_nothing_twice(tool, tmp_path):
    tool.write(tmp_path)
    stems = {path.stem for path in tmp_path.iterdir()}
    assert stems == shipped.instantiations().keys()
    assert tool.differences(tmp_path) == []
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    tool.write(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times


def test_check_sees_missing_changed_and_extra_files(tool, tmp_path):
    tool.write(tmp_path)
    first, second, *_ = sorted(tmp_path.iterdir())
    first.unlink()
    second.write_text(second.read_text() + "// edited\n")
    (tmp_path / "stray.cu").touch()
    assert sorted(tool.differences(tmp_path)) == sorted(
        [
            f"{first.name}: missing",
            f"{second.name}: differs from the generated text",
            "stray.cu: not a shipped kernel",
        ]
    )
    tool.write(tmp_path)
    assert tool.differences(tmp_path) == []
