"""The cache's folder, its locks and its entries, also on file systems that lack some features."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import tiny_builds
from tiny_builds import ROOT, counting_compiler, make, runs, tiny_unit

from flashcute.jit import build, cache
from flashcute.jit.toolchain import BuildError

NOBODY = 65534


@pytest.fixture
def tmp(tmp_path, monkeypatch):
    return tiny_builds.prepare(tmp_path, monkeypatch)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_refused(tmp, monkeypatch, code):
    """Lustre without flock and NFS 3 without a lock daemon have no locks to wait for."""

    def flock(file, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(BuildError, match=rf"{os.strerror(code)}; set FLASHCUTE_CACHE_DIR"):
        make(tmp)
    assert runs(tmp) == 0


def test_a_lock_is_one_holders_and_outlives_no_release(tmp):
    (tmp / "cache").mkdir(mode=0o700)
    first, second = (cache.Lock(tmp / "cache", "entry") for _ in range(2))
    assert first.acquire() and not second.acquire()
    child = os.fork()
    if child == 0:  # the child keeps the lock's file open
        time.sleep(60)
        os._exit(0)
    try:
        first.release()
        assert second.acquire()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    first.release()  # no effect
    assert not first.acquire()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_folder_writable_by_others_is_refused(tmp, mode):
    make(tmp)
    (tmp / "cache").chmod(mode)
    for use in (make, lambda tmp: build.find(tiny_unit(tmp), counting_compiler(tmp))):
        with pytest.raises(BuildError, match=f"writable by others \\(mode {mode:04o}\\).*chmod"):
            use(tmp)


def test_nobody_is_advised_to_close_a_folder_for_all(tmp):
    make(tmp)
    (tmp / "cache").chmod(0o1777)  # as /tmp
    with pytest.raises(BuildError, match=r"mode 1777.*FLASHCUTE_CACHE_DIR") as raised:
        make(tmp)
    assert "chmod" not in str(raised.value) and "remove" not in str(raised.value)


def test_symbolic_link_is_refused(tmp):
    (tmp / "elsewhere").mkdir(mode=0o700)
    (tmp / "cache").symlink_to(tmp / "elsewhere")
    with pytest.raises(BuildError, match="symbolic link; set FLASHCUTE_CACHE_DIR"):
        make(tmp)
    assert list((tmp / "elsewhere").iterdir()) == []


def test_file_in_place_of_the_folder_is_refused(tmp):
    (tmp / "cache").touch()
    with pytest.raises(BuildError, match="cache"):
        make(tmp)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_folder_of_another_user_is_refused(tmp):
    (tmp / "cache").mkdir(mode=0o700)
    os.chown(tmp / "cache", NOBODY, NOBODY)
    with pytest.raises(BuildError, match=f"owned by user {NOBODY} while"):
        make(tmp)


@pytest.fixture
def read_only_cache(tmp):
    """Returns a cache with the built unit, which the child of :func:`run_unprivileged` can only
    read."""
    folder = Path(tempfile.mkdtemp())
    (folder / "locks").mkdir()
    made = make(tmp).artefact
    for path in (made.path, made.path.with_suffix(".json")):
        shutil.copy(path, folder)
    if os.geteuid() == 0:
        for path in (folder, *folder.iterdir()):
            os.chown(path, NOBODY, NOBODY)
    folder.chmod(0o500)
    yield folder
    folder.chmod(0o700)
    shutil.rmtree(folder)


def run_unprivileged(code: str, folder: Path) -> subprocess.CompletedProcess:
    """Runs ``code`` in a process with ``unit`` and ``compiler``, whose sources have been read."""
    head = """
import os
from pathlib import Path
from flashcute.jit import build
from tiny_builds import counting_compiler, tiny_unit
NOBODY = 65534
folder = Path(os.environ["TEST_TMP"])
unit, compiler = tiny_unit(folder), counting_compiler(folder)
unit.key(compiler)
"""
    return subprocess.run(
        [sys.executable, "-c", head + code],
        env={
            **os.environ,
            "FLASHCUTE_CACHE_DIR": str(folder),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}",
        },
        capture_output=True,
        text=True,
        check=False,
    )


# Root ignores permissions, so the process gives up root.
_DROP_ROOT = "os.geteuid() == 0 and os.setuid(NOBODY)\n"


def test_read_only_cache_still_serves(tmp, read_only_cache):
    folder = read_only_cache
    # The key is taken while the sources can still be read.
    code = (
        "key = unit.key(compiler)\n" + _DROP_ROOT + "from flashcute.jit import cache\n"
        "cache.check_private(folder := cache.cache_dir())\n"
        "print(cache.find(folder, f'tiny-host-{key[:32]}', key=key).path)\n"
    )
    done = run_unprivileged(code, folder)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parent == folder


def test_read_only_cache_is_a_clear_error(read_only_cache):
    folder = read_only_cache
    code = (
        "from flashcute.jit import cache\nimport tempfile\n"
        + _DROP_ROOT
        + "cache.writable_cache_dir()"
    )
    done = run_unprivileged(code, folder)
    assert done.returncode == 1
    assert f"expected a writable folder for compiled kernels, got {folder}" in done.stderr
    assert "set FLASHCUTE_CACHE_DIR" in done.stderr


def test_copy_is_whole_and_findable(tmp):
    made = make(tmp).artefact
    copied = cache.copy(made, tmp / "out" / "host", "tiny")
    assert copied.path == tmp / "out" / "host" / "tiny.so"
    found = cache.find(tmp / "out" / "host", "tiny", source_key=tiny_unit(tmp).source_key())
    assert found.meta["sha256"] == made.meta["sha256"]
    assert sorted(p.name for p in (tmp / "out" / "host").iterdir()) == ["tiny.json", "tiny.so"]


def test_cache_folder_follows_the_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.delenv("FLASHCUTE_CACHE_DIR", raising=False)
    for xdg, expected in {
        "": "/somewhere/.cache/flashcute",
        "relative": "/somewhere/.cache/flashcute",
        str(tmp_path): f"{tmp_path}/flashcute",
    }.items():
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        assert cache.cache_dir() == Path(expected)
    monkeypatch.setenv("FLASHCUTE_CACHE_DIR", "/chosen")
    assert cache.cache_dir() == Path("/chosen")
