"""Rules of this project that are in no linter: `python tools/check_project.py`.

Prints `file:line: rule` for each breach in the files that git tracks or would track. The exit
status is 1 if there is one.
"""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 120
MAX_COLUMNS = 100

PYTHON = {".py"}
CPP = {".h", ".hpp", ".cuh", ".c", ".cpp", ".cu", ".inc", ".S"}
OTHER_TEXT = {".md", ".toml", ".yml", ".yaml", ".cfg", ".sh", ".sass", ""}

Breach = tuple[int, str]  # line number from 1, rule

_MACHINE_PATH = re.compile(r"(?<![\w.~])/(?:work|home|root|Users|mnt)/[\w.]")
_TORCH_INCLUDE = re.compile(r"\s*#\s*include\s*[<\"](?:torch|ATen|c10|pybind11|Python\.h)")
_SIMULATOR_SWITCH = re.compile(r"\s*#\s*(?:el)?if(?:n?def)?\b.*SIM", re.IGNORECASE)
_LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)")
_CPP_COMMENT = re.compile(r"^\s*//+\s*(.*?)\s*$")
_NOT_A_FUNCTION = re.compile(r"\s*(?:namespace|struct|class|union|enum|extern\s+\"[^\"]*\"\s*$)")


def check_ceilings(path: Path, text: str) -> Iterator[Breach]:
    """Limits lines per file and columns per line."""
    lines = text.splitlines()
    if len(lines) > MAX_FILE_LINES:
        yield len(lines), f"expected at most {MAX_FILE_LINES} lines in a file, got {len(lines)}"
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            yield number, f"expected at most {MAX_COLUMNS} columns, got {len(line)}"


def check_machine_paths(path: Path, text: str) -> Iterator[Breach]:
    """Forbids absolute paths of one machine."""
    for number, line in enumerate(text.splitlines(), 1):
        if found := _MACHINE_PATH.search(line):
            yield number, f"path of one machine: {found[0]}..."


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def check_python_calls(path: Path, text: str) -> Iterator[Breach]:
    """Forbids what runs text as code, starts a shell, or loads objects from untrusted bytes."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in {"pickle", "marshal", "shelve", "dill"}.intersection(names):
                yield node.lineno, f"forbidden: import of {name}"
        elif isinstance(node, ast.Call):
            name = _dotted(node.func)
            if name in {"eval", "exec", "os.system", "os.popen", "torch.load"}:
                yield node.lineno, f"forbidden: {name}()"
            for keyword in node.keywords:
                value = keyword.value
                if keyword.arg == "shell" and not (
                    isinstance(value, ast.Constant) and value.value is False
                ):
                    yield node.lineno, "forbidden: a subprocess through a shell"


def check_python_functions(path: Path, text: str) -> Iterator[Breach]:
    """Limits lines per function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield node.lineno, _too_long(node.name, lines)


def _too_long(name: str, lines: int) -> str:
    return f"expected at most {MAX_FUNCTION_LINES} lines in a function, got {lines} in {name}"


def _is_python_code(comment: str) -> bool:
    """Returns whether a comment parses as a statement; a mere name or number does not count."""
    try:
        body = ast.parse(comment).body
    except SyntaxError:
        return False
    plain = ast.AnnAssign | ast.Expr
    return any(
        not isinstance(node, plain) or isinstance(getattr(node, "value", None), ast.Call)
        for node in body
    )


def check_python_comments(path: Path, text: str) -> Iterator[Breach]:
    """Forbids commented-out code."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and _is_python_code(token.string.lstrip("#! ")):
            yield token.start[0], "commented-out code"


def check_cpp_comments(path: Path, text: str) -> Iterator[Breach]:
    """Forbids commented-out code: comments that end like a statement or open or close a block."""
    for number, line in enumerate(text.splitlines(), 1):
        found = _CPP_COMMENT.match(line)
        if found and re.search(r"[;{}]$|^#\s*(?:if|else|endif|include|define)\b", found[1]):
            yield number, "commented-out code"


def _without_comments_and_strings(text: str) -> str:
    """Returns the text with comments and literals blanked out, line for line."""
    pattern = r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'"

    def blank(match: re.Match) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    return re.sub(pattern, blank, text, flags=re.DOTALL)


def check_cpp_functions(path: Path, text: str) -> Iterator[Breach]:
    """Limits lines per outermost braced block whose head has a parameter list."""
    code = _without_comments_and_strings(text)
    depth, head_start, start_depth, start_line = 0, 0, None, 0
    for match in re.finditer(r"[{};]|^[ \t]*#[^\n]*", code, re.MULTILINE):
        at = match.start()
        if match[0] == "{":
            head = code[head_start:at]
            if start_depth is None and ")" in head and not _NOT_A_FUNCTION.match(head):
                start_depth = depth
                first = head_start + len(head) - len(head.lstrip())
                start_line = code.count("\n", 0, first) + 1
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if depth == start_depth:
                lines = code.count("\n", 0, at) + 2 - start_line
                if lines > MAX_FUNCTION_LINES:
                    yield start_line, _too_long("a function", lines)
                start_depth = None
        head_start = match.end()


def check_kernel_sources(path: Path, text: str) -> Iterator[Breach]:
    """Forbids torch in kernel sources, and switches for the simulator there and in the binding."""
    framework_free = path.is_relative_to("csrc/flash_attn/src")
    for number, line in enumerate(text.splitlines(), 1):
        if framework_free and _TORCH_INCLUDE.match(line):
            yield number, "kernel sources include no torch"
        if path.is_relative_to("csrc/flash_attn") and _SIMULATOR_SWITCH.match(line):
            yield number, "kernel sources have no switch for the simulator"


CHECKS = (
    (check_ceilings, PYTHON | CPP),
    (check_machine_paths, PYTHON | CPP | OTHER_TEXT),
    (check_python_calls, PYTHON),
    (check_python_functions, PYTHON),
    (check_python_comments, PYTHON),
    (check_cpp_comments, CPP),
    (check_cpp_functions, CPP),
    (check_kernel_sources, CPP),
)


def check(path: Path, text: str) -> list[str]:
    """Returns all breaches in one file; ``path`` is relative to the project's root."""
    breaches = [
        breach
        for function, suffixes in CHECKS
        if path.suffix in suffixes
        for breach in function(path, text)
    ]
    return [f"{path}:{line}: {rule}" for line, rule in sorted(breaches)]


def check_module_names(paths: list[Path]) -> list[str]:
    """Forbids two test modules of one name: pytest puts each of their folders on the path."""
    found, first = [], {}
    for path in sorted(paths):
        if path.suffix in PYTHON and path.parts[0] == "tests" and path.name != "conftest.py":
            other = first.setdefault(path.name, path)
            if other != path:
                found.append(f"{path}:1: expected a module name of its own, got that of {other}")
    return found


def check_links(paths: list[Path]) -> list[str]:
    """Forbids links of documents to files that git would not have, such as ignored ones."""
    there = {ROOT / parent for path in paths for parent in (path, *path.parents)}
    return [
        f"{path}: expected a link to a file of the project, got {target}"
        for path in paths
        if path.suffix == ".md"
        for target in _LINK.findall((ROOT / path).read_text(encoding="utf-8"))
        if Path(os.path.normpath(ROOT / path.parent / target)) not in there
    ]


def project_files() -> list[Path]:
    """Lists the files and links that git tracks or would track, relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [Path(name) for name in done.stdout.split("\0") if name]
    return [path for path in files if (ROOT / path).is_file() or (ROOT / path).is_symlink()]


def main() -> int:
    suffixes = set().union(*(suffixes for _, suffixes in CHECKS))
    paths = project_files()
    found = check_module_names(paths) + check_links(paths)
    for path in paths:
        if (ROOT / path).is_symlink():  # its target may exist on one machine only
            found.append(f"{path}: expected a file, got a symbolic link")
        elif path.suffix in suffixes:
            found += check(path, (ROOT / path).read_text(encoding="utf-8"))
    print("\n".join(found) if found else "project rules: no breach")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
