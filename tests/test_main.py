"""The command line. Its builds are of one small kernel, which stays in the user's cache."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import flashcute
from flashcute import __main__ as cli
from flashcute import heuristics, shipped
from flashcute.jit import BuildError, binding, cache, kernels, sources, toolchain

CONFIG = heuristics.fwd_config("fp16", 32, False, (8, 0))
ONE = (
    *("--pass", "fwd"),
    "--head-dim",
    "32",
    "--dtype",
    "fp16",
    "--causal",
    "no",
    "--target",
    "80",
)


ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(cli, "targets_at_hand", list)


def run(*arguments, **options):
    """Runs the command in a process of its own."""
    command = [sys.executable, "-m", "flashcute", *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **options)


def test_build_without_gpu_asks_for_a_target(no_gpu, capsys):
    assert cli.main(["build", "--all"]) == 1
    assert "got none; name it with --target" in capsys.readouterr().err


def test_build_of_nothing_asks_for_a_choice(capsys):
    assert cli.main(["build", "--target", "80"]) == 1
    assert "say --all" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["75", "sm_80"])
def test_unknown_target(capsys, target):
    assert cli.main(["build", "--all", "--target", target]) == 1
    assert f"got target='{target}'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--head-dim", "80"], ["--jobs", "0"], ["--jobs", "x"]])
def test_wrong_argument(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["build", "--all", *arguments])
    assert error.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["profile", "--fast"], ["cache", "clean", "all"], ["info", "--al", "--prebuilt"]]
)
def test_an_unknown_argument_is_said_with_the_options_of_the_command(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith(f"usage: python -m flashcute {arguments[0]} ")
    assert f"flashcute {arguments[0]}: error: unrecognized arguments: {arguments[-1]}" in message


def test_selection_is_the_product_of_the_choices():
    args = cli._parser().parse_args(
        ["build", "--pass", "fwd", "--head-dim", "64", "128", "--causal", "yes"]
    )
    configs = cli._choose_configs(args, "86")
    assert [(c.head_dim, c.dtype, c.mask) for c in configs] == [
        (64, "fp16", "causal"),
        (64, "bf16", "causal"),
        (128, "fp16", "causal"),
        (128, "bf16", "causal"),
    ]
    assert {c.kind for c in configs} == {"fwd"}


def _backwards_of_hopper():
    """Returns the backward kernels that ship for Hopper; those of the sm80 class do not."""
    return heuristics.shipped_bwd_configs(90)


def test_all_is_what_ships_with_the_tiles_of_the_target():
    args = cli._parser().parse_args(["build", "--all"])
    forward, backward = heuristics.shipped_configs(90), _backwards_of_hopper()
    of_calls = shipped.configs_of_calls((9, 0))
    assert cli._choose_configs(args, "90") == forward + backward + of_calls
    small = {c for c in cli._choose_configs(args, "86") if c.head_dim == 256 and c.kind == "fwd"}
    assert small and small.isdisjoint(heuristics.shipped_configs())


def test_class_asked_for_is_the_class_built(monkeypatch):
    """A comparison of the classes needs kernels of the sm80 class that are built for Hopper."""
    args = cli._parser().parse_args(["build", "--all"])
    monkeypatch.setenv("FLASHCUTE_ARCH", "80")
    forward, backward = heuristics.shipped_configs(80), heuristics.shipped_bwd_configs(80)
    configs = cli._choose_configs(args, "90")
    assert configs == forward + backward + shipped.configs_of_calls((9, 0))
    assert {config.arch for config in configs} == {80}


def test_a_pass_is_a_choice_of_kernels():
    args = cli._parser().parse_args(["build", "--pass", "bwd", "--causal", "both"])
    assert cli._chooses(args) and not cli._chooses(cli._parser().parse_args(["build"]))
    of_calls = [c for c in shipped.configs_of_calls((8, 0)) if c.kind == "bwd"]
    assert of_calls
    dense = [c for c in shipped.dense_configs((8, 0)) if c.kind == "bwd"]
    assert len(dense) == len(heuristics.shipped_bwd_configs(80))
    assert cli._choose_configs(args, "80") == dense + of_calls


def test_a_mask_is_a_choice_of_kernels_without_options():
    for causal, mask in (("yes", "causal"), ("no", "none")):
        args = cli._parser().parse_args(["build", "--pass", "bwd", "--causal", causal])
        wanted = [c for c in _backwards_of_hopper() if c.mask == mask]
        assert cli._choose_configs(args, "90") == wanted


@pytest.mark.parametrize("config", [CONFIG, heuristics.bwd_config("bf16", 192, "causal")])
def test_message_of_a_missing_kernel_is_a_command_that_builds_it(config):
    args = cli._parser().parse_args(["build", *kernels.build_arguments(config, "80").split()])
    chosen = cli._choose_configs(args, *args.target)
    # For a backward it also builds the one with a single kernel for all gradients.
    assert config in chosen and len(chosen) == (1 if config.kind == "fwd" else 2)
    assert {(c.kind, c.head_dim, c.dtype, c.mask) for c in chosen} == {
        (config.kind, config.head_dim, config.dtype, config.mask)
    }


def test_build_places_kernels_that_are_found_as_prebuilt(tmp_path, monkeypatch, capsys):
    try:
        toolchain.find_nvcc()
    except BuildError as error:
        pytest.skip(str(error))
    assert cli.main(["build", *ONE, "-o", str(tmp_path / "out")]) == 0
    placed = tmp_path / "out" / "sm_80" / f"{CONFIG.full_name}.so"
    assert placed.is_file()
    assert json.loads(placed.with_suffix(".json").read_text())["spill_bytes"] == 0
    assert CONFIG.full_name in capsys.readouterr().out
    # Wheels contain these files, so they must not have any path of this machine.
    for path in (placed, tmp_path / "out" / "host" / "flash_api.so"):
        for folder in (ROOT, cache.cache_dir(), Path(torch.__file__).parent):
            assert str(folder).encode() not in path.read_bytes()
        assert b"tmp-flash" not in path.read_bytes()
    monkeypatch.setattr(sources, "prebuilt_dir", lambda: tmp_path / "out")
    monkeypatch.setattr(kernels, "_loaded", {})
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert kernels.get_kernel(CONFIG, "86").path == placed


def test_failed_build_is_reported_and_is_the_exit_status(tmp_path, monkeypatch, capsys):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 1 || { echo nvcc is out of order; exit 1; }\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert cli.main(["build", *ONE, "-o", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr()
    assert "nvcc is out of order" in printed.err
    assert "1 of 2 shared objects" in printed.out


def test_info_describes_a_machine_with_nothing(no_gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "no-cuda"))
    monkeypatch.setenv("CXX", "no-compiler")
    monkeypatch.setenv("FLASHCUTE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "prebuilt_dir", lambda: tmp_path / "prebuilt")
    assert cli.main(["info", "--all"]) == 0
    printed = capsys.readouterr().out
    assert "expected nvcc in one of" in printed
    assert "got CXX=no-compiler" in printed
    assert str(tmp_path / "cache") in printed
    for target in ("80", "90"):
        for config in cli._choose_configs(cli._parser().parse_args(["info"]), target):
            row = next(
                x
                for x in printed.splitlines()
                if f"{config.full_name} " in f"{x} " and f" sm_{target} " in x
            )
            assert "not built" in row and str(config.smem_bytes) in row


def test_info_is_short_unless_asked_and_ends_with_its_summary(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLASHCUTE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "prebuilt_dir", lambda: tmp_path / "prebuilt")
    assert cli.main(["info", "--target", "90"]) == 0
    short = capsys.readouterr().out
    count = len(shipped.dense_configs((9, 0))) + len(shipped.configs_of_calls((9, 0)))
    last = f"{count} kernels: 0 prebuilt, 0 cache, {count} not built"
    assert short.splitlines()[-1].endswith(last)
    assert "flash_" not in short
    assert cli.main(["info", "--target", "90", "--all"]) == 0
    whole = capsys.readouterr().out
    assert whole.endswith(short) and len(re.findall("flash_(?:fwd|bwd)", whole)) == count
    assert cli.main(["info", "--target", "90", "--head-dim", "64"]) == 0
    chosen = capsys.readouterr().out
    kernels_of = re.findall(r"flash_(?:fwd|bwd)_hdim(\d+)", chosen)
    assert kernels_of and set(kernels_of) == {"64"}


def gpus(monkeypatch, *capabilities):
    """Makes torch report GPUs of these capabilities; an error in place of one is raised."""

    def capability(device):
        if isinstance(capabilities[device], Exception):
            raise capabilities[device]
        return capabilities[device]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", capability)


def test_a_gpu_without_kernels_is_left_out(monkeypatch, capsys):
    """The machine has a display card beside the GPU that computes."""
    gpus(monkeypatch, (7, 5), (9, 0), (9, 0))
    assert cli._choose_targets(cli._parser().parse_args(["build"])) == ["90"]
    assert "no kernels for sm_75, left out" in capsys.readouterr().err
    monkeypatch.setattr(cli, "_describe_gpus", lambda: "three")
    assert cli.main(["info"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("sm_90: ")
    gpus(monkeypatch, (7, 5))
    assert cli.main(["build", "--all"]) == 1
    said = capsys.readouterr().err
    assert "no kernels for sm_75" in said and "expected a GPU to build for, got none" in said


@pytest.mark.parametrize("error", [RuntimeError, OSError])
def test_info_describes_a_driver_too_old_for_torch(monkeypatch, capsys, error):
    gpus(monkeypatch, error("The NVIDIA driver on your system is too old"))
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "GPU:          The NVIDIA driver on your system is too old" in printed
    assert printed.splitlines()[-1].startswith("sm_90: ")


def test_info_runs_without_torch_and_a_build_names_it(tmp_path):
    """The process is that of a checkout without installed dependencies."""
    for name in ("torch", "ninja", "tqdm"):
        text = f"raise ModuleNotFoundError('no {name}', name='{name}')\n"
        (tmp_path / f"{name}.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = run("info", env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "torch:        no torch" in done.stdout
    done = run("build", "--all", env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith("flashcute build: expected the package torch, found none;")


def test_no_package_is_advised_by_the_name_of_a_module(monkeypatch, capsys):
    # On a package index anyone may own the package that has a module's name.
    def fail(args):
        raise ModuleNotFoundError("no", name="dateutil.tz")

    monkeypatch.setattr(cli, "run_info", fail)
    assert cli.main(["info"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("flashcute info: expected the module dateutil.tz, found none; ")
    assert "pip install dateutil" not in said


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"flashcute {flashcute.__version__}\n"
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{flashcute.__version__}"\n' in text


def test_the_help_has_no_markup(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    printed = capsys.readouterr().out
    assert "python -m flashcute build builds kernels ahead of use" in " ".join(printed.split())
    assert "`" not in printed


def parsers():
    (commands,) = (
        action
        for action in cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return commands.choices


@pytest.mark.parametrize("command", parsers())
def test_every_option_has_a_help_text(command):
    without = [a.option_strings or a.dest for a in parsers()[command]._actions if not a.help]
    assert without == []


@pytest.mark.parametrize("arguments", [["info", "--all"], ["--help"], ["cache", "--help"]])
def test_a_reader_that_has_read_enough_ends_the_command_quietly(arguments):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        done = run(*arguments, stdout=pipe)
    assert done.returncode == 141
    assert done.stderr == ""


def test_without_a_standard_error_the_exit_status_is_the_same():
    for argument, status in (("bogus", 2), ("--version", 0)):
        command = [sys.executable, "-m", "flashcute", argument]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, preexec_fn=lambda: os.close(2), check=False
        )
        assert done.returncode == status


def test_a_full_disk_behind_standard_output_is_a_message():
    with open("/dev/full", "w") as full:
        done = run("info", stdout=full)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["cache", "--help"]])
def test_a_full_disk_behind_what_argparse_prints_is_a_message(arguments, unbuffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = run(*arguments, stdout=full, env=environment)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr and len(done.stderr.splitlines()) == 1


def test_info_and_cache_say_the_same_of_a_cache(tmp_path, monkeypatch, capsys):
    for folder in ("none", "empty"):
        monkeypatch.setenv("FLASHCUTE_CACHE_DIR", str(tmp_path / folder))
        assert cli.main(["cache", "size"]) == 0
        said = capsys.readouterr().out
        assert cli.main(["info", "--target", "90"]) == 0
        assert f"cache:        {said}" in capsys.readouterr().out
        (tmp_path / "empty").mkdir(exist_ok=True)


def test_interrupting_is_a_message(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_info", interrupt)
    assert cli.main(["info"]) == 130
    assert capsys.readouterr().err == "flashcute: interrupted\n"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 1 byte\nframe 0"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nframe 0"),
    ],
)
def test_a_size_beyond_memory_is_a_message(error, monkeypatch, capsys):
    def allocate(args):
        raise error

    monkeypatch.setattr(cli, "run_info", allocate)
    assert cli.main(["info"]) == 1
    printed = capsys.readouterr().err
    said = str(error).splitlines()[0]
    assert printed == f"flashcute info: expected sizes that fit into memory, got: {said}\n"


def test_a_fault_of_our_own_keeps_its_traceback(monkeypatch):
    def fail(args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "run_info", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["info"])


def test_a_missing_nvcc_is_said_before_a_compiler_starts(tmp_path, monkeypatch, capsys):
    def build_binding(*arguments):
        raise AssertionError("the binding is built")

    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(binding, "build_binding", build_binding)
    assert cli.main(["build", *ONE]) == 1
    assert "expected nvcc in one of" in capsys.readouterr().err


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a zombie has ended, and its parent has not waited for it yet


def test_a_terminated_build_ends_its_compilers(tmp_path):
    started, nvcc, compiler = tmp_path / "started", tmp_path / "bin" / "nvcc", tmp_path / "compiler"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho nvcc 1\n")
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo compiler 1 && exit\n'
        f"echo $$ > {started}.new && mv {started}.new {started}; exec sleep 600\n"
    )
    for program in (nvcc, compiler):
        program.chmod(0o755)
    variables = {"CUDA_HOME": tmp_path, "CXX": compiler, "FLASHCUTE_CACHE_DIR": tmp_path / "cache"}
    process = subprocess.Popen(
        [sys.executable, "-m", "flashcute", "build", *ONE],
        env=os.environ | {name: str(path) for name, path in variables.items()},
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not started.exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pid = int(started.read_text())
    process.terminate()
    process.wait(timeout=60)
    deadline = time.monotonic() + 5
    while (runs := is_running(pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    if runs:
        os.kill(pid, signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, runs) == (128 + signal.SIGTERM, False), said


@pytest.mark.parametrize("command", ["build -o", "bench --plots", "bench --json", "profile --html"])
def test_a_place_for_results_that_cannot_be_is_said_before_the_work(command, tmp_path, capsys):
    (tmp_path / "file").touch()
    name, option = command.split()
    below = str(tmp_path / "file" / "x")
    with pytest.raises(SystemExit):
        cli.main([name, option, below])
    assert f"got '{below}': {tmp_path / 'file'} is no folder" in capsys.readouterr().err


def test_a_folder_that_refuses_results_is_said_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(binding, "build_binding", None)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    monkeypatch.setattr(sources, "prebuilt_dir", lambda: Path("/proc/results"))
    assert cli.main(["build", *ONE, "--prebuilt"]) == 1
    assert "flashcute build: [Errno" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["build", *ONE, "-o", "/proc/results"])
    assert "got '/proc/results': it cannot be written" in capsys.readouterr().err


STEM = "flash_fwd_x-sm_80-" + "0" * 32
MINE = f"dataset-{'2' * 32}.json"  # many programs have such names, with an MD5


@pytest.fixture
def filled_cache(tmp_path, monkeypatch):
    """Fills a cache with an entry, half an entry, remains of a killed build and foreign files."""
    folder = tmp_path / "cache"
    (folder / "locks").mkdir(parents=True)
    folder.chmod(0o700)
    (folder / f"{STEM}.so").write_bytes(b"x" * 2048)
    record = {"name": "flash_fwd_x", "target": "sm_80", "seconds": 12.3}
    (folder / f"{STEM}.json").write_text(json.dumps(record))
    (folder / f"half-host-{'1' * 32}.so").write_bytes(b"x")
    left = folder / f"tmp-{STEM}-abcdefgh"
    left.mkdir()
    (left / "x.cubin").write_bytes(b"x" * 1024)
    (folder / "mine.json").write_text("{}")
    (folder / MINE).write_text("{}")
    (folder / "tmp-mine").mkdir()
    monkeypatch.setenv("FLASHCUTE_CACHE_DIR", str(folder))
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"locks"}


def test_cache_lists_what_is_there(filled_cache, capsys):
    assert cli.main(["cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["name", "target", "KiB"]
    assert [line.split()[:2] for line in lines[1:3]] == [
        ["flash_fwd_x", "sm_80"],
        [f"half-host-{'1' * 32}", "incomplete"],
    ]
    assert cli.main(["cache", "size"]) == 0
    assert capsys.readouterr().out.startswith(f"{filled_cache} (2 shared objects, 0.0 MiB)")


@pytest.mark.parametrize(
    "record",
    [
        '{"name": "x", "target": "y", "seconds": Infinity}',
        '{"name": "x", "target": "y", "seconds": NaN}',
        '{"name": "x", "target": "y", "seconds": "1"}',
        "[" * 100_000,
        "\0",
    ],
    ids=["infinite", "nan", "text", "deep", "binary"],
)
def test_cache_lists_a_damaged_record_as_incomplete(filled_cache, record, capsys):
    (filled_cache / f"{STEM}.json").write_text(record)
    assert cli.main(["cache"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == [STEM, "incomplete"]
    assert cache.find(filled_cache, STEM) is None


def test_cache_clean_removes_what_is_ours(filled_cache, capsys):
    assert cli.main(["cache", "clean"]) == 0
    assert capsys.readouterr().out.startswith("removed 4 files and unfinished builds, 0.0 MiB")
    assert names(filled_cache) == {"mine.json", MINE, "tmp-mine"}


def test_cache_clean_leaves_what_is_young_or_being_built(filled_cache, capsys):
    old = time.time() - 3 * 24 * 3600
    os.utime(filled_cache / f"half-host-{'1' * 32}.so", (old, old))
    lock = cache.Lock(filled_cache, STEM)
    assert lock.acquire()
    assert cli.main(["cache", "clean", "--older-than", "2"]) == 0
    assert f"{STEM}.so" in names(filled_cache)
    assert cli.main(["cache", "clean"]) == 0
    lock.release()
    assert names(filled_cache) == {
        *(f"{STEM}.so", f"{STEM}.json", f"tmp-{STEM}-abcdefgh"),
        *("mine.json", MINE, "tmp-mine"),
    }


def test_cache_that_cannot_be_is_a_message(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLASHCUTE_CACHE_DIR", str(tmp_path / "none"))
    assert cli.main(["cache"]) == 0
    assert "does not exist: nothing was built yet" in capsys.readouterr().out
    (tmp_path / "none").symlink_to(tmp_path)
    assert cli.main(["cache", "clean"]) == 1
    assert "which is a symbolic link" in capsys.readouterr().err
    assert cli.main(["cache", "size", "--older-than", "3"]) == 1
    assert "expected clean with --older-than" in capsys.readouterr().err


def test_a_user_without_a_home_is_told_of_the_variable(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cache.Path, "home", home)
    for name in ("FLASHCUTE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(BuildError, match=r"a home folder .* set FLASHCUTE_CACHE_DIR"):
        cache.cache_dir()


def test_info_names_a_wrong_variable(monkeypatch, capsys):
    monkeypatch.setenv("FLASHCUTE_JOBS", "none")
    assert cli.main(["info"]) == 1
    assert "expected FLASHCUTE_JOBS to be" in capsys.readouterr().err


def test_the_command_line_starts_without_torch():
    line = "import sys, flashcute.__main__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", line], check=True)


def test_table():
    text = cli._table(("name", "n"), [("a", 1), ("bcdef", 20), ("c", "-")])
    assert text == "name    n\na       1\nbcdef  20\nc       -"
