"""examples/train_gpt.py on the CPU: its trainings, and that it notices a wrong attention."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os

import pytest
import torch
import train_gpt

TINY = ("--device", "cpu", "--steps", "4", "--layers", "1", "--heads", "1")
TINY += ("--sequence", "16", "--batch", "4")


@pytest.fixture(autouse=True)
def one_thread():
    """Sets one thread, as the model is too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def scaled(q, k, v):
    return train_gpt.flashcute_attention(1.1 * q, k, v)


def without_gradient_of_keys(q, k, v):
    return train_gpt.flashcute_attention(q, k.detach(), v)


def nan(q, k, v):
    return train_gpt.flashcute_attention(q, k, v) * torch.nan


def test_curves_and_gradients_agree_and_the_result_is_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert train_gpt.main([*TINY, "--check", "--out", str(tmp_path)]) == 0
    made = json.loads((tmp_path / "train_gpt.json").read_text())
    assert made["passed"] and made["check"]["passed"] and made["agreement"]["passed"]
    noise = made["agreement"]["rms_difference_from_sdpa"]
    assert 0 < max(noise["sdpa permuted"], noise["sdpa other kernel"]) < 1e-5
    assert list(made["runs"]) == ["flashcute", "sdpa", "sdpa permuted", "sdpa other kernel"]
    for run in made["runs"].values():
        assert len(run["losses"]) == 4 and run["step_ms"] > 0 and run["step_mib"] is None
        assert 5 < run["losses"][0] < 6  # log(256) = 5.55
    assert made["settings"]["dtype"] == "float32"
    assert (tmp_path / "train_gpt.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert "| sdpa permuted " in printed.out and "4/4" in printed.err


@pytest.mark.parametrize("wrong", [scaled, without_gradient_of_keys, nan])
def test_a_wrong_attention_fails_either_comparison(monkeypatch, capsys, wrong):
    monkeypatch.setitem(train_gpt.RUNS, "flashcute", train_gpt.Kind(wrong))
    assert train_gpt.main(list(TINY)) == 1
    assert "noise of PyTorch's own): FAILED" in capsys.readouterr().out
    monkeypatch.setattr(train_gpt, "compare", lambda _: pytest.fail("training was compared"))
    assert train_gpt.main([*TINY, "--check", "--attention", "sdpa", "--steps", "1"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_autocast_rounds_and_curves_agree_within_the_noise(capsys):
    assert train_gpt.main([*TINY, "--dtype", "bfloat16", "--check", "--steps", "20"]) == 0
    losses = train_gpt.Settings(1, 1, 1, 16, 2, 0, "cpu", "bfloat16")
    batch = losses.batches(train_gpt.read_text())[0]
    with losses.autocast():
        found = losses.model()(batch)
    assert found.dtype == torch.float32
    assert found != losses.model()(batch)


def test_runs_differ_in_their_attention_only():
    settings = train_gpt.Settings(3, 2, 1, 16, 4, 7, "cpu", "float32")
    one, other = settings.model(), settings.model()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    text = train_gpt.read_text()
    assert torch.equal(text, train_gpt.read_text()) and len(text) > 1_000_000
    batches = settings.batches(text)
    assert len(batches) == 3 and batches[0].shape == (4, 17)
    assert not torch.equal(batches[0], batches[1])
    for a, b in zip(batches, settings.batches(text), strict=True):
        assert torch.equal(a, b)
    used = []

    def attention(q, k, v):
        used.append(q.shape)
        return train_gpt.sdpa_attention(q, k, v)

    one.use(attention)(batches[0])
    assert used == [(4, 16, 1, 64)] * 2


def test_two_processes_train_as_one(tmp_path, capfd):
    pytest.importorskip("matplotlib")
    arguments = (*TINY, "--nproc", "2", "--check", "--dtype", "bfloat16", "--steps", "8")
    assert train_gpt.main([*arguments, "--out", str(tmp_path)]) == 0
    made = json.loads((tmp_path / "train_gpt.json").read_text())
    assert made["passed"] and made["settings"]["processes"] == 2
    assert list(made["runs"]) == list(train_gpt.RUNS)
    curves = {name: tuple(run["losses"]) for name, run in made["runs"].items()}
    assert len(set(curves.values())) > 3  # the trainings differ
    for losses in curves.values():
        assert losses == pytest.approx(curves["sdpa"], abs=2e-3)
    printed = capfd.readouterr()
    assert printed.out.count("difference from PyTorch's loss") == 1  # one process speaks
    assert printed.out.count("largest error by norm: sdpa") == 1
    assert (tmp_path / "train_gpt.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "2", "--sequence", "18"], "--sequence of a multiple of 4 for --nproc 2, got"),
        (["--nproc", "3", "--sequence", "24"], "--batch of a multiple of 3 for --nproc 3, got 4"),
        (
            ["--nproc", "2", "--attention", "sdpa"],
            "an attention of flashcute, got --attention sdpa",
        ),
        (["--nproc", "4", "--batch", "4"], "expected --nproc 2 of torchrun, or none, got 4"),
    ],
)
def test_what_cannot_be_split_is_refused(monkeypatch, capsys, arguments, message):
    if "torchrun" in message:
        monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        train_gpt.main([*TINY, *arguments])
    assert message in capsys.readouterr().err


def test_too_few_gpus_are_said(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit):
        train_gpt.main(["--device", "cuda", "--nproc", "2"])
    assert "a GPU for each process, got --nproc 2 and 1 GPUs" in capsys.readouterr().err


def test_one_attention_alone_is_not_compared(capsys):
    assert train_gpt.main([*TINY, "--attention", "sdpa"]) == 0
    printed = capsys.readouterr().out
    assert "difference" not in printed and "flashcute" not in printed


def test_a_gpu_that_is_not_there_is_said(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        train_gpt.main(["--device", "cuda"])
    assert "expected an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sequence", "2147483647"], "expected --sequence below the "),
        (["--steps", "2147483647", "--batch", "2147483647"], "fit into memory"),
        (["--heads", "2000000"], "fit into memory"),
    ],
)
def test_sizes_that_cannot_be_are_a_message(arguments, message):
    with pytest.raises(SystemExit, match=message):
        train_gpt.main([*TINY, "--steps", "1", *arguments])


def test_a_gpu_that_is_full_is_a_message(monkeypatch):
    def run(args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 ...")

    monkeypatch.setattr(train_gpt, "_run", run)
    with pytest.raises(SystemExit, match="fit into memory, got: CUDA out of memory"):
        train_gpt.main([*TINY])


def test_the_result_is_written_before_it_is_shown(tmp_path):
    pytest.importorskip("matplotlib")

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with contextlib.redirect_stdout(Full()), pytest.raises(OSError, match="No space left"):
        train_gpt.main([*TINY, "--out", str(tmp_path)])
    assert json.loads((tmp_path / "train_gpt.json").read_text())["runs"]


def test_sizes_depend_on_the_device_and_can_be_set():
    assert train_gpt.DEFAULTS["cuda"] == {
        **{"steps": 300, "layers": 12, "heads": 12, "sequence": 2048, "batch": 16}
    }
    with pytest.raises(SystemExit):
        train_gpt.main(["--steps", "0"])
