"""Tables of a result over a KV cache: what is compared with what, and with the read ceiling."""

from __future__ import annotations

import pytest
from bench_results import serving_result, serving_row

from flashcute.bench import serving_table, table

LARGE, SMALL = "64x4096-q1-h32/8-d128", "1x8192-q1-h32/8-d128"
MIXED = "mixed-8x512-and-56-over-8k"
ROWS = [
    serving_row(LARGE, flashcute=300.0, fa2=900.0, fa3=330.0),
    serving_row(LARGE, page_size=16, flashcute=400.0),
    serving_row(SMALL, flashcute=20.0, cudnn=22.0, fa3=26.0),
    serving_row(SMALL, page_size=16, flashcute=25.0),
    serving_row(MIXED, flashcute=600.0, fa3=800.0, fa3_ragged=750.0),
    serving_row(MIXED, page_size=16, flashcute=625.0),
]
APPEND = [
    serving_row("append-16x8192", append=append, page_size=size, flashcute=us, fa3=2 * us)
    for append, size, us in (
        *(("", 0, 100.0), ("", 16, 110.0)),
        *(("tokens", 0, 102.0), ("rotary", 0, 104.0), ("rotary", 16, 121.0)),
    )
]


def cells(text):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]


def test_a_row_has_times_bytes_shares_and_ratios():
    shown = cells(serving_table.summary(serving_result(*ROWS)))
    header = ["point", "dtype", "page", "append", "MiB"]
    names = ("flashcute", "fa2", "cudnn", "fa3", "fa3_ragged")
    header += [f"{x}, us" for x in names] + [f"{x}, TB/s" for x in names]
    header += ["% of read", "us beyond read", "x best peer", *(f"x {x}" for x in names[1:])]
    assert [*header, "x contiguous"] in shown
    # Reading 1 GiB takes 268.4 us at 4 TB/s.
    times, speeds = ["300.0", "900.0", "-", "330.0", "-"], ["3.579", "1.193", "-", "3.254", "-"]
    line = [LARGE, "bf16", "-", "-", "1024.0", *times, *speeds, "89.5", "31.6"]
    assert [*line, "1.100", "3.000", "-", "1.100", "-", "-"] in shown
    # No peer has pages, so the row is compared with the peers on the contiguous cache.
    line = [LARGE, "bf16", "16", "-", "1024.0", "400.0", *["-"] * 4, "2.684", *["-"] * 4]
    assert [*line, "67.1", "131.6", "0.825", "2.250", "-", "0.825", "-", "0.750"] in shown


def test_ratios_are_of_one_kind_of_rows():
    shown = cells(serving_table.summary(serving_result(*ROWS)))
    mean = f"{(1.1 * 1.1) ** 0.5:.3f}"
    assert ["decode, bf16", "best peer", "2", mean, "1.100", LARGE] in shown
    assert ["decode, bf16", "cudnn", "1", "1.100", "1.100", SMALL] in shown
    assert ["decode, bf16, h=32/8 d=128", "fa3", "2", "1.196", "1.100", LARGE] in shown
    pages = "decode, bf16, pages of 16"
    assert [pages, "contiguous", "2", "0.775", "0.750", f"{LARGE}, pages of 16"] in shown
    assert ["mixed, bf16", "best peer", "1", "1.250", "1.250", MIXED] in shown
    assert ["mixed, bf16", "fa3", "1", "1.333", "1.333", MIXED] in shown
    where = f"{MIXED}, pages of 16"
    assert ["mixed, bf16, pages of 16", "best peer", "1", "1.200", "1.200", where] in shown


def test_appending_is_compared_with_not_appending():
    text = serving_table.summary(serving_result(*APPEND, what="append"))
    assert "TB/s of the cache, appending" in text
    shown = cells(text)
    where = "append-16x8192, append rotary"
    assert ["append rotary, bf16", "no append", "1", "0.962", "0.962", where] in shown
    assert ["append tokens, bf16", "no append", "1", "0.980", "0.980"] in [x[:5] for x in shown]
    # Appending over pages is compared with not appending over the same pages.
    pages = ["append rotary, bf16, pages of 16", "no append", "1", "0.909", "0.909"]
    assert pages in [x[:5] for x in shown]
    assert not any(x[:2] == ["no append, bf16", "no append"] for x in shown)
    assert ["no append, bf16", "fa3", "1", "2.000", "2.000", "append-16x8192"] in shown


def test_shares_of_the_ceiling_by_size():
    shown = cells(serving_table.summary(serving_result(*ROWS)))
    assert ["flashcute", "cache >= 512 MiB", "contiguous", "1", "89.5", "89.5", LARGE] in shown
    assert ["flashcute", "< 64 MiB", "contiguous", "1", "41.9", "41.9", SMALL] in shown
    where = f"{LARGE}, pages of 16"
    assert ["flashcute", "cache >= 512 MiB", "pages", "1", "67.1", "67.1", where] in shown
    assert ["fa3", "cache >= 512 MiB", "contiguous", "1", "81.3", "81.3", LARGE] in shown
    assert not any(x[:2] == ["flashcute", "64 to 512 MiB"] for x in shown)


def test_what_stands_below_the_tables():
    rows = [dict(row) for row in ROWS]
    reason = "it has no cache in pages"
    for row in rows:
        row["missing"] = {"fa2": reason} if row["page_size"] else {}
    rows[4]["missing"] = {"cudnn": "aligned to the top-left corner"}
    text = serving_table.summary(serving_result(*rows, stopped_early=True))
    assert "read ceiling: 4.000 TB/s, the fastest of PyTorch's reductions of 4 GiB: " in text
    assert "sum_bf16 4.000, sum_float32 3.500" in text
    host = "host time of a decode call,"
    assert f"{host} another length each time, on the device: flashcute 14.0 us" in text
    assert f"{host} another length each time, an int: flashcute 18.5 us" in text
    assert f"{host} the same lengths each time, through a KVCachePlan: flashcute 9.5 us" in text
    assert f"fa2 did not run everywhere: {reason}\n" in text  # and no list of all points
    assert f"cudnn did not run everywhere: aligned to the top-left corner ({MIXED})" in text
    assert "STOPPED EARLY" in text


def test_a_result_without_a_gpu_or_without_rows():
    row = serving_row(SMALL, flashcute=1e6, torch=2e6)
    for field in ("percent_of_read", "beyond_read_us"):
        del row[field]
    made = serving_result(row, ceiling={}, device="cpu", contenders=("flashcute", "torch"))
    text = serving_table.summary(made)
    assert text.startswith(table.CPU_NOTE) and "read ceiling" not in text
    assert [SMALL, "bf16", "-", "-", "32.0", "1000000.0", "2000000.0"] in [
        x[:7] for x in cells(text)
    ]
    assert "STOPPED EARLY" in serving_table.summary(serving_result(stopped_early=True))


@pytest.mark.parametrize("row", ROWS + APPEND)
def test_every_row_is_of_one_kind(row):
    kinds = {"": "no append", "tokens": "append tokens", "rotary": "append rotary"}
    expected = "mixed" if row["decodes"] else "decode"
    if row["model"].startswith("append"):
        expected = kinds[row["append"]]
    assert serving_table.kind(row) == expected
