"""What a user is told who asks for a name of flash-attn 2 that is not here yet."""

from __future__ import annotations

import inspect
import pathlib
import subprocess
import sys

import pytest

import flashcute
from flashcute import flash_attn_interface, missing, reference

MODULES = pytest.mark.parametrize(
    "module", [flashcute, flash_attn_interface], ids=lambda module: module.__name__
)


@pytest.mark.parametrize("name", missing.INSTEAD)
@MODULES
def test_missing_name_says_what_to_use_instead(module, name: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(module, name)
    message = str(raised.value)
    assert message.startswith(f"{module.__name__}: expected a name of flashcute, got {name}, ")
    assert message.endswith(f"; {missing.INSTEAD[name]}")
    # Libraries look for what is there like this.
    assert not hasattr(module, name)
    assert getattr(module, name, None) is None


@MODULES
def test_message_survives_an_import_statement(module) -> None:
    # "from x import y" replaces an AttributeError by an ImportError with words of its own.
    lines = [
        f"try:\n    from {module.__name__} import {name}\nexcept ImportError as error:\n"
        f"    print({name!r}, error)\n"
        for name in missing.INSTEAD
    ]
    run = subprocess.run(
        [sys.executable, "-c", "".join(lines)],
        cwd=pathlib.Path(flashcute.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    printed = run.stdout.splitlines()
    assert len(printed) == len(missing.INSTEAD)
    for line, (name, instead) in zip(printed, missing.INSTEAD.items(), strict=True):
        start = f"{name} {module.__name__}: expected a name of flashcute, got {name}, "
        assert line.startswith(start) and line.endswith(f"; {instead}")


def test_several_names_in_one_import() -> None:
    with pytest.raises(ImportError, match=r"got flash_attn_with_kvcache, .*k_cache"):
        from flashcute import flash_attn_func, flash_attn_with_kvcache  # noqa: F401


@MODULES
def test_unknown_names_get_pythons_own_words(module) -> None:
    with pytest.raises(AttributeError, match=rf"^module '{module.__name__}' has no attribute 'x'$"):
        module.x  # noqa: B018
    with pytest.raises(ImportError, match=r"^cannot import name 'flash_attn' from 'flashcute'"):
        from flashcute import flash_attn  # noqa: F401


def test_nothing_that_is_here_is_called_missing() -> None:
    assert not set(missing.INSTEAD) & set(flashcute.__all__)
    functions = dict(inspect.getmembers(flash_attn_interface, inspect.isfunction))
    assert not set(missing.INSTEAD) & set(functions)
    assert not set(missing.INSTEAD) & set(vars(reference))
