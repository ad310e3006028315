"""Generation over a paged cache on a GPU: a step as one CUDA graph, and the check of tokens."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

import generate  # noqa: E402
import paged_llama  # noqa: E402
from building import build  # noqa: E402

from flashcute import heuristics  # noqa: E402

# The model is float16, whose rounding is 8 times finer than bfloat16's, so that a fault shows.
SIZES = {"layers": 2, "hidden": 256, "intermediate": 256, "vocabulary": 1000}
SIZES |= {"heads": 4, "heads_k": 2, "head_dim": 64}
LENGTHS = (5, 64, 200)
NEW = 40
ARGUMENTS = ["--device", "cuda", "--dtype", "float16", "--batch", "3", "--prompts", "5", "200"]
ARGUMENTS += ["--new-tokens", str(NEW), "--page-size", "16", "--sdpa", "dynamic", "--check"]
for _name, _size in SIZES.items():
    ARGUMENTS += [f"--{_name.replace('_', '-')}", str(_size)]


@pytest.fixture(scope="module", autouse=True)
def _built_kernels() -> None:
    capability = torch.cuda.get_device_capability()
    configs = set()
    for b, rows in ((3, 1), *((1, n) for n in LENGTHS)):
        problem = heuristics.FwdProblem(
            "fp16", True, b, rows, 240, 4, 2, 64, cache=True, page_size=16, num_splits=0
        )
        if capability == (9, 0):
            configs.add(heuristics.choose_fwd(problem, capability))
    sm80 = heuristics.fwd_config("fp16", 64, False, capability)
    configs.add(dataclasses.replace(sm80, mask="causal", paged=True))
    build(configs)


@pytest.fixture(scope="module")
def model():
    config = generate.model_config(None, SIZES, max(LENGTHS) + NEW)
    return generate.load_model(config, None, torch.float16, "cuda", 0)


def paged(model, page_size: int, graph: bool) -> paged_llama.PagedLlama:
    """Returns a paged model over a cache that holds NaN wherever nothing was written."""
    cache = paged_llama.PagedCache(model, [n + NEW for n in LENGTHS], page_size)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    return paged_llama.PagedLlama(model, cache, graph)


@pytest.mark.parametrize("page_size", [1, 16])
def test_one_graph_does_what_eager_steps_do(kernel_class: str, page_size: int, model) -> None:
    """It does so while sequences grow over pages, and for the next batch, which is shorter."""
    by_graph, eager = (paged(model, page_size, graph) for graph in (True, False))
    steps = set()
    for seed, lengths in enumerate((LENGTHS, (1, 60, 33))):
        generator = torch.Generator().manual_seed(seed)
        prompts = [torch.randint(1000, (n,), generator=generator).cuda() for n in lengths]
        tokens, logits = by_graph.generate(prompts, NEW)
        expected_tokens, expected_logits = eager.generate(prompts, NEW)
        assert logits.isfinite().all()
        assert torch.equal(logits, expected_logits)
        assert torch.equal(tokens, expected_tokens)
        assert by_graph.cache.lengths.tolist() == [n + NEW - 1 for n in lengths]
        steps.add(by_graph._step)
    assert len(steps) == 1  # the first batch's graph


def test_tokens_and_logits_are_as_exact_as_those_of_sdpa(kernel_class: str, tmp_path) -> None:
    path = tmp_path / "generate.json"
    assert generate.main([*ARGUMENTS, "--json", str(path)]) == 0
    made = json.loads(path.read_text())
    counts = made["check"]["runs"]["flashcute"]
    assert counts["exact"] + counts["ties"] == made["check"]["tokens"] == 3 * NEW
    assert counts["decided"] > NEW  # it could have failed
    assert all(run["tokens_per_second"] > 0 for run in made["runs"].values())


def test_a_wrong_scale_fails(kernel_class: str, monkeypatch, capsys) -> None:
    right = paged_llama.flash_attn_with_kvcache

    def attention(*args, **kwargs):
        return right(*args, **kwargs | {"softmax_scale": 1.05 * kwargs["softmax_scale"]})

    monkeypatch.setattr(paged_llama, "flash_attn_with_kvcache", attention)
    assert generate.main(ARGUMENTS) == 1
    assert "FAILED" in capsys.readouterr().out
