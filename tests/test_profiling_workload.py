"""What runs under ncu: the given configuration, whatever the heuristics would say, that often."""

from __future__ import annotations

import dataclasses
import json

from flashcute import benchmarking as bm
from flashcute import heuristics
from flashcute.profiling import workload

CONFIG = heuristics.fwd_config("fp16", 32, True, (8, 0))
SHAPE = bm.Shape(1, 8, 16, 2, 1, 32, causal=True)


def test_every_launch_has_the_configuration_and_the_shape(monkeypatch):
    calls = []

    def attention(q, k, v, causal):
        problem = heuristics.FwdProblem("bf16", False, 9, 9, 9, 9, 9, 256)
        calls.append((q, k, v, causal, heuristics.choose_fwd(problem, (9, 0), 132)))

    monkeypatch.setattr(heuristics, "choose_fwd", heuristics.choose_fwd)  # put back afterwards
    monkeypatch.setattr(workload, "flash_attn_func", attention)
    monkeypatch.setattr(workload.torch.cuda, "synchronize", lambda: None)
    on_cpu = bm.make_qkv
    monkeypatch.setattr(bm, "make_qkv", lambda shape, dtype, device: on_cpu(shape, dtype, "cpu"))
    settings = {"config": dataclasses.asdict(CONFIG), "shape": dataclasses.asdict(SHAPE)}
    assert workload.main([json.dumps(settings | {"launches": 3})]) == 0
    assert len(calls) == 3
    for q, k, _, causal, config in calls:
        assert config == CONFIG
        assert (tuple(q.shape), tuple(k.shape), causal) == ((1, 8, 2, 32), (1, 16, 1, 32), True)
        assert q.dtype == workload.DTYPES["fp16"]
