"""Tiles and splits of a problem over a KV cache."""

import dataclasses
import itertools

import pytest

from flashcute import heuristics
from flashcute.heuristics import MAX_SPLITS, FwdProblem

H200 = (9, 0)
DECODING = FwdProblem("bf16", True, 1, 1, 8192, 32, 8, 128, cache=True, num_splits=0)


def chosen(problem):
    config = heuristics.choose_fwd(problem, H200)
    return config, heuristics.splits(problem, config)


def test_only_what_asks_for_it_is_split():
    dense = dataclasses.replace(DECODING, cache=False, num_splits=-1)
    assert chosen(dense)[1] == (1, 1, 0)
    assert chosen(dataclasses.replace(DECODING, num_splits=1))[1] == (1, 1, 0)
    assert chosen(dataclasses.replace(DECODING, num_splits=7))[1] == (7, 1, 0)


@pytest.mark.parametrize("room", [0, 1, 100, 8192, 10**7])
def test_splits_fill_the_gpu_and_have_blocks(room):
    config, (most, least_blocks, ctas) = chosen(dataclasses.replace(DECODING, seqlen_k=room))
    assert 1 <= most <= min(MAX_SPLITS, max(room // config.tile_n // least_blocks, 1))
    assert ctas == 132 * config.min_ctas


def test_decoding_takes_one_consumer_and_packed_heads():
    for d, page_size in itertools.product(heuristics.HEAD_DIMS, (0, 1, 16)):
        problem = dataclasses.replace(DECODING, d=d, page_size=page_size)
        config = heuristics.choose_fwd(problem, H200)
        assert (config.tile_m, config.mask) == (64, "none")
        assert config.paged == (page_size > 0)
        assert heuristics.packs_heads(problem, config)
    for seqlen_q, h, h_k in ((17, 32, 8), (1, 128, 1)):  # 68 rows with 4 heads, and 128 rows
        many = dataclasses.replace(DECODING, seqlen_q=seqlen_q, h=h, h_k=h_k)
        config = heuristics.choose_fwd(many, H200)
        assert config.tile_m == 128 and heuristics.packs_heads(many, config)


@pytest.mark.parametrize("d", [64, 128])
def test_few_tiles_of_queries_are_planned_by_ctas(d):
    """CTAs plan up to four tiles a sequence, for equal numbers of queries, in one short wave."""
    sizes = {"b": 4, "seqlen_q": 128, "seqlen_k": 4096, "d": d}
    most = dataclasses.replace(DECODING, **sizes)
    config = heuristics.choose_fwd(most, H200)
    assert (config.tile_m, config.stages, config.mask) == (128, 4, "causal")
    more, any_number = {"b": 1, "seqlen_q": 129}, {"varlen": True}
    others = {"b": 5}, more, {"seqlen_k": 16384}, {"page_size": 16}, any_number, {"num_splits": 7}
    unmeasured = {"d": 96}, {"b": 2, "seqlen_q": 256, "h_k": 32}
    for change in (*others, *unmeasured):
        other = heuristics.choose_fwd(dataclasses.replace(most, **change), H200)
        assert other.stages == 2, change


def test_pages_leave_the_producer_registers():
    """Three consumer warpgroups and the producer of pages would exceed the register file."""
    for d, seqlen_q in itertools.product(heuristics.HEAD_DIMS, (1, 20, 4096)):
        problem = dataclasses.replace(DECODING, d=d, seqlen_q=seqlen_q, page_size=64)
        assert heuristics.choose_fwd(problem, H200).warps <= 8


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9)])
def test_sm80_class_over_a_cache(capability):
    """Few queries have tiles of 64 rows and as many CTAs as fit, more have those of dense calls."""
    for d, rows, page_size in itertools.product((64, 128), (1, 4, 128), (0, 16)):
        problem = dataclasses.replace(DECODING, d=d, seqlen_q=rows, h=8, page_size=page_size)
        config = heuristics.choose_fwd(problem, capability)
        two_tiles = d == 128 and rows > 64 and page_size == 0 and capability == (8, 0)
        keys, stages = (128, 1) if two_tiles else (64, 2)
        assert (config.arch, config.tile_m, config.tile_n, config.stages) == (80, 64, keys, stages)
        room = heuristics.MAX_SMEM_BYTES[capability] + 1024
        assert config.min_ctas * (config.smem_bytes + 1024) <= room
        many = dataclasses.replace(problem, seqlen_q=129)
        assert heuristics.choose_fwd(many, capability).tile_m == 128


def test_few_tiles_at_head_dim_64_have_an_sm_each():
    """Tiles of 64 rows, at most one for each SM, have all stages that two CTAs would share."""
    few = dataclasses.replace(DECODING, h=64, d=64, b=16)

    def chosen(**changes):
        config = heuristics.choose_fwd(dataclasses.replace(few, **changes), H200)
        return config.stages, config.min_ctas

    for change in ({}, {"b": 1}, {"page_size": 16}, {"seqlen_q": 8}, {"h": 8}, {"d": 40}):
        assert chosen(**change) == (4, 1), change
    options = {"window": (100, 0)}, {"softcap": True}, {"alibi": True}
    for change in ({"b": 17}, {"num_splits": 1}, {"num_splits": 7}, *options):
        assert chosen(**change) == (2, 2), change


def test_caches_of_all_sizes_have_the_sm90_class():
    for b, d, page_size in itertools.product((1, 16, 1000), (64, 128), (0, 16)):
        problem = dataclasses.replace(DECODING, b=b, d=d, page_size=page_size)
        assert heuristics.choose_fwd(problem, H200).arch == 90


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("num_splits", [-1, 1, 7])
def test_a_number_of_parts_keeps_the_kernel_in_batches_of_all_sizes(num_splits, d):
    """With a given number of parts a sequence's result does not depend on other sequences."""
    configs = {
        heuristics.choose_fwd(dataclasses.replace(DECODING, d=d, b=b, num_splits=num_splits), H200)
        for b in (1, 16, 1000)
    }
    assert len(configs) == 1


def test_sm80_class(monkeypatch):
    monkeypatch.setenv("FLASHCUTE_ARCH", "80")
    config, split = chosen(dataclasses.replace(DECODING, page_size=16))
    assert (config.arch, config.paged) == (80, True)
    assert split[2] >= 132


def test_only_plain_caches_have_longer_blocks_of_keys_for_two_tiles():
    def chosen(**changes):
        problem = dataclasses.replace(DECODING, **({"h": 128, "h_k": 1} | changes))
        return heuristics.choose_fwd(problem, (8, 0))

    assert (chosen().tile_n, chosen().stages) == (128, 1)
    fewer = {"h": 64}, {"h": 32, "seqlen_q": 2}
    other = {"window": (511, 0), "causal": False}, {"softcap": True}, {"alibi": True}
    for change in (*fewer, *other, {"dropout": True}, {"page_size": 64}):
        config = chosen(**change)
        assert config.stages == 2 and config.tile_n <= 64, change
