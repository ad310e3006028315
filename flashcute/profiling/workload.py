"""The program that Nsight Compute profiles: a few calls of one problem. Started by ``profile``.

The last call is between the start and the stop of the CUDA runtime's profiler control.

python -m flashcute.profiling.workload '{"config": {...}, "shape": {...}, "calls": 3}'
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch

from .. import benchmarking as bm
from .. import flash_attn_func, flash_attn_with_kvcache, heuristics
from ..bench.serving import Serving
from ..config import BwdConfig, BwdTile, FwdConfig

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _forward(config: FwdConfig, shape: bm.Shape) -> Callable[[], object]:
    heuristics.choose_fwd = lambda *_: config
    q, k, v = bm.make_qkv(shape, DTYPES[config.dtype], "cuda")
    return lambda: flash_attn_func(q, k, v, causal=shape.causal)


def _over_cache(config: FwdConfig, shape: Serving) -> Callable[[], object]:
    """Makes a call over a cache that is full, with its pages in random order."""
    heuristics.choose_fwd = lambda *_: config
    q, k, v = bm.make_qkv(shape, DTYPES[config.dtype], "cuda")
    lengths = torch.full((shape.b,), shape.seqlen_k, dtype=torch.int32, device=q.device)
    table = None
    if shape.page_size:
        k, v = (x.view(-1, shape.page_size, *x.shape[2:]) for x in (k, v))
        order = torch.randperm(k.shape[0], generator=torch.Generator().manual_seed(3))
        table = order.to(torch.int32).view(shape.b, -1).to(q.device)
    options = {"cache_seqlens": lengths, "block_table": table, "causal": shape.causal}
    return lambda: flash_attn_with_kvcache(q, k, v, **options)


def _backward(config: BwdConfig, shape: bm.Shape) -> Callable[[], object]:
    """Runs a forward, and makes a call that computes its gradients."""
    heuristics.choose_bwd = lambda *_, **__: config
    dtype = DTYPES[config.dtype]
    inputs = [x.requires_grad_() for x in bm.make_qkv(shape, dtype, "cuda")]
    dout, _, _ = bm.make_qkv(shape, dtype, "cuda", seed=1)
    out = flash_attn_func(*inputs, causal=shape.causal)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def _call(fields: dict, shape: dict) -> Callable[[], object]:
    """Makes a call from the fields of a configuration and of a shape."""
    if "dkv" in fields:
        tiles = {name: BwdTile(**fields[name]) for name in ("dq", "dkv")}
        return _backward(BwdConfig(**fields | tiles), bm.Shape(**shape))
    if "page_size" in shape:
        return _over_cache(FwdConfig(**fields), Serving(**shape))
    return _forward(FwdConfig(**fields), bm.Shape(**shape))


def main(argv: list[str]) -> int:
    """Runs the problem on the process's first GPU with the given configuration.

    This process runs one configuration only, so it replaces the heuristics' choice.
    """
    settings = json.loads(argv[0])
    call = _call(settings["config"], settings["shape"])
    for _ in range(settings["calls"] - 1):
        call()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
