"""Figures in the documents' prose and in README are those of the result files and of the code."""

from __future__ import annotations

import collections
import json
import re

import pytest
import update_docs
from test_docs import DOCUMENTS, ROOT, TRIED, made_result, made_row, name, prose

from flashcute import benchmarking as bm
from flashcute import shipped
from flashcute.bench import table


def test_the_lines_on_the_backward_come_from_its_result_file(tmp_path):
    rows = [
        made_row(bm.sweep_shape(d, 4096, causal=True), {"flashcute": 100.0, "fa2": t, "fa3": 90.0})
        for d, t in ((64, 200.0), (128, 288.0))
    ]
    odd = made_row(bm.sweep_shape(64, 512, causal=True), {"flashcute": 1.0, "fa2": 9.0}, "fp16")
    text = update_docs.backward(made_result(tmp_path, *rows, odd))
    assert "2.40x the speed of fa2 (geometric mean of 2 points)" in text
    assert "worst point 2.00x, at d=64 s=4096 causal, bf16" in text
    assert "0.90x the speed of fa3" in text and "cudnn (" not in text  # which did not run
    assert "d = 64, 128" in text and "GPU X" in text


def test_the_lines_on_a_cache_come_from_its_result_file(tmp_path):
    shape = bm.Shape(4, 1, 4096, 32, 8, 128, causal=True)
    point = {"model": "4x4096", "page_size": 0, "append": "", "decodes": 0}
    us = {"flashcute": 100.0, "fa2": 150.0}
    kinds = ({"page_size": 16}, {"append": "plain"}, {"decodes": 8}, {"dtype": "fp16"})
    others = [made_row(shape, us | {"fa2": 1.0}, **point) | kind for kind in kinds]
    text = update_docs.decode(made_result(tmp_path, made_row(shape, us, **point), *others))
    assert "- 1.50x the speed of fa2 (geometric mean of 1 points)" in text
    assert "worst point 1.50x, at 4x4096, bf16" in text and "GPU X" in text


@pytest.mark.parametrize("page", [ROOT / "docs" / "facts.md", *TRIED], ids=name)
def test_rows_can_be_read_alone(page):
    rows = [row for row in prose(page).splitlines() if row.startswith("|")]
    leaning = re.compile(
        r"^\| the same\b|\| the same \||\bnext rows?\b|\brows? (?:above|below)\b", re.IGNORECASE
    )
    assert not [row for row in rows if leaning.search(row)]


@pytest.mark.parametrize(
    ("path", "measured", "peers"),
    [
        (update_docs.BACKWARD, update_docs.sweep_rows, ("fa2", "fa3")),
        (update_docs.DECODE, update_docs.decode_rows, ("fa2", "cudnn", "fa3")),
    ],
    ids=["bwd", "decode"],
)
def test_facts_quote_the_other_benchmarks(path, measured, peers):
    rows = measured(json.loads(path.read_text(encoding="utf-8")))
    lines = (ROOT / "docs" / "facts.md").read_text(encoding="utf-8").splitlines()
    text = " ".join(line for line in lines if f"/{path.name})" in line)
    for peer in peers:
        ratios = bm.Ratios.of((row, table.ratio(row, peer=peer)) for row in rows)
        assert f"{ratios.geomean:.3f}" in text, peer


def test_how_much_the_candidates_of_the_search_differ():
    """docs/tried_sm90.md has the range of the search's results over head dimensions and masks."""
    name_of_file = "search_sm90_no_max_h200.json"
    result = json.loads((update_docs.RESULTS / name_of_file).read_text(encoding="utf-8"))
    means = collections.defaultdict(list)
    for row in result["rows"]:
        means[row["head_dim"], row["causal"]].append(row["geomean"])
    differences = [100 * (max(some) / min(some) - 1) for some in means.values()]
    said = f"{min(differences):.0f} to {max(differences):.0f} %"
    text = (ROOT / "docs" / "tried_sm90.md").read_text(encoding="utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith(f"| [{name_of_file}]"))
    assert said in row


def test_every_warning_of_ptxas_has_its_cure():
    told = set(re.findall(r"^\| (C75\d\d) ", prose(ROOT / "docs" / "tuning.md"), re.MULTILINE))
    named = set().union(*(re.findall(r"\bC75\d\d\b", prose(page)) for page in DOCUMENTS))
    assert named and named == told


def test_the_readme_says_what_is_never_prebuilt():
    text = " ".join(prose(ROOT / "README.md").split())
    (said,) = re.findall(r"A kernel with ([^:]*) is never prebuilt", text)
    configs = shipped.instantiations().values()
    words = {"softcap": "softcap", "alibi": "ALiBi", "dropout": "dropout", "paged": "pages"}
    for field, word in words.items():
        assert any(getattr(config, field, False) for config in configs) == (word not in said), word
    assert any(config.mask == "local" for config in configs) == ("window" not in said)


@pytest.mark.parametrize("page", ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_prose_is_wrapped(page):
    lines = [line for line in prose(ROOT / page).splitlines() if not line.startswith("|")]
    assert max(map(len, lines)) <= 120
