"""``bench --pass ring``: a small run of two processes on the CPU, its table, and its messages."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from flashcute import __main__ as main
from flashcute.bench import ring, ring_plots
from flashcute.distributed import ring_flash_attn_func
from flashcute.distributed.communication import Communicator

SMALL = ("--pass", "ring", "--device", "cpu", "--head-dims", "64", "--seqlens", "32")


def bench(*arguments):
    return main.main(["bench", *map(str, arguments)])


def test_two_processes_on_the_cpu(tmp_path, capfd):
    pytest.importorskip("matplotlib")
    saved, drawn = tmp_path / "ring.json", tmp_path / "ring_bf16_causal_d64_h4over1.png"
    assert bench(*SMALL, "--repeats", 2, "--json", saved, "--plots", tmp_path) == 0
    printed = capfd.readouterr().out
    picture = drawn.read_bytes()
    assert picture.startswith(b"\x89PNG") and f"{drawn}" in printed
    drawn.unlink()
    assert bench("--plot-only", saved) == 0  # draws and prints from the file
    again = capfd.readouterr().out
    assert drawn.read_bytes() == picture and "2 processes on cpu" in again
    assert "Thousands of tokens a second, 2 processes on cpu" in printed
    assert "Nothing here says anything of the kernels' speed" in printed
    made = json.loads(saved.read_text())
    assert [row["pass"] for row in made["rows"]] == ["fwd", "fwd+bwd"]
    for row in made["rows"]:
        assert (row["seqlen_q"], row["h"], row["h_k"], row["causal"]) == (32, 4, 1, True)
        assert set(row["tokens_per_second"]) == {"ring", "allgather", "one"}
        for name, speed in row["tokens_per_second"].items():
            assert speed == pytest.approx(32e6 / row["us"][name])
        for name in ("ring", "allgather"):
            assert 0 <= row["difference"][name] < 4e-2
            share = 1 - row["us"][f"{name} alone"] / row["us"][name]
            assert row["not_hidden"][name] == pytest.approx(max(share, 0))


ROW = {
    **{"pass": "fwd", "dtype": "bf16", "seqlen_q": 4096, "h": 8, "h_k": 2, "d": 128},
    **{"causal": True, "missing": {"torch_gather": "TypeError: too old"}},
    "tokens_per_second": {
        **{"ring": 3e6, "allgather": 2e6, "one": 1.5e6, "torch_ring": 2.5e6},
        **{"torch_ring_ours": 4e6},  # not PyTorch's own
    },
    "not_hidden": {"ring": 0.125, "allgather": 0.5},
    "difference": {"ring": 0.01, "allgather": 0.05},
}
RESULT = {"nproc": 2, "device": "cuda", "contenders": list(ring.NAMES["cuda"]), "rows": [ROW]}


def test_the_table():
    text = ring.summary({**RESULT, "stopped_early": True})
    (line,) = (line for line in text.splitlines() if " bf16 " in line)
    figures = ["3000.0", "2000.0", "1500.0", "2500.0", "-", "4000.0", "-"]
    figures += ["2.000", "1.200", "12.5", "50.0"]
    cells = ["fwd", "bf16", "128", "causal", "4096", "8/2", *figures]
    assert line.replace("|", " ").split() == cells
    assert "torch_gather did not run: TypeError: too old" in text
    assert "STOPPED EARLY" in text


def test_the_picture_has_what_was_measured():
    pytest.importorskip("matplotlib")
    longer = {**ROW, "seqlen_q": 8192, "tokens_per_second": {"ring": 4e6, "allgather": 1e6}}
    both = {**ROW, "pass": "fwd+bwd"}
    made = {**RESULT, "machine": {"gpu": "H200"}, "rows": [longer, ROW, both]}
    (figure,) = ring_plots.figures(made).values()
    assert "2 x H200: bf16, d = 128, 8/2 heads, causal" in figure.get_suptitle()
    speed, over_one, not_hidden, *second = figure.axes
    assert len(second) == 3
    of = {line.get_label(): line.get_xydata().tolist() for line in speed.get_lines()}
    assert of["ring"] == [[4096, 3e6], [8192, 4e6]] and of["one"] == [[4096, 1.5e6]]
    of = {line.get_label(): line.get_xydata().tolist() for line in over_one.get_lines()}
    assert of["ring"] == [[4096, 2.0]] and "one" not in of and "torch_gather" not in of
    of = {line.get_label(): line.get_xydata().tolist() for line in not_hidden.get_lines()}
    assert of == {"ring": [[4096, 12.5], [8192, 12.5]], "allgather": [[4096, 50.0], [8192, 50.0]]}


def test_a_wrong_output_is_named():
    (line,) = ring.disagreements(RESULT)
    assert line == "allgather differs from one process by 0.05 at s=4096 bf16"
    nan = {**RESULT, "rows": [{**ROW, "difference": {"ring": float("nan")}}]}
    assert len(ring.disagreements(nan)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nproc", 1), "expected two processes or more for --pass ring"),
        (("--device", "cuda", "--nproc", 99), "a GPU for each, got --nproc 99"),
        (("--peers", "fa2"), "without --peers, which"),
        (("--tokens", 512), "without --tokens, which"),
        (("--shapes", "llama", "--sustained"), "without --sustained, --shapes, which"),
        (("--nproc", 3), "multiples of 2 x 3 processes, got 32"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    assert bench(*SMALL, *arguments) == 1
    printed = capsys.readouterr().err
    assert message in printed and "row" not in printed  # no run, no progress


def test_processes_are_for_the_ring_only(capsys):
    assert bench("--nproc", 2) == 1
    assert "expected --nproc with --pass ring only" in capsys.readouterr().err


def _dies(*args):
    raise SystemExit(3)


def test_a_process_that_ends_is_an_error(monkeypatch, capfd):
    monkeypatch.setattr(ring, "_worker", _dies)
    with pytest.raises(RuntimeError, match=r"2 processes to measure, got exit codes \[.*3.*\]"):
        bench(*SMALL)


def test_without_transfers_nothing_is_sent(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(Communicator, "exchange", lambda self, messages: sent.append(messages))
    monkeypatch.setattr(Communicator, "wait", lambda self, started: None)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        x = torch.zeros(1, 4, 1, 8)
        with ring.without_transfers():
            ring_flash_attn_func(x, x, x, causal=True)
        assert not sent
        ring_flash_attn_func(x, x, x, causal=True)
        assert sent
    finally:
        dist.destroy_process_group()
