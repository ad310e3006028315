"""examples/paged_llama.py on the CPU has the tokens of transformers, with pages of any size."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from paged_llama import NO_PAGE, PagedCache, PagedLlama  # noqa: E402

LENGTHS = (1, 40, 17)
NEW = 12


@pytest.fixture(autouse=True)
def one_thread():
    """Sets one thread, as the model is too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model():
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        vocab_size=200,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.3,
        max_position_embeddings=64,
        attention_bias=True,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def prompts_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(200, (n,), generator=generator) for n in lengths]


def expected(model, prompts):
    """Returns tokens and logits of transformers' generate() for each prompt alone."""
    tokens, logits = [], []
    for prompt in prompts:
        made = model.generate(
            input_ids=prompt[None], attention_mask=torch.ones_like(prompt[None]), pad_token_id=0,
            max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        tokens.append(made.sequences[0, len(prompt) :])
        logits.append(torch.stack(made.logits)[:, 0])
    return torch.stack(tokens), torch.stack(logits, 1)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_tokens_are_those_of_transformers(model, page_size):
    """This holds for the second batch, too, whose pages still have the keys of the first one."""
    cache = PagedCache(model, [n + NEW for n in LENGTHS], page_size, seed=1)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    paged = PagedLlama(model, cache, graph=False)
    for seed, lengths in enumerate((LENGTHS, (1, 9, 3))):
        prompts = prompts_of(lengths, seed)
        marks = []
        tokens, logits = paged.generate(prompts, NEW, lambda marks=marks: marks.append(0))
        wanted, wanted_logits = expected(model, prompts)
        assert torch.equal(tokens, wanted) and tokens.shape == (3, NEW)
        torch.testing.assert_close(logits, wanted_logits, rtol=1e-4, atol=1e-4)
        assert len(marks) == NEW
        assert cache.lengths.tolist() == [n + NEW - 1 for n in lengths]


def test_pages_are_given_while_sequences_grow(model):
    cache = PagedCache(model, (5, 40, 17), 16)
    assert cache.keys.shape == (2, 1 + 3 + 2, 16, 2, 16)
    assert (cache.table == NO_PAGE).all()
    cache.reserve((5, 16, 1))
    first = cache.table.clone()
    assert ((first != NO_PAGE).sum(1) == 1).all()
    cache.reserve((5, 16, 16))
    assert torch.equal(cache.table, first)
    cache.reserve((5, 40, 17))
    assert torch.equal(cache.table[:, 0], first[:, 0])
    given = cache.table[cache.table != NO_PAGE]
    assert sorted(given.tolist()) == list(range(6)) and given.tolist() != list(range(6))
    cache.clear()
    cache.reserve((5, 16, 1))
    assert torch.equal(cache.table, first)
    with pytest.raises(ValueError, match=r"at most 5 tokens of sequence 0, got tokens\[0\]=6"):
        cache.reserve((6, 16, 1))


def test_pages_come_in_an_order_of_the_seed(model):
    tables = []
    for seed in (0, 0, 1):
        cache = PagedCache(model, (50, 50), 1, seed)
        cache.reserve((50, 50))
        tables.append(cache.table)
    assert torch.equal(tables[0], tables[1]) and not torch.equal(tables[0], tables[2])
