"""Which faults are planted, and how they come into translation units."""

import dataclasses
import importlib
import types
from pathlib import Path

import mutants
import mutants_sm90
import planted
import pytest
import tiers
from together import compile_together

from flashcute import sim
from flashcute.heuristics import shipped_configs
from flashcute.jit.build import BuildResult
from flashcute.jit.sources import kernel_include_dir
from flashcute.sim.build import companions

FILES = sorted(path.stem for path in Path(__file__).parent.glob("mutants*.py"))


def of_file(stem):
    for value in vars(importlib.import_module(stem)).values():
        faults = value if isinstance(value, tuple) else ()
        yield from (x for x in faults if isinstance(x, mutants.Mutant))


@pytest.mark.parametrize("stem", FILES)
def test_the_text_of_every_fault_occurs_once(stem):
    """It does so for the faults that are planted with ``--all`` only, too."""
    headers = {path.name: path.read_text() for path in kernel_include_dir().glob("*.h")}
    faults = list(of_file(stem))
    assert faults
    wrong = [x.name for x in faults if headers[x.file].count(x.old) != 1 or x.old == x.new]
    assert not wrong


@pytest.mark.parametrize("length", [1, planted.AT_MOST, planted.AT_MOST + 1, 100])
def test_pieces_are_of_about_the_same_size(length):
    found = planted.pieces(range(length))
    assert [x for piece in found for x in piece] == list(range(length))
    sizes = sorted(map(len, found))
    assert sizes[-1] <= planted.AT_MOST and len(found) == -(-length // planted.AT_MOST)
    assert sizes[-1] - sizes[0] < len(found)


@pytest.fixture
def units_of(monkeypatch, tmp_path):
    """Returns a function that returns the translation units of mutants without compiling them."""
    monkeypatch.setattr(planted, "_together", {})
    asked = []

    def build_many(units, compiler):
        asked.append(units)
        artefact = types.SimpleNamespace(path=Path("none.so"))
        return [BuildResult(unit, artefact, 0.0) for unit in units]

    monkeypatch.setattr(planted.build, "build_many", build_many)

    def of(some):
        kernels = planted.build_mutants(some, tmp_path / str(len(asked)))
        assert list(kernels) == [x.name for x in some]
        functions = [function for _, function in kernels.values()]
        return {unit.source for unit in asked[-1]}, functions

    return of


def test_files_share_the_units_of_their_faults(units_of):
    first, second, third = mutants.MUTANTS[:3]
    other = dataclasses.replace(second, config=mutants.ONE_STAGE)
    assert units_of([first])[0] != units_of([second])[0]
    planted.compile_mutants_together([first, second, third, other, first])
    shared, (function,) = units_of([first])
    assert len(shared) == 1 and units_of([third, second])[0] == shared
    assert all(f" {function}\n" in source for source in shared)
    assert len(units_of([first, other])[0] - shared) == 1
    unknown = dataclasses.replace(first, name="of no file")
    assert units_of([first, unknown])[0].isdisjoint(shared)


def test_faults_of_one_name_are_told_apart(units_of):
    first = mutants.MUTANTS[0]
    other = dataclasses.replace(first, new="// nothing")
    planted.compile_mutants_together([first, other])
    (of_first, functions), (of_other, others) = units_of([first]), units_of([other])
    assert of_first == of_other and functions != others


def test_faults_of_one_name_in_one_file_are_refused(units_of):
    first = mutants.MUTANTS[0]
    with pytest.raises(ValueError, match="expected names that differ"):
        units_of([first, dataclasses.replace(first, new="// nothing")])


def test_what_files_compile_is_put_together(monkeypatch):
    monkeypatch.setattr(sim.build, "_together", {})
    config = mutants.TWO_STAGES
    local = dataclasses.replace(config, mask="local")
    shipped = shipped_configs(80)[0]
    files = [
        types.SimpleNamespace(__name__="b", COMPILED=[(config, "none"), (shipped, "none")]),
        types.SimpleNamespace(__name__="a", COMPILED=[(local, "none"), (shipped, "memcheck")]),
        types.SimpleNamespace(__name__="c"),
    ]
    compile_together(files)
    assert companions(config) == companions(local) == (local, config)
    assert companions(shipped, "memcheck") == (shipped,)
    assert len(companions(shipped)) > 1 and companions(config, "memcheck") == (config,)


def test_of_each_file_and_finder_every_other_fault_is_planted(monkeypatch):
    monkeypatch.setattr(tiers, "everything", False)
    faults = (*mutants.MUTANTS, *mutants_sm90.MUTANTS)
    kept = tiers.faults(faults)
    assert [x for x in faults if x in kept] == list(kept)
    assert {x for x in faults if x.finder in sim.CHECKERS} <= set(kept)
    assert {(x.file, x.finder) for x in kept} == {(x.file, x.finder) for x in faults}
    assert len(kept) < 0.7 * len(faults)


def test_all_faults_are_planted_if_asked(monkeypatch):
    monkeypatch.setattr(tiers, "everything", True)
    assert tiers.faults(mutants.MUTANTS) == mutants.MUTANTS
