from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashcute import env


def test_defaults():
    assert env.read({}) == env.Settings(cache_dir=None, no_build=False, arch=None, jobs=None)
    unset = {v.name: "" for v in env.VARIABLES}
    assert env.read(unset) == env.read({})
    assert env.prebuild_targets(unset) == env.prebuild_targets({}) == ()


def test_values():
    environ = {
        "FLASHCUTE_CACHE_DIR": "~/kernels",
        "FLASHCUTE_NO_BUILD": "1",
        "FLASHCUTE_ARCH": "80",
        "FLASHCUTE_JOBS": "3",
        "FLASHCUTE_PREBUILD": "80, 90",
        "OTHER": "x",
    }
    assert env.read(environ) == env.Settings(Path.home() / "kernels", True, 80, 3)
    assert env.prebuild_targets(environ) == ("80", "90")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("FLASHCUTE_CACHE_DIR", "relative/folder", "an absolute path"),
        ("FLASHCUTE_CACHE_DIR", "~nobody-of-this-name/x", "an absolute path"),
        ("FLASHCUTE_NO_BUILD", "yes", "0 or 1"),
        ("FLASHCUTE_ARCH", "100", "80 or 90"),
        ("FLASHCUTE_ARCH", "90a", "80 or 90"),
        ("FLASHCUTE_JOBS", "0", "at least 1"),
        ("FLASHCUTE_JOBS", "-2", "at least 1"),
        ("FLASHCUTE_JOBS", "many", "at least 1"),
        ("FLASHCUTE_JOBS", "2147483648", "at least 1"),
        ("FLASHCUTE_JOBS", "9" * 5000, "at least 1"),
        ("FLASHCUTE_PREBUILD", "90a", "e.g. 80,90"),
        ("FLASHCUTE_PREBUILD", "90,", "e.g. 80,90"),
        ("FLASHCUTE_PREBUILD", "75", "of 80, 86,"),
    ],
)
def test_wrong_value(name, value, expected):
    with pytest.raises(
        ValueError, match=rf"expected {name} to be .*{expected}.*got {name}='{value}'"
    ):
        env.prebuild_targets({name: value})  # reads all variables


def test_what_only_pip_reads_breaks_nothing_at_run_time():
    assert env.read({"FLASHCUTE_PREBUILD": "90a"}) == env.read({})


@pytest.mark.parametrize(
    ("variable", "name"), [("FLASHCUTE_FOO", "FOO"), ("FLASHCUTE_ARCH", "ARCH='1'")]
)
@pytest.mark.parametrize(
    "line",
    [
        "from flashcute import flash_attn_func",
        "import flashcute; flashcute.supports(device='cpu')",
        "import flashcute.flash_attn_interface",
    ],
)
def test_a_wrong_variable_is_an_error_where_nothing_is_built(variable, name, line):
    done = subprocess.run(
        [sys.executable, "-c", line],
        env={**os.environ, variable: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(rf"ValueError: flashcute: expected .*{name}", done.stderr)


def test_unknown_name():
    with pytest.raises(
        ValueError, match=r"got FLASHCUTE_CACHEDIR; unset it, known are .*_CACHE_DIR"
    ):
        env.read({"FLASHCUTE_CACHEDIR": "x"})


def test_table_and_settings_agree():
    fields = [v.field for v in env.VARIABLES if v.field is not None]
    assert fields == [f.name for f in dataclasses.fields(env.Settings)]
    assert all(v.name == env.PREFIX + v.field.upper() for v in env.VARIABLES if v.field)
