"""``bench --pass integrations``: a small run on the CPU, the kernels it builds, its tables."""

from __future__ import annotations

import contextlib
import json
import warnings
from types import SimpleNamespace

import pytest
import torch

from flashcute import __main__ as main
from flashcute.bench import command, integrations

pytest.importorskip("transformers")


def bench(*arguments):
    return main.main(["bench", "--pass", "integrations", *map(str, arguments)])


def test_every_kind_runs_on_the_cpu_with_pytorchs_results(tmp_path, capsys):
    saved = tmp_path / "integrations.json"
    names = ("gpt-d64-s2048", "llama-d128-s8192", "64")
    few = ("--repeats", 1, "--warmup", 1)
    assert bench("--device", "cpu", "--shapes", *names, *few, "--json", saved) == 0
    made = json.loads(saved.read_text())
    found = {row["point"]: row for row in made["rows"]}
    kinds = {row["kind"] for row in made["rows"]}
    assert kinds == {"gpt", "llama", "padded", "padded-attention"}
    for row in found.values():
        assert set(row["us"]) >= {"flashcute", "default"}
        assert 0 <= row["difference"]["flashcute"] < 2e-2
    assert found["padded-64"]["difference"]["flashcute"] > 0  # the two compute it differently
    assert found["padded-64"]["backend"]["flashcute"] == "cute_attn"
    assert "cudnn" in found["gpt-d64-s2048"]["missing"]
    printed = capsys.readouterr().out
    assert "cudnn did not run: " in printed and "| llama-d128-s8192 " in printed


def test_one_kernel_serves_many_points(monkeypatch):
    gpu = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: gpu)
    passes = integrations.variants([integrations.HOST, *integrations.POINTS], ["bf16"])
    found = {x for what, of in passes.items() for x in command.configs_of([of], what)}
    # The points with padded batches need no gradients, so they add no backward to this set.
    assert {x.name for x in found if x.kind == "bwd"} == {
        "flash_bwd_hdim64_bf16_sm90",
        "flash_bwd_hdim64_bf16_causal_sm90",
        "flash_bwd_hdim128_bf16_causal_sm90",
    }
    assert len(found) <= 10


def test_pytorchs_kernels_in_the_place_of_ours_are_an_error():
    with pytest.raises(UserWarning, match="own kernel"), integrations._around("flashcute"):
        warnings.warn("flashcute.enable: aten::x runs on PyTorch's own kernel: d", stacklevel=1)


ROW = {
    **{"point": "gpt-d64-s2048", "dtype": "bf16", "b": 8, "seqlen_q": 2048, "h": 16, "h_k": 16},
    **{"d": 64, "causal": True, "missing": {"cudnn": "RuntimeError: none"}},
    "us": {"flashcute": 1000.0, "default": 1250.0, "fa2": 1100.0},
    "backend": {"default": "CUDNN_ATTENTION"},
    "difference": {"flashcute": 0.01, "fa2": 0.05},
}
HOST = {
    **{"pass": "fwd", "d": 64, "seqlen_q": 64, "h": 4, "h_k": 4},
    "host_us": {"flashcute": 24.0, "default": 21.0, "fa2": 20.0, "direct": 17.0},
}
RESULT = {
    **{"device": "cuda", "contenders": list(integrations._AROUND), "rows": [ROW], "host": [HOST]},
    "stopped_early": True,
}


def test_the_tables():
    text = integrations.summary(RESULT)
    lines = [line.replace("|", " ").split() for line in text.splitlines()]
    shape = ["gpt-d64-s2048", "bf16", "8", "2048", "16/16", "64", "causal"]
    assert [*shape, "1.000", "1.250", "1.100", "-", "1.250", "1.100", "cudnn"] in lines
    assert ["fwd", "64", "64", "4/4", "24.0", "21.0", "20.0", "-", "17.0", "1.20"] in lines
    assert "cudnn did not run: RuntimeError: none" in text and "STOPPED EARLY" in text


def test_a_wrong_result_is_named():
    (line,) = integrations.disagreements(RESULT)
    assert line == "fa2 differs from PyTorch's own choice by 0.05 at gpt-d64-s2048 bf16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shapes", "mamba"), "part of the name of a point of --pass integrations, got 'mamba'"),
        (("--sustained", "--peers", "fa2"), "without --peers, --sustained, which"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    assert bench("--device", "cpu", *arguments) == 1
    assert message in capsys.readouterr().err


def test_host_time_takes_turns_in_each_contenders_backend(monkeypatch):
    inside, seen = [], []

    @contextlib.contextmanager
    def around(name):
        inside.append(name)
        yield
        inside.clear()

    def host_time(call, batches):
        seen.append(inside[0] if inside else "direct")
        assert all(x is not None for x in call()) if isinstance(call(), tuple) else call().shape
        return 10.0 + len(inside)

    make, two = integrations.bm.make_qkv, ("flashcute", "fa2")
    monkeypatch.setattr(integrations, "_AROUND", {x: lambda x=x: around(x) for x in two})
    monkeypatch.setattr(integrations.bm, "host_time", host_time)
    monkeypatch.setattr(
        integrations.bm, "make_qkv", lambda shape, dtype, _: make(shape, dtype, "cpu")
    )
    shape = integrations.bm.Shape(1, 16, 16, 4, 2, 32, causal=True)
    for what in ("fwd", "fwd+bwd"):
        found = integrations.measure_host(shape, what)
        assert found == {"flashcute": 11.0, "fa2": 11.0, "direct": 10.0}
    assert sorted(set(seen)) == ["direct", "fa2", "flashcute"] and len(seen) == 2 * 3 * 5
