"""The program that Nsight Compute profiles: a few launches of one problem. Started by ``profile``.

python -m flashcute.profiling.workload '{"config": {...}, "shape": {...}, "launches": 3}'
"""

from __future__ import annotations

import json
import sys

import torch

from .. import benchmarking as bm
from .. import flash_attn_func, heuristics
from ..config import FwdConfig

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def main(argv: list[str]) -> int:
    """Runs the problem on the process's first GPU with the given configuration."""
    settings = json.loads(argv[0])
    config, shape = FwdConfig(**settings["config"]), bm.Shape(**settings["shape"])
    # This process runs one configuration only, so it replaces the heuristics' choice.
    heuristics.choose_fwd = lambda *_: config
    q, k, v = bm.make_qkv(shape, DTYPES[config.dtype], "cuda")
    with torch.no_grad():
        for _ in range(settings["launches"]):
            flash_attn_func(q, k, v, causal=shape.causal)
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
