"""The tool that holds each kernel to its compile time, with a stand-in for the compiler."""

from __future__ import annotations

import build_times
import pytest

from flashcute import shipped

STEM, CONFIG = next(iter(shipped.instantiations().items()))


@pytest.fixture(autouse=True)
def stand_in(tmp_path, monkeypatch):
    """Makes an nvcc that writes a file which is never loaded, in about a tenth of a second."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\n'
        "i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done\n"
        'while [ "$1" != -o ]; do shift; done; echo > "$2"\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("FLASHCUTE_CACHE_DIR", str(tmp_path / "never-touched"))
    monkeypatch.setattr(shipped, "instantiations", lambda: {STEM: CONFIG})


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["build_times.py", "--arch", str(CONFIG.arch), *arguments])
    return build_times.main()


def test_within_the_limit(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.endswith(f" s  {STEM}") and float(first.split()[0]) > 0
    assert last.startswith("1 kernels, ") and last.endswith(f"slowest {STEM}")
    assert not (tmp_path / "never-touched").exists()


def test_of_kernels_whose_names_match(monkeypatch, capsys):
    assert run(monkeypatch, "--match", CONFIG.name) == 0
    with pytest.raises(SystemExit):
        run(monkeypatch, "--match", "no-such-kernel")
    assert f"none of sm{CONFIG.arch}" in capsys.readouterr().err


def test_over_the_limit(monkeypatch, capsys):
    assert run(monkeypatch, "--limit", "0.001") == 1
    assert capsys.readouterr().err == f"over 0.001 s: {STEM}\n"


def test_failed_build_is_reported(monkeypatch, tmp_path):
    (tmp_path / "bin" / "nvcc").write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1 || exit 3\n')
    with pytest.raises(RuntimeError, match=f"building {CONFIG.full_name} .*exit status 3"):
        run(monkeypatch)
