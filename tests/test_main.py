"""The command line. Builds are those of one small kernel, kept in the user's cache."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from flashcute import __main__ as cli
from flashcute import heuristics
from flashcute.jit import BuildError, kernels, sources, toolchain

CONFIG = heuristics.fwd_config("fp16", 32, False, (8, 0))
ONE = ("--head-dim", "32", "--dtype", "fp16", "--causal", "no", "--target", "80")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(cli, "targets_at_hand", list)


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


def test_selection_is_the_product_of_the_choices():
    args = cli._parser().parse_args(["build", "--head-dim", "64", "128", "--causal", "yes"])
    configs = cli._choose_configs(args, "86")
    assert [(c.head_dim, c.dtype, c.mask) for c in configs] == [
        (64, "fp16", "causal"),
        (64, "bf16", "causal"),
        (128, "fp16", "causal"),
        (128, "bf16", "causal"),
    ]


def test_all_is_what_ships_with_the_tiles_of_the_target():
    args = cli._parser().parse_args(["build", "--all"])
    assert cli._choose_configs(args, "90") == heuristics.shipped_configs(90)
    small = {c for c in cli._choose_configs(args, "86") if c.head_dim == 256}
    assert small.isdisjoint(heuristics.shipped_configs())


def test_class_asked_for_is_the_class_built(monkeypatch):
    """The comparison of the classes needs the older one's kernels built for the newer GPU."""
    args = cli._parser().parse_args(["build", "--all"])
    monkeypatch.setenv("FLASHCUTE_ARCH", "80")
    assert cli._choose_configs(args, "90") == heuristics.shipped_configs(80)


def test_message_of_a_missing_kernel_is_a_command_that_builds_it():
    args = cli._parser().parse_args(["build", *kernels.build_arguments(CONFIG, "80").split()])
    assert cli._choose_configs(args, *args.target) == [CONFIG]


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
    monkeypatch.setattr(sources, "prebuilt_dir", lambda: tmp_path / "out")
    monkeypatch.setattr(kernels, "_loaded", {})
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert kernels.get_kernel(CONFIG, "86").path == placed


def test_failed_build_is_reported_and_is_the_exit_status(tmp_path, monkeypatch, capsys):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo nvcc is out of order; exit 1; }\n')
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
    assert cli.main(["info"]) == 0
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
