"""``python -m flashcute bench``: a small run on the CPU, drawing from its file, and messages."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from bench_results import result, row, serving_result, serving_row

from flashcute import __main__ as main
from flashcute import benchmarking as bm
from flashcute import heuristics, ops
from flashcute.bench import cli, command, models, options, sweep
from flashcute.jit import BuildError, kernels
from flashcute.problem import rounded_length, typical_length

SMALL = ("--device", "cpu", "--head-dims", 64, "--seqlens", 16, "--tokens", 16, "--repeats", 2)


def bench(*arguments):
    return main.main(["bench", *map(str, arguments)])


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_a_gpu_it_measures_the_cpu_and_says_so(no_gpu, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    saved = tmp_path / "new" / "cpu.json"
    arguments = (*SMALL[2:], "--masks", "causal", "--json", saved, "--plots", tmp_path / "p")
    assert bench(*arguments) == 0
    printed = capsys.readouterr()
    assert "Nothing here says anything of the kernels' speed" in printed.out
    assert "measured on the CPU" in printed.err  # is also printed before measuring starts
    assert "1/1" in printed.err  # the progress bar
    made = json.loads(saved.read_text())
    assert made["device"] == "cpu"
    (only,) = made["rows"]
    assert (only["seqlen_q"], only["causal"], set(only["us"])) == (16, True, {"flashcute", "torch"})
    pictures = sorted(path.name for path in (tmp_path / "p").iterdir())
    assert pictures == ["cpu_bf16_ratio.png", "cpu_bf16_tflops.png"]
    for path in pictures:
        assert path in printed.out


@pytest.mark.parametrize(("what", "factor"), [("bwd", 2.5), ("fwd+bwd", 3.5)])
def test_backward_on_the_cpu(no_gpu, tmp_path, capsys, what, factor):
    pytest.importorskip("matplotlib")
    saved = tmp_path / "made.json"
    arguments = (*SMALL[2:], "--masks", "causal", "--json", saved, "--plots", tmp_path)
    assert bench(*arguments, "--pass", what) == 0
    made = json.loads(saved.read_text())
    (only,) = made["rows"]
    assert made["pass"] == what and set(only["us"]) == {"flashcute", "torch"}
    assert 0 < only["difference"]["flashcute"] < sweep.AGREEMENT["bf16"]
    flops = factor * bm.sweep_shape(64, 16, True, 16).flops
    for name, us in only["us"].items():
        assert only["tflops"][name] == pytest.approx(flops / us / 1e6, abs=1e-4)
    printed = capsys.readouterr().out
    assert ("GFLOP/s in bursts, backward" in printed) == (what == "bwd")
    assert bench("--plot-only", saved) == 0


@pytest.fixture
def built(monkeypatch):
    """Makes torch report an H200; returns a list of each (configuration, target) to be built.

    Nothing is compiled.
    """
    gpu = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: gpu)
    monkeypatch.setattr(kernels, "find_built", lambda *_: ("cache", None))
    specs = []

    def build_kernels(wanted, jobs, progress, watch):
        specs.extend(wanted)
        return [SimpleNamespace(error=None) for _ in wanted]

    monkeypatch.setattr(kernels, "build_kernels", build_kernels)
    return specs


def test_kernels_are_built_before_the_sweep_and_together(built, monkeypatch):
    there = heuristics.sm90_configs("bf16", 64, True)[0]
    monkeypatch.setattr(
        kernels, "find_built", lambda config, _: ("cache", there if config == there else None)
    )
    points = sweep.points(("bf16", "fp16"), (64,), ("causal",), (1,), (512, 1024, 2048))
    command.build(command.configs_of(points, "fwd"))
    wanted = [c for dtype in ("bf16", "fp16") for c in heuristics.sm90_configs(dtype, 64, True)]
    assert {config for config, _ in built} == set(wanted) - {there}
    assert {target for _, target in built} == {"90"} and len(built) == len(wanted) - 1
    built.clear()
    command.build(command.configs_of(points, "bwd"))
    backward = {heuristics.sm90_bwd_config(dtype, 64, "causal") for dtype in ("bf16", "fp16")}
    assert {config for config, _ in built} == set(wanted) - {there} | backward
    failed = [SimpleNamespace(error="no such type")]
    monkeypatch.setattr(kernels, "build_kernels", lambda *arguments: failed)
    with pytest.raises(BuildError, match="no such type"):
        command.build(command.configs_of(points, "fwd"))


def test_the_whole_sweep_is_the_default_on_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    memory = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    seen = {}

    def configs_of(wanted, what, names):
        seen["what"] = what
        return wanted

    def run(wanted, options, progress):
        assert seen["built"] is wanted
        seen.update(points=wanted, options=options)
        return result(row(64, flashcute=1.0), stopped_early=True)

    monkeypatch.setattr(command, "configs_of", configs_of)
    monkeypatch.setattr(command, "build", lambda wanted: seen.update(built=wanted))
    monkeypatch.setattr(sweep, "run", run)
    assert bench() == 1  # stopped early
    assert [len(point) for point in seen["points"]] == [1] * (5 * 2 * 6)
    options = seen["options"]
    assert (options.device, options.sustained) == ("cuda", 0.0)
    assert options.names == ("flashcute", "fa2", "cudnn", "fa3")
    assert (options.repeats, options.flush_bytes) == (bm.REPEATS, bm.FLUSH_BYTES)
    assert bench("--sustained", "--peers", "cudnn", "--time-limit", "3") == 1
    options = seen["options"]
    assert (options.sustained, options.names) == (1.0, ("flashcute", "cudnn"))
    assert options.time_limit == 3.0 and seen["what"] == "fwd"
    for what, total, expected in (
        ("bwd", 80, 4),
        ("fwd+bwd", 80, 4),
        ("bwd", 24, 1.5),
        ("bwd", 8, 1),
    ):
        memory.total_memory = total << 30
        assert bench("--pass", what) == 1 and seen["what"] == what
        assert seen["options"].flush_bytes == expected * 2**30


PEER = """
def forward(q, k, v, causal):
    from flashcute import flash_attn_func
    return lambda: flash_attn_func(q, k, v, causal=causal)
"""


@pytest.mark.parametrize("what", ["fwd", "bwd"])
def test_a_file_is_a_contender(no_gpu, tmp_path, capsys, what):
    pytest.importorskip("matplotlib")
    file, saved = tmp_path / "other.py", tmp_path / "made.json"
    file.write_text(PEER)
    arguments = (*SMALL[2:], "--json", saved, "--plots", tmp_path, "--pass", what)
    assert bench(*arguments, "--peer-module", f"other={file}") == 0
    made = json.loads(saved.read_text())
    assert made["contenders"] == ["flashcute", "torch", "other"]
    assert all(set(row["us"]) == {"flashcute", "torch", "other"} for row in made["rows"])
    assert "| flashcute, bf16 | other " in capsys.readouterr().out


def test_a_file_can_stand_in_for_a_contender(no_gpu, tmp_path, capsys):
    file, saved = tmp_path / "other.py", tmp_path / "made.json"
    file.write_text(PEER.replace("causal=causal)", "causal=causal) + 1"))
    assert bench(*SMALL, "--json", saved, "--peer-module", f"fa3={file}") == 1  # fa3 is compared
    assert json.loads(saved.read_text())["contenders"] == ["flashcute", "torch", "fa3"]
    assert "fa3 differs from torch by 1.0" in capsys.readouterr().err


@pytest.mark.parametrize("shapes", [(), ("--shapes", "sinks-d64", "--pass", "bwd")])
def test_a_file_with_the_name_of_the_trusted_peer_is_not_trusted(no_gpu, tmp_path, capsys, shapes):
    """Where the file's contender is wrong or does not run, the project's own is compared with."""
    file, saved = tmp_path / "other.py", tmp_path / "made.json"
    file.write_text(PEER.replace("causal=causal)", "causal=causal) + 1"))
    chosen = (*shapes, "--tokens", 16, "--repeats", 1) if shapes else SMALL
    wrong = bench(*chosen, "--json", saved, "--peer-module", f"torch={file}")
    errors = capsys.readouterr().err
    said = "torch differs from the built-in torch by 1.0" in errors
    assert said == (wrong == 1) == (not shapes)
    (row, *_) = json.loads(saved.read_text())["rows"]
    assert row["difference"]["flashcute"] <= sweep.AGREEMENT["bf16"]
    assert ("torch" in row["missing"]) == bool(shapes)


def test_a_file_is_a_contender_with_windows_alone(no_gpu, tmp_path, capsys):
    file, saved = tmp_path / "other.py", tmp_path / "made.json"
    source = PEER.replace("forward(q, k, v, causal)", "forward_local(q, k, v, left, right)")
    file.write_text(source.replace("causal=causal", "window_size=(left, right)"))
    chosen = ("--shapes", "window-127", "alibi", "--tokens", 16, "--repeats", 1)
    assert bench(*chosen, "--json", saved, "--peer-module", f"other={file}") == 0
    rows = {row["model"]: row for row in json.loads(saved.read_text())["rows"]}
    assert {"flashcute", "other"} <= set(rows["window-127-d64-8k"]["us"])
    assert rows["window-127-d64-8k"]["difference"]["other"] <= sweep.AGREEMENT["bf16"]
    assert "other" not in rows["alibi-d128"]["us"]
    printed = capsys.readouterr().out
    assert "other did not run everywhere: of the options, a file of --peer-module" in printed
    file.write_text(source.replace("causal=causal)", "window_size=(left, right)) + 1"))
    assert bench(*chosen, "--json", saved, "--peer-module", f"other={file}") == 1  # it is compared
    assert "other differs from torch by 1.0" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["x", "flashcute=x.py", "a-b=x.py", "fa3=/none/x.py", "=x.py"])
def test_what_names_no_file_is_refused(value, capsys):
    with pytest.raises(SystemExit):
        bench("--peer-module", value)
    assert "argument --peer-module: expected" in capsys.readouterr().err


def test_models_and_inputs_on_the_cpu(no_gpu, tmp_path, capsys):
    saved = tmp_path / "models.json"
    chosen = ("--shapes", "chunk-256", "vit-h", "--inputs", "normal", "ramp", "--tokens", 16)
    assert bench(*chosen, "--repeats", 1, "--json", saved) == 0
    rows = json.loads(saved.read_text())["rows"]
    assert [(row["model"], row["inputs"], row["d"], row["seqlen_k"]) for row in rows] == [
        *(("vit-h-14", "normal", 80, 16), ("vit-h-14", "ramp", 80, 16)),
        *(("chunk-256-of-4k", "normal", 128, 16), ("chunk-256-of-4k", "ramp", 128, 16)),
    ]
    printed = capsys.readouterr().out
    assert "flashcute, bf16, models" in printed
    assert "ours, normal inputs" in printed


def test_options_on_the_cpu(no_gpu, tmp_path, capsys):
    saved = tmp_path / "options.json"
    chosen = ("--shapes", "window-127", "sinks-d64", "16-of-1024-d64", "--tokens", 16)
    assert bench(*chosen, "--repeats", 1, "--json", saved) == 0
    made = json.loads(saved.read_text())
    assert made["contenders"] == ["flashcute", "torch", "plain"]
    rows = {row["model"]: row for row in made["rows"]}
    assert list(rows) == [
        *("window-127-d64-8k", "sinks-d64", "sinks-d64-grouped", "ragged-16-of-1024-d64-full")
    ]
    assert all(set(row["difference"]) == {"flashcute", "torch"} for row in rows.values())
    assert rows["window-127-d64-8k"]["window"] == [1, 0]
    assert rows["ragged-16-of-1024-d64-full"]["lengths"] == [2] * 8
    assert set(rows["sinks-d64"]["us"]) == {"flashcute", "torch", "plain"}
    printed = capsys.readouterr().out
    assert "flashcute, bf16, options: sinks" in printed
    assert "plain did not run everywhere: without its window it is more work (window-127" in printed


def test_a_cache_on_the_cpu(no_gpu, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    saved = tmp_path / "decode.json"
    chosen = ("--pass", "decode", "--shapes", "1x8192-q1-h64", "--page-sizes", 0, 16)
    assert bench(*chosen, "--repeats", 1, "--json", saved, "--plots", tmp_path) == 0
    made = json.loads(saved.read_text())
    assert (made["pass"], made["contenders"]) == ("decode", ["flashcute", "torch"])
    assert [line["page_size"] for line in made["rows"]] == [0, 16]
    for line in made["rows"]:
        assert (line["model"], line["seqlen_k"]) == ("1x8192-q1-h64/8-d64", 256)
        assert line["cache_bytes"] == 2 * 2 * 256 * 8 * 64
        assert set(line["us"]) == {"flashcute", "torch"} and line["missing"] == {}
        assert 0 < line["difference"]["flashcute"] < sweep.AGREEMENT["bf16"]
    printed = capsys.readouterr()
    assert "TB/s of the cache, decoding" in printed.out
    assert "Nothing here says anything of the kernels' speed" in printed.out
    pictures = ["decode_bf16_bandwidth.png", "decode_bf16_ratio.png"]
    assert sorted(path.name for path in tmp_path.glob("*.png")) == pictures
    assert bench("--plot-only", saved) == 0  # without --pass
    assert "TB/s of the cache, decoding" in capsys.readouterr().out


def test_a_wrong_output_over_a_cache_is_the_exit_status(monkeypatch, capsys):
    rows = [serving_row("4x4096-q1-h32/8-d128", 16, difference=0.5, flashcute=9.0)]
    rows.append(serving_row("append-16x8192", append="rotary", flashcute=9.0))
    rows[1]["difference"] = None
    made = serving_result(*rows)
    monkeypatch.setattr(command, "_measure", lambda args: made)
    assert bench("--pass", "decode") == 1
    printed = capsys.readouterr().err
    where = "4x4096-q1-h32/8-d128, pages of 16 bf16"
    assert f"flashcute differs from torch by 0.5 at {where}" in printed
    assert "did not run at append-16x8192, append rotary bf16" in printed


@pytest.mark.parametrize(
    ("shapes", "names"),
    [
        (["options"], ("flashcute", "fa2", "fa3", "flex", "plain")),
        (["models"], ("flashcute", "fa2", "cudnn", "fa3")),
        (["gpt2", "sinks"], ("flashcute", "fa2", "cudnn", "fa3", "flex", "plain")),
    ],
)
def test_the_usual_contenders_are_those_of_the_shapes(shapes, names):
    assert command._usual(wanted("--shapes", *shapes), "cuda") == names


def test_the_usual_contenders_over_a_cache():
    names = ("flashcute", "fa2", "cudnn", "fa3", "fa3_ragged")
    assert command._usual(wanted("--pass", "decode"), "cuda") == names
    assert command._usual(wanted("--pass", "append"), "cpu") == ("flashcute", "torch")


def names_asked_for(shape, dtype, sms):
    """Returns the names of the kernels for the problems that the binding hands to the resolver."""
    asked = []
    total = sum(shape.lengths)
    length = typical_length(total, shape.b, shape.seqlen_q) if total else shape.seqlen_q
    local = shape.window != (-1, -1)
    problem = ops._Problem(
        device=0,
        dtype=("fp16", "bf16").index(dtype),
        mask=2 if local else int(shape.causal),
        b=rounded_length(shape.b) if total else shape.b,
        seqlen_q=rounded_length(length),
        seqlen_k=rounded_length(length),
        **{name: getattr(shape, name) for name in ("h", "h_k", "d")},
        window_left=rounded_length(min(shape.window[0], length)) if local else 0,
        window_right=rounded_length(min(shape.window[1], length)) if local else 0,
        softcap=shape.softcap > 0,
        alibi=shape.alibi,
        dropout=shape.dropout > 0,
    )
    with pytest.MonkeyPatch.context() as patch:
        gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=sms)
        patch.setattr(torch.cuda, "get_device_properties", lambda *_: gpu)
        patch.setattr(
            ops.jit,
            "get_kernel",
            lambda config, target: asked.append(config.full_name) or SimpleNamespace(address=1),
        )
        ops._choose(problem)
    return asked


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("sms", [78, 114, 132])
def test_what_is_built_for_options_is_what_their_calls_ask_for(built, monkeypatch, dtype, sms):
    gpu = SimpleNamespace(multi_processor_count=sms)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: gpu)
    for name, shape in options.OPTIONS.items():
        built.clear()
        command.build(command.configs_of([[sweep.Variant(dtype, shape)]], "fwd"))
        found = [config.full_name for config, _ in built]
        assert found == names_asked_for(shape, dtype, sms), name


def wanted(*arguments, on_gpu=True):
    args = main._parser().parse_args(["bench", *map(str, arguments)])
    return command._points(args, on_gpu)


def test_shapes_and_inputs_are_those_asked_for():
    everything = wanted("--shapes", "models", "--inputs", "all")
    assert [point[0].shape for point in everything] == list(models.MODELS.values())
    assert all([x.inputs for x in point] == list(cli.INPUTS) for point in everything)
    both = wanted("--shapes", "sweep", "gpt2", "--head-dims", 64, "--seqlens", 512)
    assert [point[0].model for point in both] == [None, None, "gpt2-1k"]
    small = wanted("--shapes", "models", on_gpu=False)
    assert all(point[0].shape.seqlen_q <= 256 for point in small)


@pytest.mark.parametrize(
    "arguments", [("--head-dims", 64), ("--masks", "full"), ("--groups", 4), ("--seqlens", 512)]
)
def test_models_have_their_own_sizes(no_gpu, arguments, capsys):
    assert bench("--shapes", "models", *arguments) == 1
    assert "with the sweep only, got --shapes models" in capsys.readouterr().err


def test_an_unknown_model_is_refused_with_the_known_ones(no_gpu, capsys):
    assert bench("--shapes", "gpt9") == 1
    printed = capsys.readouterr().err
    assert "'gpt9'" in printed and "gpt2-1k" in printed


def test_a_wrong_output_is_the_exit_status(monkeypatch, capsys):
    wrong = result(row(64, difference=1.0, flashcute=1.0))
    monkeypatch.setattr(command, "_measure", lambda args: wrong)
    assert bench() == 1
    assert "flashcute differs from fa2 by 1.0" in capsys.readouterr().err


def test_a_result_is_drawn_again(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(command, "_measure", None)
    path = tmp_path / "fwd.json"
    bm.write_json(path, result(row(64, flashcute=1.0, fa2=2.0)))
    assert bench("--plot-only", path) == 0
    printed = capsys.readouterr().out
    assert "Ratios in bursts" in printed
    assert str(tmp_path / "fwd_bf16_tflops.png") in printed
    assert bench("--plot-only", path, "--plots", tmp_path / "p") == 0
    assert (tmp_path / "p" / "fwd_bf16_ratio.png").stat().st_size > 10_000


WRONG_ROW = '{"rows": [{"us": 1, "tflops": 2}]}'


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"rows": []}', '{"rows": [{"us": {}}]}', WRONG_ROW]
)
def test_drawing_refuses_other_files(tmp_path, capsys, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    assert bench("--plot-only", path) == 1
    assert "flashcute bench: expected a result of bench" in capsys.readouterr().err
    path.write_text('{"pass": "integrations", "rows": [{}]}')
    assert bench("--plot-only", path) == 1
    assert "integrations, which has no plots" in capsys.readouterr().err
    assert bench("--plot-only", tmp_path / "none.json") == 1
    assert "none.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "cuda"), "expected an NVIDIA GPU that torch can use for --device cuda"),
        (("--sustained",), "expected a GPU for --sustained"),
        (("--peers", "torch", "fa2", "fa3"), "got fa2, fa3, which need a GPU; say --peers torch"),
    ],
)
def test_what_needs_a_gpu_is_refused(no_gpu, arguments, message, capsys):
    assert bench(*arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--head-dims", 80),
        ("--seqlens", 0),
        ("--dtypes", "fp32"),
        ("--peers", "fa9"),
        ("--inputs", "x"),
    ],
)
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit):
        bench(*arguments)
    assert arguments[0] in capsys.readouterr().err


def test_pictures_need_matplotlib(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert bench("--plots", tmp_path) == 1
    printed = capsys.readouterr().err
    assert "expected the package matplotlib for --plots" in printed
    assert "leave out --plots" in printed
    assert bench("--plot-only", tmp_path / "fwd.json") == 1
    printed = capsys.readouterr().err
    assert "expected the package matplotlib for --plot-only" in printed
    assert "--plots" not in printed


def test_a_result_that_cannot_be_written_is_shown(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "_measure", lambda args: result(row(64, flashcute=1.0)))
    drawn = []
    monkeypatch.setattr(command, "_draw", lambda *args: drawn.append(args))
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: True)
    assert bench("--json", "/dev/full", "--plots", tmp_path) == 1
    printed = capsys.readouterr()
    assert "Ratios in bursts" in printed.out or "flashcute, bf16" in printed.out
    assert "flashcute bench: expected to write /dev/full, got: No space left" in printed.err
    assert "it takes 1 KiB" in printed.err
    assert len(drawn) == 1


def test_a_place_that_cannot_be_written_is_said_before_the_measurement(monkeypatch, capsys):
    monkeypatch.setattr(command, "_measure", None)
    with pytest.raises(SystemExit):
        bench("--json", "/proc/x.json")
    assert "argument --json: expected a file for results" in capsys.readouterr().err
