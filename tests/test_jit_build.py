"""Hazards of a shared cache, each of which really happens here, on a C++ file that builds fast."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_builds
from tiny_builds import answer, counting_compiler, make, runs, start_process, tiny_unit

from flashcute.jit import build, cache, toolchain
from flashcute.jit.toolchain import BuildError, Compiler


@pytest.fixture
def tmp(tmp_path, monkeypatch):
    return tiny_builds.prepare(tmp_path, monkeypatch)


def test_builds_once_then_finds(tmp):
    first, second = make(tmp), make(tmp)
    assert first.seconds > 0
    assert second.seconds == 0
    assert second.artefact == first.artefact
    assert runs(tmp) == 1
    assert answer(first.artefact.path) == 42
    assert (tmp / "cache").stat().st_mode & 0o777 == 0o700


def test_leaves_only_artefact_record_and_lock(tmp):
    stem = make(tmp).artefact.path.stem
    left = {str(p.relative_to(tmp / "cache")) for p in (tmp / "cache").rglob("*")}
    assert left == {f"{stem}.so", f"{stem}.json", "locks", f"locks/{stem}.lock"}


def test_eight_cold_processes_build_once(tmp, monkeypatch):
    monkeypatch.setenv("TEST_GO", str(tmp / "go"))
    monkeypatch.setenv("TEST_SLEEP", "1")
    processes = [start_process() for _ in range(8)]
    time.sleep(1)  # so that all are past their imports and start together
    (tmp / "go").touch()
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, outputs
    assert len({out for out, _ in outputs}) == 1
    assert outputs[0][0].split()[1] == "42"
    assert runs(tmp) == 1


def test_killed_builder_blocks_nobody(tmp, monkeypatch):
    monkeypatch.setenv("TEST_SLEEP", "60")
    killed = start_process(start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while runs(tmp) == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert list((tmp / "cache").glob("tmp-*"))
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        monkeypatch.delenv("TEST_SLEEP")
        result = make(tmp)
    finally:
        os.killpg(killed.pid, signal.SIGKILL)  # the compiler outlived its parent
        killed.communicate()
    assert answer(result.artefact.path) == 42
    assert runs(tmp) == 2
    assert not list((tmp / "cache").glob("tmp-*"))


def test_who_waits_names_the_lock(tmp, monkeypatch):
    monkeypatch.setenv("TEST_SLEEP", "2")
    builds = start_process()
    while runs(tmp) == 0:
        assert builds.poll() is None, builds.communicate()
        time.sleep(0.01)
    waits = start_process()
    _, said = waits.communicate(timeout=60)
    builds.communicate(timeout=60)
    (lock,) = (tmp / "cache" / "locks").iterdir()
    assert f"another process builds tiny, waiting until it releases {lock}" in said
    assert (builds.returncode, waits.returncode, runs(tmp)) == (0, 0, 1)


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty record", "no record", "no object"])
def test_damaged_entry_is_built_again(tmp, damage):
    path = make(tmp).artefact.path
    record = path.with_suffix(".json")
    data = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "empty record":
        record.write_bytes(b"")
    elif damage == "no record":
        record.unlink()
    else:
        path.unlink()
    assert build.find(tiny_unit(tmp), counting_compiler(tmp)) is None
    assert answer(make(tmp).artefact.path) == 42
    assert path.read_bytes()[:4] == b"\x7fELF"
    assert runs(tmp) == 2


def test_record_of_another_entry_is_refused(tmp):
    path = make(tmp).artefact.path
    record = path.with_suffix(".json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "key": "0" * 64}))
    assert build.find(tiny_unit(tmp), counting_compiler(tmp)) is None


def test_changed_header_with_old_time_is_built_again(tmp):
    header = tmp / "include" / "answer.h"
    before = make(tmp)
    times = header.stat()
    header.write_text("constexpr int kAnswer = 43;\n")
    os.utime(header, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = make(tmp)
    assert answer(after.artefact.path) == 43
    assert answer(before.artefact.path) == 42
    assert runs(tmp) == 2


def test_header_changed_during_the_build_is_an_error(tmp, monkeypatch):
    monkeypatch.setenv("TEST_SLEEP", "3")
    process = start_process()
    while runs(tmp) == 0:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    (tmp / "include" / "answer.h").write_text("constexpr int kAnswer = 43;\n")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "changed while it was built" in errors
    assert not list((tmp / "cache").glob("*.so"))


@pytest.mark.parametrize("change", ["source", "flags", "version", "variable", "external", "host"])
def test_key_depends_on(tmp, monkeypatch, change):
    unit, compiler = tiny_unit(tmp), counting_compiler(tmp)
    key = unit.key(compiler)
    assert unit.key(compiler) == key
    fields = {**unit.__dict__}
    if change == "source":
        fields["source"] += "\n"
    elif change == "flags":
        fields["flags"] = ("-shared", "-fPIC", "-O2")
    elif change == "external":
        fields["external"] = ("cutlass 9.9.9",)
    elif change == "version":
        compiler = Compiler(compiler.path, "counting 1.1")
    elif change == "host":
        source_key = unit.source_key()
        monkeypatch.setattr("platform.machine", lambda: "another")
        assert unit.source_key() != source_key
    else:
        monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    assert build.Unit(**fields).key(compiler) != key


def test_no_path_of_the_machine_is_in_the_result(tmp):
    """Prebuilt shared objects are used on other machines. Two builds of a source are equal."""
    header = tmp / "include" / "answer.h"
    header.write_text("inline const char *here() { return __FILE__; }\nconstexpr int kAnswer = 42;")
    source = """#include "answer.h"
extern "C" const char *header() { return here(); }
extern "C" const char *source() { return __FILE__; }
"""
    unit = dataclasses.replace(tiny_unit(tmp), source=source)
    path = build.build(unit, counting_compiler(tmp)).artefact.path
    library, built = ctypes.CDLL(str(path)), path.read_bytes()
    library.header.restype = library.source.restype = ctypes.c_char_p
    assert (library.header(), library.source()) == (b"answer.h", b"tiny.cpp")
    assert str(tmp).encode() not in built
    path.unlink()
    assert build.build(unit, counting_compiler(tmp)).artefact.path.read_bytes() == built


def header_unit(text: str = "inline int number() { return 42; }\n") -> build.Unit:
    flags = ("-shared", "-fPIC", "-x", "c++-header")
    return build.Unit("first", "host", text, ".h", flags)


def including_unit(number: int, header: build.Unit) -> build.Unit:
    source = f'extern "C" int answer() {{ return number() + {number}; }}\n'
    flags = ("-shared", "-fPIC", "-H")  # -H: names the files that are read, into the log
    return build.Unit(f"unit{number}", "host", source, ".cpp", flags, header=header)


def read_precompiled(result: build.BuildResult) -> bool:
    return "! ./first.h.gch" in result.artefact.meta["log"]


@pytest.fixture
def no_headers(monkeypatch):
    monkeypatch.setattr(build, "_compiled", type(build._compiled)())
    monkeypatch.setattr(build, "_headers", {})


def test_a_header_of_many_units_is_precompiled(tmp, no_headers):
    compiler, header = counting_compiler(tmp), header_unit()
    results = [build.build(including_unit(i, header), compiler) for i in range(6)]
    assert [answer(r.artefact.path) for r in results] == [42 + i for i in range(6)]
    assert [read_precompiled(r) for r in results] == [False] * 4 + [True] * 2
    assert runs(tmp) == 7
    # With and without a precompiled header the result and its cache key are the same.
    (built,) = (tmp / "cache").glob("first-host-*.so")
    last = results[-1].artefact
    content = last.path.read_bytes()
    last.path.unlink()
    built.unlink()  # another process may do so; the header's text is then compiled again
    again = build.build(including_unit(5, header), compiler)
    assert not read_precompiled(again)
    assert (again.artefact.path, again.artefact.path.read_bytes()) == (last.path, content)


def test_every_file_of_an_overriding_folder_is_in_the_key(tmp):
    """Headers of other libraries may include such a file, which a search of the unit's own headers
    does not find."""
    folder, compiler = tmp / "overriding", counting_compiler(tmp)
    folder.mkdir()
    header = dataclasses.replace(header_unit(), overriding_dirs=(folder,))
    unit = including_unit(0, header)
    keys = [header.key(compiler), unit.key(compiler)]
    (folder / "number.h").write_text("// not included by name\n")
    assert header.key(compiler) != keys[0] and unit.key(compiler) != keys[1]


def test_units_built_together_share_a_precompiled_header(tmp, no_headers):
    units = [including_unit(i, header_unit()) for i in range(5)]
    results = build.build_many(units, counting_compiler(tmp), 2)
    assert all(read_precompiled(r) for r in results)
    other = including_unit(0, header_unit("inline int number() { return 43; }\n"))
    result = build.build(other, counting_compiler(tmp))
    assert answer(result.artefact.path) == 43
    assert not read_precompiled(result)


def test_a_header_that_does_not_compile_is_an_error_of_its_units(tmp, no_headers):
    units = [including_unit(i, header_unit("int number( {\n")) for i in range(6)]
    results = build.build_many(units, counting_compiler(tmp), 2)
    assert all("first.h" in r.error and "error:" in r.error for r in results)
    assert runs(tmp) == 7  # the header once


def test_compiler_error_is_quoted_and_leaves_nothing(tmp):
    unit = build.Unit("bad", "host", "int answer( { }\n", ".cpp", ("-shared",))
    with pytest.raises(
        BuildError, match=r"building bad for host failed(.|\n)*error:(.|\n)*bad.cpp"
    ):
        build.build(unit, counting_compiler(tmp))
    assert not [p for p in (tmp / "cache").iterdir() if p.name != "locks"]


def test_many_units_report_in_order_and_failures_stop_nobody(tmp):
    flags = ("-shared", "-fPIC")
    units = [
        build.Unit(f"unit{i}", "host", f'extern "C" int answer() {{ return {i}; }}', ".cpp", flags)
        for i in range(5)
    ]
    units[2] = build.Unit("unit2", "host", "not C++", ".cpp", flags)
    seen = []
    results = build.build_many(units, counting_compiler(tmp), 2, seen.append)
    assert [result.unit for result in results] == units
    assert len(seen) == 5
    assert [result.artefact is None for result in results] == [False, False, True, False, False]
    assert "unit2" in results[2].error
    assert [answer(r.artefact.path) for r in results if r.artefact] == [0, 1, 3, 4]


_MANY = """\
import os, sys, time
from pathlib import Path
sys.path.insert(0, os.environ["TEST_FOLDER"])
from test_jit_build import build, counting_compiler, numbered_unit
while not os.path.exists(os.environ["TEST_GO"]):
    time.sleep(0.001)
units = [numbered_unit(int(i)) for i in sys.argv[1:]]
results = build.build_many(units, counting_compiler(Path(os.environ["TEST_TMP"])), 2)
print(*(result.artefact.path.name for result in results))
"""


def numbered_unit(number: int) -> build.Unit:
    source = f'extern "C" int answer() {{ return {number}; }}'
    return build.Unit(f"unit{number}", "host", source, ".cpp", ("-shared", "-fPIC"))


def test_overlapping_sets_build_each_unit_once(tmp, monkeypatch):
    monkeypatch.setenv("TEST_GO", str(tmp / "go"))
    monkeypatch.setenv("TEST_SLEEP", "0.5")
    sets = ["0 1 2 3", "3 2 1 0", "2 4 0", "4 3 3"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _MANY, *numbers.split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for numbers in sets
    ]
    time.sleep(1)  # so that all are past their imports and start together
    (tmp / "go").touch()
    for numbers, process in zip(sets, processes, strict=True):
        out, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert [name.split("-")[0] for name in out.split()] == [f"unit{n}" for n in numbers.split()]
    assert runs(tmp) == 5
    assert not list((tmp / "cache").glob("tmp-*"))


def test_one_run_of_ninja_publishes_each_unit_as_it_ends(tmp, monkeypatch):
    monkeypatch.setenv("TEST_SLEEP", "0.5")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        build.subprocess, "Popen", lambda *a, **k: started.append(a[0]) or popen(*a, **k)
    )
    there = []
    units = [numbered_unit(i) for i in range(3)]
    build.build_many(
        units,
        counting_compiler(tmp),
        2,
        lambda result: there.append(len(list((tmp / "cache").glob("*.json")))),
    )
    assert there == [1, 2, 3]
    assert [Path(command[0]).name for command in started] == ["ninja"]


@pytest.mark.parametrize(
    ("by", "jobs", "cores", "most"),
    [
        ("environment", 1, 1, 1),
        ("environment", 1, 4, 1),
        ("environment", 2, 4, 4),
        ("environment", 2, 2, 5),
        ("argument", 1, 4, 1),
        ("argument", 2, 4, 5),  # one command may keep all its compilers busy
        ("memory", 1, 4, 1),
        ("memory", 2, 4, 5),  # other processes would take the same memory
    ],
)
def test_few_jobs_leave_the_units_that_wait_to_other_processes(
    tmp, monkeypatch, by, jobs, cores, most
):
    units = sorted((numbered_unit(i) for i in range(5)), key=lambda unit: unit.name)
    compiler = counting_compiler(tmp)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(build, "_AT_A_TIME", 2)
    monkeypatch.setattr(build, "available_memory", lambda: jobs * build.BYTES_PER_JOB)
    monkeypatch.delenv("FLASHCUTE_JOBS", raising=False)
    if by == "environment":
        monkeypatch.setenv("FLASHCUTE_JOBS", str(jobs))

    def held(unit):
        lock = cache.Lock(tmp / "cache", build._stem(unit, unit.key(compiler)))
        free = lock.acquire()
        lock.release()
        return not free

    seen = []
    build.build_many(
        units,
        compiler,
        jobs if by == "argument" else None,
        lambda _: seen.append(sum(map(held, units))),
    )
    # Locks of built units are released, and those of later units are not taken yet.
    rounds = [min(most, 5 - begin) for begin in range(0, 5, most)]
    assert seen == [held for taken in rounds for held in reversed(range(taken))]


def test_an_interrupted_run_ends_its_compilers_and_leaves_nothing(tmp, monkeypatch):
    def interrupt(result):
        raise KeyboardInterrupt

    monkeypatch.setenv("TEST_SLEEP", "1")
    with pytest.raises(KeyboardInterrupt):
        build.build_many([numbered_unit(i) for i in range(3)], counting_compiler(tmp), 1, interrupt)
    time.sleep(1.5)
    assert runs(tmp) <= 2  # the second may start before the first is reported
    assert len(list((tmp / "cache").glob("*.so"))) == 1
    assert not list((tmp / "cache").glob("tmp-*"))


def test_a_path_ninja_cannot_hold_is_an_error(tmp, monkeypatch):
    monkeypatch.setenv("FLASHCUTE_CACHE_DIR", str(tmp / "a\nb"))
    with pytest.raises(BuildError, match="without line breaks"):
        make(tmp)


def test_what_compiles_now_is_shown_with_its_seconds(tmp, monkeypatch):
    monkeypatch.setenv("TEST_SLEEP", "1.5")
    seen = []
    units = [numbered_unit(0), numbered_unit(1)]
    build.build_many(units, counting_compiler(tmp), 1, watch=seen.append)
    assert {len(running) for running in seen} <= {0, 1}  # one compiler at a time
    for unit in units:
        seconds = [s for running in seen for u, s in running if u == unit]
        assert seconds == sorted(seconds) and seconds[-1] > seconds[0] >= 0


def test_ninja_on_the_path_serves_where_the_package_is_missing(tmp, monkeypatch):
    monkeypatch.setitem(sys.modules, "ninja", None)  # the import fails
    monkeypatch.setenv("PATH", str(tmp))
    with pytest.raises(BuildError, match="expected ninja, got neither"):
        make(tmp)
    (tmp / "ninja").touch(0o755)
    assert build.find_ninja() == str(tmp / "ninja")


_FULL_DISK = """\
#!/bin/sh
[ "$1" = --version ] && exec g++ --version
echo "fatal error: error writing to /tmp/x.s: No space left on device"
exit 1
"""


def test_a_full_disk_is_said_as_such(tmp):
    (tmp / "compiler").write_text(_FULL_DISK)
    with pytest.raises(BuildError, match=r"no space left in \S*cache: .* up to 100 MiB for each"):
        make(tmp)


def test_a_disk_too_full_for_the_compilers_message(tmp, monkeypatch):
    usage = shutil.disk_usage(tmp)._replace(free=1 << 20)
    (tmp / "compiler").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(BuildError, match="building tiny for host failed with exit status 1"):
        make(tmp)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(BuildError, match=r"no space left in \S*cache: 1 MiB are free"):
        make(tmp)


@pytest.mark.parametrize("function", ["_take", "_publish", "prepare"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_between_is_said_as_such(tmp, monkeypatch, function, code):
    def fail(*arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(build if function == "_take" else build._Edge, function, fail)
    with pytest.raises(BuildError, match="no space left in"):
        make(tmp)


def test_no_shell_sees_the_paths(tmp, monkeypatch):
    folder = tmp / "a b; touch injected; $(touch injected) $out '|: $"
    monkeypatch.setenv("FLASHCUTE_CACHE_DIR", str(folder))
    assert answer(make(tmp).artefact.path) == 42
    assert not list(tmp.rglob("injected")) and not Path("injected").exists()


def test_resources_of_a_ptxas_log():
    log = (
        "ptxas info    : Function properties for f\n"
        "    32 bytes stack frame, 28 bytes spill stores, 36 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 32 bytes cumulative stack size\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 40 registers\n"
    )
    assert build.resources(log) == {"registers": 255, "stack_bytes": 32, "spill_bytes": 64}
    assert build.resources("") == {}


def test_jobs(monkeypatch):
    monkeypatch.setenv("FLASHCUTE_JOBS", "7")
    assert build.default_jobs() == 7
    monkeypatch.delenv("FLASHCUTE_JOBS")
    monkeypatch.setattr(build, "available_memory", lambda: 3 * build.BYTES_PER_JOB - 1)
    assert build.default_jobs() == min(2, len(os.sched_getaffinity(0)))
    monkeypatch.setattr(build, "available_memory", lambda: 1)
    assert build.default_jobs() == 1


def test_files_that_were_read_do_not_count_as_used_memory(monkeypatch, tmp_path):
    """A control group counts the file cache as used, for example after weights have been loaded."""
    monkeypatch.setattr(build, "_CONTROL_GROUP", tmp_path)
    for name, text in {
        "max": f"{2 << 20}\n",
        "current": f"{(2 << 20) - 4096}\n",
        "stat": f"anon 65536\nfile {1 << 20}\ninactive_file {1 << 19}\nactive_file {1 << 18}\n"
        "slab 4096\nworkingset_refault_file 12345\n",
    }.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert build.available_memory() == 4096 + (1 << 19) + (1 << 18)
    (tmp_path / "memory.max").write_text("max\n")
    assert build.available_memory() > 3 << 20


def test_nvcc_builds_through_the_same_path(tmp):
    try:
        compiler = toolchain.find_nvcc()
    except BuildError as error:
        pytest.skip(str(error))
    unit = build.Unit(
        name="tiny_cuda",
        target="sm_80",
        source="__global__ void scale(float *x) { x[threadIdx.x] *= 2; }\n"
        'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n',
        suffix=".cu",
        flags=(*toolchain.NVCC_FLAGS, "-gencode=arch=compute_80,code=sm_80"),
    )
    made = build.build(unit, compiler).artefact
    assert answer(made.path) == 42
    assert str(tmp).encode() not in made.path.read_bytes()
    assert b"bin/.." not in made.path.read_bytes()  # nvcc names its own libraries so
    assert made.meta["registers"] > 0
    assert made.meta["spill_bytes"] == 0
