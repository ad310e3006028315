"""Shared objects on disk, each with a .json record.

The record holds the SHA-256 of the shared object and is written last, so an entry is complete or
absent. A truncated or half-written entry fails the check and is built again. Entries are loaded as
code, so the cache must be a real folder that belongs to the user and that no other user can write.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from .. import env
from .toolchain import BuildError

logger = logging.getLogger("flashcute")

# Disk space for the intermediate files of one compiler; nvcc took 70 MB at d = 256.
BYTES_PER_BUILD = 100 << 20
# A unit's name and target, then half of its key; mkdtemp adds eight letters.
_STEM = r"\w+-(?:host|sm_\w+|sim-\w+)-[0-9a-f]{32}"
_OURS = re.compile(rf"(?P<entry>{_STEM})\.(?:json|so)|tmp-(?P<unfinished>{_STEM})-\w{{8}}")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_HELD = (errno.EAGAIN, errno.EACCES)  # another process holds the lock; NFS says the second


@dataclasses.dataclass(frozen=True)
class Artefact:
    """A verified shared object and what was recorded when it was built."""

    path: Path
    meta: Mapping[str, Any]


def cache_dir() -> Path:
    """Returns ``FLASHCUTE_CACHE_DIR`` or ``flashcute`` in the user's cache; does not create it."""
    chosen = env.read().cache_dir
    if chosen is not None:
        return chosen
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG Base Directory specification: a relative path is invalid and to be ignored.
    if base.is_absolute():
        return base / "flashcute"
    try:
        return Path.home() / ".cache" / "flashcute"
    except RuntimeError as error:
        raise BuildError(
            "flashcute: expected a user with a home folder for compiled kernels, got none; set "
            "FLASHCUTE_CACHE_DIR to a folder of your own"
        ) from error


def is_full(text: str) -> bool:
    """Whether a program's messages say that a disk or a quota is full."""
    return any(os.strerror(code) in text for code in _FULL)


def no_space(folder: Path) -> BuildError:
    """Returns the error for a build that found no space on the disk of ``folder``."""
    free = shutil.disk_usage(folder).free / 2**20
    return BuildError(
        f"flashcute: no space left in {folder}: {free:.0f} MiB are free, and a build takes up to "
        f"{BYTES_PER_BUILD >> 20} MiB for each compiler that runs; free some, or set "
        "FLASHCUTE_CACHE_DIR to a folder on another disk"
    )


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns an error of the operating system while ``folder`` is written into a BuildError."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise no_space(folder) from error
        raise BuildError(
            f"flashcute: expected a writable folder for compiled kernels, got {folder}: {error}; "
            "set FLASHCUTE_CACHE_DIR to a folder of your own"
        ) from error


def check_private(folder: Path) -> None:
    """Rejects a cache folder in which another user could place code.

    Raises:
        BuildError: names the folder, what is wrong with it and how to correct it.
        OSError: where it does not exist or cannot be seen.
    """
    status = folder.lstat()
    uid = os.geteuid()
    if not stat.S_ISDIR(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a folder"
        way_out = "set FLASHCUTE_CACHE_DIR to the real folder"
    elif status.st_uid != uid:
        kind = f"owned by user {status.st_uid} while this process is user {uid}"
        way_out = "set FLASHCUTE_CACHE_DIR to a folder of your own"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        kind = f"writable by others (mode {stat.S_IMODE(status.st_mode):04o})"
        way_out = "set FLASHCUTE_CACHE_DIR to a folder of your own"
        # A sticky folder such as /tmp must stay open to others.
        if not status.st_mode & stat.S_ISVTX:
            way_out = f"check who wrote to it, then run `chmod 700 {folder}`, or {way_out}"
    else:
        return
    raise BuildError(
        f"flashcute: expected a private folder for compiled kernels, got {folder} which is {kind}; "
        f"{way_out}"
    )


def writable_cache_dir() -> Path:
    """Returns the cache folder, creating it with mode 0700 where it is missing.

    Raises:
        BuildError: where it cannot be created or is not private.
    """
    folder = cache_dir()
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        check_private(folder)
        (folder / "locks").mkdir(mode=0o700, exist_ok=True)
        # Permissions are not enough: the file system can be mounted read-only.
        with tempfile.TemporaryFile(dir=folder) as file:
            _flock(file, folder, wait=False)
    return folder


def _flock(file: IO, folder: Path, wait: bool) -> bool:
    """Locks ``file``, which is open for writing as NFS wants it; returns whether it is locked now.

    Raises:
        BuildError: where the file system of ``folder`` has no locks. Two processes would then build
            the same entry, or wait for one that was killed.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise BuildError(
            f"flashcute: expected a file system with locks for compiled kernels, got {folder}, "
            f"where flock fails: {error}; set FLASHCUTE_CACHE_DIR to a folder on a local disk"
        ) from error
    return True


class Lock:
    """The lock of an entry, which the operating system releases when its holder dies."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.path = folder / "locks" / f"{stem}.lock"
        self._file: IO | None = None

    def acquire(self, wait: bool = False) -> bool:
        """Takes the lock if it is free, or waits for it if ``wait``; returns whether it is held."""
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        file = open(self.path, "ab")  # noqa: SIM115 - until released
        if not _flock(file, self.path.parents[1], wait):
            return False
        self._file = file
        return True

    def release(self) -> None:
        """Releases the lock; no effect where it is not held."""
        if self._file is not None:
            # Closing is not enough where a process that was forked meanwhile has it open, too.
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()
            self._file = None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def find(folder: Path, stem: str, **expected: str) -> Artefact | None:
    """Returns the entry ``stem`` of ``folder`` if it is intact and its record has ``expected``."""
    path, record = folder / f"{stem}.so", folder / f"{stem}.json"
    try:
        meta = json.loads(record.read_bytes())
        if not isinstance(meta, dict) or any(meta.get(k) != v for k, v in expected.items()):
            logger.info("flashcute: %s was built from other sources, not used", path)
            return None
        whole = _sha256(path) == meta.get("sha256")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("flashcute: %s cannot be read (%s), not used", record, error)
        return None
    if not whole:
        logger.warning("flashcute: %s is damaged (SHA-256 differs from %s), not used", path, record)
        return None
    return Artefact(path, meta)


def load_advice(error: Exception) -> str:
    """Says what to do where the dynamic loader refuses an entry."""
    # glibc's text for a file that it may not map as code.
    if "failed to map segment" in str(error):
        return (
            "its file system may be mounted noexec: set FLASHCUTE_CACHE_DIR to a folder that code "
            "can be loaded from"
        )
    return "remove the file, it is then built again"


def _replace(source: Path, target: Path) -> None:
    """Renames ``source`` to ``target`` atomically, after its bytes are on disk."""
    with open(source, "rb") as file:
        os.fsync(file.fileno())
    os.replace(source, target)


def contents(folder: Path) -> dict[str, list[Path]]:
    """Maps the stem of each entry in the cache to its record, shared object and unfinished builds.

    Only names that flashcute gives: the folder may hold other files.

    Raises:
        BuildError: where the folder is not the user's own.
        OSError: where it does not exist.
    """
    check_private(folder)
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        match = _OURS.fullmatch(path.name)
        if match:
            found.setdefault(match["entry"] or match["unfinished"], []).append(path)
    return found


def bytes_of(path: Path) -> int:
    """Returns the size of a file, or of all files in a folder."""
    files = [path, *(Path(at) / name for at, _, names in os.walk(path) for name in names)]
    size = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # a running build removes files
            size += file.lstat().st_size
    return size


def publish(built: Path, folder: Path, stem: str, meta: Mapping[str, Any]) -> Artefact:
    """Publishes the shared object ``built`` as the entry ``stem`` of ``folder``.

    ``built`` must be on the file system of ``folder`` and is moved. In the cache, the caller must
    hold the entry's lock.
    """
    meta = {**meta, "sha256": _sha256(built)}
    record = built.with_suffix(".json")
    record.write_text(json.dumps(meta, indent=1))
    _replace(built, folder / f"{stem}.so")
    _replace(record, folder / f"{stem}.json")
    return Artefact(folder / f"{stem}.so", meta)


def copy(artefact: Artefact, folder: Path, stem: str) -> Artefact:
    """Copies an entry into ``folder``, as atomically as :func:`publish`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as temporary:
        built = Path(temporary) / f"{stem}.so"
        shutil.copyfile(artefact.path, built)
        built.chmod(0o755)
        if _sha256(built) != artefact.meta["sha256"]:
            raise BuildError(f"flashcute: {artefact.path} changed while it was copied; try again")
        return publish(built, folder, stem, artefact.meta)
