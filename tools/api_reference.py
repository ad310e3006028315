"""Markdown from the docstrings of public functions and classes, for tools/update_docs.py.

The sources are parsed, not imported, so that signatures are printed as written and no optional
package is needed.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_KVCACHE = "KVCacheOutput attention_kvcache_ref"
_TIMING = "Shape time_interleaved time_sustained host_time gpu_sampler Ratios"

# Per page and chapter: the module to import from, the file, and the names ("" for all public ones).
Chapter = list[tuple[str, str, str]]
PAGES: dict[str, dict[str, Chapter]] = {
    "docs/api.md": {
        "Attention": [
            ("flashcute", "flash_attn_interface.py", ""),
            ("flashcute", "flash_attn_varlen.py", ""),
            ("flashcute", "flash_attn_kvcache.py", "flash_attn_with_kvcache"),
            ("flashcute", "kvcache_plan.py", ""),
            ("flashcute.rotary", "rotary.py", "apply_rotary_emb"),
            ("flashcute.bert_padding", "bert_padding.py", ""),
            ("flashcute", "support.py", "supports Support support_matrix"),
            ("flashcute", "integrations/sdpa.py", "enable disable enabled"),
            ("flashcute", "integrations/flash_attn.py", "provide_flash_attn"),
            ("flashcute.integrations.transformers", "integrations/transformers.py", "register"),
        ],
        "Configurations": [
            ("flashcute.config", "config.py", ""),
            ("flashcute.problem", "problem.py", ""),
            ("flashcute.heuristics", "heuristics.py", ""),
            ("flashcute.shipped", "shipped.py", ""),
            ("flashcute.occupancy", "occupancy.py", ""),
        ],
        "Kernels": [
            ("flashcute.jit", "jit/kernels.py", "Kernel get_kernel build_kernels"),
            ("flashcute.jit", "jit/toolchain.py", "BuildError"),
            ("flashcute.env", "env.py", ""),
        ],
    },
    "docs/api_distributed.md": {
        "Functions": [
            ("flashcute.distributed", "distributed/functions.py", ""),
            (
                "flashcute.distributed",
                "distributed/zigzag.py",
                "zigzag_split zigzag_merge zigzag_positions",
            ),
        ],
    },
    "docs/api_testing.md": {
        "Reference": [
            ("flashcute.reference", "reference.py", ""),
            ("flashcute.reference_varlen", "reference_varlen.py", ""),
            ("flashcute.reference_kvcache", "reference_kvcache.py", _KVCACHE),
            ("flashcute.reference_tiled", "reference_tiled.py", ""),
            ("flashcute.dropout", "dropout.py", "dropout_mask draw_state"),
        ],
        "Correctness": [
            ("flashcute.testing", "testing.py", ""),
            ("flashcute.oracles", "oracles.py", ""),
        ],
        "Simulator": [
            ("flashcute.sim", "sim/run.py", "SimResult run_fwd run_varlen"),
            ("flashcute.sim", "sim/backward.py", "run_bwd run_varlen_bwd"),
            ("flashcute.sim", "sim/build.py", "build_kernels build_runners"),
        ],
        "Speed": [("flashcute.benchmarking", "benchmarking.py", _TIMING)],
    },
}

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):\s*$")
_ENTRY = re.compile(r"^(\*{0,2}[\w, .]+?):(?:\s+(.*))?$")
_LINE_LENGTH = 100

Definition = ast.FunctionDef | ast.ClassDef


def _inline(text: str) -> str:
    """Converts inline markup of reStructuredText to Markdown."""
    text = re.sub(r":\w+:`~?([^`]+)`", lambda m: f"`{m[1].rsplit('.', 1)[-1]}`", text)
    return text.replace("``", "`")


def _paragraphs(lines: list[str]) -> Iterator[list[str]]:
    block: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line)
        elif block:
            yield block
            block = []


def _prose(lines: list[str]) -> Iterator[str]:
    """Yields paragraphs in one line each; lists and code unchanged."""
    for block in _paragraphs(lines):
        if block[0].startswith(("    ", ">>>")):
            code = textwrap.dedent("\n".join(block)).replace(">>> ", "")
            yield f"```text\n{code}\n```"
        elif block[0].startswith(("* ", "- ")):
            yield _inline("\n".join(line.replace("* ", "- ", 1) for line in block))
        else:
            yield _inline(" ".join(line.strip() for line in block))


def _entries(name: str, lines: list[str]) -> str:
    """Formats the body of an ``Args:`` or like section as a list, of ``Returns:`` as text."""
    lines = textwrap.dedent("\n".join(lines)).strip().splitlines()
    if name in ("Returns", "Yields"):
        return f"{name}: {_inline(' '.join(line.strip() for line in lines))}"
    items: list[str] = []
    for line in lines:
        found = _ENTRY.match(line)
        if found and not line.startswith(" "):
            names = ", ".join(f"`{part.strip()}`" for part in found[1].split(","))
            items.append(f"- {names}: {found[2] or ''}".rstrip())
        elif items:
            items[-1] += f" {line.strip()}"
        else:
            items.append(f"- {line.strip()}")
    return f"{name}:\n\n" + "\n".join(_inline(item) for item in items)


def markdown(docstring: str) -> str:
    """Converts a docstring with Google's sections to Markdown."""
    parts: list[str] = []
    prose: list[str] = []
    lines = docstring.splitlines()
    at = 0
    while at < len(lines):
        found = _SECTION.match(lines[at])
        if not found:
            prose.append(lines[at])
            at += 1
            continue
        end = at + 1
        while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
            end += 1
        parts += [*_prose(prose), _entries(found[1], lines[at + 1 : end])]
        prose, at = [], end
    return "\n\n".join([*parts, *_prose(prose)])


def _is_property(node: ast.FunctionDef) -> bool:
    return any(
        ast.unparse(d) in ("property", "functools.cached_property") for d in node.decorator_list
    )


def _source(node: ast.expr) -> str:
    return re.sub(r"'([^'\"]*)'", r'"\1"', ast.unparse(node))


def _parameters(arguments: ast.arguments) -> list[str]:
    """Returns the parameters, each with annotation and default, and the marks ``/`` and ``*``."""

    def parameter(argument: ast.arg, default: ast.expr | None, stars: str = "") -> str:
        annotation = f": {_source(argument.annotation)}" if argument.annotation else ""
        equals = " = " if annotation else "="
        return f"{stars}{argument.arg}{annotation}" + (
            f"{equals}{_source(default)}" if default else ""
        )

    positional = [*arguments.posonlyargs, *arguments.args]
    without = len(positional) - len(arguments.defaults)
    defaults = [*[None] * without, *arguments.defaults]
    found = [parameter(*pair) for pair in zip(positional, defaults, strict=True)]
    if arguments.posonlyargs:
        found.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg:
        found.append(parameter(arguments.vararg, None, "*"))
    elif arguments.kwonlyargs:
        found.append("*")
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found += [parameter(*pair) for pair in keywords]
    if arguments.kwarg:
        found.append(parameter(arguments.kwarg, None, "**"))
    return found


def signature(node: ast.FunctionDef) -> str:
    """Formats a function's signature as a stub, with one parameter per line if it is too long."""
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    parameters = _parameters(node.args)
    line = f"def {node.name}({', '.join(parameters)}){result}: ..."
    if len(line) <= _LINE_LENGTH:
        return line
    body = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"def {node.name}(\n{body}){result}: ..."


def _class(node: ast.ClassDef) -> Iterator[str]:
    docstring = ast.get_docstring(node) or ""
    fields = [ast.unparse(f) for f in node.body if isinstance(f, ast.AnnAssign)]
    if fields and "Attributes:" not in docstring:
        body = "\n".join(f"    {field}" for field in fields)
        yield f"```python\nclass {node.name}:\n{body}\n```"
    yield markdown(docstring)
    members = []
    for method in node.body:
        is_public = isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
        if is_public and (text := ast.get_docstring(method)):
            parameters = [p for p in _parameters(method.args) if p not in ("self", "cls")]
            call = "" if _is_property(method) else f"({', '.join(parameters)})"
            summary = " ".join(markdown(text).split("\n\n")[0].split())
            members.append(f"- `{method.name}{call}`: {summary}")
    if members:
        yield "Members:\n\n" + "\n".join(members)


def entry(home: str, node: Definition) -> str:
    """Formats one function or class, imported from ``home``: heading, signature, text.

    Raises:
        ValueError: if it has no docstring.
    """
    docstring = ast.get_docstring(node)
    if not docstring:
        raise ValueError(f"api_reference: expected a docstring, got none in {node.name}; write one")
    heading = f"### `{home}.{node.name}`"
    if isinstance(node, ast.ClassDef):
        return "\n\n".join([heading, *_class(node)])
    return "\n\n".join([heading, f"```python\n{signature(node)}\n```", markdown(docstring)])


def file_entries(home: str, file: str, names: str) -> list[str]:
    """Returns a file's summary, and its public definitions or those named, as Markdown.

    Raises:
        ValueError: if a name is not defined there.
    """
    wanted = set(names.split())
    tree = ast.parse((ROOT / "flashcute" / file).read_text(encoding="utf-8"))
    found = [
        node
        for node in tree.body
        if isinstance(node, Definition)
        and (node.name in wanted if wanted else not node.name.startswith("_"))
    ]
    missing = wanted - {node.name for node in found}
    if missing:
        raise ValueError(f"api_reference: expected {sorted(missing)} in {file}, got none")
    summary = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
    source = f"[{file}](../flashcute/{file})"
    return [f"{source}: {_inline(summary)}", *(entry(home, node) for node in found)]


def api_reference(page: str) -> str:
    """Returns the generated body of one of :data:`PAGES`."""
    parts = []
    for chapter, files in PAGES[page].items():
        parts.append(f"## {chapter}")
        for home, file, names in files:
            parts += file_entries(home, file, names)
    return "\n\n".join(parts)
