"""Tiny random models of many families have the outputs and gradients of eager attention.

Batches are padded, packed and cached, and no call uses a dense mask.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from transformers import CompileConfig

from flashcute.integrations import transformers as integration

NAME = "cute_attn"
integration.register(NAME)
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
DECODER = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
BERT = TEXT | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES = {
    "Bert": BERT,
    "Roberta": BERT,
    "DistilBert": {
        "vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "ModernBert": TEXT | {"local_attention": 6, "global_attn_every_n_layers": 2},
    "GPT2": {
        "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "Llama": DECODER,
    "Mistral": DECODER | {"sliding_window": 4},
    "Qwen3": DECODER,
    "Gemma2": DECODER | {"sliding_window": 4, "attn_logit_softcapping": 3.0},
    "Gemma3Text": DECODER | {"sliding_window": 4, "sliding_window_pattern": 2},
    "GptOss": DECODER | {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4},
}  # fmt: skip


def pair(family, **changes):
    """Returns the same model under flashcute and under eager attention, both in training mode."""
    models = []
    for implementation in (NAME, "eager"):
        torch.manual_seed(0)
        config_class = getattr(transformers, f"{family}Config")
        config = config_class(**FAMILIES[family] | changes, attn_implementation=implementation)
        model = getattr(transformers, f"{family}Model")(config)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter)
        models.append(model.train())
    assert models[0].config._attn_implementation == NAME
    return models


def tokens(batch, length):
    return torch.randint(1, 64, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def only_kernels(monkeypatch):
    """Makes calls with a dense mask fail."""
    monkeypatch.delattr(integration, "attend")


def weighted(out):
    """Returns a loss of normalised hidden states that depends on the parameters.

    The mean square of such states does not.
    """
    return (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()


def assert_same(models, rows, **inputs):
    """Checks that both models have the same hidden states in ``rows`` and the same gradients."""
    ours, theirs = (model(**inputs).last_hidden_state[rows] for model in models)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
    for model, out in zip(models, (ours, theirs), strict=True):
        model.zero_grad()
        weighted(out).backward()
    named = [dict(model.named_parameters()) for model in models]
    assert any(parameter.grad is not None for parameter in named[0].values())
    for name, parameter in named[0].items():
        other = named[1][name].grad
        assert (parameter.grad is None) == (other is None), name
        if other is not None:
            torch.testing.assert_close(parameter.grad, other, rtol=2e-3, atol=2e-5, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_eager_attention(only_kernels, family):
    models = pair(family)
    ids = tokens(3, 12)
    assert_same(models, slice(None), input_ids=ids)
    for padded in ((slice(7, None), slice(2, None)), (slice(0, 5), slice(0, 10))):
        mask = torch.ones_like(ids)
        mask[0, padded[0]] = 0
        mask[2, padded[1]] = 0
        assert_same(models, mask.bool(), input_ids=ids, attention_mask=mask)


def test_a_text_within_one_chunk_runs_on_the_kernels(only_kernels):
    FAMILIES["Llama4Text"] = DECODER | {
        "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 12,
        "layer_types": ["chunked_attention", "full_attention"],
    }  # fmt: skip
    models = pair("Llama4Text")
    ids = tokens(2, 12)
    assert_same(models, slice(None), input_ids=ids)
    # generate() passes such a mask.
    assert_same(models, slice(None), input_ids=ids, attention_mask=torch.ones_like(ids))


def test_padding_is_not_attended_to(only_kernels):
    ours, _ = pair("Llama")
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    padded = ours(input_ids=ids, attention_mask=mask).last_hidden_state
    other = ids.clone()
    other[0, :5] = 7
    again = ours(input_ids=other, attention_mask=mask).last_hidden_state
    assert torch.equal(padded[0, 5:], again[0, 5:])


def test_layers_whose_inputs_are_moved_keep_their_masks(only_kernels):
    """The hooks of a model over several GPUs move inputs in this way."""
    models = pair("Llama")

    def moved(module, args, kwargs):
        kwargs = {
            name: x.to("cpu", non_blocking=True) if isinstance(x, torch.Tensor) else x
            for name, x in kwargs.items()
        }
        return args, kwargs

    for layer in models[0].layers:
        layer.register_forward_pre_hook(moved, with_kwargs=True)
    ids = tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    assert_same(models, mask.bool(), input_ids=ids, attention_mask=mask)


def test_a_vision_transformer(only_kernels):
    sizes = {"image_size": 16, "patch_size": 4, "hidden_size": 32, "intermediate_size": 48}
    FAMILIES["ViT"] = sizes | {"num_hidden_layers": 2, "num_attention_heads": 4}
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert_same(pair("ViT"), slice(None), pixel_values=pixels)


def test_speech_to_text(only_kernels):
    FAMILIES["Whisper"] = {
        "vocab_size": 64, "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2,
        "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_source_positions": 20,
        "max_target_positions": 30, "pad_token_id": 0, "decoder_start_token_id": 1,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    sound = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0))
    inputs = {"input_features": sound, "decoder_input_ids": tokens(2, 9)}
    models = pair("Whisper")
    assert_same(models, slice(None), **inputs)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    assert_same(models, mask.bool(), decoder_attention_mask=mask, **inputs)


T5 = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "dropout_rate": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("padded", [False, True])
def test_t5s_decoder_does_not_see_what_follows(padded):
    FAMILIES["T5"] = T5
    models = pair("T5")
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0 if padded else 1
    inputs = {"input_ids": ids, "attention_mask": mask}
    assert_same(models, slice(None), decoder_input_ids=ids, **inputs)
    other = ids.clone()
    other[:, -1] = 1 + ids[:, -1] % 63
    states = [models[0](decoder_input_ids=x, **inputs).last_hidden_state for x in (ids, other)]
    assert torch.equal(states[0][:, :-1], states[1][:, :-1])


def test_t5_is_refused_where_only_kernels_are():
    config = transformers.T5Config(**T5, attn_implementation=NAME)
    with torch.device("meta"):
        model = transformers.T5Model(config)
        ids = torch.ones(1, 5, dtype=torch.long)
    with pytest.raises(NotImplementedError, match="cute_attn: expected position_bias=None"):
        model(input_ids=ids, decoder_input_ids=ids)


OWN_ATTENTION = {
    "Bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 4},
    "MPNet": BERT,
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_models_that_would_take_our_masks_for_their_own_are_refused(family, compiled):
    FAMILIES[family] = OWN_ATTENTION[family]
    ours, theirs = pair(family)
    ids = tokens(1, 5)
    theirs(input_ids=ids)
    if compiled:
        ours = torch.compile(ours, backend="eager")
    # Without the error Bloom's tokens would see later tokens, with no warning.
    expected = f"takes attention from transformers' AttentionInterface, got {family}Model"
    with pytest.raises(Exception, match=expected):
        ours(input_ids=ids)


LENGTHS = 5, 1, 6


def packed():
    """Returns inputs with several sequences in a row, and options.

    transformers looks for packed sequences only where there is no cache.
    """
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    inputs = {"input_ids": tokens(1, sum(LENGTHS)), "position_ids": positions}
    return inputs, {"use_cache": False}


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma3Text", "Qwen3"])
def test_packed_sequences_do_not_see_each_other(only_kernels, family):
    models = pair(family)
    inputs, no_cache = packed()
    assert_same(models, slice(None), **inputs, **no_cache)
    together = models[0](**inputs, **no_cache).last_hidden_state
    alone = models[0](input_ids=inputs["input_ids"][:, 6:], **no_cache).last_hidden_state
    torch.testing.assert_close(together[:, 6:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_packed_sequences_may_be_given_by_their_ends(only_kernels, family):
    ours, _ = pair(family)
    inputs, no_cache = packed()
    expected = ours(**inputs, **no_cache).last_hidden_state
    ends = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 6, "max_length_k": 6}
    for cache in (no_cache, {}):
        found = ours(**inputs, **given, **cache).last_hidden_state
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def generated(family, implementation, ids, mask, **options):
    """Returns each row with ten further tokens by a model with random weights."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")
    config = config(**FAMILIES[family], attn_implementation=implementation)
    model = getattr(transformers, family.replace("Text", "") + "ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    options |= {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    return model.generate(input_ids=ids, attention_mask=mask, **options)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", [(0,), (3,), (0, 0), (3, 0), (5, 2)])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2", "Gemma3Text", "GptOss"])
def test_generation_with_a_cache_needs_no_dense_mask(only_kernels, family, padding, cache):
    ids = tokens(len(padding), 6)
    mask = torch.ones_like(ids)
    for row, length in zip(mask, padding, strict=True):
        row[:length] = 0
    options = {"cache_implementation": "static", "disable_compile": True}
    options = options if cache == "static" else {}
    texts = [generated(family, name, ids, mask, **options) for name in (NAME, "eager")]
    assert texts[0].shape == (len(padding), 16) and torch.equal(*texts)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_generation_compiles_a_token_after_a_static_cache(only_kernels, family):
    """As on a GPU, a token compiles into one graph, which is not traced again for each token."""
    ids = tokens(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    texts, graphs = [], {}
    for name in (NAME, "sdpa"):
        graphs[name] = []

        def backend(graph, inputs, found=graphs[name]):
            found.append(graph)
            return graph.forward

        compiled = CompileConfig(fullgraph=True, backend=backend, mode=None)
        compiled._compile_all_devices = True
        options = {"cache_implementation": "static", "compile_config": compiled}
        torch.compiler.reset()
        texts.append(generated(family, name, ids, mask, **options))
    assert torch.equal(*texts)
    # transformers' own cache of a window counts its tokens in Python, and is traced twice.
    assert len(graphs[NAME]) == len(graphs["sdpa"]) == (1 if family == "Llama" else 2)


def test_a_prompt_of_one_token_begins_a_static_cache(only_kernels):
    ids = tokens(2, 1)
    options = {"cache_implementation": "static", "disable_compile": True}
    mask = torch.ones_like(ids)
    texts = [generated("Llama", name, ids, mask, **options) for name in (NAME, "eager")]
    assert torch.equal(*texts)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_training_with_padding(only_kernels, reentrant):
    models = pair("Llama")
    for model in models:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    ids = tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    assert_same(models, mask.bool(), input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("unsupported", ["error", "fallback"])
@pytest.mark.parametrize("family", ["Bert", "Llama", "Mistral", "Qwen3", "Gemma3Text", "GptOss"])
def test_autocast_of_float32_weights(monkeypatch, family, unsupported, use_cache):
    """Rotary embedding leaves queries and keys in float32, while values are bfloat16."""
    integration.register("cute_attn_cast", unsupported=unsupported)
    models = pair(family)
    models[0].set_attn_implementation("cute_attn_cast")
    dtypes = set()
    attention = integration.flash_attn_func

    def watched(*tensors, **kwargs):
        dtypes.update(x.dtype for x in tensors)
        return attention(*tensors, **kwargs)

    monkeypatch.setattr(integration, "flash_attn_func", watched)
    inputs = {"input_ids": tokens(2, 9)} | ({} if family == "Bert" else {"use_cache": use_cache})
    outs, grads = [], []
    for model, autocast in zip((*models, models[1]), (True, True, False), strict=True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outs.append(model(**inputs).last_hidden_state.float())
        weighted(outs[-1]).backward()
        grads.append({name: x.grad for name, x in model.named_parameters() if x.grad is not None})
    for name, exact in grads[2].items():
        error, of_eager = ((found[name] - exact).norm() for found in grads[:2])
        assert error <= 2 * of_eager + 5e-3 * exact.norm() + 1e-6, name
    assert dtypes == {torch.bfloat16}
    torch.testing.assert_close(*outs[:2], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_layers_run_on_the_kernels(only_kernels, checkpointed, padded):
    torch.compiler.reset()
    models = pair("Llama")
    if checkpointed:
        models[0].gradient_checkpointing_enable({"use_reentrant": False})
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for layer in models[0].layers:
        layer.compile(backend=backend, fullgraph=True)
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    inputs = {"attention_mask": mask} if padded else {}
    rows = mask.bool() if padded else slice(None)
    assert_same(models, rows, input_ids=ids, use_cache=False, **inputs)
    assert graphs


@pytest.mark.parametrize("positions", ["its own", "packed"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_a_compiled_forward_cannot_tell_its_own_positions_from_packed_ones(
    monkeypatch, use_cache, positions
):
    """This is a limit that register() names.

    transformers looks for packed sequences in the positions where there is no cache, and traced
    code cannot read them.
    """
    torch.compiler.reset()
    models = pair("Llama")
    attend, dense = integration.attend, []
    monkeypatch.setattr(integration, "attend", lambda *x, **y: dense.append(1) or attend(*x, **y))
    ids = tokens(1, sum(LENGTHS))
    inputs = {"input_ids": ids} if positions == "its own" else packed()[0]
    compiled = torch.compile(models[0], backend="eager")
    found, expected = (
        model(**inputs, use_cache=use_cache).last_hidden_state for model in (compiled, models[1])
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert bool(dense) != use_cache


def test_a_compiled_forward_gets_a_dense_mask():
    ours, theirs = pair("Llama")
    ids = tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    compiled = torch.compile(ours, backend="eager")
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    found, expected = (model(**inputs).last_hidden_state for model in (compiled, theirs))
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)
