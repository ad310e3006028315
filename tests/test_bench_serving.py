"""Shapes over a KV cache: their sizes, bytes, FLOPs and kernels, and which a command selects."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from flashcute import __main__ as main
from flashcute import benchmarking as bm
from flashcute import ops
from flashcute.bench import command, serving
from flashcute.bench.serving import APPENDS, PAGE_SIZES, POINTS, Serving
from flashcute.bench.sweep import Variant
from flashcute.jit import kernels
from flashcute.problem import rounded_length, typical_length

EVERY = {name: shape for points in POINTS.values() for name, shape in points.items()}


def arguments(*given):
    return main._parser().parse_args(["bench", *map(str, given)])


def test_decoding_is_eight_sizes_of_four_kinds_of_heads_and_a_mixed_batch():
    decode = [shape for shape in POINTS["decode"].values() if not shape.decodes]
    assert len(decode) == 32
    found = {(x.h, x.h_k, x.d) for x in decode}
    assert found == {(32, 8, 128), (64, 8, 64), (32, 32, 128), (128, 1, 128)}
    assert len({(x.b, x.seqlen_k, x.seqlen_q) for x in decode}) == 8
    assert all(shape.causal for shape in EVERY.values())
    (mixed,) = (shape for shape in POINTS["decode"].values() if shape.decodes)
    assert (mixed.b - mixed.decodes, mixed.seqlen_q, mixed.seqlen_k) == (8, 512, 8192)
    assert mixed.decodes == 56
    (append,) = POINTS["append"].values()
    assert (append.b, append.seqlen_q, append.seqlen_k, append.h, append.h_k) == (
        16,
        1,
        8192,
        32,
        8,
    )
    for name, shape in POINTS["decode"].items():
        assert shape.decodes or name.startswith(f"{shape.b}x{shape.seqlen_k}-q{shape.seqlen_q}-")


@pytest.mark.parametrize("name", EVERY)
def test_bytes_and_flops(name):
    small = dataclasses.replace(serving.shrink(EVERY[name], 512), h=8, h_k=2, d=16)
    _, k, v = bm.make_qkv(small.tensors, torch.bfloat16, "cpu")
    assert small.cache_bytes == k.nbytes + v.nbytes
    pairs = 0
    for sequence in range(small.b):
        queries = 1 if sequence >= small.b - small.decodes else small.seqlen_q
        rows = torch.arange(queries)[:, None] + small.seqlen_k - queries
        pairs += int((torch.arange(small.seqlen_k) <= rows).sum())
    # By convention FLOPs count half of the square that the diagonal cuts, which leaves out half of
    # the diagonal itself.
    assert small.flops == pytest.approx(4 * 16 * 8 * pairs, rel=0.02)


@pytest.mark.parametrize("name", EVERY)
def test_a_shape_made_small_keeps_its_kind(name):
    shape = EVERY[name]
    small = serving.shrink(shape, 300)
    kind = ("h", "h_k", "d", "causal", "page_size", "append")
    assert [getattr(small, x) for x in kind] == [getattr(shape, x) for x in kind]
    assert (small.seqlen_k, small.b <= 3) == (256, True)
    assert bool(small.decodes) == bool(shape.decodes) and small.decodes < small.b
    assert (small.seqlen_q > 1) == (shape.seqlen_q > 1)
    assert serving.shrink(shape, 1 << 20).seqlen_k == shape.seqlen_k


def kernel_asked_for(shape, num_splits, patch):
    """Returns the kernel's name that the resolver gives for asked_of() of flash_api_fwd.h."""
    asked = []
    gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    patch.setattr(torch.cuda, "get_device_properties", lambda *_: gpu)
    patch.setattr(
        ops.jit,
        "get_kernel",
        lambda config, target: asked.append(config.full_name) or SimpleNamespace(address=1),
    )
    page_size = shape.page_size or (shape.seqlen_k if shape.decodes else 0)
    b, seqlen_q, seqlen_k = rounded_length(shape.b), shape.seqlen_q, shape.seqlen_k
    if shape.decodes:
        total = (shape.b - shape.decodes) * shape.seqlen_q + shape.decodes
        seqlen_q = typical_length(total, shape.b, shape.seqlen_q)
        seqlen_k = typical_length(shape.b * seqlen_k, shape.b, shape.seqlen_k)
    if num_splits:
        b, seqlen_q, seqlen_k = 1, 128 if shape.decodes else shape.seqlen_q, 4096
    problem = ops._Problem(
        device=0,
        dtype=("fp16", "bf16").index("bf16"),
        mask=1,
        b=b,
        seqlen_q=rounded_length(seqlen_q),
        seqlen_k=rounded_length(seqlen_k),
        **{name: getattr(shape, name) for name in ("h", "h_k", "d")},
        cache=1,
        page_size=page_size,
        num_splits=num_splits,
    )
    ops._choose(problem)
    (name,) = asked
    return name


@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("size", PAGE_SIZES)
def test_what_is_built_is_what_calls_ask_for(monkeypatch, num_splits, size):
    built = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(kernels, "find_built", lambda *_: ("cache", None))
    monkeypatch.setattr(
        kernels,
        "build_kernels",
        lambda wanted, *_: built.extend(wanted) or [SimpleNamespace(error=None) for _ in wanted],
    )
    for name, point in EVERY.items():
        shape = dataclasses.replace(point, page_size=size, num_splits=num_splits)
        expected = kernel_asked_for(shape, num_splits, monkeypatch)
        built.clear()
        command.build(command.configs_of([[Variant("bf16", shape)]], "decode"))
        assert [config.full_name for config, _ in built] == [expected], name


def test_points_are_those_asked_for():
    every = serving.points(arguments("--pass", "decode"))
    assert list(every) == list(POINTS["decode"])
    for name, shapes in every.items():
        assert [shape.page_size for shape in shapes] == list(PAGE_SIZES)
        assert all(dataclasses.replace(x, page_size=0) == POINTS["decode"][name] for x in shapes)
    chosen = ("--page-sizes", 64, 0, 64, "--num-splits", 5, "--shapes", "64x4096", "mixed")
    some = serving.points(arguments("--pass", "decode", *chosen))
    assert len(some) == 4 + 1
    for shapes in some.values():
        assert [(shape.page_size, shape.num_splits) for shape in shapes] == [(64, 5), (0, 5)]
    (append,) = serving.points(arguments("--pass", "append", "--page-sizes", 0)).values()
    assert [shape.append for shape in append] == list(APPENDS)
    variants = command._points(arguments("--pass", "append", "--dtypes", "bf16", "fp16"), True)
    assert [len(point) for point in variants] == [2 * len(APPENDS) * len(PAGE_SIZES)]
    assert {variant.model for variant in variants[0]} == {"append-16x8192"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--pass", "decode", "--sustained"), "--pass decode without --sustained, which"),
        (("--pass", "append", "--inputs", "ramp"), "--pass append without --inputs, which"),
        (("--pass", "decode", "--head-dims", 64), "without --head-dims"),
        (("--pass", "decode", "--page-sizes", 48), "that divide 256, or 0 for a contiguous"),
        (("--pass", "decode", "--shapes", "gpt2"), "got 'gpt2'; they are 1x8192-q1-h32/8-d128, "),
        (("--page-sizes", 16), "expected --page-sizes with --pass decode and append only"),
        (("--pass", "bwd", "--num-splits", 2), "append only, got --pass bwd; leave it out"),
        (("--pass", "ring", "--num-splits", 2), "append only, got --pass ring; leave it out"),
        (("--pass", "decode", "--num-splits", 129), "expected 0 <= num_splits <= 128, got num"),
    ],
)
def test_wrong_arguments(monkeypatch, given, message, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main.main(["bench", *map(str, given)]) == 1
    assert message in capsys.readouterr().err


def test_figures_are_bytes_over_time_and_shares_of_the_ceiling():
    shape = Serving(1, 1, 1000, 8, 2, 125, causal=True)
    assert shape.cache_bytes == 10**6
    found = serving.figures(shape, {"flashcute": 0.5, "fa3": 1.0}, {"read_bytes_per_second": 4e12})
    assert found["tb_per_second"] == {"flashcute": 2.0, "fa3": 1.0}
    assert found["percent_of_read"] == {"flashcute": 50.0, "fa3": 25.0}
    assert found["beyond_read_us"] == {"flashcute": 0.25, "fa3": 0.75}
    slow = serving.figures(shape, {"flashcute": 81234.0}, {})
    assert slow == {"cache_bytes": 10**6, "tb_per_second": {"flashcute": 1.231e-05}}
