"""Models' shapes are sound and measurable, and small versions keep what is special about them."""

from __future__ import annotations

import pytest

from flashcute import heuristics
from flashcute.bench import models, options


@pytest.mark.parametrize("name", models.MODELS)
def test_a_shape_is_one_that_kernels_take(name):
    shape = models.MODELS[name]
    assert shape.h % shape.h_k == 0
    assert shape.d % 8 == 0 and heuristics.instantiated_head_dim(shape.d) >= shape.d
    assert shape.seqlen_q <= shape.seqlen_k or not shape.causal  # no row without a key
    assert shape.b * shape.seqlen_q <= 18_000
    # A call takes between some microseconds and some milliseconds of a GPU of 700 TFLOP/s.
    assert 1e9 < shape.flops < 1e13


def test_every_kind_of_model_is_there():
    shapes = models.MODELS.values()
    assert len(models.MODELS) >= 30
    assert {32, 40, 64, 72, 80, 96, 128, 160, 256} <= {shape.d for shape in shapes}
    assert {shape.h // shape.h_k for shape in shapes} >= {1, 4, 5, 7, 8, 71}
    assert any(shape.seqlen_q > shape.seqlen_k for shape in shapes)  # cross attention
    assert any(shape.seqlen_q < 16 for shape in shapes)
    assert any(shape.seqlen_q % 8 for shape in shapes)


def test_models_are_selected_by_part_of_their_names():
    assert models.select(["models"]) == models.MODELS
    assert list(models.select(["llama-3-8b", "gpt2"])) == [
        *("gpt2-1k", "llama-3-8b-2k", "llama-3-8b-8k")
    ]
    assert models.select([]) == {}
    assert models.select(["options"]) == options.OPTIONS
    assert list(models.select(["sinks-d64", "gpt2"])) == [
        *("gpt2-1k", "sinks-d64", "sinks-d64-grouped")
    ]
    with pytest.raises(ValueError, match="part of the name of one of these, got 'lama4'"):
        models.select(["llama", "lama4"])


@pytest.mark.parametrize("name", models.MODELS)
def test_a_shape_made_small_keeps_its_kind(name):
    shape = models.MODELS[name]
    small = models.shrink(shape, 64)
    kind = ("h", "h_k", "d", "causal")
    assert [getattr(small, x) for x in kind] == [getattr(shape, x) for x in kind]
    assert max(small.seqlen_q, small.seqlen_k) <= 64
    assert small.b * small.seqlen_q <= 64
    assert (small.seqlen_q < small.seqlen_k) == (shape.seqlen_q < shape.seqlen_k)
    assert models.shrink(shape, 1 << 20) == shape


def test_the_batch_and_a_few_queries_are_kept_where_they_fit():
    small = models.shrink(models.MODELS["verify-4-of-4k"], 64)
    assert (small.b, small.seqlen_q, small.seqlen_k) == (16, 4, 64)
