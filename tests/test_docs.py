"""The documents: links lead somewhere, examples run, generated parts are what the code says."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import update_docs

from flashcute import benchmarking as bm
from flashcute import env
from flashcute.bench.cli import SEQLENS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], key=str)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# `name.h` or `folder/name.py` in running text names a file of this repository.
FILE = re.compile(r"`([\w./-]+\.(?:py|cpp|h|cu|md|toml|txt))`")
PLACES = ("", "csrc", "csrc/flash_attn/src", "flashcute", "flashcute/jit", "examples", "benchmarks")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def anchors(path: Path) -> set[str]:
    """GitHub's anchors of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_documents_are_there():
    expected = {"README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    assert expected | {"docs/architecture.md", "docs/facts.md"} <= set(map(name, DOCUMENTS))
    assert "BSD 3-Clause" in (ROOT / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_resolve(document):
    for target in LINK.findall(document.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_files_named_in_the_text_exist(document):
    for file in FILE.findall(document.read_text(encoding="utf-8")):
        assert any((ROOT / place / file).is_file() for place in PLACES), file


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_make_targets_exist(document):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    used = re.findall(r"(?:`|^)make ([a-z]+)", document.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(used) <= targets


def python_blocks(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)


README_BLOCKS = python_blocks(ROOT / "README.md")


@pytest.mark.parametrize("block", README_BLOCKS, ids=range(len(README_BLOCKS)))
def test_readme_examples_run(block):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", block], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    if "supports(" in block:
        assert done.stdout.startswith("False ('expected no sliding window")


def test_readme_shows_code():
    assert len(README_BLOCKS) == 2


def test_generated_parts_are_up_to_date(capsys):
    assert update_docs.main(["--check"]) == 0, capsys.readouterr().err


def test_an_outdated_part_is_noticed(tmp_path, monkeypatch, capsys):
    document = tmp_path / "SECURITY.md"
    document.write_text("<!-- begin environment -->\nold\n<!-- end environment -->\n")
    monkeypatch.setattr(update_docs, "ROOT", tmp_path)
    sections = {"SECURITY.md": update_docs.SECTIONS["SECURITY.md"]}
    monkeypatch.setattr(update_docs, "SECTIONS", sections)
    assert update_docs.main(["--check"]) == 1
    assert "SECURITY.md" in capsys.readouterr().err
    assert update_docs.main([]) == 0
    assert "old\n" not in document.read_text()
    assert update_docs.main(["--check"]) == 0


def test_missing_markers_are_an_error():
    with pytest.raises(ValueError, match="begin support"):
        update_docs.rewrite("no markers", {"support": str})


def test_security_lists_every_variable():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(FLASHCUTE_\w+)`", text)) == {v.name for v in env.VARIABLES}
    # And every variable that the code names is in the table.
    sources = [*(ROOT / "flashcute").rglob("*.py"), ROOT / "setup.py", ROOT / "Makefile"]
    named = set().union(
        *(re.findall(r"FLASHCUTE_[A-Z_]+", p.read_text(encoding="utf-8")) for p in sources)
    )
    compiled_in = {"FLASHCUTE_NAMESPACE", "FLASHCUTE_"}
    assert named - compiled_in <= {v.name for v in env.VARIABLES}


def test_the_speed_table_comes_from_the_result_file(tmp_path):
    shape = bm.sweep_shape(128, 4096, causal=True)
    us = {"flashcute": 1000.0, "fa2": 1250.0}
    row = {"dtype": "bf16", "d": 128, "causal": True, "seqlen_q": 4096, "us": us}
    row["tflops"] = {peer: shape.flops / t / 1e6 for peer, t in us.items()}
    machine = {"gpu": "GPU X", "driver": "1.2", "torch": "2.11", "date": "2026-11-21T00:00:00"}
    result = {"machine": machine, "contenders": ["flashcute", "fa2", "fa3"], "rows": [row]}
    path = tmp_path / "fwd.json"
    bm.write_json(path, result | {"host_us": {"flashcute": 21.4}})
    text = update_docs.speed(path)
    cells = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    ours, fa2 = (f"{row['tflops'][peer]:.0f}" for peer in us)
    assert ["", "128", "causal", "4096", ours, fa2, ""] in cells  # fa3 did not run
    assert "1.25x the speed of fa2" in text
    assert "flashcute 21 us" in text
    assert "GPU X" in text


def test_facts_have_every_column():
    lines = (ROOT / "docs" / "facts.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) >= 8
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 6, row
        assert all(cells), row


def test_the_benchmark_of_the_readme_is_the_whole_sweep():
    assert set(update_docs.TABLE_SEQLENS) <= set(SEQLENS)
