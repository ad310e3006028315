"""examples/generate.py on the CPU: its output, and that it notices wrong tokens and logits."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

import generate  # noqa: E402
import paged_llama  # noqa: E402

TINY = ("--device", "cpu", "--layers", "2", "--batch", "3", "--new-tokens", "6")
TINY += ("--prompts", "3", "30", "--hidden", "32", "--intermediate", "32", "--vocabulary", "100")


@pytest.fixture(autouse=True)
def one_thread():
    """Sets one thread, as the model is too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_tokens_are_exact_and_the_result_is_written(tmp_path, capsys):
    path = tmp_path / "made" / "generate.json"
    arguments = [*TINY, "--check", "--json", str(path), "--sdpa", "dynamic", "static"]
    assert generate.main([*arguments, "--page-size", "1"]) == 0
    made = json.loads(path.read_text())
    check = made["check"]
    assert made["passed"] and check["passed"] and check["reference"] == "float64"
    assert list(made["runs"]) == list(check["runs"]) == ["flashcute", "sdpa dynamic", "sdpa static"]
    for counts in check["runs"].values():
        assert counts["exact"] == counts["as_flashcute"] == check["tokens"] == 18
        assert counts["ties"] == counts["wrong"] == 0 and counts["decided"] == 18
    for run in made["runs"].values():
        assert run["step_ms"] > 0 and run["prompts_s"] > 0
        assert run["tokens_per_second"] == pytest.approx(3e3 / run["step_ms"])
    assert made["settings"]["prompts"] == [3, 30] and made["machine"]["transformers"]
    printed = capsys.readouterr()
    assert (
        "| flashcute | pages of 1 " in printed.out and "| sdpa      | StaticCache " in printed.out
    )
    assert "of flashcute's 18 tokens 18 are those of the float64 reference, 0" in printed.out
    assert printed.out.rstrip().endswith("(allowed 2): passed")
    assert "36/36" in printed.err and "9/9" in printed.err


def test_rounded_tokens_are_exact_but_for_ties(capsys):
    assert generate.main([*TINY, "--check", "--dtype", "bfloat16", "--new-tokens", "20"]) == 0
    assert "of the float32 reference" in capsys.readouterr().out


ATTENTION = paged_llama.flash_attn_with_kvcache
WRONG = {
    "scale": {"softmax_scale": 0.26},  # 0.25 is right
    "rotary": {"rotary_interleaved": True},
    "mask": {"causal": False},
    "window": {"window_size": (20, 0)},
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_attention_fails(monkeypatch, capsys, fault):
    def attention(*args, **kwargs):
        return ATTENTION(*args, **kwargs | WRONG[fault])

    monkeypatch.setattr(paged_llama, "flash_attn_with_kvcache", attention)
    assert generate.main([*TINY, "--check"]) == 1
    assert "(allowed 2): FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("nan", [False, True])
def test_a_wrong_token_or_no_number_fails(monkeypatch, capsys, nan):
    """The wrong token is the last one, from which nothing further is computed."""
    right = paged_llama.PagedLlama.generate

    def wrong(self, prompts, new_tokens, mark):
        tokens, logits = right(self, prompts, new_tokens, mark)
        if nan:
            logits[-1, 0, 0] = torch.nan
        else:
            tokens[1, -1] = (tokens[1, -1] + 1) % 100
        return tokens, logits

    monkeypatch.setattr(paged_llama.PagedLlama, "generate", wrong)
    assert generate.main([*TINY, "--check"]) == 1
    printed = capsys.readouterr().out
    assert ("0 wrong" if nan else "1 wrong") in printed and "FAILED" in printed
    if nan:
        assert generate.main([*TINY]) == 0  # there was no --check


def test_a_token_may_be_another_in_a_tie_only():
    """The exact logits are 0.1 apart; the error of PyTorch's logits decides whether they tie."""
    tokens = torch.tensor([[0, 1]])
    run = generate.Generated(tokens, torch.empty(0), [])
    for error, ties in ((0.06, 1), (0.04, 0)):
        rows = [torch.tensor([True, False])], [torch.tensor([0.0, 0.1])], [torch.tensor([9.0, 0.1])]
        judged = {x: generate.Judged(*rows, error, 0.02) for x in ("flashcute", "sdpa dynamic")}
        found = generate.compare(judged, dict.fromkeys(judged, run))
        counts = found["runs"]["flashcute"]
        assert (counts["exact"], counts["ties"], counts["wrong"]) == (1, ties, 1 - ties)
        assert found["passed"] == bool(ties) and counts["decided"] == 2 - ties
    assert generate.same_tokens(tokens, torch.tensor([[0, 2]])) == 1
    assert generate.same_tokens(tokens, torch.tensor([[5, 1]])) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Saves a Llama with stretched rotary tables and settings that would sample; returns where."""
    path = tmp_path_factory.mktemp("model")
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=32, vocab_size=64,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=48,
        rope_parameters=rope | {"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
        tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.update(do_sample=True, repetition_penalty=2.0, temperature=5.0)
    model.save_pretrained(path)
    return path


def test_a_folder_is_the_model(folder, capsys):
    work = ("--device", "cpu", "--prompts", "3", "30", "--new-tokens", "18", "--check")
    assert generate.main(["--model", str(folder), *work]) == 0
    assert "1 layers, 4/2 heads of 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({}, ["--new-tokens", "19"], "at most 48 tokens together"),
        ({"model_type": "qwen2"}, [], "of the Llama architecture, got 'qwen2'"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            *([], "the same for all lengths, got rope_type 'dynamic'"),
        ),
        ({"model_type": "none of them"}, [], "that transformers can read"),
        (None, [], "a folder with config.json"),
    ],
)
def test_a_folder_that_cannot_be_is_a_message(folder, tmp_path, change, arguments, message):
    if change is not None:
        config = json.loads((folder / "config.json").read_text()) | change
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match=message):
        generate.main(
            ["--device", "cpu", "--model", str(tmp_path), "--prompts", "3", "30", *arguments]
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "9", "8"], "expected --prompts LEAST MOST in this order, got 9 8; swap"),
        (["--new-tokens", "1"], "expected --new-tokens of at least 2, got 1"),
        (["--page-size", "0"], "expected a whole number from 1 to"),
        (["--heads", "6"], "expected --hidden to be a multiple of --heads, got 32 and 6"),
        (["--heads-k", "3"], "expected --heads to be a multiple of --heads-k, got 4 and 3"),
        (["--head-dim", "5"], "expected --head-dim to be even"),
        (["--model", "here"], "expected --model without --layers, got both"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        generate.main([*TINY, *arguments])
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_a_gpu_or_package_that_is_not_there_is_said(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        generate.main(["--device", "cuda"])
    assert "expected an NVIDIA GPU" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        generate.main(["--device", "cpu"])
    assert "expected the package transformers, found none; `pip install" in capsys.readouterr().err


def test_what_a_gpu_cannot_do_is_said(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(SystemExit):
        generate.main(["--device", "cuda", "--dtype", "float32"])
    assert "expected --dtype float16 or bfloat16 on a GPU" in capsys.readouterr().err
    for head_dim, message in (("320", "expected head_dim <= 256"), ("20", "a multiple of 8")):
        with pytest.raises(SystemExit, match=message):
            generate.main(["--device", "cuda", "--head-dim", head_dim])


def test_memory_that_is_not_there_is_a_message(monkeypatch):
    def run(args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 ...")

    monkeypatch.setattr(generate, "_run", run)
    with pytest.raises(SystemExit, match="fit into memory, got: CUDA out of memory"):
        generate.main([*TINY])


def test_prompts_and_sizes_follow_the_arguments():
    args = generate._arguments(["--device", "cpu"])
    assert (args.batch, args.prompts, args.dtype, args.sdpa) == (4, [5, 40], "float32", ["dynamic"])
    work = {"new_tokens": 2, "page_size": 1, "device": "cpu", "dtype": "float32", "sdpa": []}
    settings = generate.Settings(batch=4, prompts=[5, 40], seed=3, **work)
    assert settings.lengths() == [5, 16, 28, 40]
    assert generate.Settings(batch=1, prompts=[5, 40], seed=3, **work).lengths() == [5]
    for one, other in zip(settings.texts(50), settings.texts(50), strict=True):
        assert torch.equal(one, other) and one.max() < 50
