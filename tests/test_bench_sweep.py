"""The sweep's points, rows and ceiling; tests that need measurements take them on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import types

import pytest
import torch

from flashcute import benchmarking as bm
from flashcute import heuristics
from flashcute.bench import (
    inputs,
    models,
    option_peers,
    options,
    peers,
    serving,
    serving_peers,
    sweep,
)
from flashcute.bench.sweep import Variant
from flashcute.problem import FwdProblem

CPU = sweep.Options("cpu", ("flashcute", "torch"), repeats=2, warmup=1, flush_bytes=1 << 20)
SHAPE = bm.Shape(1, 16, 24, 2, 1, 32, causal=False)


def measure(shape, dtype="bf16", options=CPU, samples=(), **ceiling):
    (row,) = sweep.measure([Variant(dtype, shape)], 0, options, samples, ceiling)
    return row


def test_a_point_has_all_that_is_compared_at_it():
    found = sweep.points(["bf16", "fp16"], [64, 96], ["full", "causal"], [1, 4], [512, 1024])
    assert len(found) == 2 * 2 * 2
    variants = [variant for point in found for variant in point]
    assert len(variants) == len(set(variants)) == len(found) * 2 * 2
    for point in found:
        assert {variant.inputs for variant in point} == {"normal"}
        shapes = [variant.shape for variant in point]
        assert len({(shape.d, shape.causal, shape.seqlen_q, shape.flops) for shape in shapes}) == 1
        assert {(x.dtype, x.shape.h // x.shape.h_k) for x in point} == set(
            itertools.product(("bf16", "fp16"), (1, 4))
        )
        for shape in shapes:
            assert shape.b * shape.seqlen_q == bm.TOTAL_TOKENS
            assert shape.seqlen_q == shape.seqlen_k


@pytest.mark.parametrize(
    ("d", "groups", "heads"),
    [
        (64, [1], [(32, 32)]),
        (64, [4], [(32, 8)]),
        (96, [1], [(21, 21)]),
        (96, [1, 4], [(20, 20), (20, 5)]),
        (128, [1, 4, 32], [(32, 32), (32, 8), (32, 1)]),
        (256, [16], [(16, 1)]),
        (256, [2, 3], [(6, 3), (6, 2)]),
    ],
)
def test_groups_of_a_point_have_the_same_query_heads(d, groups, heads):
    (point,) = sweep.points(["bf16"], [d], ["full"], groups, [512])
    assert [(variant.shape.h, variant.shape.h_k) for variant in point] == heads


def test_distributions_of_a_shape_take_turns():
    names = ("normal", "ramp")
    (point,) = sweep.points(["bf16", "fp16"], [64], ["full"], [1], [512], inputs=names)
    assert {(x.dtype, x.inputs) for x in point} == set(itertools.product(("bf16", "fp16"), names))
    assert len({x.shape for x in point}) == 1
    chosen = models.select(["llama-3-8b"])
    points = sweep.model_points(chosen, ["bf16"], names)
    assert [{variant.model for variant in point} for point in points] == [{x} for x in chosen]
    for point, shape in zip(points, chosen.values(), strict=True):
        assert point == [Variant("bf16", shape, x, point[0].model) for x in names]


def test_a_row_is_of_the_inputs_that_it_names(monkeypatch):
    made = []

    def maker(q, k, v, causal):
        made.append((q, k, v))
        return lambda: q

    monkeypatch.setitem(peers._MAKERS, "flashcute", maker)
    point = [Variant("bf16", SHAPE, name, "a-model") for name in ("normal", "ramp")]
    rows = sweep.measure([*point, Variant("bf16", SHAPE)], 0, CPU, [], {})
    assert [(row["inputs"], row.get("model")) for row in rows] == [
        *(("normal", "a-model"), ("ramp", "a-model"), ("normal", None))
    ]
    for tensors, name in zip(made, ("normal", "ramp", "normal"), strict=True):
        expected = inputs.make(name, SHAPE, torch.bfloat16, "cpu")
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("name", inputs.DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", sweep.DTYPES)
def test_contenders_agree_on_every_distribution(name, dtype):
    shape = bm.Shape(1, 48, 160, 2, 1, 40, causal=True)
    (row,) = sweep.measure([Variant(dtype, shape, name)], 0, CPU, [], {})
    assert row["difference"]["flashcute"] <= sweep.AGREEMENT[dtype]


def test_outputs_are_compared_with_the_trusted_peer_even_if_it_is_not_timed(monkeypatch):
    monkeypatch.setitem(peers._MAKERS, "flashcute", lambda q, k, v, causal: lambda: q + 1)
    row = measure(SHAPE, options=dataclasses.replace(CPU, names=("flashcute",)))
    assert row["difference"]["flashcute"] > sweep.AGREEMENT["bf16"]
    assert set(row["us"]) == {"flashcute"}


@pytest.mark.parametrize(
    "name", ["window-1023-d64-8k", "ragged-8-of-4k-d64-full", "sinks-d64", "dropout-d64"]
)
@pytest.mark.parametrize("wrong", [0.0, 1.0, math.nan])
def test_options_are_compared_with_their_trusted_peer(name, wrong, monkeypatch):
    right = option_peers._MAKERS["flashcute"]
    monkeypatch.setitem(option_peers._MAKERS, "flashcute", lambda x: lambda: right(x)() + wrong)
    shape = dataclasses.replace(options.shrink(options.OPTIONS[name], 32), h=4, h_k=2, d=16)
    chosen = dataclasses.replace(CPU, names=("flashcute", "plain"))
    (row,) = sweep.measure([Variant("bf16", shape, model=name)], 0, chosen, [], {})
    assert {x: row[x] for x in dataclasses.asdict(shape)} == dataclasses.asdict(shape)
    assert row["model"] == name
    assert set(row["difference"]) == {"flashcute"}  # plain lacks the option
    assert row["trusted"] == "torch"
    assert (row["difference"]["flashcute"] <= sweep.AGREEMENT["bf16"]) == (wrong == 0.0)
    timed = {"flashcute", "plain"} - row["missing"].keys()
    assert set(row["us"]) == timed and "flashcute" in timed
    for contender, us in row["us"].items():
        assert row["tflops"][contender] == pytest.approx(shape.flops / us / 1e6, abs=1e-4)


def test_without_its_trusted_peer_a_row_says_why(monkeypatch):
    def broken(_):
        raise RuntimeError("out of memory")

    monkeypatch.setitem(option_peers._MAKERS, "torch", broken)
    shape = options.shrink(options.OPTIONS["sinks-d64"], 16)
    chosen = dataclasses.replace(CPU, names=("flashcute",))
    row = measure(shape, options=chosen)
    assert (row["difference"], row["missing"]) == (None, {"torch": "out of memory"})


@pytest.mark.parametrize("dtype", sweep.DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_compares_and_times(dtype, causal):
    shape = dataclasses.replace(SHAPE, causal=causal, seqlen_k=16)
    row = measure(shape, dtype, tflops=1.0)
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
    row = measure(SHAPE)
    assert row["difference"]["flashcute"] > sweep.AGREEMENT["bf16"]
    assert row["percent_of_ceiling"] == {}


def test_a_point_is_timed_in_one_loop_and_each_row_has_its_own(monkeypatch):
    grouped = dataclasses.replace(SHAPE, h_k=2)
    point = [Variant("bf16", SHAPE), Variant("bf16", grouped), Variant("fp16", SHAPE)]
    loops = []

    def timed(contenders, *_):
        loops.append(contenders)
        return {key: [10.0 * index + 1, 10.0 * index] for index, key in enumerate(contenders)}

    monkeypatch.setattr(bm, "time_interleaved", timed)
    rows = sweep.measure(point, 0, CPU, [], {})
    (loop,) = loops
    assert len(loop) == 3 * 2
    assert [(row["dtype"], row["h_k"]) for row in rows] == [("bf16", 1), ("bf16", 2), ("fp16", 1)]
    assert [row["us"]["flashcute"] for row in rows] == [0.5, 20.5, 40.5]
    assert [row["us"]["torch"] for row in rows] == [10.5, 30.5, 50.5]
    assert rows[2]["us_min"]["torch"] == 50.0


def test_sustained_runs_take_clock_and_power_of_their_second_half(monkeypatch):
    samples = [{"at": 0.0, "sm_mhz": 1980.0}]
    clock = iter((0.0, 10.0, 20.0, 30.0, 40.0, 50.0))  # begin and end of the three runs
    begins = iter((0.0, 20.0, 40.0))

    def run(call, seconds):
        now = next(begins)
        samples.extend(
            {"at": now + x, "sm_mhz": mhz, "temperature_c": 50.0, "power_capped": capped}
            for x, mhz, capped in (
                *((1, 1900.0, 0.0), (4, 1800.0, 0.0)),
                *((6, 1500.0, 1.0), (7, 1490.0, 0.0), (8, 1500.0, 1.0), (9, 1510.0, 1.0)),
            )
        )
        return 123.456

    monkeypatch.setattr(sweep, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(bm, "time_interleaved", lambda calls, *_: {key: [1.0] for key in calls})
    monkeypatch.setattr(bm, "time_sustained", run)
    steady = dataclasses.replace(CPU, sustained=1.0)
    row = measure(SHAPE, options=steady, samples=samples, tflops_sustained=2.0)
    assert row["us_sustained"] == {"flashcute": 123.46, "torch": 123.46}
    state = {"sm_mhz": 1500.0, "temperature_c": 50.0, "power_capped": 0.75, "samples": 4}
    assert row["gpu_sustained"] == {"flashcute": state, "torch": state}
    tflops = row["tflops_sustained"]["flashcute"]
    assert tflops == pytest.approx(SHAPE.flops / 123.46 / 1e6, abs=1e-4)
    assert row["percent_of_ceiling_sustained"]["torch"] == pytest.approx(50 * tflops, abs=0.1)


def test_sustained_runs_have_another_order_at_each_point_and_follow_a_run(monkeypatch):
    ran = []

    def sustained(call, seconds, samples):
        ran.append(call())
        return {"us": 1.0}

    for number, name in enumerate(CPU.names):
        monkeypatch.setitem(
            peers._MAKERS, name, lambda q, *_, n=number: lambda: torch.full_like(q, n)
        )
    monkeypatch.setattr(sweep, "measure_sustained", sustained)
    orders, steady = [], dataclasses.replace(CPU, sustained=1.0)
    for number in range(6):
        ran.clear()
        sweep.measure([Variant("bf16", SHAPE)], number, steady, [], {})
        first, *order = (CPU.names[int(x.max())] for x in ran)
        assert first == order[-1]
        orders.append(order)
    assert orders == [bm.turn(CPU.names, number) for number in range(6)]
    assert {order[0] for order in orders} == set(CPU.names)


def test_the_ceiling_is_a_product_and_a_copy(monkeypatch):
    monkeypatch.setattr(sweep, "CEILING_SIZE", 64)
    monkeypatch.setattr(sweep, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(
        bm, "time_interleaved", lambda calls, *_: {n: [2.0] for n in calls if c(calls[n])}
    )
    monkeypatch.setattr(bm, "time_sustained", lambda call, seconds: 4.0)
    ceiling = sweep.measure_ceiling(dataclasses.replace(CPU, sustained=0.1), [])
    assert ceiling["tflops"] == pytest.approx(2 * 64**3 / 2.0 / 1e6, abs=0.05)
    assert ceiling["tflops_sustained"] == pytest.approx(2 * 64**3 / 4.0 / 1e6, abs=0.05)
    assert ceiling["bytes_per_second"] == pytest.approx(2 * (1 << 20) / 2e-6)


def test_the_read_ceiling_is_the_fastest_of_three_sums(monkeypatch):
    monkeypatch.setattr(sweep, "READ_BYTES", 1 << 20)
    times = {"sum_bf16": 4.0, "sum_float32": 2.0, "row_sums_float32": 3.0}

    def timed(calls, *how):
        assert how == (CPU.device, CPU.repeats, CPU.warmup, CPU.flush_bytes)  # as for contenders
        assert all(call().isfinite().all() for call in calls.values())
        return {name: [times[name.removesuffix("_bytes_per_second")]] for name in calls}

    monkeypatch.setattr(bm, "time_interleaved", timed)
    ceiling = sweep.measure_ceiling(dataclasses.replace(CPU, what="decode"), [])
    speeds = {f"{x}_bytes_per_second": (1 << 20) / us * 1e6 for x, us in times.items()}
    assert ceiling == {"read_bytes_per_second": max(speeds.values())} | speeds


@pytest.mark.parametrize("what", serving.PASSES)
def test_a_point_over_a_cache_has_its_bytes_and_its_page_sizes_take_turns(what, monkeypatch):
    loops = []

    def timed(contenders, *_):
        loops.append(contenders)
        return {key: [2.0 + key[0]] for key in contenders}

    monkeypatch.setattr(bm, "time_interleaved", timed)
    shapes = [serving.Serving(2, 1, 256, 4, 2, 16, causal=True, page_size=n) for n in (0, 16)]
    options = dataclasses.replace(CPU, what=what)
    point = [Variant("bf16", shape, model="x") for shape in shapes]
    rows = sweep.measure(point, 0, options, [], {"read_bytes_per_second": 1e11})
    (loop,) = loops
    assert len(loop) == 2 * 2
    assert [row["page_size"] for row in rows] == [0, 16]
    for number, row in enumerate(rows):
        size = 2 * 2 * 2 * 256 * 2 * 16
        us = 2.0 + number
        assert row["cache_bytes"] == size
        assert row["us"] == {"flashcute": us, "torch": us}
        assert row["tb_per_second"]["flashcute"] == pytest.approx(size / us / 1e6, rel=1e-3)
        share = 100 * size / us / 1e6 / 0.1
        assert row["percent_of_read"]["torch"] == pytest.approx(share, abs=0.05)
        assert row["difference"]["flashcute"] <= sweep.AGREEMENT["bf16"]


def test_host_time_over_a_cache_is_of_decode_calls(monkeypatch):
    monkeypatch.setattr(
        serving_peers, "measure_host", lambda names, device: {"host_us_decode": {names[0]: 1.0}}
    )
    monkeypatch.setattr(sweep, "measure_host", None)
    monkeypatch.setattr(sweep, "measure_host_of_add", lambda device: 4.5)
    monkeypatch.setattr(sweep, "measure_ceiling", lambda options, samples: {})
    result = sweep.run([], dataclasses.replace(CPU, device="cuda", what="decode"))
    assert (result["host_us_decode"], result["host_us"]) == ({"flashcute": 1.0}, {})
    assert result["host_us_add"] == {"torch.add": 4.5}


def c(call):
    call()
    return True


def test_a_run_has_every_part():
    seen = []
    result = sweep.run([[Variant("bf16", SHAPE), Variant("fp16", SHAPE)]], CPU, seen.append)
    assert result["rows"] == seen
    assert [row["dtype"] for row in seen] == ["bf16", "fp16"]
    assert result["device"] == "cpu"
    assert result["contenders"] == CPU.names
    assert result["machine"]["torch"] == torch.__version__
    assert not result["stopped_early"]
    assert result["ceiling"] == result["host_us"] == result["host_us_causal"] == {}  # GPUs only


def test_host_time_is_taken_of_every_contender_on_each_shape(monkeypatch):
    monkeypatch.setattr(bm, "host_time", lambda call: 12.34 + 0 * call().sum().item())
    shape = sweep.HOST_SHAPES["host_us"]
    assert sweep.measure_host(shape, CPU) == {"flashcute": 12.3, "torch": 12.3}
    assert sweep.measure_host_of_add("cpu") == 12.3
    monkeypatch.setattr(sweep, "measure_host_of_add", lambda device: {"cuda": 4.5}[device])
    monkeypatch.setattr(sweep, "measure_host", lambda shape, options: {"flashcute": shape.d})
    new = {"flashcute": {"mean": 17.0, "p95": 20.0, "p99": 60.0}}
    monkeypatch.setattr(sweep, "measure_new_lengths", lambda names, device: new)
    monkeypatch.setattr(sweep, "measure_ceiling", lambda options, samples: {"tflops": 1.0})
    result = sweep.run([], dataclasses.replace(CPU, device="cuda"))
    assert (result["host_us"], result["host_us_causal"]) == ({"flashcute": 64}, {"flashcute": 128})
    assert result["ceiling"] == {"tflops": 1.0}
    assert result["host_us_new_lengths"] == new
    assert result["host_us_add"] == {"torch.add": 4.5}
    large = sweep.HOST_SHAPES["host_us_causal"]
    assert large.causal and large.h > large.h_k
    assert large.b * large.h * large.seqlen_q // 192 > 132  # more tiles than an H200 has SMs


def test_host_time_of_new_lengths_is_of_calls_that_were_not_made_before(monkeypatch):
    """Calls with another batch size load the same kernels first; they give no figure."""
    made = []

    def make_untried(name, q, k, v, causal):
        def call():
            if name == "fa3":
                raise RuntimeError("not on this GPU")
            made.append((name, q.shape[0], q.shape[1]))

        assert q.shape[1] == k.shape[1] == v.shape[1] and causal
        return call

    def host_times(calls):
        for call in calls:
            call()
        return [10.0 * made[-1][1]] * 1920 + [200.0] * 70 + [1000.0] * 10

    monkeypatch.setattr(peers, "make_untried", make_untried)
    monkeypatch.setattr(bm, "host_times", host_times)
    found = sweep.measure_new_lengths(("flashcute", "cudnn", "fa3", "fa2"), "cpu")
    figures = {"mean": 21.6, "p95": 10.0, "p99": 200.0}
    assert found == {"flashcute": figures, "fa2": figures}
    lengths = list(sweep.NEW_LENGTHS)
    assert len(lengths) == len(set(lengths)) == 2000
    for x in ("flashcute", "fa2"):
        assert [y for y in made if y[0] == x] == [(x, b, s) for b in (2, 1) for s in lengths]


def test_the_same_kernels_are_loaded_before_lengths_are_new():
    """Choices are remembered for each batch size apart, so those of new lengths are still made."""
    chosen = []
    for shape in (sweep.NEW_LENGTHS_SHAPE, sweep.SAME_KERNELS_SHAPE):
        sizes = {"b": shape.b, "h": shape.h, "h_k": shape.h_k, "d": shape.d}
        problems = [
            FwdProblem("bf16", True, seqlen_q=s, seqlen_k=s, **sizes) for s in sweep.NEW_LENGTHS
        ]
        chosen.append([heuristics.choose_fwd(x, (9, 0)) for x in problems])
    assert chosen[0] == chosen[1] and len(set(chosen[0])) > 1


def test_host_time_is_taken_before_the_sampler_starts(monkeypatch):
    """The sampler's queries and the calls would wait for each other in the driver."""
    happened = []

    @contextlib.contextmanager
    def sampler(interval_ms):
        happened.append("sampler")
        yield [{"at": 0.0, "sm_mhz": 1980.0}]

    monkeypatch.setattr(bm, "gpu_sampler", sampler)
    monkeypatch.setattr(sweep, "measure_host", lambda *_: happened.append("host") or {})
    monkeypatch.setattr(sweep, "measure_host_of_add", lambda _: happened.append("add") or 4.5)
    monkeypatch.setattr(sweep, "measure_ceiling", lambda _, samples: {"samples": len(samples)})
    result = sweep.run([], dataclasses.replace(CPU, device="cuda"))
    assert happened == ["add", *["host"] * len(sweep.HOST_SHAPES), "sampler"]
    assert result["ceiling"] == {"samples": 1}
    assert result["gpu_samples"]["sm_mhz"]["max"] == 1980.0


def test_the_time_limit_and_the_keyboard_keep_what_is_measured(monkeypatch):
    wanted = [[Variant("bf16", SHAPE)]] * 3
    result = sweep.run(wanted, dataclasses.replace(CPU, time_limit=-1.0))
    assert (result["rows"], result["stopped_early"]) == ([], True)

    def interrupt(row):
        raise KeyboardInterrupt

    result = sweep.run(wanted, CPU, interrupt)
    assert (len(result["rows"]), result["stopped_early"]) == (1, True)


def test_a_gradient_that_is_nothing_but_rounding_is_no_difference():
    # With equal keys the exact gradient of q is 0. What contenders return is their own rounding.
    shape = dataclasses.replace(SHAPE, seqlen_k=16)
    options = dataclasses.replace(CPU, what="bwd")
    (row,) = sweep.measure([Variant("bf16", shape, "constant")], 0, options, (), {})
    assert row["difference"]["flashcute"] < sweep.AGREEMENT["bf16"]
    exact = tuple(torch.eye(4) for _ in range(3))
    wrong = (exact[0], exact[1] + torch.eye(4) / 2, exact[2])
    assert sweep._difference(wrong, exact) == 0.5
    assert math.isnan(sweep._difference((exact[0] * math.nan, *exact[1:]), exact))
