"""Figures that are computed from counters, against arithmetic in the tests."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path

import pytest

from flashcute import benchmarking as bm
from flashcute import heuristics
from flashcute.bench.serving import Serving
from flashcute.config import FwdConfig
from flashcute.profiling import explain, ncu, text

RAW = Path(__file__).parent / "data" / "ncu" / "raw.csv"
CONFIG = heuristics.fwd_config("bf16", 64, True, (9, 0))
SHAPE = bm.sweep_shape(64, 4096, causal=True)


def profile(report=None, config=CONFIG, shape=SHAPE):
    return explain.profile(report or ncu.parse_csv(RAW.read_text()), config, shape, (9, 0))


def tiles_with_anything_visible(shape, config, heads=1):
    """Returns the number of tiles in which the last query sees the first key.

    ``heads`` rows of a tile have the same position.
    """
    count = 0
    shift = shape.seqlen_k - shape.seqlen_q
    rows = shape.seqlen_q * heads
    for m in range(0, rows, config.tile_m):
        last_position = (min(m + config.tile_m, rows) - 1) // heads
        for n in range(0, shape.seqlen_k, config.tile_n):
            count += not shape.causal or n <= last_position + shift
    return shape.b * (shape.h if heads == 1 else shape.h_k) * count


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("sq", "sk"), [(512, 512), (300, 500), (500, 300), (1, 900), (129, 1)])
def test_visible_tiles(sq, sk, causal):
    shape = bm.Shape(2, sq, sk, 3, 3, 64, causal)
    assert explain.visible_tiles(shape, CONFIG) == tiles_with_anything_visible(shape, CONFIG)


@pytest.mark.parametrize(("h", "heads"), [(32, 4), (24, 4), (8, 1)])
def test_visible_tiles_of_heads_that_share_them(h, heads):
    """With 3 query heads a key head, rows are laid out as if there were 4."""
    shape = bm.Shape(16, 4, 4096, h, 8, 128, causal=True)
    problem = heuristics.FwdProblem("bf16", **dataclasses.asdict(shape))
    config = heuristics.choose_fwd(problem, (9, 0))
    assert heuristics.packs_heads(problem, config) == (heads > 1)
    expected = tiles_with_anything_visible(shape, config, heads)
    assert explain.visible_tiles(shape, config) == expected
    wanted = explain.ideal(shape, config)
    assert wanted["tile_macs"] == 2 * 128 * expected * config.tile_m * config.tile_n


def test_the_ideal_of_one_tile():
    shape = bm.Shape(1, CONFIG.tile_m, CONFIG.tile_n, 1, 1, 64, causal=False)
    q, k, v = bm.make_qkv(shape, bm.torch.bfloat16, "cpu")
    lse = 4 * shape.seqlen_q
    wanted = explain.ideal(shape, CONFIG)
    assert wanted["flops"] == 2 * wanted["tile_macs"]
    assert wanted["tile_exponentials"] == CONFIG.tile_m * CONFIG.tile_n
    assert wanted["dram_bytes"] == wanted["l2_bytes"] == 2 * q.nbytes + k.nbytes + v.nbytes + lse


def test_a_real_report_says_the_same_as_csv_and_through_nvidias_module():
    """The launch ran on an H200. Its CSV is of `ncu --import report --csv --page raw`, its profile
    was made from the same report through ncu_report."""
    saved = json.loads((RAW.parent / "h200_sm90.json").read_text())
    names = {field.name for field in dataclasses.fields(FwdConfig)}  # those of today
    fields = {name: value for name, value in saved["config"].items() if name in names}
    config, shape = FwdConfig(**fields), bm.Shape(**saved["shape"])
    report = ncu.parse_csv((RAW.parent / "h200_sm90.csv").read_text())
    assert "flash_fwd_kernel_sm90<" in report.kernel
    made = profile(report, config, shape)
    for part in ("utilisation_percent", "quantities"):
        assert made[part] == pytest.approx(saved[part], rel=1e-3), part
    waits = [{n: s["warps_per_issue"] for n, s in of["stalls"].items()} for of in (made, saved)]
    assert waits[0] == pytest.approx(waits[1], abs=2e-3)
    assert made["missing"] == saved["missing"]


BWD_SHAPE = bm.Shape(2, 300, 500, 6, 2, 128, causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 192])  # a tile is a CTA's, then a cluster's
def test_visible_tiles_of_a_backward(head_dim, causal):
    """Heads never share tiles of a backward. A tile has the keys of all CTAs of a cluster."""
    config = heuristics.sm90_bwd_config("bf16", head_dim, "causal")
    shape = dataclasses.replace(BWD_SHAPE, d=head_dim, causal=causal)
    keys = config.dkv.rows * (2 if head_dim == 192 else 1)
    tile = types.SimpleNamespace(tile_m=config.dkv.step, tile_n=keys)
    expected = tiles_with_anything_visible(shape, tile)
    assert explain.visible_tiles(shape, config) == expected
    wanted = explain.ideal(shape, config)
    assert wanted["tile_macs"] == 5 * head_dim * expected * config.dkv.step * keys


def test_a_backward_has_five_products_and_sums_of_dq():
    config = heuristics.sm90_bwd_config("bf16", 128, "causal")
    wanted = explain.ideal(BWD_SHAPE, config)
    assert wanted["flops"] == 2.5 * BWD_SHAPE.flops
    q, k, _ = bm.make_qkv(BWD_SHAPE, bm.torch.bfloat16, "cpu")
    sums, statistics = 2 * q.nbytes, 2 * 4 * 2 * 300 * 6
    # The tensors are Q and dO, and K, V, dK and dV.
    assert wanted["dram_bytes"] == 2 * q.nbytes + 4 * k.nbytes + sums + statistics


def test_a_backward_of_one_tile_moves_through_l2_what_it_reads_and_writes():
    config = heuristics.fused_bwd_config("bf16", 64)
    shape = bm.Shape(1, config.dkv.step, config.dkv.rows, 1, 1, 64, causal=False)
    wanted = explain.ideal(shape, config)
    assert wanted["l2_bytes"] == wanted["dram_bytes"]
    assert wanted["flops"] == 2 * wanted["tile_macs"]


def test_figures_of_a_backward():
    config = heuristics.sm90_bwd_config("bf16", 64, "causal")
    others = [("flash_bwd_row_stats_kernel", {"gpu__time_duration.sum": 9.6e-5})]
    metrics = ncu.parse_csv(RAW.read_text()).metrics
    made = profile(ncu.Report("flash_bwd_kernel_sm90", metrics, others), config)
    assert made["kernel"] == config.full_name
    flops = 2.5 * SHAPE.flops
    assert made["quantities"]["tflops"] == pytest.approx(flops / 1482.3e-6 / 1e12, abs=0.06)
    useful = made["roofs"]["tensor, useful FLOPs"]["percent_reached"]
    assert useful == pytest.approx(100 * flops / 2534733 / 132 / 4096, abs=0.06)
    assert any("the tightest roof is tensor, whole tiles" in note for note in made["notes"])
    assert any(note.endswith("flash_bwd_row_stats_kernel 96.0 us") for note in made["notes"])
    assert json.loads(json.dumps(made)) == made
    assert config.full_name in text.report_text(made)


def cached(page_size=0, seqlen_k=4096):
    return Serving(16, 1, seqlen_k, 32, 8, 64, causal=False, page_size=page_size)


def decode(changed=(), others=(), shape=None):
    """Returns the profile of a decode call, with some metrics changed."""
    shape = shape or cached()
    metrics = dict(ncu.parse_csv(RAW.read_text()).metrics) | dict(changed)
    config = heuristics.choose_fwd(shape.problem("bf16"), (9, 0))
    return profile(ncu.Report("flash_fwd_kernel_sm90", metrics, others), config, shape)


def test_a_decode_call_must_read_the_cache():
    shape = cached()
    wanted = decode()["ideal"]
    assert wanted["cache_bytes"] == 2 * 2 * 16 * 4096 * 8 * 64
    rows = 16 * 32  # of q and out, with 4 bytes of their log-sum-exp
    assert wanted["dram_bytes"] == wanted["cache_bytes"] + rows * (2 * 2 * 64 + 4)
    assert wanted["flops"] == 4 * 16 * 32 * 4096 * 64
    # A tile has the four query heads of a key head, so 16 x 8 tiles of 64 rows visit all keys.
    assert wanted["tile_exponentials"] == 16 * 8 * 64 * shape.seqlen_k
    assert "cache_bytes" not in profile()["ideal"]


def test_a_decode_call_is_under_the_roof_of_device_memory():
    least = decode()["ideal"]["dram_bytes"]
    changed = {
        **{"dram__bytes_read.sum": 1.25 * least, "dram__bytes_write.sum": 0.0},
        **{"gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": 90.0},
        **{"sm__cycles_elapsed.max": 60000.0, "smsp__inst_executed.sum": 1e6},
    }
    made = decode(changed)
    assert made["roofs"]["dram"] == {"least_cycles": 43200, "percent_reached": 72.0}
    (said,) = (note for note in made["notes"] if "tightest roof" in note)
    assert "the tightest roof is dram: the launch reaches 72.0 % of it" in said
    assert "moves 167.9 MB where 134.4 MB are needed, at 90.0 % of the throughput" in said
    assert "the cache is 134.2 MB, 99.9 % of the bytes" in "".join(made["notes"])
    # Under the memory roof the tiles' rows without a query do not matter.
    assert not any("masked or padded" in note for note in made["notes"])
    printed = text.report_text(made)
    assert "seqlen_k=4096 h=32 h_k=8 d=64 full over a contiguous cache" in printed
    paged = text.report_text(decode(changed, shape=cached(page_size=16)))
    assert "d=64 full over a cache in pages of 16" in paged


def test_a_decode_call_with_few_keys_may_be_under_another_roof():
    """The instructions then take more clocks than the bytes."""
    changed = {"dram__bytes_read.sum": 1e9, "dram__bytes_write.sum": 0.0}
    (said,) = (note for note in decode(changed)["notes"] if "tightest roof" in note)
    assert said.startswith("the tightest roof is issue: the launch reaches 21.8 % of it")
    assert any("masked or padded" in note for note in decode(changed)["notes"])


def test_other_kernels_of_the_call_are_listed_with_their_times():
    others = [
        ("flash_plan_kernel", {"gpu__time_duration.sum": 4.5e-6}),
        ("flash_fwd_combine_kernel", {}),
    ]
    made = decode(others=others)
    assert made["other_kernels"] == [
        {"kernel": "flash_plan_kernel", "seconds": 4.5e-6},
        {"kernel": "flash_fwd_combine_kernel", "seconds": None},
    ]
    said = "flash_plan_kernel 4.5 us, flash_fwd_combine_kernel missing"
    assert any(note.endswith(said) for note in made["notes"])
    assert not any("other kernels" in note for note in decode()["notes"])


def test_figures_of_a_report():
    report = profile()
    assert report["utilisation_percent"] == {
        **{"tensor": 44.03, "issue": 22.91, "mufu": 22.07, "fp32": None, "alu": 24.6},
        **{"smem": 58.1, "l2": 31.9, "dram": 7.42},
    }
    quantities = report["quantities"]
    assert quantities["tflops"] == pytest.approx(SHAPE.flops / 1482.3e-6 / 1e12, abs=0.06)
    assert quantities["dram_percent_of_ideal"] == pytest.approx(
        100 * (201.33e6 + 66.5e6) / SHAPE.bytes(), abs=0.06
    )
    assert quantities["bank_conflict_percent"] == pytest.approx(100 * 1310720 / 183500800, abs=0.06)
    elements = report["ideal"]["tile_exponentials"]
    assert quantities["instructions_per_score_element"] == pytest.approx(
        32 * 291504128 / elements, abs=0.001
    )


def test_distance_to_the_roofs():
    report = profile()
    cycles, sms = 2534733, 132
    useful = SHAPE.flops / cycles / sms / 4096  # an SM does 4096 FLOPs a clock
    roofs = report["roofs"]
    assert roofs["tensor, useful FLOPs"]["percent_reached"] == pytest.approx(100 * useful, abs=0.06)
    assert roofs["issue"]["percent_reached"] == pytest.approx(
        100 * 291504128 / 4 / sms / cycles, abs=0.06
    )
    exponentials = report["ideal"]["tile_exponentials"] / 16 / sms / cycles
    assert roofs["mufu"]["percent_reached"] == pytest.approx(100 * exponentials, abs=0.06)
    assert roofs["dram"]["percent_reached"] == pytest.approx(
        7.42 * SHAPE.bytes() / (201.33e6 + 66.5e6), abs=0.06
    )


def test_what_the_machine_code_lets_expect():
    report = profile()
    whole = report["roofs"]["tensor, whole tiles"]["percent_reached"]
    static = {"estimate": {"percent_of_tensor_peak_time": {"tensor": 159.0, "mufu": 100.0}}}
    found = explain.expected(report, static)
    assert found == {"tensor": pytest.approx(1.59 * whole, abs=0.06), "mufu": whole}
    rows = text.counters_report(report | {"expected_percent": found}).splitlines()
    row = next(x for x in rows if x.startswith("| MUFU"))
    shown = [cell.strip() for cell in row.split("|")]
    assert shown == ["", "MUFU (exp2)", "22.07", str(whole), ""]
    assert explain.expected(report, {"estimate": None}) == {}
    assert explain.expected(report | {"roofs": {}}, static) == {}


def test_the_number_of_sms_is_filled_in_where_the_report_lacks_it():
    metrics = dict(ncu.parse_csv(RAW.read_text()).metrics)
    del metrics["device__attribute_multiprocessor_count"]
    bare = ncu.Report("flash_fwd", metrics)
    assert profile(bare)["roofs"] == {}
    filled = explain.profile(bare, CONFIG, SHAPE, (9, 0), multiprocessors=132)
    assert filled["roofs"] == profile()["roofs"]


def test_stalls_are_ordered_and_explained():
    stalls = profile()["stalls"]
    assert list(stalls) == [
        *("math_pipe_throttle", "wait", "short_scoreboard", "barrier", "long_scoreboard")
    ]
    assert stalls["wait"]["warps_per_issue"] == 0.83
    assert all(x["waits_for"] for x in stalls.values())
    said = next(note for note in profile()["notes"] if note.startswith("warps wait"))
    assert said.index("math_pipe_throttle (0.97)") < said.index("short_scoreboard (0.58)")
    assert "long_scoreboard" not in said


def test_an_unknown_stall_is_kept():
    name = "smsp__average_warps_issue_stalled_new_thing_per_issue_active.ratio"
    stalls = explain.stalls({name: 0.5})
    assert stalls == {"new_thing": {"warps_per_issue": 0.5, "waits_for": None}}


def test_nothing_measured_is_missing_and_not_zero():
    report = profile(ncu.Report("flash_fwd_kernel_sm80", {}))
    assert set(report["utilisation_percent"].values()) == {None}
    assert {"seconds", "tensor", "dram_bytes", "tflops"} <= set(report["missing"])
    assert report["roofs"] == report["stalls"] == {}
    assert report["notes"] == []
    printed = text.counters_report(report)
    cells = [
        [cell.strip() for cell in line.split("|")]
        for line in printed.splitlines()
        if line.startswith("| ")
    ]
    assert ["", "tensor cores", "missing", "-", ""] in cells
    assert not any(cell in ("0", "0.0") for row in cells for cell in row)


def test_a_zero_that_was_measured_stays_zero():
    report = profile(ncu.Report("flash_fwd", {"smsp__issue_active.avg.pct": 0.0}))
    assert report["utilisation_percent"]["issue"] == 0.0
    assert "issue" not in report["missing"]


def test_wasted_products_are_named():
    shape = bm.Shape(4, 129, 65, 32, 32, 64, causal=False)  # two tiles each where one would do
    notes = profile(shape=shape)["notes"]
    assert any("masked or padded" in note for note in notes)
    assert not any("masked or padded" in note for note in profile()["notes"])


def test_the_text_has_every_part():
    printed = text.report_text(profile())
    for part in (CONFIG.full_name, "seqlen_q=4096", "causal", "% reached", "waits for", "44.03"):
        assert part in printed
