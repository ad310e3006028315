"""The pictures that a result allows are drawn, reproducibly and with the result's figures."""

from __future__ import annotations

import itertools

import pytest
from bench_results import option_row, result, row, serving_result, serving_row

pytest.importorskip("matplotlib")

from flashcute.bench import plots, table


def sweep(sustained=True, group=1, dtype="bf16"):
    """Returns a sweep whose speeds grow with length, with a peer that lacks d = 128."""
    return [
        row(
            *(d, s, causal),
            dtype=dtype,
            group=group,
            sustained=sustained,
            flashcute=100.0 * s / 512,
            **({"fa2": 110.0 * s / 512} if d == 64 else {}),
        )
        for d, s, causal in itertools.product((64, 128), (512, 1024, 4096), (False, True))
    ]


def test_every_picture_is_drawn_and_repeatable(tmp_path):
    made = result(*sweep())
    first = plots.draw(made, tmp_path / "a", "fwd")
    names = {path.name for path in first}
    assert names == {
        f"fwd_bf16_{what}.png"
        for what in ("tflops", "ratio", "tflops_sustained", "ratio_sustained", "roofline")
    }
    second = plots.draw(made, tmp_path / "b", "fwd")
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes().startswith(b"\x89PNG")
        assert a.read_bytes() == b.read_bytes()


def test_only_what_there_is_data_for_is_drawn(tmp_path):
    old = result(*sweep(sustained=False))
    del old["ceiling"]
    names = [path.name for path in plots.draw(old, tmp_path, "old")]
    assert names == ["old_bf16_tflops.png", "old_bf16_ratio.png"]
    alone = result(row(64, flashcute=1.0), ceiling={})
    assert [path.name for path in plots.draw(alone, tmp_path, "x")] == ["x_bf16_tflops.png"]


def test_dtypes_and_groups_have_pictures_of_their_own(tmp_path):
    rows = [*sweep(False), *sweep(False, dtype="fp16"), *sweep(False, group=4)]
    names = {path.name for path in plots.draw(result(*rows), tmp_path, "r")}
    assert {"r_bf16_tflops.png", "r_fp16_tflops.png", "r_bf16_group4_tflops.png"} <= names


def models_of(sustained=False):
    """Returns rows of three models: faster than every peer, slower than one, and without peers."""
    times = {
        "quick": {"flashcute": 100.0, "fa2": 200.0, "fa3": 120.0},
        "slow": {"flashcute": 100.0, "fa2": 150.0, "fa3": 80.0},
        "alone": {"flashcute": 100.0},
    }
    return [row(64, sustained=sustained, **us) | {"model": name} for name, us in times.items()]


def test_models_have_a_bar_each_over_the_best_peer_and_a_dot_over_each():
    rows = models_of()
    axes = plots.models(result(*rows), rows, "title").axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [f"{name}: d=64 s=512 full" for name in ("quick", "slow", "alone")]
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert ends == pytest.approx([1.2, 0.8, 1.0])
    assert axes.patches[0].get_facecolor() != axes.patches[1].get_facecolor()
    dots = {points.get_label(): points.get_offsets().tolist() for points in axes.collections}
    assert dots == {"over fa2": [[2.0, 0.0], [1.5, 1.0]], "over fa3": [[1.2, 0.0], [0.8, 1.0]]}
    assert [text.get_text() for text in axes.texts] == ["1.20", "0.80"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first row is on top


def test_options_have_bars_over_peers_and_dots_over_plain(tmp_path):
    contenders = ("flashcute", "fa2", "fa3", "flex", "plain")
    rows = [
        option_row("window-a", window=[7, 0], flashcute=100.0, fa2=150.0, fa3=130.0, flex=120.0),
        option_row("sinks-a", sinks=True, flashcute=100.0, plain=95.0),
        option_row("softcap-a", softcap=50.0, plain=95.0, fa3=80.0),
    ]
    made = result(*rows, contenders=contenders)
    axes = plots.models(made, rows, "title").axes[0]
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert ends == pytest.approx([1.2, 1.0, 1.0])
    dots = {points.get_label(): points.get_offsets().tolist() for points in axes.collections}
    assert dots["over plain"] == [[0.95, 1.0]]
    assert list(dots) == [f"over {name}" for name in contenders[1:]]
    names = [path.name for path in plots.draw(made, tmp_path, "o")]
    assert names == ["o_bf16_options_ratio.png"]


def test_models_have_no_lines_over_length(tmp_path):
    made = result(*models_of(sustained=True))
    names = [path.name for path in plots.draw(made, tmp_path, "m")]
    assert names == ["m_bf16_models_ratio.png", "m_bf16_models_ratio_sustained.png"]
    alone = result(models_of()[2])
    assert plots.draw(alone, tmp_path, "x") == []
    both = plots.draw(result(*models_of(), *sweep(False)), tmp_path, "b")
    assert {"b_bf16_models_ratio.png", "b_bf16_tflops.png"} <= {path.name for path in both}


def distributions(**options):
    rows = sweep(**options)
    slower = [x | {"inputs": "ramp", "us": x["us"] | {"flashcute": 200.0}} for x in rows]
    return [x | {"inputs": "normal"} for x in rows] + slower


def test_inputs_are_compared_with_peers_and_with_normal_ones():
    rows = distributions(sustained=False)
    figure = plots.inputs(table.parts(rows), "title")
    over_peer, over_normal = (axes for axes in figure.axes if axes.images)
    for axes in (over_peer, over_normal):
        assert [label.get_text() for label in axes.get_yticklabels()] == ["normal", "ramp"]
    points = [label.get_text() for label in over_normal.get_xticklabels()]
    assert len(points) == 12 and points[0] == "d=64 s=512 full"
    # flashcute takes 100 us for 512 tokens and fa2, which lacks d = 128, takes 110.
    assert [text.get_text() for text in over_peer.texts][:7] == ["1.10"] * 6 + ["0.55"]
    assert len(over_peer.texts) == 12
    cells = over_normal.images[0].get_array()
    assert cells[0].tolist() == [1.0] * 12
    assert cells[1].tolist() == pytest.approx([0.5, 0.5, 1, 1, 4, 4] * 2)


def test_several_distributions_have_one_picture_and_the_others_show_normal_inputs(tmp_path):
    made = result(*distributions())
    names = {path.name for path in plots.draw(made, tmp_path, "i")}
    usual = ("tflops", "ratio", "tflops_sustained", "ratio_sustained", "roofline")
    assert names == {f"i_bf16_{what}.png" for what in (*usual, "inputs", "inputs_sustained")}
    only = [x for x in distributions(sustained=False) if x["inputs"] == "ramp"]
    names = [path.name for path in plots.draw(result(*only, ceiling={}), tmp_path, "r")]
    assert names == ["r_bf16_ramp_tflops.png", "r_bf16_ramp_ratio.png"]
    unlike = [only[0], only[1] | {"inputs": "sink"}]
    names = [path.name for path in plots.draw(result(*unlike, ceiling={}), tmp_path, "n")]
    assert names == ["n_bf16_inputs.png"]  # nothing normal


def test_a_title_says_which_inputs():
    part = table.Part("bf16", group=4)
    title = plots._title(result(), "Forward", part)
    assert title == "Forward, bf16, query heads per key head: 4, normal inputs, GPU X"
    assert "ramp inputs" in plots._title(result(), "Forward", part._replace(inputs="ramp"))


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def test_speed_has_a_panel_for_each_head_dim_and_mask():
    rows = sweep()
    figure = plots.speed(result(*rows), rows, "title")
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["d = 64, full", "d = 128, full", "d = 64, causal", "d = 128, causal"]
    first = lines(figure.axes[0])
    expected = [x["tflops"]["flashcute"] for x in rows if (x["d"], x["causal"]) == (64, False)]
    assert list(first["flashcute"].get_xdata()) == [512, 1024, 4096]
    assert list(first["flashcute"].get_ydata()) == expected
    assert list(first["matmul"].get_ydata()) == [800.0, 800.0]
    assert "fa2" in first and "fa2" not in lines(figure.axes[1])
    assert figure.axes[0].get_ylim()[0] == 0
    assert figure.axes[0].get_ylim()[1] > 800
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["flashcute", "fa2", "matmul"]
    ticks = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert ticks == ["512", "1k", "4k"]


def test_sustained_speed_has_its_own_ceiling():
    rows = sweep()
    axes = plots.speed(result(*rows), rows, "title", "_sustained").axes[0]
    assert list(lines(axes)["matmul"].get_ydata()) == [680.0, 680.0]
    assert lines(axes)["flashcute"].get_ydata()[0] == rows[0]["tflops_sustained"]["flashcute"]


def test_ratio_leaves_out_points_without_a_peer():
    rows = sweep()
    axes = plots.ratios(rows, "title").axes[0]
    drawn = lines(axes)
    assert list(drawn["d = 64"].get_ydata()) == pytest.approx([1.1] * 3)
    assert "d = 128" not in drawn


def test_roofline_has_both_roofs_and_every_point():
    rows = sweep()
    axes = plots.roofline(result(*rows), rows, "title").axes[0]
    said = [text.get_text() for text in axes.texts]
    assert said == ["matmul 800 TFLOP/s", "copy 4.30 TB/s"]
    assert sum(len(points.get_offsets()) for points in axes.collections) == len(rows)
    knee = axes.get_lines()[0].get_xdata()[1]
    assert knee == pytest.approx(800 / 4.3)


def test_no_point_covers_the_name_of_the_roof():
    rows = sweep()
    best = 1.2 * max(row["tflops"]["flashcute"] for row in rows)
    rows[0]["tflops"]["flashcute"] = best
    axes = plots.roofline(result(*rows), rows, "title").axes[0]
    name = axes.texts[0]
    assert name.get_text().startswith("matmul")
    assert best < name.get_position()[1] < axes.get_ylim()[1]


def test_a_cpu_is_drawn_in_gigaflops():
    rows = [row(64, flashcute=1e9, torch=5e8)]
    made = result(*rows, machine={}, ceiling={}, contenders=("flashcute", "torch"))
    figure = plots.speed(made, rows, "title")
    assert figure.axes[0].get_ylabel() == "GFLOP/s"
    assert "CPU" in plots._title(made, "Forward", table.Part("bf16"))


def over_cache():
    """Returns rows over a cache: two kinds of heads, pages that peers lack, and a ragged batch."""
    rows = []
    for heads in ("h32/8-d128", "h64/8-d64"):
        for size in ("64x4096-q1", "1x8192-q1", "4x8192-q16"):
            name = f"{size}-{heads}"
            rows.append(serving_row(name, flashcute=100.0, fa3=125.0))
            rows.append(serving_row(name, page_size=16, flashcute=110.0))
    rows.append(serving_row("mixed-8x512-and-56-over-8k", flashcute=700.0, fa3_ragged=900.0))
    return rows


def test_a_cache_has_pictures_of_its_own(tmp_path):
    made = serving_result(*over_cache())
    names = [path.name for path in plots.draw(made, tmp_path, "d")]
    assert names == ["d_bf16_bandwidth.png", "d_bf16_ratio.png"]
    append = serving_result(serving_row("append-16x8192", flashcute=9.0, fa3=8.0), what="append")
    assert [x.name for x in plots.draw(append, tmp_path, "a")] == ["a_bf16_ratio.png"]
    alone = serving_result(serving_row("append-16x8192", flashcute=9.0), what="append")
    assert plots.draw(alone, tmp_path, "x") == []


def test_bandwidth_is_over_the_bytes_under_the_read_ceiling():
    rows = [row for row in over_cache() if not row["decodes"]]
    figure = plots.bandwidth(serving_result(*rows), rows, "title")
    one, other, several, _ = figure.axes
    titles = [axes.get_title() for axes in figure.axes]
    heads = ("h=32/8 d=128", "h=64/8 d=64")
    assert titles == [f"{x}, {y}" for y in ("one query", "several queries") for x in heads]
    ours, ours_16, fa3, ceiling = one.get_lines()
    assert list(ceiling.get_ydata()) == [4.0, 4.0]
    assert list(ours.get_xdata()) == [32.0, 1024.0]  # MiB, sorted
    for line, us in ((ours, 100.0), (ours_16, 110.0), (fa3, 125.0)):
        expected = [x * 2**20 / us / 1e6 for x in (32, 1024)]
        assert list(line.get_ydata()) == pytest.approx(expected, rel=1e-3)
    assert [len(x.get_xdata()) for x in several.get_lines()[:3]] == [1, 1, 1]
    assert list(other.get_lines()[0].get_xdata()) == [16.0, 512.0]
    (legend,) = figure.legends
    said = [text.get_text() for text in legend.get_texts()]
    assert said == ["flashcute", "flashcute, pages of 16", "fa3", "read"]


def test_bandwidth_of_as_many_bytes_is_drawn_as_their_mean():
    times = {"16x8192-q1-h32/8-d128": 100.0, "1x131072-q1-h32/8-d128": 50.0}
    rows = [serving_row(name, flashcute=us) for name, us in times.items()]
    (axes,) = plots.bandwidth(serving_result(*rows), rows, "title").axes
    ours = axes.get_lines()[0]
    speeds = [row["tb_per_second"]["flashcute"] for row in rows]
    assert [*ours.get_xdata()] == [512.0] and [*ours.get_ydata()] == [sum(speeds) / 2]
    assert sorted(axes.collections[0].get_offsets()[:, 1]) == sorted(speeds)
