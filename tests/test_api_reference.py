"""Docstrings to Markdown: names can be imported as written, and the text keeps its meaning."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import api_reference
import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMES = [
    name
    for page in api_reference.PAGES
    for name in re.findall(r"^### `(.+)`$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
]


def test_every_name_can_be_imported_from_where_the_page_says():
    assert len(NAMES) > 30
    for name in NAMES:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_what_the_package_exports_is_documented():
    import flashcute

    assert {f"flashcute.{name}" for name in flashcute.__all__} <= set(NAMES)


def function(source: str) -> ast.FunctionDef:
    return ast.parse(source).body[0]


def test_a_signature_is_as_written():
    for line in (
        'def f(x: int, *, name="a,b", at: tuple[int, int] = (1, 2)) -> str: ...',
        "def f(a, /, b=1, *rest: int, c, **options): ...",
        "def f(): ...",
    ):
        assert api_reference.signature(function(line)) == line


def test_a_long_signature_is_a_parameter_a_line():
    long = ", ".join(f"parameter_{i}: dict[str, int]=None" for i in range(4))
    lines = api_reference.signature(function(f"def f({long}) -> None: ...")).splitlines()
    assert lines[0] == "def f("
    assert lines[1] == "    parameter_0: dict[str, int] = None,"
    assert lines[-1] == ") -> None: ..."
    compile("\n".join(lines), "signature", "exec")


def test_sections_become_lists():
    text = """Does it, see :func:`~package.other` and ``x``.

More
text.

Args:
    q: (b, s), of
        two lines.
    k, v: As q.

Returns:
    One thing.

Raises:
    ValueError: q is
        wrong.

The end."""
    assert (
        api_reference.markdown(text)
        == """Does it, see `other` and `x`.

More text.

Args:

- `q`: (b, s), of two lines.
- `k`, `v`: As q.

Returns: One thing.

Raises:

- `ValueError`: q is wrong.

The end."""
    )


def test_a_class_shows_fields_and_members():
    source = '''
class Point:
    """A point."""

    x: int
    y: int = 0

    @property
    def norm(self) -> float:
        """Its length."""

    def moved(self, by: int) -> Point:
        """A point beside it."""

    def _hidden(self): ...
'''
    text = api_reference.entry("package", ast.parse(source).body[0])
    assert text.startswith(
        "### `package.Point`\n\n```python\nclass Point:\n    x: int\n    y: int = 0\n"
    )
    assert "- `norm`: Its length.\n- `moved(by: int)`: A point beside it." in text
    assert "_hidden" not in text


def test_a_missing_docstring_or_name_is_an_error():
    with pytest.raises(ValueError, match="expected a docstring, got none in f"):
        api_reference.entry("package", function("def f(): ..."))
    with pytest.raises(ValueError, match="nowhere"):
        api_reference.file_entries("flashcute.config", "config.py", "nowhere")
