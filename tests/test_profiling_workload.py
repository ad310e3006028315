"""The workload under ncu runs the given configuration, not the heuristics' choice, as often as
asked."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from flashcute import benchmarking as bm
from flashcute import heuristics
from flashcute.bench.serving import Serving
from flashcute.profiling import workload

CONFIG = heuristics.fwd_config("fp16", 32, True, (8, 0))
SHAPE = bm.Shape(1, 8, 16, 2, 1, 32, causal=True)
PROBLEM = heuristics.FwdProblem("bf16", False, 9, 9, 9, 9, 9, 256)


@pytest.fixture
def events(monkeypatch):
    """Returns a list of "start", "stop" and what a test adds, in order; no GPU is needed."""
    found = []
    for name in ("choose_fwd", "choose_bwd"):
        monkeypatch.setattr(heuristics, name, getattr(heuristics, name))  # put back afterwards
    monkeypatch.setattr(workload.torch.cuda, "synchronize", lambda: None)
    for name in ("start", "stop"):
        monkeypatch.setattr(
            workload.torch.cuda.profiler, name, lambda name=name: found.append(name)
        )
    on_cpu = bm.make_qkv
    monkeypatch.setattr(
        bm, "make_qkv", lambda shape, dtype, _, **seed: on_cpu(shape, dtype, "cpu", **seed)
    )
    return found


def run(config, shape, calls=3):
    settings = {"config": dataclasses.asdict(config), "shape": dataclasses.asdict(shape)}
    assert workload.main([json.dumps(settings | {"calls": calls})]) == 0


def calls_around_the_last(events):
    """Returns the calls; checks that the last one alone is profiled."""
    *before, start, last, stop = events
    assert (start, stop) == ("start", "stop")
    return [*before, last]


def test_every_call_has_the_configuration_and_the_shape(events, monkeypatch):
    def attention(q, k, v, causal):
        events.append((q, k, causal, heuristics.choose_fwd(PROBLEM, (9, 0), 132)))

    monkeypatch.setattr(workload, "flash_attn_func", attention)
    run(CONFIG, SHAPE)
    calls = calls_around_the_last(events)
    assert len(calls) == 3
    for q, k, causal, config in calls:
        assert config == CONFIG
        assert (tuple(q.shape), tuple(k.shape), causal) == ((1, 8, 2, 32), (1, 16, 1, 32), True)
        assert q.dtype == workload.DTYPES["fp16"]


@pytest.mark.parametrize("page_size", [0, 4])
def test_a_call_over_a_cache_reads_all_of_it(events, monkeypatch, page_size):
    attention = workload.flash_attn_with_kvcache
    shape = Serving(3, 1, 16, 2, 1, 32, causal=False, page_size=page_size)
    config = heuristics.choose_fwd(shape.problem("fp16"), (9, 0))

    def over_cache(q, k, v, **options):
        assert heuristics.choose_fwd(PROBLEM, (9, 0), 132) == config
        events.append((k, options))
        out = attention(q, k, v, **options)
        assert out.shape == q.shape == (3, 1, 2, 32)

    monkeypatch.setattr(workload, "flash_attn_with_kvcache", over_cache)
    run(config, shape)
    calls = calls_around_the_last(events)
    assert len(calls) == 3
    for k, options in calls:
        assert options["cache_seqlens"].tolist() == [16, 16, 16]
        table = options["block_table"]
        assert tuple(k.shape) == ((12, 4, 1, 32) if page_size else (3, 16, 1, 32))
        if page_size:
            assert tuple(table.shape) == (3, 4)
            assert sorted(table.flatten().tolist()) == list(range(12))
        else:
            assert table is None


def test_a_backward_is_called_for_all_gradients_of_one_forward(events, monkeypatch):
    config, forward = heuristics.fused_bwd_config("fp16", 32, "causal"), heuristics.choose_fwd
    attention, grad = workload.flash_attn_func, torch.autograd.grad

    def counted(q, k, v, causal):
        events.append("forward")
        assert all(x.requires_grad for x in (q, k, v))
        return attention(q, k, v, causal=causal)

    def gradients(out, inputs, dout, retain_graph):
        assert heuristics.choose_bwd(PROBLEM, (9, 0), 132, every=True) == config
        assert heuristics.choose_fwd is forward
        found = grad(out, inputs, dout, retain_graph=retain_graph)
        events.append([(tuple(x.shape), x.dtype) for x in found])
        assert not torch.equal(inputs[0], dout)

    monkeypatch.setattr(workload, "flash_attn_func", counted)
    monkeypatch.setattr(torch.autograd, "grad", gradients)
    run(config, SHAPE)
    assert events.pop(0) == "forward"
    sizes = [((1, s, h, 32), torch.float16) for s, h in ((8, 2), (16, 1), (16, 1))]
    assert calls_around_the_last(events) == [sizes] * 3
