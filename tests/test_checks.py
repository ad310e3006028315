"""The checks by themselves; bad_input.py has the calls that they refuse."""

from __future__ import annotations

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest
import torch

import flashcute
from flashcute import checks

PACKAGE = pathlib.Path(flashcute.__file__).parent

# A DTensor needs a process group; this one has a single process and sends nothing.
DTENSOR = """
import torch, torch.distributed as dist, flashcute
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
q = torch.zeros(2, 3, 4, 8)
for index, name in enumerate("qkv"):
    args = [q, q, q]
    args[index] = distribute_tensor(q, mesh, [Shard(0)])
    try:
        flashcute.flash_attn_func(*args)
    except TypeError as error:
        print(name, error)
"""


def test_distributed_tensors_are_named() -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch was built without torch.distributed")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DTENSOR],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    expected = [
        f"{name} flash_attn_func: expected {name} to be a dense torch.Tensor, got {name} as a "
        "DTensor; call it on the local shards, e.g. those of .to_local()"
        for name in "qkv"
    ]
    assert run.stdout.splitlines() == expected


def test_options_come_back_as_plain_python() -> None:
    np = pytest.importorskip("numpy")
    for got, expected in (
        (checks.check_scale("f", np.float32(0.5), 64), 0.5),
        (checks.check_scale("f", np.longdouble(0.5), 64), 0.5),
        (checks.check_scale("f", 2, 64), 2.0),
        (checks.check_scale("f", None, 64), 0.125),
        (checks.check_dropout("f", np.float16(0.5)), 0.5),
        (checks.check_softcap("f", np.int64(3)), 3.0),
        (checks.check_flag("f", "causal", np.True_), True),
        (checks.check_window("f", [np.int8(4), np.uint64(2)]), (4, 2)),
        (checks.check_size("f", "head_dim", np.int32(64)), 64),
    ):
        assert got == expected and type(got) is type(expected)
    assert [type(side) for side in checks.check_window("f", (np.int8(4), 2))] == [int, int]


def test_numpy_is_not_imported_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    assert checks.check_window("f", [4, 2]) == (4, 2)
    assert "numpy" not in sys.modules


def test_symbols_of_exported_shapes_are_numbers() -> None:
    class Attention(torch.nn.Module):
        def forward(self, q, k):
            return flashcute.flash_attn_func(q, k, k, causal=k.shape[1] > 1)

    q = torch.empty(2, 9, 4, 64, device="meta", dtype=torch.float16)
    shapes = {"q": None, "k": {1: torch.export.Dim("seqlen", min=2, max=64)}}
    program = torch.export.export(
        Attention(), (q, torch.empty_like(q)), dynamic_shapes=shapes, strict=False
    )
    assert program.module()(q, q[:, :5]).shape == q.shape


def test_any_value_can_be_shown() -> None:
    for value in (10**5000, (10**5000, 0), torch.zeros(3, 3), "x" * 999, [[]] * 99):
        shown = checks._show(value)
        assert 0 < len(shown) < 200 and "\n" not in shown


def test_checks_hold_within_a_vmap() -> None:
    x = torch.zeros(3, 2, 9, 4, 8)
    with pytest.raises(ValueError, match=r"q's batch size 2, got k.shape="):
        torch.vmap(lambda q: flashcute.flash_attn_func(q, q[:1], q[:1]))(x)


def _imports(path: pathlib.Path) -> set[str]:
    """Returns the package's modules that a file imports, except those for type checkers alone."""
    package = path.relative_to(PACKAGE.parent).parent.parts
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.unparse(test.test)
        for node in ast.walk(test)
    }
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.level or id(node) in typing_only:
            continue
        base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
        base = [part for part in base if part]
        for alias in node.names:
            full = PACKAGE.parent.joinpath(*base, alias.name)
            is_module = full.with_suffix(".py").is_file() or full.is_dir()
            found.add(".".join([*base, alias.name] if is_module else base))
    return found


def _import_graph(*names: str) -> dict[str, set[str]]:
    """Returns each module that these import, directly or not, with the modules that it imports."""
    graph: dict[str, set[str]] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in graph and name != "flashcute":  # flashcute itself imports names lazily
            path = PACKAGE.parent.joinpath(*name.split("."))
            graph[name] = _imports(
                path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            )
            waiting += graph[name]
    return graph


def test_modules_import_each_other_in_one_direction() -> None:
    # Imports inside functions count, too: they hide a circle but do not remove it.
    graph = _import_graph("flashcute.flash_attn_interface", "flashcute.support")
    assert {"flashcute.checks", "flashcute.ops", "flashcute.jit.binding"} <= set(graph)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"circle of imports: {' <- '.join(error.args[1])}")
