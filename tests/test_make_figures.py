"""The committed pictures are those that the script draws, and their text fits."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import make_figures
import pytest
import svg

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
DRAWINGS = list(make_figures.DRAWINGS)


@pytest.mark.parametrize("figure", DRAWINGS)
def test_the_committed_picture_is_what_the_script_draws(figure):
    text = make_figures.DRAWINGS[figure]().svg()
    assert (make_figures.FIGURES / figure).read_text(encoding="utf-8") == text
    ElementTree.fromstring(text)


def test_every_picture_is_shown():
    shown = set()
    for document in DOCUMENTS:
        shown |= set(re.findall(r"figures/([\w.]+)", document.read_text(encoding="utf-8")))
    assert shown == set(DRAWINGS)


@pytest.mark.parametrize("figure", DRAWINGS)
def test_files_named_in_a_picture_exist(figure):
    text = (make_figures.FIGURES / figure).read_text(encoding="utf-8")
    for file in re.findall(r"[\w/*]+\.(?:py|h|cpp)\b", text):
        places = ("", "flashcute", "csrc/flash_attn", "csrc/flash_attn/src")
        assert any(any((ROOT / place).glob(file)) for place in places), file


def test_outdated_missing_and_stray_pictures_are_noticed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make_figures, "FIGURES", tmp_path)
    drawings = {name: make_figures.DRAWINGS[name] for name in ("masks.svg", "loops.svg")}
    monkeypatch.setattr(make_figures, "DRAWINGS", drawings)
    assert make_figures.main(["--check"]) == 1
    assert "masks.svg, loops.svg" in capsys.readouterr().err
    assert make_figures.main([]) == 0
    assert make_figures.main(["--check"]) == 0
    (tmp_path / "masks.svg").write_text("<svg/>")
    assert make_figures.main(["--check"]) == 1
    assert make_figures.main([]) == 0
    (tmp_path / "old.svg").write_text("<svg/>")
    assert make_figures.main(["--check"]) == 1
    assert "old.svg" in capsys.readouterr().err


def test_text_that_does_not_fit_is_refused():
    canvas = svg.Canvas(100, 50, "small")
    with pytest.raises(ValueError, match="make room"):
        canvas.text(60, 20, "too long for this")
    with pytest.raises(ValueError, match="make room"):
        canvas.text(0, 60, "low")
    with pytest.raises(ValueError, match="at most 68 pixels"):
        canvas.box(0, 0, 80, 40, ["too long for this"])
    with pytest.raises(ValueError, match="2 lines"):
        canvas.box(0, 0, 80, 30, ["a", "b"])
    with pytest.raises(ValueError, match="along an axis"):
        canvas.arrow([(0, 0), (5, 5)])


def test_markup_in_text_is_escaped():
    canvas = svg.Canvas(100, 50, "a < b")
    canvas.text(5, 20, "b->c & d")
    assert [e.text for e in ElementTree.fromstring(canvas.svg()) if e.text] == ["a < b", "b->c & d"]
