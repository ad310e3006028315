"""transformers' models under flashcute's attention, against the same models under PyTorch's."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import minilm
import pytest
import torch
import transformers

from flashcute.integrations import transformers as integration

NAME = "cute_attn"
integration.register(NAME)
TINY = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def test_a_missing_transformers_is_named():
    line = (
        "import sys; sys.modules['transformers'] = None; import flashcute.integrations.transformers"
    )
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "expected transformers 5.17 or later, got:" in last and "pip install" in last


def pair(model_class, config_class, **changes):
    """Returns the same randomly initialised model under flashcute and under eager attention."""
    models = []
    for implementation in (NAME, "eager"):
        torch.manual_seed(0)
        config = config_class(**(TINY | changes), attn_implementation=implementation)
        models.append(model_class(config).eval())
    assert models[0].config._attn_implementation == NAME
    return models


def tokens(batch, length):
    return torch.randint(1, 64, (batch, length), generator=torch.Generator().manual_seed(1))


def assert_same(ours, theirs, rows=slice(None)):
    torch.testing.assert_close(ours[rows], theirs[rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["flashcute", "my_flash_attn", ""])
def test_register_refuses_names_that_transformers_would_download(implementation):
    with pytest.raises(ValueError, match="name="):
        integration.register(implementation)


@pytest.mark.parametrize("name", [3, b"x", ["x"], True])
def test_register_refuses_what_is_no_name(name):
    with pytest.raises(TypeError, match="register: expected name to be a str, got name="):
        integration.register(name)


def test_minilm_embeds_as_with_pytorchs_attention():
    ours, theirs, embedder, us = minilm.compare(
        minilm.model_folder(), "cpu", torch.float32, repeats=1
    )
    assert set(us) == {"flashcute", "sdpa"} and all(0 < time < 1e8 for time in us.values())
    assert embedder.model.config._attn_implementation == NAME
    cosine = (ours * theirs).sum(dim=1)
    assert len(ours) >= 48
    assert cosine.min() >= 0.99999
    assert torch.equal(minilm.nearest(ours), minilm.nearest(theirs))
    sentences = minilm.read_sentences()
    best = [sentences[i] for i in (embedder.embed(minilm.QUERIES) @ ours.T).argmax(dim=1)]
    assert best[0] == "The cat slept on the warm windowsill all afternoon."
    assert best[3] == "The rover found traces of ancient water on Mars."


def test_minilm_does_not_attend_to_padding(monkeypatch):
    used = []
    attention = integration.flash_attn_varlen_func

    def watched(*args, seqused_k, **kwargs):
        used.append(seqused_k.tolist())
        return attention(*args, seqused_k=seqused_k, **kwargs)

    monkeypatch.setattr(integration, "flash_attn_varlen_func", watched)
    embedder = minilm.Embedder(minilm.model_folder(), NAME)
    sentences = "one sentence", "a sentence with some more words"
    together = embedder.embed(sentences)
    assert used == [[4, 8]] * 6
    alone = torch.cat([embedder.embed([sentence]) for sentence in sentences])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_minilms_queries_keys_and_values_are_those_of_its_attention(monkeypatch):
    seen = []
    attention = integration.flash_attn_func
    monkeypatch.setattr(
        integration,
        "flash_attn_func",
        lambda q, k, v, **kwargs: seen.append((q, k, v)) or attention(q, k, v, **kwargs),
    )
    embedder = minilm.Embedder(minilm.model_folder(), NAME)
    found = embedder.inputs_of_attention("one sentence")
    assert [x.shape for x in found] == [(1, 4, 12, 32)] * 3 and len(seen) == 6
    assert all(torch.equal(x, y) for x, y in zip(found, seen[0], strict=True))


def test_encoder_with_padding_is_exact_on_cpu():
    ours, theirs = pair(transformers.BertModel, transformers.BertConfig)
    ids = tokens(3, 10)
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    mask[2, 2:] = 0
    out = [m(input_ids=ids, attention_mask=mask).last_hidden_state for m in (ours, theirs)]
    assert_same(*out, rows=mask.bool())
    # The mask makes a difference, so the test notices if it is dropped, as transformers does
    # without a mask function.
    unmasked = ours(input_ids=ids).last_hidden_state
    assert not torch.allclose(unmasked[2, :2], out[0][2, :2], atol=1e-3)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_decoder_is_causal_with_grouped_heads(kv_heads):
    ours, theirs = pair(
        transformers.LlamaModel, transformers.LlamaConfig, num_key_value_heads=kv_heads
    )
    ids = tokens(2, 12)
    assert_same(*(m(input_ids=ids).last_hidden_state for m in (ours, theirs)))


def test_decoder_takes_key_value_heads_unrepeated(monkeypatch):
    shapes = []
    attention = integration.flash_attn_func
    monkeypatch.setattr(
        integration,
        "flash_attn_func",
        lambda q, k, v, **kw: shapes.append((k.shape, kw["causal"])) or attention(q, k, v, **kw),
    )
    ours, _ = pair(transformers.LlamaModel, transformers.LlamaConfig, num_key_value_heads=2)
    ours(input_ids=tokens(1, 5))
    assert shapes == [((1, 5, 2, 16), True)] * 2


@pytest.mark.parametrize("new", [1, 4])
def test_tokens_after_a_cache_need_no_mask(monkeypatch, new):
    ours, theirs = pair(transformers.LlamaModel, transformers.LlamaConfig, num_key_value_heads=2)
    ids = tokens(2, 12)
    whole = theirs(input_ids=ids).last_hidden_state
    cache = ours(input_ids=ids[:, : 12 - new], use_cache=True).past_key_values
    monkeypatch.delattr(integration, "attend")  # calls with a mask would use it
    out = ours(input_ids=ids[:, 12 - new :], past_key_values=cache).last_hidden_state
    assert_same(out, whole[:, 12 - new :])


def test_left_padded_generation_matches():
    ours, theirs = pair(
        transformers.LlamaForCausalLM, transformers.LlamaConfig, num_key_value_heads=2
    )
    ids = tokens(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    texts = [m.generate(input_ids=ids, attention_mask=mask, **options) for m in (ours, theirs)]
    assert texts[0].shape == (2, 12)
    assert torch.equal(*texts)


@pytest.mark.parametrize("length", [3, 4, 5, 16])
def test_sliding_window_around_the_window(length):
    ours, theirs = pair(
        transformers.MistralModel,
        transformers.MistralConfig,
        num_key_value_heads=2,
        sliding_window=4,
    )
    ids = tokens(1, length)
    assert_same(*(m(input_ids=ids).last_hidden_state for m in (ours, theirs)))


def test_softcap_scale_and_window_of_gemma2():
    ours, theirs = pair(
        transformers.Gemma2Model,
        transformers.Gemma2Config,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=7,
        attn_logit_softcapping=0.5,
        sliding_window=5,
    )
    ids = tokens(2, 11)
    assert_same(*(m(input_ids=ids).last_hidden_state for m in (ours, theirs)))


def test_sinks_of_gpt_oss():
    ours, theirs = pair(
        transformers.GptOssModel,
        transformers.GptOssConfig,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=5,
    )
    for model in (ours, theirs):
        for layer in model.layers:
            layer.self_attn.sinks.data = torch.tensor([2.0, -1.0, 0.5, 3.0])
    ids = tokens(1, 11)
    assert_same(*(m(input_ids=ids).last_hidden_state for m in (ours, theirs)))


def test_position_bias_as_t5_passes_it():
    bias = torch.randn(1, 4, 9, 9, generator=torch.Generator().manual_seed(0))
    q, k, v = (torch.randn(2, 4, 9, 16) for _ in range(3))
    out, _ = integration.attention_forward(
        torch.nn.Module(), q, k, v, None, is_causal=False, position_bias=bias
    )
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(out, exact.transpose(1, 2))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [9, 3])
def test_a_position_bias_does_not_replace_the_mask(queries, causal, window):
    bias = torch.randn(1, 4, queries, 9, generator=torch.Generator().manual_seed(0))
    q, k = torch.randn(2, 4, queries, 16), torch.randn(2, 4, 9, 16)
    calls = {"is_causal": causal, "sliding_window": window, "position_bias": bias}
    row, key = torch.arange(9 - queries, 9)[:, None], torch.arange(9)
    visible = torch.ones(queries, 9, dtype=torch.bool)
    if causal:
        visible &= key <= row
    if window is not None:
        visible &= (row - key).abs() < window
    hidden = torch.where(visible, 0.0, -torch.inf)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=bias + hidden)
    out, _ = integration.attention_forward(torch.nn.Module(), q, k, k, None, **calls)
    torch.testing.assert_close(out, exact.transpose(1, 2))
    fallback = integration._by_pytorch(torch.nn.Module(), q, k, k, None, **calls)
    torch.testing.assert_close(fallback, exact.transpose(1, 2))


ENDS = torch.tensor([0, 4, 9], dtype=torch.int32)
PACKED = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 5, "max_length_k": 5}


@pytest.mark.parametrize("beside", ["dense", "padding", "bias", "bias and window"])
def test_packed_sequences_stay_apart_beside_other_masks(beside):
    q = torch.randn(1, 4, 9, 16, generator=torch.Generator().manual_seed(0))
    row = torch.arange(9)
    visible = (row[:, None] < 4) == (row < 4)
    visible &= row <= row[:, None]
    mask, options = None, {"is_causal": True}
    if beside == "dense":
        mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    elif beside == "padding":
        kept = (row != 5) & (row != 0)
        mask = integration.attention_mask(1, 9, 9, attention_mask=kept[None])
        visible &= kept
    else:
        options["position_bias"] = torch.zeros(1, 4, 9, 9)
    if beside == "bias and window":
        options["sliding_window"] = 3
        visible &= row > row[:, None] - 3
    out, _ = integration.attention_forward(torch.nn.Module(), q, q, q, mask, **options, **PACKED)
    exact = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=visible)
    rows = visible.any(dim=1)
    torch.testing.assert_close(out[:, rows], exact.transpose(1, 2)[:, rows])


def test_the_last_query_of_a_packed_sequence_stands_beside_its_last_key():
    k = torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(0))
    q = k[:, :, :3]
    ends = torch.tensor([0, 1, 3], dtype=torch.int32)
    packed = PACKED | {"cu_seq_lens_q": ends, "max_length_q": 2, "is_causal": True}
    out = [
        integration.attention_forward(torch.nn.Module(), q, k, k, None, **packed, **bias)[0]
        for bias in ({}, {"position_bias": torch.zeros(1, 2, 3, 9)})
    ]
    torch.testing.assert_close(*out)


def keywords_of_attention_calls() -> dict[str, str]:
    """Returns the keywords that transformers' models pass to attention, each with such a model."""
    found = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        for call in re.finditer(r"\battention_interface\(", text):
            for end in re.finditer(r"\)", text[call.end() :]):
                with contextlib.suppress(SyntaxError):
                    source = text[call.start() : call.end() + end.end()]
                    node = ast.parse(source, mode="eval").body
                    found |= {x.arg: path.parent.name for x in node.keywords if x.arg}
                    break
    return found


def test_every_argument_of_transformers_models_is_used_or_refused():
    """An unknown argument goes to eager attention, until it is known to change nothing."""
    passed = keywords_of_attention_calls()
    assert {"scaling", "dropout", "sliding_window"} <= passed.keys()
    used = set(inspect.signature(integration.attention_forward).parameters)
    # position_ids are not used here: the mask function finds packed sequences in them.
    unknown = passed.keys() - used - integration._REFUSED.keys() - {"position_ids"}
    assert not unknown, {name: passed[name] for name in unknown}


def test_modernberts_deterministic_gradients_are_asked_of_the_kernels(monkeypatch):
    asked = []
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        attention = getattr(integration, name)

        def watched(*args, attention=attention, **kwargs):
            asked.append(kwargs["deterministic"])
            return attention(*args, **kwargs)

        monkeypatch.setattr(integration, name, watched)
    q = torch.randn(1, 2, 9, 16)
    for options in ({}, {"deterministic": True}, {"deterministic": True, **PACKED}):
        integration.attention_forward(torch.nn.Module(), q, q, q, None, **options)
    assert asked == [False, True, True]


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}])
@pytest.mark.parametrize("masked", [False, True])
def test_autocast_casts_for_every_path(masked, options):
    """Compiled calls cast in their graph, too. Autocast's own attention leaves float64 alone."""
    torch._dynamo.reset()
    q, k = (torch.randn(1, 2, 9, 16) for _ in range(2))
    v = torch.randn(1, 2, 9, 16, dtype=torch.bfloat16)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril() if masked else None
    calls = options | {"is_causal": True}

    def forward(*tensors):
        return integration.attention_forward(torch.nn.Module(), *tensors, mask, **calls)[0]

    expected = forward(q.bfloat16(), k.bfloat16(), v)
    with torch.autocast("cpu", torch.bfloat16):
        outs = [forward(q, k, v), torch.compile(forward, backend="eager", fullgraph=True)(q, k, v)]
        other = integration._by_pytorch(torch.nn.Module(), q, k, v, mask, **calls)
        assert forward(q.double(), k.double(), v.double()).dtype == torch.float64
    for out in outs:
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(other, expected, rtol=2e-2, atol=2e-2)


def test_value_heads_may_be_narrower():
    q, k = torch.randn(1, 2, 5, 24), torch.randn(1, 2, 5, 24)
    v = torch.randn(1, 2, 5, 16)
    out, _ = integration.attention_forward(torch.nn.Module(), q, k, v, None, is_causal=True)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, exact.transpose(1, 2))


def test_training_goes_through_on_cpu():
    ours, theirs = pair(
        transformers.BertModel,
        transformers.BertConfig,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
    )
    for model in (ours, theirs):
        model.train()
        out = model(input_ids=tokens(2, 6)).last_hidden_state
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-5)


def test_masked_dropout_draws_a_new_mask_each_time():
    q = torch.randn(1, 2, 64, 16)
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()
    outs = [
        integration.attention_forward(torch.nn.Module(), q, q, q, mask, dropout=0.5)[0]
        for _ in range(2)
    ]
    assert not torch.equal(*outs)
    dense = integration.attention_forward(torch.nn.Module(), q, q, q, mask)[0]
    assert abs(outs[0].mean() - dense.mean()) < 0.2


def test_masked_dropout_is_that_without_a_mask():
    """Both drop the same weights and divide the others by the same number."""
    q = torch.randn(2, 3, 20, 16)
    results = []
    for mask in (None, torch.ones(2, 1, 20, 20, dtype=torch.bool)):
        torch.manual_seed(2)
        call = integration.attention_forward(
            torch.nn.Module(), q, q, q, mask, dropout=0.3, is_causal=False
        )
        results.append(call[0])
    torch.testing.assert_close(*results)


def test_masks_and_dropout_do_not_ask_the_default_device():
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    sinks = torch.zeros(2, requires_grad=True)
    with torch.device("meta"):
        for options in ({}, {"dropout": 0.5}, {"dropout": 0.5, "s_aux": sinks}):
            out, _ = integration.attention_forward(torch.nn.Module(), q, q, q, mask, **options)
            (grad,) = torch.autograd.grad(out.sum(), q)
            assert out.is_cpu and grad.isfinite().all()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_masked_training_compiles_into_one_graph(dropout):
    torch._dynamo.reset()
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    sinks = torch.zeros(4, requires_grad=True)
    q = torch.randn(2, 4, 8, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def attend(q, sinks):
        out, _ = integration.attention_forward(
            torch.nn.Module(), q, q, q, mask, dropout=dropout, s_aux=sinks, softcap=2.0
        )
        return out.square().sum()

    results = []
    for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(2)
        loss = function(q, sinks)
        results.append((loss, *torch.autograd.grad(loss, (q, sinks))))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


MASKS = {
    "attention_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool, device="meta"),
    "position_bias": torch.zeros(1, 2, 4, 4, device="meta"),
}


@pytest.mark.parametrize("name", MASKS)
def test_other_devices_refuse_masks_by_name(name):
    q = torch.empty(1, 2, 4, 16, device="meta", dtype=torch.float16)
    options = {"attention_mask": None, "is_causal": False, name: MASKS[name]}
    message = rf"cute_attn: expected {name}=None .*layer\.compile\(\).*fallback"
    with pytest.raises(NotImplementedError, match=message):
        integration.attention_forward(torch.nn.Module(), q, q, q, **options)


@pytest.mark.parametrize(
    "argument",
    [
        {"output_attentions": True},
        {"cache": object()},
        {"block_table": torch.zeros(1, 1)},
        {"indices": torch.zeros(1, 4, 2)},
        {"block_indices": torch.zeros(1, 2, 4, 1)},
        {"sinks": torch.zeros(1, 2, 4, 1)},
    ],
    ids=lambda argument: next(iter(argument)),
)
def test_what_is_missing_is_refused_by_name(argument):
    q = torch.randn(1, 2, 4, 16)
    for forward in (integration.attention_forward, integration._Fallback()):
        with pytest.raises(
            NotImplementedError, match=f'cute_attn: .*{next(iter(argument))}.*; leave .*"eager"'
        ):
            forward(torch.nn.Module(), q, q, q, None, **argument)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"s_aux": torch.full((8,), -9.0)}])
def test_pytorch_drops_weights_where_the_kernels_lack_a_mask(options):
    torch.manual_seed(0)
    q, ones = torch.randn(2, 8, 64, 16), torch.ones(2, 8, 64, 16)
    out = integration._by_pytorch(torch.nn.Module(), q, q, ones, None, dropout=0.25, **options)
    assert (out - 1).abs().max() > 0.05
    torch.testing.assert_close(out.mean(), torch.tensor(1.0), atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("changes", "visible"),
    [
        ({}, None),
        ({"attention_mask": torch.ones(2, 6, dtype=torch.bool)}, None),
        ({"q_length": 2, "q_offset": 4}, None),
        ({"q_length": 1, "q_offset": 5}, None),
        ({"q_length": 1, "q_offset": torch.tensor(5)}, None),
        ({"local_size": 7}, None),
        ({"q_length": 1, "q_offset": 2}, 2 * 3),  # a static cache whose end is still empty
        ({"q_length": 2}, 2 * (1 + 2)),  # top-left: not what the kernels' causal flag means
        ({"attention_mask": torch.tensor([[1] * 6, [1] * 5 + [0]]).bool()}, 21 + 20),
        ({"attention_mask": torch.ones(2, 4, dtype=torch.bool)}, 2 * (1 + 2 + 3 + 4 + 4 + 4)),
        ({"allow_is_causal_skip": False}, 2 * 21),
    ],
)
def test_the_mask_is_left_out_exactly_where_the_kernels_express_it(changes, visible):
    sizes = {"batch_size": 2, "q_length": 6, "kv_length": 6}
    mask = integration.attention_mask(**(sizes | changes))
    assert (mask if mask is None else int(mask.sum())) == visible
