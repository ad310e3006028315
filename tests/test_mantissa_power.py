"""What is cut of a number and what is made of the times; it measures on a GPU only."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext

import mantissa_power as mp
import pytest
import torch

from flashcute import benchmarking as bm
from flashcute import flash_attn_func
from flashcute.bench import command, sweep

DTYPES = ("bf16", "fp16")


def bits(*patterns):
    signed = [x - 0x10000 if x >= 0x8000 else x for x in patterns]
    return torch.tensor(signed, dtype=torch.int16).view(torch.float16)


@pytest.mark.parametrize(
    ("value", "kept", "expected"),
    [
        (1 + 1 / 1024, 9, 1.0),
        (1 + 3 / 1024, 9, 1 + 2 / 1024),
        (1 + 7 / 1024, 8, 1 + 4 / 1024),
        (1 + 15 / 1024, 7, 1 + 8 / 1024),
        (2 - 1 / 1024, 7, 2 - 1 / 128),  # cut and not rounded: 2 is nearer
        (-(1 + 15 / 1024), 7, -(1 + 8 / 1024)),
        (65504.0, 7, 65280.0),
        (0.333251953125, 7, 0.33203125),  # 0x3555 -> 0x3550
        (15 * 2**-24, 7, 8 * 2**-24),  # subnormal
        (-7 * 2**-24, 7, -0.0),
        (1023 * 2**-24, 9, 1022 * 2**-24),
        (math.inf, 7, math.inf),
        (-math.inf, 7, -math.inf),
        (-0.0, 7, -0.0),
    ],
)
def test_cut_by_hand(value, kept, expected):
    x = torch.tensor([value], dtype=torch.float16)
    assert x.item() == value
    cut = mp.cut_mantissa(x, kept).item()
    assert (cut, math.copysign(1, cut)) == (expected, math.copysign(1, expected))
    assert x.item() == value


@pytest.mark.parametrize("kept", [7, 8, 9, 10])
def test_every_pattern_keeps_its_upper_bits(kept):
    patterns = range(0x10000)
    low = (1 << (10 - kept)) - 1
    expected = bits(*(x - (x & low) for x in patterns)).view(torch.int16)
    assert torch.equal(mp.cut_mantissa(bits(*patterns), kept).view(torch.int16), expected)


def test_ten_bits_are_all():
    everything = bits(*range(0x10000))
    assert torch.equal(
        mp.cut_mantissa(everything, 10).view(torch.int16), everything.view(torch.int16)
    )


def test_seven_bits_fit_bf16_and_nan_stays():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).half()
    cut = mp.cut_mantissa(x, 7)
    assert torch.equal(cut.bfloat16().half(), cut) and not torch.equal(x.bfloat16().half(), x)
    assert mp.cut_mantissa(torch.tensor([math.nan], dtype=torch.float16), 7).isnan().all()


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(TypeError, match=r"expected float16, got x\.dtype=torch\.bfloat16"):
        mp.cut_mantissa(torch.ones(1, dtype=torch.bfloat16), 7)
    with pytest.raises(ValueError, match="negative shift"):
        mp.cut_mantissa(torch.ones(1, dtype=torch.float16), 11)


@pytest.mark.parametrize(
    ("run", "speed"),
    [
        *(("fp16", 0.97), ("9 bits", 0.98), ("8 bits", 0.99), ("7 bits", 1.0)),
        *(("Q, K 7", 0.985), ("V 7", 0.985)),
    ],
)
def test_prediction_by_hand(run, speed):
    assert mp.predicted(0.97, *mp.CUTS[run]) == pytest.approx(speed)
    assert mp.predicted(1.0, *mp.CUTS[run]) == 1


def test_speeds_over_bf16():
    assert mp.over_bf16({"bf16": 98.0, "fp16": 100.0, "7 bits": 98.0}) == {
        "fp16": 0.98,
        "7 bits": 1.0,
    }
    assert mp.over_bf16({"fp16": 100.0}) == {}


def test_mean_of_a_types_runs():
    runs = [{"dtype": "bf16", "us": 1.0}, {"dtype": "fp16", "us": 5.0}, {"dtype": "bf16", "us": 2}]
    assert mp.mean_of(runs, "bf16", "us") == 1.5
    assert mp.mean_of([*runs, {"dtype": "bf16"}], "bf16", "us") is None


def test_without_a_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert mp.main(["--out", str(tmp_path / "x.json")]) == 1
    said = capsys.readouterr()
    assert "expected an NVIDIA GPU of compute capability 8.0 or later" in said.err
    assert not said.out and not (tmp_path / "x.json").exists()


def times_of(calls):
    """Microseconds as predicted of a contender that loses 3 % with all bits."""
    found = {}
    for name, run in calls:
        us = 100.0 if run == "bf16" else 100 / mp.predicted(0.97, *mp.CUTS[run])
        found[name, run] = [us, us + 50, us - 50]
    return found


@pytest.fixture
def stand_in(monkeypatch):
    """Everything but the GPU's own times, on the CPU; what was timed, by call."""
    timed = []

    def interleaved(calls, device, repeats):
        assert (device, repeats) == ("cpu", mp.REPEATS)
        timed.append({key: call() for key, call in calls.items()})
        samples.append({"at": math.inf, "power_capped": 1.0})
        samples.append({"at": math.inf, "power_capped": 0.0})
        return times_of(calls)

    def sustained(call, seconds, samples):
        assert seconds == mp.SECONDS
        dtype = call().dtype
        timed.append(dtype)
        slower = dtype == torch.float16
        return {"us": 125.0 + slower, "sm_mhz": 1500.0 - 15 * slower, "power_capped": 0.75}

    samples = [{"at": 0.0, "power_capped": 0.0}]
    monkeypatch.setattr(mp, "DEVICE", "cpu")
    monkeypatch.setattr(bm, "gpu_sampler", lambda interval_ms: nullcontext(samples))
    monkeypatch.setattr(bm, "time_interleaved", interleaved)
    monkeypatch.setattr(sweep, "measure_sustained", sustained)
    monkeypatch.setattr(bm, "sweep_shape", lambda d, s, causal: bm.Shape(1, s, s, 2, 2, d, causal))
    return timed, samples


def test_a_burst_has_each_cut_and_cudnn_in_both_types(stand_in):
    timed, samples = stand_in
    row = mp.measure_burst((64, 16, True), samples)
    ((outputs),) = timed
    assert list(outputs) == [("flashcute", run) for run in ("bf16", *mp.CUTS)]
    assert "cudnn" in row["missing"]  # on a CPU
    assert (row["d"], row["seqlen_q"], row["causal"]) == (64, 16, True)
    assert outputs["flashcute", "bf16"].dtype == torch.bfloat16
    q, k, v = bm.make_qkv(bm.Shape(1, 16, 16, 2, 2, 64, True), torch.float16, "cpu")
    cuts = {"fp16": (10, 10), "9 bits": (9, 9), "8 bits": (8, 8), "7 bits": (7, 7)}
    for run, (qk, pv) in (cuts | {"Q, K 7": (7, 10), "V 7": (10, 7)}).items():
        inputs = (mp.cut_mantissa(x, kept) for x, kept in ((q, qk), (k, qk), (v, pv)))
        expected = flash_attn_func(*inputs, causal=True)
        assert torch.equal(outputs["flashcute", run], expected), run
    assert len({x.double().sum().item() for x in outputs.values()}) == len(outputs)
    assert row["us"]["flashcute"]["fp16"] == 103.09
    assert row["over_bf16"]["flashcute"]["7 bits"] == 1.0
    assert row["gpu_samples"]["power_capped"]["mean"] == 0.5  # not what was before


def test_a_product_is_of_the_same_numbers(stand_in):
    timed, samples = stand_in
    row = mp.measure_matmul(8, samples)
    ((outputs),) = timed
    assert list(outputs) == [("cublas", run) for run in ("bf16", "fp16", "7 bits")]
    found = {run: x.float() for (_, run), x in outputs.items()}
    assert (found["bf16"] - found["fp16"]).abs().max() < 0.1 < found["fp16"].abs().max()
    assert not torch.equal(found["7 bits"], found["fp16"])
    assert (row["n"], row["over_bf16"]) == (8, {"cublas": {"fp16": 0.97, "7 bits": 1.0}})


def test_long_runs_alternate_after_a_warm_up(stand_in):
    timed, samples = stand_in
    row = mp.measure_long_run((64, 16, False), samples)
    assert timed == [sweep.DTYPES[x] for x in ("bf16", "bf16", "fp16", "fp16", "bf16")]
    assert [run["dtype"] for run in row["runs"]] == ["bf16", "fp16", "fp16", "bf16"]
    assert row["over_bf16"] == {"fp16": round(125 / 126, 4)}


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_whole_run_writes_and_prints(stand_in, monkeypatch, capsys, tmp_path):
    built = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bm, "machine_info", lambda: {"gpu": "GPU X"})
    monkeypatch.setattr(command, "build", built.extend)
    for name in ("BURSTS", "LONG_RUNS"):
        monkeypatch.setattr(mp, name, ((64, 16, False), (64, 16, True)))
    monkeypatch.setattr(mp, "MATMUL_SIZES", (8,))
    path = tmp_path / "new" / "power.json"
    assert mp.main(["--out", str(path)]) == 0
    assert {variant for point in built for variant in point} == {
        (dtype, bm.sweep_shape(64, 16, causal)) for dtype in DTYPES for causal in (False, True)
    }
    result = json.loads(path.read_text())
    assert (result["machine"], result["protocol"]["cuts"]["V 7"]) == ({"gpu": "GPU X"}, [10, 7])
    assert [len(result[name]) for name in ("bursts", "matmul", "long_runs")] == [2, 1, 2]
    ours, cublas, long_runs = (x.split("\n") for x in capsys.readouterr().out.strip().split("\n\n"))
    speeds = ["0.970", "0.980", "0.990", "1.000", "0.985", "0.985"]
    assert cells(ours[0])[1:] == [*mp.CUTS, "cudnn fp16", "power-capped"]
    assert cells(ours[3]) == ["d=64 s=16 causal", *speeds, "-", "0.50"]
    assert cells(ours[4]) == ["geometric mean", *speeds, "-", "-"]
    assert cells(ours[5]) == ["predicted", *speeds, "-", "-"]
    assert cells(cublas[0])[1:3] == ["cublas fp16", "cublas 7 bits"]
    assert [cells(line)[:3] for line in cublas[2:]] == [
        [name, "0.970", "1.000"] for name in ("n=8", "geometric mean", "predicted")
    ]
    assert cells(long_runs[2])[1:] == ["bf16", "125.0", "1500.0", "-", "0.75", "-"]
    assert cells(long_runs[3])[1:] == ["fp16", "126.0", "1485.0", "-", "0.75", "0.992"]


def test_a_table_compares_each_with_the_prediction_from_its_own_loss():
    speeds = dict.fromkeys(mp.CUTS, 0.98) | {"fp16": 0.94}
    row = {"n": 1, "over_bf16": {"flashcute": speeds, "cudnn": {"fp16": 0.97}}, "gpu_samples": {}}
    other = row | {"gpu_samples": {"power_capped": {"mean": 0.254}}}
    lines = [cells(line) for line in mp.speeds_table(mp.OURS, [row, other]).splitlines()[2:]]
    assert [line[-1] for line in lines] == ["-", "0.25", "-", "-"]
    assert lines[2][1:4] == ["0.940", "0.980", "0.980"] and lines[2][7] == "0.970"
    assert lines[3][1:8] == ["0.940", "0.960", "0.980", "1.000", "0.970", "0.970", "0.970"]
