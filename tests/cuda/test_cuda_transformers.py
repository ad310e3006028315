"""transformers' models on the kernels: padding, packing, windows, softcap, sinks, caches, the
fallback."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

transformers = pytest.importorskip("transformers")

from flashcute.integrations import transformers as integration  # noqa: E402
from flashcute.integrations.transformers_masks import mask_of_bounds  # noqa: E402

NAME = "cute_attn"
FALLBACK = "cute_attn_or_torch"
integration.register(NAME)
integration.register(FALLBACK, unsupported="fallback")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 20},
    "Gemma2": {"sliding_window": 20, "attn_logit_softcapping": 30.0},
    # Each token goes to both experts, so that rounding cannot change its choice of experts.
    "GptOss": {"sliding_window": 20, "num_local_experts": 2, "num_experts_per_tok": 2},
}


def _model(family: str, implementation: str, dtype=torch.bfloat16):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")
    config = config(**SIZES | FAMILIES[family], attn_implementation=implementation)
    model = getattr(transformers, f"{family}Model")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model.to("cuda", torch.bfloat16).to(dtype).eval()  # the same weights in each dtype


def _batch(padding: str = "right"):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 64, (3, 100), generator=generator).cuda()
    mask = torch.ones_like(ids)
    mask[0, 60:] = 0
    mask[2, 7:] = 0
    if padding == "left":
        mask = mask.flip(1)
    elif padding == "both sides":
        mask[:, :5] = 0
    return ids, mask


padded = pytest.mark.parametrize("padding", ["right", "left", "both sides"])


def _error(out, exact, rows) -> float:
    return float((out[rows].double() - exact[rows]).abs().max())


@padded
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches_run_on_the_kernels(family, padding) -> None:
    ids, mask = _batch(padding)
    rows = mask.bool()
    with torch.no_grad():
        outs = [
            _model(family, implementation, dtype)(input_ids=ids, attention_mask=mask)
            for implementation, dtype in (
                (NAME, torch.bfloat16),
                ("eager", torch.bfloat16),
                ("eager", torch.float32),
            )
        ]
    ours, eager, exact = (out.last_hidden_state for out in outs)
    exact = exact.double()
    assert _error(ours, exact, rows) <= 2 * _error(eager, exact, rows) + 1e-3


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_packed_sequences_are_those_alone(family) -> None:
    ids, _ = _batch()
    model = _model(family, NAME)
    positions = torch.cat([torch.arange(40), torch.arange(60)])[None].cuda()
    with torch.no_grad():
        packed = model(input_ids=ids[:1], position_ids=positions, use_cache=False)
        alone = model(input_ids=ids[:1, 40:], use_cache=False)
    torch.testing.assert_close(
        packed.last_hidden_state[:, 40:], alone.last_hidden_state, rtol=2e-2, atol=2e-2
    )


def _gradients(model, rows=slice(None), autocast=False, **inputs) -> dict[str, torch.Tensor]:
    """Returns the gradients of a random weighted sum of the hidden states in ``rows``. Their mean
    square would not do: the last layer normalises them, so that it is the same for all parameters,
    and its gradients are rounding errors."""
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        out = model.train()(**inputs).last_hidden_state[rows]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.device)
    (out.float() * weight).sum().backward()
    return {name: x.grad.float() for name, x in model.named_parameters() if x.grad is not None}


def _assert_as_exact_as_eager(ours, eager, exact) -> None:
    assert ours.keys() == eager.keys() == exact.keys()
    for name, reference in exact.items():
        # The gradient has two numbers, x and -x, so that eager's error may happen to be 0.
        if name.endswith("router.bias"):
            continue
        error, allowed = ((grads[name] - reference).norm() for grads in (ours, eager))
        assert error <= 2 * allowed + 5e-3 * reference.norm(), name


def _check_training(family: str, **inputs) -> None:
    _assert_as_exact_as_eager(
        *(
            _gradients(_model(family, implementation, dtype), **inputs)
            for implementation, dtype in (
                (NAME, torch.bfloat16),
                ("eager", torch.bfloat16),
                ("eager", torch.float32),
            )
        )
    )


@pytest.mark.parametrize("family", ["Llama", "GptOss"])
def test_training_without_padding_has_the_gradients_of_eager_attention(family) -> None:
    _check_training(family, input_ids=_batch()[0])


@padded
@pytest.mark.parametrize("family", ["Llama", "GptOss"])
def test_training_with_padding_has_the_gradients_of_eager_attention(family, padding) -> None:
    ids, mask = _batch(padding)
    _check_training(family, input_ids=ids, attention_mask=mask, rows=mask.bool())


@pytest.mark.parametrize("use_cache", [False, True])
def test_autocast_trains_float32_weights(use_cache) -> None:
    inputs = {"input_ids": _batch()[0], "use_cache": use_cache}
    _assert_as_exact_as_eager(
        *(
            _gradients(_model("Llama", implementation, torch.float32), autocast=autocast, **inputs)
            for implementation, autocast in ((NAME, True), ("eager", True), ("eager", False))
        )
    )


def test_a_dense_mask_is_refused_or_falls_back() -> None:
    ids, _ = _batch()
    dense = torch.rand(3, 1, 100, 100, device="cuda") < 0.7
    dense |= torch.eye(100, dtype=torch.bool, device="cuda")
    with torch.no_grad():
        with pytest.raises(NotImplementedError, match="expected attention_mask=None or a mask"):
            _model("Llama", NAME)(input_ids=ids, attention_mask=dense)
        with pytest.warns(UserWarning, match="PyTorch computes"):
            _model("Llama", FALLBACK)(input_ids=ids, attention_mask=dense)


@pytest.mark.parametrize("cache", ["dynamic", "static", "static and compiled"])
def test_generation_after_padding(cache) -> None:
    ids, _ = _batch()
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    texts = []
    for implementation in (NAME, "sdpa"):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SIZES, attn_implementation=implementation)
        model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        if cache != "dynamic":
            options |= {"cache_implementation": "static"}
            options |= {"disable_compile": cache == "static"}
        texts.append(model.generate(input_ids=ids, attention_mask=mask, **options))
    # Random weights make near ties between tokens; the first token comes from the same prompt.
    assert (texts[0][:, 100] == texts[1][:, 100]).float().mean() >= 2 / 3


@pytest.mark.parametrize("compiled", [False, True])
def test_a_token_after_a_static_cache_reads_its_keys_alone(compiled) -> None:
    padding = torch.ones(3, 60, dtype=torch.bool, device="cuda")
    padding[0, :40] = False
    bounds = integration.attention_mask(
        3, 1, 100, torch.tensor(59, device="cuda"), attention_mask=padding, device="cuda",
        allow_is_causal_skip=False,
    )  # fmt: skip
    assert bounds.tolist() == [[[[40, 60]]], [[[0, 60]]], [[[0, 60]]]]
    q, k, v = (
        torch.randn(3, heads, n, 64, device="cuda", dtype=torch.bfloat16)
        for heads, n in ((4, 1), (2, 100), (2, 100))
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.float() for x in (q, k, v)), mask_of_bounds(bounds, 100), enable_gqa=True
    )
    k[:, :, 60:] = v[:, :, 60:] = torch.nan  # the end of the static cache is still empty
    k[0, :, :40] = v[0, :, :40] = torch.nan

    def attend(*tensors):
        return integration.attention_forward(torch.nn.Module(), *tensors)[0]

    attend = torch.compile(attend, fullgraph=True) if compiled else attend
    out = attend(q, k, v, bounds)
    torch.testing.assert_close(out.transpose(1, 2).float(), expected, rtol=2e-2, atol=2e-2)
