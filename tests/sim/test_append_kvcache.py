"""Appends of new keys and values to a KV cache, and rotation, in both kernel classes."""

import dataclasses
import itertools

import mutants_serving
import pytest
import tiers
import torch
from mutants import TWO_STAGES
from mutants_sm90 import ASKING, DECODING
from planted import build_mutants

from flashcute import sim
from flashcute.jit.abi import Rotary, Splits
from flashcute.reference_kvcache import attention_kvcache_ref
from flashcute.rotary import apply_rotary_emb
from flashcute.testing import check_forward

CONFIGS = TWO_STAGES, ASKING, DECODING  # in all but ASKING the CTAs plan for themselves
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
PAGED = [dataclasses.replace(config, paged=True) for config in CONFIGS]
COMPILED = [(config, "none") for config in (*CONFIGS, *PAGED)]
PLANTED = tiers.faults(mutants_serving.OF_APPENDS)
B, H, H_K, NEW, QUERIES = 3, 4, 2, 3, 2
LENGTHS = torch.tensor([30, 0, 63], dtype=torch.int32)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none"])
    return sim.build_kernels(COMPILED)


def inputs(config, seed):
    generator = torch.Generator().manual_seed(seed)
    d = config.head_dim - 8
    shapes = (B, QUERIES, H, d), (B, NEW, H_K, d), (B, NEW, H_K, d)
    tensors = [torch.randn(x, generator=generator).to(DTYPES[config.dtype]) for x in shapes]
    return generator, tensors


def cache_of(config, generator, paged):
    """Returns the cache's keys and values, and the arguments of the reference and of the simulator
    that say where the tokens are."""
    d, dtype = config.head_dim - 8, DTYPES[config.dtype]
    shape = (14, 16, H_K, d) if paged else (5, 80, H_K, d)
    cache = [torch.randn(shape, generator=generator).to(dtype) for _ in "kv"]
    if paged:
        table = torch.randperm(12, generator=generator).view(3, 4).int()
        # The last column is a page that no token reaches.
        return cache, {
            "block_table": torch.cat((table, torch.full((3, 1), 13, dtype=torch.int32)), 1)
        }
    entries = torch.tensor([4, 0, 2], dtype=torch.int32)
    return cache, {"cache_batch_idx": entries}


def tables(config, generator, rotary_dim):
    shape = 100, rotary_dim // 2
    angles = 6.3 * torch.rand(shape, generator=generator)
    return [x.to(DTYPES[config.dtype]) for x in (angles.cos(), angles.sin())]


def run(config, q, new, cache, where, lengths, **options):
    config = dataclasses.replace(config, paged="block_table" in where)
    tensors = dict(zip(("q", "k", "v"), (q.flatten(0, 1), *cache), strict=True))
    tensors |= dict(zip(("k_new", "v_new"), new, strict=True), seqused_k=lengths) | where
    result = sim.run_serving(config=config, max_seqlen_q=QUERIES, sms=2, **tensors, **options)
    assert result.verdict == "pass", result.message
    return result


def assert_rotated(found, q, cos, sin, lengths, causal, interleaved=False):
    """Asserts that queries are rotated by their positions: under a causal mask query i has that of
    new token i, else all have that of the first new token."""
    ulp = torch.finfo(q.dtype).eps
    for i, n in enumerate(lengths.tolist()):
        step = 1 if causal else 0
        for j in range(q.shape[1]):
            expected = apply_rotary_emb(
                q[i : i + 1, j : j + 1], cos, sin, interleaved, seqlen_offsets=n + j * step
            )
            row = found[i : i + 1, j : j + 1]
            torch.testing.assert_close(row, expected, rtol=ulp, atol=ulp)


# (rotary_dim, interleaved): the tables are read without vector loads, or with them.
ROTATIONS = (0, False), (12, False), (16, False), (24, True), (16, True)


@pytest.mark.parametrize("rotation", ROTATIONS, ids=str)
@pytest.mark.parametrize("paged", [False, True], ids=["entries", "pages"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_appended_tokens_are_in_the_cache_and_seen(config, paged, rotation):
    rotary_dim, interleaved = rotation
    generator, (q, *new) = inputs(config, rotary_dim)
    cache, where = cache_of(config, generator, paged)
    causal = config.mask == "causal"
    options, rotated = {}, {}
    if rotary_dim:
        cos, sin = tables(config, generator, rotary_dim)
        options = {"rotary_cos": cos, "rotary_sin": sin}
        rotated = {"rotary": Rotary(int(causal), interleaved)}
    # Every launch runs on the cache that the one before left, and writes the same again.
    splits = Splits(3 if paged else 1)
    result = run(
        config, q, new, cache, where, LENGTHS, splits=splits, launches=2, **options, **rotated
    )
    expected = attention_kvcache_ref(
        q, *cache, *new, **options, rotary_interleaved=interleaved,
        cache_seqlens=LENGTHS, **where, causal=causal,
    )  # fmt: skip
    assert torch.equal(result.outputs["v"], expected.v_cache)
    # A fused multiply-add may round differently than two operations.
    ulp = torch.finfo(q.dtype).eps
    torch.testing.assert_close(result.outputs["k"], expected.k_cache, rtol=ulp, atol=ulp)
    changed = (result.outputs["k"] != cache[0]).any(-1).any(-1).sum()
    assert changed == B * NEW
    queries = q
    if rotary_dim:
        queries = result.outputs["q"].view_as(q)
        assert_rotated(queries, q, cos, sin, LENGTHS, causal, interleaved)
    for i in range(B):
        n = int(LENGTHS[i]) + NEW
        if paged:
            seen = [x[where["block_table"][i].long()].flatten(0, 1)[None, :n] for x in expected[2:]]
        else:
            seen = [x[int(where["cache_batch_idx"][i])][None, :n] for x in expected[2:]]
        rows = slice(i * QUERIES, (i + 1) * QUERIES)
        out, lse = result.out[rows][None], result.lse[:, rows][None]
        check_forward(out, lse, queries[i : i + 1], *seen, causal=causal)


@pytest.mark.parametrize("rotary_dim", [0, 12])
@pytest.mark.parametrize("paged", [False, True], ids=["entries", "pages"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_a_layer_that_shares_a_plan_appends_bit_for_bit(config, paged, rotary_dim):
    """A layer with another cache, other queries and other new tokens takes over a plan; the kernel
    of the append then makes none."""
    _, first = inputs(config, 1)
    generator, second = inputs(config, 2)
    cache, where = cache_of(config, generator, paged)
    other, _ = cache_of(config, generator, paged)
    options = {"splits": Splits(3)}
    if rotary_dim:
        options |= zip(("rotary_cos", "rotary_sin"), tables(config, generator, 12), strict=True)
        options["rotary"] = Rotary(1, False)
    made = run(config, first[0], first[1:], cache, where, LENGTHS, **options).outputs["plan"]
    expected = run(config, second[0], second[1:], other, where, LENGTHS, **options)
    result = run(
        config, second[0], second[1:], other, where, LENGTHS, plan=made, launches=2, **options
    )
    names = {"o", "softmax_lse", "k", "v"} | ({"q"} if rotary_dim else set())
    assert names <= set(result.outputs) and "plan" not in result.outputs
    for name in names:
        assert torch.equal(result.outputs[name], expected.outputs[name]), name
    assert not torch.equal(result.outputs["k"], other[0])


@pytest.mark.parametrize("paged", [False, True], ids=["entries", "pages"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_tokens_without_a_place_are_dropped(config, paged):
    """Tokens at lengths, entries and pages that do not exist are dropped, and the sequence beside
    them is right."""
    generator, (q, *new) = inputs(config, 7)
    cache, where = cache_of(config, generator, paged)
    (place, index), room = *where.items(), 80
    nowhere = index.clone()
    nowhere[1:] = torch.tensor([[-1], [2**31 - 1]] if paged else [-1, 2**31 - 1])
    for lengths, numbers in (
        ((30, room - 1, -2), index),
        ((30, 2**31 - 1, -(2**31)), index),
        ((30, 40, 40), nowhere),
    ):
        result = run(config, q, new, cache, {place: numbers}, torch.tensor(lengths).int())
        for name, before, given in zip("kv", cache, new, strict=True):
            expected = before.clone()
            for i, j in itertools.product(range(B), range(NEW)):
                token = lengths[i] + j
                if not 0 <= token < room:
                    continue
                page = int(numbers[i, token // 16] if paged else numbers[i])
                if 0 <= page < len(expected):
                    expected[page, token % 16 if paged else token] = given[i, j]
            assert torch.equal(result.outputs[name], expected), (name, lengths)


@pytest.mark.parametrize("paged", [False, True], ids=["entries", "pages"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_one_length_of_all_sequences_bit_for_bit(config, paged):
    """The host knows the length, and no tensor holds it."""
    generator, (q, *new) = inputs(config, 3)
    cache, where = cache_of(config, generator, paged)
    cos, sin = tables(config, generator, 12)
    options = {"rotary_cos": cos, "rotary_sin": sin, "splits": Splits(3), "rotary": Rotary(1, True)}
    expected = run(config, q, new, cache, where, torch.full((B,), 37, dtype=torch.int32), **options)
    result = run(config, q, new, cache, where, 37, **options)
    for name in ("o", "softmax_lse", "k", "v", "q"):
        assert torch.equal(result.outputs[name], expected.outputs[name]), name


# (batch, query heads, key heads, new tokens, queries, rotary_dim): a row of more vectors than a CTA
# has threads; no new tokens, so that only queries are rotated; more rows than there are CTAs.
SIZES = (2, 90, 90, 150, 1, 0), (2, 36, 36, 3, 2, 16), (3, 4, 2, 0, 2, 16), (1, 2, 1, 300, 2, 16)


def append(config, size, interleaved=False, **options):
    """Runs an append. Returns the result, and what the test compares it with."""
    b, h, h_k, new, queries, rotary_dim = size
    generator = torch.Generator().manual_seed(5)
    d, dtype = config.head_dim - 8, DTYPES[config.dtype]
    shapes = (b, queries, h, d), *((b, new, h_k, d),) * 2, *((b + 1, 70 + new, h_k, d),) * 2
    q, *tensors = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    (k_new, v_new), cache = tensors[:2], tensors[2:]
    lengths = torch.tensor([30, 0, 63][:b], dtype=torch.int32)
    causal = config.mask == "causal"
    rotation = {}
    if rotary_dim:
        angles = 6.3 * torch.rand((70 + new, rotary_dim // 2), generator=generator)
        rotation = {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
        options["rotary"] = Rotary(int(causal), interleaved)
    tensors = {"q": q.flatten(0, 1), "k": cache[0], "v": cache[1], "seqused_k": lengths}
    tensors |= {"k_new": k_new, "v_new": v_new} | rotation
    result = sim.run_serving(config=config, max_seqlen_q=queries, sms=2, **tensors, **options)
    expected = attention_kvcache_ref(
        q, *cache, k_new, v_new, **rotation, rotary_interleaved=interleaved,
        cache_seqlens=lengths, causal=causal,
    )  # fmt: skip
    return result, expected, q, rotation, lengths


def assert_appended(config, size, interleaved=False, **options):
    result, expected, q, rotation, lengths = append(config, size, interleaved, **options)
    assert result.verdict == "pass", result.message
    assert torch.equal(result.outputs["v"], expected.v_cache)
    ulp = torch.finfo(q.dtype).eps
    torch.testing.assert_close(result.outputs["k"], expected.k_cache, rtol=ulp, atol=ulp)
    if rotation:
        found = result.outputs["q"].view_as(q)
        causal = config.mask == "causal"
        assert_rotated(found, q, *rotation.values(), lengths, causal, interleaved)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_sizes(config, size):
    assert_appended(config, size)


# The rotation's tables have three vectors a row.
WIDE = (2, 4, 2, 3, 2, 48)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("config", CONFIGS[1:], ids=lambda c: c.full_name)
def test_wide_rotations(config, interleaved):
    assert_appended(config, WIDE, interleaved)


@pytest.fixture(scope="module")
def mutants(tmp_path_factory):
    return build_mutants(PLANTED, tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize("mutant", PLANTED, ids=lambda m: m.name)
def test_mutant_is_found(mutant, mutants):
    wide = WIDE if mutant.config.head_dim > 48 else SIZES[1]
    for size, interleaved in (*((size, False) for size in SIZES), (wide, True)):
        try:
            kernel = mutants[mutant.name]
            assert_appended(mutant.config, size, interleaved, kernel=kernel, timeout=120)
        except AssertionError:
            return
    pytest.fail("no size found it")
