"""Record what a GPU computes, so that the simulator can be compared with it where there is none.

    python tools/record_gpu_outputs.py --out tests/sim/data

One .npz file for each configuration of :data:`RECORDED`: the inputs and outputs of one launch as
bit patterns, and the machine that made them.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import flashcute
from flashcute import benchmarking, heuristics

# (dtype, head dimension of the tensors, causal, b, seqlen_q, seqlen_k, h, h_k): both dtypes, both
# masks, one and two stages, Q in registers and not, tile edges, GQA and a padded head dimension.
RECORDED = (
    ("bf16", 64, False, 1, 130, 193, 2, 1),
    ("fp16", 128, True, 1, 129, 200, 2, 2),
    ("bf16", 88, True, 1, 100, 161, 2, 1),
    ("fp16", 192, False, 1, 70, 130, 1, 1),
)
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def bits(x: torch.Tensor) -> np.ndarray:
    """The 16-bit patterns of a tensor, which NumPy has no bfloat16 for."""
    return x.contiguous().cpu().view(torch.int16).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    machine = json.dumps(benchmarking.machine_info())
    for dtype, d, causal, b, seqlen_q, seqlen_k, h, h_k in RECORDED:
        shape = benchmarking.Shape(b, seqlen_q, seqlen_k, h, h_k, d, causal)
        q, k, v = benchmarking.make_qkv(shape, TORCH_DTYPES[dtype], "cuda", seed=d)
        out, lse, _ = flashcute.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
        problem = heuristics.FwdProblem(dtype, causal, b, seqlen_q, seqlen_k, h, h_k, d)
        config = heuristics.choose_fwd(problem, torch.cuda.get_device_capability())
        np.savez_compressed(
            args.out / f"{config.name}_d{d}.npz",
            q=bits(q),
            k=bits(k),
            v=bits(v),
            out=bits(out),
            lse=lse.cpu().numpy(),
            config=config.full_name,
            machine=machine,
        )
        print(f"{config.full_name}: d = {d}, {seqlen_q} x {seqlen_k}")


if __name__ == "__main__":
    main()
