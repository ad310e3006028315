"""Builds shared objects: one source, one compiler run, one entry of the cache.

All entries missing for a call are built by one run of ninja, with an edge for each compiler run.
Where FLASHCUTE_JOBS gives fewer jobs than cores, a run takes only a few entries (with one job,
one), so that other processes that need the same entries can build some of them meanwhile. Every
word of a command is quoted, so no path or variable is parsed as a command. Every entry has a file
lock, which the operating system releases when its holder dies. Processes that need the same entry
build it once. No process waits for a lock while it holds another, so there is no deadlock.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import platform
import re
import select
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .. import env
from . import cache
from .sources import project_headers
from .toolchain import BuildError, Compiler

logger = logging.getLogger("flashcute")

BYTES_PER_JOB = 5 << 30  # peak memory of one nvcc on a CuTe attention kernel
_AT_A_TIME = 4  # entries for each job, in a run that leaves others to other processes
_LOG_LINES = 40  # of a failed compiler run that an error message quotes
_NINJA_STATUS = "finished: "  # begins the line that ninja prints as an edge ends
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_TICK = 0.5  # seconds between looks at what is being compiled

# Compiler runs with one header: a precompiled one costs one run and saves a third of each.
_PRECOMPILE_FROM = 5

# For each header's key: how many compiler runs of this process had it, and its precompiled file,
# which is None if that failed.
_compiled: collections.Counter[str] = collections.Counter()
_headers: dict[str, Path | None] = {}

# Units that are being compiled, and for how many seconds each.
Running = Sequence[tuple["Unit", float]]


@dataclasses.dataclass(frozen=True)
class Unit:
    """One shared object to build: everything that determines its content, except the compiler.

    Attributes:
        name: Stem of the files.
        target: Where it runs, e.g. ``"sm_90"`` or ``"host"``.
        source: Text of its one translation unit.
        suffix: Suffix of the source file, ``".cu"`` or ``".cpp"``.
        flags: Compiler flags before the source.
        libraries: Linker flags after the source; may hold paths, which are not part of the key.
        project_dirs: Include folders whose headers enter the key with their bytes.
        external_dirs: Include folders that enter the key through ``external`` only.
        overriding_dirs: Include folders searched before all others, whose files all enter the key:
            what ``external_dirs`` hold may include some of them.
        external: Names and versions of what ``external_dirs`` hold.
        header: A unit of a precompiled header, whose text comes before ``source``. Its entry is
            read instead where it has been built.
    """

    name: str
    target: str
    source: str
    suffix: str
    flags: tuple[str, ...]
    libraries: tuple[str, ...] = ()
    project_dirs: tuple[Path, ...] = ()
    external_dirs: tuple[Path, ...] = ()
    overriding_dirs: tuple[Path, ...] = ()
    external: tuple[str, ...] = ()
    header: Unit | None = None

    def source_key(self) -> str:
        """Digest of sources, flags and the host's architecture; the same for every compiler."""
        headers = project_headers(self.source.encode(), self.project_dirs)
        digests = sorted(
            (Path(path).name, hashlib.sha256(data).hexdigest()) for path, data in headers.items()
        )
        for folder in self.overriding_dirs:
            for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                name = str(path.relative_to(folder))
                digests.append((name, hashlib.sha256(path.read_bytes()).hexdigest()))
        libraries = [flag for flag in self.libraries if not flag.startswith("-L")]
        content = [self.name, self.target, self.source, self.suffix, self.flags, libraries]
        if self.header is not None:
            content.append(self.header.source_key())
        # A home folder can serve x86-64 and Arm nodes.
        text = json.dumps([*content, platform.machine(), self.external, digests])
        return hashlib.sha256(text.encode()).hexdigest()

    def key(self, compiler: Compiler) -> str:
        """Digest of everything that determines the shared object's content."""
        text = f"{self.source_key()} {compiler.identity()}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def file(self) -> str:
        """Name of the source file."""
        return f"{self.name}{self.suffix}"

    def command(self, compiler: Compiler) -> list[str]:
        """Returns the command, which runs in the working folder: no path of it is in the result."""
        folders = (*self.overriding_dirs, *self.project_dirs, *self.external_dirs)
        includes = [f"-I{folder}" for folder in folders]
        if self.suffix != ".cu":  # for __FILE__; no kernel has one
            includes += [f"-fmacro-prefix-map={folder}/=" for folder in folders]
        if self.header is not None:
            includes += ["-include", self.header.file]
        head = [str(compiler.path), *compiler.arguments, *self.flags, *includes]
        return [*head, self.file, "-o", f"{self.name}.so", *self.libraries]


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """The result of building one unit.

    Attributes:
        unit: The unit.
        artefact: The entry, or None if it could not be built.
        seconds: Duration of the compiler run; 0.0 where the entry was in the cache.
        error: The message where ``artefact`` is None.
    """

    unit: Unit
    artefact: cache.Artefact | None
    seconds: float
    error: str | None = None


def resources(log: str) -> dict[str, int]:
    """Parses what ``ptxas -v`` printed: registers, spilled bytes and stack frame of a thread.

    The stack frame holds the spills and the arrays whose indices are unknown at compile time.
    """
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    frames = [int(n) for n in re.findall(r"(\d+) bytes stack frame", log)]
    if not registers:
        return {}
    return {
        "registers": max(registers),
        "stack_bytes": max(frames, default=0),
        "spill_bytes": max((int(stores) + int(loads) for stores, loads in spills), default=0),
    }


def find(unit: Unit, compiler: Compiler | None) -> cache.Artefact | None:
    """Finds the unit's entry in the user's cache, if it exists and is intact. Writes nothing.

    Without a compiler, e.g. where a cache was filled in another shell or image, an entry of any
    compiler is taken, by the rule for prebuilt files: the newest one of the same sources.
    """
    folder = cache.cache_dir()
    try:
        cache.check_private(folder)
    except OSError:
        return None
    if compiler is not None:
        key = unit.key(compiler)
        return cache.find(folder, _stem(unit, key), key=key)
    source_key = unit.source_key()
    records = folder.glob(f"{unit.name}-{unit.target}-*.json")
    records = sorted(records, key=lambda record: record.stat().st_mtime, reverse=True)
    found = (cache.find(folder, record.stem, source_key=source_key) for record in records)
    return next(filter(None, found), None)


def _stem(unit: Unit, key: str) -> str:
    return f"{unit.name}-{unit.target}-{key[:32]}"


@dataclasses.dataclass(frozen=True, eq=False)
class _Edge:
    """A unit to build, with its entry's lock, which is held, and its private build folder."""

    unit: Unit
    compiler: Compiler
    key: str
    lock: cache.Lock
    folder: Path

    @property
    def command(self) -> str:
        return shlex.join(self.unit.command(self.compiler))

    @property
    def _output(self) -> Path:
        return self.folder / f"{self.unit.name}.so"

    def seconds(self) -> float | None:
        """Returns for how long its compiler has run; None before its start and after its end."""
        with contextlib.suppress(FileNotFoundError):
            if not (self.folder / "status").exists():
                return max(0.0, time.time() - (self.folder / "started").stat().st_mtime)
        return None

    def prepare(self) -> str:
        """Writes the source and returns the shell command for ninja."""
        (self.folder / self.unit.file).write_text(self.unit.source)
        header = self.unit.header
        if header is not None:
            (self.folder / header.file).write_text(header.source)
            built = _headers.get(header.key(self.compiler))
            if built is not None:  # without it, or if it is removed now, the text is compiled
                (self.folder / f"{header.file}.gch").symlink_to(built)
        here = shlex.quote(str(self.folder))
        # TMPDIR: nvcc's intermediate files go to the private folder.
        return (
            f"cd {here} || exit; : > started; TMPDIR={here} {self.command} > log 2>&1; "
            "status=$?; echo $status > status; exit $status"
        )

    def publish(
        self, cache_folder: Path, report: str
    ) -> tuple[cache.Artefact | None, float, str | None]:
        """Publishes the finished edge's output as an entry; ``report`` is ninja's output so far.

        Returns the fields of :class:`BuildResult` after ``unit``.
        """
        try:
            with cache.writing(cache_folder):
                artefact = self._publish(cache_folder, report)
            return artefact, artefact.meta["seconds"], None
        except BuildError as error:
            return None, 0.0, str(error)
        finally:
            self.lock.release()  # at once: another process may wait for this entry only

    def _publish(self, cache_folder: Path, report: str) -> cache.Artefact:
        unit = self.unit
        try:
            log = (self.folder / "log").read_text(errors="replace")
            status = (self.folder / "status").read_text().strip()
        except FileNotFoundError:  # never started, or killed together with its shell
            log, status = report, "unknown"
        if status != "0" or not self._output.is_file():
            # On a full disk there may be no space for the log that would say so.
            free = shutil.disk_usage(cache_folder).free
            if cache.is_full(log) or (not log and free < cache.BYTES_PER_BUILD):
                raise cache.no_space(cache_folder)
            tail = "\n".join(log.splitlines()[-_LOG_LINES:])
            raise BuildError(
                f"flashcute: building {unit.name} for {unit.target} failed with exit status "
                f"{status}\n{tail}\ncommand: {self.command}"
            )
        if unit.key(self.compiler) != self.key:
            raise BuildError(
                f"flashcute: the sources of {unit.name} changed while it was built; try again"
            )
        started, ended = ((self.folder / name).stat().st_mtime for name in ("started", "status"))
        meta = {
            "name": unit.name,
            "target": unit.target,
            "key": self.key,
            "source_key": unit.source_key(),
            "compiler": self.compiler.version,
            "seconds": round(ended - started, 2),
            "log": log,
            **resources(log),
        }
        return cache.publish(self._output, cache_folder, _stem(unit, self.key), meta)


def _take(
    unit: Unit, compiler: Compiler, key: str, folder: Path, stack: contextlib.ExitStack
) -> _Edge | cache.Artefact | None:
    """Returns the unit's edge, its entry if it exists, or None if another process builds it.

    Never waits, so that no process waits while it holds a lock. ``stack`` releases the edge's lock
    and folder.
    """
    stem = _stem(unit, key)
    lock = cache.Lock(folder, stem)
    if not lock.acquire():
        return None
    stack.callback(lock.release)
    artefact = cache.find(folder, stem, key=key)
    if artefact is not None:
        lock.release()
        return artefact
    # This process holds the lock, so these folders are left over from builds that were killed.
    for left_over in folder.glob(f"tmp-{stem}-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    private = tempfile.TemporaryDirectory(dir=folder, prefix=f"tmp-{stem}-")
    return _Edge(unit, compiler, key, lock, Path(stack.enter_context(private)))


def clean(older_than: float | None = None) -> tuple[int, int]:
    """Removes entries of the user's cache, and the folders of builds that were killed.

    Entries being built stay. So do the lock files, which are empty: removing a lock file would let
    two processes hold the same lock. A process that has loaded an entry is not affected.

    Args:
        older_than: Only entries built more than this many seconds ago.

    Returns:
        The number of files and folders removed, and their bytes.

    Raises:
        BuildError: where the folder is not the user's own.
        OSError: where it does not exist.
    """
    folder = cache.cache_dir()
    count = size = 0
    for stem, paths in cache.contents(folder).items():
        lock = cache.Lock(folder, stem)
        if not lock.acquire():
            continue
        try:
            # Records first: a shared object without a record is not an entry.
            for path in paths:
                if older_than is None or time.time() - path.stat().st_mtime > older_than:
                    size += cache.bytes_of(path)
                    count += 1
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        finally:
            lock.release()
    return count, size


def find_ninja() -> str:
    """Finds the program of the package ninja, else the one on PATH."""
    with contextlib.suppress(ImportError):
        import ninja

        path = os.path.join(ninja.BIN_DIR, "ninja")
        if os.path.isfile(path):
            return path
    path = shutil.which("ninja")
    if path is None:
        raise BuildError(
            "flashcute: expected ninja, got neither the program of the Python package nor one on "
            "PATH; `pip install --force-reinstall ninja`"
        )
    return path


def _lines(process: subprocess.Popen, every: float) -> Iterator[str | None]:
    """Yields the lines that ``process`` prints, and None after ``every`` seconds without output."""
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    rest = b""
    while True:
        if not poll.poll(1000 * every):
            yield None
            continue
        data = os.read(process.stdout.fileno(), 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode(errors="replace") + "\n" for line in lines)
    if rest:
        yield rest.decode(errors="replace")


def _run_ninja(
    edges: Sequence[_Edge], jobs: int, watch: Callable[[Running], None]
) -> Iterator[tuple[_Edge, str]]:
    """Builds ``edges`` in one run of ninja; yields each as it ends, with ninja's output so far."""
    # build.ninja is in the first unit's folder, so that it is removed with it after a killed run.
    folder = edges[0].folder
    # Ninja looks for these names in the working folder, where no such file can exist.
    names = {f"{edge.folder.name}.built": edge for edge in edges}
    # builddir: otherwise ninja writes its log to the working folder.
    lines = [f"builddir = {_ninja_value(str(folder))}"]
    lines += ["rule compile", "  command = $line", "  description = $out"]
    with cache.writing(folder.parent):
        for name, edge in names.items():
            lines += [f"build {name}: compile", f"  line = {_ninja_value(edge.prepare())}"]
        (folder / "build.ninja").write_text("\n".join(lines) + "\n")
    process = subprocess.Popen(
        [find_ninja(), "-f", str(folder / "build.ninja"), "-j", str(jobs), "-k", "0"],
        # English messages, as cache.is_full() searches them.
        env={**os.environ, "NINJA_STATUS": _NINJA_STATUS, "LC_ALL": "C"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    report = ""
    try:
        for line in _lines(process, _TICK):
            if line is None:
                seconds = ((edge.unit, edge.seconds()) for edge in names.values())
                watch([(unit, s) for unit, s in seconds if s is not None])
                continue
            report += line
            if line.startswith(_NINJA_STATUS):
                yield names.pop(line.removeprefix(_NINJA_STATUS).strip()), report
        process.wait()
    finally:
        process.terminate()  # and its compilers; no effect if it has ended
        process.stdout.close()
        process.wait()
    for edge in names.values():
        yield edge, f"{report}ninja ended with exit status {process.returncode}"


def _ninja_value(text: str) -> str:
    if "\n" in text:
        raise BuildError(
            f"flashcute: expected paths and flags without line breaks, got {text!r}; "
            "set FLASHCUTE_CACHE_DIR or move the package to another folder"
        )
    return text.replace("$", "$$")


def build(unit: Unit, compiler: Compiler) -> BuildResult:
    """Builds the unit if the user's cache lacks it; returns the result with its entry.

    Raises:
        BuildError: where the compiler fails or the cache folder cannot be used.
    """
    (result,) = build_many([unit], compiler, jobs=1)
    if result.artefact is None:
        raise BuildError(result.error)
    return result


def _precompile(units: Sequence[Unit], compiler: Compiler, watch) -> None:
    """Builds the headers of ``units`` that this process has compiled often enough to gain by it.

    One that cannot be built is left out: the compiler's message comes with the units themselves.
    """
    for unit in units:
        header = unit.header
        if header is None:
            continue
        key = header.key(compiler)
        _compiled[key] += 1
        if _compiled[key] >= _PRECOMPILE_FROM and key not in _headers:
            (result,) = build_many([header], compiler, jobs=1, watch=watch)
            _headers[key] = result.artefact and result.artefact.path


def default_jobs() -> int:
    """Returns ``FLASHCUTE_JOBS`` if set, else one job per core, fewer if memory is short."""
    jobs = env.read().jobs
    if jobs is not None:
        return jobs
    return max(1, min(_cores(), available_memory() // BYTES_PER_JOB))


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def available_memory() -> int:
    """Returns the free bytes: the smaller of the machine's and the control group's."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with contextlib.suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if found:
            free = int(found[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        limit, used, stat = (
            (_CONTROL_GROUP / f"memory.{name}").read_text() for name in ("max", "current", "stat")
        )
        # Cached files count as used memory, although their pages are freed when they are wanted.
        files = re.findall(r"^(?:in)?active_file (\d+)$", stat, re.MULTILINE)
        free = min(free, int(limit) - int(used) + sum(map(int, files)))
    return free


def build_many(
    units: Sequence[Unit],
    compiler: Compiler,
    jobs: int | None = None,
    progress: Callable[[BuildResult], None] | None = None,
    watch: Callable[[Running], None] | None = None,
) -> list[BuildResult]:
    """Builds ``units``, up to ``jobs`` at once, and returns a result for each, in their order.

    A unit that fails is reported in its result and does not stop the others. With one job, or
    where ``FLASHCUTE_JOBS`` gives less than the cores, it takes few units at a time and leaves the
    others to other processes. ``progress`` is called from this thread as each one finishes,
    ``watch`` about twice a second with what is being compiled;
    :class:`flashcute.jit.progress.Progress` has both.

    Raises:
        BuildError: where the cache folder or ninja cannot be used.
    """
    results: dict[int, BuildResult] = {}

    def finish(index: int, artefact: cache.Artefact | None, seconds=0.0, error=None) -> None:
        results[index] = BuildResult(units[index], artefact, seconds, error)
        if progress is not None:
            progress(results[index])

    missing = []
    for index, unit in enumerate(units):
        artefact = find(unit, compiler)
        if artefact is None:
            missing.append(index)
        else:
            finish(index, artefact)
    if missing:
        folder = cache.writable_cache_dir()
        keys = {index: units[index].key(compiler) for index in missing}
        # All processes take the units in the same order.
        missing.sort(key=lambda index: _stem(units[index], keys[index]))
        _precompile([units[index] for index in missing], compiler, watch)
    while missing:
        limit = jobs or default_jobs()
        most = len(missing)
        if limit == 1:
            most = 1
        elif jobs is None and env.read().jobs is not None and limit < _cores():
            most = _AT_A_TIME * limit  # other processes have the other cores, and the same limit
        with contextlib.ExitStack() as stack:
            edges: dict[_Edge, int] = {}
            busy, later = [], []
            for index in missing:
                if len(edges) == most:
                    later.append(index)
                    continue
                with cache.writing(folder):
                    taken = _take(units[index], compiler, keys[index], folder, stack)
                if isinstance(taken, _Edge):
                    edges[taken] = index
                elif taken is not None:
                    finish(index, taken)
                else:
                    busy.append(index)
            if edges:
                run = _run_ninja(list(edges), limit, watch or (lambda _: None))
                # Closed before the folders are removed, also if ``progress`` raises.
                for edge, report in stack.enter_context(contextlib.closing(run)):
                    finish(edges[edge], *edge.publish(folder, report))
        if len(busy) == len(missing):
            unit = units[busy[0]]
            lock = cache.Lock(folder, _stem(unit, keys[busy[0]]))
            logger.warning(
                "flashcute: another process builds %s, waiting until it releases %s",
                unit.name,
                lock.path,
            )
            lock.acquire(wait=True)
            lock.release()  # the next round looks for the entry: the other build may have failed
        missing = busy + later
    return [results[index] for index in range(len(units))]
