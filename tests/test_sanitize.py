"""What is made of compute-sanitizer's answers; it runs on a GPU only."""

from __future__ import annotations

import sys

import pytest
import sanitize

STAND_IN = """#!{python}
import sys
tool = sys.argv[sys.argv.index("--tool") + 1]
planted = "--planted" in sys.argv
if planted and {finds}:
    print("========= {found} of size 4 bytes")
if not planted and {launches}:
    print("19 {done}")
sys.exit(3 if planted or tool == {bad!r} else 0)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    def run(*, finds=True, launches=True, bad=None, arguments=()):
        place = tmp_path / "compute-sanitizer"
        words = {"finds": finds, "launches": launches, "bad": bad}
        words |= {"python": sys.executable, "found": sanitize.FOUND, "done": sanitize.DONE}
        place.write_text(STAND_IN.format(**words))
        place.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        # Put back what main() sets.
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
        return sanitize.main(["--out", str(tmp_path / "out"), *arguments])

    return run


def test_all_well(run, capsys, tmp_path):
    assert run() == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["memcheck, planted fault: found", "memcheck: no error", "synccheck: no error"]
    assert [line.rpartition(", ")[0] for line in lines] == names
    assert {path.stem for path in (tmp_path / "out").iterdir()} == {
        "memcheck_planted",
        "memcheck",
        "synccheck",
    }


@pytest.mark.parametrize("wrong", [{"bad": "synccheck"}, {"finds": False}, {"launches": False}])
def test_what_is_wrong_shows(run, capsys, wrong):
    assert run(**wrong) == 1
    assert "NOT AS IT SHOULD BE" in capsys.readouterr().out


def test_tools_can_be_selected(run, capsys):
    assert run(arguments=("--tools", "racecheck"), bad="memcheck") == 0
    assert "racecheck: no error" in capsys.readouterr().out


def test_without_the_tool_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sanitize, "SYSTEM", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match="expected the CUDA toolkit's compute-sanitizer"):
        sanitize.main([])
