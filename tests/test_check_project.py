from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "check_project.py"
spec = importlib.util.spec_from_file_location("check_project", TOOL)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

KERNEL = "csrc/flash_attn/src/kernel.h"


def long_function(lines: int, head: str, body: str, tail: str) -> str:
    return "\n".join([head, *[body] * (lines - 2), tail]) + "\n"


BREACHES = [
    ("a.py", "x = 1\n" * 601, 601, "600 lines in a file"),
    ("a.py", "#" * 101 + "\n", 1, "100 columns"),
    ("a.h", "//" + "x" * 99 + "\n", 1, "100 columns"),
    ("README.md", "see /" + "home/someone/notes\n", 1, "path of one machine"),
    ("a.sass", "identifier = /" + "root/.cache/a.cu\n", 1, "path of one machine"),
    ("a.py", "import os\nos.system('ls')\n", 2, r"os.system"),
    ("a.py", "import subprocess\nsubprocess.run('ls', shell=True)\n", 2, "shell"),
    ("a.py", "run('ls', shell=flag)\n", 1, "shell"),
    ("a.py", "eval('1')\n", 1, "eval"),
    ("a.py", "import pickle\n", 1, "pickle"),
    ("a.py", "from pickle import loads\n", 1, "pickle"),
    ("a.py", "import torch\ntorch.load('x')\n", 2, "torch.load"),
    (
        "a.py",
        long_function(122, "def f():", "    pass", "    return"),
        1,
        "120 lines in a function",
    ),
    ("a.py", "x = 1\n# y = f(x)\n", 2, "commented-out"),
    ("a.py", "x = 1  # print(x)\n", 1, "commented-out"),
    ("a.cu", "// x = 1;\n", 1, "commented-out"),
    ("a.cu", "    // if (x) {\n", 1, "commented-out"),
    ("a.cu", "// #include <x.h>\n", 1, "commented-out"),
    ("a.h", long_function(121, "\nvoid f() {", "g();", "}"), 2, "got 121 in a function"),
    (KERNEL, "#include <torch/extension.h>\n", 1, "no torch"),
    (KERNEL, '#  include "c10/util/Half.h"\n', 1, "no torch"),
    (KERNEL, "#ifdef FLASHCUTE_SIM\n", 1, "simulator"),
    (KERNEL, "#if defined(SIMULATOR)\n", 1, "simulator"),
    ("csrc/flash_attn/flash_api.cpp", "#ifndef SIM\n", 1, "simulator"),
]


@pytest.mark.parametrize(("name", "text", "line", "rule"), BREACHES)
def test_breach_is_found(name, text, line, rule):
    found = tool.check(Path(name), text)
    assert [f for f in found if f.startswith(f"{name}:{line}: ") and rule in f], found


CLEAN = [
    ("a.py", "x = 1\n" * 600),
    ("a.py", "# names: a, b or c\nmodel.eval()\nrun(['ls'], shell=False)\n# x\n# see f\n"),
    ("a.py", "#!/usr/bin/env python\nx = 'os.system() # y = 1'  # rows per CTA: 128\n"),
    ("a.py", long_function(120, "def f():", "    pass", "    return")),
    ("a.h", long_function(120, "void f() {", "g();", "}")),
    ("a.h", long_function(121, "struct S {", "int x;", "};")),
    ("a.h", long_function(400, "namespace a {", "void f() { g(); }", "}")),
    ("a.h", "// Why: the loop (see above) ends here.\n// (b, s, h, d)\nchar c = '{';\n"),
    ("csrc/flash_attn/flash_api.cpp", "#include <torch/csrc/stable/library.h>\n"),
    ("csrc/sim/sim.h", "#ifdef SIM\n#endif\n"),
    ("README.md", "~/.cache/flashcute, /usr/local/cuda and https://x.org/home/page\n"),
]


@pytest.mark.parametrize(("name", "text"), CLEAN)
def test_clean_text_passes(name, text):
    assert tool.check(Path(name), text) == []


def test_symbolic_link_is_found(monkeypatch, tmp_path, capsys):
    (tmp_path / "headers").symlink_to(tmp_path)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "project_files", lambda: [Path("headers")])
    assert tool.main() == 1
    assert "headers: expected a file, got a symbolic link" in capsys.readouterr().out


def test_module_name_used_twice_is_found():
    names = ["tests/test_a.py", "tests/sim/test_a.py", "tests/conftest.py", "tests/sim/conftest.py"]
    found = tool.check_module_names([Path(name) for name in [*names, "tools/test_a.py"]])
    assert found == [
        "tests/test_a.py:1: expected a module name of its own, got that of tests/sim/test_a.py"
    ]


def test_link_to_a_file_that_git_ignores_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.md").write_text(
        "[here](#x) [page](https://x.org/y) [folder](../docs) [file](../b.md#y)\n"
        "![picture](p.png)\n"
    )
    (tmp_path / "docs/p.png").touch()  # in the folder, but not among the project's files
    (tmp_path / "b.md").touch()
    assert tool.check_links([Path("docs/a.md"), Path("b.md")]) == [
        "docs/a.md: expected a link to a file of the project, got p.png"
    ]


def test_this_project_passes(capsys):
    assert tool.main() == 0, capsys.readouterr().out
