"""Counting FLOPs, comparing outputs and timing, where an error would give a wrong figure."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.metadata
import itertools
import json
import pathlib
import re
import subprocess
import sys
import time
import types

import pytest
import torch

from flashcute import benchmarking as bm

ROOT = pathlib.Path(__file__).resolve().parents[1]


def visible_pairs(seqlen_q, seqlen_k):
    """Returns how many pairs the bottom-right causal mask leaves; a row's last key counts half."""
    rows = (max(0.0, i + 0.5 + seqlen_k - seqlen_q) for i in range(seqlen_q))
    return sum(rows)


@pytest.mark.parametrize(
    ("sq", "sk"), [(64, 64), (10, 64), (1, 64), (64, 10), (64, 1), (0, 8), (8, 0)]
)
def test_causal_flops_follow_the_bottom_right_diagonal(sq, sk):
    full = bm.Shape(2, sq, sk, 3, 3, 40, causal=False)
    causal = bm.Shape(2, sq, sk, 3, 3, 40, causal=True)
    assert full.flops == 4 * 2 * 3 * sq * sk * 40
    assert causal.flops == pytest.approx(4 * 2 * 3 * 40 * visible_pairs(sq, sk), abs=4 * 2 * 3 * 40)


def test_causal_halves_the_square():
    assert bm.sweep_shape(64, 4096, True).flops * 2 == bm.sweep_shape(64, 4096, False).flops


def test_bytes_count_each_tensor_once():
    shape = bm.Shape(b=2, seqlen_q=3, seqlen_k=5, h=4, h_k=2, d=8, causal=False)
    q, k, v = bm.make_qkv(shape, torch.float16, "cpu")
    moved = 2 * q.nbytes + k.nbytes + v.nbytes + 2 * 4 * 3 * 4
    assert shape.bytes() == moved


@pytest.mark.parametrize(("d", "heads"), [(64, 32), (96, 21), (128, 16), (192, 10), (256, 8)])
@pytest.mark.parametrize("seqlen", [512, 16384])
def test_sweep_holds_tokens_and_width(d, heads, seqlen):
    shape = bm.sweep_shape(d, seqlen, causal=True)
    assert (shape.h, shape.b * shape.seqlen_q) == (heads, 16384)
    assert shape.seqlen_q == shape.seqlen_k == seqlen


def test_inputs_are_random_and_repeatable():
    shape = bm.sweep_shape(64, 512, False, total_tokens=512)
    first, second = (bm.make_qkv(shape, torch.bfloat16, "cpu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert 0.9 < first[0].float().std() < 1.1
    assert not torch.equal(first[1], first[2])


def test_contenders_take_turns_after_warm_up():
    order = []
    contenders = {name: lambda name=name: order.append(name) for name in "ab"}
    times = bm.time_interleaved(contenders, "cpu", repeats=3, warmup=2, flush_bytes=1)
    assert order[:4] == ["a", "a", "b", "b"]
    assert order[4:] == [name for repeat in range(3) for name in bm.turn("ab", repeat)]
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}


def test_calls_are_in_what_is_around_them_and_it_is_not_timed():
    inside, order = [], []

    @contextlib.contextmanager
    def around(name):
        inside.append(name)
        time.sleep(0.02)
        yield
        inside.remove(name)

    calls = {name: lambda name=name: order.append((name, list(inside))) for name in "ab"}
    times = bm.time_interleaved(calls, "cpu", repeats=3, warmup=1, flush_bytes=1, around=around)
    assert order and all(found == [name] for name, found in order)
    assert all(min(values) < 20_000 for values in times.values())


def test_nobody_always_comes_first_or_after_the_same_other():
    turns = [bm.turn("abcd", number) for number in range(bm.REPEATS)]
    assert turns == [bm.turn("abcd", number) for number in range(bm.REPEATS)]
    assert all(sorted(turn) == list("abcd") for turn in turns)
    assert {turn[0] for turn in turns} == set("abcd")
    before = {(a, b) for turn in turns for a, b in itertools.pairwise(turn)}
    assert len(before) == 12  # every pair of two


def test_times_are_microseconds():
    contenders = {"wait": lambda: time.sleep(0.02)}
    times = bm.time_interleaved(contenders, "cpu", repeats=3, warmup=0, flush_bytes=1)
    assert all(20_000 <= t < 500_000 for t in times["wait"])


def test_flush_is_not_timed():
    times = bm.time_interleaved(
        {"nothing": lambda: None}, "cpu", repeats=5, warmup=1, flush_bytes=1 << 26
    )
    assert sorted(times["nothing"])[2] < 1000  # clearing 64 MiB takes far longer


@pytest.mark.parametrize(
    "change", [{"contenders": {}}, {"repeats": 0}, {"flush_bytes": 0}], ids=lambda c: next(iter(c))
)
def test_timing_refuses_what_would_measure_nothing(change):
    arguments = {"contenders": {"a": lambda: None}, "device": "cpu", "flush_bytes": 1}
    with pytest.raises(ValueError, match="time_interleaved: expected"):
        bm.time_interleaved(**(arguments | change))


def test_geomean():
    assert bm.geomean([2.0, 8.0]) == pytest.approx(4.0)
    for values in ([], [1.0, 0.0]):
        with pytest.raises(ValueError, match="geomean: expected"):
            bm.geomean(values)


def test_ratios_take_only_rows_that_have_one():
    found = bm.Ratios.of([({"d": 64}, 1.1), ({"d": 96}, None), ({"d": 128}, 0.9)])
    assert (found.count, found.worst, found.worst_row) == (2, 0.9, {"d": 128})
    assert found.geomean == pytest.approx((1.1 * 0.9) ** 0.5)
    assert bm.Ratios.of([({"d": 64}, None)]) is None


def test_host_time_counts_calls_and_not_the_wait_for_the_gpu(monkeypatch):
    queued = []

    def synchronize():
        assert len(queued) <= bm.HOST_CALLS
        time.sleep(0.01)
        queued.clear()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    us = bm.host_time(lambda: queued.append(1), batches=5)
    assert not queued
    assert us < 0.01 * 1e6 / bm.HOST_CALLS


def test_host_times_are_of_each_call_and_not_of_the_wait_for_the_gpu(monkeypatch):
    queued, made, now = [], [], [0.0]

    def synchronize():
        assert len(queued) <= bm.HOST_CALLS + 1
        now[0] += 1.0
        queued.clear()

    def call(number):
        queued.append(number)
        made.append(number)
        now[0] += number * 2.0**-20

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    n = bm.HOST_CALLS
    us = bm.host_times([functools.partial(call, i) for i in range(2 * n + 1)])
    assert not queued and us == [number * 2.0**-20 * 1e6 for number in range(2 * n + 1)]
    assert made == [*range(n), n - 1, *range(n, 2 * n), 2 * n - 1, 2 * n]


def test_summarise_samples_leaves_out_what_was_not_measured():
    samples = [{"at": 0.1 * i, "sm_mhz": mhz} for i, mhz in enumerate((1700.0, 1980.0, 1900.0))]
    summary = bm.summarise_samples(samples)
    assert summary == {
        "sm_mhz": {"count": 3, "min": 1700.0, "median": 1900.0, "mean": 1860.0, "max": 1980.0}
    }


def test_of_a_flag_the_mean_says_how_often():
    samples = [{"at": 0.0, "power_capped": flag} for flag in (1.0, 0.0, 1.0, 1.0)]
    assert bm.summarise_samples(samples)["power_capped"]["mean"] == 0.75


NVIDIA_SMI = """#!/bin/sh
case "$1" in
--query-gpu=clocks.sm,power.draw.instant,temperature.gpu,clocks_event_reasons.sw_power_cap) ;;
*) exit 1 ;;
esac
echo "$@" >"${{0%/*}}/arguments"
echo '{line}'
exec sleep 60
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("1755, 512.25, [N/A], Active", {"sm_mhz": 1755.0, "power_w": 512.25, "power_capped": 1.0}),
        (
            "345, 80.5, 31, Not Active",
            {"sm_mhz": 345.0, "power_w": 80.5, "temperature_c": 31.0, "power_capped": 0.0},
        ),
        ("345, 80.5, 31, [N/A]", {"sm_mhz": 345.0, "power_w": 80.5, "temperature_c": 31.0}),
    ],
)
def test_gpu_sampler_reads_nvidia_smi(line, expected, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI.format(line=line))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    gpus = [types.SimpleNamespace(uuid="0-1"), types.SimpleNamespace(uuid="2-3")]
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    start = time.monotonic()
    before = time.perf_counter()
    with bm.gpu_sampler(1) as samples:
        while not samples and time.monotonic() - start < 30:
            time.sleep(0.01)
    (sample,) = samples
    assert before < sample.pop("at") < time.perf_counter()
    assert sample == expected
    # The UUID names torch's GPU 1: with CUDA_VISIBLE_DEVICES nvidia-smi has another number for it.
    assert "--id=GPU-2-3" in (tmp_path / "arguments").read_text().split()
    assert time.monotonic() - start < 30


def test_gpu_sampler_without_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with bm.gpu_sampler() as samples:
        pass
    assert samples == []


def test_machine_info_says_what_a_figure_needs(tmp_path):
    info = bm.machine_info()
    assert info["torch"] == torch.__version__
    assert {"date", "command", "commit", "python", "platform", "cpu_cores"} <= set(info)
    path = tmp_path / "new" / "result.json"
    bm.write_json(path, info)
    assert json.loads(path.read_text()) == info


def test_a_result_file_is_replaced_only_by_a_complete_one(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    bm.write_json(path, {"old": 1})

    def full(file, *_args, **_kwargs):
        file.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match=r"result.json"):
        patched.setattr(pathlib.Path, "write_text", full)
        bm.write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1}
    link = tmp_path / "link.json"
    link.symlink_to(path)
    bm.write_json(link, {"new": 2})
    assert link.is_symlink()
    assert json.loads(path.read_text()) == {"new": 2}
    assert sorted(x.name for x in tmp_path.iterdir()) == ["link.json", "result.json"]


def git(folder, *args):
    name = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run(["git", "-C", str(folder), *name, *args], check=True, capture_output=True)


def test_the_commit_is_that_of_this_file(tmp_path, monkeypatch):
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    git(tmp_path, "init", "--quiet")
    file = tmp_path / "benchmarking.py"
    file.write_text("1\n")
    (tmp_path / ".gitignore").write_text("venv\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message=x")
    monkeypatch.setattr(bm, "__file__", str(file))
    commit = bm.machine_info()["commit"]
    assert re.fullmatch("[0-9a-f]{40}", commit)
    (tmp_path / "result.json").write_text("{}")  # untracked
    assert bm.machine_info()["commit"] == commit
    file.write_text("2\n")
    assert bm.machine_info()["commit"] == commit + "-dirty"
    installed = tmp_path / "venv" / "benchmarking.py"  # in a project that is not this one
    installed.parent.mkdir()
    installed.write_text("1\n")
    monkeypatch.setattr(bm, "__file__", str(installed))
    assert bm.machine_info()["commit"] is None


def test_machine_info_has_the_version_of_flashattention_3(monkeypatch):
    installed = {}

    def version(distribution):
        if distribution not in installed:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return installed[distribution]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "fa3" not in bm.machine_info()
    installed["fa3-fwd"] = "0.0.3"
    assert bm.machine_info()["fa3"] == "fa3-fwd 0.0.3"
    installed["flash-attn-3"] = "3.0.0"
    assert bm.machine_info()["fa3"] == "flash-attn-3 3.0.0"


def test_recorded_command_does_not_say_where_things_lie(monkeypatch, tmp_path):
    inside = ROOT / "benchmarks" / "results" / "fwd.json"
    monkeypatch.setattr(sys, "argv", [str(ROOT / "tools" / "x.py"), "--out", str(inside), "a/b"])
    command = bm.machine_info()["command"]
    assert command.endswith(" tools/x.py --out benchmarks/results/fwd.json a/b")
    monkeypatch.setattr(sys, "argv", ["x.py", str(tmp_path / "out.json")])
    assert bm.machine_info()["command"].endswith(" x.py out.json")
    arguments = [f"--json={inside}", f"a={tmp_path / 'b.py'}", "c=d/e"]
    monkeypatch.setattr(sys, "argv", ["x.py", *arguments])
    assert bm.machine_info()["command"].endswith(
        " x.py --json=benchmarks/results/fwd.json a=b.py c=d/e"
    )


def test_recorded_command_has_the_variable_that_chooses_kernels(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py"])
    monkeypatch.delenv("FLASHCUTE_ARCH", raising=False)
    plain = bm.machine_info()["command"]
    monkeypatch.setenv("FLASHCUTE_ARCH", "80")
    assert bm.machine_info()["command"] == f"FLASHCUTE_ARCH=80 {plain}"


def test_table_lines_have_one_width():
    table = bm.format_table(["d", "speed"], [[64, "1.10"], [256, "-"]]).splitlines()
    assert table[1].startswith("|--")
    assert len({len(line) for line in table}) == 1
