"""Tables of a result, and what counts as a wrong one."""

from __future__ import annotations

import pytest
from bench_results import option_row, result, row

from flashcute.bench import table

ROWS = [
    row(64, flashcute=100.0, fa2=110.0),
    row(128, 512, True, flashcute=100.0, fa2=90.0, fa3=50.0),
]


def cells(text):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]


def test_points_are_compared_with_the_best_peer():
    assert [table.best_peer(x) for x in ROWS] == ["fa2", "fa3"]
    assert [table.ratio(x) for x in ROWS] == [1.1, 0.5]
    alone = row(64, flashcute=1.0)
    assert (table.best_peer(alone), table.ratio(alone)) == (None, None)
    shown = cells(table.summary(result(*ROWS)))
    ours, fa2 = (f"{ROWS[0]['tflops'][name]:.1f}" for name in ("flashcute", "fa2"))
    share = str(ROWS[0]["percent_of_ceiling"]["flashcute"])
    assert ["bf16", "64", "full", "512", "32/32", ours, fa2, "-", "-", "1.100", share] in shown


def test_summary_names_the_worst_point_and_gaps():
    text = table.summary(result(*ROWS, stopped_early=True))
    assert ["flashcute, bf16", "fa2", "2", "0.995", "0.900", "d=128 s=512 causal"] in cells(text)
    assert "host time per call, d=64 s=64 full: flashcute 20.0 us" in text
    assert "STOPPED EARLY" in text
    assert "STOPPED" not in table.summary(result(*ROWS))


def ratios(text):
    """Returns the ratios' table: from (what, over) to (points, geometric mean, worst)."""
    table = text[text.index("Ratios") :].split("\n\n")[1]
    return {tuple(line[:2]): tuple(line[2:5]) for line in cells(table)[2:]}


def test_ratios_to_the_best_peer_and_to_fa3_by_length_and_head_dim():
    rows = [
        row(64, 512, flashcute=100.0, fa2=130.0, fa3=120.0),
        row(64, 4096, flashcute=100.0, fa2=130.0, fa3=90.0),
        row(128, 4096, flashcute=100.0, fa2=130.0),
    ]
    found = ratios(table.summary(result(*rows)))
    assert found == {
        ("flashcute, bf16", "best peer"): ("3", "1.120", "0.900"),
        ("flashcute, bf16, s <= 1024", "best peer"): ("1", "1.200", "1.200"),
        ("flashcute, bf16, d = 64", "best peer"): ("2", "1.039", "0.900"),
        ("flashcute, bf16, d = 128", "best peer"): ("1", "1.300", "1.300"),
        ("flashcute, bf16", "fa2"): ("3", "1.300", "1.300"),
        ("flashcute, bf16", "fa3"): ("2", "1.039", "0.900"),
        ("flashcute, bf16, s <= 1024", "fa3"): ("1", "1.200", "1.200"),
        ("flashcute, bf16, d = 64", "fa3"): ("2", "1.039", "0.900"),
    }


def test_dtypes_and_groups_are_compared_at_the_same_points():
    rows = [
        row(128, 512, flashcute=100.0, fa2=200.0),
        row(128, 1024, flashcute=100.0, fa2=200.0),
        row(128, 512, dtype="fp16", flashcute=125.0, fa2=200.0),
        row(128, 1024, dtype="fp16", flashcute=100.0),
        row(128, 2048, dtype="fp16", flashcute=1.0),  # not measured in bf16
        row(128, 512, group=4, flashcute=80.0),
        row(128, 512, group=4, flashcute=1.0) | {"h": 32, "h_k": 8},  # its FLOPs differ
        row(128, 512, group=4, dtype="fp16", flashcute=80.0),
    ]
    found = ratios(table.summary(result(*rows)))
    itself = {key: value for key, value in found.items() if key[1].startswith(("bf16", "fp16"))}
    assert itself == {
        ("flashcute, fp16", "bf16"): ("2", "0.894", "0.800"),
        ("fa2, fp16", "bf16"): ("1", "1.000", "1.000"),
        ("flashcute, bf16, group 4", "bf16"): ("1", "1.250", "1.250"),
        ("flashcute, fp16, group 4", "bf16, group 4"): ("1", "1.000", "1.000"),
        ("flashcute, fp16, group 4", "fp16"): ("1", "1.562", "1.562"),
    }


def test_sustained_ratios_come_from_sustained_times():
    made = row(64, sustained=True, flashcute=100.0, fa2=110.0)
    made["us_sustained"]["fa2"] = 250.0
    text = table.summary(result(made))
    over = ("flashcute, bf16", "best peer")
    assert ratios(text)[over] == ("1", "1.100", "1.100")
    assert ratios(text[text.index("Ratios sustained") :])[over] == ("1", "2.000", "2.000")


def test_host_time_is_of_both_shapes():
    text = table.summary(result(*ROWS, host_us_causal={"flashcute": 21.25, "fa3": 60.0}))
    assert "per call, d=128 s=1024 causal h=16/4: flashcute 21.2 us, fa3 60.0 us" in text


def test_the_host_time_of_an_addition_is_beside():
    text = table.summary(result(*ROWS, host_us_add={"torch.add": 4.25}))
    assert "host time of torch.add of one small tensor: 4.2 us" in text


def test_host_time_of_new_lengths_has_a_line():
    new = {"flashcute": {"mean": 17.25, "p95": 20.0, "p99": 60.0}}
    text = table.summary(result(*ROWS, host_us_new_lengths=new))
    assert "loaded, s=101 to 2100, d=64 causal: flashcute 17.2 us (p95 20.0, p99 60.0)" in text


def test_sustained_figures_have_clock_and_power_and_the_share_under_the_limit():
    rows = [row(64, sustained=True, flashcute=100.0, fa2=110.0)]
    text = table.summary(result(*rows))
    last = cells(text[text.index("TFLOP/s sustained") :])
    assert last[2][-3:] == ["MHz", "W", "power-capped"]
    assert last[4][-3:] == ["1512", "655", "0.90"]
    del rows[0]["gpu_sustained"]["flashcute"]["power_capped"]  # a board may not report it
    text = table.summary(result(*rows))
    assert cells(text[text.index("TFLOP/s sustained") :])[4][-3:] == ["1512", "655", "-"]
    assert "sustained" not in table.summary(result(row(64, flashcute=1.0))).partition("matmul c")[0]


def test_groups_and_missing_peers_are_named():
    grouped = row(64, group=4, flashcute=100.0) | {"missing": {"cudnn": "no such head dim"}}
    text = table.summary(result(grouped))
    assert "32/8" in text
    assert "cudnn did not run everywhere: no such head dim" in text
    assert table.describe(grouped) == "d=64 s=512 full h=32/8"


OPTIONS = [
    option_row("window-a", window=(7, 0), flashcute=100.0, fa2=150.0, flex=120.0),
    option_row("window-b", window=[7, 3], flashcute=100.0, fa2=90.0),  # as JSON has it
    option_row("sinks-a", sinks=True, flashcute=100.0, plain=95.0),
    option_row("ragged-a", lengths=(500, 20, 7), flashcute=100.0, fa2=200.0, plain=110.0),
    option_row("softcap-a", softcap=50.0, plain=95.0, fa3=80.0),
]
CONTENDERS = ("flashcute", "fa2", "fa3", "flex", "plain")


def test_options_are_compared_by_family_and_with_plain_beside_the_peers():
    text = table.summary(result(*OPTIONS, contenders=CONTENDERS))
    of = "flashcute, bf16, options"
    assert ratios(text) == {
        (of, "best peer"): ("3", "1.293", "0.900"),
        (f"{of}: window", "best peer"): ("2", "1.039", "0.900"),
        (f"{of}: ragged", "best peer"): ("1", "2.000", "2.000"),
        (of, "fa2"): ("3", "1.392", "0.900"),
        (f"{of}: window", "fa2"): ("2", "1.162", "0.900"),
        (f"{of}: ragged", "fa2"): ("1", "2.000", "2.000"),
        (of, "flex"): ("1", "1.200", "1.200"),
        (f"{of}: window", "flex"): ("1", "1.200", "1.200"),
        (of, "plain"): ("2", "1.022", "0.950"),
        (f"{of}: sinks", "plain"): ("1", "0.950", "0.950"),
        (f"{of}: ragged", "plain"): ("1", "1.100", "1.100"),
    }
    lines = {line[0]: line for line in cells(text) if len(line) > 10}
    assert lines["model"][-3:] == ["x best peer", "x plain", "% of matmul"]
    assert lines["window-a"][-3:-1] == ["1.200", "-"]
    assert lines["sinks-a"][-3:-1] == ["-", "0.950"]
    assert lines["softcap-a"][-3:] == ["-", "-", "-"]
    assert lines["window-b"][4] == "window 7,3"
    assert lines["ragged-a"][5] == "up to 500 (527 tokens)"


def test_options_are_described():
    found = [table.describe(x) for x in OPTIONS]
    assert found[1] == "window-b: d=64 s=512 window 7,3"
    assert found[2] == "sinks-a: d=64 s=512 full"
    assert found[3] == "ragged-a: d=64 s=up to 500 (527 tokens) full"


def test_each_reason_is_named_with_its_shapes():
    reasons = ("no sinks", "no sinks", "no ALiBi")
    rows = [
        option_row(name, flashcute=1.0) | {"missing": {"fa3": why}}
        for name, why in zip(("sinks-a", "sinks-b", "alibi-a"), reasons, strict=True)
    ]
    lines = table.summary(result(*rows)).split("\n\n")
    assert "fa3 did not run everywhere: no sinks (sinks-a, sinks-b)" in lines
    assert "fa3 did not run everywhere: no ALiBi (alibi-a)" in lines


def test_options_disagree_with_their_own_trusted_peer():
    rows = [
        option_row("sinks-a", flashcute=1.0),
        option_row("sinks-b", difference=1.0, flashcute=1.0),
        option_row("sinks-c", flashcute=1.0) | {"difference": None},
    ]
    lines = table.disagreements(result(*rows))
    assert [line.partition(" at ")[0] for line in lines] == [
        "torch, which outputs are compared with, did not run",
        "flashcute differs from torch by 1.0",
    ]


def test_a_cpu_result_says_what_it_is():
    slow = row(64, flashcute=1e9, torch=2e9)
    text = table.summary(result(slow, device="cpu", contenders=("flashcute", "torch"), host_us={}))
    assert text.startswith("No GPU: measured on the CPU")
    assert "GFLOP/s in bursts" in text
    assert "No GPU" not in table.summary(result(*ROWS))


@pytest.mark.parametrize("wrong", [1.0, float("nan")])
def test_a_wrong_result_is_no_result(wrong):
    assert table.disagreements(result(*ROWS)) == []
    broken = row(96, difference=wrong, flashcute=1.0)
    (said,) = table.disagreements(result(*ROWS, broken))
    assert "flashcute differs from fa2" in said and "d=96" in said


def test_an_output_compared_with_nothing_is_no_result():
    unknown = row(96, flashcute=1.0) | {"difference": None}
    (said,) = table.disagreements(result(*ROWS, unknown))
    assert said.startswith("fa2, which outputs are compared with, did not run at d=96")
    nothing_to_compare = row(96, plain=1.0) | {"difference": {}}
    assert table.disagreements(result(*ROWS, nothing_to_compare)) == []


def model(name, d=128, **us):
    """Returns a row of a model's shape; every group of heads has figures of its own."""
    return row(d, group=us.pop("group", 4), **us) | {"model": name, "seqlen_k": 2048}


def test_models_are_named_and_stand_for_one_figure():
    rows = [model("a", flashcute=100.0, fa2=130.0), model("b", group=2, flashcute=100.0, fa2=110.0)]
    text = table.summary(result(*rows))
    shown = cells(text)
    assert shown[2][:7] == ["model", "b", "dtype", "d", "mask", "s", "h/h_k"]
    assert shown[4][:7] == ["a", "32", "bf16", "128", "full", "512/2048", "16/4"]
    where = "b: d=128 s=512/2048 full h=16/8"
    assert ["flashcute, bf16, models", "best peer", "2", "1.196", "1.100", where] in shown
    assert "models, d" not in text
    # If the result has a sweep, too, models have a line of their own.
    assert ("flashcute, bf16", "fa2") in ratios(table.summary(result(*rows, *ROWS)))
    assert ("flashcute, bf16, models", "fa2") in ratios(table.summary(result(*rows, *ROWS)))


def test_dtypes_of_models_are_compared_by_name():
    rows = [model("a", flashcute=100.0), model("b", flashcute=50.0)]
    fp16 = [model("a", dtype="fp16", flashcute=200.0), model("b", dtype="fp16", flashcute=50.0)]
    found = ratios(table.summary(result(*rows, *fp16)))
    assert found["flashcute, fp16, models", "bf16, models"] == ("2", "0.707", "0.500")


def of(inputs, *arguments, **us):
    return row(*arguments, **us) | {"inputs": inputs}


def test_inputs_have_a_line_each_over_peers_and_over_normal_inputs():
    rows = [
        of("normal", 64, 512, flashcute=100.0, fa2=130.0, fa3=120.0),
        of("normal", 64, 1024, flashcute=100.0, fa2=130.0, fa3=120.0),
        of("ramp", 64, 512, flashcute=125.0, fa2=130.0, fa3=100.0),
        of("ramp", 64, 1024, flashcute=200.0, fa2=130.0),
    ]
    text = table.summary(result(*rows))
    shown = {tuple(line[:2]): line[2:] for line in cells(text[text.index("by inputs") :])}
    header = ["points", "best peer", "fa2", "cudnn", "fa3", "ours, normal inputs"]
    assert shown["", "inputs"][:6] == header
    normal = ["2", "1.200, 1.200", "1.300, 1.300", "-", "1.200, 1.200", "1.000, 1.000"]
    assert shown["bf16", "normal"] == [*normal, "d=64 s=512 full"]
    ramp = ["2", "0.721, 0.650", "0.822, 0.650", "-", "0.800, 0.800", "0.632, 0.500"]
    assert shown["bf16", "ramp"] == [*ramp, "d=64 s=1024 full, ramp"]
    # The table of ratios is of normal inputs alone.
    assert ratios(text)["flashcute, bf16", "best peer"] == ("2", "1.200", "1.200")
    assert not any("ramp" in what for what, _ in ratios(text))
    assert "by inputs" not in table.summary(result(*rows[:2]))
    only = table.summary(result(*rows[2:]))
    assert "Ratios" not in only
    assert "| -                   |" in only  # no normal inputs to compare with


def test_a_result_of_an_earlier_release_is_read():
    old = result(*({k: v for k, v in x.items() if "percent" not in k} for x in ROWS))
    del old["device"], old["ceiling"]
    assert "1.100" in table.summary(old)
    assert table.disagreements(old) == []
