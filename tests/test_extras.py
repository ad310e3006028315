from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from flashcute import extras

ROOT = Path(__file__).resolve().parents[1]
REQUIRES = [
    "torch>=2.10",
    'nvidia-cuda-nvcc==13.0.*; extra == "nvcc"',
    'nvidia-nvvm==13.0.*; (python_version > "3") and extra == "nvcc"',
    'matplotlib; extra == "plot"',
]


def test_an_installed_package_names_what_the_extra_holds(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRES)
    nvcc = extras.install_command("nvcc")
    assert nvcc == "`pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*'`"
    assert extras.install_command("plot") == "`pip install matplotlib`"


def test_a_checkout_that_is_not_installed_names_itself(monkeypatch):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert extras.install_command("nvcc") == "`pip install '.[nvcc]'` in the checkout"


PYTHON = sorted((ROOT / "flashcute").rglob("*.py"))


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_message_sends_anyone_to_an_index_for_this_package(path):
    assert not re.search(r"pip install [\"']?flashcute", path.read_text(encoding="utf-8"))


def test_extras_that_messages_name_are_there():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    names = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
    used = {
        name
        for path in PYTHON
        for name in re.findall(r"install_command\([\"'](\w+)", path.read_text(encoding="utf-8"))
    }
    assert {"nvcc", "profile", "plot"} <= used <= names
