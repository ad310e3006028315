"""Arguments of ``python -m flashcute sim``; tests/sim/test_tiles.py tests what it prints."""

from __future__ import annotations

import re

import pytest

from flashcute import __main__ as main
from flashcute.jit import sources
from flashcute.sim import build, cli, tiles


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("a compiler starts")

    monkeypatch.setattr(cli, "_build", refuse)


@pytest.mark.parametrize(
    "arguments",
    [
        *("--seqlen-q -3", "--seqlen-q 0", "--seqlen-k -1", "-b -1", "-b 0", "-d 0", "--heads 0"),
        *("--heads-k 0", "--seed -1", f"--seed {2**64}", "--copy-mode soon", "--checker all"),
        "--picture tiles.png",
    ],
)
def test_wrong_argument(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main.main(["sim", *arguments.split()])
    assert end.value.code == 2
    assert f"{arguments.split()[0]}" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-d 999", "expected -d to be a multiple of 8 up to 64, .*got -d 999; .*--head-dim"),
        ("-d 12", "got -d 12"),
        ("-d 72", "got -d 72"),
        ("--pass bwd --picture x.svg", "expected --pass fwd with --picture, got --picture x.svg"),
        ("--heads 3 --heads-k 2", "expected --heads to be a multiple of --heads-k, got"),
        ("--seqlen-q 2147483647 -b 99", "expected tensors of at most 2147483647 elements"),
        ("--capability 75", "expected target to be one of"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, message, capsys):
    assert main.main(["sim", *arguments.split()]) == 1
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1
    assert re.search(message, printed)


def test_picture_in_a_new_folder(tmp_path):
    picture = cli._svg(str(tmp_path / "new" / "tiles.svg"))
    tiles.write_svg(tiles.TileMap((("full", "masked"),), 64, 64), picture, "title")
    assert picture.read_text().startswith("<svg")


def test_missing_sources_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "source_root", lambda: tmp_path)
    with pytest.raises(build.BuildError, match="expected the simulator's sources in"):
        build.runner_unit()
