"""Tables of a result, and what counts as a wrong one."""

from __future__ import annotations

import pytest
from bench_results import result, row

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
    assert ["bf16", "fa2", "2", "0.995", "0.900", "d=128 s=512 causal"] in cells(text)
    assert "flashcute 20.0 us" in text
    assert "STOPPED EARLY" in text
    assert "STOPPED" not in table.summary(result(*ROWS))


def test_sustained_figures_have_clock_and_power():
    rows = [row(64, sustained=True, flashcute=100.0, fa2=110.0)]
    text = table.summary(result(*rows))
    last = cells(text[text.index("sustained") :])
    assert last[2][-1] == "W"
    assert last[4][-2:] == ["1512.0", "655.0"]
    assert "sustained" not in table.summary(result(row(64, flashcute=1.0))).partition("matmul c")[0]


def test_groups_and_missing_peers_are_named():
    grouped = row(64, group=4, flashcute=100.0) | {"missing": {"cudnn": "no such head dim"}}
    text = table.summary(result(grouped))
    assert "32/8" in text
    assert "cudnn did not run everywhere: no such head dim" in text
    assert table.describe(grouped) == "d=64 s=512 full h=32/8"


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


def test_a_result_of_an_earlier_release_is_read():
    old = result(*({k: v for k, v in x.items() if "percent" not in k} for x in ROWS))
    del old["device"], old["ceiling"]
    assert "1.100" in table.summary(old)
    assert table.disagreements(old) == []
