"""The documents' links lead somewhere, examples run, and generated parts are what the code says."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import update_docs

from examples.ladder import rungs
from flashcute import __main__ as cli
from flashcute import benchmarking as bm
from flashcute import env, heuristics, shipped
from flashcute.bench import table
from flashcute.bench.cli import SEQLENS
from flashcute.config import FwdConfig

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TRIED = [ROOT / "docs" / f"tried_sm{c}.md" for c in (80, 90)]
LADDER = ROOT / "examples" / "ladder" / "README.md"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES, ROOT / "csrc" / "sim" / "README.md", LADDER]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# `name.h` or `folder/name.py` in running text names a file of this repository.
FILE = re.compile(r"`([\w./-]+\.(?:py|cpp|h|cu|md|toml|txt))`")
PLACES = (
    *("", "csrc", "csrc/flash_attn/src", "csrc/sim", "flashcute", "flashcute/jit", "flashcute/sim"),
    *("benchmarks", "examples", "examples/ladder", "examples/ladder/kernels", "tests", "tools"),
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(path: Path) -> str:
    """Returns a document without its fenced blocks, where ``#`` begins a comment, not a heading."""
    return re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


@functools.cache
def anchors(path: Path) -> set[str]:
    """Returns GitHub's anchors of a document's headings; repeated ones end in -1, -2 and so on."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        repeats = sum(other == anchor for other in found)
        found.append(f"{anchor}-{repeats}" if repeats else anchor)
    return set(found)


def links(path: Path) -> list[Path]:
    """Returns the files of this repository that a document links to."""
    targets = (target.partition("#")[0] for target in LINK.findall(prose(path)))
    return [(path.parent / target).resolve() for target in targets if "://" not in target]


def test_the_documents_are_there():
    expected = {"README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    pages = ("algorithm", "api", "architecture", "facts", "source-map", "tuning")
    assert expected | {f"docs/{page}.md" for page in pages} <= set(map(name, DOCUMENTS))
    assert "BSD 3-Clause" in (ROOT / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_resolve(document):
    for target in LINK.findall(prose(document)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_the_readme_leads_to_every_page():
    assert set(PAGES) <= set(links(ROOT / "README.md"))


def test_the_causal_mask_is_three_steps_from_the_readme():
    readme, page, mask = (
        ROOT / file for file in ("README.md", "docs/source-map.md", "csrc/flash_attn/src/mask.h")
    )
    assert page in links(readme)
    row = next(line for line in prose(page).splitlines() if "the causal mask, applied" in line)
    target, function = LINK.search(row)[1], re.search(r"`Mask::(\w+)`", row)[1]
    assert (page.parent / target).resolve() == mask
    assert f" {function}(" in mask.read_text(encoding="utf-8")


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


def program(document: Path) -> str:
    """Returns the Python blocks of a page as one program; lines keep their numbers on the page.

    Where a block ends, the program prints a form feed, so that outputs can be told apart.
    """
    lines, inside = [], False
    for line in document.read_text(encoding="utf-8").splitlines():
        if inside and line == "```":
            inside = False
            lines.append('print("\\f", end="", flush=True)')
        else:
            lines.append(line if inside else "")
            inside = inside or line == "```python"
    return "\n".join(lines)


PROGRAMS = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")]
GENERATED = [ROOT / page for page in update_docs.PAGES]


def run_program(text: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("page", [p for p in PROGRAMS if p not in GENERATED], ids=name)
def test_programs_print_what_the_page_shows(page):
    done = run_program(program(page))
    assert done.returncode == 0, done.stderr
    outputs = done.stdout.split("\f")[:-1]
    blocks = re.findall(
        r"```python\n.*?\n```\n(?:\n```text\n(.*?)```)?",
        page.read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert len(outputs) == len(blocks)
    assert outputs == blocks


def test_programs_are_found():
    assert {"algorithm.md", "tuning.md", "api.md"} <= {page.name for page in PROGRAMS}
    failing = run_program("print('a')\nassert False")
    assert failing.returncode != 0


@pytest.mark.parametrize("page", GENERATED, ids=name)
def test_signatures_are_python(page):
    for block in python_blocks(page):
        compile(block, name(page), "exec")


def test_the_call_of_the_ladder_is_possible():
    """The page's only block needs a GPU, so only its import and the call's arguments are tested."""
    (block,) = python_blocks(LADDER)
    imported, call = ast.parse(block).body
    module = importlib.import_module(imported.module)
    function = getattr(module, imported.names[0].name)
    rung, *tensors = call.value.args
    assert call.value.func.id == function.__name__
    assert rungs.find(rung.value)
    options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.value.keywords}
    inspect.signature(function).bind(rung.value, *tensors, **options)


def commands() -> list[tuple[str, str]]:
    """Returns (page, command) of every line in the documents' shell blocks."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
            assert (
                subprocess.run(["bash", "-n"], input=block, text=True, check=False).returncode == 0
            )
            found += [(name(document), line) for line in block.splitlines() if line]
    return found


def script_file(script: str) -> Path:
    """Returns the file that ``python script`` or ``python -m script`` runs."""
    if script.endswith(".py"):
        return ROOT / script
    place = ROOT.joinpath(*script.split("."))
    return place / "__main__.py" if place.is_dir() else place.with_suffix(".py")


@pytest.mark.parametrize(("page", "command"), commands())
def test_commands_exist(page, command):
    words = [w for w in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=", w)]
    if words[:3] == ["python", "-m", "flashcute"]:
        cli._parser().parse_args(words[3:])
    elif words[:3] == ["python", "-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words[3:])
    elif words[0] == "python":
        script, *rest = words[2:] if words[1] == "-m" else words[1:]
        source = script_file(script).read_text(encoding="utf-8")
        assert all(f'"{word}"' in source for word in rest if word.startswith("--"))
    else:
        assert words[0] in ("make", "pip"), command


def advised() -> list[tuple[str, str]]:
    """Returns (file, arguments) of commands `python -m flashcute ...` in the package's messages."""
    pattern = re.compile(r"(?<!`)`python -m flashcute ([^`]+)`(?!`)")
    found = []
    for file in sorted((ROOT / "flashcute").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += [(name(file), arguments) for arguments in pattern.findall(node.value)]
    return found


def test_advised_commands_run():
    assert len(advised()) >= 3
    for file, arguments in advised():
        args = cli._parser().parse_args(shlex.split(arguments))
        assert args.command != "build" or cli._chooses(args), f"{file}: {arguments}"


def table_rows(page: Path, heading: str) -> list[list[str]]:
    """Returns the cells of the table rows below a heading of a page, without table heads."""
    section = prose(page).split(f"\n## {heading}")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if LINK.search(" ".join(row))]


SOURCE_MAP = ROOT / "docs" / "source-map.md"
SOURCES = {
    "Kernels": [p for p in (ROOT / "csrc" / "flash_attn").rglob("*.*") if p.is_file()],
    "Package": list((ROOT / "flashcute").rglob("*.py")),
    "Around them": [
        *(ROOT / "csrc" / "sim" / "src").iterdir(),
        *(ROOT / "csrc" / "sim" / "include" / "sim").iterdir(),
        *(ROOT / "examples").rglob("*.py"),
        *(ROOT / "examples").rglob("*.h"),
        *(ROOT / "tools").glob("*.py"),
    ],
}


@pytest.mark.parametrize("heading", SOURCES)
def test_the_source_map_is_complete(heading):
    listed = set()
    for row in table_rows(SOURCE_MAP, heading):
        assert len(row) == 4, row
        assert all(row), row
        text, target = re.match(r"\[([^\]]*)\]\(([^)]*)\)", row[0]).groups()
        path = (SOURCE_MAP.parent / target).resolve()
        text = text.replace("\\_", "_")
        if "*" in text:
            files = [file for file in path.glob(Path(text).name) if file.is_file()]
        else:
            files = [path] if path.is_file() else []
            assert str(path).endswith(text), row
        assert files, f"no file for {row[0]}"
        listed |= set(files)
    missing = set(SOURCES[heading]) - listed
    assert not missing, f"{sorted(map(name, missing))} need a row in docs/source-map.md"


def test_names_in_the_source_map_are_in_their_files():
    rows = table_rows(SOURCE_MAP, "What to read first")
    assert len(rows) >= 10
    for _, file, names in rows:
        source = (SOURCE_MAP.parent / LINK.search(file)[1]).read_text(encoding="utf-8")
        for found in re.findall(r"`([^`]+)`", names):
            assert found.split("::")[-1].rstrip(".") in source, found


def test_every_field_of_a_configuration_has_its_trade_off():
    text = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(FwdConfig):
        assert f"\n| `{field.name}` |" in text, f"{field.name} needs a row in docs/tuning.md"


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
        assert done.stdout.startswith("False ('expected head_dim")


def test_readme_shows_code():
    assert len(README_BLOCKS) == 4


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
    # Every variable that the code names must be in the table, too.
    sources = [*(ROOT / "flashcute").rglob("*.py"), ROOT / "setup.py", ROOT / "Makefile"]
    named = set().union(
        *(re.findall(r"FLASHCUTE_[A-Z_]+", p.read_text(encoding="utf-8")) for p in sources)
    )
    compiled_in = {"FLASHCUTE_NAMESPACE", "FLASHCUTE_"}
    assert named - compiled_in <= {v.name for v in env.VARIABLES}


def test_the_speed_table_comes_from_the_result_file(tmp_path):
    shape = bm.sweep_shape(128, 4096, causal=True)
    us = {"flashcute": 1000.0, "fa2": 1250.0}
    row = {"dtype": "bf16", **dataclasses.asdict(shape), "us": us}
    row["tflops"] = {peer: shape.flops / t / 1e6 for peer, t in us.items()}
    machine = {"gpu": "GPU X", "driver": "1.2", "torch": "2.11", "date": "2026-11-21T00:00:00"}
    machine["commit"] = "0123456789abcdef"
    result = {"machine": machine, "contenders": ["flashcute", "fa2", "fa3"]}
    odd = {"us": {"flashcute": 1.0, "fa2": 9.0}}
    others = [row | odd | x for x in ({"h_k": 1}, {"inputs": "ramp"}, {"model": "a"})]
    result["rows"] = [row, *others]
    path = tmp_path / "fwd.json"
    bm.write_json(path, result | {"host_us": {"flashcute": 21.4}})
    text = update_docs.speed(path)
    cells = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    ours, fa2 = (f"{row['tflops'][peer]:.0f}" for peer in us)
    assert ["", "128", "causal", "4096", ours, fa2, ""] in cells  # fa3 did not run
    assert "1.25x the speed of fa2 (geometric mean of 1 points)" in text
    assert "standard normal inputs" in text
    assert "flashcute 21.4 us" in text
    assert "GPU X" in text and "2026-11-21, at commit 0123456, in one run" in text


def test_the_headline_is_of_all_that_was_measured(tmp_path):
    shape = bm.sweep_shape(64, 512, causal=True)
    rows = [made_row(shape, {"flashcute": 100.0, "fa3": t, "fa2": 250.0}) for t in (90.0, 160.0)]
    made = made_result(tmp_path, *rows)
    (header, _, line) = cells_of(update_docs.headline((made, tmp_path / "none", tmp_path / "none")))
    assert line == ["forward", "64", "1.20 (0.90)", "-", "2.50 (2.50)", "GPU X, 2026-11-21, 0123"]
    assert header[2:5] == ["over FlashAttention-3", "over cuDNN", "over FlashAttention-2"]


MACHINE = {"gpu": "GPU X", "driver": "1.2", "torch": "2.11", "date": "2026-11-21", "commit": "0123"}


def made_result(tmp_path, *rows):
    path = tmp_path / "made.json"
    contenders = ["flashcute", "fa2", "cudnn", "fa3"]
    bm.write_json(path, {"machine": MACHINE, "contenders": contenders, "rows": rows})
    return path


def made_row(shape, us, dtype="bf16", **more):
    tflops = {name: shape.flops / t / 1e6 for name, t in us.items()}
    return {"dtype": dtype, **dataclasses.asdict(shape), "us": us, "tflops": tflops, **more}


def cells_of(text):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]


def test_the_models_table_comes_from_its_result_file(tmp_path):
    chunk = bm.Shape(4, 512, 8192, 32, 8, 128, causal=True)
    vit = bm.Shape(64, 257, 257, 16, 16, 80, causal=False)
    rows = [
        made_row(vit, {"flashcute": 100.0, "fa2": 150.0, "cudnn": 110.0}, model="vit"),
        made_row(chunk, {"flashcute": 100.0, "fa2": 90.0}, model="chunk"),
        made_row(chunk, {"flashcute": 1.0, "fa2": 90.0}, model="chunk", inputs="ramp"),
        made_row(chunk, {"flashcute": 1.0, "fa2": 90.0}, model="chunk", dtype="fp16"),
    ]
    text = update_docs.models(made_result(tmp_path, *rows))
    cells = cells_of(text)
    header = ["model", "batch", "seqlen", "heads", "head dim", "mask", "flashcute", "fa2", "cudnn"]
    assert [*header, "x best peer"] in cells
    ours, fa2 = (f"{rows[1]['tflops'][name]:.0f}" for name in ("flashcute", "fa2"))
    chunked = ["chunk", "4", "512/8192", "32/8", "128", "causal", ours, fa2, "-", "0.90"]
    assert [line for line in cells if line[:1] == ["chunk"]] == [chunked]
    assert "standard normal inputs" in text and "bf16" in text and "GPU X" in text
    where = "chunk: d=128 s=512/8192 causal h=32/8, bf16"
    assert "0.99x the speed of the best peer (geometric mean of 2 points)" in text
    assert f"worst point 0.90x, at {where}" in text


def test_the_inputs_table_has_a_line_for_each_distribution(tmp_path):
    shapes = [bm.sweep_shape(64, s, causal=False) for s in (1024, 4096)]
    times = {"normal": 100.0, "ramp": 125.0}
    rows = [
        made_row(shape, {"flashcute": t * (1 + (s == 1)), "fa2": 150.0}, dtype, inputs=name)
        for dtype in ("bf16", "fp16")
        for s, shape in enumerate(shapes)
        for name, t in times.items()
    ]
    rows[-1]["us"]["flashcute"] = 500.0
    text = update_docs.inputs(made_result(tmp_path, *rows))
    cells = cells_of(text)
    over = ("best peer", "normal inputs")
    assert ["inputs", *(f"{x}, over {what}" for x in ("bf16", "fp16") for what in over)] in cells
    assert ["normal", "1.06 (0.75)", "1.00 (1.00)", "1.06 (0.75)", "1.00 (1.00)"] in cells
    assert ["ramp", "0.85 (0.60)", "0.80 (0.80)", "0.60 (0.30)", "0.57 (0.40)"] in cells
    assert "d = 64, s = 1024, 4096" in text
    assert "the worst input: 0.30x the best peer, at d=64 s=4096 full, ramp, fp16" in text


def test_the_table_of_training_is_that_of_its_result(tmp_path):
    names = ("layers", "heads", "batch", "sequence", "steps", "dtype")
    settings = dict(zip(names, (3, 4, 5, 6, 20, "bfloat16"), strict=True))
    run = {"step_ms": 1.25, "step_mib": 1234.5, "losses": [9.0] * 10 + [2.0] * 5 + [3.0] * 5}
    result = {"machine": MACHINE, "settings": settings, "runs": {"sdpa": run, "flashcute": run}}
    result["agreement"] = {"rms_difference_from_sdpa": {"flashcute": 0.01234}}
    bm.write_json(path := tmp_path / "train.json", result)
    text = update_docs.training(path)
    assert "5 sequences of 6 bytes a step, 20 steps from one seed, bfloat16" in text
    assert f"on one {MACHINE['gpu']} " in text
    figures = ["1.2", "1,234", "2.500"]
    assert cells_of(text)[-2:] == [["sdpa", *figures, "-"], ["flashcute", *figures, "0.0123"]]


def test_the_table_of_generation_is_that_of_its_result(tmp_path):
    result = json.loads(update_docs.GENERATION.read_text(encoding="utf-8"))
    result["runs"]["sdpa static"] |= {"prompts_s": 1.234, "step_ms": 5.678}
    result["check"]["runs"]["sdpa static"] |= {"exact": 1234, "wrong": 7}
    bm.write_json(path := tmp_path / "generate.json", result)
    last = cells_of(update_docs.generation(path))[-1]
    assert last[:4] == ["sdpa", "StaticCache, compiled", "1.23", "5.68"]
    assert last[5:7] == ["1,234", "7"]


def test_what_was_not_measured_is_not_shown(tmp_path):
    missing = tmp_path / "none.json"
    names = ("models", "inputs", "backward", "training", "decode", "generation")
    sections = {name: functools.partial(getattr(update_docs, name), missing) for name in names}
    text = "".join(f"<!-- begin {name} -->\nold\n<!-- end {name} -->\n" for name in sections)
    assert update_docs.rewrite(text, sections) == text.replace("old\n", "")


def test_facts_have_every_column():
    lines = (ROOT / "docs" / "facts.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) >= 8
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 6, row
        assert all(cells), row


@pytest.mark.parametrize("page", TRIED, ids=name)
def test_rows_of_what_was_tried_are_short(page):
    rows = [row for row in prose(page).splitlines() if row.startswith("|")]
    assert "| change | expected | measured | kept |" in rows
    columns = 0
    for row, after in zip(rows, [*rows[1:], ""], strict=True):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if after.startswith("|---"):
            columns = len(cells)
        assert len(cells) == columns, row
        for cell in cells:
            words = LINK.sub("link", cell).split()
            assert 0 < len(words) <= 40, f"{len(words)} words, expected 1 to 40: {cell}"


# A measured figure in prose is the text of a link to the page that holds it: [2.1 s](facts.md).
QUOTE = re.compile(r"\[(\d[^\]]*)\]\(([^)\s]+\.md)\)")
TIME_OR_SPEED = re.compile(
    r"\d ?(?:us|ms|s|min|seconds?|minutes?|TFLOP/s)\b|\bin (?:second|minute)s|\d\.\d+ ?x\b"
)
RECORDS = {"CHANGELOG.md", "docs/facts.md", "docs/tried_sm80.md", "docs/tried_sm90.md"}
WRITTEN = [d for d in DOCUMENTS if name(d) not in RECORDS and d not in {*GENERATED, LADDER}]


def unquoted(text: str) -> list[str]:
    """Returns paragraphs with a time or speed that is not quoted, generated or NVIDIA's."""
    text = re.sub(r"<!-- begin (\w+) -->.*?<!-- end \1 -->", "", text, flags=re.DOTALL)
    paragraphs = QUOTE.sub("", text).split("\n\n")
    return [p for p in paragraphs if TIME_OR_SPEED.search(p) and "data sheet" not in p]


def wrong_quotes(document: Path) -> list[str]:
    """Returns figures that are not, word for word, on the page that their link leads to."""
    quotes = QUOTE.findall(prose(document))
    pages = {target: (document.parent / target).read_text("utf-8") for _, target in quotes}
    return [figure for figure, target in quotes if figure not in " ".join(pages[target].split())]


@pytest.mark.parametrize("document", WRITTEN, ids=name)
def test_figures_in_prose_are_quoted(document):
    assert not wrong_quotes(document)
    assert not unquoted(prose(document)), "quote it: [2.1 s](docs/facts.md)"


def test_stale_figures_are_noticed(tmp_path):
    (tmp_path / "facts.md").write_text("| host time | 16.8 us |")
    page = tmp_path / "page.md"
    page.write_text("[16.8 us](facts.md), not [11 us](facts.md)")
    assert wrong_quotes(page) == ["11 us"]
    assert not unquoted(prose(page))
    stale = ["11 us of host time", "compiled in seconds", "`352` and 394 TFLOP/s", "30 min 15 s"]
    stale += ["has 1.16x the speed", "0.9 x that of another"]
    assert unquoted("\n\n".join(["s = 512, 16 bits", *stale])) == stale


def test_facts_quote_the_benchmark():
    """The rows that name fwd.json have the figures of that file, as the tables do."""
    result = json.loads(update_docs.FORWARD.read_text(encoding="utf-8"))
    lines = (ROOT / "docs" / "facts.md").read_text(encoding="utf-8").splitlines()
    text = " ".join(line for line in lines if "/fwd.json)" in line)
    times = re.findall(r"flashcute ([\d.]+ us)", " ".join(table.host_times(result)))
    ratios = bm.Ratios.of((row, table.ratio(row)) for row in result["rows"])
    assert len(times) == 2 + ("host_us_new_lengths" in result)
    for figure in (*times, f"geometric mean {ratios.geomean:.3f}, worst {ratios.worst:.3f}"):
        assert figure in text, figure


def test_facts_count_the_shipped_kernels():
    text = (ROOT / "docs" / "facts.md").read_text(encoding="utf-8")
    kinds = Counter((c.kind, c.arch) for c in shipped.instantiations().values())
    counts = [
        f"{name}: {kinds[kind, 80]} of the sm80 class, {kinds[kind, 90]} of the sm90 class"
        for kind, name in (("fwd", "forward"), ("bwd", "backward"))
    ]
    assert "; ".join(counts) in text
    built = [
        len(shipped.dense_configs(gpu) + shipped.configs_of_calls(gpu)) for gpu in ((8, 0), (9, 0))
    ]
    assert f"compiled for 8.0 {built[0]} and for 9.0 {built[1]}" in text
    assert f"{sum(built)} ship now" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_counts_the_lines_of_a_kernel():
    files = (ROOT / "csrc" / "flash_attn" / "src" / "instantiations").glob("*.cu")
    counts = {len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    (said,) = re.findall(r"\.cu file of at most (\d+) lines", prose(ROOT / "README.md"))
    assert max(counts) == int(said)


def test_the_readme_says_what_the_cache_command_takes():
    text = " ".join(prose(ROOT / "README.md").split())
    part = text[text.index("`pip install .` compiles") : text.index("## Use")]
    commands = re.findall(r"`(?:python -m flashcute )?(cache[^`]*)`", part)
    actions = [cli._parser().parse_args(shlex.split(command)).action for command in commands]
    assert sorted(actions) == ["clean", "list", "size"]
    (days,) = re.findall(r"`--older-than (\d+)`", part)
    assert f"older than {days} days" in part


@pytest.mark.parametrize(
    ("field", "phrase"),
    [
        ("tile_m", r"tiles of (\d+) to (\d+) query rows"),
        ("tile_n", r"blocks of (\d+) to (\d+) keys"),
    ],
)
def test_the_readme_knows_the_sizes_in_use(field, phrase):
    sizes = [getattr(config, field) for config in heuristics.shipped_configs()]
    (said,) = re.findall(phrase, prose(ROOT / "README.md"))
    assert tuple(map(int, said)) == (min(sizes), max(sizes))


def test_the_benchmark_of_the_readme_is_the_whole_sweep():
    assert set(update_docs.TABLE_SEQLENS) <= set(SEQLENS)
