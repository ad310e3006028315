from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from flashcute import env


def test_defaults():
    assert env.read({}) == env.Settings(
        cache_dir=None, no_build=False, arch=None, jobs=None, prebuild=()
    )
    assert env.read({v.name: "" for v in env.VARIABLES}) == env.read({})


def test_values():
    settings = env.read(
        {
            "FLASHCUTE_CACHE_DIR": "~/kernels",
            "FLASHCUTE_NO_BUILD": "1",
            "FLASHCUTE_ARCH": "80",
            "FLASHCUTE_JOBS": "3",
            "FLASHCUTE_PREBUILD": "80, 90",
            "OTHER": "x",
        }
    )
    assert settings == env.Settings(Path.home() / "kernels", True, 80, 3, ("80", "90"))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("FLASHCUTE_CACHE_DIR", "relative/folder", "an absolute path"),
        ("FLASHCUTE_NO_BUILD", "yes", "0 or 1"),
        ("FLASHCUTE_ARCH", "100", "80 or 90"),
        ("FLASHCUTE_ARCH", "90a", "80 or 90"),
        ("FLASHCUTE_JOBS", "0", "at least 1"),
        ("FLASHCUTE_JOBS", "-2", "at least 1"),
        ("FLASHCUTE_JOBS", "many", "at least 1"),
        ("FLASHCUTE_PREBUILD", "90a", "e.g. 80,90"),
        ("FLASHCUTE_PREBUILD", "90,", "e.g. 80,90"),
    ],
)
def test_wrong_value(name, value, expected):
    with pytest.raises(
        ValueError, match=rf"expected {name} to be .*{expected}.*got {name}='{value}'"
    ):
        env.read({name: value})


def test_unknown_name():
    with pytest.raises(
        ValueError, match=r"got FLASHCUTE_CACHEDIR; unset it, known are .*_CACHE_DIR"
    ):
        env.read({"FLASHCUTE_CACHEDIR": "x"})


def test_table_and_settings_agree():
    assert [v.field for v in env.VARIABLES] == [f.name for f in dataclasses.fields(env.Settings)]
    assert all(v.name == env.PREFIX + v.field.upper() for v in env.VARIABLES)
