"""The HTML page needs no other file, is reproducible, and has the values of its pictures."""

from __future__ import annotations

import html.parser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from flashcute import benchmarking as bm
from flashcute import heuristics
from flashcute.profiling import explain, ncu, page, sass, static
from flashcute.profiling.disassembly import Binary

DATA = Path(__file__).parent / "data"


def counters(tile_n=64):
    config = heuristics.fwd_config("bf16", 64, True, (9, 0))
    report = ncu.parse_csv((DATA / "ncu" / "raw.csv").read_text())
    shape = bm.sweep_shape(64, 4096, causal=True)
    return explain.profile(report, config, shape, (9, 0))


def machine_code():
    (function,) = sass.parse((DATA / "sass" / "wgmma_loop.sass").read_text())
    return static.profile(Binary("sm_90a", function, 168, 0, 0), (9, 0), 64)


class Reader(html.parser.HTMLParser):
    """Reads tags with their attributes, and all text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.words += data + "\n"


def test_the_page_needs_no_other_file(tmp_path):
    page.write(tmp_path / "new" / "page.html", [counters() | {"static": machine_code()}])
    read = Reader((tmp_path / "new" / "page.html").read_text())
    for tag, attributes in read.tags:
        assert tag not in ("script", "link", "iframe", "img"), (tag, attributes)
        link = attributes.get("xlink:href") or attributes.get("href") or "#"
        assert link.startswith("#"), link
    assert sum(tag == "svg" for tag, _ in read.tags) == 6
    for words in ("How busy each unit is", "44.03", "missing", "math_pipe_throttle", "HGMMA"):
        assert words in read.words


def test_the_same_profile_gives_the_same_page(tmp_path):
    pages = [tmp_path / "a.html", tmp_path / "b.html"]
    for path in pages:
        page.write(path, [counters()])
    assert pages[0].read_bytes() == pages[1].read_bytes()


def test_two_profiles_share_pictures_and_show_differences(tmp_path):
    other = counters()
    other["utilisation_percent"] = other["utilisation_percent"] | {"tensor": 61.5}
    page.write(tmp_path / "page.html", [counters(), other])
    read = Reader((tmp_path / "page.html").read_text())
    assert "utilisation_percent.tensor" in read.words
    assert "44.03" in read.words and "61.5" in read.words
    assert f"A: {other['kernel']}" in read.words


def test_a_profile_alone_is_named_once(tmp_path):
    report = counters()
    page.write(tmp_path / "page.html", [report])
    read = Reader((tmp_path / "page.html").read_text())
    headings = [tag for tag, _ in read.tags if tag in ("h1", "h2")]
    assert headings == ["h1", "h2"]  # the kernel, and "Every figure"
    assert read.words.partition("Every figure")[0].count(report["kernel"]) == 2  # and the title
    assert "overflow-wrap" in read.words


def test_kernel_names_are_escaped(tmp_path):
    page.write(tmp_path / "page.html", [machine_code() | {"kernel": "f<int>"}])
    assert "f&lt;int&gt;" in (tmp_path / "page.html").read_text()


def test_missing_values_are_drawn_as_missing():
    figure = page.bars({"a": {"x": 1.0, "y": None}}, "title", "unit", None)
    said = [label.get_text().strip() for label in figure.axes[0].texts]
    assert said == ["1", "missing"]
