"""``python -m flashcute profile`` with machine code of a real kernel and a stand-in for ncu."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from flashcute import __main__ as main
from flashcute import heuristics
from flashcute.jit import BuildError, kernels, toolchain
from flashcute.profiling import disassembly, ncu, static

RAW = Path(__file__).parent / "data" / "ncu" / "raw.csv"
ONE = ("--head-dim", "32", "--dtype", "fp16", "--target", "80")
CONFIG = heuristics.fwd_config("fp16", 32, False, (8, 0))


def profile(*arguments):
    return main.main(["profile", *map(str, arguments)])


@pytest.fixture
def compiler():
    try:
        toolchain.find_nvcc()
        disassembly.find_cuobjdump()
    except (BuildError, disassembly.ToolError) as error:
        pytest.skip(str(error))


def test_static_profile_of_a_kernel(compiler, tmp_path, capsys):
    saved, page = tmp_path / "a.json", tmp_path / "a.html"
    assert profile("--static", *ONE, "--json", saved, "--html", page) == 0
    printed = capsys.readouterr().out
    report = json.loads(saved.read_text())
    # A warp owns 32 of 128 rows; the counts follow from the algorithm.
    loop = report["loop"]
    assert report["kernel"] == CONFIG.full_name
    assert loop["score_elements_per_warp"] == 32 * CONFIG.tile_n
    # All blocks share one copy of the exponentials. Those for the rows' factors are in a branch.
    assert loop["mix_per_element"]["MUFU"] == 1
    assert loop["sometimes_per_element"]["MUFU"] == pytest.approx(4 / CONFIG.tile_n, abs=0.001)
    assert loop["mix_per_element"]["HMMA"] == 32 * 32 / 1024
    assert report["resources"]["registers"] == report_of_ptxas()["registers"]
    assert report["resources"]["spill_bytes"] == 0
    assert report["machine"]["torch"] == torch.__version__
    assert "HMMA.16816" in printed and "tightest roof" in printed
    assert "Thread-instructions per score element" in page.read_text()


def report_of_ptxas():
    _, artefact = kernels.find_built(CONFIG, "80")
    return artefact.meta


def test_static_profile_of_a_file(compiler, tmp_path, capsys):
    assert profile("--static", *ONE) == 0
    _, artefact = kernels.find_built(CONFIG, "80")
    capsys.readouterr()
    assert profile("--static", *ONE, "--file", artefact.path) == 0
    assert "flash_fwd_kernel_sm80" in capsys.readouterr().out
    assert profile("--static", "--file", __file__) == 1
    assert "expected machine code in" in capsys.readouterr().err
    assert profile("--static", "--file", tmp_path / "none.so") == 1
    assert "expected a file" in capsys.readouterr().err


def saved_static(tmp_path, name, registers=128):
    resources = {"instructions": 9, "registers": registers, "register_pools": {}}
    resources |= dict.fromkeys(("spill_bytes", "stack_bytes", "threads", "smem_bytes"), 0)
    report = {"kind": "static", "kernel": name, "target": "80", "resources": resources}
    report |= {"occupancy": None, "loop": None, "estimate": None, "notes": []}
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(report))
    return path


def test_comparison_of_saved_profiles(tmp_path, capsys):
    a = saved_static(tmp_path, "a", registers=100)
    b = saved_static(tmp_path, "b", registers=200)
    assert profile("--compare", a, b, "--json", tmp_path / "both.json") == 0
    row = next(x for x in capsys.readouterr().out.splitlines() if "registers" in x)
    assert [x.strip() for x in row.strip("|").split("|")] == [
        *("resources.registers", "100", "200", "2.000")
    ]
    both = json.loads((tmp_path / "both.json").read_text())
    assert [report["kernel"] for report in both["profiles"]] == ["a", "b"]


def test_a_profile_that_cannot_be_written_is_shown(tmp_path, capsys):
    saved = [saved_static(tmp_path, name) for name in "ab"]
    assert profile("--compare", *saved, "--json", "/dev/full") == 1
    printed = capsys.readouterr()
    assert "kernel | a | b" in printed.out
    assert "flashcute profile: expected to write /dev/full, got: No space left" in printed.err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "other"}', '{"kind": "static"}'])
def test_comparison_refuses_other_files(tmp_path, capsys, text):
    path = tmp_path / "wrong.json"
    path.write_text(text)
    assert profile("--compare", path, path) == 1
    assert "flashcute profile: expected a" in capsys.readouterr().err
    assert profile("--compare", tmp_path / "none.json", path) == 1
    assert "none.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--static", "--set", "tile=1"), "expected FIELD=VALUE with FIELD in"),
        (("--static", "--set", "tile_n"), "got 'tile_n'"),
        (("--static", "--set", "tile_n=65"), "expected tile_n to be a multiple of 16"),
        (("--static", "--set", f"tile_n={'9' * 5000}"), "expected tile_n to be"),
        (("--static", "--set", "tile_m=x"), "profile: FwdConfig: expected tile_m to be 192, got"),
        (("--static", "--target", "80", "--set", "tile_m=x"), "say other values with --set"),
        (("--static", "--target", "75"), "got target='75'"),
        (("--file", "x.so"), "expected --static with --file"),
        (("--static", "--heads", "3", "--heads-k", "2"), "--heads-k to divide --heads"),
        (
            ("--static", "--page-size", "16"),
            "expected --cache with --page-size, got --page-size 16",
        ),
        (("--static", "--cache", "--page-size", "48"), "--seqlen-k, got 48 and 8192; say lengths"),
        (("--cache", "--pass", "bwd"), "has no gradients; leave one of them out"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    assert profile(*arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [("--head-dim", "80"), ("--seqlen-q", "0"), ("--report", "x")]
)
def test_sizes_that_cannot_be(arguments, capsys):
    with pytest.raises(SystemExit):
        profile(*arguments)
    assert arguments[0] in capsys.readouterr().err


def test_without_ncu_the_way_out_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(ncu, "USUAL_PLACES", ())
    assert profile() == 1
    error = capsys.readouterr().err
    assert "expected Nsight Compute's program ncu" in error and "--static" in error


def test_without_a_disassembler_the_way_out_is_named(compiler, monkeypatch, tmp_path, capsys):
    def none():
        raise disassembly.ToolError("expected the disassembler cuobjdump")

    monkeypatch.setattr(disassembly, "find_cuobjdump", none)
    assert profile("--static", *ONE) == 1
    assert "cuobjdump" in capsys.readouterr().err


NCU = """#!/bin/sh
case "$1" in
--query-metrics)
    echo "dram__bytes_read          Counter"
    echo "sm__cycles_elapsed        Counter" ;;
--import) cat {raw} ;;
*)
    printf '%s\\n' "$@" > {log}
    [ "$1" = --export ] && : > "$2"
    {last} ;;
esac
"""


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Puts a program in place of ncu that logs how it was called, and makes torch report a GPU."""

    def use(last="exit 0", raw=RAW):
        log = tmp_path / "log"
        program = tmp_path / "ncu"
        program.write_text(NCU.format(raw=raw, log=log, last=last))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setitem(sys.modules, "ncu_report", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        properties = types.SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
        monkeypatch.setattr("flashcute.benchmarking.machine_info", dict)
        monkeypatch.setattr(kernels, "get_kernel", lambda config, target: None)
        monkeypatch.setattr(static, "profile", lambda *_: {"kind": "static"})
        return log

    return use


def no_machine_code(*_):
    raise disassembly.ToolError("no cuobjdump")


def test_ncu_profiles_the_configuration_on_the_shape(stand_in, monkeypatch, tmp_path, capsys):
    log = stand_in()
    monkeypatch.setattr("flashcute.profiling.command._static", no_machine_code)
    kept, saved = tmp_path / "new" / "kept.ncu-rep", tmp_path / "a.json"
    shape = ("-b", 2, "--seqlen-q", 300, "--seqlen-k", 500, "--heads", 4, "--heads-k", 2)
    arguments = ("--head-dim", 64, "--causal", "--report", kept, "--json", saved, *shape)
    assert profile(*arguments) == 0
    called = log.read_text().splitlines()
    settings = json.loads(called[-1])
    sizes = {"b": 2, "seqlen_q": 300, "seqlen_k": 500, "h": 4, "h_k": 2, "d": 64, "causal": True}
    assert settings["shape"] == sizes
    assert settings["config"]["head_dim"] == 64
    assert settings["calls"] == ncu.WARM_UP + 1
    assert called[-4:-1] == [sys.executable, "-m", "flashcute.profiling.workload"]
    # The command asks only for metrics that this ncu has.
    assert called[called.index("--metrics") + 1] == "dram__bytes_read.sum,sm__cycles_elapsed.max"
    assert kept.is_file()
    report = json.loads(saved.read_text())
    assert (report["kind"], report["shape"]) == ("ncu", sizes)
    assert "nothing from the machine code: no cuobjdump" in capsys.readouterr().out


@pytest.fixture
def stand_in_bwd(stand_in, monkeypatch, tmp_path):
    """Returns stand_in with a report of a backward, and a list of the kernels that are built.

    The report has another kernel before the main one.
    """
    launch = RAW.read_text().splitlines()[-1]
    names = ("flash_bwd_row_stats_kernel", "flash_bwd_kernel_sm90")
    launches = [launch.replace("flash_fwd_kernel_sm80", name) for name in names]
    raw = tmp_path / "bwd.csv"
    raw.write_text(RAW.read_text().replace(launch, "\n".join(launches)))
    built = []
    monkeypatch.setattr("flashcute.profiling.command._built", lambda *of: built.append(of))
    return stand_in(raw=raw), built


def test_ncu_profiles_a_backward(stand_in_bwd, monkeypatch, tmp_path, capsys):
    log, built = stand_in_bwd
    report = json.loads(saved_static(tmp_path, "main all").read_text())
    forms = {"all": report, "all, first stored": report | {"kernel": "other"}}
    monkeypatch.setattr("flashcute.profiling.command._static_backward", lambda *_: forms)
    saved = tmp_path / "a.json"
    assert profile("--pass", "bwd", "--head-dim", 64, "--causal", "--json", saved) == 0
    settings = json.loads(log.read_text().splitlines()[-1])
    config = heuristics.sm90_bwd_config("bf16", 64, "causal")
    assert settings["config"] == dataclasses.asdict(config)
    # The forward is also built before the profiler runs.
    assert [(x.kind, target) for x, target in built] == [("fwd", "90"), ("bwd", "90")]
    assert built[1][0] == config
    made = json.loads(saved.read_text())
    assert (made["kind"], made["kernel"]) == ("ncu", config.full_name)
    assert made["static"]["kernel"] == "main all"
    printed = capsys.readouterr().out
    assert "other kernels of the call, under the profiler: flash_bwd_row_stats_kernel" in printed
    assert "the machine code is that of 'main all'; the launch may be of another form" in printed


def test_two_backwards_are_compared(stand_in_bwd, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FLASHCUTE_ARCH", "80")
    monkeypatch.setattr("flashcute.profiling.command._static_backward", no_machine_code)
    tile = "dkv.min_ctas=1,dq.min_ctas=1"
    arguments = ("--pass", "bwd", "--head-dim", 64, "--compare", "default", tile)
    assert profile(*arguments) == 0
    assert "| config.dkv.min_ctas " in capsys.readouterr().out


def test_a_backward_of_several_kernels_is_not_measured(stand_in_bwd, capsys):
    """GPUs with 99 KB of shared memory have such backwards at large head dimensions."""
    assert profile("--pass", "bwd", "--head-dim", 256, "--target", 86) == 1
    error = capsys.readouterr().err
    assert "expected a backward with one kernel for all gradients, got flash_bwd_hdim256" in error
    assert "say --static for each of them" in error


@pytest.mark.parametrize(
    ("sizes", "paged", "arch", "shape"),
    [
        ((), False, 90, (16, 1, 8192, 16, 16)),
        (("-b", 2, "--seqlen-k", 512, "--heads-k", 4), False, 90, (2, 1, 512, 16, 4)),
        (("--seqlen-q", 4, "--page-size", 64, "--heads-k", 2), True, 90, (16, 4, 8192, 16, 2)),
    ],
)
def test_ncu_profiles_a_call_over_a_cache(
    stand_in, monkeypatch, tmp_path, capsys, sizes, paged, arch, shape
):
    log, saved = stand_in(), tmp_path / "a.json"
    monkeypatch.setattr("flashcute.profiling.command._static", no_machine_code)
    monkeypatch.setattr("flashcute.profiling.command._built", lambda *_: None)
    assert profile("--cache", *sizes, "--json", saved) == 0
    settings = json.loads(log.read_text().splitlines()[-1])
    names = ("b", "seqlen_q", "seqlen_k", "h", "h_k")
    assert tuple(settings["shape"][name] for name in names) == shape
    assert settings["shape"]["page_size"] == (64 if paged else 0)
    assert (settings["config"]["arch"], settings["config"]["paged"]) == (arch, paged)
    report = json.loads(saved.read_text())
    assert report["shape"] == settings["shape"]
    b, _, seqlen_k, _, h_k = shape
    assert report["ideal"]["cache_bytes"] == 2 * 2 * b * seqlen_k * h_k * 128
    assert "% of the bytes that device memory must deliver or take" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ("echo ERR_NVGPUCTRPERM; exit 1", "may not read the GPU's counters"),
        ("echo out of order; exit 3", "got exit status 3"),
        ('rm "$2"; exit 0', "got exit status 0"),
    ],
)
def test_a_failed_run_of_ncu_is_an_error(stand_in, last, message, capsys):
    stand_in(last)
    assert profile("--head-dim", "64") == 1
    assert message in capsys.readouterr().err


def test_an_older_report_is_not_taken_for_a_new_one(stand_in, tmp_path, capsys):
    stand_in('rm -f "$2"; exit 0')
    older = tmp_path / "older.ncu-rep"
    older.write_text("")
    assert profile("--head-dim", "64", "--report", older) == 1
    assert not older.exists()


def test_without_a_gpu_the_way_out_is_named(stand_in, monkeypatch, capsys):
    stand_in()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert profile() == 1
    assert "expected an NVIDIA GPU" in capsys.readouterr().err
