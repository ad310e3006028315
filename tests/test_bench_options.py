"""Options' shapes are sound, their FLOPs count each pair, and small versions keep the options."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

from flashcute import heuristics
from flashcute.bench import models, options
from flashcute.bench.options import OPTIONS, Option

SMALL = Option(2, 9, 9, 4, 2, 8, causal=False)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_shape_is_one_that_kernels_take(name):
    shape = OPTIONS[name]
    assert shape.h % shape.h_k == 0
    assert heuristics.instantiated_head_dim(shape.d) == shape.d
    assert shape.seqlen_q == shape.seqlen_k
    assert not (shape.causal and shape.window != (-1, -1))
    asked = (shape.window != (-1, -1), shape.sinks, shape.softcap, shape.alibi, shape.dropout)
    asked += (shape.lengths,)
    assert sum(map(bool, asked)) == 1
    families = ("window", "sinks", "softcap", "alibi", "dropout", "ragged")
    assert families[list(map(bool, asked)).index(True)] == name.partition("-")[0]
    if shape.lengths:
        assert (shape.b, shape.seqlen_q) == (len(shape.lengths), max(shape.lengths))
        assert min(shape.lengths) > 0
    # A call takes between some microseconds and some milliseconds of a GPU of 700 TFLOP/s.
    assert 1e10 < shape.flops < 3e12


def test_names_are_not_those_of_models():
    assert not OPTIONS.keys() & models.MODELS.keys()


def test_batches_are_what_their_names_say():
    lengths = {name: shape.lengths for name, shape in OPTIONS.items() if shape.lengths}
    documents = sorted(lengths["ragged-64-documents-d64-full"])
    assert len(documents) == 64 and 400 < documents[32] < 600 and documents[-1] > 2000
    long = lengths["ragged-8-of-4k-d128-causal"]
    assert len(long) == 8 and all(3584 <= x <= 4608 for x in long)
    short = lengths["ragged-512-short-d64-full"]
    assert len(short) == 512 and all(32 <= x <= 256 for x in short)
    assert sorted(lengths["ragged-16k-and-63-of-128-d64-full"]) == [128] * 63 + [16384]
    for name, value in lengths.items():
        if name.endswith("-d64-full"):
            assert value == lengths[name.replace("-d64-full", "-d128-causal")]


def test_batches_are_the_same_in_every_process():
    """The hash of strings differs from process to process; the lengths must not."""
    text = "import json, flashcute.bench.options as o; print(json.dumps(o._lengths()))"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    made = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, check=True, env=environment
    )
    assert json.loads(made.stdout) == {name: list(x) for name, x in options._lengths().items()}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (0, 0), (2, 4), (-1, 2), (5, -1), (99, 99)])
@pytest.mark.parametrize("lengths", [(), (9, 1, 4)])
def test_flops_count_the_pairs_that_the_mask_leaves(causal, window, lengths):
    shape = dataclasses.replace(SMALL, causal=causal, window=window, lengths=lengths)
    left, right = window
    pairs = 0
    for length in lengths or (9, 9):
        i, j = torch.arange(length)[:, None], torch.arange(length)
        hidden = (j > i) & causal
        hidden |= (i - j > left) & (left >= 0)
        hidden |= (j - i > right) & (right >= 0)
        pairs += int((~hidden).sum())
    assert shape.flops == 4 * 8 * 4 * pairs


def test_packed_tensors_hold_every_token_once():
    ragged = dataclasses.replace(SMALL, b=3, lengths=(9, 1, 4))
    assert dataclasses.astuple(ragged.tensors) == (1, 14, 14, 4, 2, 8, False)
    assert ragged.bytes() == 2 * 8 * (2 * 14 * 4 + 2 * 14 * 2) + 4 * 14 * 4
    assert dataclasses.astuple(SMALL.tensors) == dataclasses.astuple(SMALL)[:7]
    assert type(ragged.tensors) is type(SMALL.tensors) is models.Shape


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("tokens", [5, 64])
def test_a_shape_made_small_keeps_its_kind(name, tokens):
    shape = OPTIONS[name]
    small = models.shrink(shape, tokens)
    kind = ("h", "h_k", "d", "causal", "sinks", "softcap", "alibi", "dropout")
    assert [getattr(small, x) for x in kind] == [getattr(shape, x) for x in kind]
    assert (sum(small.lengths) or small.b * small.seqlen_q) <= tokens
    for before, after in zip(shape.window, small.window, strict=True):
        assert min(after, 1) == min(before, 1) and after <= before
    if shape.lengths:
        assert (small.b, small.seqlen_q) == (len(small.lengths), max(small.lengths))
        assert min(small.lengths) > 0
        assert (len(set(small.lengths)) == 1) == (len(set(shape.lengths)) == 1) or tokens == 5
    assert small.seqlen_k == small.seqlen_q


def test_what_fits_stays_as_it_is():
    dense = dataclasses.replace(SMALL, window=(3, 0))
    assert models.shrink(dense, 18) == dense
    ragged = dataclasses.replace(SMALL, b=3, lengths=(9, 1, 4))
    assert models.shrink(ragged, 17) == ragged
