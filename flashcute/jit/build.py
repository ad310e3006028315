"""Building shared objects: one source, one compiler run, one entry of the cache.

Compilers are started directly, never through a shell or a build file, so no path or variable is
ever parsed as a command. Every entry has a lock of its own that the kernel drops when its holder
dies: processes that want the same entry build it once, and nobody waits for entries of others.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import filelock

from .. import env
from . import cache
from .sources import project_headers
from .toolchain import BuildError, Compiler

logger = logging.getLogger("flashcute")

BYTES_PER_JOB = 5 << 30  # peak memory of one nvcc on a CuTe attention kernel
_LOG_LINES = 40  # of a failed compiler run that an error message quotes


@dataclasses.dataclass(frozen=True)
class Unit:
    """One shared object to be: everything that decides its content, but the compiler.

    Attributes:
        name: Stem of the files.
        target: Where it runs, e.g. ``"sm_90"`` or ``"host"``.
        source: Text of its one translation unit.
        suffix: Of the source file, ``".cu"`` or ``".cpp"``.
        flags: Compiler flags before the source.
        libraries: Linker flags after the source; may hold paths, which are not part of the key.
        project_dirs: Include folders whose headers enter the key with their bytes.
        external_dirs: Include folders known by ``external`` only.
        external: Names and versions of what ``external_dirs`` hold.
    """

    name: str
    target: str
    source: str
    suffix: str
    flags: tuple[str, ...]
    libraries: tuple[str, ...] = ()
    project_dirs: tuple[Path, ...] = ()
    external_dirs: tuple[Path, ...] = ()
    external: tuple[str, ...] = ()

    def source_key(self) -> str:
        """Digest of sources and flags; the same for every compiler."""
        headers = project_headers(self.source.encode(), self.project_dirs)
        digests = sorted(
            (Path(path).name, hashlib.sha256(data).hexdigest()) for path, data in headers.items()
        )
        libraries = [flag for flag in self.libraries if not flag.startswith("-L")]
        content = [self.name, self.target, self.source, self.suffix, self.flags, libraries]
        text = json.dumps([*content, self.external, digests])
        return hashlib.sha256(text.encode()).hexdigest()

    def key(self, compiler: Compiler) -> str:
        """Digest of everything that decides the shared object's content."""
        text = f"{self.source_key()} {compiler.identity()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def command(self, compiler: Compiler, source: Path, output: Path) -> list[str]:
        includes = [f"-I{folder}" for folder in (*self.project_dirs, *self.external_dirs)]
        head = [str(compiler.path), *compiler.arguments, *self.flags, *includes]
        return [*head, str(source), "-o", str(output), *self.libraries]


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """What became of one unit.

    Attributes:
        unit: The unit.
        artefact: The entry, or None if it could not be built.
        seconds: Of the compiler run; 0.0 where the entry was there already.
        error: The whole message where ``artefact`` is None.
    """

    unit: Unit
    artefact: cache.Artefact | None
    seconds: float
    error: str | None = None


def resources(log: str) -> dict[str, int]:
    """Registers per thread and spilled bytes per thread, from what ``ptxas -v`` printed."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not registers:
        return {}
    return {
        "registers": max(registers),
        "spill_bytes": max((int(stores) + int(loads) for stores, loads in spills), default=0),
    }


def find(unit: Unit, compiler: Compiler) -> cache.Artefact | None:
    """The unit's entry in the user's cache, if it is there and whole. Writes nothing."""
    folder = cache.cache_dir()
    try:
        cache.check_private(folder)
    except OSError:
        return None
    key = unit.key(compiler)
    return cache.find(folder, _stem(unit, key), key=key)


def _stem(unit: Unit, key: str) -> str:
    return f"{unit.name}-{unit.target}-{key[:32]}"


def _compile(unit: Unit, compiler: Compiler, folder: Path, stem: str, key: str) -> cache.Artefact:
    """Builds the unit into ``folder``; the caller holds the entry's lock."""
    # The lock is ours, so whoever left these behind was killed.
    for left_over in folder.glob(f"tmp-{stem}-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"tmp-{stem}-") as temporary:
        source = Path(temporary) / f"{unit.name}{unit.suffix}"
        output = Path(temporary) / f"{unit.name}.so"
        source.write_text(unit.source)
        command = unit.command(compiler, source, output)
        started = time.monotonic()
        # nvcc puts its own intermediate files where TMPDIR says: keep them in the private folder.
        done = subprocess.run(
            command,
            env={**os.environ, "TMPDIR": temporary},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        seconds = time.monotonic() - started
        if done.returncode != 0 or not output.is_file():
            tail = "\n".join(done.stdout.splitlines()[-_LOG_LINES:])
            raise BuildError(
                f"flashcute: building {unit.name} for {unit.target} failed with exit status "
                f"{done.returncode}\n{tail}\ncommand: {' '.join(command)}"
            )
        if unit.key(compiler) != key:
            raise BuildError(
                f"flashcute: the sources of {unit.name} changed while it was built; try again"
            )
        meta = {
            "name": unit.name,
            "target": unit.target,
            "key": key,
            "source_key": unit.source_key(),
            "compiler": compiler.version,
            "seconds": round(seconds, 2),
            "log": done.stdout,
            **resources(done.stdout),
        }
        return cache.publish(output, folder, stem, meta)


def build(unit: Unit, compiler: Compiler) -> BuildResult:
    """The unit's entry in the user's cache, built if it is not there.

    Raises:
        BuildError: where the compiler fails or the cache folder cannot be used.
    """
    artefact = find(unit, compiler)
    if artefact is not None:
        return BuildResult(unit, artefact, 0.0)
    folder = cache.writable_cache_dir()
    key = unit.key(compiler)
    stem = _stem(unit, key)
    lock = filelock.FileLock(folder / "locks" / f"{stem}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        logger.warning("flashcute: another process builds %s, waiting for it", unit.name)
        lock.acquire()
    try:
        artefact = cache.find(folder, stem, key=key)
        if artefact is not None:
            return BuildResult(unit, artefact, 0.0)
        artefact = _compile(unit, compiler, folder, stem, key)
        return BuildResult(unit, artefact, artefact.meta["seconds"])
    finally:
        lock.release()


def default_jobs() -> int:
    """``FLASHCUTE_JOBS`` if set, else one per core as far as memory reaches."""
    jobs = env.read().jobs
    if jobs is not None:
        return jobs
    return max(1, min(len(os.sched_getaffinity(0)), available_memory() // BYTES_PER_JOB))


def available_memory() -> int:
    """Bytes this process may still use: of the machine, and of its control group."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with contextlib.suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if found:
            free = int(found[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free


def build_many(
    units: Sequence[Unit],
    compiler: Compiler,
    jobs: int | None = None,
    progress: Callable[[BuildResult], None] | None = None,
) -> list[BuildResult]:
    """Builds ``units``, up to ``jobs`` at once, and returns a result for each, in their order.

    A unit that fails is reported in its result and does not stop the others. ``progress`` is
    called from this thread as each one finishes.
    """

    def one(unit: Unit) -> BuildResult:
        try:
            return build(unit, compiler)
        except BuildError as error:
            return BuildResult(unit, None, 0.0, str(error))

    with concurrent.futures.ThreadPoolExecutor(jobs or default_jobs()) as pool:
        futures = [pool.submit(one, unit) for unit in units]
        try:
            for future in concurrent.futures.as_completed(futures):
                if progress is not None:
                    progress(future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [future.result() for future in futures]
