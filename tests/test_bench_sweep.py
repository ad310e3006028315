"""The sweep's points, rows and ceiling, measured on the CPU where measuring is the point."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashcute import benchmarking as bm
from flashcute.bench import peers, sweep

CPU = sweep.Options("cpu", ("flashcute", "torch"), repeats=2, warmup=1, flush_bytes=1 << 20)
SHAPE = bm.Shape(1, 16, 24, 2, 1, 32, causal=False)


def test_points_are_the_product_of_the_choices():
    found = sweep.points(["bf16", "fp16"], [64, 96], ["full", "causal"], [1, 4], [512, 1024])
    assert len(found) == len(set(found)) == 2 * 2 * 2 * 2 * 2
    for dtype, shape in found:
        assert dtype in ("bf16", "fp16")
        assert shape.b * shape.seqlen_q == bm.TOTAL_TOKENS
        assert shape.seqlen_q == shape.seqlen_k


@pytest.mark.parametrize(
    ("d", "group", "heads"),
    [(64, 1, (32, 32)), (64, 4, (32, 8)), (96, 4, (20, 5)), (96, 1, (21, 21)), (256, 16, (16, 1))],
)
def test_groups_share_key_heads(d, group, heads):
    ((_, shape),) = sweep.points(["bf16"], [d], ["full"], [group], [512])
    assert (shape.h, shape.h_k) == heads


@pytest.mark.parametrize("dtype", sweep.DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_compares_and_times(dtype, causal):
    shape = dataclasses.replace(SHAPE, causal=causal, seqlen_k=16)
    row = sweep.measure(shape, dtype, CPU, {}, {"tflops": 1.0})
    assert {name: row[name] for name in dataclasses.asdict(shape)} == dataclasses.asdict(shape)
    assert set(row["us"]) == set(row["tflops"]) == {"flashcute", "torch"}
    assert row["difference"]["torch"] == 0.0
    assert row["difference"]["flashcute"] <= sweep.AGREEMENT[dtype]
    for name, us in row["us"].items():
        assert row["us_min"][name] <= us <= row["us_max"][name]
        assert row["tflops"][name] == pytest.approx(shape.flops / us / 1e6, abs=1e-4)
        assert row["percent_of_ceiling"][name] == pytest.approx(100 * row["tflops"][name], abs=0.1)
    assert "us_sustained" not in row


def test_a_wrong_contender_shows_in_the_row(monkeypatch):
    monkeypatch.setitem(peers._MAKERS, "flashcute", lambda q, k, v, causal: lambda: q + 1)
    row = sweep.measure(SHAPE, "bf16", CPU, {}, {})
    assert row["difference"]["flashcute"] > sweep.AGREEMENT["bf16"]
    assert row["percent_of_ceiling"] == {}


def test_sustained_runs_take_clock_and_power_of_their_second_half(monkeypatch):
    samples = {"sm_mhz": [1980.0], "power_w": [], "temperature_c": [30.0]}

    def run(call, seconds):
        samples["sm_mhz"] += [1900.0, 1800.0, 1500.0, 1500.0, 1510.0]
        samples["temperature_c"] += [50.0]
        return 123.456

    monkeypatch.setattr(bm, "time_sustained", run)
    row = sweep.measure(
        SHAPE, "bf16", dataclasses.replace(CPU, sustained=1.0), samples, {"tflops_sustained": 2.0}
    )
    assert row["us_sustained"] == {"flashcute": 123.46, "torch": 123.46}
    assert row["gpu_sustained"]["torch"] == {"sm_mhz": 1500.0, "temperature_c": 50.0}
    tflops = row["tflops_sustained"]["flashcute"]
    assert tflops == pytest.approx(SHAPE.flops / 123.46 / 1e6, abs=1e-4)
    assert row["percent_of_ceiling_sustained"]["torch"] == pytest.approx(50 * tflops, abs=0.1)


def test_the_ceiling_is_a_product_and_a_copy(monkeypatch):
    monkeypatch.setattr(sweep, "CEILING_SIZE", 64)
    monkeypatch.setattr(sweep, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(
        bm, "time_interleaved", lambda calls, *_: {n: [2.0] for n in calls if c(calls[n])}
    )
    monkeypatch.setattr(bm, "time_sustained", lambda call, seconds: 4.0)
    samples = {"sm_mhz": [], "power_w": []}
    ceiling = sweep.measure_ceiling(dataclasses.replace(CPU, sustained=0.1), samples)
    assert ceiling["tflops"] == pytest.approx(2 * 64**3 / 2.0 / 1e6, abs=0.05)
    assert ceiling["tflops_sustained"] == pytest.approx(2 * 64**3 / 4.0 / 1e6, abs=0.05)
    assert ceiling["bytes_per_second"] == pytest.approx(2 * (1 << 20) / 2e-6)


def c(call):
    call()
    return True


def test_a_run_has_every_part():
    seen = []
    result = sweep.run([("bf16", SHAPE), ("fp16", SHAPE)], CPU, seen.append)
    assert result["rows"] == seen
    assert [row["dtype"] for row in seen] == ["bf16", "fp16"]
    assert result["device"] == "cpu"
    assert result["contenders"] == CPU.names
    assert result["machine"]["torch"] == torch.__version__
    assert not result["stopped_early"]
    assert result["ceiling"] == result["host_us"] == {}  # nothing of a GPU


def test_the_time_limit_and_the_keyboard_keep_what_is_measured(monkeypatch):
    wanted = [("bf16", SHAPE)] * 3
    result = sweep.run(wanted, dataclasses.replace(CPU, time_limit=-1.0))
    assert (result["rows"], result["stopped_early"]) == ([], True)

    def interrupt(row):
        raise KeyboardInterrupt

    result = sweep.run(wanted, CPU, interrupt)
    assert (len(result["rows"]), result["stopped_early"]) == (1, True)
