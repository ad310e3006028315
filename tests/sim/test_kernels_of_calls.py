"""The kernels that ship besides those of plain dense calls, and those of every head dimension that
are chosen over a KV cache, on the CPU. They run problems for which they are chosen, and are correct
by the rule used on a GPU."""

import itertools

import pytest
import tiers
import torch
from problems import SHAPES, problem
from serving import check, contiguous, paged, run

from flashcute import heuristics, shipped, sim
from flashcute.config import HEAD_DIMS, MASKS
from flashcute.jit.abi import Splits
from flashcute.testing import check_forward

DENSE = set(heuristics.shipped_configs())
SHIPPED = [
    config
    for config in shipped.instantiations().values()
    if config.kind == "fwd" and config not in DENSE and tiers.covers(config)
]


def over_a_cache(head_dims, masks, rows):
    """Yields the configurations chosen for ``rows`` rows over a cache, contiguous and in pages."""
    for d, mask, m, page_size, parts in itertools.product(head_dims, masks, rows, (0, 16), (0, 1)):
        window = (100, 0) if mask == "local" else None
        of_cache = {"window": window, "cache": True, "page_size": page_size, "num_splits": parts}
        asked = heuristics.FwdProblem("bf16", mask == "causal", 4, m, 8192, 1, 1, d, **of_cache)
        yield heuristics.choose_fwd(asked, (9, 0))


# A CTA of one consumer warpgroup that has an SM to itself: no raise of registers is left for it.
DECODING = over_a_cache((64, 128, 192, 256), ("none", "causal"), (8,))
DECODING = [config for config in DECODING if config.min_ctas == 1]
CACHED = DECODING + ([*over_a_cache(HEAD_DIMS, MASKS, (8, 128))] if tiers.everything else [])
CACHED = list(dict.fromkeys(CACHED))
CONFIGS = list(dict.fromkeys(SHIPPED + CACHED))
COMPILED = [(config, "none") for config in CONFIGS]
PAGED = [config for config in CONFIGS if config.paged]
CONTIGUOUS = [config for config in CONFIGS if config.arch == 90 and not config.paged]
# Lengths of queries and keys: decoding, speculative tokens, a prefill chunk, no queries, no keys;
# the keys are whole blocks, none, or some more than whole blocks.
BATCH = (1, 3, 0, 17, 2, 1), (200, 77, 150, 256, 0, 129)
# (tokens of a page, query heads of a key head, most parts of a tile)
CACHES = ((1, 8, 3), (3, 7, 1), (16, 7, 200), (64, 8, 2), (128, 7, 3), (256, 8, 5))


def each(configs):
    return pytest.mark.parametrize("config", configs, ids=lambda c: c.full_name)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none"])
    return sim.build_kernels(COMPILED)


def options_of(config):
    options = {"softcap": 1.5} if config.softcap else {}
    return options | ({"window_size": (40, 10)} if config.mask == "local" else {})


@each([config for config in SHIPPED if not config.paged])
def test_dense_calls(config):
    options = options_of(config)
    for i, (name, shape) in enumerate(SHAPES.items()):
        q, k, v = problem(config, shape)
        more = {"seed": i, "copy_mode": sim.COPY_MODES[i % 3], "sms": 2}
        packs = shape[3] > shape[4]
        result = sim.run_fwd(q, k, v, config, pack_heads=packs, **more, **options)
        assert result.verdict == "pass", f"{name}: {result.message}"
        causal = config.mask == "causal"
        check_forward(result.out, result.lse, q, k, v, causal=causal, **options)


@each(PAGED)
def test_pages(config):
    options = options_of(config)
    for seed, (page_size, heads, splits) in enumerate(CACHES):
        cache = paged(config, BATCH, page_size, heads, 1, seed=seed, heads_first=seed % 2 > 0)
        more = {"seed": seed, "copy_mode": sim.COPY_MODES[seed % 3], **options}
        check(run(config, cache, Splits(splits), pack_heads=True, **more), config, cache, **options)


@each(CONTIGUOUS)
def test_contiguous_cache(config):
    options = options_of(config)
    for seed, (_, heads, splits) in enumerate(CACHES[:3]):
        pads = (0, 7, 33, 0, 5, 1) if seed > 0 else None
        cache = contiguous(config, BATCH, heads, 1, seed=seed, leftpad=pads)
        more = {"seed": seed, "copy_mode": sim.COPY_MODES[seed % 3], **options}
        check(run(config, cache, Splits(splits), pack_heads=True, **more), config, cache, **options)


@each(CACHED)
def test_no_false_alarm_under_many_schedules(config):
    options = options_of(config)
    make = (lambda *x: paged(*x, 3, 8, 1)) if config.paged else (lambda *x: contiguous(*x, 8, 1))
    cache = make(config, ((1, 2), (130, 70)))
    first = None
    for seed in range(30):
        more = {"seed": seed, "copy_mode": sim.COPY_MODES[seed % 3], **options}
        result = run(config, cache, Splits(2), pack_heads=True, **more)
        assert result.verdict == "pass", f"seed {seed}: {result.message}"
        first = first or result
        assert torch.equal(result.out, first.out), f"seed {seed}"
        assert torch.equal(result.lse, first.lse), f"seed {seed}"
